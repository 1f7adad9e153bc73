"""The fork server of one runner: imports an application's code, and forks a child for the runner's
jobs.

    python -P -m worker_runtime.jobs.own_types.fork_server DESCRIPTOR PARENT

It is started afresh, not forked, with an environment without secrets, and under a user id of its
own where the runner may give it one. So nothing of the runner is in its memory: no key, no login of
Valkey, no other job's arguments. A job and its secrets go from the runner straight to the child
that runs it.

Its memory, and that of its children, cannot be read by other processes of the same user id
(`PR_SET_DUMPABLE`).
"""

import contextlib
import errno
import gc
import logging
import os
import selectors
import signal
import socket
import sys
import traceback
from collections.abc import Sequence
from pathlib import Path

from berth_jobs.declaration import JobFunction
from berth_jobs.discovery import discover, manifest_of

from worker_runtime.jobs.own_types.child import OwnChildProcess, OwnTypes
from worker_runtime.jobs.own_types.control import (
    MANIFEST_PART_BYTES,
    MAX_PACKET_BYTES,
    ChildEnded,
    ChildForked,
    ForkChild,
    ForkFailed,
    FromServer,
    ImportFailed,
    ManifestPart,
    SignalChild,
    StartServer,
    encode_control,
    read_to_server,
)
from worker_runtime.process import kernel
from worker_runtime.process.doorbell import WakePipe
from worker_runtime.process.landlock import Fence

#: Characters of the reason why an import failed.
_MAX_REASON_LENGTH = 4000


class ForkServer:
    """The fork server, from the import of the code to the end of its runner."""

    def __init__(self, control: socket.socket) -> None:
        self._control = control
        self._numbers: dict[int, int] = {}  # process id → number
        self._pids: dict[int, int] = {}  # number → process id
        self._types = OwnTypes("", {})
        self._recycle = 1
        #: Keeps the children apart from each other.
        self._fence: Fence | None = None

    def run(self) -> int:
        """Serves until the runner closes its end; returns the exit code."""
        packet, _, _, _ = socket.recv_fds(self._control, MAX_PACKET_BYTES, 0)
        start = read_to_server(packet)
        if not isinstance(start, StartServer):
            return 2
        self._fence_off([Path(path) for path in start.hidden])
        if not self._import(start):
            return 3
        wake = WakePipe()
        wake.on_signals((signal.SIGCHLD,), lambda: None)
        signal.signal(signal.SIGINT, signal.SIG_IGN)
        selector = selectors.DefaultSelector()
        selector.register(self._control, selectors.EVENT_READ)
        selector.register(wake, selectors.EVENT_READ)
        gc.collect()
        # The children's garbage collectors leave these pages alone, so they stay shared.
        gc.freeze()
        while True:
            for key, _ in selector.select():
                if key.fileobj is wake:
                    wake.clear()
                    self._reap()
                elif not self._handle():
                    return 0

    def _fence_off(self, hidden: Sequence[Path]) -> None:
        """Steps behind a fence, before any code of the application is imported."""
        try:
            fence = Fence(hidden)
            fence.step_behind()
            fence.close()
            self._fence = Fence()
        except OSError as error:
            reason = errno.errorcode.get(error.errno or 0, "")
            sys.stderr.write(f"own jobs run without a fence: {reason}\n")
            if hidden:
                raise  # somebody relies on it

    def _import(self, start: StartServer) -> bool:
        """Imports the application's code and describes its jobs to the runner."""
        for folder in start.path:
            if not os.access(folder, os.R_OK | os.X_OK):  # Python skips such a folder silently
                user = f"the jobs' user ({os.getuid()})"
                advice = "let other users read it and enter the folders above it"
                self._send(ImportFailed(reason=f"{user} cannot read the folder {folder}; {advice}"))
                return False
        sys.path[:0] = start.path
        try:
            functions: Sequence[JobFunction[..., object]] = discover(start.modules)
            manifest = manifest_of(start.application, start.modules).canonical_bytes()
        except BaseException as error:  # whatever a module does when it is imported
            reason = "".join(traceback.format_exception(error))[-_MAX_REASON_LENGTH:]
            self._send(ImportFailed(reason=reason))
            return False
        logging.basicConfig(level=logging.INFO, format="%(levelname)s %(name)s: %(message)s")
        self._types = OwnTypes.of(start.application, functions)
        self._recycle = start.recycle
        for at in range(0, len(manifest), MANIFEST_PART_BYTES):
            part = manifest[at : at + MANIFEST_PART_BYTES]
            self._send(ManifestPart(data=part, last=at + MANIFEST_PART_BYTES >= len(manifest)))
        return True

    def _handle(self) -> bool:
        """Reads one message; False when the runner has ended."""
        packet, descriptors, _, _ = socket.recv_fds(self._control, MAX_PACKET_BYTES, 2)
        if not packet:
            return False
        message = read_to_server(packet)
        if isinstance(message, ForkChild):
            self._fork(message.number, descriptors)
        elif isinstance(message, SignalChild) and (pid := self._pids.get(message.number)):
            _signal_group(pid, message.signal)
        return True

    def _fork(self, number: int, descriptors: list[int]) -> None:
        link, output = descriptors
        parent = os.getpid()
        try:
            pid = os.fork()
        except OSError as error:
            self._send(ForkFailed(number=number, reason=errno.errorcode.get(error.errno or 0, "")))
            return
        finally:
            if os.getpid() == parent:
                os.close(link)
                os.close(output)
        if pid == 0:
            far = socket.socket(fileno=link)
            OwnChildProcess(far, output, self._types, self._recycle, self._fence).main(parent)
        self._numbers[pid] = number
        self._pids[number] = pid
        self._send(ChildForked(number=number, pid=pid))

    def _reap(self) -> None:
        for pid in kernel.ended_children():
            number = self._numbers.pop(pid, None)
            if number is not None:
                # Ends also what it has started, while its process id is its own.
                _signal_group(pid, signal.SIGKILL)
                del self._pids[number]
            _, status = os.waitpid(pid, 0)
            if number is not None:
                self._send(ChildEnded(number=number, status=os.waitstatus_to_exitcode(status)))

    def _send(self, message: FromServer) -> None:
        self._control.send(encode_control(message))


def _signal_group(pid: int, number: int) -> None:
    with contextlib.suppress(ProcessLookupError):  # just forked, it has no session yet
        os.killpg(pid, number)
        return
    with contextlib.suppress(ProcessLookupError):
        os.kill(pid, number)


def main() -> int:
    descriptor, parent = int(sys.argv[1]), int(sys.argv[2])
    kernel.die_with_parent(parent)
    with contextlib.suppress(OSError):  # the kernel ends jobs first when memory runs out
        kernel.die_first()
    kernel.forbid_dumps()
    kernel.forbid_privileges()
    if os.getuid() == 0:
        kernel.drop_capabilities()
    kernel.rename_process("berth-forksrv")
    try:
        return ForkServer(socket.socket(fileno=descriptor)).run()
    except (BrokenPipeError, ConnectionResetError):  # the runner has ended
        return 0


if __name__ == "__main__":
    sys.exit(main())
