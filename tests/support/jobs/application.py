"""An application of the tests: its producer, its runners, and the ledger that its jobs write."""

from __future__ import annotations

import itertools
import os
from collections import Counter
from pathlib import Path
from typing import Any

import msgspec

from infra.berth_jobs.manifest import JobManifest, ManifestType, read_manifest
from infra.berth_jobs.options import JobOptions, job_fields
from tests.support.commands import ROOT
from tests.support.interpreters import opened_interpreter
from tests.support.jobs.queue import PATIENCE
from tests.support.jobs.runners import LEASE, RunnerProcess
from tests.support.message_signing import SECRETS
from tests.support.waiting import eventually
from worker_runtime.jobs.config import RunnerConfig
from worker_runtime.jobs.own_types.config import OwnTypesConfig
from worker_runtime.jobs.protocol import calls as job_calls
from worker_runtime.jobs.protocol import keys as job_keys
from worker_runtime.jobs.protocol.messages import Job, JobResult, read_signed_result
from worker_runtime.process.valkey import Valkey

NAME = "shop"
TAG = job_keys.application_tag(NAME)
KEYS = SECRETS.job_keys(TAG)
PACKAGES = str(ROOT / "tests" / "integration" / "jobs" / "own" / "packages")
STRIPE_KEY = "sk_live_4242_only_for_charge"
OTHER_SECRET = "nobody_names_this_one"


class Application:
    """Enqueues own jobs as a producer does, and waits for what becomes of them."""

    def __init__(self, url: str, folder: Path) -> None:
        self.url = url
        self.client = Valkey(url, timeout=PATIENCE)
        self.client.execute("FLUSHALL")
        self.folder = folder
        folder.chmod(0o777)  # the jobs have another user
        self.before = opened_interpreter(folder)
        self.runners: list[RunnerProcess] = []
        self._numbers = itertools.count(1)
        self.types: dict[str, ManifestType] = {}

    def start(
        self,
        name: str = "one",
        *,
        modules: tuple[str, ...] = ("shop_jobs",),
        packages: str = PACKAGES,
        **fields: Any,
    ) -> RunnerProcess:
        """A registered runner of the application's types; `packages`: where their code is."""
        known = set(self.beats())
        secrets = {"STRIPE_KEY": STRIPE_KEY, "UNUSED": OTHER_SECRET}
        own = OwnTypesConfig(application=NAME, modules=modules, path=(packages,), secrets=secrets)
        values = {"lease": LEASE, "kill_grace": 0.3, "slots": 8, "node": name, "own": own, **fields}
        config = RunnerConfig(name=name, valkey_url=self.url, message_keys=KEYS, tag=TAG, **values)
        runner = RunnerProcess(self.folder, config, "worker_runtime.jobs", self.before)
        self.runners.append(runner)
        eventually(lambda: set(self.beats()) - known, "a registered runner")
        return runner

    def load_types(self, manifest: bytes) -> JobManifest:
        job_manifest = read_manifest(manifest)
        self.types = {kind.name: kind for kind in job_manifest.types}
        return job_manifest

    def add(self, function: str, options: JobOptions | None = None, **arguments: Any) -> str:
        """Enqueues a job of `shop_jobs.<function>`; returns its id, or what refused it."""
        job_id = f"{function}-{next(self._numbers)}"
        kind = self.types[f"{NAME}/shop_jobs.{function}"]
        job = Job(job_id=job_id, **job_fields(kind, msgspec.json.encode(arguments), options))
        outcome = self.enqueue(job)
        return job_id if outcome == "queued" else outcome

    def enqueue(self, job: Job) -> str:
        reply = self.client.run(*job_calls.enqueue(job, KEYS, TAG))
        return str(reply[0].decode())

    def result(self, job_id: str, patience: float = 40.0) -> JobResult:
        stored = eventually(
            lambda: self.client.execute("GET", job_keys.result(TAG, job_id)),
            f"a result of {job_id}",
            patience,
        )
        return read_signed_result(stored, job_id, KEYS)

    def value(self, job_id: str) -> Any:
        """What a job returned; it must not have failed."""
        result = self.result(job_id)
        assert result.failure is None, result
        return msgspec.json.decode(result.value)

    def failure(self, job_id: str) -> tuple[str, str]:
        failure = self.result(job_id).failure
        assert failure is not None
        return failure.code, failure.detail

    def field(self, job_id: str, field: str) -> str | None:
        value = self.client.execute("HGET", job_keys.job(TAG, job_id), field)
        return None if value is None else str(value.decode())

    def beats(self) -> list[str]:
        return [each.decode() for each in self.client.execute("HKEYS", job_keys.beats(TAG))]

    def path(self, name: str) -> str:
        return str(self.folder / name)

    def open(self, name: str) -> None:
        (self.folder / name).touch()

    def lines(self, ledger: str) -> list[str]:
        path = self.folder / ledger
        return path.read_text().split() if path.exists() else []

    def counts(self, ledger: str) -> Counter[str]:
        return Counter(self.lines(ledger))

    def started(self, ledger: str, lines: int = 1) -> list[str]:
        """Returns the lines of a ledger, once it has this many."""
        return eventually(
            lambda: seen if len(seen := self.lines(ledger)) >= lines else None,
            f"{lines} lines in {ledger}",
        )

    def fork_server(self, runner: RunnerProcess) -> int:
        """The process id of a runner's fork server."""
        return eventually(lambda: next(iter(runner.children()), None), "a fork server")

    def close(self) -> None:
        for runner in self.runners:
            runner.close()
        self.client.close()


def processes_of(uid: int) -> list[int]:
    """The live processes of a user."""
    pids = []
    for name in os.listdir("/proc"):
        if name.isdigit():
            try:
                if os.stat(f"/proc/{name}").st_uid == uid:
                    pids.append(int(name))
            except OSError:
                continue
    return pids
