"""Failing launches slow down and stop a pool, without Temporal."""

from __future__ import annotations

from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from workflows.rollout.messages import Release
from workflows.worker_pool.state import (
    FAILURES_UNTIL_OPEN,
    MAX_BACKOFF_S,
    MAX_LAUNCHES_IN_FLIGHT,
    PROBE_INTERVAL_S,
    STARTING_COUNT_INTERVAL_S,
    PoolState,
)


@pytest.mark.parametrize("in_flight", [0, 1, 5])
def test_failing_launches_are_tried_one_at_a_time(in_flight: int) -> None:
    state = PoolState(wanted=9).failed("no room", 100.0, seen=0)
    assert state.launches_allowed(in_flight, 100.5) == 0
    assert state.launches_allowed(in_flight, 101.5) == (1 if in_flight == 0 else 0)


def test_the_backoff_doubles_up_to_its_cap_and_a_success_ends_it() -> None:
    state, pauses = PoolState(), []
    for _ in range(9):
        state = state.failed("no room", 0.0, seen=state.failing)
        pauses.append(state.not_before)
    assert pauses == [1, 2, 4, 8, 16, 32, MAX_BACKOFF_S, MAX_BACKOFF_S, MAX_BACKOFF_S]
    assert not state.circuit_open
    assert state.launched(Release()).launches_allowed(3, 0.0) == MAX_LAUNCHES_IN_FLIGHT - 3


def test_launches_that_fail_together_are_one_round() -> None:
    state = PoolState()
    for _ in range(100):
        state = state.failed("the orchestrator went away", 0.0, seen=0, never_ready=True)
    assert (state.failing, state.never_ready, state.failures) == (1, 1, 100)
    assert state.not_before == 1.0


def test_refilling_stops_when_no_worker_becomes_ready_and_is_probed_after_a_long_pause() -> None:
    state = PoolState()
    for number in range(FAILURES_UNTIL_OPEN):
        assert not state.circuit_open
        state = state.failed("hangs", float(number), seen=state.failing, never_ready=True)
    assert state.circuit_open
    assert state.launches_allowed(0, FAILURES_UNTIL_OPEN + MAX_BACKOFF_S) == 0
    probe = FAILURES_UNTIL_OPEN - 1 + PROBE_INTERVAL_S
    assert state.launches_allowed(0, probe) == 1
    again = state.failed("hangs", probe, seen=state.failing, never_ready=True)
    assert again.not_before == probe + PROBE_INTERVAL_S
    for closed in (again.launched(Release()), again.without_failures()):
        assert not closed.circuit_open
        assert closed.launches_allowed(0, probe) == MAX_LAUNCHES_IN_FLIGHT


@given(st.lists(st.booleans(), max_size=20))
def test_a_launcher_that_refuses_never_opens_the_circuit(unreachable: list[bool]) -> None:
    state = PoolState()
    for _ in unreachable:
        state = state.failed("no room", 0.0, seen=state.failing)
    assert not state.circuit_open
    assert state.not_before <= MAX_BACKOFF_S


@given(
    target=st.integers(0, 50),
    ready=st.integers(0, 50),
    starting=st.integers(0, 50),
    flying=st.integers(0, 50),
)
def test_what_is_launched_never_exceeds_what_is_wanted(
    target: int, ready: int, starting: int, flying: int
) -> None:
    gap = PoolState(wanted=target, ready=ready, starting=starting).gap(flying)
    if gap > 0:
        assert ready + starting + flying + gap == target


def test_a_pool_sleeps_until_something_can_change() -> None:
    rest = PoolState(wanted=1, ready=1)
    assert rest.seconds_until_count(100.0, in_flight=0, period=60.0) == 60.0
    assert replace(rest, until=130.0).seconds_until_count(100.0, in_flight=0, period=60.0) == 30.0
    assert (
        replace(rest, starting=1).seconds_until_count(100.0, in_flight=0, period=60.0)
        == STARTING_COUNT_INTERVAL_S
    )
    failing = replace(rest, ready=0).failed("no room", 100.0, seen=0)
    assert failing.seconds_until_count(100.0, in_flight=0, period=60.0) == 1.0
    assert failing.seconds_until_count(100.0, in_flight=1, period=60.0) == 60.0
    assert (
        replace(failing, draining=True).seconds_until_count(100.0, in_flight=0, period=60.0) == 60.0
    )
    # Nothing is missing any more, and so no launch ends the failures.
    filled = replace(failing, ready=1)
    assert filled.seconds_until_count(200.0, in_flight=0, period=60.0) == 60.0
    unsettled = replace(filled, unsettled=("token",), ready=0)
    assert unsettled.seconds_until_count(200.0, in_flight=0, period=60.0) == 0.1


def test_the_last_good_release_is_the_one_of_which_a_worker_became_ready() -> None:
    old, new = Release(version="1", image="w:1"), Release(version="2", image="w:2")
    state = PoolState(version="1", image="w:1").with_release(new, 1)
    assert state.good == old  # what it had, when nothing else is known
    assert state.failed("it ended", 0.0, seen=0, never_ready=True).good == old
    assert state.launched(new).good == new
    assert state.launched(new).with_release(old, 0).good == new
    assert PoolState().good is None
