"""A session without a pulse counts as frozen, by a clock that the test moves."""

from __future__ import annotations

import math
import subprocess
import time

import pytest

from worker_runtime.process import kernel
from worker_runtime.process.clock import NS_PER_S
from worker_runtime.process.shared_state import SharedState
from worker_runtime.process.supervisor import PulseWatch


class PulseClock:
    def __init__(self) -> None:
        self.now = 1000 * NS_PER_S

    def __call__(self) -> int:
        return self.now


def watch(
    timeout: float = 10.0, host_wait: float = 0.0
) -> tuple[PulseClock, SharedState, PulseWatch]:
    clock, shared_state = PulseClock(), SharedState()
    shared_state.session_number, shared_state.pulse = 1, clock.now

    def waited(pid: int) -> float:
        """Returns `host_wait`: for how many seconds of each the session waits for a CPU; infinite:
        for a disk."""
        return math.inf if math.isinf(host_wait) else clock.now / NS_PER_S * host_wait

    return clock, shared_state, PulseWatch(shared_state, timeout, clock, waited)


def found_frozen(
    clock: PulseClock, watch: PulseWatch, seconds: float, step: float = 1.0
) -> float | None:
    """Checks every `step` seconds; returns after how many the session was frozen, or None if it was
    not within `seconds`."""
    began = clock.now
    while clock.now < began + seconds * NS_PER_S:
        clock.now += int(step * NS_PER_S)
        if watch.is_frozen():
            return (clock.now - began) / NS_PER_S
    return None


def test_a_session_that_pulses_is_alive() -> None:
    clock, shared_state, pulse = watch()
    for _ in range(100):
        clock.now += NS_PER_S
        shared_state.pulse = clock.now
        assert not pulse.is_frozen()


def test_a_session_without_a_pulse_is_frozen_after_the_timeout_and_not_before() -> None:
    clock, _, pulse = watch()
    assert found_frozen(clock, pulse, 60.0, step=0.5) == 10.0


def test_the_time_counts_from_the_pulse_and_not_from_the_check_that_found_it() -> None:
    clock, shared_state, pulse = watch()
    assert not pulse.is_frozen()
    shared_state.pulse = clock.now + NS_PER_S // 10  # right after the check
    assert found_frozen(clock, pulse, 60.0, step=0.1) == pytest.approx(10.1, abs=0.15)
    assert pulse.seconds_until_frozen() > 9.0


def test_a_broker_call_within_its_limit_is_not_a_missing_pulse() -> None:
    clock, shared_state, pulse = watch()
    shared_state.busy_until = clock.now + 60 * NS_PER_S
    assert found_frozen(clock, pulse, 60.0) is None
    assert found_frozen(clock, pulse, 60.0) == 10.0


@pytest.mark.parametrize("pause", [1.0, 2.9, 3.1, 6.0, 3600.0])
@pytest.mark.parametrize("since", [0.0, 0.9])
def test_a_host_that_was_frozen_is_not_the_sessions_fault(pause: float, since: float) -> None:
    """Whatever the last check saw, the session has a second of its own before it counts as
    frozen."""
    clock, shared_state, pulse = watch(timeout=3.0)
    clock.now += int(since * NS_PER_S)
    assert not pulse.is_frozen()
    clock.now += int(pause * NS_PER_S)
    assert not pulse.is_frozen()
    clock.now += NS_PER_S - 1
    assert not pulse.is_frozen()
    shared_state.pulse = clock.now
    assert found_frozen(clock, pulse, 60.0) == 3.0


def test_a_session_that_stays_frozen_after_a_stall_of_the_host_is_found() -> None:
    clock, _, pulse = watch(timeout=3.0)
    clock.now += 3600 * NS_PER_S
    assert not pulse.is_frozen()
    assert found_frozen(clock, pulse, 60.0) == 3.0


@pytest.mark.parametrize(
    ("share", "after"), [(0.0, 3.0), (0.5, 5.0), (1.0, 10.0), (math.inf, 10.0)]
)
def test_what_a_session_waits_for_its_host_does_not_count_but_not_for_ever(
    share: float, after: float
) -> None:
    clock, _, pulse = watch(timeout=3.0, host_wait=share)
    assert found_frozen(clock, pulse, 60.0) == pytest.approx(after, abs=1.0)


def test_the_kernel_says_for_how_long_a_process_waited_for_a_cpu() -> None:
    # A process of one thread: what a thread has waited is no longer counted once it has ended.
    with subprocess.Popen(["sleep", "60"]) as process:  # noqa: S607
        before = kernel.host_wait(process.pid)
        assert 0.0 <= before < math.inf
        assert before <= kernel.host_wait(process.pid) < math.inf
        process.kill()
    assert kernel.host_wait(0) == 0.0


def test_each_missing_pulse_is_reported_once_and_a_fresh_session_starts_anew() -> None:
    clock, shared_state, pulse = watch()
    assert found_frozen(clock, pulse, 60.0) == 10.0
    assert not pulse.is_frozen()
    shared_state.session_number, shared_state.pulse = 2, clock.now
    assert found_frozen(clock, pulse, 9.0) is None


def test_a_call_says_how_long_it_may_take_and_pulses_when_it_is_over() -> None:
    shared_state, before = SharedState(), time.monotonic_ns()
    with shared_state.busy(500.0):
        assert 400 * NS_PER_S < shared_state.busy_until - time.monotonic_ns() <= 500 * NS_PER_S
    assert shared_state.busy_until == 0
    assert before <= shared_state.pulse <= time.monotonic_ns()


def test_nested_and_concurrent_calls_keep_their_own_limits() -> None:
    shared_state = SharedState()
    with shared_state.busy(500.0):
        outer = shared_state.busy_until
        with shared_state.busy(1.0):
            assert shared_state.busy_until == outer
        assert shared_state.busy_until == outer
    assert shared_state.busy_until == 0
