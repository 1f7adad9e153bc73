"""Keeps simulated workers as the node's supervisor keeps processes,
and remembers how each of them ended.

It renews their marks, too: each when it is due, those due together in one round trip.
"""

from __future__ import annotations

import asyncio
import heapq
import itertools
import secrets
import time

import msgspec
import structlog
from redis.exceptions import RedisError

from infra import tasks
from infra.lab.bench.fleet.simulated.calls import SimulatedConnections
from infra.lab.bench.fleet.simulated.worker import SimulatedBehaviour, SimulatedWorker
from infra.node.protocol import LaunchTask
from infra.node.register import NodeEntry
from infra.worker_task import LaunchFailed, Task, TaskExit, worker_exit
from worker_runtime.protocol.launch import ExitCode

#: Seconds between two checks of what is due; a renewal is late by no more.
_CHECK_INTERVAL_S = 0.1
#: Renewals in one round trip.
_MAX_RENEWALS_PER_BATCH = 500
#: Seconds until failed renewals are tried again.
_RETRY_INTERVAL_S = 1.0

log = structlog.get_logger()


class SimulatedMarkRenewer:
    """Renews the marks of all the node's workers in one loop."""

    def __init__(self) -> None:
        self._due: list[tuple[float, int, SimulatedWorker]] = []
        self._numbers = itertools.count()
        self._workers: set[SimulatedWorker] = set()

    def add(self, worker: SimulatedWorker) -> None:
        self._workers.add(worker)
        self._plan(worker, worker.config.mark_period)

    def remove(self, worker: SimulatedWorker) -> None:
        self._workers.discard(worker)

    async def run(self) -> None:
        """Runs until cancelled."""
        while True:
            await asyncio.sleep(_CHECK_INTERVAL_S)
            while batch := self._take():
                await self._renew(batch)

    def _plan(self, worker: SimulatedWorker, seconds: float) -> None:
        heapq.heappush(self._due, (time.monotonic() + seconds, next(self._numbers), worker))

    def _take(self) -> list[SimulatedWorker]:
        now = time.monotonic()
        batch: list[SimulatedWorker] = []
        while self._due and self._due[0][0] <= now and len(batch) < _MAX_RENEWALS_PER_BATCH:
            worker = heapq.heappop(self._due)[2]
            if worker in self._workers:
                batch.append(worker)
        return batch

    async def _renew(self, batch: list[SimulatedWorker]) -> None:
        by_link: dict[SimulatedConnections, list[SimulatedWorker]] = {}
        for worker in batch:
            by_link.setdefault(worker.link, []).append(worker)
        await asyncio.gather(
            *(self._renew_over(link, workers) for link, workers in by_link.items())
        )

    async def _renew_over(self, link: SimulatedConnections, batch: list[SimulatedWorker]) -> None:
        try:
            replies = await link.run_all([worker.renewal() for worker in batch])
        except (RedisError, OSError) as error:
            log.warning("simulated.renewals_failed", count=len(batch), error=type(error).__name__)
            for worker in batch:
                self._plan(worker, _RETRY_INTERVAL_S)
            return
        for worker, reply in zip(batch, replies, strict=True):
            self._plan(worker, worker.config.mark_period)
            await worker.renewed(reply)


class _SimulatedTask:
    """A worker that runs."""

    def __init__(self, entry: NodeEntry, worker: SimulatedWorker) -> None:
        self.entry = entry
        self.worker = worker
        self.ended = asyncio.Event()
        self.stop_reason: str | None = None


class SimulatedSupervisor:
    """Belongs to one event loop. Its log of ends lives as long as the process."""

    def __init__(self, link: SimulatedConnections, habits: SimulatedBehaviour) -> None:
        self.log = secrets.token_hex(6)
        self._link = link
        self._habits = habits
        self._renewals = SimulatedMarkRenewer()
        self._by_token: dict[str, Task] = {}
        self._kept: dict[str, _SimulatedTask] = {}
        #: The task of each running worker.
        self._task_ids: dict[str, str] = {}
        self._ends: list[TaskExit] = []
        self._news = asyncio.Event()
        self._background = {asyncio.create_task(self._renewals.run())}

    def tasks(self) -> list[Task]:
        return [kept.entry.task for kept in self._kept.values()]

    def is_running(self, task_id: str) -> bool:
        return task_id in self._kept

    def tasks_of(self, worker_id: str) -> list[Task]:
        task_id = self._task_ids.get(worker_id)
        return [] if task_id is None else [self._kept[task_id].entry.task]

    def launch(self, request: LaunchTask) -> Task:
        """Starts one worker, or returns the one that this token has started. Raises
        `LaunchFailed`."""
        known = self._by_token.get(request.token)
        if known is not None:
            return known
        config = request.config
        if config.worker_id in self._task_ids:
            raise LaunchFailed(f"worker {config.worker_id} runs already, launched by another token")
        entry = NodeEntry(
            task_id=f"task-{secrets.token_hex(8)}",
            token=request.token,
            worker_id=config.worker_id,
            pool=config.pool,
            version=config.version,
            launched_at=time.time(),
            grace=config.shutdown_timeout,
        )
        config = msgspec.structs.replace(config, task_id=entry.task_id)
        link = SimulatedConnections(config.valkey_url, 1) if self._habits.own_login else self._link
        launched = _SimulatedTask(entry, SimulatedWorker(config, link, self._habits))
        self._by_token[request.token] = entry.task
        self._kept[entry.task_id] = launched
        self._task_ids[config.worker_id] = entry.task_id
        living = asyncio.create_task(self._live(launched))
        self._background.add(living)
        living.add_done_callback(self._background.discard)
        return entry.task

    async def _live(self, kept: _SimulatedTask) -> None:
        self._renewals.add(kept.worker)
        try:
            code = await kept.worker.run()
        except Exception:  # one worker's boundary: it ends as a process does that nobody caught
            log.exception("simulated.worker_crashed", worker=kept.entry.worker_id)
            code = ExitCode.INTERNAL
        self._renewals.remove(kept.worker)
        if kept.worker.link is not self._link:
            await kept.worker.link.close()
        self._ends.append(
            worker_exit(
                kept.entry.task_id,
                kept.entry.worker_id,
                code=int(code),
                at=time.time(),
                stop_reason=kept.stop_reason,
            )
        )
        del self._kept[kept.entry.task_id]
        self._task_ids.pop(kept.entry.worker_id, None)
        kept.ended.set()
        news, self._news = self._news, asyncio.Event()
        news.set()

    async def stop(self, task_id: str, reason: str, grace: float | None = None) -> int:
        """Ends one worker: 1, or 0 for a task that does not run.
        They always end well within `grace`."""
        kept = self._kept.get(task_id)
        if kept is None:
            return 0
        kept.stop_reason = kept.stop_reason or reason
        kept.worker.stop(ExitCode.OK, reason)
        await kept.ended.wait()
        return 1

    async def stop_all(self, reason: str, grace: float | None = None) -> int:
        """Ends all workers at once."""
        return sum(
            await asyncio.gather(*(self.stop(task_id, reason) for task_id in list(self._kept)))
        )

    async def wait_for_exit(self, timeout: float) -> None:
        """Returns when something has ended since the call, or after `timeout` seconds."""
        try:
            await asyncio.wait_for(self._news.wait(), timeout)
        except TimeoutError:
            return

    def exits_after(self, number: int, limit: int = 100) -> list[tuple[int, TaskExit]]:
        """Ends with their numbers, which begin at 1."""
        return list(enumerate(self._ends[number : number + limit], number + 1))

    async def close(self) -> None:
        await tasks.cancel_tasks(*self._background)
