"""When a session counts as frozen, by a clock that the test moves."""

from __future__ import annotations

import time

import pytest

from worker_runtime.process.clock import SECOND
from worker_runtime.process.shared_state import SharedState
from worker_runtime.process.supervisor import PulseWatch


class PulseClock:
    def __init__(self) -> None:
        self.now = 1000 * SECOND

    def __call__(self) -> int:
        return self.now


def watch(timeout: float = 10.0) -> tuple[PulseClock, SharedState, PulseWatch]:
    clock, shared_state = PulseClock(), SharedState()
    shared_state.session_number, shared_state.pulse = 1, clock.now
    return clock, shared_state, PulseWatch(shared_state, timeout, clock)


def found_frozen(clock: PulseClock, watch: PulseWatch, seconds: float, step: float = 1.0) -> float | None:
    """Checks every `step` seconds; returns after how many the session was frozen, None: not in `seconds`."""
    began = clock.now
    while clock.now < began + seconds * SECOND:
        clock.now += int(step * SECOND)
        if watch.is_frozen():
            return (clock.now - began) / SECOND
    return None


def test_a_session_that_pulses_is_alive() -> None:
    clock, shared_state, pulse = watch()
    for _ in range(100):
        clock.now += SECOND
        shared_state.pulse = clock.now
        assert not pulse.is_frozen()


def test_a_session_without_a_pulse_is_frozen_after_the_timeout_and_not_before() -> None:
    clock, _, pulse = watch()
    assert found_frozen(clock, pulse, 60.0, step=0.5) == 10.0


def test_the_time_counts_from_the_pulse_and_not_from_the_check_that_found_it() -> None:
    clock, shared_state, pulse = watch()
    assert not pulse.is_frozen()
    shared_state.pulse = clock.now + SECOND // 10  # right after the check
    assert found_frozen(clock, pulse, 60.0, step=0.1) == pytest.approx(10.1, abs=0.15)
    assert pulse.left() > 9.0


def test_a_broker_call_within_its_limit_is_no_missing_pulse() -> None:
    clock, shared_state, pulse = watch()
    shared_state.busy_until = clock.now + 60 * SECOND
    assert found_frozen(clock, pulse, 60.0) is None
    assert found_frozen(clock, pulse, 60.0) == 10.0


def test_a_pause_of_the_whole_container_is_nobodys_fault() -> None:
    clock, _, pulse = watch()
    clock.now += 3600 * SECOND
    assert not pulse.is_frozen()
    assert found_frozen(clock, pulse, 60.0) == 8.0


def test_each_time_is_told_once_and_a_fresh_session_starts_anew() -> None:
    clock, shared_state, pulse = watch()
    assert found_frozen(clock, pulse, 60.0) == 10.0
    assert not pulse.is_frozen()
    shared_state.session_number, shared_state.pulse = 2, clock.now
    assert found_frozen(clock, pulse, 9.0) is None


def test_a_call_says_how_long_it_may_take_and_pulses_when_it_is_over() -> None:
    shared_state, before = SharedState(), time.monotonic_ns()
    with shared_state.busy(500.0):
        assert 400 * SECOND < shared_state.busy_until - time.monotonic_ns() <= 500 * SECOND
    assert shared_state.busy_until == 0
    assert before <= shared_state.pulse <= time.monotonic_ns()
