"""Runs a user's own jobs, beside the user's session in the same worker."""

from __future__ import annotations

import errno
import os

from worker_runtime.jobs.config import RunnerConfig
from worker_runtime.jobs.protocol import keys as job_keys
from worker_runtime.jobs.runner import JobRunner
from worker_runtime.jobs.types.job_registry import build_registry
from worker_runtime.process import kernel
from worker_runtime.process.log import Log
from worker_runtime.protocol.launch import ExitCode, WorkerConfig

#: Seconds. No other runner waits to take over, so a long lease will do: one write in five seconds.
_LEASE = 15.0
#: Orders come first: at 10, the kernel gives a busy session about nine times as much CPU.
_NICE = 10


def run_for_user(config: WorkerConfig, user_id: str, log: Log) -> ExitCode:
    """Runs the user's jobs, one at a time, until there has been none for a while or a signal comes."""
    os.nice(_NICE)
    try:
        kernel.die_first()  # when memory runs out; by size alone the session would die first
    except OSError as error:
        log.warning("oom_score_not_raised", reason=errno.errorcode.get(error.errno or 0, ""))
    runner = RunnerConfig(
        name=config.worker_id,
        node=config.worker_id,
        valkey_url=config.valkey_url,
        tag=job_keys.user_tag(user_id),
        lease=_LEASE,
        idle_exit=config.jobs_idle,
        version=config.version,
        log_level=config.log_level,
    )
    return JobRunner(runner, build_registry(runner), log).run()
