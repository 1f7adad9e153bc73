"""A type of job (name, arguments, function), and what a running job is given."""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import msgspec

from worker_runtime.jobs.protocol.messages import JobFailed
from worker_runtime.protocol.errors import BerthError

#: Bytes of address space that a job may take beyond what its process has at the start.
DEFAULT_MEMORY_BYTES = 512 * 1024 * 1024
_PASSING_ERRORS = (ConnectionError, TimeoutError)


class JobContext(msgspec.Struct, frozen=True):
    """The running job. `fence` grows with every run of any job:
    pass it on to what the job writes to."""

    job_id: str
    attempt: int
    fence: int
    _send_progress: Callable[[object], None]

    def progress(self, value: object) -> None:
        """Shows the job's progress: anything that fits into 8 KiB of JSON; more is not shown.

        May be called often: at most ten values a second are sent. The last one is kept with a job
        that has failed.
        """
        self._send_progress(value)


class RetryLater(JobFailed, code="JOB_RETRY", retryable=True):
    """The job could not do its work now; it asks for another attempt."""


@dataclass(frozen=True, slots=True, kw_only=True)
class JobType:
    """Describes one type of job. `run` is called in a child process; its return value has to fit
    into JSON."""

    name: str
    arguments: type[msgspec.Struct]
    run: Callable[[Any, JobContext], object]
    memory: int = DEFAULT_MEMORY_BYTES

    def retryable(self, error: BaseException) -> bool:
        """Returns True if another attempt makes sense after this error."""
        return (
            error.retryable if isinstance(error, BerthError) else isinstance(error, _PASSING_ERRORS)
        )
