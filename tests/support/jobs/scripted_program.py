"""A runner process with jobs that do what the tests need: `python -m
tests.support.jobs.scripted_program`."""

from __future__ import annotations

import errno
import os
import signal
import subprocess
import sys
import time
from typing import Any

import msgspec

from tests.support.message_signing import SECRETS
from worker_runtime.jobs.__main__ import main
from worker_runtime.jobs.types.job_registry import PING_JOB, JobRegistry
from worker_runtime.jobs.types.job_type import JobContext, JobType, RetryLater
from worker_runtime.jobs.types.position_snapshot import position_snapshot_job


class JobScript(msgspec.Struct, frozen=True, kw_only=True):
    """What a job does. Each start is a line in `ledger`; it waits until the file `until` is
    there."""

    ledger: str = ""
    until: str = ""
    sleeps: float = 0.0
    returns: Any = None
    prints: str = ""
    times: int = 1
    fails: str = ""
    retries: int = 0
    allocates: int = 0
    dies_by: int = 0
    kills_runner: bool = False
    ignores_term: bool = False
    spawns: bool = False
    progress: int | None = None


def perform(script: JobScript, context: JobContext) -> object:
    if script.ignores_term:
        signal.signal(signal.SIGTERM, signal.SIG_IGN)
    grandchild = 0
    if script.spawns:
        grandchild = subprocess.Popen(["sleep", "3600"]).pid  # noqa: S607
    if script.ledger:
        line = f"{context.job_id} {context.attempt} {context.fence} {os.getpid()} {grandchild}\n"
        descriptor = os.open(script.ledger, os.O_WRONLY | os.O_APPEND | os.O_CREAT)
        os.write(descriptor, line.encode())
        os.close(descriptor)
    if script.progress is not None:
        context.progress(script.progress)
    if script.prints:
        sys.stdout.write(script.prints * script.times)
        os.write(2, b"[to standard error]")
    while script.until and not os.path.exists(script.until):
        time.sleep(0.002)
    time.sleep(script.sleeps)
    if script.allocates:
        bytearray(script.allocates)
    if script.kills_runner:
        os.kill(os.getppid(), signal.SIGKILL)
    if script.dies_by:
        os.kill(os.getpid(), script.dies_by)
    if context.attempt <= script.retries:
        raise RetryLater("not yet", retry_after=0.0)
    if script.fails:
        raise RuntimeError(script.fails)
    return script.returns


SCRIPTED = JobType(name="scripted", arguments=JobScript, run=perform, memory=64 * 1024 * 1024)

_fork = os.fork


def fork_if_there_is_room() -> int:
    """A fork as it fails on a host without room for another process, while the file `BERTH_FULL` is
    there."""
    if os.path.exists(os.environ["BERTH_FULL"]):
        raise BlockingIOError(errno.EAGAIN, "no room")
    return _fork()


if __name__ == "__main__":
    if "BERTH_FULL" in os.environ:
        os.fork = fork_if_there_is_room
    types = [SCRIPTED, PING_JOB]
    if "BERTH_SNAPSHOTS" in os.environ:
        types.append(
            position_snapshot_job(
                os.environ["BERTH_SNAPSHOTS"], lambda: SECRETS.for_worker("alice", 1)
            )
        )
    sys.exit(main(JobRegistry(*types)))
