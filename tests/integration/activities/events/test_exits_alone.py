"""Exits from one SQS queue: one orchestrator reads it, and another continues where it ended."""

import asyncio
from collections import Counter
from collections.abc import AsyncIterator

import pytest
from sqlalchemy import text
from structlog.testing import capture_logs
from temporalio.client import Client

from activities.events.exit_watcher import LOCK_ID, ExitWatcher
from infra import tasks
from infra.local.servers import TemporalServer
from tests.support.activities.harness import ActivityHarness
from tests.support.launchers.ecs_environment import EcsHarness, on_moto
from tests.support.launchers.worker_specs import spec
from tests.support.waiting import until
from tests.support.workers.pool_worker import POOL

pytestmark = [
    pytest.mark.filterwarnings("ignore::DeprecationWarning"),  # botocore's own use of datetime
    pytest.mark.timeout(90),
]


@pytest.fixture
async def ecs(monkeypatch: pytest.MonkeyPatch) -> AsyncIterator[EcsHarness]:
    async with on_moto(monkeypatch) as ecs:
        yield ecs


async def test_one_of_two_reads_the_queue_and_the_other_takes_over(
    harness: ActivityHarness, ecs: EcsHarness, temporal_server: TemporalServer
) -> None:
    temporal = await Client.connect(temporal_server.address)
    queue = ecs.aws.queue()
    launchers = [ecs.client(queue=queue) for _ in range(2)]
    running = [await launchers[0].launch(spec(f"w-{n}"), f"token-{n}") for n in range(4)]
    with capture_logs() as logged:

        def told() -> Counter[str]:
            return Counter(line["task_id"] for line in logged if line["event"] == "worker_exited")

        async def until_told(count: int) -> None:
            await until(lambda: len(told()) >= count, f"{count} exits")

        watches = [
            asyncio.create_task(
                ExitWatcher(
                    harness.client, harness.database, launcher, temporal, pool=POOL
                ).run_alone(harness.settings.database_url)
            )
            for launcher in launchers
        ]
        try:
            for count, task in enumerate(running[:2], start=1):
                await ecs.crash(task)
                await until_told(count)
            assert set(told().values()) == {1}  # nobody else was told
            assert [line["event"] for line in logged].count("leads") == 1
            # Both see what has ended: the one that hears of nothing lists.
            for launcher in launchers:
                assert {task.worker_id for task in await launcher.list()} == {"w-2", "w-3"}
            async with harness.database.session() as session:
                cut = (
                    "select pg_terminate_backend(pid, 5000) from pg_locks where locktype = "
                    "'advisory'"
                )
                assert await session.scalar(
                    text(f"{cut} and objid = {LOCK_ID & 0xFFFFFFFF} and granted")
                )
            await ecs.crash(running[2])
            await until_told(3)
            await tasks.cancel_tasks(watches[0])
            await ecs.crash(running[3])
            await until_told(4)
        finally:
            await tasks.cancel_tasks(*watches)
    assert set(told()) == {task.task_id for task in running}
