"""A healthy fleet has no anomalies, and a scan of a part judges as a scan of all."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

from hypothesis import given, settings
from hypothesis import strategies as st

from activities.maintenance.anomalies import (
    AnomalyKind,
    EntryState,
    FleetSnapshot,
    OverdueLimits,
    ReportedState,
    find_anomalies,
)
from infra.database.workers.assignments import AssignmentRow
from infra.worker_task import Task

LIMITS = OverdueLimits(connect=300.0, idle=3600.0)
NOW = 1_000_000.0


def task(worker: str, number: int = 1) -> Task:
    return Task(
        task_id=f"{worker}/{number}",
        worker_id=worker,
        pool="p",
        version="",
        launched_at=float(number),
    )


def row(user: str, worker: str, epoch: int = 1, **changes: Any) -> AssignmentRow:
    made = AssignmentRow(
        claim_id=f"{user}-{epoch}",
        user_id=user,
        worker_id=worker,
        task_id=f"{worker}/1" if worker else "",
        epoch=epoch,
        pool="p",
        present=True,
        connected=True,
        ended=False,
        age=60.0,
    )
    return made._replace(**changes)


def served(count: int, free: int) -> FleetSnapshot:
    """Returns a fleet of users with their workers, and of free workers."""
    users = [f"u{number}" for number in range(count)]
    ready = {f"f{number}" for number in range(free)}
    return FleetSnapshot(
        open=[row(user, f"w-{user}") for user in users],
        tasks=[task(f"w-{user}") for user in users] + [task(worker) for worker in sorted(ready)],
        marks={user: f"1:w-{user}" for user in users},
        reported={user: ReportedState(state="Active", last_activity=NOW) for user in users},
        entries={worker: EntryState(state="ready", claim="", expires=1) for worker in ready},
        free={"p": ready},
        now=NOW,
    )


@given(st.integers(0, 8), st.integers(0, 8))
def test_nothing_is_odd_about_workers_that_serve_and_workers_that_are_free(
    count: int, free: int
) -> None:
    snapshot = served(count, free)
    assert find_anomalies(snapshot, LIMITS) == []
    seen = snapshot.summary(0)
    assert (seen.size, seen.in_service, seen.unmarked, seen.unlisted) == (count + free, count, 0, 0)


def test_a_claim_under_way_is_not_odd() -> None:
    snapshot = FleetSnapshot(
        open=[row("u", "", connected=False), row("v", "w", connected=False)],
        tasks=[task("c"), task("w")],
        marks={},
        reported={},
        # Launched for the claim, and claimed from birth on.
        entries={"c": EntryState(state="claimed", claim="u-1", expires=1)},
        free={"p": set()},
        now=NOW,
    )
    assert find_anomalies(snapshot, LIMITS) == []
    late = replace_rows(snapshot, [assignment._replace(age=301.0) for assignment in snapshot.open])
    assert [anomaly.kind for anomaly in find_anomalies(late, LIMITS)] == [AnomalyKind.OVERDUE] * 2


def test_a_worker_that_is_being_launched_is_not_an_orphan() -> None:
    """A pass comes every 60 s, and a host that has to start first takes a launch longer than
    that."""
    limits = replace(LIMITS, launch=90.0)
    new = replace(task("p"), launched_at=NOW - 61.0)
    snapshot = replace(served(1, 0), tasks=[task("w-u0"), new])
    assert find_anomalies(snapshot, limits) == []
    for late in (
        replace(snapshot, now=NOW + 29.0),
        replace(snapshot, tasks=[task("w-u0"), task("p")]),
    ):
        assert [anomaly.kind for anomaly in find_anomalies(late, limits)] == [
            AnomalyKind.ORPHAN_TASK
        ]


def replace_rows(snapshot: FleetSnapshot, rows: list[AssignmentRow]) -> FleetSnapshot:
    return replace(snapshot, open=rows)


def test_of_a_worker_that_runs_twice_the_task_of_the_books_stays() -> None:
    snapshot = served(1, 1)
    snapshot = replace(snapshot, tasks=[*snapshot.tasks, task("w-u0", 2), task("f0", 2)])
    assert {(anomaly.kind, anomaly.task_id) for anomaly in find_anomalies(snapshot, LIMITS)} == {
        (AnomalyKind.DUPLICATE, "w-u0/2"),  # the assignment names the first one
        (AnomalyKind.DUPLICATE, "f0/1"),  # nobody names one: the older one goes
    }


WORKERS = [f"w{number}" for number in range(4)]
USERS = [f"u{number}" for number in range(3)]


@st.composite
def pictures(draw: st.DrawFn) -> FleetSnapshot:
    """Draws a fleet in any disorder."""
    rows = [
        row(
            user,
            draw(st.sampled_from(["", *WORKERS])),
            epoch,
            present=epoch == 2,
            connected=draw(st.booleans()),
            age=draw(st.sampled_from([1.0, 1000.0])),
        )
        for user in USERS
        for epoch in draw(st.sets(st.integers(1, 2)))
    ]
    tasks = [
        task(worker, number) for worker in WORKERS for number in draw(st.sets(st.integers(1, 2)))
    ]
    entry = st.builds(
        EntryState,
        state=st.sampled_from(["ready", "claimed", "confirmed", "released"]),
        claim=st.sampled_from(["u0-2", "x"]),
        expires=st.just(5),
    )
    marks = st.builds("{}:{}".format, st.integers(1, 2), st.sampled_from(WORKERS))
    reported = st.builds(
        ReportedState,
        state=st.sampled_from(["Active", "Draining"]),
        last_activity=st.sampled_from([0.0, 1.0, NOW]),
    )
    assigned = {assignment.worker_id for assignment in rows}
    ended = {worker: row("u9", worker, ended=True) for worker in WORKERS if worker not in assigned}
    return FleetSnapshot(
        open=rows,
        tasks=tasks,
        marks=draw(st.dictionaries(st.sampled_from(USERS), marks)),
        reported=draw(st.dictionaries(st.sampled_from(USERS), reported)),
        entries=draw(st.dictionaries(st.sampled_from(WORKERS), entry)),
        free={"p": draw(st.sets(st.sampled_from(WORKERS)))},
        last=ended if draw(st.booleans()) else {},
        now=NOW,
    )


@settings(max_examples=60)
@given(pictures())
def test_a_scan_of_one_user_and_worker_judges_as_a_scan_of_all(snapshot: FleetSnapshot) -> None:
    for anomaly in find_anomalies(snapshot, LIMITS):
        rows = [
            assignment
            for assignment in snapshot.open
            if anomaly.user_id == assignment.user_id or anomaly.worker_id == assignment.worker_id
        ]
        workers = {anomaly.worker_id, *(assignment.worker_id for assignment in rows)}
        users = {anomaly.user_id, *(assignment.user_id for assignment in rows)}
        part = FleetSnapshot(
            open=rows,
            tasks=[each for each in snapshot.tasks if each.worker_id in workers],
            marks={user: mark for user, mark in snapshot.marks.items() if user in users},
            reported={
                user: reported for user, reported in snapshot.reported.items() if user in users
            },
            entries=snapshot.entries,
            free={pool: free_workers & workers for pool, free_workers in snapshot.free.items()},
            last=snapshot.last,
            now=snapshot.now,
        )
        assert anomaly in find_anomalies(part, LIMITS)


@settings(max_examples=60)
@given(pictures())
def test_each_anomaly_is_found_once(snapshot: FleetSnapshot) -> None:
    anomalies = find_anomalies(snapshot, LIMITS)
    assert len(anomalies) == len(set(anomalies))
