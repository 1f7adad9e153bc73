"""Renews the marks of all simulated workers: each on its own time, those due together in one round trip."""

from __future__ import annotations

import asyncio
import heapq
import itertools
import time

import structlog
from redis.exceptions import RedisError

from infra.bench.simulated.link import Link
from infra.bench.simulated.worker import SimulatedWorker

#: Seconds between two looks at what is due; a renewal is late by no more.
_TICK = 0.1
#: Renewals in one round trip.
_BATCH = 500
#: Seconds until failed renewals are tried again.
_RETRY = 1.0

log = structlog.get_logger()


class Renewals:
    """One loop for the node."""

    def __init__(self, link: Link) -> None:
        self._link = link
        self._due: list[tuple[float, int, SimulatedWorker]] = []
        self._numbers = itertools.count()
        self._workers: set[SimulatedWorker] = set()

    def add(self, worker: SimulatedWorker) -> None:
        self._workers.add(worker)
        self._plan(worker, worker.config.mark_period)

    def remove(self, worker: SimulatedWorker) -> None:
        self._workers.discard(worker)

    async def run(self) -> None:
        """Until cancelled."""
        while True:
            await asyncio.sleep(_TICK)
            while batch := self._take():
                await self._renew(batch)

    def _plan(self, worker: SimulatedWorker, seconds: float) -> None:
        heapq.heappush(self._due, (time.monotonic() + seconds, next(self._numbers), worker))

    def _take(self) -> list[SimulatedWorker]:
        now = time.monotonic()
        batch: list[SimulatedWorker] = []
        while self._due and self._due[0][0] <= now and len(batch) < _BATCH:
            worker = heapq.heappop(self._due)[2]
            if worker in self._workers:
                batch.append(worker)
        return batch

    async def _renew(self, batch: list[SimulatedWorker]) -> None:
        try:
            replies = await self._link.run_all([worker.renewal() for worker in batch])
        except (RedisError, OSError) as error:
            log.warning("simulated.renewals_failed", count=len(batch), error=type(error).__name__)
            for worker in batch:
                self._plan(worker, _RETRY)
            return
        for worker, reply in zip(batch, replies, strict=True):
            self._plan(worker, worker.config.mark_period)
            await worker.renewed(reply)
