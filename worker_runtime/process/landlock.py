"""Fences for processes that run the code of others, by the kernel's Landlock, which needs no right.

A process behind a fence, and all that it starts, reads no memory of and signals no process
outside of it, even of the same user; and it reaches no hidden folder. Signals need Linux 6.12,
memory and folders 5.13. A fence cannot be taken down. Call `kernel.forbid_privileges` first.
The layout and the numbers are those of <linux/landlock.h>; the system calls have the same
numbers on all architectures.
"""

import ctypes
import os
from collections.abc import Iterator, Sequence
from pathlib import Path

_CREATE_RULESET, _ADD_RULE, _RESTRICT_SELF = 444, 445, 446
_VERSION_FLAG = 1
_PATH_BENEATH = 1
#: EXECUTE, WRITE_FILE, READ_FILE; of folders also READ_DIR,
#: REMOVE_*, MAKE_*; REFER from version 2 on.
_OF_FILES, _OF_FOLDERS, _REFER = 0b111, (1 << 13) - 1, 1 << 13
#: Abstract sockets and signals, from version 6 on.
_SCOPES = 0b11
_O_PATH = os.O_PATH | os.O_CLOEXEC

_libc = ctypes.CDLL(None, use_errno=True)
_libc.syscall.restype = ctypes.c_long


class _RulesetAttributes(ctypes.Structure):
    _fields_ = [("fs", ctypes.c_uint64), ("net", ctypes.c_uint64), ("scoped", ctypes.c_uint64)]


class _PathBeneath(ctypes.Structure):
    _pack_ = 1
    _fields_ = [("allowed", ctypes.c_uint64), ("parent", ctypes.c_int32)]


def landlock_version() -> int:
    """Returns the version of the kernel's Landlock; 0 where there is none, or where it may not be
    used."""
    return max(
        0,
        int(
            _libc.syscall(_CREATE_RULESET, None, ctypes.c_size_t(0), ctypes.c_uint32(_VERSION_FLAG))
        ),
    )


class Fence:
    """A fence that this process, and later its forks, can step behind. Raises `OSError`."""

    def __init__(self, hidden: Sequence[Path] = ()) -> None:
        """Builds a fence that hides the folders and files `hidden` from every process behind it."""
        version = landlock_version()
        #: The things that it keeps apart: '' for nothing, 'memory', or 'memory and signals'.
        self.strength = "memory and signals" if version >= 6 else "memory" if version else ""
        self._ruleset = -1
        if not version:
            return
        rights = _OF_FOLDERS | (_REFER if version >= 2 else 0)
        scoped = _SCOPES if version >= 6 else 0
        # A ruleset without any right is refused;
        # making sockets' files is one that nobody will miss.
        handled = rights if hidden else 0 if scoped else 1 << 9
        attributes = _RulesetAttributes(handled, 0, scoped)
        size = 24 if version >= 6 else 8
        self._ruleset = _call(_CREATE_RULESET, ctypes.byref(attributes), ctypes.c_size_t(size), 0)
        if handled:
            for path in _everything_but([each.resolve() for each in hidden]):
                self._allow(path, handled)

    def step_behind(self) -> None:
        """Raises the fence around this thread's process,
        which must have one thread, and its forks."""
        if self._ruleset >= 0:
            _call(_RESTRICT_SELF, self._ruleset, 0)

    def close(self) -> None:
        if self._ruleset >= 0:
            os.close(self._ruleset)
            self._ruleset = -1

    def _allow(self, path: Path, rights: int) -> None:
        try:
            descriptor = os.open(path, _O_PATH | os.O_NOFOLLOW)
        except OSError:  # gone, or closed for this user anyway
            return
        try:
            allowed = rights if path.is_dir() and not path.is_symlink() else rights & _OF_FILES
            rule = _PathBeneath(allowed, descriptor)
            _call(_ADD_RULE, self._ruleset, _PATH_BENEATH, ctypes.byref(rule), 0)
        finally:
            os.close(descriptor)


def _everything_but(hidden: Sequence[Path]) -> Iterator[Path]:
    """Yields the largest folders that together hold all but the hidden ones: Landlock only knows
    what is allowed."""
    if not hidden:
        yield Path("/")
        return
    above = {parent for path in hidden for parent in path.parents}
    for folder in above:
        try:
            names = os.listdir(folder)
        except OSError:
            continue
        for name in names:
            path = folder / name
            if path not in above and path not in hidden:
                yield path


def _call(number: int, *arguments: object) -> int:
    """Raises `OSError`."""
    returned = int(_libc.syscall(number, *arguments))
    if returned < 0:
        code = ctypes.get_errno()
        raise OSError(code, os.strerror(code))
    return returned
