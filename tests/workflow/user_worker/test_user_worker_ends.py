"""Ends of a worker that are not its own doing: asked for, or caused by the infrastructure."""

import asyncio

import pytest
from temporalio.testing import WorkflowEnvironment

from tests.support.workflows.fakes import (
    FakeFleet,
    ensure_active,
    handle,
    serving,
    until,
    until_state,
)
from tests.support.workflows.user_workers import until_worker_serves, view_user
from workflows.user_worker.messages import (
    ClaimStatus,
    UserWorkerSettings,
    WorkerHealth,
    WorkerLostSignal,
    WorkerRef,
    WorkerState,
    WorkerUnmarked,
)
from workflows.user_worker.state import MAX_CRASHES, UserWorkerState
from workflows.user_worker.workflow import UserWorkerWorkflow

#: More than park a user whose workers crash.
OFTEN = MAX_CRASHES + 1


async def lose(env: WorkflowEnvironment, number: int, *, planned: bool) -> None:
    lost = WorkerLostSignal(
        task_id=f"t{number}", worker_id=f"w{number}", exit_code=0, planned=planned
    )
    await handle(env.client, "u1").signal(UserWorkerWorkflow.worker_lost, lost)


async def unmark(env: WorkflowEnvironment, number: int) -> None:
    unmarked = WorkerUnmarked(worker_id=f"w{number}", epoch=number, generation="g1", outage=True)
    await handle(env.client, "u1").signal(UserWorkerWorkflow.worker_unmarked, unmarked)


async def test_ends_that_somebody_asked_for_are_no_crashes_and_the_next_worker_comes_at_once(
    skipping: WorkflowEnvironment, fleet: FakeFleet
) -> None:
    """As when a node is stopped and started, or a host drained, again and again."""
    async with serving(skipping.client, fleet.activities()):
        await ensure_active(skipping.client, "u1")
        for number in range(1, OFTEN + 1):
            await lose(skipping, number, planned=True)
            await until_worker_serves(skipping, f"w{number + 1}")
        seen = await view_user(skipping)
    assert (seen.state, seen.crashes) == (WorkerState.ACTIVE, 0)
    assert [stop.crashed for stop in fleet.stops] == [False] * OFTEN


async def test_a_planned_end_that_an_order_noticed_before_its_report_is_no_crash(
    skipping: WorkflowEnvironment, fleet: FakeFleet
) -> None:
    async with serving(skipping.client, fleet.activities()):
        await ensure_active(skipping.client, "u1")
        for number in (1, 2, 3):
            fleet.health = [WorkerHealth(marked=False, running=False, unreported=True)]
            await ensure_active(skipping.client, "u1", mark_missing=True)
            await until_worker_serves(skipping, f"w{number + 1}")
            assert (await view_user(skipping)).crashes == 0
            for _ in range(2):  # reported twice
                await lose(skipping, number, planned=number < 3)
        seen = await view_user(skipping)
    assert (seen.state, seen.crashes) == (WorkerState.ACTIVE, 1)


async def test_planned_ends_whose_reports_come_late_and_in_a_later_run_are_no_crashes(
    skipping: WorkflowEnvironment, fleet: FakeFleet
) -> None:
    """Two `docker stop` in a row, each noticed by an order while the launcher's reports are held
    up."""
    async with serving(skipping.client, fleet.activities()):
        await ensure_active(skipping.client, "u1")
        for number in (1, 2):
            fleet.health = [WorkerHealth(marked=False, running=False, unreported=True)]
            await asyncio.gather(
                ensure_active(skipping.client, "u1", mark_missing=True),
                skipping.sleep(2),  # longer than the pause after the second end
            )
            await until_worker_serves(skipping, f"w{number + 1}")
        assert (await view_user(skipping)).crashes == 0
        before = (await handle(skipping.client, "u1").describe()).run_id
        await handle(skipping.client, "u1").signal(UserWorkerWorkflow.renew)

        async def is_renewed() -> bool:
            return (await handle(skipping.client, "u1").describe()).run_id != before

        await until(is_renewed)
        for number in (1, 2):
            await lose(skipping, number, planned=True)
        await ensure_active(skipping.client, "u1")
        assert (await view_user(skipping)).crashes == 0
        # Neither makes the next start wait: this is the first crash, after which there is no pause.
        await lose(skipping, 3, planned=False)
        await until_worker_serves(skipping, "w4")
        assert (await view_user(skipping)).crashes == 1


async def test_a_worker_that_was_found_gone_and_had_crashed_counts_towards_parking(
    skipping: WorkflowEnvironment, fleet: FakeFleet
) -> None:
    async with serving(skipping.client, fleet.activities()):
        await ensure_active(skipping.client, "u1")
        for number in range(1, MAX_CRASHES):
            fleet.health = [WorkerHealth(marked=False, running=False, unreported=True)]
            await asyncio.gather(
                ensure_active(skipping.client, "u1", mark_missing=True), skipping.sleep(2.0**number)
            )
            await until_worker_serves(skipping, f"w{number + 1}")
            await lose(skipping, number, planned=False)
        assert (await view_user(skipping)).crashes == MAX_CRASHES - 1
        await lose(skipping, MAX_CRASHES, planned=False)
        await until_state(skipping.client, "u1", WorkerState.PARKED)


async def test_a_worker_that_is_stopped_during_its_login_is_no_crash(
    skipping: WorkflowEnvironment, fleet: FakeFleet
) -> None:
    fleet.claim_script = [ClaimStatus.CONNECTING]
    fleet.hold_connect.clear()
    async with serving(skipping.client, fleet.activities()):
        start = ensure_active(skipping.client, "u1")

        async def stop_it() -> None:
            await fleet.connect_started.wait()
            await lose(skipping, 1, planned=True)
            await until(lambda: len(fleet.stops) == 1)
            fleet.gone.add("w1")

        active, _ = await asyncio.gather(start, stop_it())
        seen = await view_user(skipping)
    assert (active.worker.worker_id, seen.crashes) == ("w2", 0)


async def test_marks_that_expire_again_and_again_make_starts_wait_and_park_nobody(
    skipping: WorkflowEnvironment, fleet: FakeFleet
) -> None:
    async with serving(skipping.client, fleet.activities()):
        await ensure_active(skipping.client, "u1")
        for number in range(1, OFTEN + 1):
            fleet.health = [WorkerHealth(marked=False, running=True, generation="g1")]
            await unmark(skipping, number)
            # Longer than the pause, which grows; far shorter than the idle timeout.
            await skipping.sleep(40)
            await until_worker_serves(skipping, f"w{number + 1}")
        seen = await view_user(skipping)
    assert (seen.state, seen.crashes) == (WorkerState.ACTIVE, OFTEN)
    assert [stop.crashed for stop in fleet.stops] == [False] * OFTEN


async def test_a_worker_with_an_order_in_hand_is_not_stopped_before_its_lease_has_ended(
    skipping: WorkflowEnvironment, fleet: FakeFleet
) -> None:
    unmarked = WorkerHealth(marked=False, running=True, generation="g1", in_flight=True)
    fleet.health = [unmarked, WorkerHealth(marked=False, running=True, generation="g1")]
    async with serving(skipping.client, fleet.activities()):
        await ensure_active(skipping.client, "u1")
        await unmark(skipping, 1)
        await until(lambda: fleet.checks == 1)
        await ensure_active(skipping.client, "u1")
        assert not fleet.stops
        await unmark(skipping, 1)
        await until_worker_serves(skipping, "w2")


@pytest.mark.parametrize("own", [MAX_CRASHES - 1, MAX_CRASHES])
def test_only_own_crashes_park(own: int) -> None:
    state = UserWorkerState(user_id="u1", pool="p", settings=UserWorkerSettings()).opened(0.0)
    worker = WorkerRef(worker_id="w1", task_id="t1", epoch=1, claim_id="c1", pool="p")
    for number in range(2 * own):
        state = (
            state.claimed("c1", number)
            .connecting(1, number)
            .assigned(worker)
            .active(0.0, 0.0, number)
        )
        state = state.crashed("gone", number + 0.5, outage=number % 2 == 1).stopped()
    assert len(state.crashes) == 2 * own
    assert state.crashes_too_often == (own >= MAX_CRASHES)
    later = state.claimed("c1", 700.0).connecting(1, 700.0).assigned(worker).active(0.0, 0.0, 700.0)
    assert later.crashed("gone", 700.0, outage=True).outages == (700.0,)
