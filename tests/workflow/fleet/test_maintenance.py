"""A pass of maintenance as a workflow: a child for each hundred anomalies, and its schedule."""

from __future__ import annotations

import asyncio
from datetime import timedelta

import pytest
from temporalio.client import Client, ScheduleOverlapPolicy
from temporalio.service import RPCError
from temporalio.testing import WorkflowEnvironment

from infra.settings import Settings
from infra.temporal import schedules
from tests.support.workflows.bulk_fakes import FakeMaintenance
from tests.support.workflows.fakes import until
from tests.support.workflows.user_workers import action_times
from workflows import names
from workflows.maintenance.messages import FinishPass, Maintained, MaintenanceInput, Scanned
from workflows.maintenance.workflow import MaintenanceWorkflow


async def one_pass(client: Client, fake: FakeMaintenance) -> Maintained:
    async with fake.worker(client):
        return await client.execute_workflow(
            MaintenanceWorkflow.run,
            MaintenanceInput(),
            id="maintenance-test",
            task_queue=names.BULK_QUEUE,
        )


async def test_a_child_takes_a_hundred_anomalies(skipping: WorkflowEnvironment) -> None:
    fake = FakeMaintenance(Scanned(number=7, workers=1000, found=260, confirmed=250))
    result = await one_pass(skipping.client, fake)
    assert sorted((batch.first, batch.count) for batch in fake.batches) == [
        (0, 100),
        (100, 100),
        (200, 50),
    ]
    assert result.outcomes == {"stopped": 250}
    assert fake.finished == [FinishPass(number=7, outcomes={"stopped": 250})]


async def test_a_child_that_fails_leaves_its_anomalies_to_the_next_pass(
    skipping: WorkflowEnvironment,
) -> None:
    fake = FakeMaintenance(Scanned(number=7, found=150, confirmed=150))
    fake.failing = {100}
    result = await one_pass(skipping.client, fake)
    assert result.outcomes == {"stopped": 100, "failed": 50}


@pytest.mark.parametrize(
    "scanned", [Scanned(number=0), Scanned(number=3, found=9, guarded="an outage")]
)
async def test_a_pass_that_may_not_act_has_no_children(
    skipping: WorkflowEnvironment, scanned: Scanned
) -> None:
    fake = FakeMaintenance(scanned)
    result = await one_pass(skipping.client, fake)
    assert (result.outcomes, fake.batches) == ({}, [])
    assert len(fake.finished) == (1 if scanned.number else 0)


async def test_a_pass_that_finds_nothing_costs_its_start_and_two_actions(
    skipping: WorkflowEnvironment,
) -> None:
    fake = FakeMaintenance(Scanned(number=7, workers=1000))
    await one_pass(skipping.client, fake)
    history = await skipping.client.get_workflow_handle("maintenance-test").fetch_history()
    assert len(action_times(history)) == 2


async def test_the_schedule_starts_passes_that_never_overlap(temporal: Client) -> None:
    settings = Settings(maintenance_period=1.0)
    fake = FakeMaintenance(Scanned(number=1))
    handle = temporal.get_schedule_handle(names.MAINTENANCE_SCHEDULE)

    async def rests() -> bool:
        return not (await handle.describe()).info.running_actions

    try:
        async with fake.worker(temporal):
            await asyncio.gather(
                *(
                    schedules.ensure_schedules(temporal, settings, names.MAINTENANCE_SCHEDULE)
                    for _ in range(3)
                )
            )
            await until(lambda: len(fake.finished) >= 2)
            schedule = (await handle.describe()).schedule
            assert schedule.policy.overlap == ScheduleOverlapPolicy.SKIP
            assert schedule.policy.catchup_window == timedelta(minutes=1)
            await handle.pause(note="by an operator")
            await until(rests)  # a pass that nobody serves would be met by another test
        await schedules.ensure_schedules(
            temporal, Settings(maintenance_period=30.0), names.MAINTENANCE_SCHEDULE
        )
        schedule = (await handle.describe()).schedule
        assert schedule.spec.intervals[0].every == timedelta(seconds=30)
        assert (schedule.state.paused, schedule.state.note) == (True, "by an operator")
    finally:
        await schedules.ensure_schedules(
            temporal, Settings(maintenance_period=0.0), names.MAINTENANCE_SCHEDULE
        )
    with pytest.raises(RPCError):
        await temporal.get_schedule_handle(names.MAINTENANCE_SCHEDULE).describe()
    await schedules.ensure_schedules(
        temporal, Settings(maintenance_period=0.0), names.MAINTENANCE_SCHEDULE
    )
