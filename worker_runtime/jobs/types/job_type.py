"""What a running job knows of itself, and what it can tell.

The jobs that a runner knows: a name, the struct of its arguments, and its function.

A message only names a job. Nothing that a message says is imported, and arguments are data that must fit
the struct.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import msgspec

from worker_runtime.jobs.protocol.messages import JobFailed, UnknownJob
from worker_runtime.protocol.errors import BerthError, MalformedMessage


class JobContext(msgspec.Struct, frozen=True):
    """`fence` grows with every run of any job: whoever writes somewhere outside may pass it on."""

    job_id: str
    attempt: int
    fence: int
    _tell: Callable[[object], None]

    def progress(self, value: object) -> None:
        """Shows how far the job is: anything small that fits into JSON. May be called often."""
        self._tell(value)


#: Bytes of address space that a job may take beyond what its process has at the start.
DEFAULT_MEMORY = 512 * 1024 * 1024


class RetryLater(JobFailed):
    """The job could not do its work now; it asks for another attempt."""

    code = "JOB_RETRY"
    retryable = True

    def __init__(self, detail: str = "", *, delay: float | None = None) -> None:
        """`delay` in seconds; None: the job's own delay between attempts."""
        super().__init__(detail)
        self.delay = delay


@dataclass(frozen=True, slots=True, kw_only=True)
class JobType:
    """One type of job. Its function runs in a child process; what it returns has to fit into JSON."""

    name: str
    arguments: type[msgspec.Struct]
    run: Callable[[Any, JobContext], object]
    #: Errors after which another attempt makes sense; a `BerthError` says so itself.
    retry_on: tuple[type[Exception], ...] = (ConnectionError, TimeoutError)
    memory: int = DEFAULT_MEMORY

    def retryable(self, error: BaseException) -> bool:
        if isinstance(error, BerthError):
            return error.retryable
        return isinstance(error, self.retry_on)


class JobRegistry:
    """All types of one runner, by name."""

    def __init__(self, *types: JobType) -> None:
        self._types = {kind.name: kind for kind in types}
        # Built here, in the parent: a fresh child would build its own for its one job.
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

    def names(self) -> list[str]:
        return sorted(self._types)
