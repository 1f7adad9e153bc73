"""The child: a process that runs one job, or a few, and its messages to the runner.

Its parent runs no job code. The child has a session of its own, so it can be killed with everything
it has started. It talks to the runner over a socket pair, one message a packet. Its standard output
and error are a pipe that the runner reads.
"""

import contextlib
import gc
import os
import resource
import signal
import socket
import sys
import time
import traceback

# Below the `signal` module, which makes enums of everything it returns: each fresh child had to
# copy 30 more pages of its parent for that (measured).
from _signal import pthread_sigmask as _set_mask  # type: ignore[import-not-found]
from _signal import signal as _set_handler
from typing import TYPE_CHECKING, NoReturn

import msgspec

from worker_runtime.jobs.protocol.messages import (
    MAX_RESULT_BYTES,
    NULL,
    JobFailed,
    ResultTooLarge,
    read_job,
)
from worker_runtime.jobs.types.job_type import JobContext, JobType
from worker_runtime.process import kernel
from worker_runtime.protocol.errors import BerthError
from worker_runtime.protocol.messages import Failure

if TYPE_CHECKING:
    from worker_runtime.jobs.types.job_registry import JobRegistry

#: Characters of a traceback that are kept; its end says where the error happened.
MAX_TRACEBACK_LENGTH = 8192
#: Characters of an error's detail that are kept.
MAX_DETAIL_LENGTH = 1000
#: Descriptors below this are closed after the fork. A runner has about three for each child.
_MAX_DESCRIPTORS = 1024
#: `_signal` takes plain numbers.
_DEFAULT_HANDLER = int(signal.SIG_DFL)
#: Seconds between two messages of one run's progress.
_PROGRESS_INTERVAL_S = 0.1
#: Bytes of one report of progress; a larger one is dropped.
MAX_PROGRESS_BYTES = 8 * 1024
_NOTHING = object()
#: Seconds that a run may ask to wait for its next attempt.
MAX_DELAY_S = 86_400.0
#: Bytes of one packet: a job or a result (64 KiB each) and its envelope.
MAX_PACKET_BYTES = 160 * 1024
#: Characters of a traceback, and of an output, that are kept if a packet would not hold them as
#: they are. Each takes up to 6 bytes as JSON.
_MAX_ESCAPED_LENGTH = 4096


class StartRun(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True, tag="run"):
    """Runner → child: run this job."""

    fence: int
    attempt: int
    job: msgspec.Raw
    #: Those that the job's type names.
    secrets: dict[str, str] = {}

    def __repr__(self) -> str:
        return f"StartRun(fence={self.fence})"


class CancelRun(msgspec.Struct, frozen=True, kw_only=True, tag="cancel"):
    """Runner → child that runs several jobs: end this one."""

    fence: int


class JobProgress(msgspec.Struct, frozen=True, kw_only=True, tag="progress"):
    """Child → runner: the job's progress."""

    fence: int
    value: msgspec.Raw


class RunOutcome(msgspec.Struct, frozen=True, kw_only=True, tag="outcome"):
    """Child → runner: how the job ended; `value` counts unless `failure` is set."""

    fence: int
    value: msgspec.Raw = NULL
    failure: Failure | None = None
    #: Seconds that the job ran.
    took: float = 0.0
    traceback: str = ""
    #: Seconds until another attempt, if the error said so.
    delay: float | None = None
    #: The child takes no further job.
    last: bool = False
    #: The text that the job has written, of a child that runs several jobs: their pipe is one.
    output: str = ""


ChildReport = JobProgress | RunOutcome


def bounded(outcome: RunOutcome) -> RunOutcome:
    """Returns an outcome within its bounds:
    a child of an application runs code that nobody checked."""
    failure, value = outcome.failure, outcome.value
    if failure is not None:
        detail = failure.detail[:MAX_DETAIL_LENGTH]
        failure = Failure(code=failure.code[:64], detail=detail, retryable=failure.retryable)
    elif len(value) > MAX_RESULT_BYTES:
        too_large = ResultTooLarge(f"{len(value)} bytes are more than {MAX_RESULT_BYTES}")
        failure, value = Failure.of(too_large), NULL
    return msgspec.structs.replace(
        outcome,
        value=value,
        failure=failure,
        took=min(max(outcome.took, 0.0), MAX_DELAY_S),
        traceback=outcome.traceback[-MAX_TRACEBACK_LENGTH:],
        delay=None if outcome.delay is None else min(max(outcome.delay, 0.0), MAX_DELAY_S),
        output=outcome.output[:MAX_PACKET_BYTES],
    )


encode_message = msgspec.json.Encoder().encode


def encode_outcome(outcome: RunOutcome) -> bytes:
    """Returns a packet that the runner can read, whatever the job's texts hold: a file's name that
    is not UTF-8 is shown with escapes."""
    try:
        packet = encode_message(outcome)
        if len(packet) <= MAX_PACKET_BYTES:
            return packet
    except UnicodeEncodeError:
        pass
    failure = outcome.failure
    if failure is not None:
        detail = _escaped(failure.detail)[:MAX_DETAIL_LENGTH]
        failure = Failure(code=failure.code, detail=detail, retryable=failure.retryable)
    return encode_message(
        msgspec.structs.replace(
            outcome,
            failure=failure,
            traceback=_escaped(outcome.traceback)[-_MAX_ESCAPED_LENGTH:],
            output=_escaped(outcome.output)[-_MAX_ESCAPED_LENGTH:],
        )
    )


def describe_error(error: BaseException) -> tuple[str, str]:
    """Returns a sentence and the traceback of what a job has raised: its own methods may fail."""
    sentence = type(error).__name__
    try:
        sentence = f"{sentence}: {error}"
    except BaseException as failure:
        sentence = f"{sentence}: its text raised {type(failure).__name__}"
    try:
        text = "".join(traceback.format_exception(error))
    except BaseException as failure:
        text = f"{sentence} (its traceback raised {type(failure).__name__})"
    return sentence, text[-MAX_TRACEBACK_LENGTH:]


def _escaped(text: str) -> str:
    return text.encode("utf-8", "backslashreplace").decode()


_to_child: msgspec.json.Decoder[StartRun | CancelRun] = msgspec.json.Decoder(StartRun | CancelRun)
read_to_child = _to_child.decode
#: The buffer for all sockets of the process, which has one thread. A new one for each packet costs
#: 15 us (measured), as much as the rest of the call.
_buffer = bytearray(MAX_PACKET_BYTES)
_view = memoryview(_buffer)


def receive_packet(link: socket.socket) -> bytes:
    """Returns one packet; b"" when the other side has closed. Raises `OSError`."""
    return bytes(_view[: link.recv_into(_buffer)])


_reports: msgspec.json.Decoder[ChildReport] = msgspec.json.Decoder(ChildReport)
read_report = _reports.decode


class ProgressReporter:
    """Sends the progress of one run to the runner, at most ten times a second."""

    __slots__ = ("_fence", "_held_back", "_link", "_next_at", "_was_too_large")

    def __init__(self, link: socket.socket, fence: int) -> None:
        self._link = link
        self._fence = fence
        self._next_at = 0.0
        self._held_back: object = _NOTHING
        self._was_too_large = False

    def report(self, value: object) -> None:
        """Sends a value, or holds it back if another one has just been sent."""
        now = time.monotonic()
        self._held_back = value
        if now >= self._next_at:
            self._next_at = now + _PROGRESS_INTERVAL_S
            self._send(value)

    def send_last(self) -> None:
        """Sends the last value if it was held back. Only a run that has failed needs it: the
        progress of a job that is done is not kept."""
        if self._held_back is not _NOTHING:
            with contextlib.suppress(Exception):  # such as a value that has no JSON
                self._send(self._held_back)

    def _send(self, value: object) -> None:
        encoded = msgspec.json.encode(value)
        if len(encoded) > MAX_PROGRESS_BYTES:
            self._drop(len(encoded))
        else:
            packet = encode_message(JobProgress(fence=self._fence, value=msgspec.Raw(encoded)))
            try:
                self._link.send(packet)
            except BlockingIOError:  # the runner is behind, and other jobs of this child are not
                return
        self._held_back = _NOTHING

    def _drop(self, size: int) -> None:
        if not self._was_too_large:
            self._was_too_large = True
            with contextlib.suppress(Exception):  # the job may have closed it
                sys.stderr.write(
                    f"progress of {size} bytes is not shown; {MAX_PROGRESS_BYTES} are allowed\n"
                )


class ChildProcess:
    """A child, from its fork to its end. A subclass runs the jobs."""

    def __init__(self, link: socket.socket, output: int, uses: int) -> None:
        """Serves a child that may run `uses` jobs."""
        self._link = link
        self._output = output
        self._uses = uses

    def run_job(self, start: StartRun) -> RunOutcome:
        """Runs one job; raises nothing that the job raises."""
        raise NotImplementedError

    def main(self, parent: int) -> NoReturn:
        """Runs up to `uses` jobs and exits."""
        code = 1
        try:
            self.isolate(parent)
            while self._uses > 0 and (packet := receive_packet(self._link)):
                self._uses -= 1
                start = read_to_child(packet)
                if isinstance(start, CancelRun):  # of a job that has just ended
                    continue
                outcome = self.run_job(start)
                self._flush_output()
                self._link.send(encode_outcome(outcome))
                if outcome.last:
                    break
            code = 0
        finally:
            os._exit(code)  # at once: a thread that the job has left must not hold the process

    def leave(self) -> NoReturn:
        """Ends the process after its last job."""
        self._flush_output()
        os._exit(0)

    def isolate(self, parent: int) -> None:
        """Cuts the child off from its parent: session, signals, descriptors, standard streams."""
        kernel.die_with_parent(parent)
        os.setsid()
        kernel.rename_process("berth-job")
        signal.set_wakeup_fd(-1)
        for number in (signal.SIGTERM, signal.SIGINT, signal.SIGCHLD):
            _set_handler(number, _DEFAULT_HANDLER)
        _set_mask(signal.SIG_SETMASK, ())
        null = os.open(os.devnull, os.O_RDONLY)
        os.dup2(null, 0)
        os.dup2(self._output, 1)
        os.dup2(self._output, 2)
        kept = self._link.fileno()
        os.closerange(3, kept)
        os.closerange(kept + 1, _MAX_DESCRIPTORS)
        gc.enable()

    def _flush_output(self) -> None:
        for stream in (sys.stdout, sys.stderr):
            try:
                stream.flush()
            except (OSError, ValueError, AttributeError):  # the job closed or replaced it
                continue


class BuiltInChildProcess(ChildProcess):
    """The child that runs Berth's built-in job types."""

    def __init__(
        self, link: socket.socket, output: int, registry: "JobRegistry", uses: int, size: int
    ) -> None:
        """Serves a child that may run `uses` jobs and starts with `size` bytes of address space."""
        super().__init__(link, output, uses)
        self._registry = registry
        self._size = size

    def run_job(self, start: StartRun) -> RunOutcome:
        fence, kind = start.fence, None
        progress = ProgressReporter(self._link, fence)
        began = time.monotonic()
        try:
            job = read_job(bytes(start.job))
            kind = self._registry.find(job.name)
            self._limit_memory(kind)
            context = JobContext(job.job_id, start.attempt, fence, progress.report)
            returned = kind.run(self._registry.arguments(kind, job.args), context)
            value = msgspec.json.encode(returned)
            if len(value) > MAX_RESULT_BYTES:
                raise ResultTooLarge(f"{len(value)} bytes are more than {MAX_RESULT_BYTES}")
            took = time.monotonic() - began
            return RunOutcome(
                fence=fence, value=msgspec.Raw(value), took=took, last=self._uses == 0
            )
        except BaseException as error:  # the job's boundary: anything it raises is its outcome
            progress.send_last()
            return self._failed(fence, kind, error, time.monotonic() - began)

    def _failed(
        self, fence: int, kind: JobType | None, error: BaseException, took: float
    ) -> RunOutcome:
        sentence, text = describe_error(error)
        known = error if isinstance(error, BerthError) else JobFailed(sentence)
        retryable = kind is not None and kind.retryable(error)
        return RunOutcome(
            fence=fence,
            failure=Failure(
                code=known.code, detail=known.detail[:MAX_DETAIL_LENGTH], retryable=retryable
            ),
            took=took,
            traceback=text,
            delay=known.retry_after,
            # Out of memory, or asked to exit: this process is not to be trusted any more.
            last=self._uses == 0
            or not isinstance(error, Exception)
            or isinstance(error, MemoryError),
        )

    def _limit_memory(self, kind: JobType) -> None:
        """Limits the address space. The kernel refuses more, and the job gets a `MemoryError`."""
        before, hard = resource.getrlimit(resource.RLIMIT_AS)
        soft = self._size + kind.memory
        if hard != resource.RLIM_INFINITY:
            soft = min(soft, hard)
        if soft != before:
            resource.setrlimit(resource.RLIMIT_AS, (soft, hard))
