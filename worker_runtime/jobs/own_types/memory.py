"""Memory cgroups around the children of own jobs, where the runner may make some.

The kernel holds a child and all it has started to its limit, however fast they allocate. A thread
makes and removes the groups and moves the children: the kernel takes up to 40 ms for a move
(measured; it waits until no process is being forked anywhere), and the runner's loop must not wait
for that. The groups lie in a folder that the runner keeps locked while it lives, so that the next
runner knows which folders are left over.
"""

import contextlib
import errno
import fcntl
import os
import time
from dataclasses import dataclass
from pathlib import Path
from queue import Empty, SimpleQueue
from threading import Thread

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


@dataclass(frozen=True, slots=True)
class ProcessIdentity:
    """One process, whatever later has its id."""

    pid: int
    parent: int
    #: Ticks from the boot of the host to its start.
    started: int


def find_process(pid: int) -> ProcessIdentity | None:
    """Returns a process; None if there is none."""
    try:
        text = Path(f"/proc/{pid}/stat").read_text(errors="replace")
        fields = text.rpartition(")")[2].split()
        return ProcessIdentity(pid, int(fields[1]), int(fields[19]))
    except (OSError, ValueError, IndexError):
        return None


class ChildGroup:
    """The cgroup of one child, with its limit in bytes."""

    def __init__(self, group: MemoryGroup, limit: int) -> None:
        """Raises `OSError`."""
        self.group = group
        self.limit = limit
        # It stays open: to open it after each job would take ten times as long as to read it.
        name = "memory.oom_control" if (group.path / "memory.oom_control").exists() else _EVENTS
        self._kills = os.open(group.path / name, os.O_RDONLY | os.O_CLOEXEC)

    def exceeded_limit(self) -> bool:
        """Returns True if the kernel has killed the child, or what it has started, at its limit."""
        try:
            counts = os.pread(self._kills, _MAX_COUNTS_BYTES, 0)
        except OSError:  # it was removed
            return False
        return _NO_KILL not in counts and self.group.exceeded_limit()

    def close(self) -> None:
        os.close(self._kills)


@dataclass(frozen=True, slots=True)
class GroupEntry:
    """Says what became of a child that was to be put into a group of its own."""

    number: int
    #: None if it is in no group.
    group: ChildGroup | None = None
    #: Why no group could be made, or none entered.
    error: OSError | None = None
    #: The process is not the fork server's child.
    is_foreign: bool = False


@dataclass(frozen=True, slots=True)
class _GroupEntrance:
    number: int
    pid: int
    server: int
    limit: int


class JobGroups:
    """The cgroups of one runner's children. All methods return at once."""

    def __init__(self, groups: MemoryGroups) -> None:
        """Locks the folder. Raises `OSError`."""
        self._groups = groups
        self._lock = _open_folder(groups.folder)
        fcntl.flock(self._lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        #: What the thread has to do: an entrance, a group that is to be removed; None: to end.
        self._tasks: SimpleQueue[_GroupEntrance | MemoryGroup | None] = SimpleQueue()
        self._entries: SimpleQueue[GroupEntry] = SimpleQueue()
        self._reader, self._writer = os.pipe2(os.O_NONBLOCK | os.O_CLOEXEC)
        self._thread = Thread(target=self._work, name="cgroups", daemon=True)
        self._thread.start()

    @property
    def version(self) -> int:
        return self._groups.version

    @property
    def folder(self) -> Path:
        return self._groups.folder

    @property
    def parent(self) -> Path:
        """The group in which the runner's folder lies."""
        return self._groups.folder.parent

    @property
    def hierarchy(self) -> Path:
        """The folder of all groups. A job that writes there could leave its own."""
        folder = self.parent
        while (folder.parent / "cgroup.procs").exists():
            folder = folder.parent
        return folder

    def fileno(self) -> int:
        """Returns a descriptor that is readable when there are `entries`."""
        return self._reader

    def enter(self, number: int, pid: int, server: int, limit: int) -> None:
        """Has a child put into a group of its own, with a limit in bytes, if `server` is its
        parent."""
        self._tasks.put(_GroupEntrance(number, pid, server, limit))

    def entries(self) -> list[GroupEntry]:
        """Returns what became of `enter` since the last call."""
        with contextlib.suppress(BlockingIOError):
            os.read(self._reader, 4096)
        entries = []
        with contextlib.suppress(Empty):
            while True:
                entries.append(self._entries.get_nowait())
        return entries

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
        """Has the group of a child that has ended removed, and what is left in it killed."""
        child.close()
        self._tasks.put(child.group)

    def close(self) -> None:
        """Removes all groups, whose processes have been killed, and the folder."""
        self._tasks.put(None)
        self._thread.join()
        for entry in self.entries():
            if entry.group is not None:
                entry.group.close()
        os.close(self._reader)
        os.close(self._writer)
        _remove_all(self._groups)
        os.close(self._lock)

    # --- the thread -------------------------------------------------------------------------------

    def _work(self) -> None:
        ended: list[MemoryGroup] = []
        while True:
            try:
                task = self._tasks.get(timeout=_REMOVE_INTERVAL_S if ended else None)
            except Empty:
                ended = [group for group in ended if not _remove(group)]
                continue
            if task is None:
                return
            if isinstance(task, MemoryGroup):
                if not _remove(task):
                    ended.append(task)
                continue
            self._entries.put(self._enter(task))
            with contextlib.suppress(BlockingIOError):
                os.write(self._writer, b"1")

    def _enter(self, entrance: _GroupEntrance) -> GroupEntry:
        """Moves a process only if the kernel says that the fork server is its parent, and looks
        again: the fork server, which has named it, may have let another process get its id."""
        number, pid = entrance.number, entrance.pid
        child = find_process(pid)
        if child is None:  # it has ended, which will be reported
            return GroupEntry(number)
        if child.parent != entrance.server:
            return GroupEntry(number, is_foreign=True)
        try:
            group = self._groups.create(str(number), hard=entrance.limit, die_together=True)
        except OSError as error:
            return GroupEntry(number, error=error)
        try:
            group.add(pid)
            if find_process(pid) in (child, None):
                return GroupEntry(number, ChildGroup(group, entrance.limit))
            MemoryGroup(self.parent).add(pid)
        except ProcessLookupError:
            group.remove()
            return GroupEntry(number)
        except OSError as error:
            group.remove()
            return GroupEntry(number, error=error)
        group.remove()
        return GroupEntry(number, is_foreign=True)


def _remove(group: MemoryGroup) -> bool:
    """Removes a group; False if it had processes, which were killed: it has to be tried again."""
    if group.remove():
        return True
    group.kill()
    return False


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
