"""The part of `berth chaos jobs` with own types:
runners, fork servers and children are killed and frozen.

Jobs that may run twice must end as done, also those that share a process. The others end as done or
as failed, and never start a second time. Each failure for good is handled by exactly one handler.
"""

from __future__ import annotations

import contextlib
import itertools
import os
import random
import signal
import subprocess
import sys
import time
from collections import Counter, defaultdict
from pathlib import Path
from typing import Any

import msgspec
import psutil
from berth_jobs.options import job_fields
from redis import Redis

from infra.berth_jobs.manifest import read_manifest
from infra.lab.chaos.jobs.ledger import JobFinding, JobHarm
from infra.lab.figures import Say
from infra.lab.loadtest_job import KEYS, KEYS_IN_JSON
from infra.processes import descendants
from worker_runtime.jobs.protocol import calls as job_calls
from worker_runtime.jobs.protocol import keys as job_keys
from worker_runtime.jobs.protocol.manifest import read_signed
from worker_runtime.jobs.protocol.messages import Job

APPLICATION = "chaos"
TAG = job_keys.application_tag(APPLICATION)
_MAX_LIVE_RUNNERS = 3
_MAX_UNFINISHED_JOBS = 30
_FUNCTIONS = ("again", "again", "never", "shared", "fail")
#: The processes that are killed or frozen, and how often compared with the others.
_FAULTS = {"child": 4, "fork server": 3, "runner": 3, "frozen runner": 1, "frozen fork server": 1}


class OwnTypesChaos:
    """Keeps jobs under way while it injects faults, then waits for all ends."""

    def __init__(
        self, folder: Path, url: str, *, seed: int, faults: int, lease: float, say: Say
    ) -> None:
        self._folder = folder
        self._url = url
        self._faults = faults
        self._lease = lease
        self._say = say
        self._chance = random.Random(f"own jobs {seed}")  # noqa: S311 - the choice is no secret
        self._client: Redis = Redis.from_url(url)
        self._numbers = itertools.count(1)
        self._runners: list[subprocess.Popen[bytes]] = []
        self._frozen_servers: list[psutil.Process] = []
        self.ledger = folder / "own-ledger"
        self.sent: dict[str, str] = {}
        self.ended: dict[str, bytes] = {}
        self.by_fault: Counter[str] = Counter()

    def run(self, patience: float) -> list[JobFinding]:
        """Returns what was lost or doubled."""
        self._folder.chmod(0o711)  # the jobs may have another user
        self.ledger.touch()
        self.ledger.chmod(0o666)
        try:
            self._keep_runners()
            types = self._await_types(patience)
            while sum(self.by_fault.values()) < self._faults:
                self._enqueue(types)
                time.sleep(self._chance.uniform(0.05, 0.4))
                self._break_something()
                self._keep_runners()
                self._collect()
                self._say(f"own jobs: {sum(self.by_fault.values())} faults, {len(self.sent)} jobs")
            until = time.monotonic() + patience
            while len(self.ended) < len(self.sent) and time.monotonic() < until:
                self._keep_runners()
                self._collect()
                time.sleep(0.1)
            time.sleep(3 * self._lease)  # handlers, and second starts that must not be
            return self._judge()
        finally:
            for runner in self._runners:
                runner.kill()
                runner.wait()
            # One that was frozen before it asked the kernel to end it with its runner is left.
            for server in self._frozen_servers:
                with contextlib.suppress(psutil.NoSuchProcess):
                    server.kill()
            self._client.close()

    def _keep_runners(self) -> None:
        self._runners = [runner for runner in self._runners if runner.poll() is None]
        while len(self._runners) < _MAX_LIVE_RUNNERS:
            number = next(self._numbers)
            config = {
                "name": f"own{number}",
                "valkey_url": self._url,
                "message_keys": KEYS_IN_JSON,
                "tag": TAG,
                "slots": 6,
                "lease": self._lease,
                "kill_grace": 0.3,
                "own": {
                    "application": APPLICATION,
                    "modules": ["own_package"],
                    "path": [str(Path(__file__).parent)],
                },
            }
            with (self._folder / f"own{number}.jsonl").open("wb") as log:
                command = [sys.executable, "-m", "worker_runtime.jobs"]
                runner = subprocess.Popen(command, stdin=subprocess.PIPE, stdout=log, stderr=log)
            assert runner.stdin is not None  # noqa: S101 - a pipe was asked for
            with runner.stdin:
                runner.stdin.write(msgspec.json.encode(config))
            self._runners.append(runner)

    def _await_types(self, patience: float) -> dict[str, Any]:
        until = time.monotonic() + patience
        while time.monotonic() < until:
            entries: Any = self._client.hvals(job_keys.manifests(TAG))
            if entries:
                manifest = read_manifest(read_signed(entries[0], APPLICATION, KEYS))
                return {kind.name.rpartition(".")[2]: kind for kind in manifest.types}
            time.sleep(0.05)
        raise TimeoutError("no runner of own types has registered")

    def _enqueue(self, types: dict[str, Any]) -> None:
        while len(self.sent) - len(self.ended) < _MAX_UNFINISHED_JOBS:
            function = self._chance.choice(_FUNCTIONS)
            job_id = f"own-{function}-{len(self.sent)}"
            arguments = {"ledger": str(self.ledger), "seconds": self._chance.uniform(0.0, 0.6)}
            job = Job(job_id=job_id, **job_fields(types[function], msgspec.json.encode(arguments)))
            script, keys, args = job_calls.enqueue(job, KEYS, TAG)
            self._client.eval(script.source, len(keys), *keys, *args)
            self.sent[job_id] = function

    def _break_something(self) -> None:
        runner = self._chance.choice(self._runners)
        fault = self._chance.choices(list(_FAULTS), list(_FAULTS.values()))[0]
        below = descendants(runner.pid)
        servers = [process.pid for process in below if process.parent == runner.pid]
        children = [process.pid for process in below if process.parent in servers]
        try:
            if fault == "child" and children:
                os.kill(self._chance.choice(children), signal.SIGKILL)
            elif fault == "fork server" and servers:
                os.kill(servers[0], signal.SIGKILL)
            elif fault == "runner":
                runner.kill()
            elif fault == "frozen runner":
                self._freeze(runner.pid)
            elif fault == "frozen fork server" and servers:
                self._frozen_servers.append(psutil.Process(servers[0]))
                os.kill(servers[0], signal.SIGSTOP)  # for ever: its runner has to notice
            else:
                return
        except (ProcessLookupError, psutil.NoSuchProcess):
            return
        self.by_fault[fault] += 1

    def _freeze(self, pid: int) -> None:
        """Freezes a process for less or more than a lease; others run its jobs meanwhile."""
        os.kill(pid, signal.SIGSTOP)
        time.sleep(self._chance.uniform(0.2, 2.5 * self._lease))
        os.kill(pid, signal.SIGCONT)

    def _collect(self) -> None:
        open_jobs = [job_id for job_id in self.sent if job_id not in self.ended]
        if not open_jobs:
            return
        stored: Any = self._client.mget([job_keys.result(TAG, job_id) for job_id in open_jobs])
        self.ended |= {job_id: end for job_id, end in zip(open_jobs, stored, strict=True) if end}

    def _judge(self) -> list[JobFinding]:
        starts: dict[str, int] = defaultdict(int)
        ends: set[str] = set()
        handlers: dict[str, set[str]] = defaultdict(set)
        for line in self.ledger.read_text().splitlines():
            mark, job_id, *_ = line.split()
            if mark == "start":
                starts[job_id] += 1
            elif mark == "end":
                ends.add(job_id)
            else:
                handlers[mark.partition(":")[2]].add(job_id)
        findings = []
        for job_id, function in self.sent.items():
            end = self.ended.get(job_id)
            done = end is not None and b'"status":"done"' in end
            if end is None:
                detail = f"{function}: no end; {self._describe(job_id)}"
                findings.append(JobFinding(JobHarm.LOST, job_id, detail))
            elif done and job_id not in ends:
                detail = f"{function}: done, but no execution has ended"
                findings.append(JobFinding(JobHarm.LOST, job_id, detail))
            elif function in ("again", "shared") and not done and b"JOB_CRASHED" not in end:
                findings.append(JobFinding(JobHarm.WRONG, job_id, f"{function}: not done"))
            if function == "never" and starts[job_id] > 1:
                findings.append(
                    JobFinding(JobHarm.DOUBLED, job_id, f"started {starts[job_id]} times")
                )
            if function == "fail" and len(handlers[job_id]) != 1:
                harm = JobHarm.DOUBLED if handlers[job_id] else JobHarm.LOST
                findings.append(JobFinding(harm, job_id, f"{len(handlers[job_id])} handlers"))
        return findings

    def _describe(self, job_id: str) -> str:
        """Returns what Valkey says of a job that has no end."""
        fields: Any = self._client.hgetall(job_keys.job(TAG, job_id))
        shown = {name.decode(): value.decode() for name, value in fields.items() if name != b"body"}
        runner = shown.get("runner", "")
        lease = self._client.pttl(job_keys.runner(TAG, runner)) if runner else None
        return f"{shown}, lease of its runner: {lease} ms"
