"""The job of `berth bench own-jobs`, as an application has one; its processes import this."""

from __future__ import annotations

import time

from berth_jobs import job


@job(name="perform", idempotent=True)
def perform(busy: float = 0.0) -> None:
    """Does what a built-in type's job does (`infra.lab.loadtest_job`). `busy`: CPU seconds."""
    if busy:
        until = time.thread_time() + busy
        while time.thread_time() < until:
            pass
