"""The child that runs an application's own jobs: one at a time, or several of one async type.

The code of the jobs comes from `berth_jobs`, whose declarations the fork server has
collected. The child gets one job's arguments and the secrets that its type names over its
socket, and holds nothing else.
"""

import asyncio
import contextlib
import socket
import sys
import time
from collections.abc import Mapping, Sequence
from contextvars import ContextVar
from dataclasses import dataclass
from datetime import timedelta
from typing import Any, TextIO

import msgspec
from berth_jobs.context import JobContext, RetryLater, use_context
from berth_jobs.declaration import DeclaredJob, JobFunction, encode_value

from worker_runtime.jobs.child_process import (
    MAX_DETAIL_LENGTH,
    CancelRun,
    ChildProcess,
    ProgressReporter,
    RunOutcome,
    StartRun,
    describe_error,
    encode_outcome,
    read_to_child,
    receive_packet,
)
from worker_runtime.jobs.protocol.messages import (
    MAX_RESULT_BYTES,
    Job,
    ResultTooLarge,
    UnknownJob,
    read_job,
)
from worker_runtime.process.landlock import Fence
from worker_runtime.protocol.errors import BerthError, MalformedMessage
from worker_runtime.protocol.messages import Failure

#: Characters of one job's output that a child with several jobs keeps.
_MAX_OUTPUT_LENGTH = 16_384


@dataclass(frozen=True, slots=True)
class OwnTypes:
    """The declared jobs of an application, by their name on the wire."""

    application: str
    functions: Mapping[str, JobFunction[..., Any]]

    @classmethod
    def of(cls, application: str, functions: Sequence[JobFunction[..., Any]]) -> "OwnTypes":
        return cls(application, {f"{application}/{each.type.name}": each for each in functions})

    def find(self, job: Job) -> DeclaredJob:
        """Raises `UnknownJob` for another type, or another version of it."""
        function = self.functions.get(job.name)
        if function is None or function.type.version != job.type_version:
            raise UnknownJob(f"this process does not know {job.queued_type[:200]!r}")
        declared: DeclaredJob = function.type
        return declared


class OwnChildProcess(ChildProcess):
    """The child of a fork server, from its fork to its end."""

    def __init__(
        self, link: socket.socket, output: int, types: OwnTypes, uses: int, fence: Fence | None
    ) -> None:
        """Serves a child that may run `uses` jobs, unless it runs several at once. `fence` is
        around it."""
        super().__init__(link, output, uses)
        self._types = types
        self._fence = fence

    def isolate(self, parent: int) -> None:
        if self._fence is not None:
            self._fence.step_behind()
        super().isolate(parent)

    def run_job(self, start: StartRun) -> RunOutcome:
        job = read_job(bytes(start.job))
        try:
            declared = self._types.find(job)
        except UnknownJob as error:
            return _failed(start, None, error, 0.0)
        if declared.concurrency > 1:
            # From now on this child runs jobs of this type, until the runner closes its socket.
            asyncio.run(_AsyncJobs(self._link, self._types).serve(start))
            self.leave()  # ends the process: nothing below runs for such a type
        outcome = self._run(start, job, declared)
        # A secret may still be in this process's memory: no job of another type runs here after it.
        if self._uses == 0 or start.secrets:
            return msgspec.structs.replace(outcome, last=True)
        return outcome

    def _run(self, start: StartRun, job: Job, declared: DeclaredJob) -> RunOutcome:
        progress = ProgressReporter(self._link, start.fence)
        began = time.monotonic()
        try:
            arguments = _arguments(declared, job)
            with use_context(_context(start, job, progress)):
                returned = declared.call(arguments)
                if declared.is_async:
                    returned = asyncio.run(returned)
            value = _encode_result(returned)
        except BaseException as error:  # the job's boundary: anything it raises is its outcome
            progress.send_last()
            return _failed(start, declared, error, time.monotonic() - began)
        return RunOutcome(
            fence=start.fence, value=msgspec.Raw(value), took=time.monotonic() - began
        )


class _AsyncJobs:
    """Runs several jobs of one async type at once in this process."""

    def __init__(self, link: socket.socket, types: OwnTypes) -> None:
        self._link = link
        self._types = types
        self._tasks: dict[int, asyncio.Task[None]] = {}

    async def serve(self, first: StartRun) -> None:
        """Runs `first` and what follows, until the runner closes the socket and all have ended."""
        loop, closed = asyncio.get_running_loop(), asyncio.Event()
        self._link.setblocking(False)
        sys.stdout, sys.stderr = _JobOutput(sys.stdout), _JobOutput(sys.stderr)
        loop.add_reader(self._link.fileno(), self._read, closed)
        self._begin(first)
        await closed.wait()
        loop.remove_reader(self._link.fileno())
        if self._tasks:
            await asyncio.wait(list(self._tasks.values()))

    def _read(self, closed: asyncio.Event) -> None:
        try:
            packet = receive_packet(self._link)
        except BlockingIOError:
            return
        except OSError:
            packet = b""
        if not packet:
            closed.set()
            return
        message = read_to_child(packet)
        if isinstance(message, CancelRun):
            if task := self._tasks.get(message.fence):
                task.cancel()
        else:
            self._begin(message)

    def _begin(self, start: StartRun) -> None:
        self._tasks[start.fence] = asyncio.create_task(self._run(start))

    async def _run(self, start: StartRun) -> None:
        progress = ProgressReporter(self._link, start.fence)
        began, declared = time.monotonic(), None
        output: list[str] = []
        token = _output.set(output)
        try:
            job = read_job(bytes(start.job))
            declared = self._types.find(job)
            with use_context(_context(start, job, progress)):
                value = _encode_result(await declared.call(_arguments(declared, job)))
            took = time.monotonic() - began
            outcome = RunOutcome(fence=start.fence, value=msgspec.Raw(value), took=took)
        except BaseException as error:  # the job's boundary
            progress.send_last()
            outcome = _failed(start, declared, error, time.monotonic() - began)
        finally:
            del self._tasks[start.fence]  # a cancel comes too late, and must not stop the report
            _output.reset(token)
        text = "".join(output)[-_MAX_OUTPUT_LENGTH:]
        with contextlib.suppress(OSError):
            packet = encode_outcome(msgspec.structs.replace(outcome, output=text, last=False))
            await asyncio.get_running_loop().sock_sendall(self._link, packet)


_output: ContextVar[list[str] | None] = ContextVar("job_output", default=None)


class _JobOutput:
    """Gives what a job writes to that job, and anything else to the stream that it replaces."""

    def __init__(self, stream: TextIO) -> None:
        self._stream = stream

    def write(self, text: str) -> int:
        written = _output.get()
        if written is None:
            return self._stream.write(text)
        if not isinstance(text, str):
            raise TypeError(f"write() argument must be str, not {type(text).__name__}")
        if len(written) < 10_000:
            written.append(text[:_MAX_OUTPUT_LENGTH])
        return len(text)

    def __getattr__(self, name: str) -> Any:
        return getattr(self._stream, name)


def _arguments(declared: DeclaredJob, job: Job) -> msgspec.Struct:
    """Raises `MalformedMessage` if they do not fit the type."""
    try:
        arguments: msgspec.Struct = declared.decode_arguments(job.args)
    except msgspec.DecodeError as error:
        raise MalformedMessage(f"arguments of {job.name}: {error}") from None
    return arguments


def _context(start: StartRun, job: Job, progress: ProgressReporter) -> JobContext:
    return JobContext(
        job_id=job.job_id,
        type=job.name,
        attempt=start.attempt,
        fence=start.fence,
        deadline=time.monotonic() + job.timeout,
        secrets=start.secrets,
        send_progress=progress.report,
    )


def _encode_result(returned: object) -> bytes:
    """Raises `ResultTooLarge`, and `TypeError` for what has no JSON."""
    value: bytes = encode_value(returned)
    if isinstance(returned, msgspec.Raw):
        msgspec.json.decode(value)  # it may hold anything, and the runner could not read it
    if len(value) > MAX_RESULT_BYTES:
        raise ResultTooLarge(f"{len(value)} bytes are more than {MAX_RESULT_BYTES}")
    return value


def _failed(
    start: StartRun, declared: DeclaredJob | None, error: BaseException, took: float
) -> RunOutcome:
    detail, text = describe_error(error)
    code, delay = "JOB_FAILED", None
    retryable = isinstance(error, UnknownJob)
    if isinstance(error, BerthError):
        code, detail = error.code, error.detail
    if declared is not None:
        retryable = isinstance(error, (RetryLater, *declared.retry_on))
        if declared.backoff:
            delay = declared.backoff[min(start.attempt, len(declared.backoff)) - 1]
    if isinstance(error, RetryLater) and (pause := _pause(error)) is not None:
        delay = pause
    return RunOutcome(
        fence=start.fence,
        failure=Failure(code=code, detail=detail[:MAX_DETAIL_LENGTH], retryable=retryable),
        took=took,
        traceback=text,
        delay=delay,
        # Out of memory, or asked to exit: this process is not to be trusted any more.
        last=not isinstance(error, Exception) or isinstance(error, MemoryError),
    )


def _pause(error: RetryLater) -> float | None:
    """Returns the seconds that a job asks for; None if it gave none, or what is no time."""
    pause = error.retry_after
    if pause is None:
        return None
    try:
        seconds = pause.total_seconds() if isinstance(pause, timedelta) else float(pause)
    except (TypeError, ValueError, OverflowError):
        return None
    return max(0.0, seconds)
