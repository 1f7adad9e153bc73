"""Gives a running job its attempt, deadline and fence, its secrets, progress and a logger."""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Mapping
from contextlib import AbstractContextManager
from contextvars import ContextVar
from dataclasses import dataclass, field
from datetime import timedelta
from typing import Any


class RetryLater(Exception):
    """Raise it in a job to ask for another attempt,
    `retry_after` from now if given: seconds, or a `timedelta`."""

    def __init__(self, detail: str = "", *, retry_after: float | timedelta | None = None) -> None:
        super().__init__(detail)
        self.retry_after = retry_after


def _ignore_progress(_value: Any) -> None:
    return None


@dataclass(frozen=True, kw_only=True)
class JobContext:
    """The running job. Outside of a runner it has these defaults,
    so that a job is tested as a function."""

    job_id: str = ""
    #: The type's name with its application, such as `shop/jobs.resize_image`.
    type: str = ""
    #: The number of this run, from 1.
    attempt: int = 1
    #: Grows with every run of any job of the application. Pass it on to what the job writes to: a
    #: store that refuses a smaller one than it has seen is safe from a run that was thought dead.
    fence: int = 0
    #: `time.monotonic()` seconds at which the runner ends this run.
    deadline: float = float("inf")
    #: The secrets that the type names. No others are in this process.
    secrets: Mapping[str, str] = field(default_factory=dict, repr=False)
    #: Is given each value of `progress`.
    send_progress: Callable[[Any], None] = field(default=_ignore_progress, repr=False)

    def progress(self, value: Any) -> None:
        """Shows the job's progress: anything that fits into 8 KiB of JSON; more is not shown.

        May be called often: at most ten values a second are sent. The last one is kept with a job
        that has failed.
        """
        self.send_progress(value)

    def remaining(self) -> float:
        """Returns the seconds until the deadline, at least 0."""
        return max(0.0, self.deadline - time.monotonic())

    @property
    def logger(self) -> logging.LoggerAdapter[logging.Logger]:
        """A logger whose lines go to the job's output, with the job's id and attempt as `extra`."""
        fields = {"job_id": self.job_id, "job_type": self.type, "attempt": self.attempt}
        return logging.LoggerAdapter(logging.getLogger(f"berth_jobs.{self.type or 'job'}"), fields)


_current: ContextVar[JobContext | None] = ContextVar("berth_job", default=None)
_NO_JOB = JobContext()


def context() -> JobContext:
    """Returns the running job's context; outside of a job one whose progress goes nowhere."""
    return _current.get() or _NO_JOB


def use_context(running: JobContext) -> AbstractContextManager[JobContext]:
    """Makes `context()` return `running` inside of the block: for runners and tests."""
    return _ContextBlock(running)


class _ContextBlock:
    """A class, because a generator takes four times as long, for each job."""

    def __init__(self, running: JobContext) -> None:
        self._running = running

    def __enter__(self) -> JobContext:
        self._token = _current.set(self._running)
        return self._running

    def __exit__(self, *failure: object) -> None:
        _current.reset(self._token)
