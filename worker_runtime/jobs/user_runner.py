"""The job runner beside a user's session, for that user's own jobs."""

from __future__ import annotations

import errno
import os

from worker_runtime.jobs.config import RunnerConfig
from worker_runtime.jobs.protocol import keys as job_keys
from worker_runtime.jobs.runner import JobRunner
from worker_runtime.jobs.types import job_registry
from worker_runtime.process import kernel
from worker_runtime.process.log import Log
from worker_runtime.protocol.launch import ExitCode, WorkerConfig

#: Seconds. Alone on its queue it needs no quick lease, and so writes once in five seconds only.
_LEASE = 15.0
#: Orders come first: with 10, the kernel gives a session that wants the CPU about nine times as much.
_NICE = 10


def run_for_user(config: WorkerConfig, user_id: str, log: Log) -> ExitCode:
    """Runs the user's jobs, one at a time, until there has been none for a while, or until told to stop."""
    os.nice(_NICE)
    try:
        kernel.die_first()  # by size alone it would be the session, which is larger than most jobs
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
    return JobRunner(runner, job_registry.build_registry(runner), log).run()
