"""Is a user's worker alive, and when was it last used?"""

from __future__ import annotations

import uuid
from typing import Any

import structlog
from redis.asyncio import Redis
from redis.exceptions import RedisError
from temporalio import activity

from activities.slot import ask
from infra import valkey
from infra.launchers.port import Launcher, LauncherUnreachable
from worker_runtime.protocol import keys, scripts
from workflows import messages as m

log = structlog.get_logger()


class Checking:
    """Activity `check_worker`."""

    def __init__(self, client: Redis, launcher: Launcher) -> None:
        self._client = client
        self._launcher = launcher

    @activity.defn
    async def check_worker(self, request: m.CheckWorker) -> m.WorkerHealth:
        """Looks at mark, metadata and the launcher's list; puts a missing owner key back.

        Only the orchestrator writes that key. A flushed Valkey lost it, and the worker takes no order
        until it is there again, under the new generation.
        """
        running = await self._running(request.worker)
        if running is not False:
            await self._restore_owner(request)
        async with self._client.pipeline(transaction=False) as pipe:
            pipe.get(keys.mark(request.user_id))
            pipe.hgetall(keys.metadata(request.user_id))
            mark, metadata = await pipe.execute()
        expected = f"{request.worker.epoch}:{request.worker.worker_id}".encode()
        return m.WorkerHealth(
            marked=mark == expected,
            running=running,
            last_activity=_last_activity(metadata) if mark == expected else 0.0,
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
            if await ask(self._client.exists(owner)):
                return
            generation = await valkey.ensure_generation(self._client, uuid.uuid4().hex)
            worker = request.worker
            await valkey.run(self._client, scripts.OWN, [owner], [worker.epoch, worker.worker_id, generation])
            log.warning("owner_key_restored", user_id=request.user_id, epoch=worker.epoch)
        except RedisError as error:
            log.warning("owner_key_not_restored", user_id=request.user_id, reason=str(error))


def _last_activity(metadata: dict[bytes, Any]) -> float:
    value = metadata.get(b"last_activity_ms", b"0")
    try:
        return int(value) / 1000
    except ValueError:
        return 0.0
