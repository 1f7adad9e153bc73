"""A bounded copy of what a job writes: the beginning and the end, with what lies between left out.

Children, forked ahead of need, so that no job waits for a fork.

The parent is thin and single-threaded, and its objects are frozen out of the collector's sight, so a fork
copies little: 1.5 ms from a parent of 23 MB, 5.2 ms from one of 150 MB; a child that runs the collector
costs 56 ms, 5.4 ms after `gc.freeze` (measured, Python 3.11). What the parent writes to after a fork it has
to copy, too, so several children are forked in a row where jobs come quickly.
"""

from __future__ import annotations

import contextlib
import errno
import os
import resource
import selectors
import signal
import socket
from collections.abc import Callable

from worker_runtime.jobs.children import child_messages
from worker_runtime.jobs.children.child_messages import MAX_PACKET
from worker_runtime.jobs.children.child_process import ChildProcess
from worker_runtime.jobs.types.job_type import JobRegistry
from worker_runtime.protocol.errors import BerthError

_HALF = 8192
#: It is read after each job, mostly in vain: the memory for 64 KiB cost more than the call (measured).
_CHUNK = 16384


class OutputCapture:
    """Reads one pipe without ever waiting; what is too much is read and dropped, so no job is held up."""

    def __init__(self, descriptor: int) -> None:
        self.descriptor = descriptor
        self._head = b""
        self._tail = b""
        self._size = 0

    def read(self) -> bool:
        """Takes what is there; false at the pipe's end."""
        while True:
            try:
                data = os.read(self.descriptor, _CHUNK)
            except BlockingIOError:
                return True
            if not data:
                return False
            self._add(data)

    def text(self) -> str:
        """All of it since the last call."""
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
        room = _HALF - len(self._head)
        self._head += data[:room]
        self._tail = (self._tail + data[room:])[-_HALF:]


class NotForked(BerthError):
    """No child could be made for a job: the host has no process, memory or descriptor left."""

    code = "JOB_NOT_FORKED"
    retryable = True


class JobChild:
    """One child, seen from the runner."""

    def __init__(self, pid: int, link: socket.socket, capture: OutputCapture, uses: int) -> None:
        self.pid = pid
        self.link = link
        self.capture = capture
        self.uses = uses

    def give(self, packet: bytes) -> bool:
        """Hands a job over; false if the child is gone."""
        self.uses -= 1
        try:
            self.link.send(packet)
        except OSError:
            return False
        return True

    def hear(self) -> bytes | None:
        """One packet, b"" when the child has closed, None when there is nothing."""
        try:
            return child_messages.receive_packet(self.link)
        except BlockingIOError:
            return None
        except OSError:  # reset, or closed with its child a moment ago
            return b""

    def kill(self, number: signal.Signals) -> None:
        """Signals the child and all it has started. Only before it is reaped: the number is its own then."""
        with contextlib.suppress(ProcessLookupError):  # it has no session yet: it has just been forked
            os.killpg(self.pid, number)
            return
        with contextlib.suppress(ProcessLookupError):
            os.kill(self.pid, number)


class _ChildLink:
    """What connects the runner with one child: a socket for messages, a pipe for its output."""

    def __init__(self) -> None:
        """Raises `OSError`."""
        self.near, self.far = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        try:
            for end in (self.near, self.far):
                end.setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, 2 * MAX_PACKET)
            self.near.setblocking(False)
            self.reader, self.writer = os.pipe2(os.O_CLOEXEC)
        except OSError:
            self.near.close()
            self.far.close()
            raise
        os.set_blocking(self.reader, False)

    def close_ours(self) -> None:
        self.near.close()
        os.close(self.reader)

    def close_theirs(self) -> None:
        self.far.close()
        os.close(self.writer)


class ChildPool:
    """All children of one runner. `recycle` is the number of jobs that one child runs."""

    def __init__(
        self,
        registry: JobRegistry,
        selector: selectors.BaseSelector,
        on_packet: Callable[[JobChild], None],
        recycle: int = 1,
    ) -> None:
        self._registry = registry
        self._selector = selector
        self._on_packet = on_packet
        self._recycle = recycle
        self._free: list[JobChild] = []
        self._all: dict[int, JobChild] = {}

    def __len__(self) -> int:
        return len(self._all)

    def prepare(self, wanted: int) -> None:
        """Forks until `wanted` children stand ready, or as many as there is room for; raises `NotForked` if
        there is room for none."""
        missing = wanted - len(self._free)
        if missing > 0:
            self._free[:0] = self._fork(missing)

    def short_of(self, wanted: int) -> bool:
        return len(self._free) < wanted

    def take(self) -> JobChild:
        """A child for one job; the last one that came back, whose memory is warm; raises `NotForked`."""
        return self._free.pop() if self._free else self._fork(1)[0]

    def give_back(self, child: JobChild) -> None:
        """After a job: the child takes another one if it may."""
        if child.uses > 0 and child.pid in self._all:  # what it said last may be read after its end
            self._free.append(child)

    def kill(self, child: JobChild) -> None:
        """Kills it with all it has started, unless it has been reaped: then its number may be another's."""
        if self._all.get(child.pid) is child:
            child.kill(signal.SIGKILL)

    def reap(self) -> list[tuple[JobChild, int]]:
        """Children that have ended, with their exit status (negative: the signal)."""
        ended = []
        while True:
            try:
                info = os.waitid(os.P_ALL, 0, os.WEXITED | os.WNOHANG | os.WNOWAIT)
            except ChildProcessError:
                break
            if info is None:
                break
            child = self._all.pop(info.si_pid, None)
            if child is not None:
                child.kill(signal.SIGKILL)  # what it has started, while the number is still taken
            _, status = os.waitpid(info.si_pid, 0)
            if child is not None:
                if child in self._free:
                    self._free.remove(child)
                ended.append((child, os.waitstatus_to_exitcode(status)))
        return ended

    def unwatch(self, child: JobChild) -> None:
        """No more packets: the child has closed its end. Safe to repeat."""
        with contextlib.suppress(KeyError, ValueError):
            self._selector.unregister(child.link.fileno())

    def close(self, child: JobChild) -> None:
        """Forgets a child that was reaped; what it wrote has been read."""
        self.unwatch(child)
        with contextlib.suppress(KeyError):
            self._selector.unregister(child.capture.descriptor)
        child.link.close()
        child.capture.close()

    def end(self) -> None:
        """Kills and reaps all that are left."""
        for child in self._all.values():
            child.kill(signal.SIGKILL)
        for child in list(self._all.values()):
            with contextlib.suppress(ChildProcessError):
                os.waitpid(child.pid, 0)
            self.close(child)
        self._all.clear()
        self._free.clear()

    def _fork(self, count: int) -> list[JobChild]:
        """Up to `count` children, at least one; raises `NotForked`.

        All is made ready before the first fork, so that this process writes to little between two of them:
        each page that it writes to then is copied once more.
        """
        links: list[_ChildLink] = []
        pids: list[int] = []
        parent = os.getpid()
        refused: OSError | None = None
        try:
            for _ in range(count):
                links.append(_ChildLink())
        except OSError as error:
            refused = error
        try:
            size = _address_space()
            for link in links:
                pid = os.fork()
                if pid == 0:
                    ChildProcess(link.far, link.writer, self._registry, self._recycle, size).main(parent)
                pids.append(pid)
        except OSError as error:
            refused = error
        for link in links:
            link.close_theirs()
        for link in links[len(pids) :]:
            link.close_ours()
        if refused is not None and not pids:
            raise NotForked(errno.errorcode.get(refused.errno or 0, ""))
        return [self._take_on(pid, link) for pid, link in zip(pids, links, strict=False)]

    def _take_on(self, pid: int, link: _ChildLink) -> JobChild:
        child = JobChild(pid, link.near, OutputCapture(link.reader), self._recycle)
        self._all[pid] = child
        self._selector.register(link.near.fileno(), selectors.EVENT_READ, lambda: self._on_packet(child))
        self._selector.register(link.reader, selectors.EVENT_READ, lambda: self._on_output(child))
        return child

    def _on_output(self, child: JobChild) -> None:
        if child.pid in self._all and not child.capture.read():
            self._selector.unregister(child.capture.descriptor)


def _address_space() -> int:
    """Bytes of this process, and so of the child that it forks next: which would have to copy more pages to
    find out by itself."""
    descriptor = os.open("/proc/self/statm", os.O_RDONLY | os.O_CLOEXEC)
    try:
        return int(os.read(descriptor, 128).split()[0]) * resource.getpagesize()
    finally:
        os.close(descriptor)
