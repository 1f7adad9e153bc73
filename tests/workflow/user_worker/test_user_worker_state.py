"""The life of a worker as plain data, without Temporal."""

from __future__ import annotations

import json
from dataclasses import asdict

import pytest
from hypothesis import given
from hypothesis import strategies as st

from workflows.entity import carried_state
from workflows.user_worker.messages import (
    CRASH_WINDOW_S,
    UserWorkerSettings,
    WorkerRef,
    WorkerState,
)
from workflows.user_worker.state import (
    ALLOWED,
    MAX_CRASHES,
    NEXT_STEP,
    IllegalTransition,
    UserWorkerState,
)

WORKER = WorkerRef(worker_id="w1", task_id="t1", epoch=1, claim_id="c1", pool="default")


def fresh() -> UserWorkerState:
    return UserWorkerState(user_id="u1", pool="default", settings=UserWorkerSettings()).opened(
        100.0
    )


def active() -> UserWorkerState:
    return (
        fresh()
        .claimed("c1", 101.0)
        .assigned(WORKER)
        .connecting(1, 102.0)
        .active(101.5, 103.0, 104.0)
    )


def test_a_worker_goes_from_the_pool_to_active() -> None:
    state = active()
    assert state.serving
    assert state.worker == WORKER
    assert (state.claimed_at, state.connected_at, state.attempts) == (101.5, 103.0, 1)


@pytest.mark.parametrize("state", [s for s in WorkerState if s != WorkerState.TERMINATED])
def test_every_state_but_the_last_has_a_deadline(state: WorkerState) -> None:
    deadline = fresh().deadline_of(state, 500.0)
    assert deadline is not None
    assert deadline > 500.0


@pytest.mark.parametrize("state", list(WorkerState))
def test_every_state_says_what_comes_next(state: WorkerState) -> None:
    assert NEXT_STEP[state]
    assert state in ALLOWED


def test_every_state_can_reach_the_end() -> None:
    for start in WorkerState:
        seen, ways = {start}, [start]
        while ways:
            ways = [after for state in ways for after in ALLOWED[state] if after not in seen]
            seen.update(ways)
        assert WorkerState.TERMINATED in seen


def test_a_claim_is_refused_while_another_worker_may_run() -> None:
    crashed = active().crashed("exit -9", 200.0)
    with pytest.raises(IllegalTransition, match="one-owner"):
        crashed.claimed("c2", 201.0)
    assert crashed.stopped().claimed("c2", 201.0).claim_id == "c2"


def test_the_run_may_not_end_while_its_worker_may_run() -> None:
    draining = active().drains("requested", 200.0)
    with pytest.raises(IllegalTransition, match="one-owner"):
        draining.terminated(201.0)
    assert draining.stopped().terminated(201.0).ended


def test_another_claims_worker_is_refused() -> None:
    with pytest.raises(IllegalTransition, match="one-owner"):
        active().assigned(
            WorkerRef(worker_id="w2", task_id="t2", epoch=2, claim_id="c2", pool="default")
        )


def test_active_needs_a_worker() -> None:
    with pytest.raises(IllegalTransition, match="without a worker"):
        fresh().claimed("c1", 101.0).connecting(1, 102.0).active(101.0, 102.0, 103.0)


def test_a_step_that_the_table_does_not_know_is_refused() -> None:
    with pytest.raises(IllegalTransition, match="PoolIdle"):
        fresh().parked(101.0)


def test_the_idle_deadline_counts_from_the_last_use() -> None:
    assert active().deadline == 104.0 + 1800.0
    assert active().used(1000.0, 1804.0).deadline == 1000.0 + 1800.0


def test_crashes_are_replaced_at_once_then_after_one_two_four_seconds() -> None:
    state, pauses = active(), []
    for number in range(MAX_CRASHES):
        state = state.crashed("exit -9", 200.0 + number)
        pauses.append(state.crash_backoff())
        again = WorkerRef(worker_id="w", task_id="t", epoch=1, claim_id="c", pool="default")
        if not state.crashes_too_often:
            state = state.stopped().claimed("c", 200.0).assigned(again).connecting(1, 200.0)
            state = state.active(200.0, 200.0, 200.0)
    assert pauses == [0.0, 1.0, 2.0, 4.0, 8.0]
    assert state.parked(300.0).state == WorkerState.PARKED


def test_old_crashes_are_forgotten() -> None:
    once = active().crashed("exit -9", 200.0)
    again = once.stopped().claimed("c1", 201.0).assigned(WORKER).connecting(1, 202.0)
    twice = again.active(1.0, 2.0, 203.0).crashed("exit -9", 200.0 + CRASH_WINDOW_S)
    assert len(twice.crashes) == 1


def test_a_resumed_user_starts_without_crashes() -> None:
    state = active()
    for number in range(MAX_CRASHES):
        state = state.crashed("exit -9", 200.0 + number)
    resumed = state.parked(300.0).resumed(301.0)
    assert (resumed.state, resumed.crashes) == (WorkerState.POOL_IDLE, ())
    # Or a new run would count the same crashes again.
    assert resumed.deadline == 301.0 + CRASH_WINDOW_S


@given(
    reason=st.text(),
    attempts=st.integers(0, 9),
    at=st.floats(0, 4e9),
    crashes=st.lists(st.floats(0, 4e9), max_size=5),
    state=st.sampled_from(list(WorkerState)),
    worker=st.none() | st.just(WORKER),
)
def test_what_is_carried_into_a_new_run_comes_out_the_same(
    reason: str,
    attempts: int,
    at: float,
    crashes: list[float],
    state: WorkerState,
    worker: WorkerRef | None,
) -> None:
    settings = UserWorkerSettings(idle_timeout=77.0)
    before = UserWorkerState(
        user_id="u1",
        pool="default",
        settings=settings,
        state=state,
        since=at,
        deadline=at,
        worker=worker,
        attempts=attempts,
        crashes=tuple(crashes),
        reason=reason,
    )
    carried = json.loads(json.dumps({**asdict(before), "a_field_of_a_later_release": 1}))
    assert carried_state(UserWorkerState, carried) == before


@given(steps=st.lists(st.sampled_from(list(WorkerState)), max_size=30))
def test_only_the_table_decides_and_ends_stay_ends(steps: list[WorkerState]) -> None:
    """Any sequence of wishes: what is not in the table is refused, and nothing follows
    Terminated."""
    state = fresh()
    for next_state in steps:
        before = state
        try:
            state = state._to(next_state, state.since + 1.0)
        except IllegalTransition:
            assert next_state not in ALLOWED[before.state]
            assert state is before
        else:
            assert next_state in ALLOWED[before.state]
            assert (state.deadline is None) == (next_state == WorkerState.TERMINATED)
        if before.ended:
            assert state.ended
