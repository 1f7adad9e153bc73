"""Memory limits by cgroup, v1 or v2, where the host lets this user set them: for a node's workers,
and for the processes of own jobs.

The groups lie below their maker's own group, so a limit on a node limits its workers too.

| | v1 | v2 |
|---|---|---|
| hard (past it only this group is killed) | memory.limit_in_bytes | memory.max, memory.swap.max |
| soft (what the host reserves) | memory.soft_limit_in_bytes | memory.low |
| all die together | - | memory.oom.group |
| in use | memory.usage_in_bytes | memory.current |
| kills counted in | memory.oom_control | memory.events |
"""

import contextlib
import errno
import os
import signal
from dataclasses import dataclass
from pathlib import Path

from worker_runtime.protocol.errors import BerthError


class LimitsUnavailable(BerthError, code="LIMITS_UNAVAILABLE"):
    """This host does not allow this process to set limits."""


#: What one step adds to a group at most: a huge page.
_MAX_CHARGE_BYTES = 2 * 1024 * 1024
#: The group into which a process moves that limits groups next to it (v2).
LEAF = "berth-leaf"


@dataclass(frozen=True, slots=True)
class MemoryGroup:
    """The cgroup of one worker, or of one process of own jobs."""

    path: Path

    def add(self, pid: int) -> None:
        """Moves a process into the group; what it forks later is in it too."""
        (self.path / "cgroup.procs").write_text(str(pid))

    def members(self) -> list[int]:
        try:
            return [int(line) for line in (self.path / "cgroup.procs").read_text().split()]
        except OSError:  # the group has been removed
            return []

    def kill(self) -> None:
        """Sends SIGKILL to every member. The next call catches what was forked meanwhile."""
        at_once = self.path / "cgroup.kill"  # v2, Linux 5.14
        if at_once.exists():
            at_once.write_text("1")
            return
        for pid in self.members():
            with contextlib.suppress(ProcessLookupError, PermissionError):
                os.kill(pid, signal.SIGKILL)

    def usage(self) -> int:
        """Returns the bytes that count for the limit. Raises `OSError`."""
        for name in ("memory.current", "memory.usage_in_bytes"):
            with contextlib.suppress(FileNotFoundError):
                return int((self.path / name).read_text())
        raise FileNotFoundError(errno.ENOENT, "the group is gone")

    def oom_kills(self) -> int:
        """Counts the processes of this group that the kernel has killed because there was no memory
        left, in this group or in one above."""
        for name in ("memory.oom_control", "memory.events"):
            with contextlib.suppress(OSError):
                return _count(self.path / name, "oom_kill")
        return 0

    def exceeded_limit(self) -> bool:
        """Returns True if the kernel has killed a process of this group for the group's own limit,
        and not because the host, or a group above, had no memory left."""
        if not self.oom_kills():
            return False
        with contextlib.suppress(OSError):
            limit = int((self.path / "memory.limit_in_bytes").read_text())
            peak = int((self.path / "memory.max_usage_in_bytes").read_text())
            # v1 does not count every refusal in `memory.failcnt`: not those of the limit with swap.
            return peak + _MAX_CHARGE_BYTES >= limit
        with contextlib.suppress(OSError):
            return _count(self.path / "memory.events", "oom") > 0
        return False

    def remove(self) -> bool:
        """Removes the group; False while a process is inside."""
        with contextlib.suppress(OSError):
            self.path.rmdir()
        return not self.path.exists()


@dataclass(frozen=True, slots=True)
class MemoryGroups:
    """Makes cgroups in one folder, and sets their limits."""

    version: int
    folder: Path

    def path(self, name: str) -> Path:
        return self.folder / name

    def existing(self) -> list[MemoryGroup]:
        return [MemoryGroup(path) for path in self.folder.iterdir() if path.is_dir()]

    def create(
        self, name: str, *, hard: int, soft: int | None = None, die_together: bool = False
    ) -> MemoryGroup:
        """Makes a group with limits in bytes. On an `OSError` nothing is left behind.

        `die_together`: the kernel kills the whole group at its hard limit; v1 kills one process.
        """
        path = self.path(name)
        path.mkdir(parents=True)
        try:
            _write(path, self._limits(hard, soft, die_together))
        except OSError:
            with contextlib.suppress(OSError):
                path.rmdir()
            raise
        return MemoryGroup(path)

    def change(self, group: MemoryGroup, hard: int) -> None:
        """Sets another hard limit. Raises `OSError`; v1 refuses one below what is in use (EBUSY),
        and v2 kills for it."""
        limits = self._limits(hard)
        try:
            _write(group.path, limits)
        except OSError:
            if self.version == 2:
                raise
            _write(group.path, limits[::-1])  # the limit with swap must never be the lower one

    def _limits(
        self, hard: int, soft: int | None = None, die_together: bool = False
    ) -> list[tuple[str, int, bool]]:
        """Returns files, what is written to them, and whether that must succeed."""
        if self.version == 1:
            limits = [
                ("memory.limit_in_bytes", hard, True),
                ("memory.memsw.limit_in_bytes", hard, False),  # absent without swap accounting
            ]
        else:
            limits = [("memory.max", hard, True), ("memory.swap.max", 0, False)]
        if soft is not None:
            name = "memory.soft_limit_in_bytes" if self.version == 1 else "memory.low"
            limits.append((name, soft, False))
        if die_together and self.version == 2:
            limits.append(("memory.oom.group", 1, False))
        return limits

    def close(self) -> None:
        """Removes the folder if no group is left in it."""
        with contextlib.suppress(OSError):
            self.folder.rmdir()


def _count(file: Path, key: str) -> int:
    """Returns the number after a key in a file of lines `key number`; 0 if there is none. Raises
    `OSError`."""
    for line in file.read_text().splitlines():
        name, _, value = line.partition(" ")
        if name == key:
            return int(value)
    return 0


def _write(path: Path, limits: list[tuple[str, int, bool]]) -> None:
    for file, value, needed in limits:
        with contextlib.nullcontext() if needed else contextlib.suppress(OSError):
            (path / file).write_text(str(value))


def find_groups(
    name: str, parent: Path | None = None, proc: Path = Path("/proc/self")
) -> MemoryGroups:
    """Returns the groups below this process's own group, in a folder `name`, if it may limit memory
    there.

    `parent` is a group delegated to the node, to be used instead of its own. Raises
    `LimitsUnavailable`.
    """
    version, own = (_version(parent), parent) if parent else group_for_groups(proc)
    folder = own / name
    try:
        folder.mkdir(exist_ok=True)
        if version == 2:
            delegate(own, "memory")
            (folder / "cgroup.subtree_control").write_text("+memory")
        groups = MemoryGroups(version, folder)
        # Tries it once, before anybody relies on the limits.
        groups.create(f"trial-{os.getpid()}", hard=1 << 30).remove()
    except OSError as error:
        with contextlib.suppress(OSError):
            folder.rmdir()
        raise LimitsUnavailable(f"cgroup v{version} at {own}: {error.strerror}") from None
    return groups


def group_for_groups(proc: Path = Path("/proc/self")) -> tuple[int, Path]:
    """Returns the version of the hierarchy that limits memory, and the group below which this
    process makes groups. Raises `LimitsUnavailable`."""
    version, own = own_group("memory", proc)
    # If it is a leaf, the process that has started us has moved there.
    return version, own.parent if own.name == LEAF else own


def _version(group: Path) -> int:
    return 1 if (group / "memory.limit_in_bytes").exists() else 2


def own_group(controller: str, proc: Path = Path("/proc/self")) -> tuple[int, Path]:
    """Returns the version of the hierarchy with this controller, and our folder in it. Raises
    `LimitsUnavailable`."""
    memberships = {}  # controllers, comma-separated; "" is v2 → path
    for line in (proc / "cgroup").read_text().splitlines():
        _, controllers, path = line.split(":", 2)
        memberships[controllers] = path
    for line in (proc / "mountinfo").read_text().splitlines():
        fields, _, right = line.partition(" - ")
        root, mount = fields.split(" ")[3:5]
        kind, _, options = right.split(" ", 2)
        if kind == "cgroup" and controller in options.split(","):
            for names, path in memberships.items():
                if controller in names.split(","):
                    return 1, _inside(Path(mount), root, path)
        if kind == "cgroup2" and "" in memberships:
            own = _inside(Path(mount), root, memberships[""])
            with contextlib.suppress(OSError):
                if controller in (own / "cgroup.controllers").read_text().split():
                    return 2, own
    raise LimitsUnavailable(f"no cgroup hierarchy with a {controller} controller is mounted")


def _inside(mount: Path, root: str, path: str) -> Path:
    """Returns a group's folder in a mount that shows only the hierarchy below `root`."""
    below = path.removeprefix(root) if root != "/" else path
    return mount / below.lstrip("/")


def leave_room_for_groups() -> None:
    """Moves this process into a leaf group where it has to (v2), so that processes that it starts
    can limit groups next to that leaf. Does nothing where the host does not allow it."""
    with contextlib.suppress(LimitsUnavailable, OSError):
        version, own = own_group("memory")
        if version == 2 and own.name != LEAF:
            delegate(own, "memory")


def delegate(own: Path, controller: str) -> None:
    """Enables a controller for the groups below, in v2. Raises `OSError` when `own` has other
    processes.

    A group that does so may hold no process itself, so this process moves into a leaf group.
    """
    control = own / "cgroup.subtree_control"
    if controller in control.read_text().split():
        return
    leaf = own / LEAF
    leaf.mkdir(exist_ok=True)
    (leaf / "cgroup.procs").write_text(str(os.getpid()))
    try:
        control.write_text(f"+{controller}")
    except OSError:
        (own / "cgroup.procs").write_text(str(os.getpid()))
        leaf.rmdir()
        raise
