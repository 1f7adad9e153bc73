"""The registry of a runner: the types of jobs that it knows, by name.

A message only names a job. Nothing that a message says is imported, and arguments are data that must fit the
type's struct.
"""

from __future__ import annotations

import os

import msgspec

from worker_runtime.jobs.config import RunnerConfig
from worker_runtime.jobs.protocol import catalog
from worker_runtime.jobs.protocol.catalog import PingRunner, RunnerPong
from worker_runtime.jobs.protocol.messages import UnknownJob
from worker_runtime.jobs.types.job_type import JobContext, JobType
from worker_runtime.jobs.types.mail import email_job
from worker_runtime.jobs.types.position_snapshot import position_snapshot_job
from worker_runtime.jobs.types.statements import (
    EXPORT_JOB,
    STATEMENT_JOB,
    statement_email_job,
    statement_webhook_job,
)
from worker_runtime.jobs.types.webhook import webhook_job
from worker_runtime.protocol.errors import MalformedMessage


class JobRegistry:
    def __init__(self, *types: JobType) -> None:
        self._types = {kind.name: kind for kind in types}
        # Built in the parent: each fresh child would have to build its own.
        self._decoders = {kind.name: msgspec.json.Decoder(kind.arguments) for kind in types}

    def find(self, name: str) -> JobType:
        """Raises `UnknownJob`."""
        try:
            return self._types[name]
        except KeyError:
            raise UnknownJob(f"no job of this name here: {name[:64]!r}") from None

    def arguments(self, kind: JobType, raw: msgspec.Raw) -> msgspec.Struct:
        """The arguments of one job; raises `MalformedMessage` if they do not fit its type."""
        try:
            return self._decoders[kind.name].decode(raw)
        except msgspec.DecodeError as error:
            raise MalformedMessage(f"arguments of {kind.name}: {error}") from None


def answer_ping(arguments: PingRunner, context: JobContext) -> RunnerPong:
    """The job `ping`: shows that a fleet takes jobs, runs them and answers."""
    return RunnerPong(text=arguments.text, pid=os.getpid(), attempt=context.attempt)


PING_JOB = JobType(name=catalog.PING.name, arguments=PingRunner, run=answer_ping)


def build_registry(config: RunnerConfig) -> JobRegistry:
    """The types that this configuration allows. Only the fleet's runners get what webhooks and mails need."""
    types = [PING_JOB, STATEMENT_JOB, EXPORT_JOB, position_snapshot_job(config.valkey_url)]
    if config.webhook is not None:
        types += [webhook_job(config.webhook), statement_webhook_job(config.webhook)]
    if config.mail is not None:
        types += [email_job(config.mail), statement_email_job(config.mail)]
    return JobRegistry(*types)
