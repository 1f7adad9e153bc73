"""The life of an Active worker: idle, ended, lost, reloaded, parked, carried into a new run."""

from __future__ import annotations

import asyncio
import time

import pytest
from temporalio.client import (
    WorkflowExecutionStatus,
    WorkflowUpdateFailedError,
    WorkflowUpdateStage,
)
from temporalio.exceptions import ApplicationError
from temporalio.testing import WorkflowEnvironment

from tests.support.workflows.fakes import (
    FakeFleet,
    at_rest,
    ensure_active,
    finished,
    handle,
    serving,
    until,
    until_state,
)
from workflows.user_worker.messages import (
    ClaimStatus,
    ReloadResult,
    ShutdownRequest,
    UserWorkerSettings,
    UserWorkerView,
    WorkerEventSignal,
    WorkerHealth,
    WorkerLostSignal,
    WorkerState,
)
from workflows.user_worker.workflow import UserWorkerWorkflow

UNMARKED = WorkerHealth(marked=False, running=True)
GONE = WorkerHealth(marked=False, running=False)


async def lose(env: WorkflowEnvironment, number: int, user: str = "u1") -> None:
    lost = WorkerLostSignal(task_id=f"t{number}", worker_id=f"w{number}", exit_code=-9)
    await handle(env.client, user).signal(UserWorkerWorkflow.worker_lost, lost)


async def until_worker(env: WorkflowEnvironment, worker_id: str) -> UserWorkerView:
    while True:
        view = await until_state(env.client, "u1", WorkerState.ACTIVE)
        if view.worker and view.worker.worker_id == worker_id:
            return view
        await asyncio.sleep(0.02)


async def test_an_unused_worker_ends_after_the_idle_timeout(
    skipping: WorkflowEnvironment, fleet: FakeFleet
) -> None:
    async with serving(skipping.client, fleet.activities()):
        await ensure_active(skipping.client, "u1", UserWorkerSettings(idle_timeout=1800))
        await finished(skipping, "u1")
    assert [stop.reason for stop in fleet.stops] == ["idle"]
    assert fleet.checks == 1


async def test_newer_activity_lets_the_worker_sleep_the_rest(
    skipping: WorkflowEnvironment, fleet: FakeFleet
) -> None:
    began = time.time()
    fleet.health = [WorkerHealth(marked=True, running=True, last_activity=began + 900)]
    async with serving(skipping.client, fleet.activities()):
        await ensure_active(skipping.client, "u1", UserWorkerSettings(idle_timeout=1800))
        await finished(skipping, "u1")
        closed = (await handle(skipping.client, "u1").describe()).close_time
    assert fleet.checks == 2
    assert closed is not None
    assert closed.timestamp() - began == pytest.approx(900 + 1800, abs=60)


@pytest.mark.parametrize("connected", [False, True], ids=["started for it", "connected already"])
async def test_a_worker_stays_until_its_first_quiet_time_after_the_bell(
    skipping: WorkflowEnvironment, fleet: FakeFleet, connected: bool
) -> None:
    began = time.time()
    settings = UserWorkerSettings(idle_timeout=1800)
    async with serving(skipping.client, fleet.activities()):
        if connected:
            await ensure_active(skipping.client, "u1", settings)
        await ensure_active(skipping.client, "u1", settings, stay_until=began + 3000)
        # An earlier one.
        await ensure_active(skipping.client, "u1", settings, stay_until=began + 2000)
        await ensure_active(skipping.client, "u1", settings, stay_until=began + 90000)  # no bell
        await finished(skipping, "u1")
        closed = (await handle(skipping.client, "u1").describe()).close_time
    assert [stop.reason for stop in fleet.stops] == ["idle"]
    assert closed is not None
    assert closed.timestamp() - began == pytest.approx(3000 + 1800, abs=60)


async def test_a_worker_that_replaces_a_dead_one_before_the_bell_stays_as_well(
    skipping: WorkflowEnvironment, fleet: FakeFleet
) -> None:
    began = time.time()
    settings = UserWorkerSettings(idle_timeout=600)
    async with serving(skipping.client, fleet.activities()):
        await ensure_active(skipping.client, "u1", settings, stay_until=began + 3000)
        await lose(skipping, 1)
        await until_worker(skipping, "w2")
        await finished(skipping, "u1")
        closed = (await handle(skipping.client, "u1").describe()).close_time
    assert closed is not None
    assert closed.timestamp() - began == pytest.approx(3000 + 600, abs=60)


async def test_a_worker_of_which_nothing_is_known_is_left_alone_when_idle(
    skipping: WorkflowEnvironment, fleet: FakeFleet
) -> None:
    fleet.health = [UNMARKED, UNMARKED]
    async with serving(skipping.client, fleet.activities()):
        await ensure_active(skipping.client, "u1", UserWorkerSettings(idle_timeout=1800))
        await finished(skipping, "u1")
    assert fleet.checks == 3


async def test_a_shutdown_without_payload_ends_worker_and_run(
    skipping: WorkflowEnvironment, fleet: FakeFleet
) -> None:
    async with serving(skipping.client, fleet.activities()):
        await ensure_active(skipping.client, "u1")
        await handle(skipping.client, "u1").signal("shutdown")
        await finished(skipping, "u1")
    assert [(stop.reason, stop.grace) for stop in fleet.stops] == [("requested", 30.0)]


async def test_a_cancelled_workflow_ends_its_worker(
    skipping: WorkflowEnvironment, fleet: FakeFleet
) -> None:
    async with serving(skipping.client, fleet.activities()):
        await ensure_active(skipping.client, "u1")
        await handle(skipping.client, "u1").cancel()
        await finished(skipping, "u1")
    assert [stop.reason for stop in fleet.stops] == ["cancelled"]


async def test_a_workflow_cancelled_while_it_drains_still_confirms_the_end(
    skipping: WorkflowEnvironment, fleet: FakeFleet
) -> None:
    fleet.stop_failures = 5  # half a minute of tries
    async with serving(skipping.client, fleet.activities()):
        await ensure_active(skipping.client, "u1")
        await handle(skipping.client, "u1").signal("shutdown")

        async def waits_for_the_next_try() -> bool:
            view = await until_state(skipping.client, "u1", WorkerState.DRAINING)
            return "not confirmed" in view.note

        await until(waits_for_the_next_try)
        await until(lambda: at_rest(skipping.client, "u1"))
        await handle(skipping.client, "u1").cancel()
        await finished(skipping, "u1")
    assert len(fleet.stops) == 1


async def test_a_crash_is_counted_though_the_run_is_cancelled_meanwhile(
    skipping: WorkflowEnvironment, fleet: FakeFleet
) -> None:
    fleet.stop_failures = 5
    lost = WorkerLostSignal(task_id="t1", worker_id="w1")
    async with serving(skipping.client, fleet.activities()):
        await ensure_active(skipping.client, "u1")
        await handle(skipping.client, "u1").signal(UserWorkerWorkflow.worker_lost, lost)
        await until(lambda: fleet.stop_failures < 5)
        await until(lambda: at_rest(skipping.client, "u1"))
        await handle(skipping.client, "u1").cancel()
        await finished(skipping, "u1")
    assert [stop.crashed for stop in fleet.stops] == [True]
    assert len(fleet.claims) == 1


async def test_a_workflow_cancelled_while_a_dead_worker_is_stopped_claims_no_other(
    skipping: WorkflowEnvironment, fleet: FakeFleet
) -> None:
    fleet.hold_stop.clear()
    async with serving(skipping.client, fleet.activities()):
        await ensure_active(skipping.client, "u1")
        lost = WorkerLostSignal(task_id="t1", worker_id="w1")
        await handle(skipping.client, "u1").signal("worker_lost", lost)
        await fleet.stop_started.wait()
        await handle(skipping.client, "u1").cancel()

        async def asks_again() -> bool:
            view = await handle(skipping.client, "u1").query(UserWorkerWorkflow.view)
            return view.note != ""

        await until(asks_again)
        fleet.hold_stop.set()
        await finished(skipping, "u1")
    assert len(fleet.claims) == 1


async def test_a_cancel_answers_those_who_wait_for_a_reload(
    skipping: WorkflowEnvironment, fleet: FakeFleet
) -> None:
    fleet.hold_reload.clear()
    async with serving(skipping.client, fleet.activities()):
        await ensure_active(skipping.client, "u1")
        update = await handle(skipping.client, "u1").start_update(
            "reload_credentials_now",
            wait_for_stage=WorkflowUpdateStage.ACCEPTED,
            result_type=ReloadResult,
        )
        await until(lambda: bool(fleet.reloads))
        await handle(skipping.client, "u1").cancel()
        result = await update.result()
        fleet.hold_reload.set()
        await finished(skipping, "u1")
    assert (result.ok, result.failure_code) == (False, "WORKER_UNAVAILABLE")


async def test_a_check_that_fails_keeps_the_worker(
    skipping: WorkflowEnvironment, fleet: FakeFleet
) -> None:
    fleet.check_failures = 1
    async with serving(skipping.client, fleet.activities()):
        await ensure_active(skipping.client, "u1")
        active = await ensure_active(skipping.client, "u1", mark_missing=True)
    assert active.worker.worker_id == "w1"
    assert not fleet.stops


async def test_a_draining_worker_refuses_until_it_has_ended(
    skipping: WorkflowEnvironment, fleet: FakeFleet
) -> None:
    fleet.stop_failures = 4
    async with serving(skipping.client, fleet.activities()):
        await ensure_active(skipping.client, "u1")
        await handle(skipping.client, "u1").signal(
            "shutdown", ShutdownRequest(reason="maintenance")
        )
        await until_state(skipping.client, "u1", WorkerState.DRAINING)
        with pytest.raises(WorkflowUpdateFailedError) as failed:
            await ensure_active(skipping.client, "u1")
        await finished(skipping, "u1")
        await ensure_active(skipping.client, "u1")
    assert isinstance(failed.value.cause, ApplicationError)
    assert failed.value.cause.type == "DRAINING"


async def test_orders_left_in_the_queue_get_another_worker(
    skipping: WorkflowEnvironment, fleet: FakeFleet
) -> None:
    fleet.waiting_orders = 1
    async with serving(skipping.client, fleet.activities()):
        await ensure_active(skipping.client, "u1")
        await handle(skipping.client, "u1").signal("shutdown")
        view = await until_worker(skipping, "w2")
    assert view.state == WorkerState.ACTIVE
    assert [stop.worker.worker_id for stop in fleet.stops] == ["w1"]


async def test_a_lost_worker_is_replaced_after_its_end_is_confirmed(
    skipping: WorkflowEnvironment, fleet: FakeFleet
) -> None:
    async with serving(skipping.client, fleet.activities()):
        await ensure_active(skipping.client, "u1")
        await lose(skipping, 1)
        await until_worker(skipping, "w2")
    assert [stop.worker.worker_id for stop in fleet.stops] == ["w1"]
    assert fleet.claims[0] != fleet.claims[1]


async def test_the_end_of_another_task_changes_nothing(
    skipping: WorkflowEnvironment, fleet: FakeFleet
) -> None:
    async with serving(skipping.client, fleet.activities()):
        await ensure_active(skipping.client, "u1")
        await lose(skipping, 99)
        active = await ensure_active(skipping.client, "u1")
    assert active.worker.worker_id == "w1"
    assert not fleet.stops


async def test_a_caller_during_a_replacement_gets_the_new_worker(
    skipping: WorkflowEnvironment, fleet: FakeFleet
) -> None:
    async with serving(skipping.client, fleet.activities()):
        await ensure_active(skipping.client, "u1")
        fleet.claim_script = [ClaimStatus.CONNECTING]
        fleet.hold_connect.clear()
        await lose(skipping, 1)
        await fleet.connect_started.wait()
        call = asyncio.create_task(ensure_active(skipping.client, "u1"))
        fleet.hold_connect.set()
        active = await call
    assert active.worker.worker_id == "w2"
    assert len(fleet.claims) == 2


async def test_five_crashes_park_the_user_until_resumed(
    skipping: WorkflowEnvironment, fleet: FakeFleet
) -> None:
    async with serving(skipping.client, fleet.activities()):
        await ensure_active(skipping.client, "u1")
        for number in range(1, 5):
            await lose(skipping, number)
            await skipping.sleep(10)  # longer than the backoff, far shorter than the idle timeout
            await until_worker(skipping, f"w{number + 1}")
        await lose(skipping, 5)
        await until_state(skipping.client, "u1", WorkerState.PARKED)
        with pytest.raises(WorkflowUpdateFailedError) as failed:
            await ensure_active(skipping.client, "u1")
        await handle(skipping.client, "u1").signal("resume")
        active = await ensure_active(skipping.client, "u1")
    assert isinstance(failed.value.cause, ApplicationError)
    assert failed.value.cause.type == "PARKED"
    assert active.worker.worker_id == "w6"


async def test_a_missing_mark_of_a_running_worker_keeps_the_worker(
    skipping: WorkflowEnvironment, fleet: FakeFleet
) -> None:
    fleet.health = [UNMARKED]
    async with serving(skipping.client, fleet.activities()):
        await ensure_active(skipping.client, "u1")
        active = await ensure_active(skipping.client, "u1", mark_missing=True)
    assert active.worker.worker_id == "w1"
    assert fleet.checks == 1
    assert not fleet.stops


async def test_a_missing_mark_of_a_gone_worker_gets_another_worker(
    skipping: WorkflowEnvironment, fleet: FakeFleet
) -> None:
    fleet.health = [GONE]
    async with serving(skipping.client, fleet.activities()):
        await ensure_active(skipping.client, "u1")
        active = await ensure_active(skipping.client, "u1", mark_missing=True)
    assert active.worker.worker_id == "w2"
    assert [stop.worker.worker_id for stop in fleet.stops] == ["w1"]


async def test_a_reload_reaches_the_worker_by_signal_and_by_update(
    skipping: WorkflowEnvironment, fleet: FakeFleet
) -> None:
    async with serving(skipping.client, fleet.activities()):
        await ensure_active(skipping.client, "u1")
        await handle(skipping.client, "u1").signal("reload_credentials")
        result = await handle(skipping.client, "u1").execute_update(
            "reload_credentials_now", result_type=ReloadResult
        )
    assert result.ok
    assert 1 <= len(fleet.reloads) <= 2


async def test_events_move_the_worker_between_active_and_reconnecting(
    skipping: WorkflowEnvironment, fleet: FakeFleet
) -> None:
    def event(kind: str, sequence: int, epoch: int = 1) -> WorkerEventSignal:
        return WorkerEventSignal(worker_id="w1", epoch=epoch, sequence=sequence, kind=kind, at=0.0)

    async with serving(skipping.client, fleet.activities()):
        await ensure_active(skipping.client, "u1")
        worker = handle(skipping.client, "u1")
        await worker.signal("worker_event", event("reconnecting", 2))
        await until_state(skipping.client, "u1", WorkerState.RECONNECTING)
        await worker.signal("worker_event", event("connected", 3))
        await until_state(skipping.client, "u1", WorkerState.ACTIVE)
        await worker.signal("worker_event", event("reconnecting", 2))  # late
        # Another assignment's.
        await worker.signal("worker_event", event("reconnecting", 9, epoch=7))
        active = await ensure_active(skipping.client, "u1")
    assert active.state == WorkerState.ACTIVE


async def test_a_missing_owner_key_is_put_back_by_a_check(
    skipping: WorkflowEnvironment, fleet: FakeFleet
) -> None:
    missing = WorkerEventSignal(worker_id="w1", epoch=1, sequence=2, kind="owner_missing", at=0.0)
    async with serving(skipping.client, fleet.activities()):
        await ensure_active(skipping.client, "u1")
        await handle(skipping.client, "u1").signal("worker_event", missing)
        await until(lambda: fleet.checks > 0)
    assert fleet.checks == 1


async def test_a_new_run_continues_with_the_same_worker(
    skipping: WorkflowEnvironment, fleet: FakeFleet
) -> None:
    async with serving(skipping.client, fleet.activities()):
        first = await ensure_active(skipping.client, "u1")
        before = await handle(skipping.client, "u1").query(UserWorkerWorkflow.view)
        run_id = (await handle(skipping.client, "u1").describe()).run_id
        await handle(skipping.client, "u1").signal("renew")

        async def renewed() -> bool:
            described = await handle(skipping.client, "u1").describe()
            return (
                described.run_id != run_id and described.status == WorkflowExecutionStatus.RUNNING
            )

        await until(renewed)
        second = await ensure_active(skipping.client, "u1")
        after = await handle(skipping.client, "u1").query(UserWorkerWorkflow.view)
    assert first == second
    assert before == after
    assert len(fleet.claims) == 1
