"""Reads processes from `/proc` and ends them, safely against reused pids.

A process is identified by its pid, its start time (`/proc/<pid>/stat`, field 22: clock ticks since
boot) and the boot id.
"""

import contextlib
import ctypes
import fcntl
import os
import resource
import signal
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import IO, Any

_PROC = Path("/proc")
_PR_SET_PDEATHSIG = 1
_libc = ctypes.CDLL(None, use_errno=True)


@dataclass(frozen=True, slots=True)
class ProcessStat:
    """Describes a process, from `/proc/<pid>/stat`."""

    pid: int
    state: str
    parent: int
    group: int
    session: int
    #: Clock ticks since boot.
    started: int

    @property
    def alive(self) -> bool:
        """False for a zombie: it has ended, and only its parent has not asked for its exit code."""
        return self.state not in "ZX"


def boot_id() -> str:
    """Changes with a restart of the host, which makes every known pid meaningless."""
    return (_PROC / "sys/kernel/random/boot_id").read_text().strip()


def read_process(pid: int) -> ProcessStat | None:
    """Returns the process; None if there is none."""
    try:
        text = (_PROC / str(pid) / "stat").read_text(errors="replace")
    except OSError:
        return None
    # The name in parentheses may contain blanks and parentheses.
    fields = text[text.rindex(")") + 2 :].split()
    return ProcessStat(
        pid, fields[0], int(fields[1]), int(fields[2]), int(fields[3]), int(fields[19])
    )


def start_time(pid: int) -> int:
    """Returns the start time of a process. Raises `ProcessLookupError` if it is gone."""
    stat = read_process(pid)
    if stat is None:
        raise ProcessLookupError(f"process {pid} is gone")
    return stat.started


def all_processes() -> Iterator[ProcessStat]:
    for name in os.listdir(_PROC):
        if name.isdigit() and (stat := read_process(int(name))):
            yield stat


def descendants(pid: int) -> list[ProcessStat]:
    """Returns the live descendants of a process, in whatever session or group they are."""
    by_parent: dict[int, list[ProcessStat]] = {}
    for process in all_processes():
        by_parent.setdefault(process.parent, []).append(process)
    living: list[ProcessStat] = []
    pending = [pid]
    while pending:
        children = by_parent.get(pending.pop(), [])
        living += [child for child in children if child.alive]
        pending += [child.pid for child in children]
    return living


def is_alive(process: ProcessStat) -> bool:
    """Return True if the process lives, and its number is not another's by now."""
    now = read_process(process.pid)
    return now is not None and now.alive and now.started == process.started


def kill_process(process: ProcessStat) -> None:
    """Sends SIGKILL, unless the process has ended or its number is another's by now."""
    descriptor = open_pidfd(process.pid, process.started)
    if descriptor is not None:
        try:
            with contextlib.suppress(PermissionError):
                signal_pidfd(descriptor, signal.SIGKILL)
        finally:
            os.close(descriptor)


def live_members(session: int) -> list[int]:
    """Returns the live processes of the session or group that `session` leads, itself included.

    Reaps dead ones that have become our children: a node that is the first process of a container
    inherits the orphans of its workers.
    """
    living = []
    for process in all_processes():
        if session not in (process.session, process.group):
            continue
        if process.alive:
            living.append(process.pid)
        elif process.parent == os.getpid() and process.pid != session:
            with contextlib.suppress(ChildProcessError):
                os.waitpid(process.pid, os.WNOHANG)
    return living


def group_is_empty(group: int) -> bool:
    """Returns True if no process of the group is left, not even a zombie. Cheap."""
    try:
        os.killpg(group, 0)
    except ProcessLookupError:
        return True
    except PermissionError:
        return False
    return False


def kill_group(leader: int, started: int) -> None:
    """Sends SIGKILL to all of the group that `leader` leads or led.

    While a member lives, the kernel does not reuse the number; another process with it means that
    the group is gone.
    """
    now = read_process(leader)
    if now is not None and now.started != started:
        return
    with contextlib.suppress(ProcessLookupError, PermissionError):
        os.killpg(leader, signal.SIGKILL)


def find_by_argument(word: str) -> list[ProcessStat]:
    """Finds live processes that have `word` as one of their arguments."""
    argument = word.encode()
    matches = []
    for process in all_processes():
        try:
            arguments = (_PROC / str(process.pid) / "cmdline").read_bytes().split(b"\0")
        except OSError:
            continue
        if argument in arguments and process.alive:
            matches.append(process)
    return matches


def open_pidfd(pid: int, started: int) -> int | None:
    """Opens a pidfd of exactly this process; None if it has ended.

    A pidfd never changes its process, and the start time is checked after it was opened.
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
    """Sends a signal to the process of a pidfd; one that has ended is no error."""
    with contextlib.suppress(ProcessLookupError):
        signal.pidfd_send_signal(descriptor, number)


def forbid_core_files() -> None:
    """Forbids core files of this process and of any that it starts: they hold keys and passwords.

    A limit of 1 byte also forbids what a limit of 0 does not: cores that are piped into a program,
    as systemd and Ubuntu set it up (`fs/coredump.c`). A limit of 0 that somebody gave us cannot be
    raised, and stays.
    """
    _, hard_limit = resource.getrlimit(resource.RLIMIT_CORE)
    resource.setrlimit(resource.RLIMIT_CORE, (1, 1) if hard_limit else (0, 0))


def try_lock(file: int | IO[Any]) -> bool:
    """Locks an open file until it is closed or this process ends;
    False while another process holds it.

    Raises `OSError` where files cannot be locked (NFS).
    """
    try:
        fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        return False
    return True


def end_with_parent(parent: int) -> Callable[[], None]:
    """Returns a `preexec_fn`: the child gets SIGTERM when the thread that started it ends, and
    leaves no core."""

    def arm() -> None:
        forbid_core_files()
        _libc.prctl(_PR_SET_PDEATHSIG, signal.SIGTERM)
        if os.getppid() != parent:  # the parent died before prctl took effect
            os.kill(os.getpid(), signal.SIGTERM)

    return arm
