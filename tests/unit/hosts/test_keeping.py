"""The orchestrator's loop gives the platform the hosts for what runs and what the pool still
wants."""

from __future__ import annotations

import pytest

from activities.pool.snapshot import HostProvisioner, PoolSnapshot
from infra.cli.fleet import explain_hosts, workers_of_pool
from infra.hosts.scaling import HostsUnreachable
from infra.launchers.registry import create_host_scaler
from infra.settings import EcsSettings, Settings
from infra.worker_task import LaunchSpec
from tests.support.launchers.fake import FakeLauncher
from tests.support.simulated_hosts import COLD, HostClock, SimulatedHosts
from worker_runtime.protocol.launch import WorkerConfig


class ScriptedPools:
    def __init__(self, missing: int | None) -> None:
        self.missing = missing

    async def snapshot(self, pool: str) -> PoolSnapshot | None:
        return None if self.missing is None else PoolSnapshot(missing=self.missing)


async def launched(launcher: FakeLauncher, number: int) -> None:
    config = WorkerConfig(
        worker_id=f"w{number}",
        pool="default",
        valkey_url="",
        launch_token=b"t",
        orchestrator_keys=(b"k",),
    )
    await launcher.launch(LaunchSpec(config=config), f"token-{number}")


def keeping(
    hosts: SimulatedHosts, launcher: FakeLauncher, pools: ScriptedPools, rate: float = 0.0
) -> HostProvisioner:
    return HostProvisioner(hosts, launcher, pools, pool="default", warm=1, rate=rate)


async def test_hosts_follow_the_workers_that_run_and_those_that_are_missing() -> None:
    clock, launcher, pools = HostClock(), FakeLauncher(), ScriptedPools(0)
    hosts = SimulatedHosts(clock=clock, seed=1)
    loop = keeping(hosts, launcher, pools)
    assert (await loop.round()).wanted == 1  # the warm one
    for number in range(30):
        await launched(launcher, number)
    assert (await loop.round()).wanted == 2
    pools.missing = 31  # a window begins: hosts are ordered before the workers are
    assert (await loop.round()).wanted == 4
    clock.now += COLD[1]
    assert (await loop.round()).ready == 4
    pools.missing = None  # the pool does not answer: what runs counts
    assert (await loop.round()).wanted == 2


async def test_spare_hosts_cover_the_workers_of_one_period_and_a_cold_start() -> None:
    hosts = SimulatedHosts(seed=1)
    made = await keeping(hosts, FakeLauncher(), ScriptedPools(0), rate=2.0).round()
    assert made.warm == 5  # 2 a second for 63 and 10 s are 146 workers


async def test_a_platform_that_does_not_answer_is_not_scaled() -> None:
    hosts = SimulatedHosts(seed=1)
    hosts.unreachable = True
    with pytest.raises(HostsUnreachable):
        await keeping(hosts, FakeLauncher(), ScriptedPools(100)).round()
    assert hosts.started == 0


def test_hosts_are_scaled_only_where_a_provider_is_named() -> None:
    assert create_host_scaler(Settings(launcher="process"), EcsSettings(host_provider="p")) is None
    assert create_host_scaler(Settings(launcher="ecs"), EcsSettings()) is None


def test_a_pool_is_explained_by_what_it_has_and_wants() -> None:
    assert workers_of_pool({"in_use": 45, "wanted": 49, "ready": 10, "starting": 3}) == 94
    assert workers_of_pool({"in_use": 45, "wanted": 0, "ready": 10, "starting": 3}) == 58
    shown = explain_hosts(94, warm=1, rate=0.0)
    assert (shown["needed"], shown["warm"], shown["wanted"], shown["target_capacity"]) == (
        4,
        1,
        5,
        80,
    )
    assert shown["reason"] == "4 for 94 workers, 30 a host, and 1 warm"
