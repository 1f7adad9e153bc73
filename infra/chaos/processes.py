"""The processes of one worker, found and signalled as accidents would."""

from __future__ import annotations

import contextlib
import os
import signal
from dataclasses import dataclass
from pathlib import Path

import psutil


@dataclass(frozen=True)
class Processes:
    """Pids of one worker; 0 for one that is not there."""

    zygote: int
    supervisor: int
    session: int

    @property
    def all(self) -> tuple[int, ...]:
        return tuple(pid for pid in (self.zygote, self.supervisor, self.session) if pid)


def processes_of(worker_id: str) -> Processes:
    """By the argument that the launcher gives to a worker's first process."""
    wanted = worker_id.encode()
    for entry in Path("/proc").iterdir():
        with contextlib.suppress(OSError, psutil.NoSuchProcess):
            if entry.name.isdigit() and wanted in (entry / "cmdline").read_bytes().split(b"\0"):
                parent = psutil.Process(int(entry.name))
                if (parent.ppid() and (entry / "comm").read_text().strip()) != "berth-zygote":
                    continue
                # The kernel keeps 15 bytes of a name.
                children = {child.name()[:15]: child.pid for child in parent.children()}
                return Processes(
                    parent.pid, children.get("berth-superviso", 0), children.get("berth-session", 0)
                )
    return Processes(0, 0, 0)


def send(number: signal.Signals, *pids: int) -> None:
    """Sends a signal to those that still run."""
    for pid in pids:
        if pid:
            with contextlib.suppress(ProcessLookupError):
                os.kill(pid, number)
