"""Own job types for the chaos run, as an application has them.
Their processes import this module."""

from __future__ import annotations

import asyncio
import os
import time
from typing import Any

from berth_jobs import context, job


@job(idempotent=True, backoff=0.05, max_attempts=1000)
def again(ledger: str, seconds: float) -> None:
    """May run twice."""
    note(ledger, "start")
    time.sleep(seconds)
    note(ledger, "end")


@job
def never(ledger: str, seconds: float) -> None:
    """Must not run twice."""
    note(ledger, "start")
    time.sleep(seconds)
    note(ledger, "end")


@job(idempotent=True, backoff=0.05, max_attempts=1000, concurrency=4)
async def shared(ledger: str, seconds: float) -> None:
    """May run twice, several in one process."""
    note(ledger, "start")
    await asyncio.sleep(seconds)
    note(ledger, "end")


@job(on_failed="own_package.handle", idempotent=True, backoff=0.05, max_attempts=1)
def fail(ledger: str, seconds: float) -> None:
    """Always fails for good."""
    note(ledger, "start")
    time.sleep(seconds)
    raise RuntimeError("as it was asked to")


@job(idempotent=True, backoff=0.05, max_attempts=1000)
def handle(job_id: str, type: str, code: str, detail: str, attempt: int, arguments: Any) -> str:
    """Handles the failure of `fail`."""
    note(arguments["ledger"], f"handled:{job_id}")
    return job_id


def note(ledger: str, mark: str) -> None:
    """Writes once to a file that is open for appending: lines of several processes do not mix."""
    running = context()
    line = f"{mark} {running.job_id} {running.attempt} {running.fence}\n"
    descriptor = os.open(ledger, os.O_WRONLY | os.O_APPEND)
    try:
        os.write(descriptor, line.encode())
    finally:
        os.close(descriptor)
