"""The processes of one worker, and ways to kill them as accidents do."""

from __future__ import annotations

import contextlib
import os
import signal
from dataclasses import dataclass
from enum import StrEnum
from pathlib import Path

import psutil


@dataclass(frozen=True)
class WorkerProcesses:
    """Pids of one worker; 0 for one that is not there."""

    zygote: int
    supervisor: int
    session: int

    @property
    def all(self) -> tuple[int, ...]:
        return tuple(pid for pid in (self.zygote, self.supervisor, self.session) if pid)


def processes_of(worker_id: str) -> WorkerProcesses:
    """Finds them by the argument that the launcher gives to a worker's first process."""
    argument = worker_id.encode()
    for entry in Path("/proc").iterdir():
        with contextlib.suppress(OSError, psutil.NoSuchProcess):
            if entry.name.isdigit() and argument in (entry / "cmdline").read_bytes().split(b"\0"):
                parent = psutil.Process(int(entry.name))
                if (parent.ppid() and (entry / "comm").read_text().strip()) != "berth-zygote":
                    continue
                # The kernel keeps 15 bytes of a name.
                children = {child.name()[:15]: child.pid for child in parent.children()}
                return WorkerProcesses(
                    parent.pid, children.get("berth-superviso", 0), children.get("berth-session", 0)
                )
    return WorkerProcesses(0, 0, 0)


def send_signal(number: signal.Signals, *pids: int) -> None:
    """Sends a signal to those that still run."""
    for pid in pids:
        if pid:
            with contextlib.suppress(ProcessLookupError):
                os.kill(pid, number)


class WorkerKill(StrEnum):
    """Which processes of a worker are killed at once."""

    #: Every process of the worker: the kernel's OOM killer with `memory.oom.group`, or a lost host.
    TREE = "tree"
    #: The first process alone, the parent of session and supervisor;
    #: its children follow by PDEATHSIG.
    ZYGOTE = "zygote"
    #: The session process alone: the worker stays, and replaces it in place.
    SESSION = "session"
    #: The session process is stopped (SIGSTOP):
    #: the supervisor sees no pulse, kills it, and it is replaced.
    FROZEN = "frozen"

    @property
    def in_place(self) -> bool:
        """Returns True if the worker survives it, with its epoch."""
        return self in (WorkerKill.SESSION, WorkerKill.FROZEN)


def kill_worker(pid: int, session: int, kill: WorkerKill) -> None:
    """Harms the worker whose first process is `pid` and whose session process is `session`."""
    if kill.in_place:
        os.kill(session, signal.SIGSTOP if kill is WorkerKill.FROZEN else signal.SIGKILL)
        return
    if kill is WorkerKill.ZYGOTE:
        os.kill(pid, signal.SIGKILL)
        return
    root = psutil.Process(pid)
    family = [root, *root.children(recursive=True)]
    os.killpg(pid, signal.SIGKILL)  # one call for all that stayed in the worker's process group
    for process in family:
        with contextlib.suppress(psutil.NoSuchProcess):
            process.kill()
