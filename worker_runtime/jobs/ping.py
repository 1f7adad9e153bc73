"""The job `ping`: shows that a fleet takes jobs, runs them and answers. Operators and benchmarks use it."""

from __future__ import annotations

import os

from worker_runtime.jobs.context import JobContext
from worker_runtime.jobs.registry import JobType
from worker_runtime.protocol import job_work
from worker_runtime.protocol.job_work import Ping, Pong


def ping(arguments: Ping, context: JobContext) -> Pong:
    return Pong(text=arguments.text, pid=os.getpid(), attempt=context.attempt)


PING = JobType(name=job_work.PING.name, arguments=Ping, run=ping)
