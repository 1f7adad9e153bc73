"""A run that no replay gets through ends as failed, and the next one begins anew."""

from __future__ import annotations

from pathlib import Path

import pytest
from temporalio import workflow
from temporalio.client import Client, WorkflowFailureError
from temporalio.exceptions import ApplicationError
from temporalio.worker import UnsandboxedWorkflowRunner, Worker

from activities.pool.sizing import ensure_pool
from infra.settings import Settings
from tests.support.workflows.fakes import FakePool, serving, until
from workflows import names
from workflows.worker_pool.messages import PoolInput


@workflow.defn(name=names.WORKER_POOL)
class AnotherPool:
    """Does something else than the pool, under its name."""

    @workflow.run
    async def run(self, given: PoolInput) -> None:
        await workflow.sleep(3600)


async def test_a_pool_whose_history_fits_nothing_is_started_anew(
    temporal: Client, pool: FakePool, tmp_path: Path
) -> None:
    settings = Settings(data_dir=tmp_path, pool="unfitting", pool_target=2)
    async with Worker(
        temporal,
        task_queue=names.LIFECYCLE_QUEUE,
        workflows=[AnotherPool],
        workflow_runner=UnsandboxedWorkflowRunner(),
        max_cached_workflows=0,
    ):
        stuck = await temporal.start_workflow(
            AnotherPool.run,
            PoolInput(pool="unfitting"),
            id=names.worker_pool_id("unfitting"),
            task_queue=names.LIFECYCLE_QUEUE,
        )

        async def waits() -> bool:
            events = (await stuck.fetch_history()).events
            return any(event.HasField("timer_started_event_attributes") for event in events)

        await until(waits)
    async with serving(temporal, pool.activities()):
        await stuck.signal("claimed")
        with pytest.raises(WorkflowFailureError) as failed:
            await stuck.result()
        assert isinstance(failed.value.cause, ApplicationError)
        assert "Nondeterminism" in failed.value.cause.message
        assert await ensure_pool(temporal, settings) == 2
        await until(lambda: len(pool.ready) == 2)
        await temporal.get_workflow_handle(names.worker_pool_id("unfitting")).terminate(
            "the test is over"
        )
