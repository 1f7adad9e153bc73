"""Memory limits for workers by cgroup, v1 or v2, where the host lets this user set them.

The workers' groups lie below the node's own group, so a limit on the node limits its workers too.

| | v1 | v2 |
|---|---|---|
| hard (past it only this worker is killed) | memory.limit_in_bytes | memory.max, memory.swap.max |
| soft (what the host reserves) | memory.soft_limit_in_bytes | memory.low |
| kills counted in | memory.oom_control | memory.events |
"""

import contextlib
import os
import signal
from dataclasses import dataclass
from pathlib import Path

from worker_runtime.protocol.errors import BerthError


class LimitsUnavailable(BerthError, code="LIMITS_UNAVAILABLE"):
    """This host does not allow the node to set limits."""


@dataclass(frozen=True, slots=True)
class MemoryGroup:
    """The cgroup of one worker."""

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

    def oom_kills(self) -> int:
        """Counts the processes of this group that the kernel killed for its hard limit."""
        for name in ("memory.events", "memory.oom_control"):
            with contextlib.suppress(OSError):
                for line in (self.path / name).read_text().splitlines():
                    key, _, value = line.partition(" ")
                    if key == "oom_kill":
                        return int(value)
        return 0

    def remove(self) -> bool:
        """Removes the group; False while a process is inside."""
        with contextlib.suppress(OSError):
            self.path.rmdir()
        return not self.path.exists()


@dataclass(frozen=True, slots=True)
class MemoryGroups:
    """Makes the cgroups of a node's workers."""

    version: int
    folder: Path

    def path(self, name: str) -> Path:
        return self.folder / name

    def existing(self) -> list[MemoryGroup]:
        return [MemoryGroup(path) for path in self.folder.iterdir() if path.is_dir()]

    def create(self, name: str, *, soft: int, hard: int) -> MemoryGroup:
        """Makes a group with limits in bytes. On an `OSError` nothing is left behind."""
        path = self.path(name)
        path.mkdir(parents=True)
        try:
            for file, value, needed in self._limits(soft, hard):
                with contextlib.nullcontext() if needed else contextlib.suppress(OSError):
                    (path / file).write_text(str(value))
        except OSError:
            with contextlib.suppress(OSError):
                path.rmdir()
            raise
        return MemoryGroup(path)

    def _limits(self, soft: int, hard: int) -> list[tuple[str, int, bool]]:
        if self.version == 1:
            return [
                ("memory.limit_in_bytes", hard, True),
                ("memory.memsw.limit_in_bytes", hard, False),  # absent without swap accounting
                ("memory.soft_limit_in_bytes", soft, False),
            ]
        return [
            ("memory.max", hard, True),
            ("memory.swap.max", 0, False),
            ("memory.low", soft, False),
        ]

    def close(self) -> None:
        """Removes the folder if no worker is left in it."""
        with contextlib.suppress(OSError):
            self.folder.rmdir()


def find_groups(
    name: str, parent: Path | None = None, proc: Path = Path("/proc/self")
) -> MemoryGroups:
    """Returns the groups below this process's own group, in a folder `name`, if it may limit memory
    there.

    `parent` is a group delegated to the node, to be used instead of its own. Raises
    `LimitsUnavailable`.
    """
    version, own = (_version(parent), parent) if parent else own_group("memory", proc)
    folder = own / name
    try:
        folder.mkdir(exist_ok=True)
        if version == 2:
            delegate(own, "memory")
            (folder / "cgroup.subtree_control").write_text("+memory")
        groups = MemoryGroups(version, folder)
        # Tries it once, before any worker relies on the limits.
        groups.create(f"trial-{os.getpid()}", soft=1 << 30, hard=1 << 30).remove()
    except OSError as error:
        with contextlib.suppress(OSError):
            folder.rmdir()
        raise LimitsUnavailable(f"cgroup v{version} at {own}: {error.strerror}") from None
    return groups


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


def delegate(own: Path, controller: str) -> None:
    """Enables a controller for the groups below, in v2. Raises `OSError` when `own` has other
    processes.

    A group that does so may hold no process itself, so the node moves into a leaf group.
    """
    control = own / "cgroup.subtree_control"
    if controller in control.read_text().split():
        return
    leaf = own / "berth-node"
    leaf.mkdir(exist_ok=True)
    (leaf / "cgroup.procs").write_text(str(os.getpid()))
    try:
        control.write_text(f"+{controller}")
    except OSError:
        (own / "cgroup.procs").write_text(str(os.getpid()))
        leaf.rmdir()
        raise
