"""Records of the processes that a data folder has started:
one small file each, for the start after a crash.

A process is recognised by its pid and the moment it started (clock ticks since boot, with the
boot's id), because pids are used again.
"""

import contextlib
import json
import os
import signal
import time
from collections.abc import Iterable, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Self

from infra import processes
from infra.processes import boot_id
from infra.vault import key_file

#: Seconds that a leftover process gets before SIGKILL. PostgreSQL writes a checkpoint in that time.
STOP_GRACE_S = 10.0


def start_ticks(pid: int) -> int | None:
    """Returns when the process started, in clock ticks since boot; None if it is gone or only a
    zombie."""
    process = processes.read_process(pid)
    return process.started if process is not None and process.alive else None


def session_members(session: int, since: int = 0) -> list[int]:
    """Returns the living processes of one session (setsid) that started at `since` ticks or
    later."""
    return [
        process.pid
        for process in processes.all_processes()
        if process.alive and process.session == session and process.started >= since
    ]


def wait_gone(pids: Sequence[int], timeout: float) -> list[int]:
    """Waits until these processes are gone; returns those that are not after `timeout` seconds.

    A zombie counts as gone: in a container nobody may ask for its end.
    (`psutil.wait_procs` waits for it.)
    """
    deadline = time.monotonic() + timeout
    while (
        remaining := [pid for pid in pids if start_ticks(pid) is not None]
    ) and time.monotonic() < deadline:
        time.sleep(0.01)
    return remaining


def send_signal(pids: Iterable[int], how: signal.Signals) -> None:
    for pid in pids:
        with contextlib.suppress(ProcessLookupError):
            os.kill(pid, how)


@dataclass(frozen=True)
class ProcessRecord:
    """A process that leads its own session."""

    name: str
    pid: int
    started: int
    boot: str
    #: True if its children outlive it on purpose, as the node's workers do.
    keeps_children: bool = False

    @classmethod
    def of(cls, name: str, pid: int, *, keeps_children: bool = False) -> Self | None:
        """Makes the record of a process; None if it has ended already."""
        started = start_ticks(pid)
        return None if started is None else cls(name, pid, started, boot_id(), keeps_children)

    def write(self, folder: Path) -> None:
        data = json.dumps(asdict(self)).encode()
        key_file.write_key_file(folder / f"{self.name}.json", data, private=True)

    def living(self) -> list[int]:
        """Returns the pids of the process and the rest of its session, even when the process itself
        has ended."""
        if self.boot != boot_id():
            return []
        now = start_ticks(self.pid)
        leader = [self.pid] if now == self.started else []
        # With another start time, another process has the pid now.
        if self.keeps_children or now not in (None, self.started):
            return leader
        return sorted({*leader, *session_members(self.pid, self.started)})

    def end(self, how: signal.Signals = signal.SIGTERM, grace: float = STOP_GRACE_S) -> bool:
        """Ends what is alive of it. Returns whether anything was."""
        alive = self.living()
        if not alive:
            return False
        send_signal(alive[:1] if self.pid in alive else alive, signal.SIGCONT)
        send_signal([self.pid] if self.pid in alive else alive, how)
        if wait_gone(alive, grace):
            remaining = self.living()
            send_signal(remaining, signal.SIGKILL)
            wait_gone(remaining, grace)
        return True


def read_records(folder: Path) -> list[ProcessRecord]:
    """Reads the records of a folder; one that cannot be read (a crash while it was written) is
    skipped."""
    records = []
    for path in sorted(folder.glob("*.json")):
        try:
            records.append(ProcessRecord(**json.loads(path.read_text(encoding="utf-8"))))
        except (OSError, ValueError, TypeError):
            continue
    return records


def forget_record(folder: Path, name: str) -> None:
    (folder / f"{name}.json").unlink(missing_ok=True)
