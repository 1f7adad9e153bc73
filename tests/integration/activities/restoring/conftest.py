"""Makes the harness of an orchestrator: pools, users' workflows, and the restorer."""

from __future__ import annotations

from collections.abc import AsyncIterator, Callable
from typing import Any

import pytest
from temporalio.client import Client

from activities.events.recorder import TimelineActivity
from activities.orchestrator.restorer import EntityRestorer
from activities.pool.sizing import ensure_pool
from infra.local.servers import TemporalServer
from infra.temporal import executions
from infra.temporal.client import PausedQueries, unless_missing
from infra.temporal.schedules import ensure_schedules
from infra.temporal.starter import WorkerStarter
from tests.support.activities.harness import ActivityHarness
from tests.support.activities.orchestrator import OrchestratorHarness
from tests.support.workflows.fakes import serving
from workflows import names


@pytest.fixture
async def harness(
    harness: ActivityHarness, temporal_server: TemporalServer
) -> AsyncIterator[OrchestratorHarness]:
    temporal = await Client.connect(temporal_server.address, interceptors=[PausedQueries()])
    settings = harness.settings.model_copy(
        update={
            "pool_target": 2,
            "maintenance_period": 60.0,
            "morning_at": "",
            "report_at": "",
            "entity_period": 0.2,
        }
    )
    timeline = TimelineActivity(harness.database)
    activities: list[Callable[..., Any]] = [
        harness.claiming.claim_worker,
        harness.claiming.await_connected,
        harness.claiming.connect_again,
        harness.stopping.stop_worker,
        harness.checking.check_worker,
        harness.reloading.reload_credentials,
        harness.launching.launch_pool_worker,
        harness.launching.launch_for_claim,
        harness.pool.count_pool,
        harness.pool.keep_pool,
        harness.pool.shrink_pool,
        timeline.record_timeline,
    ]
    starter = WorkerStarter(temporal, settings)
    restorer = EntityRestorer(harness.database, temporal, starter, settings, confirm_after=0.2)
    async with serving(temporal, activities):
        await ensure_pool(temporal, settings)
        orchestrator = OrchestratorHarness(harness, temporal, settings, restorer)
        await orchestrator.pool_is_filled(2)
        yield orchestrator
    await starter.close()
    for run in await executions.list_open(
        temporal, (names.USER_WORKER, names.WORKER_POOL, names.ROLLOUT)
    ):
        await unless_missing(temporal.get_workflow_handle(run.workflow_id).terminate())
    off = {"maintenance_period": 0.0, "instruments_lead": 0.0}
    await ensure_schedules(temporal, settings.model_copy(update=off))
