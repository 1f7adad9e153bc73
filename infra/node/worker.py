"""One worker process of this node: how it is started,
adopted, signalled and ended; and the workers' logs.

A worker writes to its log file directly, not through the node, so its output survives the node's
death. The files are opened for appending, so a long one can be cut at its start while the worker
continues writing.
"""

import asyncio
import contextlib
import os
import shutil
import signal
import subprocess
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import structlog

from infra import processes
from infra.node.register import NodeEntry
from worker_runtime.process.cgroup import MemoryGroup
from worker_runtime.protocol.launch import MEMORY, memory_prefix

#: Bytes a log may have before it is cut; as much again is kept in `<worker>.log.1`.
MAX_LOG_BYTES = 4 * 1024 * 1024
#: Logs kept, newest first.
MAX_LOGS_KEPT = 300
#: Seconds between two checks; what a runaway worker writes meanwhile comes on top of the cap.
LOG_CHECK_INTERVAL_S = 5.0


class WorkerLogs:
    def __init__(
        self, folder: Path, *, cap: int = MAX_LOG_BYTES, kept: int = MAX_LOGS_KEPT
    ) -> None:
        self._folder = folder
        self._cap = cap
        self._kept = kept
        folder.mkdir(parents=True, exist_ok=True, mode=0o700)

    def open(self, worker_id: str) -> int:
        """Opens a descriptor for a worker's output. Where no log can be opened the output goes
        nowhere."""
        path = self._folder / f"{worker_id}.log"
        try:
            self._folder.mkdir(parents=True, exist_ok=True, mode=0o700)
            return os.open(path, os.O_WRONLY | os.O_APPEND | os.O_CREAT | os.O_CLOEXEC, 0o600)
        except OSError as error:  # a worker trades without a log, too
            structlog.get_logger().error("node.no_log", worker=worker_id, reason=str(error))
            return os.open(os.devnull, os.O_WRONLY | os.O_CLOEXEC)

    def sweep(self, living: set[str]) -> None:
        """Cuts long logs, and removes the oldest logs of workers that are no longer `living`."""
        ages: list[tuple[float, Path]] = []
        for path in self._folder.glob("*.log"):
            with contextlib.suppress(OSError):
                facts = path.stat()
                if facts.st_size > self._cap:
                    self._cut(path, facts.st_size)
                if path.stem not in living:
                    ages.append((facts.st_mtime, path))
        ages.sort(reverse=True)
        for _, path in ages[self._kept :]:
            path.unlink(missing_ok=True)
            path.with_suffix(".log.1").unlink(missing_ok=True)

    def _cut(self, path: Path, size: int) -> None:
        with path.open("r+b") as file:
            file.seek(size - self._cap)
            descriptor = os.open(
                path.with_suffix(".log.1"),
                os.O_WRONLY | os.O_CREAT | os.O_TRUNC | os.O_CLOEXEC,
                0o600,
            )
            with open(descriptor, "wb") as older:
                older.write(file.read(self._cap))
            file.truncate(0)


#: The part of the node's environment that a worker gets: nothing that could hold a secret.
PASSED_ON = ("PATH", "LANG", "LC_ALL", "LC_CTYPE", "TZ", "PYTHONPATH", "PYTHONHOME", "PYTHONUTF8")


@dataclass(kw_only=True)
class WorkerProcess:
    """A running worker. `child` is None for an adopted one, whose exit code nobody sees."""

    entry: NodeEntry
    #: None when the main process had ended before this node started.
    pidfd: int | None
    group: MemoryGroup | None
    child: subprocess.Popen[bytes] | None = None
    #: Set once the end of all its processes is confirmed and recorded.
    ended: asyncio.Event = field(default_factory=asyncio.Event)
    stop_reason: str | None = None
    #: Whether we had to use SIGKILL.
    forced: bool = False
    #: Whether the process group with the worker's number is certainly its own.
    owns_group: bool = True
    #: Its processes outside of its group and session, when it was killed.
    escaped: dict[int, processes.ProcessStat] = field(default_factory=dict)

    @property
    def pid(self) -> int:
        return self.entry.pid

    def terminate(self) -> None:
        """Asks it to end. A stopped process is continued too: it would never see the signal."""
        if self.pidfd is not None:
            processes.signal_pidfd(self.pidfd, signal.SIGTERM)
            processes.signal_pidfd(self.pidfd, signal.SIGCONT)

    def kill(self) -> None:
        """Sends SIGKILL to all its processes."""
        if self.group is None:  # a cgroup knows them all
            self._note_escaped()
        if self.owns_group:
            processes.kill_group(self.pid, self.entry.started)
        if self.group is not None:
            with contextlib.suppress(OSError):
                self.group.kill()
        for process in self.escaped.values():
            processes.kill_process(process)

    def _note_escaped(self) -> None:
        """Remembers which processes outside of its group are its own, as long as its main process
        tells: what was forked twice is a child of that, until it ends."""
        main = processes.read_process(self.pid)
        if main is not None and main.alive and main.started == self.entry.started:
            for process in processes.descendants(self.pid):
                if process.group != self.pid:
                    self.escaped[process.pid] = process

    def reap(self) -> int | None:
        """Returns the exit code of the ended main process, negative for a signal; None if nobody
        saw it."""
        return self.child.wait() if self.child else None

    def remaining(self) -> list[int]:
        """Returns the processes of an ended worker that still live. Call it after `reap`."""
        inside = self.group.members() if self.group else []
        inside += [pid for pid, process in self.escaped.items() if processes.is_alive(process)]
        if inside or not self.owns_group:
            return inside
        return [] if processes.group_is_empty(self.pid) else processes.live_members(self.pid)

    def close(self) -> None:
        """Call it when none of its processes is left. Folders in memory hold a broker's tokens."""
        for folder in MEMORY.glob(f"{memory_prefix(self.pid)}*"):
            shutil.rmtree(folder, ignore_errors=True)
        if self.pidfd is not None:
            os.close(self.pidfd)


def clean_environment(source: Mapping[str, str], home: Path) -> dict[str, str]:
    """Returns a worker's environment. HOME and TMPDIR are its own folder, for the files of
    libraries."""
    kept = {name: source[name] for name in PASSED_ON if name in source}
    return {**kept, "HOME": str(home), "TMPDIR": str(home)}


def spawn_worker(
    command: Sequence[str],
    entry: NodeEntry,
    *,
    home: Path,
    output: int,
    user: int | None = None,
) -> subprocess.Popen[bytes]:
    """Starts the process of one worker, which waits for its config on standard input. Raises
    `OSError`.

    `user`: the user id under which it runs; None: our own.

    Its arguments name worker and task: `ps` shows them, and the successor of a node that is killed
    right here finds the process by them.
    """
    home.mkdir(parents=True, exist_ok=True, mode=0o700)
    identity: dict[str, Any] = {}
    if user is not None:
        os.chown(home, user, user)
        identity = {"user": user, "group": user, "extra_groups": []}
    return subprocess.Popen(
        [*command, entry.worker_id, entry.task_id],
        stdin=subprocess.PIPE,
        stdout=output,
        stderr=output,
        cwd=home,
        env=clean_environment(os.environ, home),
        start_new_session=True,
        bufsize=0,
        **identity,
    )


def hand_over_config(child: subprocess.Popen[bytes], config: bytes) -> None:
    """Sends a started worker its config. A worker that has died meanwhile is no error."""
    if child.stdin is None:
        raise ValueError("the worker was started without standard input")
    with contextlib.suppress(BrokenPipeError):
        child.stdin.write(config)
    child.stdin.close()


def discard_child(child: subprocess.Popen[bytes]) -> None:
    """Ends a started worker that has no config yet."""
    child.kill()
    child.wait()
    if child.stdin is not None:
        child.stdin.close()


def adopt_worker(entry: NodeEntry, boot_id: str) -> WorkerProcess | None:
    """Adopts the worker that an earlier node started; None if it ended with the host.

    Without `pidfd` its main process ended while no node ran; its other processes may be left.
    """
    if entry.boot_id != boot_id:
        return None
    pidfd = processes.open_pidfd(entry.pid, entry.started)
    return WorkerProcess(
        entry=entry,
        pidfd=pidfd,
        group=MemoryGroup(Path(entry.cgroup)) if entry.cgroup else None,
        stop_reason=entry.stop_reason,
        # A group without its leader may have gone,
        # and its number reused; our processes name the task.
        owns_group=pidfd is not None or bool(processes.find_by_argument(entry.task_id)),
    )
