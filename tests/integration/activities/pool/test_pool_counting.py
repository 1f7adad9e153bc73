"""Counting, launching and shrinking a pool against a real Valkey."""

from __future__ import annotations

import asyncio
from pathlib import Path

import pytest
from temporalio.exceptions import ApplicationError

from activities.pool.launch import POOL_PREFIX, LaunchActivities, worker_id_of
from infra.valkey.client import reply_of
from infra.vault.secret_versions import load_versions
from tests.support.activities.harness import Yard
from tests.support.launchers.faulty import NeverReadyLauncher
from tests.support.workers.pool_worker import POOL
from worker_runtime.protocol import keys
from workflows.worker_pool.messages import CountPool, LaunchPoolWorker, PoolCount, StopPoolWorkers


async def count(yard: Yard, *launching: str, launch_timeout: float = 30.0) -> PoolCount:
    request = CountPool(pool=POOL, launching=launching, launch_timeout=launch_timeout)
    return await yard.run(yard.pool.count_pool, request)


def launch(token: str, timeout: float = 5.0) -> LaunchPoolWorker:
    return LaunchPoolWorker(pool=POOL, token=token, timeout=timeout)


async def test_a_repeated_launch_is_the_same_worker(yard: Yard) -> None:
    first = await yard.run(yard.launching.launch_pool_worker, launch("t1"))
    second = await yard.run(yard.launching.launch_pool_worker, launch("t1"))
    assert first == second
    assert first.worker_id == worker_id_of(POOL_PREFIX, "t1")
    assert await count(yard) == PoolCount(ready=1, starting=0)


async def test_a_worker_gets_its_own_launch_token_and_no_key_of_ours(
    yard: Yard, tmp_path: Path
) -> None:
    launched = await yard.run(yard.launching.launch_pool_worker, launch("t1"))
    config = yard.launcher.launched[0].config
    assert config.launch_token == yard.keys.launch_token(launched.worker_id)
    assert config.orchestrator_keys == yard.keys.public_keys
    private = {
        load_versions(tmp_path / name)[0].secret
        for name in ("signing.key", "launch.key", "budget.key")
    }
    assert private.isdisjoint([config.launch_token, *config.orchestrator_keys])


async def test_launches_under_way_are_left_out_of_the_count(yard: Yard) -> None:
    await yard.run(yard.launching.launch_pool_worker, launch("t1"))
    await yard.run(yard.launching.launch_pool_worker, launch("t2"))
    assert await count(yard, "t1") == PoolCount(ready=1, starting=0)


async def test_a_dead_workers_entry_is_removed_and_not_counted(yard: Yard) -> None:
    worker = await yard.worker()
    yard.launcher.end(worker.task_id)
    await yard.client.delete(keys.pool_worker(POOL, worker.worker_id))
    assert await count(yard) == PoolCount(ready=0, starting=0)
    assert not await reply_of(yard.client.zcard(keys.pool_ready(POOL)))


async def test_silent_workers_count_as_starting_right_after_a_flush(yard: Yard) -> None:
    """Else a flushed Valkey would double the pool."""
    workers = [await yard.worker() for _ in range(3)]
    await yard.client.flushall()
    assert await count(yard) == PoolCount(ready=0, starting=3)
    for worker in workers:
        await worker.announce()
    assert await count(yard) == PoolCount(ready=3, starting=0)


async def test_a_worker_that_stays_silent_is_stopped(yard: Yard) -> None:
    worker = await yard.worker()
    await yard.client.flushall()
    await count(yard, launch_timeout=0.0)
    await asyncio.sleep(0.01)
    await yard.run(yard.pool.count_pool, CountPool(pool="another"))
    assert await count(yard, launch_timeout=0.0) == PoolCount(ready=0, starting=0)
    assert yard.launcher.stops == [(worker.task_id, "announced nothing")]


async def test_a_users_worker_is_neither_free_nor_starting(yard: Yard) -> None:
    user, worker = await yard.user(), await yard.worker()
    await asyncio.gather(yard.run(yard.claiming.claim_worker, yard.claim(user)), worker.serve())
    assert await count(yard) == PoolCount(ready=0, starting=0, in_use=1)
    await yard.client.delete(keys.pool_worker(POOL, worker.worker_id))  # it expires after 30 s
    assert await count(yard) == PoolCount(ready=0, starting=0, in_use=1)
    assert not yard.launcher.stops


async def test_shrinking_stops_free_workers_once(yard: Yard) -> None:
    for _ in range(3):
        await yard.worker()
    request = StopPoolWorkers(pool=POOL, count=2, token="s1")
    assert await yard.run(yard.pool.shrink_pool, request) == 2
    assert await yard.run(yard.pool.shrink_pool, request) == 2
    assert await count(yard) == PoolCount(ready=1, starting=0)
    assert len(await yard.launcher.list()) == 1


async def test_a_repeated_shrink_leaves_a_worker_that_is_no_longer_its_own(yard: Yard) -> None:
    """As if its entry had expired and it had announced itself again: it is free, or another
    claim's."""
    worker = await yard.worker()
    await yard.client.set(keys.pool_claim(POOL, "shrink-s1-0"), worker.worker_id)
    assert (
        await yard.run(yard.pool.shrink_pool, StopPoolWorkers(pool=POOL, count=1, token="s1")) == 0
    )
    assert not yard.launcher.stops
    assert await count(yard) == PoolCount(ready=1, starting=0)


async def test_a_worker_that_never_becomes_ready_is_stopped(yard: Yard) -> None:
    launcher = NeverReadyLauncher()
    launching = LaunchActivities(yard.client, yard.database, launcher, yard.settings, yard.keys)
    with pytest.raises(ApplicationError, match="not ready"):
        await yard.run(launching.launch_pool_worker, launch("t1", timeout=0.1))
    assert not await launcher.list()


async def test_a_worker_that_dies_while_starting_ends_the_launch(yard: Yard) -> None:
    launcher = NeverReadyLauncher()
    launching = LaunchActivities(yard.client, yard.database, launcher, yard.settings, yard.keys)

    async def dies() -> None:
        while not launcher.launched:  # noqa: ASYNC110
            await asyncio.sleep(0.01)
        launcher.end((await launcher.list())[0].task_id)

    results = await asyncio.gather(
        yard.run(launching.launch_pool_worker, launch("t1", timeout=30.0)),
        dies(),
        return_exceptions=True,
    )
    assert isinstance(results[0], ApplicationError)
    assert "ended before it was ready" in results[0].message
