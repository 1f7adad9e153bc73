"""Launching workers: for a claim that found the pool empty, and for the pool itself.

A worker's id is derived from its token, so that a repeated launch is the same worker with the same launch
token, and anybody can tell from a list of tasks which launches are under way.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Awaitable, Callable
from hashlib import blake2b

import structlog
from redis.asyncio import Redis
from temporalio import activity
from temporalio.exceptions import ApplicationError

from activities.slot import ask
from infra.launchers.port import Launcher, LaunchSpec, Task
from infra.settings import Settings
from infra.vault.orchestrator_keys import OrchestratorKeys
from worker_runtime.protocol import errors, keys
from worker_runtime.protocol.launch import WorkerConfig
from workflows import messages as m

#: First letters of the ids of pool workers, and of those launched while a user waited.
POOL_PREFIX = "p-"
COLD_PREFIX = "c-"
#: Seconds between two looks for a launched worker's entry: it appears after 0.3 to 1 s.
LOOK = 0.05
#: Seconds of one wait for a birth, and between two questions whether the task still runs.
SLICE = 1.0

log = structlog.get_logger()


def worker_id_of(prefix: str, token: str) -> str:
    """16 hexadecimal digits: short enough to read, and a pair among a million is unlikely (3e-8)."""
    return prefix + blake2b(token.encode(), digest_size=8).hexdigest()


class Launching:
    """Activities `launch_for_claim`, `launch_pool_worker`."""

    def __init__(
        self, client: Redis, launcher: Launcher, settings: Settings, orchestrator_keys: OrchestratorKeys
    ) -> None:
        self._client = client
        self._launcher = launcher
        self._settings = settings
        self._keys = orchestrator_keys

    def _spec(self, worker_id: str, pool: str, reserved_claim: str) -> LaunchSpec:
        own = self._settings
        return LaunchSpec(
            config=WorkerConfig(
                worker_id=worker_id,
                pool=pool,
                valkey_url=own.valkey_url,
                launch_token=self._keys.launch_token(worker_id),
                orchestrator_key=self._keys.public_key,
                version=own.worker_version,
                reserved_claim=reserved_claim,
                paper_exchange=own.exchange_address,
                mark_ttl=own.mark_ttl,
                mark_period=own.mark_period,
                log_level=own.log_level,
            )
        )

    @activity.defn
    async def launch_for_claim(self, request: m.LaunchForClaim) -> m.Launched:
        """A worker of this claim only. A repeat returns the same one, also when it is dead by now."""
        worker_id = worker_id_of(COLD_PREFIX, request.claim_id)
        born = keys.pool_born(request.pool, request.claim_id)

        async def is_born() -> bool:
            # The list onto itself: a repeat finds it again.
            return bool(await ask(self._client.blmove(born, born, 1, "LEFT", "RIGHT")))

        spec = self._spec(worker_id, request.pool, request.claim_id)
        return await self._launch(spec, f"claim-{request.claim_id}", request.timeout, is_born)

    @activity.defn
    async def launch_pool_worker(self, request: m.LaunchPoolWorker) -> m.Launched:
        """Returns when the worker is ready to be claimed."""
        worker_id = worker_id_of(POOL_PREFIX, request.token)
        entry = keys.pool_worker(request.pool, worker_id)

        async def is_ready() -> bool:
            until = time.monotonic() + SLICE
            while time.monotonic() < until:
                if await ask(self._client.exists(entry)):
                    return True
                await asyncio.sleep(LOOK)
            return False

        spec = self._spec(worker_id, request.pool, "")
        return await self._launch(spec, f"pool-{request.token}", request.timeout, is_ready)

    async def _launch(
        self, spec: LaunchSpec, token: str, timeout: float, ready: Callable[[], Awaitable[bool]]
    ) -> m.Launched:
        began = time.monotonic()
        task = await self._launcher.launch(spec, token)
        while time.monotonic() - began < timeout:
            activity.heartbeat()
            if await ready():
                log.info(
                    "worker_launched",
                    worker_id=task.worker_id,
                    task_id=task.task_id,
                    seconds=round(time.monotonic() - began, 3),
                )
                return m.Launched(worker_id=task.worker_id, task_id=task.task_id)
            if not await self._runs(task):
                raise _failed(f"worker {task.worker_id} ended before it was ready")
        # It may hold nothing yet, but nobody waits for it any more.
        await self._launcher.stop(task.task_id, "not ready in time")
        raise _failed(f"worker {task.worker_id} was not ready within {timeout:.0f} s")

    async def _runs(self, task: Task) -> bool:
        return any(other.task_id == task.task_id for other in await self._launcher.list())


def _failed(why: str) -> ApplicationError:
    """Not retried under the same token: the same token is the same dead worker."""
    return ApplicationError(why, type=errors.WorkerUnavailable.code, non_retryable=True)
