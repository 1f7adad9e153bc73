"""Counting, launching and shrinking a pool against a real Valkey."""

from __future__ import annotations

import asyncio
from pathlib import Path

import pytest
from temporalio.exceptions import ApplicationError

from activities.pool.launch import POOL_PREFIX, LaunchActivities, worker_id_of
from infra.valkey.client import reply_of
from infra.vault.secret_versions import load_versions
from tests.support.activities.harness import ActivityHarness
from tests.support.launchers.faulty import NeverReadyLauncher
from tests.support.workers.pool_worker import POOL
from worker_runtime.protocol import keys
from workflows.worker_pool.messages import CountPool, LaunchPoolWorker, PoolCount, StopPoolWorkers


async def count(
    harness: ActivityHarness, *launching: str, launch_timeout: float = 30.0
) -> PoolCount:
    request = CountPool(pool=POOL, launching=launching, launch_timeout=launch_timeout)
    return await harness.run(harness.pool.count_pool, request)


def launch(token: str, timeout: float = 5.0) -> LaunchPoolWorker:
    return LaunchPoolWorker(pool=POOL, token=token, timeout=timeout)


async def test_a_repeated_launch_is_the_same_worker(harness: ActivityHarness) -> None:
    first = await harness.run(harness.launching.launch_pool_worker, launch("t1"))
    second = await harness.run(harness.launching.launch_pool_worker, launch("t1"))
    assert first == second
    assert first.worker_id == worker_id_of(POOL_PREFIX, "t1")
    assert await count(harness) == PoolCount(ready=1, starting=0)


async def test_a_worker_gets_its_own_launch_token_and_no_key_of_ours(
    harness: ActivityHarness, tmp_path: Path
) -> None:
    launched = await harness.run(harness.launching.launch_pool_worker, launch("t1"))
    config = harness.launcher.launched[0].config
    assert config.launch_token == harness.keys.launch_token(launched.worker_id)
    assert config.orchestrator_keys == harness.keys.public_keys
    private = {
        load_versions(tmp_path / name)[0].secret
        for name in ("signing.key", "launch.key", "budget.key")
    }
    assert private.isdisjoint([config.launch_token, *config.orchestrator_keys])


async def test_launches_under_way_are_left_out_of_the_count(harness: ActivityHarness) -> None:
    await harness.run(harness.launching.launch_pool_worker, launch("t1"))
    await harness.run(harness.launching.launch_pool_worker, launch("t2"))
    assert await count(harness, "t1") == PoolCount(ready=1, starting=0)


async def test_a_dead_workers_entry_is_removed_and_not_counted(harness: ActivityHarness) -> None:
    worker = await harness.worker()
    harness.launcher.end(worker.task_id)
    await harness.client.delete(keys.pool_worker(POOL, worker.worker_id))
    assert await count(harness) == PoolCount(ready=0, starting=0)
    assert not await reply_of(harness.client.zcard(keys.pool_ready(POOL)))


async def test_silent_workers_count_as_starting_right_after_a_flush(
    harness: ActivityHarness,
) -> None:
    """Else a flushed Valkey would double the pool."""
    workers = [await harness.worker() for _ in range(3)]
    await harness.client.flushall()
    assert await count(harness) == PoolCount(ready=0, starting=3)
    for worker in workers:
        await worker.announce()
    assert await count(harness) == PoolCount(ready=3, starting=0)


async def test_a_worker_that_stays_silent_is_stopped(harness: ActivityHarness) -> None:
    worker = await harness.worker()
    await harness.client.flushall()
    await count(harness, launch_timeout=0.0)
    await asyncio.sleep(0.01)
    await harness.run(harness.pool.count_pool, CountPool(pool="another"))
    assert await count(harness, launch_timeout=0.0) == PoolCount(ready=0, starting=0)
    assert harness.launcher.stops == [(worker.task_id, "announced nothing")]


async def test_a_users_worker_is_neither_free_nor_starting(harness: ActivityHarness) -> None:
    user, worker = await harness.user(), await harness.worker()
    await asyncio.gather(
        harness.run(harness.claiming.claim_worker, harness.claim(user)), worker.serve()
    )
    assert await count(harness) == PoolCount(ready=0, starting=0, in_use=1)
    await harness.client.delete(keys.pool_worker(POOL, worker.worker_id))  # it expires after 30 s
    assert await count(harness) == PoolCount(ready=0, starting=0, in_use=1)
    assert not harness.launcher.stops


async def test_shrinking_stops_free_workers_once(harness: ActivityHarness) -> None:
    for _ in range(3):
        await harness.worker()
    request = StopPoolWorkers(pool=POOL, count=2, token="s1")
    assert await harness.run(harness.pool.shrink_pool, request) == 2
    assert await harness.run(harness.pool.shrink_pool, request) == 2
    assert await count(harness) == PoolCount(ready=1, starting=0)
    assert len(await harness.launcher.list()) == 1


async def test_a_repeated_shrink_leaves_a_worker_that_is_no_longer_its_own(
    harness: ActivityHarness,
) -> None:
    """As if its entry had expired and it had announced itself again: it is free, or another
    claim's."""
    worker = await harness.worker()
    await harness.client.set(keys.pool_claim(POOL, "shrink-s1-0"), worker.worker_id)
    assert (
        await harness.run(harness.pool.shrink_pool, StopPoolWorkers(pool=POOL, count=1, token="s1"))
        == 0
    )
    assert not harness.launcher.stops
    assert await count(harness) == PoolCount(ready=1, starting=0)


async def test_a_worker_that_never_becomes_ready_is_stopped(harness: ActivityHarness) -> None:
    launcher = NeverReadyLauncher()
    launching = LaunchActivities(
        harness.client, harness.database, launcher, harness.settings, harness.keys
    )
    with pytest.raises(ApplicationError, match="not ready"):
        await harness.run(launching.launch_pool_worker, launch("t1", timeout=0.1))
    assert not await launcher.list()


async def test_a_worker_that_dies_while_starting_ends_the_launch(harness: ActivityHarness) -> None:
    launcher = NeverReadyLauncher()
    launching = LaunchActivities(
        harness.client, harness.database, launcher, harness.settings, harness.keys
    )

    async def dies() -> None:
        while not launcher.launched:  # noqa: ASYNC110
            await asyncio.sleep(0.01)
        launcher.end((await launcher.list())[0].task_id)

    results = await asyncio.gather(
        harness.run(launching.launch_pool_worker, launch("t1", timeout=30.0)),
        dies(),
        return_exceptions=True,
    )
    assert isinstance(results[0], ApplicationError)
    assert "ended before it was ready" in results[0].message
