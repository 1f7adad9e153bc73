"""Runners that are killed or frozen at every step while jobs flow, and Valkey that forgets or dies."""

from __future__ import annotations

import asyncio
import json
import os
import random
import signal
import subprocess
import sys
import time
from collections import Counter
from collections.abc import Awaitable, Callable
from pathlib import Path
from typing import Any

from redis.asyncio import Redis
from redis.exceptions import RedisError

from infra.lab.chaos.jobs import freeze
from infra.lab.chaos.jobs.ledger import RunnerFreeze, RunnerKill, SentJob
from infra.lab.chaos.jobs.runner import ProxiedRunner
from infra.lab.chaos.jobs.steps import FREEZE_WEIGHTS, LONG, WEIGHTS, RunnerStep
from infra.lab.figures import Say
from infra.local.process import HOST, ServerFailed
from infra.local.servers import ValkeyServer
from infra.processes import end_with_parent
from infra.valkey import client as valkey
from worker_runtime.jobs.protocol import calls as job_calls
from worker_runtime.jobs.protocol import keys as job_keys
from worker_runtime.jobs.protocol.messages import Job, JobCrashed, JobResult, JobStatus, read_result

#: Runners that live at the same time, beside those that were frozen. Some live for seconds: a runner has to
#: watch another one for a whole lease before it takes its jobs back.
RUNNERS = 8
_STEADY = 3
#: Jobs that have not ended, at the most; runners shall neither starve nor drown.
_UNDER_WAY = 80
_POLL_PERIOD = 0.05
#: How many of those that do not notice the end of others are frozen before they are killed.
_FROZEN = 0.3
#: Share of jobs that take about a lease.
_LONG = 0.02
#: How often not one job comes but many brief ones at once, which runners with recycled children claim ahead;
#: how many; and the share of these that is slow, so that what was claimed behind it goes back.
_BURSTS, _BURST, _SLOW = 0.15, 12, 0.08
#: Results that are read at once.
_PAGE = 1000
_GROUPS = 6
#: Seconds after a fault of Valkey in which a rerun tells nothing about a runner's lease.
_AFTERMATH = 1.5


class JobChaosRun:
    """Keeps runners and jobs coming until so many runners were killed, then waits for all ends."""

    def __init__(self, folder: Path, server: ValkeyServer, *, seed: int, kills: int, lease: float, say: Say):
        self._folder = folder
        self._server = server
        self._wanted = kills
        self._lease = lease
        self._say = say
        self._chance = random.Random(f"jobs {seed}")  # noqa: S311 — who is struck is no secret
        self._live: dict[str, ProxiedRunner] = {}
        self._numbers = 0
        self._calm = False
        self._failure = ""
        self._due: asyncio.Queue[None] = asyncio.Queue()
        self._births: asyncio.Queue[ProxiedRunner] = asyncio.Queue()
        self.ledger = folder / "ledger"
        self.sent: dict[str, SentJob] = {}
        self.open: dict[str, Job] = {}
        self.results: dict[str, JobResult] = {}
        #: Jobs that a flush took and that must not run twice.
        self.forgotten: set[str] = set()
        #: Jobs whose attempts are counted from one again: requeued, or enqueued again after a flush.
        self.anew: set[str] = set()
        self.kills: list[RunnerKill] = []
        self.freezes: list[RunnerFreeze] = []
        #: The results as Valkey has them after everything, without those that a flush took.
        self.final: dict[str, JobResult] = {}
        self.by_step: Counter[str] = Counter()
        #: How often runners gave back what they had claimed ahead.
        self.returns = 0
        self.outages: list[tuple[float, float]] = []
        self.requeued = 0
        self.faults: Counter[str] = Counter()

    async def run(self, patience: float) -> None:
        """Raises `ServerFailed` when a runner ends by itself or Valkey does not come back."""
        self._client = valkey.connect_valkey(self._server.url)
        fleet = await self._start_fleet()
        for _ in range(RUNNERS):
            self._due.put_nowait(None)
        work = (self._jobs(patience), self._start_runners(fleet), self._register(fleet))
        tasks = [asyncio.create_task(one) for one in work]
        try:
            done, _ = await asyncio.wait(tasks, return_when=asyncio.FIRST_COMPLETED)
            for task in done:
                task.result()
        finally:
            for task in tasks:
                task.cancel()
            await asyncio.gather(*tasks, return_exceptions=True)
            for victim in list(self._live.values()):
                self._note_freeze(victim)
                self.returns += victim.returns
                victim.close()
            fleet.kill()
            await fleet.wait()
            await self._client.aclose()

    # --- runners ----------------------------------------------------------------------------------

    async def _start_fleet(self) -> asyncio.subprocess.Process:
        with (self._folder / "runners.log").open("ab") as log:
            return await asyncio.create_subprocess_exec(
                *(sys.executable, "-P", "-m", "infra.lab.loadtest_job", "fleet"),
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                stderr=log,
                preexec_fn=end_with_parent(os.getpid()),
            )

    async def _start_runners(self, fleet: asyncio.subprocess.Process) -> None:
        assert fleet.stdin is not None  # noqa: S101 — a pipe was asked for
        while True:
            await self._due.get()
            self._numbers += 1
            name = f"r{self._numbers}"
            victim = ProxiedRunner(name, self._folder, (HOST, self._server.port), self._ended, self._need_one)
            await victim.open()
            self._live[name] = victim
            self._arm_runner(victim)
            config = {
                "name": name,
                "valkey_url": victim.url,
                "slots": self._chance.choice((1, 2, 4)),
                "recycle": self._chance.choice((1, 5, 50)),
                "lease": self._lease,
            }
            self._births.put_nowait(victim)
            fleet.stdin.write(json.dumps(config).encode() + b"\n")
            await fleet.stdin.drain()

    async def _register(self, fleet: asyncio.subprocess.Process) -> None:
        assert fleet.stdout is not None  # noqa: S101 — a pipe was asked for
        while line := await fleet.stdout.readline():
            self._births.get_nowait().born(int(line))
        raise ServerFailed("the runners' parent has ended")

    def _arm_runner(self, victim: ProxiedRunner) -> None:
        if self._calm:
            return
        if sum(one.steady for one in self._live.values()) < _STEADY:
            victim.steady = True
            victim.arm(RunnerStep.ANY, self._chance.uniform(3, 6) * self._lease)
            return
        frost = freeze.plan_freeze(self._chance, self._lease) if self._chance.random() < _FROZEN else None
        weights = FREEZE_WEIGHTS if frost else WEIGHTS
        step = self._chance.choices(list(weights), list(weights.values()))[0]
        delay = {RunnerStep.ANY: 1.0, RunnerStep.RUNNING: 0.03}.get(step, 0.0)
        victim.arm(step, self._chance.uniform(0, delay), frost)
        # One that never gets there does not live for ever.
        victim.expire(self._chance.uniform(2, 4) * self._lease + (frost.seconds if frost else 0.0))

    def _ended(self, victim: ProxiedRunner) -> None:
        del self._live[victim.name]
        self.returns += victim.returns
        if victim.struck is None:
            self._failure = f"runner {victim.name} ended by itself"
            return
        self._note_freeze(victim)
        self.kills.append(RunnerKill(victim.pid, victim.killed_at))
        self.by_step[victim.struck] += 1
        if victim.freeze is None:
            self._need_one()

    def _need_one(self) -> None:
        self._due.put_nowait(None)

    def _note_freeze(self, victim: ProxiedRunner) -> None:
        if victim.freeze is not None:
            self.freezes.append(victim.freeze)

    def _warm(self) -> bool:
        """Whether all that stood still have gone on for a lease: what they have to say, they have said."""
        ends = [one.freeze.until for one in self._live.values() if one.freeze is not None]
        return time.monotonic() > max(ends, default=0.0) + self._lease

    # --- jobs -------------------------------------------------------------------------------------

    async def _jobs(self, patience: float) -> None:
        faults = self._plan()
        until = float("inf")
        while True:
            if self._failure:
                raise ServerFailed(f"{self._failure}; its log is {self._folder / 'runners.log'}")
            if faults and len(self.kills) >= faults[0][0]:
                await faults.pop(0)[1]()
            if not self._calm and len(self.kills) >= self._wanted and not faults:
                self._calm, until = True, time.monotonic() + patience
                for victim in self._live.values():
                    victim.disarm()
            while not self._calm and len(self.open) < _UNDER_WAY:
                for job in self._new_jobs():
                    await self._enqueue(job)
            await self._collect()
            if self._calm and ((not self.open and self._warm()) or time.monotonic() > until):
                await self._read_again()
                return
            self._say(
                f"jobs: {len(self.kills)} of {self._wanted} kills, {len(self.freezes)} freezes, "
                f"{len(self.results)} jobs ended, "
                f"{len(self.open)} under way"
            )
            await asyncio.sleep(_POLL_PERIOD)

    def _plan(self) -> list[tuple[int, Callable[[], Awaitable[None]]]]:
        """Faults of Valkey and the number of kills after which they come: each once at the least."""
        every = max(1, min(self._wanted // 3, 250))
        times = range(every, self._wanted - every // 2, every)
        return [(at, self._flush if number % 2 == 0 else self._crash) for number, at in enumerate(times)]

    def _new_jobs(self) -> list[Job]:
        if self._chance.random() >= _BURSTS:
            return [self._new_job()]
        queue = self._chance.choice(("default", "other"))
        return [self._new_brief(queue) for _ in range(_BURST)]

    def _new_brief(self, queue: str) -> Job:
        length = self._chance.uniform(0.03, 0.06) if self._chance.random() < _SLOW else 0.0
        job = Job(
            job_id=f"b{len(self.sent)}",
            name="loadtest_brief",
            queue=queue,
            idempotent=True,
            args=job_calls.encode_arguments({"ledger": str(self.ledger), "sleeps": length}),
            result_ttl=86_400,
        )
        self.sent[job.job_id] = SentJob(job.job_id, job.idempotent)
        return job

    def _new_job(self) -> Job:
        chance, number = self._chance, len(self.sent)
        long = chance.random() < _LONG
        job = Job(
            job_id=f"{LONG if long else 'j'}{number}",
            name="loadtest",
            queue=chance.choice(("default", "default", "other", "scheduler")),
            priority=chance.randrange(10),
            idempotent=chance.random() < 0.6,
            group=f"g{chance.randrange(_GROUPS)}" if chance.random() < 0.15 else "",
            args=job_calls.encode_arguments({"ledger": str(self.ledger), "sleeps": self._length(long)}),
            result_ttl=86_400,
        )
        self.sent[job.job_id] = SentJob(job.job_id, job.idempotent)
        return job

    def _length(self, long: bool) -> float:
        """Seconds of a job. A long one still runs somewhere else when the runner that had it goes on."""
        return self._chance.uniform(0.5, 1.5) * self._lease if long else self._chance.uniform(0, 0.03)

    async def _enqueue(self, job: Job) -> None:
        self.open[job.job_id] = job
        await self._call(job_calls.enqueue(job))

    async def _stored(self, job_ids: list[str]) -> dict[str, JobResult]:
        stored = await self._again(
            lambda client: client.mget([job_keys.result(job_keys.FLEET_TAG, job_id) for job_id in job_ids])
        )
        pairs = zip(job_ids, stored, strict=True)
        return {job_id: read_result(body) for job_id, body in pairs if body is not None}

    async def _read_again(self) -> None:
        """Late results of runners that stood still must have changed nothing."""
        job_ids = list(self.results)
        for start in range(0, len(job_ids), _PAGE):
            self.final |= await self._stored(job_ids[start : start + _PAGE])

    async def _collect(self) -> None:
        """Reads the ends that are there; what has crashed too often is tried again, as an operator would."""
        crashed = []
        for job_id, result in (await self._stored(list(self.open))).items():
            if result.status is JobStatus.FAILED and _code(result) == JobCrashed.code:
                crashed.append(job_id)
            else:
                self.results[job_id] = result
                del self.open[job_id]
        if crashed:
            self.anew.update(crashed)
            self.requeued += len(await self._call(job_calls.requeue(crashed)))

    async def _call(self, call: job_calls.QueueCall) -> Any:
        return await self._again(lambda client: valkey.run_script(client, *call))

    async def _again(self, ask: Callable[[Redis], Awaitable[Any]]) -> Any:
        """All that is asked here is safe to repeat. Raises `ServerFailed` when Valkey stays away."""
        until = time.monotonic() + 30.0
        while True:
            try:
                return await ask(self._client)
            except (RedisError, OSError) as error:
                if time.monotonic() > until:
                    raise ServerFailed(f"Valkey is away: {type(error).__name__}") from error
                await asyncio.sleep(0.05)

    # --- Valkey -----------------------------------------------------------------------------------

    async def _flush(self) -> None:
        """Valkey forgets everything. A producer enqueues again what may run twice, and nothing else."""
        await self._collect()
        began = time.monotonic()
        await self._again(lambda client: client.flushall())
        self.faults["flush"] += 1
        for job_id, job in list(self.open.items()):
            if job.idempotent:
                self.anew.add(job_id)
                await self._enqueue(job)
            else:
                self.forgotten.add(job_id)
                del self.open[job_id]
        self.outages.append((began, time.monotonic() + _AFTERMATH))

    async def _crash(self) -> None:
        """kill -9 of Valkey, which comes back with all it has acknowledged."""
        began = time.monotonic()
        down = self._chance.uniform(0.05, 0.5)
        await asyncio.to_thread(self._server.restart, signal.SIGKILL, down)
        self.faults["restart"] += 1
        self.outages.append((began, time.monotonic() + _AFTERMATH))


def _code(result: JobResult) -> str:
    return result.failure.code if result.failure is not None else ""
