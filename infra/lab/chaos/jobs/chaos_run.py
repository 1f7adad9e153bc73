"""The chaos run: runners are killed or frozen at every
step while jobs flow; Valkey is flushed or killed."""

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

import msgspec
from redis.asyncio import Redis
from redis.exceptions import RedisError
from redis.exceptions import TimeoutError as RedisTimeout

from infra.lab.chaos.jobs import freeze
from infra.lab.chaos.jobs.ledger import RunnerFreeze, RunnerKill, SentJob
from infra.lab.chaos.jobs.runner import ProxiedRunner
from infra.lab.chaos.jobs.steps import FREEZE_WEIGHTS, LONG, WEIGHTS, RunnerStep
from infra.lab.figures import Say
from infra.lab.loadtest_job import KEYS, KEYS_IN_JSON
from infra.local.process import HOST, ServerFailed
from infra.local.servers import ValkeyServer
from infra.processes import end_with_parent
from infra.valkey import client as valkey
from worker_runtime.jobs.protocol import calls as job_calls
from worker_runtime.jobs.protocol import keys as job_keys
from worker_runtime.jobs.protocol.messages import Job, JobCrashed, JobResult, JobStatus, read_result

#: Runners that live at the same time, in addition to frozen ones. Some live for seconds: a runner
#: has to watch another one for a whole lease before it takes its jobs back.
MAX_LIVE_RUNNERS = 8
_STEADY_RUNNERS = 3
#: Jobs that have not ended, at most.
_MAX_UNFINISHED_JOBS = 80
_POLL_INTERVAL_S = 0.05
#: Share of the short-lived runners that are frozen before they are killed.
_FROZEN_SHARE = 0.3
#: Share of jobs that take about a lease.
_LONG_JOB_SHARE = 0.02
#: Share of arrivals that are a burst of brief jobs, for runners with recycled children to prefetch.
_BURST_SHARE = 0.15
#: Jobs of a burst.
_BURST_SIZE = 12
#: Share of them that are slow, so that the jobs prefetched behind them go back.
_SLOW_JOB_SHARE = 0.08
#: Results that one call reads.
_PAGE_SIZE = 1000
_JOB_GROUPS = 6
#: Seconds after a fault of Valkey in which a rerun says nothing about a runner's lease.
_AFTERMATH_S = 1.5


class JobChaosRun:
    """Starts runners and jobs until `kills` runners were killed, then waits for all ends."""

    def __init__(
        self, folder: Path, server: ValkeyServer, *, seed: int, kills: int, lease: float, say: Say
    ):
        self._folder = folder
        self._server = server
        self._wanted = kills
        self._lease = lease
        self._say = say
        self._chance = random.Random(f"jobs {seed}")  # noqa: S311 — the choice is no secret
        self._live: dict[str, ProxiedRunner] = {}
        self._numbers = 0
        self._faults_over = False
        self._failure = ""
        self._due: asyncio.Queue[None] = asyncio.Queue()
        self._births: asyncio.Queue[ProxiedRunner] = asyncio.Queue()
        self.ledger = folder / "ledger"
        self.sent: dict[str, SentJob] = {}
        self.open: dict[str, Job] = {}
        self.results: dict[str, JobResult] = {}
        #: Jobs that a flush has deleted and that must not run twice.
        self.forgotten: set[str] = set()
        #: Jobs whose attempts count from one again: requeued, or enqueued again after a flush.
        self.restarted: set[str] = set()
        self.kills: list[RunnerKill] = []
        self.freezes: list[RunnerFreeze] = []
        #: The results in Valkey at the end. Without those of before a flush: it makes Valkey forget
        #: the job, and then a frozen runner's late end counts.
        self.final: dict[str, JobResult] = {}
        self._flushed: set[str] = set()
        self.by_step: Counter[str] = Counter()
        #: The number of times that runners gave prefetched jobs back.
        self.releases = 0
        self.outages: list[tuple[float, float]] = []
        self.requeued = 0
        self.faults: Counter[str] = Counter()

    async def run(self, patience: float) -> None:
        """Raises `ServerFailed` when a runner ends by itself or Valkey does not come back."""
        self._client = valkey.connect_valkey(self._server.url)
        fleet = await self._start_fleet()
        for _ in range(MAX_LIVE_RUNNERS):
            self._due.put_nowait(None)
        work = (self._jobs(patience), self._start_runners(fleet), self._register(fleet))
        tasks = [asyncio.create_task(coroutine) for coroutine in work]
        try:
            done, _ = await asyncio.wait(tasks, return_when=asyncio.FIRST_COMPLETED)
            for task in done:
                task.result()
        finally:
            for task in tasks:
                task.cancel()
            await asyncio.gather(*tasks, return_exceptions=True)
            for runner in list(self._live.values()):
                self._record_freeze(runner)
                self.releases += runner.releases
                runner.close()
            fleet.kill()
            await fleet.wait()
            await self._client.aclose()

    # --- runners ----------------------------------------------------------------------------------

    async def _start_fleet(self) -> asyncio.subprocess.Process:
        with (self._folder / "runners.log").open("ab") as log:
            return await asyncio.create_subprocess_exec(
                sys.executable,
                "-P",
                "-m",
                "infra.lab.loadtest_job",
                "fleet",
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
            runner = ProxiedRunner(
                name, self._folder, (HOST, self._server.port), self._ended, self._need_one
            )
            await runner.open()
            self._live[name] = runner
            self._arm(runner)
            config = {
                "name": name,
                "valkey_url": runner.url,
                "message_keys": KEYS_IN_JSON,
                "slots": self._chance.choice((1, 2, 4)),
                "recycle": self._chance.choice((1, 5, 50)),
                "lease": self._lease,
            }
            self._births.put_nowait(runner)
            fleet.stdin.write(json.dumps(config).encode() + b"\n")
            await fleet.stdin.drain()

    async def _register(self, fleet: asyncio.subprocess.Process) -> None:
        assert fleet.stdout is not None  # noqa: S101 — a pipe was asked for
        while line := await fleet.stdout.readline():
            self._births.get_nowait().started(int(line))
        raise ServerFailed("the runners' parent has ended")

    def _arm(self, runner: ProxiedRunner) -> None:
        if self._faults_over:
            return
        if sum(runner.steady for runner in self._live.values()) < _STEADY_RUNNERS:
            runner.steady = True
            runner.arm(RunnerStep.ANY, self._chance.uniform(3, 6) * self._lease)
            return
        plan = (
            freeze.plan_freeze(self._chance, self._lease)
            if self._chance.random() < _FROZEN_SHARE
            else None
        )
        weights = FREEZE_WEIGHTS if plan else WEIGHTS
        step = self._chance.choices(list(weights), list(weights.values()))[0]
        delay = {RunnerStep.ANY: 1.0, RunnerStep.RUNNING: 0.03}.get(step, 0.0)
        runner.arm(step, self._chance.uniform(0, delay), plan)
        # A runner that never reaches its step ends, too.
        runner.expire_after(
            self._chance.uniform(2, 4) * self._lease + (plan.seconds if plan else 0.0)
        )

    def _ended(self, runner: ProxiedRunner) -> None:
        del self._live[runner.name]
        self.releases += runner.releases
        if runner.killed_step is None:
            self._failure = f"runner {runner.name} ended by itself"
            return
        self._record_freeze(runner)
        self.kills.append(RunnerKill(runner.pid, runner.killed_at))
        self.by_step[runner.killed_step] += 1
        if runner.freeze is None:
            self._need_one()

    def _need_one(self) -> None:
        self._due.put_nowait(None)

    def _record_freeze(self, runner: ProxiedRunner) -> None:
        if runner.freeze is not None:
            self.freezes.append(runner.freeze)

    def _all_thawed(self) -> bool:
        """Returns True if all frozen runners have gone on for a lease, and so have written their
        late ends."""
        ends = [runner.freeze.until for runner in self._live.values() if runner.freeze is not None]
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
            if not self._faults_over and len(self.kills) >= self._wanted and not faults:
                self._faults_over, until = True, time.monotonic() + patience
                for runner in self._live.values():
                    runner.disarm()
            while not self._faults_over and len(self.open) < _MAX_UNFINISHED_JOBS:
                for job in self._new_jobs():
                    await self._enqueue(job)
            await self._collect()
            if self._faults_over and (
                (not self.open and self._all_thawed()) or time.monotonic() > until
            ):
                await self._read_again()
                return
            self._say(
                f"jobs: {len(self.kills)} of {self._wanted} kills, {len(self.freezes)} freezes, "
                f"{len(self.results)} jobs ended, "
                f"{len(self.open)} under way"
            )
            await asyncio.sleep(_POLL_INTERVAL_S)

    def _plan(self) -> list[tuple[int, Callable[[], Awaitable[None]]]]:
        """Plans the faults of Valkey, with the number of kills after which they come: each at least
        once."""
        every = max(1, min(self._wanted // 3, 250))
        times = range(every, self._wanted - every // 2, every)
        return [
            (at, self._flush if number % 2 == 0 else self._crash) for number, at in enumerate(times)
        ]

    def _new_jobs(self) -> list[Job]:
        if self._chance.random() >= _BURST_SHARE:
            return [self._new_job()]
        queue = self._chance.choice(("default", "other"))
        return [self._new_brief_job(queue) for _ in range(_BURST_SIZE)]

    def _new_brief_job(self, queue: str) -> Job:
        length = (
            self._chance.uniform(0.03, 0.06) if self._chance.random() < _SLOW_JOB_SHARE else 0.0
        )
        job = Job(
            job_id=f"b{len(self.sent)}",
            name="loadtest_brief",
            queue=queue,
            idempotent=True,
            args=msgspec.Raw(msgspec.json.encode({"ledger": str(self.ledger), "sleeps": length})),
            result_ttl=86_400,
        )
        self.sent[job.job_id] = SentJob(job.job_id, job.idempotent)
        return job

    def _new_job(self) -> Job:
        chance, number = self._chance, len(self.sent)
        long = chance.random() < _LONG_JOB_SHARE
        job = Job(
            job_id=f"{LONG if long else 'j'}{number}",
            name="loadtest",
            queue=chance.choice(("default", "default", "other", "scheduler")),
            priority=chance.randrange(10),
            idempotent=chance.random() < 0.6,
            group=f"g{chance.randrange(_JOB_GROUPS)}" if chance.random() < 0.15 else "",
            args=msgspec.Raw(
                msgspec.json.encode({"ledger": str(self.ledger), "sleeps": self._length(long)})
            ),
            result_ttl=86_400,
        )
        self.sent[job.job_id] = SentJob(job.job_id, job.idempotent)
        return job

    def _length(self, long: bool) -> float:
        """Returns the seconds of a job. A long one still runs elsewhere when its frozen runner
        continues."""
        return (
            self._chance.uniform(0.5, 1.5) * self._lease if long else self._chance.uniform(0, 0.03)
        )

    async def _enqueue(self, job: Job) -> None:
        self.open[job.job_id] = job
        await self._call(job_calls.enqueue(job, KEYS))

    async def _stored(self, job_ids: list[str]) -> dict[str, JobResult]:
        stored = await self._retry(
            lambda client: client.mget(
                [job_keys.result(job_keys.FLEET_TAG, job_id) for job_id in job_ids]
            )
        )
        pairs = zip(job_ids, stored, strict=True)
        return {job_id: read_result(body) for job_id, body in pairs if body is not None}

    async def _read_again(self) -> None:
        """Reads the results again: late ones of frozen runners must have changed nothing."""
        job_ids = [job_id for job_id in self.results if job_id not in self._flushed]
        for start in range(0, len(job_ids), _PAGE_SIZE):
            self.final |= await self._stored(job_ids[start : start + _PAGE_SIZE])

    async def _collect(self) -> None:
        """Reads the ends so far. Requeues jobs that have
        crashed too often, as an operator would."""
        crashed = []
        for job_id, result in (await self._stored(list(self.open))).items():
            if result.status is JobStatus.FAILED and _code(result) == JobCrashed.code:
                crashed.append(job_id)
            else:
                self.results[job_id] = result
                del self.open[job_id]
        if crashed:
            self.restarted.update(crashed)
            self.requeued += len(await self._call(job_calls.requeue(crashed)))

    async def _call(self, call: job_calls.QueueCall) -> Any:
        return await self._retry(lambda client: valkey.run_script(client, *call))

    async def _retry(self, ask: Callable[[Redis], Awaitable[Any]]) -> Any:
        """Repeats a call, all of which are safe to repeat.
        Raises `ServerFailed` when Valkey stays away."""
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
        """Flushes Valkey. A producer enqueues again the jobs that may run twice, and no others."""
        await self._collect()
        began = time.monotonic()
        await self._retry(lambda client: client.flushall())
        self._flushed.update(self.results)
        self.faults["flush"] += 1
        for job_id, job in list(self.open.items()):
            if job.idempotent:
                self.restarted.add(job_id)
                await self._enqueue(job)
            else:
                self.forgotten.add(job_id)
                del self.open[job_id]
        self.outages.append((began, time.monotonic() + _AFTERMATH_S))

    @staticmethod
    async def _synced(client: Redis) -> None:
        """Raises `TimeoutError` of Valkey's client if the log is not on the disk within 2 s."""
        async with client.pipeline(transaction=False) as pipe:  # both on one connection
            pipe.set("chaos:synced", "1")
            pipe.waitaof(1, 0, 2000)
            _, (local, _) = await pipe.execute()
        if not local:
            raise RedisTimeout("no fsync within 2 s")

    async def _crash(self) -> None:
        """Kills Valkey with SIGKILL, just behind an fsync: all that it has acknowledged comes back.

        While an fsync runs, it acknowledges what it has not yet written (`appendfsync everysec`).
        """
        began = time.monotonic()
        down = self._chance.uniform(0.05, 0.5)
        await self._retry(self._synced)
        await asyncio.to_thread(self._server.restart, signal.SIGKILL, down)
        self.faults["restart"] += 1
        self.outages.append((began, time.monotonic() + _AFTERMATH_S))


def _code(result: JobResult) -> str:
    return result.failure.code if result.failure is not None else ""
