"""Asks the Linux kernel for what a worker's processes need: no core dumps, no orphans, a name in
`ps`."""

import ctypes
import errno
import math
import os
import resource
import signal
import time
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path

from worker_runtime.process.clock import NS_PER_S

# From <linux/prctl.h>.
_PR_SET_PDEATHSIG = 1
_PR_SET_DUMPABLE = 4
_PR_SET_NAME = 15
_PR_CAPBSET_DROP = 24
_PR_SET_CHILD_SUBREAPER = 36
_PR_SET_NO_NEW_PRIVS = 38

# From <linux/capability.h>.
_CAPABILITY_VERSION_3 = 0x20080522

_prctl_call = ctypes.CDLL(None, use_errno=True).prctl


def _prctl(option: int, argument: int | bytes) -> None:
    if _prctl_call(option, argument, 0, 0, 0) != 0:
        number = ctypes.get_errno()
        raise OSError(number, os.strerror(number))


def forbid_dumps() -> None:
    """Forbids core files and that other processes of this user read this one's memory. Forks
    inherit both."""
    resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
    _prctl(_PR_SET_DUMPABLE, 0)


def forbid_privileges() -> None:
    """Makes programs with set-user-ID give nothing to this process and its forks. Cannot be
    undone."""
    _prctl(_PR_SET_NO_NEW_PRIVS, 1)


def drop_capabilities() -> None:
    """Takes root's rights from this process and its forks, for ever; the user id stays. Raises
    `OSError`."""
    for capability in range(64):
        if (
            _prctl_call(_PR_CAPBSET_DROP, capability, 0, 0, 0) != 0
            and ctypes.get_errno() == errno.EINVAL
        ):
            break  # the kernel knows no more of them
    header = (ctypes.c_uint32 * 2)(_CAPABILITY_VERSION_3, 0)
    nothing = (ctypes.c_uint32 * 6)()
    if ctypes.CDLL(None, use_errno=True).capset(header, nothing) != 0:
        number = ctypes.get_errno()
        raise OSError(number, os.strerror(number))


def die_first() -> None:
    """Makes the kernel end this process and its forks first when memory runs out. Raises `OSError`.

    After `forbid_dumps` the score's file belongs to root, so for this one line other processes of
    this user could read the memory.
    """
    _prctl(_PR_SET_DUMPABLE, 1)
    try:
        with open("/proc/self/oom_score_adj", "wb") as file:
            file.write(b"1000")
    finally:
        _prctl(_PR_SET_DUMPABLE, 0)


def die_with_parent(parent: int) -> None:
    """Makes the kernel kill this process when its parent ends. Call it first after a fork."""
    _prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)
    if os.getppid() != parent:  # it ended before prctl took effect
        os.kill(os.getpid(), signal.SIGKILL)


def adopt_orphans() -> None:
    """Makes this process the parent of what its descendants
    leave behind, also in sessions of their own."""
    _prctl(_PR_SET_CHILD_SUBREAPER, 1)


def kill_children(timeout: float) -> None:
    """Kills all children, adopted ones too, until none is left or `timeout` seconds have passed."""
    deadline = time.monotonic() + timeout
    while time.monotonic() < deadline:
        for pid in _children():
            with suppress(ProcessLookupError, PermissionError):
                os.kill(pid, signal.SIGKILL)
        try:
            while os.waitpid(-1, os.WNOHANG)[0]:
                pass
        except ChildProcessError:
            return
        time.sleep(0.002)  # SIGCHLD may be blocked, handled or ignored here


def _children() -> Iterator[int]:
    own = str(os.getpid())
    for path in Path("/proc").glob("[0-9]*/stat"):
        with suppress(OSError, ValueError):
            text = path.read_text(errors="replace")
            if text[text.rindex(")") + 2 :].split()[1] == own:
                yield int(path.parent.name)


def ended_children() -> Iterator[int]:
    """Yields the process ids of children that have ended. Reap each before the next: until then the
    id is its own."""
    while True:
        try:
            ended = os.waitid(os.P_ALL, 0, os.WEXITED | os.WNOHANG | os.WNOWAIT)
        except ChildProcessError:
            return
        if ended is None:
            return
        yield ended.si_pid


def rename_process(name: str) -> None:
    """Sets the name that `ps -o comm` shows, of at most 15 bytes."""
    _prctl(_PR_SET_NAME, name.encode()[:15] + b"\0")


def host_wait(pid: int) -> float:
    """Returns the seconds for which the threads of a process have waited for a CPU until now;
    infinite while the process waits for a disk or for memory, 0 where the kernel does not say."""
    try:
        if Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] == "D":
            return math.inf
        waits = [
            each.read_text().split()[1] for each in Path(f"/proc/{pid}/task").glob("*/schedstat")
        ]
    except (OSError, IndexError):
        return 0.0
    return sum(map(int, waits)) / NS_PER_S
