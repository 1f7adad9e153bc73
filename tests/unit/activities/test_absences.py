"""The watcher signals workers whose mark is missing, and above all no others."""

from __future__ import annotations

import itertools
from dataclasses import dataclass, field

from hypothesis import given
from hypothesis import strategies as st

from activities.events.missing_marks import (
    MAX_READ_GAP_S,
    SIGNAL_RETRY_INTERVAL_S,
    MissingMarkTracker,
)
from activities.maintenance.anomalies import MAX_ANOMALIES_WITHOUT_OUTAGE, MIN_OUTAGE_SHARE
from infra.database.workers.sessions import WorkerInService

CONFIRM, SETTLE, PERIOD = 5.0, 30.0, 2.0
#: While many are missing.
HOLD = SETTLE / 3


def worker(number: int, epoch: int = 1) -> WorkerInService:
    return WorkerInService(f"c{number}-{epoch}", f"u{number}", f"w{number}-{epoch}", epoch)


@dataclass
class ScriptedWatcher:
    """Checks, every PERIOD, workers whose marks a test takes away and gives back."""

    workers: list[WorkerInService]
    absences: MissingMarkTracker = field(
        default_factory=lambda: MissingMarkTracker(confirm=CONFIRM, settle=SETTLE)
    )
    gone: set[WorkerInService] = field(default_factory=set)
    generation: str = "g1"
    now: float = 1_000.0
    signalled: list[tuple[float, WorkerInService]] = field(default_factory=list)

    def check(self) -> list[WorkerInService]:
        marks = {
            watched: None if watched in self.gone else watched.mark for watched in self.workers
        }
        due = self.absences.update(self.now, self.generation, marks)
        for watched in due:
            self.absences.note_signalled(self.now, watched)
            self.signalled.append((self.now, watched))
        return due

    def go(self, seconds: float) -> list[WorkerInService]:
        """Checks for `seconds`, as the watcher does; returns the workers that it signalled."""
        before, end = len(self.signalled), self.now + seconds
        while self.now < end:
            self.check()
            self.now += self.absences.seconds_until_read(self.now, PERIOD)
        return [watched for _, watched in self.signalled[before:]]


def settled(count: int = 20) -> ScriptedWatcher:
    """Returns a watcher that has been watching healthy workers for a while."""
    watch = ScriptedWatcher([worker(number) for number in range(count)])
    assert watch.go(SETTLE + PERIOD) == []
    return watch


def test_a_worker_without_mark_is_signalled_when_its_absence_is_confirmed() -> None:
    watch = settled()
    lost = watch.workers[3]
    watch.gone = {lost}
    began = watch.now
    assert watch.go(20.0) == [lost]
    assert CONFIRM <= watch.signalled[0][0] - began <= CONFIRM + PERIOD


def test_a_mark_that_is_back_in_time_is_forgotten() -> None:
    watch = settled()
    watch.gone = {watch.workers[3]}
    watch.go(CONFIRM - 1)
    watch.gone = set()
    watch.check()
    watch.gone = {watch.workers[3]}
    assert watch.go(CONFIRM - 1) == []


def test_a_mark_of_another_worker_is_as_good_as_none() -> None:
    watch = settled()
    old, new = worker(3), worker(3, epoch=2)
    watch.workers[3] = new
    marks: dict[WorkerInService, bytes | None] = {
        watched: watched.mark for watched in watch.workers
    }
    marks[new] = old.mark
    assert watch.absences.update(watch.now, "g1", marks) == []
    assert watch.absences.update(watch.now + CONFIRM, "g1", marks) == [new]


def test_a_worker_that_was_replaced_meanwhile_is_not_signalled() -> None:
    watch = settled()
    watch.gone = {watch.workers[3]}
    watch.go(CONFIRM - 1)
    watch.workers[3] = worker(3, epoch=2)
    watch.gone = {watch.workers[3]}  # it has just been assigned: its own time counts
    assert watch.go(CONFIRM - 1) == []


def test_an_emptied_valkey_gets_nobody_signalled_before_the_workers_could_renew() -> None:
    watch = settled()
    watch.generation, watch.gone = "g2", {watch.workers[0]}
    assert watch.go(SETTLE - 1) == []
    assert watch.go(PERIOD * 2) == [watch.workers[0]]


def test_a_generation_that_changes_between_two_checks_starts_all_clocks_anew() -> None:
    watch = settled()
    watch.gone = {watch.workers[0]}
    watch.go(CONFIRM - 1)
    watch.generation = "g2"
    watch.check()
    watch.gone = set()
    assert watch.go(SETTLE * 2) == []


def test_a_valkey_out_of_reach_gets_nobody_signalled_when_it_is_back() -> None:
    watch = settled()
    watch.gone = {watch.workers[0]}
    watch.check()
    watch.absences.reset()
    watch.now += 40.0
    assert watch.go(SETTLE - 1) == []


def test_a_watcher_that_slept_starts_anew() -> None:
    watch = settled()
    watch.gone = {watch.workers[0]}
    watch.check()
    watch.now += MAX_READ_GAP_S + 1
    assert watch.go(SETTLE - 1) == []


def test_many_missing_ones_are_waited_for_longer_and_then_signalled_however_many_they_are() -> None:
    for count in (5, 30, 300):
        watch = settled(count)
        watch.gone = set(watch.workers)
        began = watch.now
        assert watch.go(HOLD - 0.1) == []
        assert watch.absences.many
        assert set(watch.go(PERIOD)) == set(watch.workers)
        assert all(HOLD <= at - began <= HOLD + PERIOD for at, _ in watch.signalled)


def test_when_most_of_many_are_back_the_others_get_time_to_come_back_too() -> None:
    watch = settled(20)
    watch.gone = set(watch.workers[:10])
    watch.go(HOLD - 1)
    watch.gone = set(watch.workers[:1])
    assert watch.go(HOLD - 1) == []
    assert watch.go(PERIOD * 3) == [watch.workers[0]]


def test_another_server_process_starts_all_clocks_anew() -> None:
    """It may be an older copy, whose marks run out before their workers' leases."""
    watch = settled()
    watch.gone = {watch.workers[0]}
    watch.go(CONFIRM - 1)
    watch.generation = "g1 another-server"
    assert watch.go(SETTLE - 1) == []


def test_up_to_three_are_signalled_however_few_there_are() -> None:
    watch = settled(3)
    watch.gone = set(watch.workers)
    assert set(watch.go(20.0)) == set(watch.workers)
    assert len(watch.signalled) == 3


def test_one_that_stays_unmarked_is_signalled_again_but_not_at_every_check() -> None:
    watch = settled()
    watch.gone = {watch.workers[0]}
    watch.go(SIGNAL_RETRY_INTERVAL_S * 2 + CONFIRM + PERIOD * 2)
    times = [at for at, _ in watch.signalled]
    assert len(times) == 3
    assert all(
        later - earlier >= SIGNAL_RETRY_INTERVAL_S for earlier, later in itertools.pairwise(times)
    )


def test_one_without_a_workflow_is_left_alone_and_does_not_count() -> None:
    watch = settled(10)
    stale = watch.workers[:3]
    watch.gone = set(stale)
    watch.go(CONFIRM + PERIOD)
    for watched in stale:
        watch.absences.note_without_workflow(watched)
    watch.gone |= {watch.workers[5]}
    assert watch.go(SIGNAL_RETRY_INTERVAL_S * 3)[0] == watch.workers[5]
    assert {
        watched for at, watched in watch.signalled if at > watch.now - SIGNAL_RETRY_INTERVAL_S * 2
    } == {watch.workers[5]}


def test_one_without_owner_key_gets_time_to_renew_after_that_is_back() -> None:
    watch = settled()
    watch.gone = {watch.workers[0]}
    watch.go(CONFIRM - 1)
    watch.absences.note_restored(watch.now, [watch.workers[0]])
    assert watch.go(SETTLE) == []
    assert watch.go(CONFIRM + PERIOD) == [watch.workers[0]]


def test_a_telling_that_failed_is_tried_at_the_next_check() -> None:
    watch = settled()
    watch.gone = {watch.workers[0]}
    watch.go(CONFIRM - 1)
    marks = {watched: None if watched in watch.gone else watched.mark for watched in watch.workers}
    for _ in range(3):
        watch.now += PERIOD
        assert watch.absences.seconds_until_read(watch.now, PERIOD) > 0
        due = watch.absences.update(watch.now, "g1", marks)
    assert due == [watch.workers[0]]


CHECKS = st.lists(
    st.tuples(
        st.sampled_from([0.5, 2.0, 2.0, 2.0, 6.0, 15.0]),  # seconds since the last check
        st.sampled_from(["g1", "g1", "g1", "g1", "g2"]),
        st.one_of(
            st.none(),
            st.sets(st.integers(0, 9), max_size=10),
            st.sets(st.integers(0, 9), max_size=2),
        ),
    ),
    max_size=60,
)


@given(checks=CHECKS)
def test_a_signalled_worker_was_missing_at_every_check_of_a_quiet_time(
    checks: list[tuple[float, str, set[int] | None]],
) -> None:
    """`None` is a check that failed."""
    settle = 8.0  # short, so that judgements are reached
    absences = MissingMarkTracker(confirm=CONFIRM, settle=settle)
    workers = [worker(number) for number in range(10)]
    history: list[tuple[float, str, set[int] | None]] = []
    now = 0.0
    for wait, generation, gone in checks:
        now += wait
        history.append((now, generation, gone))
        if gone is None:
            absences.reset()
            continue
        marks = {
            watched: None if number in gone else watched.mark
            for number, watched in enumerate(workers)
        }
        for watched in absences.update(now, generation, marks):
            number = workers.index(watched)
            few = len(gone) <= MAX_ANOMALIES_WITHOUT_OUTAGE or len(gone) < MIN_OUTAGE_SHARE * len(
                workers
            )
            min_absence_s = CONFIRM if few else max(CONFIRM, settle / 3)
            began, confirmed = now, False
            for at, seen_generation, seen_gone in reversed(history):
                if (
                    began - at > MAX_READ_GAP_S
                    or seen_gone is None
                    or seen_generation != generation
                ):
                    break
                assert confirmed or number in seen_gone
                confirmed = confirmed or now - at >= min_absence_s
                began = at
            assert confirmed
            assert now - began >= settle, "reported although the time before was not quiet"
            absences.note_signalled(now, watched)
