"""A launch that a user waits for: it keeps the pool's own limit, and does not hang on a bad
version."""

from __future__ import annotations

import asyncio
from contextlib import suppress
from pathlib import Path

import pytest
from redis.exceptions import AuthenticationError, NoPermissionError
from temporalio.exceptions import ApplicationError

from activities.events.pump import EventPump
from activities.pool.launch import LaunchActivities
from activities.pool.snapshot import PoolSnapshot, snapshot_of
from infra import tasks
from infra.local.servers import ValkeyServer
from infra.valkey import client as valkey
from infra.valkey.worker_users import WorkerUsers
from infra.worker_task import LaunchSpec, Task
from tests.support.activities.harness import ActivityHarness
from tests.support.launchers.fake import FakeLauncher
from tests.support.workers.pool_worker import POOL, ScriptedPoolWorker
from worker_runtime.protocol.launch import WorkerConfig
from workflows.rollout.messages import Release
from workflows.user_worker.messages import LaunchForClaim
from workflows.worker_pool.messages import NEVER_READY, PoolView
from workflows.worker_pool.policy import PoolPolicy

OLD, NEW = Release(version="1"), Release(version="2")


class FixedPools:
    """Says of every pool what a test tells it."""

    def __init__(self, snapshot: PoolSnapshot | None) -> None:
        self.scripted = snapshot

    async def snapshot(self, pool: str) -> PoolSnapshot | None:
        return self.scripted


def launching(
    harness: ActivityHarness, snapshot: PoolSnapshot | None, *, limit: int = 0
) -> LaunchActivities:
    settings = harness.settings.model_copy(update={"pool_limit": limit})
    return LaunchActivities(
        harness.client,
        harness.database,
        harness.launcher,
        settings,
        harness.keys,
        FixedPools(snapshot),
    )


def launch(user: str, timeout: float = 30.0) -> LaunchForClaim:
    return LaunchForClaim(user_id=user, pool=POOL, claim_id=f"c-{user}", timeout=timeout)


async def test_the_pools_own_limit_counts_and_not_the_settings(harness: ActivityHarness) -> None:
    await harness.worker()
    full = launching(harness, PoolSnapshot(limit=1))
    with pytest.raises(ApplicationError, match="1 of 1 workers run") as refused:
        await harness.run(full.launch_for_claim, launch("u"))
    assert refused.value.type == "POOL_EXHAUSTED"
    raised = launching(harness, PoolSnapshot(limit=None), limit=1)
    await harness.run(raised.launch_for_claim, launch("u"))
    assert len(await harness.launcher.list()) == 2


async def test_without_an_answer_of_the_pool_the_settings_count(harness: ActivityHarness) -> None:
    await harness.worker()
    unasked = launching(harness, None, limit=1)
    with pytest.raises(ApplicationError, match="1 of 1 workers run"):
        await harness.run(unasked.launch_for_claim, launch("u"))


async def test_a_limit_of_none_at_all_launches_nobody(harness: ActivityHarness) -> None:
    closed = launching(harness, PoolSnapshot(limit=0))
    with pytest.raises(ApplicationError, match="0 of 0 workers run"):
        await harness.run(closed.launch_for_claim, launch("u"))


def bad(harness: ActivityHarness, *versions: str) -> None:
    """Workers of these versions end by themselves, as an image without the right program would."""
    born = harness.launcher._on_launch
    assert born is not None

    async def launched(spec: LaunchSpec, task: Task) -> None:
        if spec.config.version in versions:
            harness.launcher.end(task.task_id, 1, "exited")
        else:
            await born(spec, task)

    harness.launcher._on_launch = launched


async def test_who_waits_gets_the_last_good_version_when_the_released_one_fails(
    harness: ActivityHarness,
) -> None:
    bad(harness, "2")
    cold = launching(harness, PoolSnapshot(release=NEW, good=OLD))
    launched = await harness.run(cold.launch_for_claim, launch("u"))
    assert [(task.worker_id, task.version) for task in await harness.launcher.list()] == [
        (launched.worker_id, "1")
    ]
    # A repeat is the same worker.
    assert await harness.run(cold.launch_for_claim, launch("u")) == launched
    assert len(await harness.launcher.list()) == 1


@pytest.mark.parametrize("good", [None, NEW], ids=["unknown", "the same"])
async def test_without_another_good_version_the_launch_fails(
    harness: ActivityHarness, good: Release | None
) -> None:
    bad(harness, "2")
    cold = launching(harness, PoolSnapshot(release=NEW, good=good))
    with pytest.raises(ApplicationError, match="ended before it was ready") as failed:
        await harness.run(cold.launch_for_claim, launch("u"))
    assert failed.value.type == NEVER_READY


async def test_without_time_for_another_launch_the_launch_fails(harness: ActivityHarness) -> None:
    bad(harness, "2")
    cold = launching(harness, PoolSnapshot(release=NEW, good=OLD))
    with pytest.raises(ApplicationError) as failed:
        await harness.run(cold.launch_for_claim, launch("u", timeout=2.0))
    assert failed.value.type == NEVER_READY
    assert [spec.config.version for spec in harness.launcher.launched] == ["2"]
    assert not await harness.launcher.list()


@pytest.mark.parametrize(
    ("missing_workers", "never_ready", "good", "release"),
    [(0, 0, OLD, NEW), (0, 1, OLD, OLD), (1, 0, OLD, OLD), (1, 0, NEW, NEW), (1, 0, None, NEW)],
)
def test_until_a_worker_of_the_release_is_ready_the_last_good_one_is_launched(
    missing_workers: int, never_ready: int, good: Release | None, release: Release
) -> None:
    view = PoolView(
        pool=POOL,
        target=1,
        ready=0,
        starting=0,
        launches=0,
        failures=0,
        last_failure="",
        release=NEW,
        good=good,
        wanted=missing_workers,
        never_ready=never_ready,
        policy=PoolPolicy(target=1, limit=7),
    )
    assert snapshot_of(view) == PoolSnapshot(
        release=release, good=good, limit=7, missing=missing_workers
    )


async def test_a_worker_launched_while_valkey_restarts_can_announce_itself(
    harness: ActivityHarness, short_directory: Path
) -> None:
    with ValkeyServer(short_directory, password="secret") as server:
        settings = harness.settings.model_copy(
            update={"valkey_url": server.url, "worker_valkey_url": ""}
        )
        announced: list[asyncio.Task[None]] = []

        async def announce(config: WorkerConfig) -> None:
            worker = ScriptedPoolWorker(
                client, harness.keys, config.worker_id, reserved_claim=config.reserved_claim
            )
            async with valkey.connect_valkey(config.valkey_url) as own:
                while True:
                    with suppress(AuthenticationError, NoPermissionError):
                        await worker.renew_entry(own, ring=True)
                        return
                    await asyncio.sleep(0.05)

        async def launched(spec: LaunchSpec, task: Task) -> None:
            await asyncio.to_thread(server.restart)
            config = spec.config
            await client.connection_pool.disconnect()
            # The watcher.
            await users.restore([(config.worker_id, config.pool)], [])
            announced.append(asyncio.create_task(announce(config)))

        async with valkey.connect_valkey(server.url) as client:
            users = WorkerUsers(client, harness.database, harness.keys)
            launching = LaunchActivities(
                client,
                harness.database,
                FakeLauncher(launched),
                settings,
                harness.keys,
                FixedPools(PoolSnapshot(limit=None)),
                users,
            )
            pump = EventPump(client, harness.database, harness.cutting(users), harness.keys)
            async with tasks.running(pump.run()), tasks.running(pump.attend()):
                await harness.run(launching.launch_for_claim, launch("u", timeout=10.0))
        await asyncio.gather(*announced)
