"""Runner processes for the tests, and the ledger that their jobs write."""

from __future__ import annotations

import itertools
import json
import signal
import subprocess
import sys
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import msgspec

from tests.support.jobs.queue import KEYS, QueueHarness
from tests.support.jobs.scripted_program import JobScript
from tests.support.systems.processes import alive
from tests.support.waiting import eventually
from worker_runtime.jobs.config import RunnerConfig
from worker_runtime.jobs.protocol import keys as job_keys
from worker_runtime.jobs.protocol.messages import JobResult
from worker_runtime.protocol.messages import encode

ROOT = Path(__file__).parents[3]
PATIENCE = 40.0
LEASE = 1.0

_numbers = itertools.count(1)


@dataclass(frozen=True)
class JobStart:
    """One start of a job."""

    job_id: str
    attempt: int
    fence: int
    pid: int
    grandchild: int


class RunnerProcess:
    """One runner as a process of its own, with its log."""

    def __init__(
        self,
        folder: Path,
        config: RunnerConfig,
        module: str = "tests.support.jobs.scripted_program",
        before: Sequence[str] = (),
    ) -> None:
        """`before`: what runs the command."""
        self.config = config
        self.log_path = folder / f"{config.name}-{next(_numbers)}.jsonl"
        command = [*before, sys.executable, "-m", module]
        with self.log_path.open("wb") as log:
            self.process = subprocess.Popen(
                command, stdin=subprocess.PIPE, stdout=log, stderr=log, cwd=ROOT
            )
        assert self.process.stdin is not None
        self.process.stdin.write(encode(config))
        self.process.stdin.close()

    def log(self) -> list[dict[str, Any]]:
        return [
            json.loads(line)
            for line in self.log_path.read_text().splitlines()
            if line.endswith("}")
        ]

    def logged(self, event: str) -> list[dict[str, Any]]:
        return [line for line in self.log() if line["event"] == event]

    def job_events(self, action: str) -> list[dict[str, Any]]:
        """Events of jobs with this action."""
        lines = [line for line in self.log() if isinstance(line["event"], dict)]
        return [line for line in lines if line["event"]["action"] == action]

    def children(self) -> list[int]:
        path = Path(f"/proc/{self.process.pid}/task/{self.process.pid}/children")
        return [int(pid) for pid in path.read_text().split() if alive(int(pid))]

    def send(self, number: signal.Signals) -> None:
        self.process.send_signal(number)

    def wait(self) -> int:
        return self.process.wait(PATIENCE)

    def close(self) -> None:
        if self.process.poll() is None:
            self.process.kill()
        self.process.wait()


class RunnerFleet:
    """Starts runners, enqueues scripted jobs, waits for what becomes of them."""

    def __init__(self, harness: QueueHarness, folder: Path) -> None:
        self.harness = harness
        self.folder = folder
        self.ledger_path = folder / "ledger"
        self.runners: list[RunnerProcess] = []

    def start(
        self,
        name: str = "one",
        *,
        real: bool = False,
        module: str = "tests.support.jobs.scripted_program",
        **fields: Any,
    ) -> RunnerProcess:
        """A runner that is registered and waits for work; `real`: with the jobs that exist."""
        known = set(self.beats())
        values = {
            "lease": LEASE,
            "kill_grace": 0.3,
            "valkey_url": self.harness.url,
            "message_keys": KEYS,
            **fields,
        }
        config = RunnerConfig(name=name, **values)
        runner = RunnerProcess(self.folder, config, "worker_runtime.jobs" if real else module)
        self.runners.append(runner)
        eventually(lambda: set(self.beats()) - known, "a registered runner")
        return runner

    def warm(self, **fields: Any) -> RunnerProcess:
        """A runner with recycled children that has learned that these jobs are brief."""
        runner = self.start(recycle=50, log_level="DEBUG", **fields)
        for number in range(30):
            self.add(f"warm{number}", idempotent=True)
        for number in range(30):
            self.result(f"warm{number}")
        return runner

    def beats(self) -> list[str]:
        reply = self.harness.client.execute("HKEYS", job_keys.beats(job_keys.FLEET_TAG))
        return [runner.decode() for runner in reply]

    def beat(self, name: str) -> int:
        """How often the runner with this name has renewed its lease."""
        [runner] = [beat for beat in self.beats() if beat.startswith(f"{name}-")]
        return int(self.harness.client.execute("HGET", job_keys.beats(job_keys.FLEET_TAG), runner))

    def add(self, job_id: str, *, script: JobScript | None = None, **fields: Any) -> None:
        script = script or JobScript()
        values = {**{name: getattr(script, name) for name in script.__struct_fields__}}
        values["ledger"] = str(self.ledger_path)
        arguments = msgspec.Raw(msgspec.json.encode(JobScript(**values)))
        assert self.harness.enqueue(job_id, "scripted", args=arguments, **fields) == "queued"

    def waits(self, job_id: str) -> bool:
        return self.harness.field(job_id, "state") == "waiting"

    def result(self, job_id: str, patience: float = PATIENCE) -> JobResult:
        return eventually(lambda: self.harness.result(job_id), f"a result of {job_id}", patience)

    def ledger(self, job_id: str = "") -> list[JobStart]:
        if not self.ledger_path.exists():
            return []
        entries = []
        for line in self.ledger_path.read_text().splitlines():
            job, *numbers = line.split()
            entries.append(JobStart(job, *(int(number) for number in numbers)))
        return [entry for entry in entries if not job_id or entry.job_id == job_id]

    def started(self, job_id: str, times: int = 1) -> JobStart:
        """The newest start of a job, once it has started `times` times."""
        entries = eventually(
            lambda: entries if len(entries := self.ledger(job_id)) >= times else None,
            f"start {times} of {job_id}",
        )
        return entries[-1]

    def gate(self, name: str = "gate") -> str:
        """A file that is not there yet: jobs wait until it is `open`ed."""
        return str(self.folder / name)

    def open(self, name: str = "gate") -> None:
        (self.folder / name).touch()

    def close(self) -> None:
        for runner in self.runners:
            runner.close()
