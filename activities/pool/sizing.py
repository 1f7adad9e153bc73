"""The activities that count and shrink a pool, and read its demand: recent claims and the present window."""

from __future__ import annotations

import asyncio
import time
from datetime import time as clock_time

import structlog
from redis.asyncio import Redis
from temporalio import activity

from activities.heartbeat import Heartbeat
from activities.pool import entries
from activities.pool.launch import POOL_PREFIX, worker_id_of
from infra.database.engine import Database
from infra.database.workers import sessions as worker_sessions
from infra.launchers.port import Launcher
from infra.market import windows
from infra.market.calendar import Calendar
from infra.valkey.client import reply_of
from worker_runtime.protocol import keys
from worker_runtime.protocol.errors import BerthError
from workflows.worker_pool import messages as pm
from workflows.worker_pool.messages import WindowNow
from workflows.worker_pool.policy import PoolPolicy, PoolWindow, check_policy, days_of

log = structlog.get_logger()


def window_of(given: PoolWindow) -> windows.Window:
    """Raises `PoolPolicyInvalid`, `ZoneUnknown`, `ValueError`."""
    return windows.Window(
        begins=clock_time.fromisoformat(given.begins),
        ends=clock_time.fromisoformat(given.ends),
        weekdays=days_of(given.days),
        zone=windows.zone_of(given.zone),
        days=windows.Days(given.calendar),
    )


def checked_policy(policy: PoolPolicy) -> PoolPolicy:
    """The same policy, if it is valid. Raises `PoolPolicyInvalid`, `ZoneUnknown`."""
    check_policy(policy)
    for window in policy.windows:
        windows.zone_of(window.zone)
    return policy


class PoolActivities:
    """Activities `count_pool`, `shrink_pool`."""

    def __init__(self, client: Redis, database: Database, launcher: Launcher, calendar: Calendar) -> None:
        self._client = client
        self._database = database
        self._launcher = launcher
        self._calendar = calendar
        #: When each running worker without an entry was first seen so (monotonic seconds).
        self._silent_since: dict[str, float] = {}

    @activity.defn
    async def count_pool(self, request: pm.CountPool) -> pm.PoolCount:
        """Free workers, and those that run and have not announced themselves yet.

        The launcher is asked before Valkey, so a worker that becomes ready in between is counted once. A
        silent worker counts as starting for `launch_timeout` from when its silence was noticed, not from its
        launch: after a flush of Valkey all are silent for a moment (exact-pool). After that it hangs and is
        stopped; it serves nobody yet.
        """
        launching = {worker_id_of(POOL_PREFIX, token) for token in request.launching}
        listed, claims = await asyncio.gather(
            self._launcher.list(), self._claims(request.pool, request.policy.demand_minutes * 60)
        )
        ours = {task.worker_id: task for task in listed if task.pool == request.pool}
        tasks = {worker: task for worker, task in ours.items() if worker.startswith(POOL_PREFIX)}
        ready, announced = await self._announced(request.pool, list(tasks))
        dead = ready - announced.keys()
        if dead:
            await reply_of(self._client.zrem(keys.pool_ready(request.pool), *dead))
            log.info("pool_entries_removed", pool=request.pool, count=len(dead))
        free = {worker for worker in ready if announced.get(worker) == b"ready"} - launching
        silent = tasks.keys() - announced.keys() - launching
        silent -= await self._assigned(silent)
        hanging = self._hanging(silent, request.launch_timeout)
        for worker_id in hanging:
            log.warning("pool_worker_hangs", pool=request.pool, worker_id=worker_id)
            await self._launcher.stop(tasks[worker_id].task_id, "announced nothing")
        return pm.PoolCount(
            ready=len(free),
            starting=len(silent - hanging),
            in_use=len(ours.keys() - free - launching - silent),
            claims=claims,
            window=self._window(request.policy),
        )

    async def _claims(self, pool: str, seconds: float) -> int | None:
        """Claims within the last `seconds`; None: not wanted or not known."""
        if seconds <= 0:
            return None
        try:
            async with self._database.session(autocommit=True) as session:
                return await worker_sessions.count_claims(session, pool, seconds)
        except BerthError as error:  # the pool goes on with the number that it knows
            log.warning("pool_demand_unknown", pool=pool, reason=error.detail)
            return None

    def _window(self, policy: PoolPolicy) -> WindowNow:
        if not policy.windows:
            return WindowNow()
        try:
            hours = [window_of(one) for one in policy.windows]
        except (BerthError, ValueError) as error:  # a time zone that this host does not know
            log.error("pool_windows_not_understood", reason=str(error)[:200])
            return WindowNow()
        number, until = windows.current_window(hours, self._calendar, time.time())
        return WindowNow(name="" if number is None else policy.windows[number].name, until=until)

    async def _announced(self, pool: str, running: list[str]) -> tuple[set[str], dict[str, bytes]]:
        """The ready list, and the state of each listed or running worker that has an entry."""
        ready = {raw.decode() for raw in await reply_of(self._client.zrange(keys.pool_ready(pool), 0, -1))}
        workers = sorted(ready.union(running))
        async with self._client.pipeline(transaction=False) as pipe:
            for worker in workers:
                pipe.hget(keys.pool_worker(pool, worker), "state")
            states = await pipe.execute() if workers else []
        return ready, {worker: state for worker, state in zip(workers, states, strict=True) if state}

    async def _assigned(self, workers: set[str]) -> set[str]:
        """Those that belong to a user; their pool entry has expired."""
        if not workers:
            return set()
        async with self._database.session() as session:
            return await worker_sessions.assigned_workers(session, workers)

    def _hanging(self, silent: set[str], launch_timeout: float) -> set[str]:
        now = time.monotonic()
        self._silent_since = {worker: self._silent_since.get(worker, now) for worker in silent}
        return {worker for worker, since in self._silent_since.items() if now - since > launch_timeout}

    @activity.defn
    async def shrink_pool(self, request: pm.StopPoolWorkers) -> int:
        """Stops free workers; returns how many. Each is claimed first, so that no user gets it."""
        taken = []
        for number in range(request.count):
            found = await entries.claim_entry(self._client, request.pool, f"shrink-{request.token}-{number}")
            if found.status == "empty":
                break
            taken.append(found)
        # Concurrently, because each may take its grace. A repeated call stops the rest.
        async with Heartbeat():
            await asyncio.gather(*(self._stop(request.pool, found) for found in taken))
        return len(taken)

    async def _stop(self, pool: str, found: entries.PoolEntry) -> None:
        if found.task_id:
            await self._launcher.stop(found.task_id, "the pool shrinks")
        await entries.remove_entry(self._client, pool, found.worker_id)
