"""Snapshots of a pool's state, from its workflow: release, limit, missing workers; and the hosts
for them."""

import asyncio
import time
from dataclasses import KW_ONLY, dataclass, field
from datetime import timedelta
from typing import Protocol

import structlog
from temporalio.client import Client, WorkflowQueryFailedError
from temporalio.service import RPCError

from infra.hosts import scaling
from infra.launchers.port import Launcher
from infra.worker_task import LauncherUnreachable
from workflows import names
from workflows.rollout.messages import Release
from workflows.worker_pool.messages import PoolView

#: Seconds that a snapshot is used; a new rollout reaches cold launches that late.
SNAPSHOT_TTL_S = 2.0
#: Seconds for a query: it takes 5 ms, but more than a second for a pool that launches a hundred
#: workers on a busy machine.
QUERY_TIMEOUT_S = 3.0

log = structlog.get_logger()


@dataclass(frozen=True, kw_only=True)
class PoolSnapshot:
    """A pool at one moment."""

    #: The release of new workers: the last good one until a worker of the present release is ready.
    release: Release = field(default_factory=Release)
    #: The last one of which a worker became ready; None: not known.
    good: Release | None = None
    #: The pool's own limit of workers in all.
    limit: int | None = None
    #: Free workers that it still wants to launch.
    missing: int = 0


class PoolSnapshotSource(Protocol):
    async def snapshot(self, pool: str) -> PoolSnapshot | None:
        """Returns the snapshot of a pool, None if none is known. Raises nothing."""
        ...


class PoolSnapshots:
    """Queries the pools' workflows. Without an answer, the last snapshot stays."""

    def __init__(self, temporal: Client) -> None:
        self._temporal = temporal
        #: Pool → its snapshot, and when it was read (monotonic seconds).
        self._known: dict[str, tuple[PoolSnapshot | None, float]] = {}

    async def snapshot(self, pool: str) -> PoolSnapshot | None:
        snapshot, at = self._known.get(pool, (None, float("-inf")))
        if time.monotonic() - at < SNAPSHOT_TTL_S:
            return snapshot
        if not await self._ask(pool) and pool not in self._known:
            await self._ask(pool)  # again: without any answer, the settings would count
        return self._known.get(pool, (None, 0.0))[0]  # another caller may have read it meanwhile

    async def _ask(self, pool: str) -> bool:
        """Asks the pool's workflow and returns True if it answered; then its snapshot is known."""
        handle = self._temporal.get_workflow_handle(names.worker_pool_id(pool))
        try:
            async with asyncio.timeout(QUERY_TIMEOUT_S):
                view: PoolView = await handle.query(
                    "view", result_type=PoolView, rpc_timeout=timedelta(seconds=QUERY_TIMEOUT_S)
                )
        except (RPCError, WorkflowQueryFailedError, TimeoutError) as error:
            reason, known = type(error).__name__, pool in self._known
            log.warning("pool_not_asked", pool=pool, reason=reason, known=known)
            return False
        self._known[pool] = (snapshot_of(view), time.monotonic())
        return True


def snapshot_of(view: PoolView) -> PoolSnapshot:
    # Until a worker of a release is ready, users get the last good one; unless the pool keeps no
    # workers, so that nobody else would try the release.
    unproven = view.good != view.release and (view.never_ready or view.wanted)
    return PoolSnapshot(
        release=view.good if view.good and unproven else view.release,
        good=view.good,
        limit=view.policy.limit,
        missing=max(view.wanted + view.surge - view.ready - view.starting, 0),
    )


#: Seconds between two rounds; they are part of the time until a cold host takes workers.
ROUND_INTERVAL_S = 10.0


@dataclass(eq=False, repr=False)
class HostProvisioner:
    """A background loop that asks the platform for worker hosts.

    It counts the workers that run and those that the pool still wants: a cold host takes about a
    minute. Several orchestrators ask for the same number, so they need no lock.
    """

    scaler: scaling.HostScaler
    launcher: Launcher
    pools: PoolSnapshotSource
    _: KW_ONLY
    pool: str
    #: Spare hosts to keep at least, and workers a second that must find room.
    warm: int
    rate: float

    def __post_init__(self) -> None:
        self._warm = scaling.warm_hosts(
            self.rate, least=self.warm, cold_start=scaling.COLD_START_S + ROUND_INTERVAL_S
        )
        self._logged = ""

    async def run(self) -> None:
        while True:
            try:
                await self.round()
            except (scaling.HostsUnreachable, LauncherUnreachable) as error:
                log.warning("hosts_not_scaled", error=type(error).__name__, reason=error.detail)
            await asyncio.sleep(ROUND_INTERVAL_S)

    async def round(self) -> scaling.HostPlan:
        """Counts and scales once. Raises `HostsUnreachable`, `LauncherUnreachable`."""
        tasks = await self.launcher.list()
        snapshot = await self.pools.snapshot(self.pool)
        hosts = await self.scaler.hosts()
        # Workers of a draining host count, because they need a place elsewhere.
        workers = len(tasks) + (snapshot.missing if snapshot else 0)
        made = scaling.plan_hosts(workers, hosts, warm=self._warm)
        await self.scaler.scale(made)
        if made.reason != self._logged:
            log.info("hosts_wanted", wanted=made.wanted, ready=made.ready, why=made.reason)
            self._logged = made.reason
        return made
