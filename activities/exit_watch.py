"""Tells workflows of workers that ended: the launcher's word is the one that counts (one-owner)."""

from __future__ import annotations

import asyncio
from typing import Any

import structlog
from redis.asyncio import Redis
from redis.exceptions import RedisError
from temporalio.client import Client
from temporalio.service import RPCError, RPCStatusCode

from activities import slot
from activities.recorder import CLOSED_BY_WORKER
from infra.database import worker_sessions
from infra.database.engine import Database
from infra.launchers.port import Launcher, LauncherUnreachable, TaskExit
from worker_runtime.protocol.errors import BerthError
from workflows import messages as m
from workflows import names

#: Seconds between two tries while the launcher, Valkey, PostgreSQL or Temporal is away.
RETRY = 1.0

log = structlog.get_logger()


class ExitWatch:
    """Follows the launcher's stream of exits until cancelled."""

    def __init__(
        self, client: Redis, database: Database, launcher: Launcher, temporal: Client, *, pool: str
    ) -> None:
        self._client = client
        self._database = database
        self._launcher = launcher
        self._temporal = temporal
        self._pool = pool

    async def run(self) -> None:
        while True:
            try:
                async for ended in self._launcher.exits():
                    await self._insist(ended)
            except LauncherUnreachable as error:
                log.warning("exits_not_heard", reason=error.detail)
            await asyncio.sleep(RETRY)

    async def _insist(self, ended: TaskExit) -> None:
        """Tells of one exit, again and again until everybody concerned has heard it."""
        while True:
            try:
                return await self.tell(ended)
            except (BerthError, RedisError, RPCError, OSError) as error:
                log.warning("exit_not_told", worker_id=ended.worker_id, error=type(error).__name__)
                await asyncio.sleep(RETRY)

    async def tell(self, ended: TaskExit) -> None:
        """Takes the worker out of its pool, then signals its user's workflow, or the pool's."""
        async with self._database.session() as session:
            row = await worker_sessions.last_of_worker(session, ended.worker_id)
        pool = row.pool if row else self._pool
        await slot.forget(self._client, pool, ended.worker_id)
        log.info(
            "worker_exited",
            worker_id=ended.worker_id,
            task_id=ended.task_id,
            user_id=row.user_id if row else "",
            exit_code=ended.exit_code,
            reason=ended.reason,
        )
        if row is None:
            await self._signal(
                names.worker_pool_id(pool), "worker_gone", m.WorkerGone(worker_id=ended.worker_id)
            )
        elif row.ended_at is None or (row.end_reason or "").startswith(CLOSED_BY_WORKER):
            lost = m.WorkerLost(
                task_id=ended.task_id,
                worker_id=ended.worker_id,
                exit_code=ended.exit_code,
                reason=ended.reason[:200],
            )
            await self._signal(names.user_worker_id(row.user_id), "worker_lost", lost)

    async def _signal(self, workflow_id: str, signal: str, message: Any) -> None:
        try:
            await self._temporal.get_workflow_handle(workflow_id).signal(signal, message)
        except RPCError as error:
            if error.status != RPCStatusCode.NOT_FOUND:
                raise
