"""Signals workflows when the launcher reports the end of their workers."""

from __future__ import annotations

import asyncio

import structlog
from redis.asyncio import Redis
from redis.exceptions import RedisError
from temporalio.client import Client
from temporalio.service import RPCError

from activities.events.recorder import CLOSED_BY_WORKER
from activities.pool import entries
from infra import tasks
from infra.database.engine import Database
from infra.database.workers import sessions as worker_sessions
from infra.launchers.port import Launcher
from infra.temporal.client import signal_workflow
from infra.valkey.client import reply_of, text_of
from infra.worker_task import LauncherUnreachable, TaskExit
from worker_runtime.protocol import keys
from worker_runtime.protocol.errors import BerthError
from workflows import names
from workflows.user_worker import messages as m
from workflows.worker_pool import messages as pm

#: Seconds between two tries while the launcher, Valkey, PostgreSQL or Temporal is away.
RETRY = 1.0

log = structlog.get_logger()


class ExitWatcher:
    """Follows the launcher's stream of exits until cancelled."""

    def __init__(
        self, client: Redis, database: Database, launcher: Launcher, temporal: Client, *, pool: str
    ) -> None:
        self._client = client
        self._database = database
        self._launcher = launcher
        self._temporal = temporal
        self._pool = pool
        #: Pools that lost a free worker, with the last one that each lost.
        self._lost: dict[str, str] = {}
        self._losing = asyncio.Event()

    async def run(self) -> None:
        """Also reports the ends that happened while no orchestrator ran."""
        pools = asyncio.create_task(self._signal_pools(), name="ends of free workers")
        try:
            while True:
                try:
                    # '' is all that the launcher still knows.
                    position = await reply_of(self._client.get(keys.EXITS_HANDLED))
                    async for ended in self._launcher.exits(text_of(position)):
                        await self._report_until_done(ended)
                except (LauncherUnreachable, RedisError) as error:
                    log.warning("exits_not_read", error=type(error).__name__, reason=str(error)[:200])
                await asyncio.sleep(RETRY)
        finally:
            await tasks.cancel_tasks(pools)

    async def _signal_pools(self) -> None:
        """Signals pools that lost free workers; ends of users' workers do not wait for it.

        When a host is lost, hundreds of free workers end, and a busy Temporal takes a second for a signal:
        one signal covers all ends since the last one. If this process dies before, the pool counts within a
        minute.
        """
        while True:
            await self._losing.wait()
            self._losing.clear()
            while self._lost:
                # The one that waits longest: a pool that fails holds up no other.
                pool = next(iter(self._lost))
                worker_id = self._lost.pop(pool)
                try:
                    gone = pm.WorkerGone(worker_id=worker_id)
                    await signal_workflow(self._temporal, names.worker_pool_id(pool), "worker_gone", gone)
                except (RPCError, OSError) as error:
                    log.warning("pool_not_signalled", pool=pool, error=type(error).__name__)
                except Exception:  # the boundary of a loop, which would end unseen
                    log.exception("pool_signals_crashed", pool=pool)
                else:
                    continue
                self._lost.setdefault(pool, worker_id)
                await asyncio.sleep(RETRY)

    async def _report_until_done(self, ended: TaskExit) -> None:
        """Reports one end, again and again until it succeeds."""
        while True:
            try:
                await self.report(ended)
                position = ended.detail.get("position")
                if position:
                    await reply_of(self._client.set(keys.EXITS_HANDLED, position))
                return
            except (BerthError, RedisError, RPCError, OSError) as error:
                log.warning("exit_not_reported", worker_id=ended.worker_id, error=type(error).__name__)
                await asyncio.sleep(RETRY)

    async def report(self, ended: TaskExit) -> None:
        """Takes the worker out of its pool, then signals its user's workflow; `run` signals the pool's."""
        async with self._database.session(autocommit=True) as session:
            row = await worker_sessions.last_session_of_worker(session, ended.worker_id)
        pool = row.pool if row else self._pool
        await entries.remove_entry(self._client, pool, ended.worker_id)
        log.info(
            "worker_exited",
            worker_id=ended.worker_id,
            task_id=ended.task_id,
            user_id=row.user_id if row else "",
            exit_code=ended.exit_code,
            reason=ended.reason,
        )
        if row is None:
            self._lost[pool] = ended.worker_id
            self._losing.set()
        elif row.ended_at is None or (row.end_reason or "").startswith(CLOSED_BY_WORKER):
            lost = m.WorkerLostSignal(
                task_id=ended.task_id,
                worker_id=ended.worker_id,
                exit_code=ended.exit_code,
                reason=ended.reason[:200],
            )
            workflow_id = names.user_worker_id(row.user_id)
            if not await signal_workflow(self._temporal, workflow_id, "worker_lost", lost):
                # The assignment of a worker without workflow would else stay open for ever.
                reason = f"{ended.reason}, no workflow"[:200]
                async with self._database.session() as session:
                    await worker_sessions.end_session(session, claim_id=row.claim_id, reason=reason)
