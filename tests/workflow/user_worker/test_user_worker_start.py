"""How a user gets a worker: warm, cold, dead, refused, late."""

from __future__ import annotations

import asyncio

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
    skipped,
    until,
    until_state,
)
from workflows.user_worker.messages import (
    ClaimResult,
    ClaimStatus,
    Examine,
    UserWorkerInput,
    UserWorkerSettings,
    WorkerHealth,
    WorkerLostSignal,
    WorkerState,
)
from workflows.user_worker.workflow import UserWorkerWorkflow

UNREACHABLE = ClaimResult(
    status=ClaimStatus.FAILED, failure_code="BROKER_UNREACHABLE", failure_detail="no route"
)
REJECTED = ClaimResult(
    status=ClaimStatus.FAILED,
    failure_code="LOGIN_REJECTED",
    failure_detail="wrong key",
    retryable=False,
)


def code_of(failed: WorkflowUpdateFailedError) -> str:
    assert isinstance(failed.cause, ApplicationError)
    return failed.cause.type or ""


async def test_a_warm_worker_makes_the_user_active(
    skipping: WorkflowEnvironment, fleet: FakeFleet
) -> None:
    async with serving(skipping.client, fleet.activities()):
        active = await ensure_active(skipping.client, "u1")
        view = await handle(skipping.client, "u1").query(UserWorkerWorkflow.view)
    assert active.worker.worker_id == "w1"
    assert (active.claimed_at, active.connected_at) == (1.0, 2.0)
    assert active.state == view.state == WorkerState.ACTIVE
    assert not fleet.launches
    assert view.deadline is not None


async def test_an_empty_pool_launches_for_the_same_claim(
    skipping: WorkflowEnvironment, fleet: FakeFleet
) -> None:
    fleet.claim_script = [ClaimStatus.EMPTY, ClaimStatus.ACTIVE]
    async with serving(skipping.client, fleet.activities()):
        active = await ensure_active(skipping.client, "u1")
    assert fleet.launches == [fleet.claims[0]]
    assert fleet.claims[0] == fleet.claims[1] == active.worker.claim_id
    assert not active.worker.warm


async def test_a_launch_on_a_cold_host_is_waited_for(
    skipping: WorkflowEnvironment, fleet: FakeFleet
) -> None:
    """For longer than a claim may take: 0.5 s here, 30 s in life. A cold host takes 48 to 63 s."""
    fleet.claim_script = [ClaimStatus.EMPTY, ClaimStatus.ACTIVE]
    fleet.launch_seconds = 1.5
    own = UserWorkerSettings(claim_timeout=0.5, launch_timeout=6.0)
    async with serving(skipping.client, fleet.activities()):
        active = await ensure_active(skipping.client, "u1", settings=own)
    assert fleet.launches == [active.worker.claim_id]
    assert UserWorkerSettings().launch_timeout > 63


async def test_a_failed_launch_takes_a_new_claim_id(
    skipping: WorkflowEnvironment, fleet: FakeFleet
) -> None:
    fleet.claim_script = [ClaimStatus.EMPTY]
    fleet.launch_failures = 1
    async with serving(skipping.client, fleet.activities()):
        active = await ensure_active(skipping.client, "u1")
    assert active.worker.claim_id == fleet.claims[1] != fleet.claims[0]


async def test_a_user_without_a_place_hears_it_at_once_and_leaves_nothing_behind(
    skipping: WorkflowEnvironment, fleet: FakeFleet
) -> None:
    fleet.claim_script = [ClaimStatus.EMPTY]
    fleet.launch_failures, fleet.launch_failure = 1, "POOL_EXHAUSTED"
    async with serving(skipping.client, fleet.activities()):
        with pytest.raises(WorkflowUpdateFailedError) as failed:
            await ensure_active(skipping.client, "u1")
        await finished(skipping, "u1")
    assert code_of(failed.value) == "POOL_EXHAUSTED"
    assert len(fleet.launches) == 1
    assert [stop.worker.claim_id for stop in fleet.stops] == fleet.launches


async def test_a_claim_that_is_refused_for_want_of_memory_says_so_and_is_not_repeated(
    skipping: WorkflowEnvironment, fleet: FakeFleet
) -> None:
    fleet.claim_failures, fleet.claim_failure = 1, "MEMORY_SHORT"
    async with serving(skipping.client, fleet.activities()):
        with pytest.raises(WorkflowUpdateFailedError) as failed:
            await ensure_active(skipping.client, "u1")
        await finished(skipping, "u1")
    assert code_of(failed.value) == "MEMORY_SHORT"
    assert len(fleet.claims) == 1


async def test_a_worker_that_maintenance_doubts_is_looked_at(
    skipping: WorkflowEnvironment, fleet: FakeFleet
) -> None:
    async with serving(skipping.client, fleet.activities()):
        active = await ensure_active(skipping.client, "u1")
        user = handle(skipping.client, "u1")
        epoch = active.worker.epoch
        await user.signal("examine", Examine(worker_id="another", epoch=epoch))
        await user.signal("examine", Examine(worker_id="w1", epoch=epoch + 1))
        assert fleet.checks == 0
        fleet.health = [WorkerHealth(marked=True, running=True)]
        await user.signal(
            "examine", Examine(worker_id="w1", epoch=epoch, reason="idle for too long")
        )
        await until(lambda: fleet.checks == 1)
        assert (await user.query(UserWorkerWorkflow.view)).state == WorkerState.ACTIVE
    assert fleet.stops == []


async def test_a_dead_claimed_worker_is_confirmed_stopped_before_a_new_claim(
    skipping: WorkflowEnvironment, fleet: FakeFleet
) -> None:
    fleet.claim_script = [ClaimStatus.GONE, ClaimStatus.ACTIVE]
    async with serving(skipping.client, fleet.activities()):
        active = await ensure_active(skipping.client, "u1")
    assert [stop.worker.worker_id for stop in fleet.stops] == ["w1"]
    assert active.worker.worker_id == "w2"


async def test_claims_are_given_up_after_three_dead_workers(
    skipping: WorkflowEnvironment, fleet: FakeFleet
) -> None:
    fleet.claim_script = [ClaimStatus.GONE] * 3
    async with serving(skipping.client, fleet.activities()):
        with pytest.raises(WorkflowUpdateFailedError) as failed:
            await ensure_active(skipping.client, "u1")
        await finished(skipping, "u1")
    assert code_of(failed.value) == "WORKER_UNAVAILABLE"
    assert len(set(fleet.claims)) == 3


async def test_a_slow_login_is_waited_for(skipping: WorkflowEnvironment, fleet: FakeFleet) -> None:
    fleet.claim_script = [ClaimStatus.CONNECTING]
    async with serving(skipping.client, fleet.activities()):
        active = await ensure_active(skipping.client, "u1")
    assert fleet.connects == [1]
    assert active.connected_at == 3.0


async def test_a_login_that_failed_for_the_moment_is_tried_three_times(
    skipping: WorkflowEnvironment, fleet: FakeFleet
) -> None:
    fleet.claim_script = [ClaimStatus.FAILED]
    fleet.connect_script = [UNREACHABLE] * 3
    async with serving(skipping.client, fleet.activities()):
        starting = asyncio.create_task(ensure_active(skipping.client, "u1"))
        # The clock jumps from here on: before, it would jump over the time that the run waits for
        # its caller.
        await until(lambda: bool(fleet.claims))
        async with skipped(skipping):
            with pytest.raises(WorkflowUpdateFailedError) as failed:
                await starting
        await finished(skipping, "u1")
    assert code_of(failed.value) == "BROKER_UNREACHABLE"
    assert fleet.connects == [2, 3]
    assert [stop.worker.worker_id for stop in fleet.stops] == ["w1"]


async def test_a_second_login_that_succeeds_makes_the_user_active(
    skipping: WorkflowEnvironment, fleet: FakeFleet
) -> None:
    fleet.claim_script = [ClaimStatus.FAILED]
    fleet.connect_script = [UNREACHABLE]
    async with serving(skipping.client, fleet.activities()):
        await ensure_active(skipping.client, "u1")
        view = await handle(skipping.client, "u1").query(UserWorkerWorkflow.view)
    assert (view.state, view.attempts) == (WorkerState.ACTIVE, 2)


async def test_a_rejected_login_is_not_tried_again(
    skipping: WorkflowEnvironment, fleet: FakeFleet
) -> None:
    fleet.claim_script = [ClaimStatus.FAILED]
    fleet.connect_script = [REJECTED]
    async with serving(skipping.client, fleet.activities()):
        with pytest.raises(WorkflowUpdateFailedError) as failed:
            await ensure_active(skipping.client, "u1")
        await finished(skipping, "u1")
        view = await handle(skipping.client, "u1").query(UserWorkerWorkflow.view)
    assert code_of(failed.value) == "LOGIN_REJECTED"
    assert isinstance(failed.value.cause, ApplicationError)
    assert failed.value.cause.non_retryable
    assert not fleet.connects
    assert len(fleet.stops) == 1
    assert view.state == WorkerState.TERMINATED


async def test_the_next_call_after_a_failed_start_begins_a_new_run(
    skipping: WorkflowEnvironment, fleet: FakeFleet
) -> None:
    fleet.claim_script = [ClaimStatus.FAILED]
    fleet.connect_script = [REJECTED]
    async with serving(skipping.client, fleet.activities()):
        with pytest.raises(WorkflowUpdateFailedError):
            await ensure_active(skipping.client, "u1")
        await finished(skipping, "u1")
        active = await ensure_active(skipping.client, "u1")
    assert active.worker.worker_id == "w2"


async def test_a_claim_that_nobody_can_carry_out_fails_and_leaves_no_worker(
    skipping: WorkflowEnvironment, fleet: FakeFleet
) -> None:
    """Nobody knows whether the claim got a worker: it is stopped by the claim's id."""
    fleet.claim_failures = 1
    async with serving(skipping.client, fleet.activities()):
        with pytest.raises(WorkflowUpdateFailedError) as failed:
            await ensure_active(skipping.client, "u1")
        await finished(skipping, "u1")
    assert code_of(failed.value) == "WORKER_UNAVAILABLE"
    assert [(stop.worker.worker_id, stop.worker.claim_id) for stop in fleet.stops] == [
        ("", fleet.claims[0])
    ]


async def test_callers_at_the_same_time_share_one_claim(
    skipping: WorkflowEnvironment, fleet: FakeFleet
) -> None:
    fleet.claim_script = [ClaimStatus.CONNECTING]
    fleet.hold_connect.clear()
    async with serving(skipping.client, fleet.activities()):
        calls = [asyncio.create_task(ensure_active(skipping.client, "u1")) for _ in range(5)]
        await fleet.connect_started.wait()
        calls.append(asyncio.create_task(ensure_active(skipping.client, "u1")))
        fleet.hold_connect.set()
        answers = await asyncio.gather(*calls)
    assert len(fleet.claims) == 1
    assert {answer.worker.worker_id for answer in answers} == {"w1"}


async def test_a_worker_that_ends_while_it_connects_is_replaced_at_once(
    skipping: WorkflowEnvironment, fleet: FakeFleet
) -> None:
    fleet.claim_script = [ClaimStatus.CONNECTING]
    fleet.hold_connect.clear()
    async with serving(skipping.client, fleet.activities()):
        call = asyncio.create_task(ensure_active(skipping.client, "u1"))
        await fleet.connect_started.wait()
        lost = WorkerLostSignal(task_id="t1", worker_id="w1", exit_code=-9)
        await handle(skipping.client, "u1").signal(UserWorkerWorkflow.worker_lost, lost)
        active = await call
        fleet.hold_connect.set()
    assert active.worker.worker_id == "w2"
    assert [stop.worker.worker_id for stop in fleet.stops] == ["w1"]


async def test_a_shutdown_cuts_a_start_short(
    skipping: WorkflowEnvironment, fleet: FakeFleet
) -> None:
    fleet.claim_script = [ClaimStatus.CONNECTING]
    fleet.hold_connect.clear()
    async with serving(skipping.client, fleet.activities()):
        call = asyncio.create_task(ensure_active(skipping.client, "u1"))
        await fleet.connect_started.wait()
        await handle(skipping.client, "u1").signal("shutdown")
        with pytest.raises(WorkflowUpdateFailedError) as failed:
            await call
        await finished(skipping, "u1")
        fleet.hold_connect.set()
    assert code_of(failed.value) == "DRAINING"
    assert [stop.reason for stop in fleet.stops] == ["requested"]


async def test_no_worker_is_claimed_until_the_old_ones_end_is_confirmed(
    skipping: WorkflowEnvironment, fleet: FakeFleet
) -> None:
    fleet.claim_script = [ClaimStatus.GONE]
    fleet.stop_failures = 3
    async with serving(skipping.client, fleet.activities()):
        with pytest.raises(WorkflowUpdateFailedError) as failed:
            await ensure_active(skipping.client, "u1")
        assert code_of(failed.value) == "WORKER_UNAVAILABLE"
        # Longer than the pauses between two tries, shorter than the idle timeout.
        await skipping.sleep(10)
        view = await until_state(skipping.client, "u1", WorkerState.ACTIVE)
    assert view.worker is not None
    assert view.worker.worker_id == "w2"
    assert fleet.stop_failures == 0


async def test_nobody_in_need_of_a_worker_ends_the_run(
    skipping: WorkflowEnvironment, fleet: FakeFleet
) -> None:
    async with serving(skipping.client, fleet.activities()):
        await skipping.client.execute_workflow(
            UserWorkerWorkflow.run,
            UserWorkerInput(user_id="u1"),
            id="user-worker-u1",
            task_queue="berth-lifecycle",
        )
    assert not fleet.claims
    assert not fleet.stops


async def test_workers_that_die_over_their_login_are_counted_until_the_user_is_parked(
    skipping: WorkflowEnvironment, fleet: FakeFleet
) -> None:
    fleet.claim_script = [ClaimStatus.CONNECTING] * 3
    fleet.hold_connect.clear()
    now = (await skipping.get_current_time()).timestamp()
    fleet.crashes = (now - 20, now - 10)  # of an earlier run
    async with serving(skipping.client, fleet.activities()):
        starting = asyncio.create_task(ensure_active(skipping.client, "u1"))
        for number in (2, 3, 4):  # the first claim of the run was put off
            await until(lambda number=number: len(fleet.connects) == number - 1)  # type: ignore[misc]
            lost = WorkerLostSignal(task_id=f"t{number}", worker_id=f"w{number}", exit_code=-11)
            await handle(skipping.client, "u1").signal(UserWorkerWorkflow.worker_lost, lost)
            await until(lambda number=number: len(fleet.stops) == number - 1)  # type: ignore[misc]
            fleet.gone.add(f"w{number}")
            if number < 4:
                # Over the pause, and not while the next login is waited for.
                async with skipped(skipping):
                    await until(lambda number=number: len(fleet.connects) == number)  # type: ignore[misc]
        with pytest.raises(WorkflowUpdateFailedError) as failed:
            await starting
        view = await until_state(skipping.client, "u1", WorkerState.PARKED)
    assert code_of(failed.value) == "PARKED"
    assert view.crashes == 5
    assert [stop.crashed for stop in fleet.stops] == [True] * 3
