"""exact-pool: for N wanted workers N are launched, also with stale lists, lost answers and a
restart."""

from __future__ import annotations

import asyncio
import time
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from datetime import timedelta

import pytest
from redis.asyncio import Redis
from temporalio.client import Client, WorkflowHandle
from temporalio.worker import Worker

from activities.pool import entries
from activities.pool.launch import LaunchActivities
from activities.pool.sizing import PoolActivities
from infra import tasks
from infra.local.servers import TemporalServer, ValkeyServer
from infra.market import calendar
from infra.valkey import client as valkey
from infra.valkey.client import reply_of
from infra.worker_task import LaunchSpec, Task
from tests.support.activities.harness import ActivityHarness
from tests.support.launchers.faulty import UnsteadyLauncher
from tests.support.workflows.fakes import until
from tests.support.workflows.pools import view_pool
from worker_runtime.protocol import keys, scripts
from workflows import names
from workflows.sandbox import workflow_runner
from workflows.worker_pool.messages import PoolInput
from workflows.worker_pool.policy import PoolPolicy
from workflows.worker_pool.workflow import WorkerPoolWorkflow

POOL = "exact"
WANTED = 500
#: Seconds by which the list of tasks is behind.
LAG = 5.0
#: The answer of one launch in this many is lost.
LOSES = 40


class AnnouncingWorkers:
    """Announce themselves a moment after their launch, and never renew: they outlive the test."""

    def __init__(self, client: Redis) -> None:
        self._client = client
        self._starting: set[asyncio.Task[None]] = set()
        #: The client has no more connections than that to spare.
        self._turn = asyncio.Semaphore(8)

    async def start(self, spec: LaunchSpec, task: Task) -> None:
        starting = asyncio.create_task(self._announce(task))
        self._starting.add(starting)
        starting.add_done_callback(self._starting.discard)

    async def _announce(self, task: Task) -> None:
        await asyncio.sleep(int(task.task_id.rpartition("-")[2]) % 10 * 0.05)
        told = ("public_key", b"k" * 32, "proof", b"", "task", task.task_id, "version", "test")
        async with self._turn:
            worker = keys.pool_worker(POOL, task.worker_id)
            await valkey.run_script(
                self._client, scripts.ANNOUNCE_WORKER, [worker], [600_000, *told]
            )
            await entries.admit(self._client, POOL, task.worker_id, "")

    async def close(self) -> None:
        await tasks.cancel_tasks(*self._starting)


@asynccontextmanager
async def orchestrator(
    temporal: Client, valkey_url: str, harness: ActivityHarness, launcher: UnsteadyLauncher
) -> AsyncIterator[None]:
    """One that knows nothing of an earlier one, and lets go of what is in hand when it ends."""
    client = valkey.connect_valkey(valkey_url, max_connections=256)
    launching = LaunchActivities(client, harness.database, launcher, harness.settings, harness.keys)
    pool = PoolActivities(client, harness.database, launcher, calendar.load_calendar())
    async with (
        client,
        Worker(
            temporal,
            task_queue=names.LIFECYCLE_QUEUE,
            workflows=[WorkerPoolWorkflow],
            workflow_runner=workflow_runner(),
            activities=[pool.count_pool, pool.keep_pool, pool.shrink_pool],
        ),
        Worker(
            temporal,
            task_queue=names.LAUNCH_QUEUE,
            activities=[launching.launch_pool_worker],
            graceful_shutdown_timeout=timedelta(),
        ),
    ):
        yield


@pytest.mark.timeout(180)
async def test_five_hundred_wanted_are_five_hundred_launched(
    harness: ActivityHarness, valkey_server: ValkeyServer, temporal_server: TemporalServer
) -> None:
    temporal = await Client.connect(temporal_server.address)
    workers = AnnouncingWorkers(harness.client)
    launcher = UnsteadyLauncher(list_lag=LAG, loses=LOSES, on_launch=workers.start)
    policy = PoolPolicy(target=WANTED)
    handle: WorkflowHandle[WorkerPoolWorkflow, None] = await temporal.start_workflow(
        WorkerPoolWorkflow.run,
        PoolInput(pool=POOL, policy=policy, configured=policy, check_period=0.5),
        id=names.worker_pool_id(POOL),
        task_queue=names.LIFECYCLE_QUEUE,
    )
    try:
        async with orchestrator(temporal, valkey_server.url, harness, launcher):
            await until(lambda: len(launcher.launched) >= WANTED // 2)
        assert len(launcher.launched) < WANTED
        async with orchestrator(temporal, valkey_server.url, harness, launcher):
            ready = keys.pool_ready(POOL)
            while await reply_of(harness.client.zcard(ready)) < WANTED:  # noqa: ASYNC110
                await asyncio.sleep(0.05)
            view = await view_pool(handle)
            # Until the list shows all of them, and a few checks beyond.
            end = time.monotonic() + LAG + 1.0
            while time.monotonic() < end or (view.ready, view.starting) != (WANTED, 0):
                await asyncio.sleep(0.1)
                view = await view_pool(handle)
    finally:
        await handle.terminate()
        await workers.close()
    # Lost answers, and those that the restart cut off.
    assert view.failures >= WANTED // LOSES
    assert (
        len(launcher.launched)
        == len({spec.config.worker_id for spec in launcher.launched})
        == WANTED
    )
    assert not launcher.stops
