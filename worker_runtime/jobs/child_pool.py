"""The runner's child processes and the jobs that they run.

One child is forked ahead of need, so that no job waits for a fork.

The runner is thin and single-threaded and has frozen its objects, so a fork copies little: 1.5 ms
from a parent of 23 MB, 5.2 ms from one of 150 MB. A child that runs the garbage collector costs 56
ms, and 5.4 ms after `gc.freeze` (measured, Python 3.11).
"""

import contextlib
import errno
import math
import os
import resource
import selectors
import signal
import socket
import time
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field

from worker_runtime.jobs.child_process import (
    MAX_PACKET_BYTES,
    BuiltInChildProcess,
    CancelRun,
    encode_message,
    receive_packet,
)
from worker_runtime.jobs.protocol.messages import RUNNER_TTL_S, Job
from worker_runtime.jobs.queue import ClaimedJob
from worker_runtime.jobs.types.job_registry import JobRegistry
from worker_runtime.process import kernel
from worker_runtime.process.clock import wall_ms
from worker_runtime.protocol.errors import BerthError

#: Seconds that a runner's entry outlives the timeout of its longest job.
_ENTRY_MARGIN_S = 60
#: Bytes of output that are kept from the beginning, and from the end.
_MAX_HALF_BYTES = 8192
#: Bytes of one read. After each job there is one read, which mostly returns nothing. To allocate
#: 64 KiB for it cost more than the call.
_CHUNK_BYTES = 16384


class OutputCapture:
    """Keeps the beginning and the end of what a job writes. Reads everything, so no job is held
    up."""

    def __init__(self, descriptor: int) -> None:
        """Reads from `descriptor`, the pipe's reading end, which must not block."""
        self.descriptor = descriptor
        self._head = b""
        self._tail = b""
        self._size = 0

    def read(self) -> bool:
        """Reads what has arrived, at most 128 KiB: a job may write faster. Returns False at the
        pipe's end."""
        for _ in range(8):
            try:
                data = os.read(self.descriptor, _CHUNK_BYTES)
            except BlockingIOError:
                return True
            if not data:
                return False
            self._add(data)
        return True

    def text(self) -> str:
        """Returns the output since the last call."""
        left_out = self._size - len(self._head) - len(self._tail)
        between = f"\n… {left_out} bytes left out …\n".encode() if left_out else b""
        text = (self._head + between + self._tail).decode("utf-8", "replace")
        self._head = self._tail = b""
        self._size = 0
        return text

    def close(self) -> None:
        os.close(self.descriptor)

    def _add(self, data: bytes) -> None:
        self._size += len(data)
        room = _MAX_HALF_BYTES - len(self._head)
        self._head += data[:room]
        self._tail = (self._tail + data[room:])[-_MAX_HALF_BYTES:]


#: Seconds until a job that got no process is tried again, by any runner. It has not run: the pause
#: between its own attempts, by default 120 s, is for what goes wrong in the job. A fork server that
#: has died is replaced within a second, and a runner whose forks fail claims nothing.
NOT_FORKED_RETRY_DELAY_S = 5.0


class NotForked(BerthError, code="JOB_NOT_FORKED", retryable=True):
    """No child could be made for a job: the host has no process, memory or descriptor left, or the
    fork server has just ended."""

    def __init__(self, detail: str = "") -> None:
        super().__init__(detail, retry_after=NOT_FORKED_RETRY_DELAY_S)


class JobChild:
    """Represents one child in the runner. `uses`: jobs that it may still run.

    `pid`: its process id; of a fork server's child its number,
    which no other child of this runner gets.
    """

    #: The type whose jobs it runs several of at once; '' if it runs one job at a time.
    shared_by = ""
    #: Why it was never forked, or has got no job; '' if it was, and has.
    not_forked = ""
    #: The kernel has killed it, or what it has started, at its limit of memory.
    out_of_memory = False

    def __init__(self, pid: int, link: socket.socket, capture: OutputCapture, uses: int) -> None:
        self.pid = pid
        self.link = link
        self.capture = capture
        self.uses = uses

    def end_run(self, fence: int) -> None:
        """Asks for the end of one run: by a signal, unless other jobs run in this child."""
        if self.shared_by:
            with contextlib.suppress(OSError):
                self.send(encode_message(CancelRun(fence=fence)))
        else:
            self.kill(signal.SIGTERM)

    def send_job(self, packet: bytes) -> bool:
        """Sends a job. False if the child is gone, or does not read: it takes no other job."""
        self.uses -= 1
        try:
            self.send(packet)
        except OSError:
            self.uses = 0
            return False
        return True

    def send(self, packet: bytes) -> None:
        """Raises `OSError`."""
        self.link.send(packet)

    def receive(self) -> bytes | None:
        """Returns one packet; b"" when the child has closed its end, None when nothing has
        arrived."""
        try:
            return receive_packet(self.link)
        except BlockingIOError:
            return None
        except OSError:  # reset, or closed with its child a moment ago
            return b""

    def kill(self, number: signal.Signals) -> None:
        """Signals the child and all it has started. Not to be called after it was reaped: its
        process id may be another's then."""
        with contextlib.suppress(ProcessLookupError):  # just forked, it has no session yet
            os.killpg(self.pid, number)
            return
        with contextlib.suppress(ProcessLookupError):
            os.kill(self.pid, number)


@dataclass(eq=False, repr=False)
class ChildPool:
    """All children of one runner. `recycle`: the number of jobs that one child runs."""

    registry: JobRegistry
    selector: selectors.BaseSelector
    on_packet: Callable[[JobChild], None]
    recycle: int = 1
    _free: list[JobChild] = field(default_factory=list, init=False)
    _all: dict[int, JobChild] = field(default_factory=dict, init=False)

    #: Whether children can be made now.
    ready: bool = field(default=True, init=False)
    #: The code of the jobs was replaced while the runner ran.
    manifest_changed: bool = field(default=False, init=False)
    #: Whether `exceeds_memory` has to be asked now and then.
    watches_memory: bool = field(default=False, init=False)

    def __len__(self) -> int:
        return len(self._all)

    def has_spare(self) -> bool:
        return bool(self._free)

    def fork_spare(self) -> None:
        """Makes one child ready; raises `NotForked`."""
        self._free.append(self._fork())

    def secrets_of(self, job: Job) -> Mapping[str, str]:
        """Returns the secrets that a job's type names."""
        return {}

    def run_due(self) -> None:
        """Does what has to be done now and then; the runner's loop calls it in each turn."""

    def seconds_until_due(self) -> float:
        """Returns the seconds until `run_due` has something to do."""
        return math.inf

    def exceeds_memory(self, run: "JobRun") -> bool:
        """Returns True if a run's child has more memory than it may."""
        return False

    def ran_out_of_memory(self, child: JobChild) -> bool:
        """Returns True if the kernel has killed what a child has started, at its limit."""
        return False

    def take(self, job: Job) -> JobChild:
        """Returns a child for one job: the one that came back last, whose memory is warm. Raises
        `NotForked`."""
        return self._free.pop() if self._free else self._fork()

    def give_back(self, child: JobChild) -> None:
        """Takes a child back after a job: it runs another one if it may."""
        if child.uses > 0 and child.pid in self._all:  # its last packet may be read after its end
            self._free.append(child)

    def kill(self, child: JobChild) -> None:
        """Kills the child and all it has started, unless it was reaped."""
        if self._all.get(child.pid) is child:
            child.kill(signal.SIGKILL)

    def reap(self) -> list[tuple[JobChild, int]]:
        """Returns the children that have ended, each with its exit status (negative: the
        signal)."""
        ended = []
        for pid in kernel.ended_children():
            child = self._all.pop(pid, None)
            if child is not None:
                # Ends also what it has started, while its process id is still its own.
                child.kill(signal.SIGKILL)
            _, status = os.waitpid(pid, 0)
            if child is not None:
                if child in self._free:
                    self._free.remove(child)
                ended.append((child, os.waitstatus_to_exitcode(status)))
        return ended

    def unwatch(self, child: JobChild) -> None:
        """Waits for no more packets: the child has closed its end. Safe to repeat."""
        with contextlib.suppress(KeyError, ValueError):
            self.selector.unregister(child.link.fileno())

    def forget(self, child: JobChild) -> None:
        """Closes what belonged to a reaped child, once its output has been read."""
        self.unwatch(child)
        with contextlib.suppress(KeyError):
            self.selector.unregister(child.capture.descriptor)
        child.link.close()
        child.capture.close()

    def open(self) -> None:
        """Gets ready to make children, before the runner registers."""

    def close(self) -> None:
        """Kills and reaps all children."""
        for child in self._all.values():
            child.kill(signal.SIGKILL)
        for child in list(self._all.values()):
            with contextlib.suppress(ChildProcessError):
                os.waitpid(child.pid, 0)
            self.forget(child)
        self._all.clear()
        self._free.clear()

    def _fork(self) -> JobChild:
        """Forks a child with a socket for messages and a pipe for its output; raises
        `NotForked`."""
        parent = os.getpid()
        try:
            with contextlib.ExitStack() as runner_ends, contextlib.ExitStack() as child_ends:
                near, reader, far, writer = make_ends(runner_ends, child_ends)
                size = _address_space()
                pid = os.fork()
                if pid == 0:
                    BuiltInChildProcess(far, writer, self.registry, self.recycle, size).main(parent)
                runner_ends.pop_all()  # they stay open
        except OSError as error:
            raise NotForked(errno.errorcode.get(error.errno or 0, "")) from None
        return self._watch(JobChild(pid, near, OutputCapture(reader), self.recycle))

    def _watch(self, child: JobChild) -> JobChild:
        self._all[child.pid] = child
        self.selector.register(
            child.link.fileno(), selectors.EVENT_READ, lambda: self.on_packet(child)
        )
        self.selector.register(
            child.capture.descriptor, selectors.EVENT_READ, lambda: self._on_output(child)
        )
        return child

    def _on_output(self, child: JobChild) -> None:
        if child.pid in self._all and not child.capture.read():
            self.selector.unregister(child.capture.descriptor)


def make_ends(
    runner_ends: contextlib.ExitStack, child_ends: contextlib.ExitStack
) -> tuple[socket.socket, int, socket.socket, int]:
    """Makes a child's socket and the pipe for its output: the runner's two ends, then the child's.

    The stacks close them. Raises `OSError`.
    """
    near, far = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
    runner_ends.callback(near.close)
    child_ends.callback(far.close)
    for end in (near, far):
        end.setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, 2 * MAX_PACKET_BYTES)
    near.setblocking(False)
    reader, writer = os.pipe2(os.O_CLOEXEC)
    runner_ends.callback(os.close, reader)
    child_ends.callback(os.close, writer)
    os.set_blocking(reader, False)
    return near, reader, far, writer


def _address_space() -> int:
    """Returns the bytes of address space of this process, and so of its next child. A child would
    have to copy more pages to find out by itself."""
    descriptor = os.open("/proc/self/statm", os.O_RDONLY | os.O_CLOEXEC)
    try:
        return int(os.read(descriptor, 128).split()[0]) * resource.getpagesize()
    finally:
        os.close(descriptor)


@dataclass(slots=True)
class JobRun:
    """Describes one job in one child. `kill_reason`: 'timeout', 'cancelled', 'memory', or
    'process_memory' if other jobs were in the child; '' while nobody kills it."""

    claimed: ClaimedJob
    job: Job
    child: JobChild
    started_ms: int
    kill_at: float
    kill_reason: str = ""


class RunningJobs:
    """All runs, by their fences. A kill is TERM to the child's whole group, then KILL."""

    def __init__(
        self, grace: float, ttl: int = RUNNER_TTL_S, margin: int = _ENTRY_MARGIN_S
    ) -> None:
        """Takes `grace`, the seconds between TERM and KILL, and the runner's entry's `ttl` and
        `margin` (see `entry_ttl`)."""
        self._grace = grace
        self._ttl = ttl
        self._margin = margin
        self._by_fence: dict[int, JobRun] = {}

    def __len__(self) -> int:
        return len(self._by_fence)

    def __iter__(self) -> Iterator[JobRun]:
        return iter(list(self._by_fence.values()))

    def add(self, claimed: ClaimedJob, job: Job, child: JobChild) -> None:
        kill_at = time.monotonic() + job.timeout
        self._by_fence[claimed.fence] = JobRun(claimed, job, child, wall_ms(), kill_at)

    def find(self, child: JobChild, fence: int) -> JobRun | None:
        """Returns the run with this fence, if it is in this child."""
        run = self._by_fence.get(fence)
        return run if run is not None and run.child is child else None

    def runs_in(self, child: JobChild) -> list[JobRun]:
        return [run for run in self._by_fence.values() if run.child is child]

    def remove(self, run: JobRun) -> None:
        del self._by_fence[run.claimed.fence]

    def fences(self) -> set[int]:
        return set(self._by_fence)

    def job_ids(self) -> list[str]:
        return [run.claimed.job_id for run in self._by_fence.values()]

    def seconds_until_due(self) -> float:
        """Returns the seconds until the next run has to be killed."""
        first = min([run.kill_at for run in self._by_fence.values()], default=math.inf)
        return first - time.monotonic()

    def kill_overdue(self) -> list[JobRun]:
        """Sends TERM to runs past their timeout, and KILL to those that outlived the grace; returns
        those that have just timed out."""
        now, timed_out = time.monotonic(), []
        for run in self._by_fence.values():
            if now >= run.kill_at:
                if run.kill_reason:
                    run.child.kill(signal.SIGKILL)
                    run.kill_at = now + max(1.0, self._grace)  # again, until its end was seen
                else:
                    self._terminate(run, "timeout")
                    timed_out.append(run)
        return timed_out

    def cancel(self, job_id: str, fence: int) -> bool:
        """Terminates one run; false if it is not running."""
        run = self._by_fence.get(fence)
        if run is None or run.claimed.job_id != job_id:
            return False
        if not run.kill_reason:
            self._terminate(run, "cancelled")
        return True

    def kill_now(self, run: JobRun, reason: str) -> None:
        """Kills one run's child at once."""
        run.kill_reason = reason
        run.child.kill(signal.SIGKILL)
        run.kill_at = time.monotonic() + max(1.0, self._grace)

    def kill_all(self) -> None:
        """Kills all children at once and forgets their runs."""
        for run in self._by_fence.values():
            run.child.kill(signal.SIGKILL)
        self._by_fence.clear()

    def entry_ttl(self) -> int:
        """Returns the seconds that the runner's entry has to live: it outlives its longest job's
        timeout."""
        longest = max((run.job.timeout for run in self._by_fence.values()), default=0.0)
        return max(self._ttl, math.ceil(longest) + self._margin)

    def _terminate(self, run: JobRun, reason: str) -> None:
        run.kill_reason = reason
        run.child.end_run(run.claimed.fence)
        run.kill_at = time.monotonic() + self._grace
