"""A rollout replaces the worker of an active user at a quiet moment, and no order is lost by it."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st
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
    MoveWhenQuiet,
    ShutdownRequest,
    UserWorkerSettings,
    UserWorkerView,
    WorkerState,
)
from workflows.user_worker.state import MIN_MOVE_CHECK_INTERVAL_S, UserWorkerState
from workflows.user_worker.workflow import MOVE_REASON, UserWorkerWorkflow


async def ask(
    env: WorkflowEnvironment, *, quiet: float, deadline: float, worker_id: str = "w1"
) -> float:
    """Asks the user's worker to move `deadline` seconds from now at the latest; returns the
    time."""
    now = (await env.get_current_time()).timestamp()
    message = MoveWhenQuiet(worker_id=worker_id, version="2", deadline=now + deadline, quiet=quiet)
    await handle(env.client, "u").signal(UserWorkerWorkflow.move_when_quiet, message)
    return now


async def moved(env: WorkflowEnvironment, fleet: FakeFleet) -> UserWorkerView:
    """Waits until the second worker serves. It is in use: the jumping clock must not idle it."""
    before = fleet.last_use
    fleet.last_use = lambda now: now if len(fleet.claims) > 1 else before(now)

    async def second() -> bool:
        view = await handle(env.client, "u").query(UserWorkerWorkflow.view)
        return (
            view.state == WorkerState.ACTIVE and view.worker is not None and view.worker.epoch == 2
        )

    async with skipped(env):
        await until(second)
    return await handle(env.client, "u").query(UserWorkerWorkflow.view)


async def test_an_idle_worker_is_replaced_and_its_user_stays_connected(
    skipping: WorkflowEnvironment, fleet: FakeFleet
) -> None:
    async with serving(skipping.client, fleet.activities()):
        await ensure_active(skipping.client, "u")
        began = await ask(skipping, quiet=60.0, deadline=3600.0)
        view = await moved(skipping, fleet)
    assert view.since - began < 120
    assert [stop.reason for stop in fleet.stops] == [MOVE_REASON]
    assert fleet.stops[0].grace > 0, "the order in hand is finished"
    told = [(change.before, change.after, change.reason) for change in fleet.timeline]
    assert ("Active", "Draining", MOVE_REASON) in told
    assert ("Draining", "PoolIdle", MOVE_REASON) in told


async def test_a_worker_in_use_moves_when_the_user_pauses(
    skipping: WorkflowEnvironment, fleet: FakeFleet
) -> None:
    async with serving(skipping.client, fleet.activities()):
        await ensure_active(skipping.client, "u")
        began = await ask(skipping, quiet=60.0, deadline=7200.0)
        checks: list[float] = []  # at the first worker

        def last_use(now: float) -> float:
            """Orders come every few seconds for ten minutes, and then none."""
            checks.append(now)
            return min(now - 1.0, began + 600.0)

        fleet.last_use = last_use
        view = await moved(skipping, fleet)
    assert began + 660 <= view.since < began + 900
    assert len(checks) <= (view.since - began) / 60 + 2, "at most a check a minute"


async def test_at_the_deadline_it_moves_though_it_is_in_use(
    skipping: WorkflowEnvironment, fleet: FakeFleet
) -> None:
    fleet.last_use = lambda now: now - 1.0
    async with serving(skipping.client, fleet.activities()):
        await ensure_active(skipping.client, "u")
        began = await ask(skipping, quiet=60.0, deadline=1000.0)
        view = await moved(skipping, fleet)
    assert began + 1000 <= view.since < began + 1060


async def test_orders_that_come_while_it_moves_get_the_next_worker(
    skipping: WorkflowEnvironment, fleet: FakeFleet
) -> None:
    fleet.hold_stop.clear()
    async with serving(skipping.client, fleet.activities()):
        await ensure_active(skipping.client, "u")
        await ask(skipping, quiet=5.0, deadline=3600.0)
        async with skipped(skipping):
            await until_state(skipping.client, "u", WorkerState.DRAINING)
        fleet.waiting_orders = 2
        fleet.hold_stop.set()
        view = await moved(skipping, fleet)
        again = await ensure_active(skipping.client, "u")
    assert view.worker is not None
    assert again.worker.worker_id == view.worker.worker_id == "w2"
    assert len(fleet.stops) == 1


async def test_a_user_who_is_shut_down_during_a_move_gets_no_other_worker(
    skipping: WorkflowEnvironment, fleet: FakeFleet
) -> None:
    """He was disabled, for example."""
    fleet.hold_stop.clear()
    async with serving(skipping.client, fleet.activities()):
        await ensure_active(skipping.client, "u")
        await ask(skipping, quiet=5.0, deadline=3600.0)
        async with skipped(skipping):
            await until_state(skipping.client, "u", WorkerState.DRAINING)
        request = ShutdownRequest(reason="disabled")
        await handle(skipping.client, "u").signal(UserWorkerWorkflow.shutdown, request)
        fleet.hold_stop.set()
        await finished(skipping, "u")
    assert (len(fleet.claims), len(fleet.stops)) == (1, 1)


async def test_who_asks_for_another_worker_than_the_present_one_is_not_heard(
    skipping: WorkflowEnvironment, fleet: FakeFleet
) -> None:
    async with serving(skipping.client, fleet.activities()):
        await ensure_active(skipping.client, "u")
        await ask(skipping, quiet=5.0, deadline=10.0, worker_id="w0")
        await skipping.sleep(300)
        view = await handle(skipping.client, "u").query(UserWorkerWorkflow.view)
    assert view.worker is not None
    assert (view.worker.worker_id, fleet.stops) == ("w1", [])


@given(
    quiet=st.floats(0, 3600),
    by=st.floats(-100, 10_000),
    used=st.floats(-5000, 0),
    steps=st.lists(st.floats(0, 600), max_size=20),
)
def test_the_moment_to_look_is_never_past_the_deadline_and_never_at_once_again(
    quiet: float, by: float, used: float, steps: list[float]
) -> None:
    settings, now = UserWorkerSettings(), 10_000.0
    state = UserWorkerState(user_id="u", pool="p", settings=settings, last_activity=now + used)
    state = state.to_move(quiet, now + by, now)
    assert now <= state.move_at <= max(now + by, now)
    for step in steps:
        now = max(state.move_at, now)
        state = state.move_later(now + step, now)
        assert state.move_at >= min(now + MIN_MOVE_CHECK_INTERVAL_S, max(state.move_by, now))
        assert state.move_at <= max(state.move_by, now)
