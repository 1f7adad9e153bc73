"""Memory cgroups around the children of own jobs, where the runner may make some.

The kernel holds a child and all it has started to its limit, however fast they allocate. A runner's
groups lie in a folder that it keeps locked while it lives, so that the next runner knows which
folders are left over.
"""

import contextlib
import errno
import fcntl
import os
import time
from pathlib import Path

from worker_runtime.process.cgroup import (
    LimitsUnavailable,
    MemoryGroup,
    MemoryGroups,
    find_groups,
    group_for_groups,
)
from worker_runtime.process.log import Log

#: A runner's folder; its process id follows.
_PREFIX = "berth-jobs-"
#: Where v2 counts kills, the line for none in v1 and v2, and the bytes of all lines.
_EVENTS, _NO_KILL, _MAX_COUNTS_BYTES = "memory.events", b"\noom_kill 0\n", 4096
#: Seconds that the processes in a group of a dead runner have for their end after a kill.
_LEFTOVER_TIMEOUT_S = 2.0
#: Seconds between two tries to remove the group of a child that has ended.
_REMOVE_INTERVAL_S = 0.1


class ChildGroup:
    """The cgroup of one child, with its limit in bytes."""

    def __init__(self, group: MemoryGroup, limit: int) -> None:
        """Raises `OSError`."""
        self.group = group
        self.limit = limit
        # It stays open: to open it after each job would take ten times as long as to read it.
        name = "memory.oom_control" if (group.path / "memory.oom_control").exists() else _EVENTS
        self._kills = os.open(group.path / name, os.O_RDONLY | os.O_CLOEXEC)

    def add(self, pid: int) -> None:
        """Moves the child into its group. Raises `OSError`."""
        self.group.add(pid)

    def exceeded_limit(self) -> bool:
        """Returns True if the kernel has killed the child, or what it has started, at its limit."""
        try:
            counts = os.pread(self._kills, _MAX_COUNTS_BYTES, 0)
        except OSError:  # it was removed
            return False
        return _NO_KILL not in counts and self.group.exceeded_limit()

    def close(self) -> None:
        os.close(self._kills)


class JobGroups:
    """The cgroups of one runner's children."""

    def __init__(self, groups: MemoryGroups) -> None:
        """Locks the folder. Raises `OSError`."""
        self._groups = groups
        self._lock = _open_folder(groups.folder)
        self._ended: list[MemoryGroup] = []
        self._remove_at = 0.0
        fcntl.flock(self._lock, fcntl.LOCK_EX | fcntl.LOCK_NB)

    @property
    def version(self) -> int:
        return self._groups.version

    @property
    def folder(self) -> Path:
        return self._groups.folder

    @property
    def parent(self) -> Path:
        """The group in which the runner's folder lies. No job may write below it."""
        return self._groups.folder.parent

    def create(self, number: int, limit: int) -> ChildGroup:
        """Makes the group of a child. Raises `OSError`."""
        group = self._groups.create(str(number), hard=limit, die_together=True)
        try:
            return ChildGroup(group, limit)
        except OSError:
            group.remove()
            raise

    def change(self, child: ChildGroup, limit: int) -> bool:
        """Changes a child's limit; False if it has more in use. Raises `OSError`."""
        if limit == child.limit:
            return True
        try:
            if limit < child.limit and child.group.usage() >= limit:
                return False
            self._groups.change(child.group, limit)
        except OSError as error:
            if error.errno == errno.EBUSY:
                return False
            raise
        child.limit = limit
        return True

    def end(self, child: ChildGroup) -> None:
        """Removes the group of a child that has ended, and kills what is left in it."""
        child.close()
        self._remove(child.group)

    def _remove(self, group: MemoryGroup) -> None:
        if not group.remove():
            group.kill()
            self._ended.append(group)
            self._remove_at = time.monotonic() + _REMOVE_INTERVAL_S

    def run_due(self) -> None:
        """Tries again to remove groups whose last processes have just been killed."""
        if self._ended and time.monotonic() >= self._remove_at:
            ended, self._ended = self._ended, []
            for group in ended:
                self._remove(group)

    def due_at(self, otherwise: float) -> float:
        """Returns when `run_due` has something to do (`time.monotonic`)."""
        return self._remove_at if self._ended else otherwise

    def close(self) -> None:
        """Removes all groups, whose processes have been killed, and the folder."""
        _remove_all(self._groups)
        os.close(self._lock)


def open_job_groups(log: Log) -> JobGroups | None:
    """Returns what makes this runner's groups; None where it may make none. Says so in the log."""
    try:
        _, parent = group_for_groups()
        starting = _open_folder(parent)
        try:
            # One runner at a time: a folder that is not locked yet would count as a leftover.
            fcntl.flock(starting, fcntl.LOCK_EX)
            made = JobGroups(find_groups(f"{_PREFIX}{os.getpid()}", parent))
            _remove_leftovers(parent, made.version)
        finally:
            os.close(starting)
    except (LimitsUnavailable, OSError) as error:
        log.info("own_jobs_memory", limited_by="resident size", reason=str(error))
        return None
    log.info("own_jobs_memory", limited_by=f"cgroup v{made.version}", folder=str(made.folder))
    return made


def _remove_leftovers(parent: Path, version: int) -> None:
    """Removes the folders of runners that have died, and kills what their jobs have left."""
    for folder in parent.glob(f"{_PREFIX}*"):
        with contextlib.suppress(OSError):  # its runner lives: perhaps it is this one
            lock = _open_folder(folder)
            try:
                fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
                _remove_all(MemoryGroups(version, folder))
            finally:
                os.close(lock)


def _open_folder(folder: Path) -> int:
    return os.open(folder, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)


def _remove_all(groups: MemoryGroups) -> None:
    until = time.monotonic() + _LEFTOVER_TIMEOUT_S
    with contextlib.suppress(OSError):
        while remaining := [group for group in groups.existing() if not group.remove()]:
            for group in remaining:
                group.kill()
            if time.monotonic() > until:
                return
            time.sleep(0.01)
    groups.close()
