"""Outages of days: a run that waits continues in a new one before its history is full, and loses
nothing."""

from __future__ import annotations

import asyncio

import pytest
from temporalio.client import WorkflowHistory, WorkflowUpdateFailedError, WorkflowUpdateStage
from temporalio.exceptions import ApplicationError
from temporalio.testing import WorkflowEnvironment
from temporalio.worker import Replayer

from tests.support.workflows.fakes import (
    FakeFleet,
    ensure_active,
    finished,
    handle,
    serving,
    skipped,
    tell,
    until,
)
from tests.support.workflows.user_workers import until_worker_serves, view_user
from workflows.sandbox import workflow_runner
from workflows.user_worker.messages import (
    ReloadResult,
    ShutdownRequest,
    UserWorkerSettings,
    WorkerLostSignal,
    WorkerState,
)
from workflows.user_worker.workflow import UserWorkerWorkflow

#: Failures after which Temporal suggests a new run, with some to spare: about 11 events each, of
#: 4,096.
MANY = 450
#: Of a launcher that stays away.
AWAY = 10**6
#: Temporal terminates a run with more events than 51,200; it suggests a new one at 4,096.
LONG = 4200


async def runs(env: WorkflowEnvironment) -> list[WorkflowHistory]:
    """The histories of the user's runs, the last one first."""
    histories: list[WorkflowHistory] = []
    run_id = None
    while run_id is None or run_id:
        run = env.client.get_workflow_handle(handle(env.client, "u1").id, run_id=run_id or None)
        histories.append(await run.fetch_history())
        run_id = (
            histories[-1]
            .events[0]
            .workflow_execution_started_event_attributes.continued_execution_run_id
        )
    return histories


async def renewed(env: WorkflowEnvironment, before: str) -> None:
    async def is_another() -> bool:
        return (await handle(env.client, "u1").describe()).run_id != before

    async with skipped(env):
        await until(is_another)


async def run_id(env: WorkflowEnvironment) -> str:
    return (await handle(env.client, "u1").describe()).run_id or ""


async def test_a_stop_that_nobody_confirms_for_days_continues_in_another_run(
    skipping: WorkflowEnvironment, fleet: FakeFleet
) -> None:
    fleet.stop_failures = MANY
    async with serving(skipping.client, fleet.activities()):
        await ensure_active(skipping.client, "u1")
        await handle(skipping.client, "u1").signal(
            "shutdown", ShutdownRequest(reason="maintenance")
        )
        await finished(skipping, "u1")
        histories = await runs(skipping)
    assert len(histories) == 2
    assert max(len(history.events) for history in histories) < LONG
    assert [(stop.reason, stop.grace, stop.worker.worker_id) for stop in fleet.stops] == [
        ("maintenance", 30.0, "w1")
    ]
    assert len(fleet.claims) == 1
    numbers = [transition.number for transition in fleet.timeline]
    assert numbers == list(range(1, len(numbers) + 1))
    replayer = Replayer(workflows=[UserWorkerWorkflow], workflow_runner=workflow_runner(passed=()))
    for history in histories:
        await replayer.replay_workflow(history)


async def lose_worker(env: WorkflowEnvironment) -> None:
    await ensure_active(env.client, "u1")
    lost = WorkerLostSignal(task_id="t1", worker_id="w1", exit_code=-9)
    await handle(env.client, "u1").signal(UserWorkerWorkflow.worker_lost, lost)


async def renew_while_stopping(env: WorkflowEnvironment, fleet: FakeFleet) -> None:
    """Renews the run after a stop failed; then the launcher comes back."""
    await until(lambda: fleet.stop_failures < AWAY)
    before = await run_id(env)
    await handle(env.client, "u1").signal(UserWorkerWorkflow.renew)
    await renewed(env, before)
    fleet.stop_failures = 1


async def skip_until_worker(env: WorkflowEnvironment, fleet: FakeFleet, worker_id: str) -> None:
    """Skips timers until this worker serves the user. It is in use all the time: else its idle time
    could be skipped, too, before the skipping ends."""
    fleet.last_use = lambda now: now
    async with skipped(env):
        await until_worker_serves(env, worker_id)


async def test_a_crash_whose_stop_outlasts_the_run_is_counted_and_replaced(
    skipping: WorkflowEnvironment, fleet: FakeFleet
) -> None:
    fleet.stop_failures = AWAY
    async with serving(skipping.client, fleet.activities()):
        await lose_worker(skipping)
        await renew_while_stopping(skipping, fleet)
        assert (await view_user(skipping)).state == WorkerState.FAILED
        await skip_until_worker(skipping, fleet, "w2")
        assert (await view_user(skipping)).crashes == 1
    assert [(stop.crashed, stop.grace, stop.worker.worker_id) for stop in fleet.stops] == [
        (True, 0.0, "w1")
    ]


async def test_a_drain_that_outlasts_the_run_still_reopens_for_work_that_waits(
    skipping: WorkflowEnvironment, fleet: FakeFleet
) -> None:
    fleet.stop_failures, fleet.waiting_orders = AWAY, 1
    async with serving(skipping.client, fleet.activities()):
        await ensure_active(skipping.client, "u1")
        await handle(skipping.client, "u1").signal("shutdown")
        await renew_while_stopping(skipping, fleet)
        await skip_until_worker(skipping, fleet, "w2")
    assert [stop.worker.worker_id for stop in fleet.stops] == ["w1"]


async def test_a_shutdown_asked_for_before_the_next_run_is_not_lost(
    skipping: WorkflowEnvironment, fleet: FakeFleet
) -> None:
    fleet.stop_failures = AWAY
    async with serving(skipping.client, fleet.activities()):
        await lose_worker(skipping)
        await until(lambda: fleet.stop_failures < AWAY)
        await handle(skipping.client, "u1").signal("shutdown", ShutdownRequest(reason="disabled"))
        await renew_while_stopping(skipping, fleet)
        await finished(skipping, "u1")
    assert len(fleet.claims) == 1
    assert fleet.stops[0].crashed
    assert fleet.timeline[-1].after == WorkerState.TERMINATED


async def test_those_who_wait_are_answered_before_the_next_run(
    skipping: WorkflowEnvironment, fleet: FakeFleet
) -> None:
    """A reload would else wait for the whole outage, and keep the run open."""
    fleet.stop_failures = AWAY
    async with serving(skipping.client, fleet.activities()):
        await lose_worker(skipping)
        await until(lambda: fleet.stop_failures < AWAY)
        accepted = WorkflowUpdateStage.ACCEPTED
        reload = await handle(skipping.client, "u1").start_update(
            "reload_credentials_now", wait_for_stage=accepted, result_type=ReloadResult
        )
        start = asyncio.create_task(ensure_active(skipping.client, "u1"))
        await renew_while_stopping(skipping, fleet)
        result = await reload.result()
        with pytest.raises(WorkflowUpdateFailedError) as failed:
            await start
    assert (result.ok, result.failure_code) == (False, "WORKER_UNAVAILABLE")
    assert isinstance(failed.value.cause, ApplicationError)
    assert failed.value.cause.type == "WORKER_UNAVAILABLE"


async def test_credentials_that_nobody_can_give_for_days_are_given_in_another_run(
    skipping: WorkflowEnvironment, fleet: FakeFleet
) -> None:
    fleet.reload_failures = MANY
    async with serving(skipping.client, fleet.activities()):
        await ensure_active(skipping.client, "u1", UserWorkerSettings(idle_timeout=1e6))
        first = await run_id(skipping)
        await tell(skipping.client, "u1", "session_replaced", 3, "frozen")
        await until(lambda: len(fleet.reloads) > 0)
        reload = await handle(skipping.client, "u1").start_update(
            "reload_credentials_now",
            wait_for_stage=WorkflowUpdateStage.ACCEPTED,
            result_type=ReloadResult,
        )
        await renewed(skipping, first)
        await finished(skipping, "u1")
        histories = await runs(skipping)
        assert not (await reload.result()).ok
    assert len(histories) == 2
    assert max(len(history.events) for history in histories) < LONG
    assert [(stop.reason, stop.worker.worker_id) for stop in fleet.stops] == [("idle", "w1")]
    assert len(fleet.reloads) == MANY + 1
