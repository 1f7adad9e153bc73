"""The activity that checks whether a user's worker is alive, and when it was last used."""

from __future__ import annotations

import uuid
from typing import Any

import structlog
from redis.asyncio import Redis
from redis.exceptions import RedisError
from temporalio import activity

from activities.pool import entries
from infra.database.engine import Database, DatabaseUnavailable
from infra.database.trading import switches
from infra.launchers.port import Launcher
from infra.valkey import client as valkey
from infra.valkey import switch_fanout
from infra.valkey.client import reply_of, text_of
from infra.worker_task import LauncherUnreachable
from worker_runtime.protocol import keys
from workflows.user_worker import messages as m

log = structlog.get_logger()


class HealthActivity:
    """Activity `check_worker`."""

    def __init__(self, client: Redis, database: Database, launcher: Launcher) -> None:
        self._client = client
        self._database = database
        self._launcher = launcher

    @activity.defn
    async def check_worker(self, request: m.CheckWorker) -> m.WorkerHealth:
        """Reads the mark, the metadata and the launcher's list; writes a missing owner key again.

        Only the orchestrator writes that key. A flushed Valkey has lost it, and the worker takes no order
        until it is there again. The workflow decides what a running worker without a mark means.
        """
        running = await self._running(request.worker)
        if running is not False:
            await self._restore_owner(request)
        async with self._client.pipeline(transaction=False) as pipe:
            pipe.get(keys.mark(request.user_id))
            pipe.hgetall(keys.metadata(request.user_id))
            pipe.get(keys.GENERATION)
            mark, metadata, generation = await pipe.execute()
        expected = f"{request.worker.epoch}:{request.worker.worker_id}".encode()
        fields = metadata if mark == expected else {}
        return m.WorkerHealth(
            marked=mark == expected,
            running=running,
            last_activity=_last_activity(fields),
            generation=text_of(generation),
            worker_state=text_of(fields.get(b"state")),
        )

    async def _running(self, worker: m.WorkerRef) -> bool | None:
        try:
            tasks = await self._launcher.list()
        except LauncherUnreachable:
            return None
        return any(task.worker_id == worker.worker_id for task in tasks)

    async def _restore_owner(self, request: m.CheckWorker) -> None:
        owner = keys.owner(request.user_id)
        try:
            if await reply_of(self._client.exists(owner)):
                return
            generation, server = await valkey.read_generation_and_server(self._client, uuid.uuid4().hex)
            async with self._database.session(autocommit=True) as session:
                switch = switch_fanout.addressed_to(
                    await switches.switch_of_user(session, request.user_id), server
                )
            await entries.write_owner(self._client, request.user_id, request.worker, generation, switch)
            log.warning("owner_key_restored", user_id=request.user_id, epoch=request.worker.epoch)
        except (RedisError, DatabaseUnavailable) as error:  # the watcher tries again
            log.warning("owner_key_not_restored", user_id=request.user_id, reason=str(error))


def _last_activity(metadata: dict[bytes, Any]) -> float:
    value = metadata.get(b"last_activity_ms", b"0")
    try:
        return int(value) / 1000
    except ValueError:
        return 0.0
