"""After any events in any order the table holds, every state has a deadline, and a user has one
worker."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import asdict, replace

from hypothesis import given, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, rule

from worker_runtime.protocol.messages import WorkerEventKind
from workflows.entity import carried_state
from workflows.user_worker.events import EventEffect, apply_event
from workflows.user_worker.messages import (
    UserWorkerSettings,
    WorkerEventSignal,
    WorkerRef,
    WorkerState,
)
from workflows.user_worker.state import (
    ALLOWED,
    MAX_CHECKS_PER_TWO_IDLE_TIMEOUTS,
    IllegalTransition,
    UserWorkerState,
)

Change = Callable[[UserWorkerState], UserWorkerState]

durations = st.floats(min_value=0.0, max_value=5000.0)
events = st.builds(
    WorkerEventSignal,
    worker_id=st.sampled_from(["w1", "w2", "w3", "nobody's"]),
    epoch=st.integers(0, 4),
    sequence=st.integers(-1, 12),
    kind=st.sampled_from([*map(str, WorkerEventKind), "of a later release"]),
    at=st.floats(allow_nan=True, allow_infinity=True),
    detail=st.sampled_from(["", "LOGIN_REJECTED: wrong key", "x" * 300]),
)


def worker(epoch: int) -> WorkerRef:
    return WorkerRef(
        worker_id=f"w{epoch}",
        task_id=f"t{epoch}",
        epoch=epoch,
        claim_id=f"c{epoch}",
        pool="default",
    )


def fresh() -> UserWorkerState:
    return UserWorkerState(user_id="u1", pool="default", settings=UserWorkerSettings()).opened(
        1000.0
    )


class LifeOfAWorker(RuleBasedStateMachine):
    """Sends commands and events in any order, as a confused or hostile world would.

    What the table refuses must leave everything as it was; what it accepts must keep the
    invariants.
    """

    def __init__(self) -> None:
        super().__init__()
        self.state = fresh()
        self.now = 1000.0
        self.epoch = 0
        self.heard: list[WorkerEventSignal] = []
        #: Workers that got the user and have not been confirmed to have stopped.
        self.running: set[str] = set()

    def change(self, change: Change) -> bool:
        before = self.state
        try:
            self.state = change(before)
        except IllegalTransition:
            return False
        same = self.state.state == before.state and self.state.since == before.since
        assert same or self.state.state in ALLOWED[before.state]
        return True

    @rule(seconds=durations)
    def time_passes(self, seconds: float) -> None:
        self.now += seconds

    @rule()
    def a_claim_begins(self) -> None:
        if self.change(lambda state: state.claimed(f"c{self.epoch + 1}", self.now)):
            self.epoch += 1

    @rule(other=st.booleans())
    def a_claim_is_answered(self, other: bool) -> None:
        if self.state.state != WorkerState.CLAIMED:
            return
        assigned_worker = worker(self.epoch + 7 if other and self.state.worker else self.epoch)
        if self.change(lambda state: state.assigned(assigned_worker)):
            self.running.add(assigned_worker.worker_id)

    @rule(crashes=st.lists(durations, max_size=6))
    def a_claim_is_put_off(self, crashes: list[float]) -> None:
        times = [self.now - ago for ago in crashes]
        if self.change(lambda state: state.backs_off(times, self.now)):
            assert self.state.retry_at - self.now <= self.state.crash_backoff()

    @rule()
    def a_start_succeeds(self) -> None:
        """Starts a worker in the usual way, so that most of what is tried happens to a worker in
        service."""
        self.a_claim_begins()
        self.a_claim_is_answered(other=False)
        self.a_login_begins(1)
        self.a_login_succeeds()

    @rule(attempt=st.integers(1, 3))
    def a_login_begins(self, attempt: int) -> None:
        self.change(lambda state: state.connecting(attempt, self.now))

    @rule()
    def a_login_succeeds(self) -> None:
        self.change(lambda state: state.active(self.now, self.now, self.now))

    @rule(backoff=durations)
    def something_fails(self, backoff: float) -> None:
        self.change(lambda state: state.failed("why", self.now, backoff=backoff))

    @rule(event=events, repeats=st.integers(1, 3))
    def an_event_comes(self, event: WorkerEventSignal, repeats: int) -> None:
        self.heard.append(event)
        for _ in range(repeats):
            self.take_event(event)

    @rule(data=st.data())
    def an_old_event_comes_again(self, data: st.DataObject) -> None:
        if self.heard:
            self.take_event(data.draw(st.sampled_from(self.heard)))

    def take_event(self, event: WorkerEventSignal) -> None:
        before, owner = self.state, self.state.worker
        result = apply_event(before, event, self.now)
        news = owner is not None and (owner.worker_id, owner.epoch) == (
            event.worker_id,
            event.epoch,
        )
        if not news or event.sequence <= before.sequence:
            assert result.state is before
            assert result == EventEffect(state=before)
        assert result.state.worker == owner
        same = result.state.state == before.state
        assert same or result.state.state in ALLOWED[before.state]
        self.state = result.state

    @rule()
    def the_worker_dies(self) -> None:
        self.change(lambda state: state.crashed("exit -9", self.now))

    @rule()
    def the_worker_gives_up(self) -> None:
        self.change(lambda state: state.gave_up("LOGIN_REJECTED", self.now))

    @rule()
    def the_end_is_confirmed(self) -> None:
        if self.change(lambda state: state.stopped()):
            self.running.clear()

    @rule()
    def nobody_used_it(self) -> None:
        self.change(lambda state: state.idle(self.now))

    @rule(ago=durations)
    def it_was_used(self, ago: float) -> None:
        if self.state.serving:
            self.state = self.state.used(self.now - ago, self.now)

    @rule()
    def the_fresh_session_answers(self) -> None:
        if self.state.needs_credentials:
            self.change(lambda state: state.reconnected(self.now))

    @rule()
    def it_drains(self) -> None:
        self.change(lambda state: state.drains("requested", self.now))

    @rule()
    def it_is_parked(self) -> None:
        self.change(lambda state: state.parked(self.now))

    @rule()
    def somebody_resumes(self) -> None:
        self.change(lambda state: state.resumed(self.now))

    @rule()
    def orders_wait(self) -> None:
        self.change(lambda state: state.reopened(self.now))

    @rule()
    def it_ends(self) -> None:
        self.change(lambda state: state.terminated(self.now))

    @rule()
    def a_new_run_begins(self) -> None:
        assert carried_state(UserWorkerState, asdict(self.state)) == self.state

    @invariant()
    def only_the_end_has_no_deadline(self) -> None:
        assert (self.state.deadline is None) == (self.state.state == WorkerState.TERMINATED)

    @invariant()
    def there_are_never_two_workers(self) -> None:
        assert len(self.running) <= 1

    @invariant()
    def the_end_comes_without_a_worker(self) -> None:
        assert not (self.state.ended and (self.state.worker or self.running))

    @invariant()
    def only_a_worker_in_service_waits_for_credentials(self) -> None:
        assert not self.state.serving or self.state.worker is not None
        if self.state.needs_credentials and self.state.serving:
            assert self.state.state == WorkerState.RECONNECTING

    @invariant()
    def a_person_can_read_it(self) -> None:
        assert self.state.view().next_step


LifeOfAWorker.TestCase.settings = settings(max_examples=150, stateful_step_count=40, deadline=None)
TestNoSequenceBreaksALife = LifeOfAWorker.TestCase


served = st.lists(events, max_size=8).map(
    lambda history: _fed(
        fresh()
        .claimed("c2", 1001.0)
        .assigned(worker(2))
        .connecting(1, 1002.0)
        .active(1.0, 2.0, 1003.0),
        history,
    )
)


def _fed(state: UserWorkerState, history: list[WorkerEventSignal]) -> UserWorkerState:
    for number, event in enumerate(history):
        state = apply_event(state, event, 2000.0 + number).state
    return state


@given(state=served, event=events, epoch=st.integers(-3, 1))
def test_an_event_of_an_older_epoch_changes_nothing(
    state: UserWorkerState, event: WorkerEventSignal, epoch: int
) -> None:
    assert apply_event(state, replace(event, epoch=epoch, worker_id="w2"), 9000.0).state is state


@given(state=served, event=events)
def test_the_second_copy_of_an_event_changes_nothing(
    state: UserWorkerState, event: WorkerEventSignal
) -> None:
    once = apply_event(state, event, 9000.0).state
    assert apply_event(once, event, 9001.0) == EventEffect(state=once)


@given(history=st.lists(events, max_size=12))
def test_events_alone_never_end_a_worker_or_give_it_away(history: list[WorkerEventSignal]) -> None:
    begun = (
        fresh()
        .claimed("c2", 1001.0)
        .assigned(worker(2))
        .connecting(1, 1002.0)
        .active(1.0, 2.0, 1003.0)
    )
    state = _fed(begun, history)
    assert state.serving
    assert state.worker == worker(2)
    assert state.deadline is not None


@given(gaps=st.lists(st.floats(0.0, 1800.0), min_size=1, max_size=60))
def test_no_pattern_of_use_makes_more_than_three_checks_within_two_idle_timeouts(
    gaps: list[float],
) -> None:
    """`gaps`: how long before each check the worker was last used."""
    state = (
        fresh()
        .claimed("c1", 1000.0)
        .assigned(worker(1))
        .connecting(1, 1000.0)
        .active(1.0, 2.0, 1000.0)
    )
    checks = []
    for gap in gaps:
        assert state.deadline is not None
        checks.append(now := state.deadline)
        state = state.used(now - gap, now)
    window = 2 * state.settings.idle_timeout
    assert all(
        later - earlier >= window - 1e-6
        for earlier, later in zip(checks, checks[MAX_CHECKS_PER_TWO_IDLE_TIMEOUTS:], strict=False)
    )
