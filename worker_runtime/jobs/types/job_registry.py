"""The job `answer_ping`: shows that a fleet takes jobs, runs them and answers. Operators and benchmarks
use it.

The registry of a runner: the jobs that exist, as far as its configuration lets it do them.
"""

from __future__ import annotations

import os

from worker_runtime.jobs.config import RunnerConfig
from worker_runtime.jobs.protocol import catalog
from worker_runtime.jobs.protocol.catalog import PingRunner, RunnerPong
from worker_runtime.jobs.types.job_type import JobContext, JobRegistry, JobType
from worker_runtime.jobs.types.mail import email_job
from worker_runtime.jobs.types.position_snapshot import position_snapshot_job
from worker_runtime.jobs.types.statements import (
    EXPORT_JOB,
    STATEMENT_JOB,
    statement_email_job,
    statement_webhook_job,
)
from worker_runtime.jobs.types.webhook import webhook_job


def answer_ping(arguments: PingRunner, context: JobContext) -> RunnerPong:
    return RunnerPong(text=arguments.text, pid=os.getpid(), attempt=context.attempt)


PING_JOB = JobType(name=catalog.PING.name, arguments=PingRunner, run=answer_ping)


def build_registry(config: RunnerConfig) -> JobRegistry:
    """Webhooks and mails need what only a fleet's runner is given; a user's worker has neither."""
    types = [PING_JOB, STATEMENT_JOB, EXPORT_JOB, position_snapshot_job(config.valkey_url)]
    if config.webhook is not None:
        types += [webhook_job(config.webhook), statement_webhook_job(config.webhook)]
    if config.mail is not None:
        types += [email_job(config.mail), statement_email_job(config.mail)]
    return JobRegistry(*types)
