"""The activities that launch workers: for a claim that found the pool empty, and for the pool
itself.

A worker's id is derived from its token, so that a repeated launch is the same worker, and a list of
tasks shows which launches are under way.
"""

import asyncio
import time
from collections.abc import Awaitable, Callable
from dataclasses import dataclass
from functools import partial
from hashlib import blake2b

import msgspec
import structlog
from redis.asyncio import Redis
from temporalio import activity
from temporalio.exceptions import ApplicationError, ApplicationErrorCategory

from activities.heartbeat import beating
from activities.pool import entries
from activities.pool.snapshot import PoolSnapshot, PoolSnapshotSource
from activities.rollout.canary import CanaryRegistry
from infra.database import images
from infra.database.engine import Database
from infra.database.workers import launches
from infra.launchers.port import Launcher
from infra.settings import Settings
from infra.valkey.client import reply_of
from infra.valkey.worker_users import WorkerUsers
from infra.vault.key_pairs import OrchestratorKeys
from infra.worker_task import LauncherUnreachable, LaunchFailed, LaunchSpec
from worker_runtime.protocol import errors, keys
from worker_runtime.protocol.launch import WorkerConfig
from workflows.rollout.messages import Release
from workflows.user_worker.messages import Launched, LaunchForClaim
from workflows.worker_pool.messages import NEVER_READY, NOTHING_RUNS, LaunchPoolWorker

#: First letters of the ids of pool workers, and of those launched while a user waited.
POOL_PREFIX = "p-"
COLD_PREFIX = "c-"
#: Seconds between two reads of a launched worker's entry: it appears after 0.3 to 1 s.
POLL_INTERVAL_S = 0.05
#: Seconds that must be left for a second launch: a worker takes 0.3 to 1 s on a running host.
MIN_TIME_FOR_SECOND_LAUNCH_S = 3.0
#: Seconds of one wait for a worker, and between two checks whether its task still runs.
MAX_BLOCKING_WAIT_S = 1

#: The SDK does not log these: the pool logs them once an episode, a user's workflow reports them to
#: its caller.
_NOT_LOGGED = ApplicationErrorCategory.BENIGN

log = structlog.get_logger()


def worker_id_of(prefix: str, token: str) -> str:
    """Returns `prefix` and 16 hexadecimal digits; two equal ones among a million tokens are
    unlikely (3e-8)."""
    return prefix + blake2b(token.encode(), digest_size=8).hexdigest()


def launched_for(claim_id: str) -> tuple[str, str]:
    """Returns the ids of the workers that may be launched for this claim: the first one, and its
    replacement."""
    return worker_id_of(COLD_PREFIX, claim_id), worker_id_of(
        COLD_PREFIX, f"claim-{claim_id}-before"
    )


@dataclass(eq=False, repr=False)
class LaunchActivities:
    client: Redis
    database: Database
    launcher: Launcher
    settings: Settings
    orchestrator_keys: OrchestratorKeys
    #: Release and limit for a worker launched for a user; None: those of the settings.
    pools: PoolSnapshotSource | None = None
    #: None: workers log in to Valkey as we do.
    users: WorkerUsers | None = None

    def __post_init__(self) -> None:
        self._canaries = CanaryRegistry(self.client)

    def _spec(self, worker_id: str, pool: str, reserved_claim: str, release: Release) -> LaunchSpec:
        own = self.settings
        url = own.worker_valkey_url or own.valkey_url
        egress = (
            self.orchestrator_keys.former_budget_names("address", own.egress_address)
            if own.egress_address
            else ()
        )
        return LaunchSpec(
            image=release.image,
            config=WorkerConfig(
                worker_id=worker_id,
                pool=pool,
                valkey_url=self.users.url(worker_id, url) if self.users else url,
                launch_token=self.orchestrator_keys.launch_token(worker_id),
                orchestrator_keys=self.orchestrator_keys.public_keys,
                version=release.version or own.worker_version,
                reserved_claim=reserved_claim,
                paper_exchange=own.exchange_address,
                broker_options=own.broker_options,
                allowance=msgspec.structs.replace(own.allowance(), egress=egress),
                mark_ttl=own.mark_ttl,
                mark_period=own.mark_period,
                pulse_timeout=own.pulse_timeout,
                health_period=own.health_period,
                log_level=own.log_level,
            ),
        )

    @activity.defn
    async def launch_for_claim(self, request: LaunchForClaim) -> Launched:
        """Launches a worker for this claim only. A repeat returns the same one, even if it is dead
        by now.

        If one of a new release ends before it is ready, or failed this start before, a worker of
        the last good release is launched instead, if there is time: a user must not be the one who
        finds the fault.
        """
        began = time.monotonic()
        snapshot = await self._pool_snapshot(request.pool)
        worker_id, replacement = launched_for(request.claim_id)
        await self._check_limit(request, snapshot.limit, worker_id)
        is_announced = partial(self._is_announced, keys.pool_born(request.pool, request.claim_id))
        avoid = await self._canaries.find_to_avoid(request.pool, request.failed)
        release = avoid.before if avoid else snapshot.release
        spec = self._spec(worker_id, request.pool, request.claim_id, release)
        token = f"claim-{request.claim_id}"
        try:
            launched = await self._launch(
                spec, token, request.timeout, partial(is_announced, worker_id)
            )
        except ApplicationError as error:
            seconds_left = request.timeout - (time.monotonic() - began)
            known_bad = avoid is not None or snapshot.good in (None, release)
            if (
                error.type != NEVER_READY
                or known_bad
                or seconds_left < MIN_TIME_FOR_SECOND_LAUNCH_S
            ):
                raise
            good = snapshot.good or Release()
            log.warning(
                "launched_as_before", pool=request.pool, version=good.version, reason=str(error)
            )
            token = f"{token}-before"
            worker_id = replacement
            spec = self._spec(worker_id, request.pool, request.claim_id, good)
            launched = await self._launch(
                spec, token, seconds_left, partial(is_announced, worker_id)
            )
        if snapshot.limit is not None:
            await entries.leave_wait_queue(self.client, request.pool, request.user_id)
        return launched

    async def _is_announced(self, born: str, worker_id: str) -> bool:
        """Waits up to `MAX_BLOCKING_WAIT_S` until the worker is on the list of those launched for
        its claim."""
        # Moves the list onto itself, so that a repeat finds it again.
        announced = await reply_of(
            self.client.blmove(born, born, MAX_BLOCKING_WAIT_S, "LEFT", "RIGHT")
        )
        if announced is None or await reply_of(self.client.lpos(born, worker_id)) is not None:
            return announced is not None
        await asyncio.sleep(
            MAX_BLOCKING_WAIT_S
        )  # the other one of this claim, which an earlier attempt launched
        return False

    async def _pool_snapshot(self, pool: str) -> PoolSnapshot:
        """Returns the snapshot of the pool's workflow, else one of the settings."""
        async with beating():  # it may have to ask twice
            snapshot = await self.pools.snapshot(pool) if self.pools else None
        return snapshot or PoolSnapshot(limit=self.settings.pool_limit or None)

    async def _check_limit(
        self, request: LaunchForClaim, limit: int | None, worker_id: str
    ) -> None:
        """Raises `POOL_EXHAUSTED` if the limit is reached or earlier waiters need all that is
        left."""
        if limit is None:
            return
        running = {
            task.worker_id for task in await self.launcher.list() if task.pool == request.pool
        }
        if worker_id in running:  # a repeat
            return
        remaining = max(limit - len(running), 0)
        position = await entries.join_wait_queue(self.client, request.pool, request.user_id)
        if position >= remaining:
            raise ApplicationError(
                f"{len(running)} of {limit} workers run; position {position + 1} in the wait queue",
                type=errors.PoolExhausted.code,
                non_retryable=True,
            )

    @activity.defn
    async def launch_pool_worker(self, request: LaunchPoolWorker) -> Launched:
        """Returns when the worker is ready to be claimed, or was claimed already.

        Fails with `NEVER_READY` when it ended or hung before that: then no worker of this token
        runs. Any other failure leaves that open, and the same token has to be launched again.
        """
        worker_id = worker_id_of(POOL_PREFIX, request.token)
        entry = keys.pool_worker(request.pool, worker_id)

        async def is_ready() -> bool:
            if request.again and await self._assigned(worker_id):
                return True
            until = time.monotonic() + MAX_BLOCKING_WAIT_S
            while time.monotonic() < until:
                if await reply_of(self.client.hexists(entry, "state")):
                    return True
                await asyncio.sleep(POLL_INTERVAL_S)
            return False

        spec = self._spec(worker_id, request.pool, "", request.release)
        return await self._launch(spec, f"pool-{request.token}", request.timeout, is_ready)

    async def _launch(
        self, spec: LaunchSpec, token: str, timeout: float, ready: Callable[[], Awaitable[bool]]
    ) -> Launched:
        try:
            if spec.image:  # whoever reaches Temporal could start a rollout of any image
                await self.database.fetch(images.require_allowed, spec.image)
            # Before the launch: it may be claimed before the launcher's answer is here.
            await self._record(spec.config)
            if self.users:
                await self.users.create(spec.config.worker_id, spec.config.pool)
            async with beating():  # it may have to wait for the rate limit
                task = await self.launcher.launch(spec, token)
            await self._record(spec.config, task.task_id)
        except (LaunchFailed, images.ImageNotAllowed) as error:
            raise ApplicationError(
                error.detail,
                NOTHING_RUNS,
                type=error.code,
                non_retryable=not error.retryable,
                category=_NOT_LOGGED,
            ) from None
        except LauncherUnreachable as error:
            raise ApplicationError(error.detail, type=error.code, category=_NOT_LOGGED) from None
        began = time.monotonic()
        launched = Launched(worker_id=task.worker_id, task_id=task.task_id)
        while time.monotonic() - began < timeout:
            activity.heartbeat()
            if self.users:
                await self.users.create(spec.config.worker_id, spec.config.pool, again=True)
            if await ready():
                seconds = round(time.monotonic() - began, 3)
                log.info(
                    "worker_launched",
                    worker_id=task.worker_id,
                    task_id=task.task_id,
                    seconds=seconds,
                )
                return launched
            if await self.launcher.is_running(task.task_id) is False:
                raise _never_ready(f"worker {task.worker_id} ended before it was ready")
        # A pool entry lives 30 s from the claim on: a worker without one may have a user
        # (no-healthy-kill).
        if await self._assigned(task.worker_id):
            return launched
        await self.launcher.stop(task.task_id, "not ready in time")
        raise _never_ready(f"worker {task.worker_id} was not ready within {timeout:.0f} s")

    async def _assigned(self, worker_id: str) -> bool:
        async with self.database.session() as session:
            return bool(await launches.assigned_workers(session, [worker_id]))

    async def _record(self, config: WorkerConfig, task_id: str | None = None) -> None:
        await self.database.fetch(
            launches.record_launch,
            worker_id=config.worker_id,
            pool=config.pool,
            version=config.version,
            task_id=task_id,
        )


def _never_ready(why: str) -> ApplicationError:
    """Returns an error that is not retried, because the same token is the same dead worker."""
    return ApplicationError(
        why,
        NOTHING_RUNS,
        type=NEVER_READY,
        non_retryable=True,
        category=_NOT_LOGGED,
    )
