"""What the kernel knows of a worker's processes: who is who, who still lives, and how to end them.

A process is told from a later one with the same pid by its start time (`/proc/<pid>/stat`, field 22: clock
ticks since boot) together with the boot id.
"""

from __future__ import annotations

import contextlib
import ctypes
import os
import signal
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path

_PROC = Path("/proc")
_PR_SET_PDEATHSIG = 1
_libc = ctypes.CDLL(None, use_errno=True)


@dataclass(frozen=True, slots=True)
class ProcessStat:
    """One process, from `/proc/<pid>/stat`."""

    pid: int
    state: str
    parent: int
    group: int
    session: int
    #: Clock ticks since boot.
    started: int

    @property
    def alive(self) -> bool:
        """A zombie has no code left to run: only its parent has not asked for its end yet."""
        return self.state not in "ZX"


def boot_id() -> str:
    """Another one after a restart of the host: then no pid means anything any more."""
    return (_PROC / "sys/kernel/random/boot_id").read_text().strip()


def read_process(pid: int) -> ProcessStat | None:
    """The process, or None if there is none (any more)."""
    try:
        text = (_PROC / str(pid) / "stat").read_text(errors="replace")
    except OSError:
        return None
    # The name in parentheses may hold anything, also blanks and parentheses.
    fields = text[text.rindex(")") + 2 :].split()
    return ProcessStat(pid, fields[0], int(fields[1]), int(fields[2]), int(fields[3]), int(fields[19]))


def start_time(pid: int) -> int:
    """Of a process that cannot have been reaped yet; raises `ProcessLookupError` if it was."""
    found = read_process(pid)
    if found is None:
        raise ProcessLookupError(f"process {pid} is gone")
    return found.started


def all_processes() -> Iterator[ProcessStat]:
    for name in os.listdir(_PROC):
        if name.isdigit() and (found := read_process(int(name))):
            yield found


def live_members(session: int) -> list[int]:
    """Live processes of the session or group that the worker `session` leads, itself included.

    Dead ones that have become our own children are reaped: a node that is the first process of a container
    inherits what its workers leave behind.
    """
    living = []
    for one in all_processes():
        if session not in (one.session, one.group):
            continue
        if one.alive:
            living.append(one.pid)
        elif one.parent == os.getpid() and one.pid != session:
            with contextlib.suppress(ChildProcessError):
                os.waitpid(one.pid, os.WNOHANG)
    return living


def group_is_empty(group: int) -> bool:
    """True when no process of the group is left, zombies included: cheap, so it is asked first."""
    try:
        os.killpg(group, 0)
    except ProcessLookupError:
        return True
    except PermissionError:
        return False
    return False


def kill_group(leader: int, started: int) -> None:
    """SIGKILL for all of the group that `leader` leads or led.

    While a member lives, the kernel gives the number to no new process; a stranger with it means that the
    group is gone.
    """
    now = read_process(leader)
    if now is not None and now.started != started:
        return
    with contextlib.suppress(ProcessLookupError, PermissionError):
        os.killpg(leader, signal.SIGKILL)


def find_by_argument(word: str) -> list[ProcessStat]:
    """Live processes that were started with `word` as one of their arguments."""
    wanted = word.encode()
    found = []
    for one in all_processes():
        try:
            arguments = (_PROC / str(one.pid) / "cmdline").read_bytes().split(b"\0")
        except OSError:
            continue
        if wanted in arguments and one.alive:
            found.append(one)
    return found


def open_pidfd(pid: int, started: int) -> int | None:
    """A pidfd of exactly this process, or None if it has ended.

    A pidfd never comes to mean another process; its start time is checked after it was opened.
    """
    try:
        descriptor = os.pidfd_open(pid)
    except OSError:
        return None
    now = read_process(pid)
    if now is None or now.started != started or not now.alive:
        os.close(descriptor)
        return None
    return descriptor


def signal_pidfd(descriptor: int, number: signal.Signals) -> None:
    """Sends a signal to exactly the process that was pinned; one that has ended is no error."""
    with contextlib.suppress(ProcessLookupError):
        signal.pidfd_send_signal(descriptor, number)


def end_with_parent(parent: int) -> Callable[[], None]:
    """A `preexec_fn`: the child gets SIGTERM when the thread that started it ends."""

    def arm() -> None:
        _libc.prctl(_PR_SET_PDEATHSIG, signal.SIGTERM)
        if os.getppid() != parent:  # the parent died before prctl took effect
            os.kill(os.getpid(), signal.SIGTERM)

    return arm
