"""A worker in service that loses its session, its broker, its mark; credentials; crashes of earlier
runs."""

from __future__ import annotations

import asyncio
import time

import pytest
from temporalio.client import WorkflowUpdateFailedError
from temporalio.exceptions import ApplicationError
from temporalio.testing import WorkflowEnvironment

from tests.support.workflows.fakes import (
    FakeFleet,
    ensure_active,
    finished,
    handle,
    serving,
    tell,
    until,
    until_state,
)
from tests.support.workflows.user_workers import until_worker_serves, view_user
from worker_runtime.protocol.launch import ExitCode
from workflows.user_worker.messages import (
    ClaimStatus,
    ReloadResult,
    WorkerHealth,
    WorkerLostSignal,
    WorkerState,
    WorkerUnmarked,
)
from workflows.user_worker.workflow import UserWorkerWorkflow

SILENT = ReloadResult(
    ok=False, failure_code="WORKER_UNAVAILABLE", failure_detail="no answer in time"
)
UNREACHABLE = ReloadResult(ok=False, failure_code="BROKER_UNREACHABLE", failure_detail="refused")
REJECTED = ReloadResult(ok=False, failure_code="LOGIN_REJECTED", failure_detail="wrong key")
RUNNING = WorkerHealth(marked=False, running=True, generation="g1")


async def unmark(env: WorkflowEnvironment, generation: str = "g1", epoch: int = 1) -> None:
    unmarked = WorkerUnmarked(worker_id="w1", epoch=epoch, generation=generation)
    await handle(env.client, "u1").signal(UserWorkerWorkflow.worker_unmarked, unmarked)


# --- a session that was replaced ------------------------------------------------------------------


async def test_a_replaced_session_gets_its_credentials_and_is_active_again(
    skipping: WorkflowEnvironment, fleet: FakeFleet
) -> None:
    fleet.hold_reload.clear()
    async with serving(skipping.client, fleet.activities()):
        await ensure_active(skipping.client, "u1")
        await tell(skipping.client, "u1", "session_replaced", 3, "frozen")
        seen = await until_state(skipping.client, "u1", WorkerState.RECONNECTING)
        fleet.hold_reload.set()
        await until_worker_serves(skipping, "w1")
        await tell(skipping.client, "u1", "connected", 4)
        after = await view_user(skipping)
    assert (seen.reason, seen.health) == (
        "session replaced: frozen",
        "degraded: session replaced: frozen",
    )
    assert (after.state, after.health, after.crashes) == (WorkerState.ACTIVE, "well", 0)
    assert [request.cause for request in fleet.reloads] == ["session replaced"]
    assert not fleet.stops


async def test_a_replaced_session_that_does_not_answer_is_tried_three_times_then_replaced(
    skipping: WorkflowEnvironment, fleet: FakeFleet
) -> None:
    fleet.reload_script = [SILENT] * 3
    async with serving(skipping.client, fleet.activities()):
        await ensure_active(skipping.client, "u1")
        await tell(skipping.client, "u1", "session_replaced", 3)
        await skipping.sleep(10)
        await until_worker_serves(skipping, "w2")
        after = await view_user(skipping)
    assert len(fleet.reloads) == 3
    assert [(stop.crashed, stop.grace) for stop in fleet.stops] == [(True, 0.0)]
    assert after.crashes == 1


async def test_a_session_replaced_again_during_the_reload_is_given_credentials_anew(
    skipping: WorkflowEnvironment, fleet: FakeFleet
) -> None:
    fleet.hold_reload.clear()
    async with serving(skipping.client, fleet.activities()):
        await ensure_active(skipping.client, "u1")
        await tell(skipping.client, "u1", "session_replaced", 3)
        await until(lambda: len(fleet.reloads) == 1)
        await tell(skipping.client, "u1", "session_replaced", 5)
        await until(lambda: len(fleet.reloads) == 2)
        fleet.hold_reload.set()
        await until_worker_serves(skipping, "w1")
    assert not fleet.stops


async def test_a_refused_login_of_a_replaced_session_ends_the_run_with_its_reason(
    skipping: WorkflowEnvironment, fleet: FakeFleet
) -> None:
    fleet.reload_script = [REJECTED]
    async with serving(skipping.client, fleet.activities()):
        await ensure_active(skipping.client, "u1")
        await tell(skipping.client, "u1", "session_replaced", 3)
        await finished(skipping, "u1")
        after = await view_user(skipping)
    assert (after.state, after.reason) == (WorkerState.TERMINATED, "LOGIN_REJECTED: wrong key")
    assert [(stop.crashed, stop.reason) for stop in fleet.stops] == [
        (True, "LOGIN_REJECTED: wrong key")
    ]
    assert len(fleet.claims) == 1


async def test_an_unreachable_broker_leaves_the_replaced_session_to_try_by_itself(
    skipping: WorkflowEnvironment, fleet: FakeFleet
) -> None:
    fleet.reload_script = [UNREACHABLE]
    async with serving(skipping.client, fleet.activities()):
        await ensure_active(skipping.client, "u1")
        await tell(skipping.client, "u1", "session_replaced", 3)

        async def degraded() -> bool:
            return (await view_user(skipping)).health == "degraded: BROKER_UNREACHABLE: refused"

        await until(degraded)
        assert (await view_user(skipping)).state == WorkerState.RECONNECTING
        await tell(skipping.client, "u1", "connected", 4)
        await until_worker_serves(skipping, "w1")
    assert len(fleet.reloads) == 1


async def test_an_outage_of_the_database_stops_no_worker_whose_session_was_replaced(
    skipping: WorkflowEnvironment, fleet: FakeFleet
) -> None:
    fleet.reload_failures = 6
    async with serving(skipping.client, fleet.activities()):
        await ensure_active(skipping.client, "u1")
        await tell(skipping.client, "u1", "session_replaced", 3)
        await skipping.sleep(100)
        await until_worker_serves(skipping, "w1")
    assert len(fleet.reloads) == 7
    assert not fleet.stops


async def test_a_session_replaced_before_the_first_login_ended_gets_another_claim(
    skipping: WorkflowEnvironment, fleet: FakeFleet
) -> None:
    fleet.claim_script = [ClaimStatus.CONNECTING]
    fleet.hold_connect.clear()
    async with serving(skipping.client, fleet.activities()):
        call = asyncio.create_task(ensure_active(skipping.client, "u1"))
        await fleet.connect_started.wait()
        await tell(skipping.client, "u1", "session_replaced", 3)
        active = await call
        fleet.hold_connect.set()
    assert active.worker.worker_id == "w2"
    assert [stop.worker.worker_id for stop in fleet.stops] == ["w1"]


# --- a broker that cannot be had ------------------------------------------------------------------


async def test_a_worker_that_failed_ends_with_the_reason_and_is_counted(
    skipping: WorkflowEnvironment, fleet: FakeFleet
) -> None:
    async with serving(skipping.client, fleet.activities()):
        await ensure_active(skipping.client, "u1")
        await tell(skipping.client, "u1", "failed", 4, "SESSION_DOWN: the SDK does not come back")
        await finished(skipping, "u1")
        after = await view_user(skipping)
    assert after.reason == "SESSION_DOWN: the SDK does not come back"
    assert [stop.crashed for stop in fleet.stops] == [True]
    assert len(fleet.claims) == 1


async def test_the_exit_code_alone_tells_that_the_broker_failed(
    skipping: WorkflowEnvironment, fleet: FakeFleet
) -> None:
    lost = WorkerLostSignal(task_id="t1", worker_id="w1", exit_code=ExitCode.BROKER_FAILED)
    async with serving(skipping.client, fleet.activities()):
        await ensure_active(skipping.client, "u1")
        await handle(skipping.client, "u1").signal(UserWorkerWorkflow.worker_lost, lost)
        await finished(skipping, "u1")
        after = await view_user(skipping)
    assert after.reason.startswith("BROKER_ERROR: ")
    assert len(fleet.claims) == 1


async def test_a_caller_who_waits_hears_why_the_worker_gave_up(
    skipping: WorkflowEnvironment, fleet: FakeFleet
) -> None:
    fleet.hold_reload.clear()
    async with serving(skipping.client, fleet.activities()):
        await ensure_active(skipping.client, "u1")
        await tell(skipping.client, "u1", "session_replaced", 3)
        await until(lambda: len(fleet.reloads) == 1)
        fleet.hold_stop.clear()  # or a call that comes late would meet the next run
        call = asyncio.create_task(ensure_active(skipping.client, "u1", mark_missing=True))
        await tell(skipping.client, "u1", "failed", 5, "LOGIN_REJECTED: wrong key")
        with pytest.raises(WorkflowUpdateFailedError) as failed:
            await call
        fleet.hold_reload.set()
        fleet.hold_stop.set()
    assert isinstance(failed.value.cause, ApplicationError)
    assert failed.value.cause.type in ("LOGIN_REJECTED", "DRAINING")


# --- a mark that expired --------------------------------------------------------------------------


@pytest.mark.parametrize("running", [True, False, None])
async def test_an_expired_mark_has_the_worker_stopped_and_replaced_whatever_the_launcher_lists(
    skipping: WorkflowEnvironment, fleet: FakeFleet, running: bool | None
) -> None:
    fleet.health = [WorkerHealth(marked=False, running=running, generation="g1")]
    async with serving(skipping.client, fleet.activities()):
        await ensure_active(skipping.client, "u1")
        await unmark(skipping)
        await until_worker_serves(skipping, "w2")
    assert [(stop.worker.worker_id, stop.grace, stop.crashed) for stop in fleet.stops] == [
        ("w1", 0.0, True)
    ]


@pytest.mark.parametrize(
    "health",
    [
        WorkerHealth(marked=True, running=True, generation="g1"),
        WorkerHealth(marked=False, running=True, generation="g2"),
        WorkerHealth(marked=False, running=True),
    ],
    ids=["the mark is back", "another generation", "no generation"],
)
async def test_a_mark_that_is_back_or_was_flushed_costs_no_worker(
    skipping: WorkflowEnvironment, fleet: FakeFleet, health: WorkerHealth
) -> None:
    fleet.health = [health]
    async with serving(skipping.client, fleet.activities()):
        await ensure_active(skipping.client, "u1")
        await unmark(skipping)
        await until(lambda: fleet.checks == 1)
        active = await ensure_active(skipping.client, "u1", mark_missing=True)
    assert active.worker.worker_id == "w1"
    assert not fleet.stops


async def test_an_expired_mark_of_another_epoch_is_not_even_checked(
    skipping: WorkflowEnvironment, fleet: FakeFleet
) -> None:
    async with serving(skipping.client, fleet.activities()):
        await ensure_active(skipping.client, "u1")
        await unmark(skipping, epoch=7)
        await ensure_active(skipping.client, "u1")
    assert fleet.checks == 0


async def test_nothing_else_starts_while_the_launcher_cannot_confirm_the_end(
    skipping: WorkflowEnvironment, fleet: FakeFleet
) -> None:
    fleet.health, fleet.stop_failures = [RUNNING], 5
    async with serving(skipping.client, fleet.activities()):
        await ensure_active(skipping.client, "u1")
        await unmark(skipping)
        seen = await until_state(skipping.client, "u1", WorkerState.FAILED)
        await until(lambda: fleet.stop_failures < 5)
        assert len(fleet.claims) == 1
        await skipping.sleep(60)
        await until_worker_serves(skipping, "w2")
    assert seen.worker is not None
    assert "the worker's end is certain" in seen.next_step
    assert len(fleet.stops) == 1


async def test_a_check_finds_that_a_reconnecting_worker_is_active_again(
    skipping: WorkflowEnvironment, fleet: FakeFleet
) -> None:
    """Its event was lost with Valkey's memory; its metadata tells."""
    fleet.health = [
        WorkerHealth(marked=True, running=True, worker_state="Active", last_activity=time.time())
    ]
    async with serving(skipping.client, fleet.activities()):
        await ensure_active(skipping.client, "u1")
        await tell(skipping.client, "u1", "degraded", 2, "refused")
        await until_state(skipping.client, "u1", WorkerState.RECONNECTING)
        await skipping.sleep(90)
        await until_worker_serves(skipping, "w1")
    assert fleet.checks == 1


# --- credentials ----------------------------------------------------------------------------------


async def test_refused_new_credentials_leave_the_worker_active_and_are_shown(
    skipping: WorkflowEnvironment, fleet: FakeFleet
) -> None:
    fleet.reload_script = [REJECTED]
    async with serving(skipping.client, fleet.activities()):
        await ensure_active(skipping.client, "u1")
        worker = handle(skipping.client, "u1")
        result = await worker.execute_update("reload_credentials_now", result_type=ReloadResult)
        refused = await view_user(skipping)
        await worker.execute_update("reload_credentials_now", result_type=ReloadResult)
        loaded = await view_user(skipping)
    assert (result.ok, result.failure_code) == (False, "LOGIN_REJECTED")
    assert (refused.state, refused.health) == (WorkerState.ACTIVE, "well")
    assert refused.note == "credentials refused: LOGIN_REJECTED: wrong key"
    assert loaded.note == ""
    assert [request.cause for request in fleet.reloads] == ["update", "update"]


async def test_a_worker_that_reconnects_takes_new_credentials_too(
    skipping: WorkflowEnvironment, fleet: FakeFleet
) -> None:
    async with serving(skipping.client, fleet.activities()):
        await ensure_active(skipping.client, "u1")
        await tell(skipping.client, "u1", "reconnecting", 2, "token expired")
        await until_state(skipping.client, "u1", WorkerState.RECONNECTING)
        await handle(skipping.client, "u1").signal(UserWorkerWorkflow.reload_credentials)
        await until(lambda: len(fleet.reloads) == 1)
        state = (await view_user(skipping)).state
    assert [request.cause for request in fleet.reloads] == ["signal"]
    assert state == WorkerState.RECONNECTING


# --- crashes of earlier runs ----------------------------------------------------------------------


async def test_a_new_run_waits_as_long_as_the_last_one_would_have(
    skipping: WorkflowEnvironment, fleet: FakeFleet
) -> None:
    fleet.hold_claim.clear()
    async with serving(skipping.client, fleet.activities()):
        call = asyncio.create_task(ensure_active(skipping.client, "u1"))
        await fleet.claim_started.wait()
        now = (await skipping.get_current_time()).timestamp()
        # The pause is 4 s. The last crash is yet to come: so it begins when the workflow hears of
        # it.
        fleet.crashes = (now - 9.0, now - 2.0, now - 1.0, now + 60.0)
        fleet.hold_claim.set()
        seen = await until_state(skipping.client, "u1", WorkerState.FAILED)
        await skipping.sleep(10)
        active = await call
    assert (seen.crashes, seen.worker, seen.next_step) == (4, None, "tries again after a pause")
    assert active.worker.worker_id == "w2"
    assert fleet.crashes_known == [True, False]
    assert not fleet.stops


async def test_a_user_whose_workers_crashed_too_often_is_parked_before_anything_is_claimed(
    skipping: WorkflowEnvironment, fleet: FakeFleet
) -> None:
    now = (await skipping.get_current_time()).timestamp()
    fleet.crashes = tuple(now - ago for ago in range(5))
    async with serving(skipping.client, fleet.activities()):
        with pytest.raises(WorkflowUpdateFailedError) as failed:
            await ensure_active(skipping.client, "u1")
        seen = await until_state(skipping.client, "u1", WorkerState.PARKED)
        await handle(skipping.client, "u1").signal(UserWorkerWorkflow.resume)
        await ensure_active(skipping.client, "u1")
    assert isinstance(failed.value.cause, ApplicationError)
    assert failed.value.cause.type == "PARKED"
    assert seen.crashes == 5
    assert fleet.crashes_known == [True, False]


async def test_a_resumed_user_has_ten_minutes_to_come_back(
    skipping: WorkflowEnvironment, fleet: FakeFleet
) -> None:
    now = (await skipping.get_current_time()).timestamp()
    fleet.crashes = tuple(now - ago for ago in range(5))
    async with serving(skipping.client, fleet.activities()):
        with pytest.raises(WorkflowUpdateFailedError):
            await ensure_active(skipping.client, "u1")
        await until_state(skipping.client, "u1", WorkerState.PARKED)
        await handle(skipping.client, "u1").signal(UserWorkerWorkflow.resume)
        await skipping.sleep(300)
        active = await ensure_active(skipping.client, "u1")
    assert active.state == WorkerState.ACTIVE


async def test_only_the_first_claim_of_a_run_asks_for_earlier_crashes(
    skipping: WorkflowEnvironment, fleet: FakeFleet
) -> None:
    lost = WorkerLostSignal(task_id="t1", worker_id="w1")
    async with serving(skipping.client, fleet.activities()):
        await ensure_active(skipping.client, "u1")
        await handle(skipping.client, "u1").signal(UserWorkerWorkflow.worker_lost, lost)
        await until_worker_serves(skipping, "w2")
    assert fleet.crashes_known == [True, False]
    assert [stop.crashed for stop in fleet.stops] == [True]
