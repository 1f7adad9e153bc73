"""The activities that count and shrink a pool, and read its demand: recent claims and the present
window.

And the start of the pool's workflow, with the policy of the settings.
"""

import asyncio
import time
from dataclasses import asdict, replace
from datetime import time as clock_time
from datetime import timedelta
from typing import Any

import msgspec
import structlog
from redis.asyncio import Redis
from temporalio import activity
from temporalio.client import Client
from temporalio.common import WorkflowIDConflictPolicy
from temporalio.converter import value_to_type

from activities.heartbeat import beating
from activities.pool import entries
from activities.pool.entries import EntryStatus
from activities.pool.launch import POOL_PREFIX, worker_id_of
from infra.database.engine import Database
from infra.database.workers import launches, pools
from infra.database.workers import sessions as worker_sessions
from infra.launchers.port import Launcher
from infra.market import windows
from infra.market.calendar import HOME_ZONE_NAME, Calendar
from infra.settings import Settings
from infra.valkey.client import replies_of, reply_of, text_of
from worker_runtime.protocol import keys
from worker_runtime.protocol.errors import BerthError
from workflows import names
from workflows.worker_pool.messages import (
    CountPool,
    KeepPool,
    KeptPool,
    PoolCount,
    PoolInput,
    PoolMode,
    PoolView,
    SetPolicy,
    StopPoolWorkers,
    WindowNow,
)
from workflows.worker_pool.policy import (
    PoolPolicy,
    PoolPolicyInvalid,
    PoolWindow,
    check_policy,
    days_of,
)

#: Members of the ready list that one count reads besides the workers that run. Only forged ones are
#: more; they are removed, and the next count reads the next ones.
MAX_UNLISTED_ENTRIES = 1000

log = structlog.get_logger()


def window_of(given: PoolWindow) -> windows.Window:
    """Raises `PoolPolicyInvalid`, `ZoneUnknown`, `ValueError`."""
    return windows.Window(
        begins=clock_time.fromisoformat(given.begins),
        ends=clock_time.fromisoformat(given.ends),
        weekdays=days_of(given.days),
        zone=windows.zone_of(given.zone or HOME_ZONE_NAME),
        days=windows.Days(given.calendar),
    )


class PoolActivities:
    def __init__(
        self, client: Redis, database: Database, launcher: Launcher, calendar: Calendar
    ) -> None:
        self._client = client
        self._database = database
        self._launcher = launcher
        self._calendar = calendar
        #: Pool → when each running worker without an entry was first seen so (monotonic seconds).
        self._silent_since: dict[str, dict[str, float]] = {}

    @activity.defn
    async def count_pool(self, request: CountPool) -> PoolCount:
        """Free workers, and those that run and have not announced themselves yet.

        The launcher is asked before Valkey, so a worker that becomes ready in between is counted
        once. A silent worker counts as starting for `launch_timeout` from when its silence was
        noticed, not from its launch: after a flush of Valkey all are silent for a moment
        (exact-pool). After that it hangs and is stopped; it serves nobody yet.
        """
        launching = {worker_id_of(POOL_PREFIX, token) for token in request.launching}
        listed, claims = await asyncio.gather(
            self._launcher.list(), self._claims(request.pool, request.policy.demand_minutes * 60)
        )
        ours = {task.worker_id: task for task in listed if task.pool == request.pool}
        tasks = {worker: task for worker, task in ours.items() if worker.startswith(POOL_PREFIX)}
        ready, announced = await self._announced(request.pool, list(tasks))
        # A worker that the list does not show yet counts if we launched it; one that has a user
        # never does, whatever its entry says.
        entered = {worker for worker, state in announced.items() if state == b"ready"}
        own = await self._database.fetch(launches.never_assigned, request.pool, entered)
        dead, lost = ready - own.keys(), own.keys() - ready
        if dead:
            await reply_of(self._client.zrem(keys.pool_ready(request.pool), *dead))
            log.info("pool_entries_removed", pool=request.pool, count=len(dead))
        if lost:  # one that was claimed meanwhile is passed over by the next claim
            now = time.time_ns() // 1_000_000
            await self._client.zadd(
                keys.pool_ready(request.pool), dict.fromkeys(lost, now), nx=True
            )
        free = own.keys() - launching
        silent = tasks.keys() - announced.keys() - launching
        if silent:  # one that belongs to a user has no entry either, once that has expired
            silent -= await self._database.write(launches.assigned_workers, silent)
        hanging = self._hanging(request.pool, silent, request.launch_timeout)
        for worker_id in hanging:
            log.warning("pool_worker_hangs", pool=request.pool, worker_id=worker_id)
            await self._launcher.stop(tasks[worker_id].task_id, "announced nothing")
        return PoolCount(
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
            return await self._database.fetch(worker_sessions.count_claims, pool, seconds)
        except BerthError as error:  # the pool continues with the number that it knows
            log.warning("pool_demand_unknown", pool=pool, reason=error.detail)
            return None

    def _window(self, policy: PoolPolicy) -> WindowNow:
        if not policy.windows:
            return WindowNow()
        try:
            hours = [window_of(window) for window in policy.windows]
        except (BerthError, ValueError) as error:  # a time zone that this host does not know
            log.error("pool_windows_not_understood", reason=str(error)[:200])
            return WindowNow()
        number, until = windows.current_window(hours, self._calendar, time.time())
        return WindowNow(name="" if number is None else policy.windows[number].name, until=until)

    async def _announced(self, pool: str, running: list[str]) -> tuple[set[str], dict[str, bytes]]:
        """Returns the free ones of the running workers, with the first `MAX_UNLISTED_ENTRIES`
        others of the ready list, and the state of each of these workers that has an entry."""
        first = await reply_of(
            self._client.zrange(keys.pool_ready(pool), 0, MAX_UNLISTED_ENTRIES + len(running))
        )
        listed = {text_of(raw) for raw in first}
        workers = sorted(listed.union(running))
        async with self._client.pipeline(transaction=False) as pipe:
            for worker in workers:  # the state second: a worker that joins meanwhile has both
                pipe.zscore(keys.pool_ready(pool), worker)
                pipe.hget(keys.pool_worker(pool, worker), "state")
            replies = await replies_of(pipe) if workers else []
        ready = {
            worker for worker, score in zip(workers, replies[::2], strict=True) if score is not None
        }
        return ready, {
            worker: state for worker, state in zip(workers, replies[1::2], strict=True) if state
        }

    def _hanging(self, pool: str, silent: set[str], launch_timeout: float) -> set[str]:
        now, before = time.monotonic(), self._silent_since.get(pool, {})
        known = self._silent_since[pool] = {worker: before.get(worker, now) for worker in silent}
        return {worker for worker, since in known.items() if now - since > launch_timeout}

    @activity.defn
    async def keep_pool(self, request: KeepPool) -> KeptPool:
        """Writes what operators have set for the pool; returns what PostgreSQL has then: it may be
        newer."""
        number = request.kept.number
        row = await self._database.fetch(
            pools.keep_pool, request.pool, number, asdict(request.kept)
        )
        kept: KeptPool = value_to_type(KeptPool, row.settings)
        return replace(kept, number=row.number)

    @activity.defn
    async def shrink_pool(self, request: StopPoolWorkers) -> int:
        """Stops free workers; returns how many. Each is claimed first, so that no user gets it."""
        claims: dict[str, str] = {}
        gone: set[str] = set()
        for number in range(request.count):
            claim_id = f"shrink-{request.token}-{number}"
            entry = await entries.claim_entry(self._client, request.pool, claim_id)
            if entry.status == EntryStatus.EMPTY:
                break
            # It was this claim's; by now it is stopped, free again or another claim's.
            if entry.status == EntryStatus.GONE:
                gone.add(entry.worker_id)
                continue
            claims[entry.worker_id] = claim_id
        own = await self._database.fetch(launches.never_assigned, request.pool, claims)
        for worker_id in claims.keys() - own.keys():
            log.error(
                "pool_entry_refused", worker_id=worker_id, pool=request.pool, reason="it has a user"
            )
            await entries.discard_entry(self._client, request.pool, worker_id, claims[worker_id])
        running = {task.worker_id: task.task_id for task in await self._launcher.list()}
        # Concurrently, because each may take its grace. A repeated call stops the rest.
        async with beating():
            await asyncio.gather(
                *(
                    self._stop(request.pool, worker_id, running.get(worker_id, launched.task_id))
                    for worker_id, launched in own.items()
                )
            )
        return len(own) + len(gone - running.keys())

    async def _stop(self, pool: str, worker_id: str, task_id: str) -> None:
        if task_id:
            await self._launcher.stop(task_id, "the pool shrinks")
        await entries.remove_entry(self._client, pool, worker_id)


#: Time limits of a call to the pool's workflow: the first one, and the longest. When no
#: orchestrator serves its version any more, it answers only after the mover has handed it over, in
#: about 5 s. On a host that has to replay many workflows, an answer may take some seconds.
FIRST_ANSWER_TIMEOUT = timedelta(seconds=2)
MAX_ANSWER_TIMEOUT = timedelta(seconds=16)


def policy_of(settings: Settings) -> PoolPolicy:
    """Raises `PoolPolicyInvalid`, `ZoneUnknown`."""
    policy = PoolPolicy(
        target=settings.pool_target,
        minimum=settings.pool_minimum,
        maximum=settings.pool_maximum or None,
        buffer=settings.pool_buffer,
        demand_minutes=settings.pool_demand_minutes,
        limit=settings.pool_limit or None,
        shrink_after=settings.pool_shrink_after,
        windows=tuple(_window(given) for given in settings.pool_windows),
    )
    check_policy(policy)
    for window in policy.windows:
        windows.zone_of(window.zone)
    return policy


def _window(given: dict[str, Any]) -> PoolWindow:
    try:
        # `convert` checks the types.
        window = PoolWindow(**{"zone": HOME_ZONE_NAME} | given)
        return msgspec.convert(asdict(window), PoolWindow)
    except (TypeError, msgspec.ValidationError) as error:
        raise PoolPolicyInvalid(f"BERTH_POOL_WINDOWS: {given}: {error}") from None


async def ensure_pool(
    temporal: Client, settings: Settings, patience: timedelta = FIRST_ANSWER_TIMEOUT
) -> int:
    """Starts the pool's workflow, or gives the running one the policy of the settings, if that is
    new.

    What an operator has set since stays, until the settings change. Each call may take `patience`.
    Returns how many free workers there will be at least, at any hour. Raises `RPCError`, and
    `WorkflowUpdateFailedError` while the workflow is still on a version that knows no policy.
    """
    policy = policy_of(settings)
    handle = await temporal.start_workflow(
        names.WORKER_POOL,
        PoolInput(
            pool=settings.pool,
            launch_timeout=settings.launch_timeout,
            policy=policy,
            configured=policy,
        ),
        id=names.worker_pool_id(settings.pool),
        task_queue=names.LIFECYCLE_QUEUE,
        id_conflict_policy=WorkflowIDConflictPolicy.USE_EXISTING,
        static_summary="keeps workers ready",
        rpc_timeout=patience,
    )
    view: PoolView = await handle.query("view", result_type=PoolView, rpc_timeout=patience)
    if view.configured != policy:
        view = await handle.execute_update(
            "set_policy",
            SetPolicy(policy=policy, from_settings=True),
            result_type=PoolView,
            rpc_timeout=patience,
        )
        log.info("pool_policy_of_settings", pool=settings.pool, target=policy.target)
    kept = view.policy
    least = min([kept.target, *(window.target for window in kept.windows)])
    if kept.limit is not None:
        least = min(least, kept.limit)
    return least if view.mode == PoolMode.RUNNING else 0
