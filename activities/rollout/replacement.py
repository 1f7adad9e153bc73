"""The activities of a rollout: count workers by version, end free ones, ask users to move."""

import asyncio
import time
from collections.abc import Iterable
from dataclasses import dataclass
from datetime import UTC, datetime
from typing import NamedTuple
from zlib import crc32

import structlog
from redis.asyncio import Redis
from temporalio import activity
from temporalio.client import Client

from activities.heartbeat import beating
from activities.pool import entries
from activities.rollout.canary import CanaryRegistry, CanaryRelease
from infra.database import audit
from infra.database.engine import Database
from infra.database.workers import launches
from infra.database.workers import sessions as worker_sessions
from infra.launchers.port import Launcher
from infra.market.calendar import MarketCalendars
from infra.settings import Settings
from infra.temporal.client import RPC_TIMEOUT, signal_workflow
from infra.valkey import client as valkey
from infra.valkey.client import replies_of
from infra.worker_task import Task
from worker_runtime.protocol import keys, scripts
from workflows import names
from workflows.rollout.messages import (
    AskToMove,
    CheckRelease,
    ReleaseSnapshot,
    RetireWorkers,
    TellRollout,
)
from workflows.user_worker.messages import MoveWhenQuiet
from workflows.worker_pool.messages import PoolView, SetRelease

#: Seconds without an order that count as quiet while the user's markets are closed.
QUIET_WHEN_CLOSED_S = 5.0
#: Seconds until a user is asked again: a signal may be lost with a run that closed.
MOVE_RETRY_INTERVAL_S = 600.0
#: Seconds over which the users' deadlines are spread, so that they do not all move at once.
DEADLINE_SPREAD_S = 600

log = structlog.get_logger()


class _MoveRequest(NamedTuple):
    worker_id: str
    version: str
    quiet: float
    at: float


@dataclass(eq=False, repr=False)
class RolloutActivities:
    client: Redis
    database: Database
    launcher: Launcher
    temporal: Client
    calendars: MarketCalendars
    settings: Settings

    def __post_init__(self) -> None:
        self._canaries = CanaryRegistry(self.client)
        #: Pool → user → the last request to move.
        self._asked: dict[str, dict[str, _MoveRequest]] = {}

    @activity.defn
    async def check_release(self, request: CheckRelease) -> ReleaseSnapshot:
        pool = self.temporal.get_workflow_handle(names.worker_pool_id(request.pool))
        view: PoolView = await pool.query("view", result_type=PoolView, rpc_timeout=RPC_TIMEOUT)
        before = view.release
        if request.change and (before, view.surge) != (request.release, request.surge):
            view = await pool.execute_update(
                "set_release",
                SetRelease(release=request.release, surge=request.surge),
                result_type=PoolView,
                rpc_timeout=RPC_TIMEOUT,
            )
        version = self._version(request.release.version)
        versions = await self._free_versions(request.pool)
        others = [task.worker_id for task in await self._others(request.pool, version)]
        users = await self.database.write(worker_sessions.workers_in_use, others)
        new = sum(worker_version == version for worker_version in versions.values())
        served, failed = await self._canary_counts(request)
        return ReleaseSnapshot(
            before=before,
            new=new,
            old=len(versions) - new,
            users=len(users),
            wanted=view.wanted,
            starting=view.starting,
            never_ready=view.never_ready,
            last_failure=view.last_failure,
            mode=view.mode,
            served=served,
            failed=failed,
            at=time.time(),
        )

    async def _canary_counts(self, request: CheckRelease) -> tuple[int, int]:
        """Returns the users served, and failed in a row, by workers of the canary."""
        if request.canary is None or request.before is None:
            return 0, 0
        version = self._version(request.canary.version)
        if version == self._version(request.before.version):  # claims could not distinguish them
            return 0, 0
        canary = CanaryRelease(
            version=version, before=request.before, since=request.since, condemned=request.condemned
        )
        return await self._canaries.begin(request.pool, canary)

    def _version(self, version: str) -> str:
        return version or self.settings.worker_version

    async def _free_versions(self, pool: str) -> dict[str, str]:
        """Returns the version of each free worker that runs, as it was launched: an entry may say
        anything."""
        tasks = [task for task in await self.launcher.list() if task.pool == pool]
        async with self.client.pipeline(transaction=False) as pipe:
            for task in tasks:
                pipe.hget(keys.pool_worker(pool, task.worker_id), "state")
            states = await replies_of(pipe) if tasks else []
        ready = [
            task.worker_id for task, state in zip(tasks, states, strict=True) if state == b"ready"
        ]
        free = await self.database.fetch(launches.never_assigned, pool, ready)
        return {worker_id: launch.version for worker_id, launch in free.items()}

    async def _others(self, pool: str, version: str) -> list[Task]:
        """Returns the running workers of other versions, the oldest first."""
        tasks = [
            task
            for task in await self.launcher.list()
            if task.pool == pool and task.version != version
        ]
        return sorted(tasks, key=lambda task: task.launched_at)

    @activity.defn
    async def retire_workers(self, request: RetireWorkers) -> int:
        """Ends free workers of other versions, and those that an earlier call only took; how
        many."""
        taken: list[Task] = []
        others = await self._others(request.pool, self._version(request.version))
        async with self.database.session(autocommit=True) as session:
            own = await launches.never_assigned(
                session, request.pool, [task.worker_id for task in others]
            )
        for task in others:
            if task.worker_id not in own:  # it has a user, whatever its entry says
                continue
            claim_id = f"retire-{task.worker_id}"
            is_claimed = (
                await entries.claim_of_worker(self.client, request.pool, task.worker_id) == claim_id
            )
            has_room = len(taken) < request.count
            if is_claimed or (
                has_room and await self._take(request.pool, task.worker_id, claim_id)
            ):
                taken.append(task)
        async with beating():
            await asyncio.gather(*(self._stop(request.pool, task) for task in taken))
        return len(taken)

    async def _take(self, pool: str, worker_id: str, claim_id: str) -> bool:
        taken = await valkey.run_script(
            self.client,
            scripts.RETIRE_WORKER,
            [keys.pool_ready(pool), keys.pool_worker(pool, worker_id)],
            [claim_id, worker_id],
        )
        return taken is not None

    async def _stop(self, pool: str, task: Task) -> None:
        await self.launcher.stop(task.task_id, "replaced by another version")
        await entries.remove_entry(self.client, pool, task.worker_id)
        log.info("pool_worker_replaced", pool=pool, worker_id=task.worker_id, version=task.version)

    @activity.defn
    async def ask_to_move(self, request: AskToMove) -> int:
        """Returns how many users have been asked. Asks again when a user's markets close or
        open."""
        version = self._version(request.version)
        others = await self._others(request.pool, version)
        async with self.database.session() as session:
            users = await worker_sessions.workers_in_use(
                session, [task.worker_id for task in others]
            )
        now = time.monotonic()
        present = {worker.user_id for worker in users}
        before = self._asked.get(request.pool, {})
        asked = self._asked[request.pool] = {
            user: earlier for user, earlier in before.items() if user in present
        }
        due = []
        for worker in users:
            quiet = request.quiet if self._trades_now(worker.markets) else QUIET_WHEN_CLOSED_S
            move = _MoveRequest(worker.worker_id, version, min(quiet, request.quiet), now)
            last = asked.get(worker.user_id)
            if last is None or last[:3] != move[:3] or now - last.at > MOVE_RETRY_INTERVAL_S:
                due.append((worker, move))
        for worker, move in due[: request.most]:
            activity.heartbeat()
            if await self._ask(worker, move, request.deadline):
                asked[worker.user_id] = move
        return len(asked)

    async def _ask(
        self, worker: worker_sessions.WorkerInUse, move: _MoveRequest, deadline: float
    ) -> bool:
        """Returns True if there is a run to ask; else it has ended, and its worker ends."""
        message = MoveWhenQuiet(
            worker_id=worker.worker_id,
            version=move.version,
            deadline=deadline - crc32(worker.user_id.encode()) % DEADLINE_SPREAD_S,
            quiet=move.quiet,
        )
        workflow_id = names.user_worker_id(worker.user_id)
        return await signal_workflow(self.temporal, workflow_id, "move_when_quiet", message)

    def _trades_now(self, markets: Iterable[tuple[str, str]]) -> bool:
        """Returns True if one of these brokers' markets is open; an unknown one may be."""
        now = datetime.now(UTC)
        for broker, market in markets:
            calendar = self.calendars.find(broker, market)
            if calendar is None or calendar.is_open(market, now):
                return True
        return False

    @activity.defn
    async def tell_rollout(self, request: TellRollout) -> None:
        """Writes an event of a rollout to the audit trail, the same event once."""
        actor, subject = request.actor or "orchestrator", f"pool:{request.pool}"
        said = {"version": request.release.version, "reason": request.reason}
        about = {"id": f"{request.rollout}:{request.event}", "event": request.event} | said
        async with self.database.session() as session:
            await audit.append_entry_once(
                session, actor, "pool.rollout", subject, **about, image=request.release.image
            )
        log.info("rollout_recorded", pool=request.pool, rollout_event=request.event, **said)
