"""A background loop that asks the platform for worker hosts.

It counts the workers that run and those that the pool still wants: a cold host takes about a minute. Several
orchestrators ask for the same number, so they need no lock.
"""

from __future__ import annotations

import asyncio

import structlog

from activities.pool.snapshot import PoolSnapshotSource
from infra.hosts.scaling import (
    COLD_START,
    HostKind,
    HostPlan,
    HostScaler,
    HostsUnreachable,
    plan_hosts,
    warm_hosts,
)
from infra.launchers.port import Launcher
from infra.worker_task import LauncherUnreachable

#: Seconds between two rounds; they are part of the time until a cold host takes workers.
PERIOD = 10.0

log = structlog.get_logger()


class HostProvisioner:
    def __init__(
        self,
        scaler: HostScaler,
        launcher: Launcher,
        pools: PoolSnapshotSource,
        *,
        pool: str,
        warm: int,
        rate: float,
    ) -> None:
        """`warm`: spare hosts to keep at least; `rate`: workers a second that must find room."""
        self._scaler = scaler
        self._launcher = launcher
        self._pools = pools
        self._pool = pool
        self._kind = HostKind()
        self._warm = warm_hosts(self._kind, rate, least=warm, cold_start=COLD_START + PERIOD)
        self._logged = ""

    async def run(self) -> None:
        while True:
            try:
                await self.round()
            except (HostsUnreachable, LauncherUnreachable) as error:
                log.warning("hosts_not_scaled", error=type(error).__name__, reason=error.detail)
            await asyncio.sleep(PERIOD)

    async def round(self) -> HostPlan:
        """Counts and scales once. Raises `HostsUnreachable`, `LauncherUnreachable`."""
        tasks = await self._launcher.list()
        snapshot = await self._pools.snapshot(self._pool)
        hosts = await self._scaler.hosts()
        # Workers of a draining host count, because they need a place elsewhere.
        made = plan_hosts(
            self._kind, len(tasks) + (snapshot.missing if snapshot else 0), hosts, warm=self._warm
        )
        await self._scaler.scale(made)
        if made.reason != self._logged:
            log.info("hosts_wanted", wanted=made.wanted, ready=made.ready, why=made.reason)
            self._logged = made.reason
        return made
