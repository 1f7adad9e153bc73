"""A worker as a process of its own, as the tests see it."""

from __future__ import annotations

import json
import signal
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import msgspec

from tests.support.systems.processes import alive
from tests.support.waiting import eventually
from worker_runtime.protocol.broker_reports import BrokerOrder
from worker_runtime.protocol.launch import WorkerConfig
from worker_runtime.protocol.messages import encode

ROOT = Path(__file__).parents[3]
#: Seconds a condition may take on a busy machine. A login of credentials of which no count is known
#: waits for 10 s.
PATIENCE = 25.0


class SpawnedWorker:
    """One worker as a process of its own, with its log and its broker's ledger."""

    def __init__(
        self, folder: Path, config: WorkerConfig, command: list[str] | None = None
    ) -> None:
        self.config = config
        self.worker_id = config.worker_id
        self.folder = folder / config.worker_id
        self.folder.mkdir()
        self.log_path = self.folder / "log.jsonl"
        self.started = time.monotonic()
        module = command or ["-m", "tests.support.workers.scripted_program", str(self.folder)]
        with self.log_path.open("wb") as log:
            self.process = subprocess.Popen(
                [sys.executable, *module], stdin=subprocess.PIPE, stdout=log, stderr=log, cwd=ROOT
            )
        assert self.process.stdin is not None
        self.process.stdin.write(encode(config))
        self.process.stdin.close()

    @property
    def pid(self) -> int:
        return self.process.pid

    def log(self) -> list[dict[str, Any]]:
        lines = self.log_path.read_text().splitlines()
        return [json.loads(line) for line in lines if line.endswith("}")]

    def logged(self, event: str) -> list[dict[str, Any]]:
        return [line for line in self.log() if line["event"] == event]

    def ledger(self, kind: str = "") -> list[dict[str, Any]]:
        path = self.folder / "ledger.jsonl"
        lines = path.read_text().splitlines() if path.exists() else []
        entries = [json.loads(line) for line in lines]
        return [entry for entry in entries if not kind or entry["what"] == kind]

    def placed(self) -> list[str]:
        return [entry["order_id"] for entry in self.ledger("place")]

    def tell_broker(self, name: str) -> None:
        (self.folder / name).touch()

    def broker_lists(self, *orders: BrokerOrder) -> None:
        """What the scripted broker answers when it is asked for the account's orders."""
        whole = self.folder / "listing.part"
        whole.write_bytes(msgspec.json.encode(orders))
        whole.rename(self.folder / "listing.json")

    def child(self, name: str) -> int:
        """The pid of `session` or `supervisor`; 0 while there is none."""
        children = Path(f"/proc/{self.pid}/task/{self.pid}/children")
        for pid in children.read_text().split():
            try:
                comm = Path(f"/proc/{pid}/comm").read_text().strip()
            except (FileNotFoundError, ProcessLookupError):
                continue
            if comm == f"berth-{name}"[:15] and alive(int(pid)):
                return int(pid)
        return 0

    def both(self) -> tuple[int, int]:
        """Session and supervisor, once both run."""
        return eventually(self._both, "a session and a supervisor")

    def _both(self) -> tuple[int, int] | None:
        session, supervisor = self.child("session"), self.child("supervisor")
        return (session, supervisor) if session and supervisor else None

    def end(self, how: signal.Signals = signal.SIGTERM) -> int:
        self.process.send_signal(how)
        return self.wait()

    def wait(self) -> int:
        return self.process.wait(PATIENCE)

    def kill(self) -> None:
        if self.process.poll() is None:
            self.process.kill()
        self.process.wait()
