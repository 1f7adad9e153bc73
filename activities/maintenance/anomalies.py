"""Finds the anomalies in a snapshot of the fleet,
and says when maintenance must not act; without I/O.

Each rule concerns one user or one worker, so a snapshot of a few workers is judged like one
of all. An anomaly is cleaned up only if two scans agree and the guard allows it. The guard
is needed because an outage looks like many dead workers (no-healthy-kill); what a guarded
scan found does not count.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterator
from dataclasses import dataclass, field
from enum import StrEnum
from itertools import chain

from infra.database.workers.assignments import AssignmentRow
from infra.database.workers.passes import PassBasis, PassRecord, Suspect
from infra.worker_task import Task


class AnomalyKind(StrEnum):
    ORPHAN_MARK = "orphan_mark"
    ORPHAN_TASK = "orphan_task"
    STALE_MARK = "stale_mark"
    DUPLICATE = "duplicate"
    OVERDUE = "overdue"


@dataclass(frozen=True, kw_only=True)
class ReportedState:
    """The state in a worker's metadata."""

    state: str
    #: Unix seconds of its last order or control message; 0: unknown.
    last_activity: float


@dataclass(frozen=True, kw_only=True)
class EntryState:
    """A pool worker's entry in Valkey."""

    state: str
    claim: str
    #: When it ends unless it is renewed, in ms by Valkey's clock; -1: never.
    expires: int


@dataclass(frozen=True, kw_only=True)
class OverdueLimits:
    """Seconds after which something counts as overdue."""

    #: Applies to a claim that has not connected.
    connect: float
    #: Applies to a worker that nobody uses, and that should have ended.
    idle: float
    #: Applies to a launch: until then a task announces nothing.
    launch: float = 0.0


@dataclass(kw_only=True)
class FleetSnapshot:
    """All workers, or some of them, at one moment."""

    #: The servers of which it was taken, and how many tasks the launcher listed.
    place: PassBasis = field(default_factory=PassBasis)
    #: Assignments that are not over.
    open: list[AssignmentRow]
    tasks: list[Task]
    #: User → the value of the mark.
    marks: dict[str, str]
    #: User → the worker's metadata.
    reported: dict[str, ReportedState]
    #: Worker → its entry in its pool.
    entries: dict[str, EntryState]
    #: Pool → the workers on its list of free ones.
    free: dict[str, set[str]]
    #: Worker → its last assignment; of running workers without an open one.
    last: dict[str, AssignmentRow] = field(default_factory=dict)
    #: Valkey's clock, Unix seconds.
    now: float = 0.0

    def __post_init__(self) -> None:
        self.by_worker: dict[str, list[AssignmentRow]] = defaultdict(list)
        self.by_user: dict[str, list[AssignmentRow]] = defaultdict(list)
        for row in self.open:
            self.by_user[row.user_id].append(row)
            if row.worker_id:
                self.by_worker[row.worker_id].append(row)
        self.claims = {row.claim_id for row in self.open}
        self.running: dict[str, list[Task]] = defaultdict(list)
        for task in self.tasks:
            self.running[task.worker_id].append(task)

    @property
    def size(self) -> int:
        """Returns the number of workers that the snapshot shows."""
        marked = {mark.partition(":")[2] for mark in self.marks.values()}
        return len({*self.running, *self.by_worker, *marked})

    def serves(self, row: AssignmentRow) -> bool:
        """Returns True if its worker has the user's mark."""
        return self.marks.get(row.user_id) == mark_of(row)

    def summary(self, anomalies: int) -> ScanSummary:
        in_service = [row for row in self.open if row.present and row.connected]
        assigned = {row.worker_id for row in self.open if self.serves(row)}
        free = {worker for workers in self.free.values() for worker in workers}
        return ScanSummary(
            place=self.place,
            size=self.size,
            anomalies=anomalies,
            in_service=len(in_service),
            unmarked=sum(not self.serves(row) for row in in_service),
            unlisted=sum(
                len(workers - self.running.keys())
                for workers in (assigned, free & self.entries.keys())
            ),
        )


def mark_of(row: AssignmentRow) -> str:
    return f"{row.epoch}:{row.worker_id}"


def find_anomalies(snapshot: FleetSnapshot, limits: OverdueLimits) -> list[Suspect]:
    """Returns all anomalies, each at most once."""
    rules = _duplicates, _marks, _entries
    late = _orphan_tasks(snapshot, limits), _overdue(snapshot, limits)
    suspects = chain(*(rule(snapshot) for rule in rules), *late)
    return list(dict.fromkeys(suspects))


def _suspect(kind: AnomalyKind, why: str, of: AssignmentRow | Task, **details: str) -> Suspect:
    """Makes a suspect with the fields that `of` has."""
    known = {name: getattr(of, name) for name in Suspect.__struct_fields__ if hasattr(of, name)}
    return Suspect(kind=kind, why=why, **known | details)


def _duplicates(snapshot: FleetSnapshot) -> Iterator[Suspect]:
    """Finds two workers of one user, or two tasks of one worker; the older one is to end."""
    for rows in snapshot.by_user.values():
        for row in rows:
            if not row.present and row.worker_id:
                for task in snapshot.running.get(row.worker_id, ()):
                    why = "the user has a later worker"
                    yield _suspect(AnomalyKind.DUPLICATE, why, row, task_id=task.task_id)
    for worker_id, tasks in snapshot.running.items():
        if len(tasks) < 2:
            continue
        named = {row.task_id for row in snapshot.by_worker.get(worker_id, ())}
        kept = next((task for task in tasks if task.task_id in named), None)
        kept = kept or max(tasks, key=lambda task: (task.launched_at, task.task_id))
        for task in tasks:
            if task is not kept:
                yield _suspect(AnomalyKind.DUPLICATE, "the worker runs twice", task)


def _orphan_tasks(snapshot: FleetSnapshot, limits: OverdueLimits) -> Iterator[Suspect]:
    """Finds running workers that belong neither to a user nor, as free ones, to their pool, and are
    not being launched: on a host that has to start first that takes longer than the time between
    two passes."""
    for worker_id, tasks in snapshot.running.items():
        if worker_id in snapshot.by_worker:
            continue
        entry, last, task = snapshot.entries.get(worker_id), snapshot.last.get(worker_id), tasks[0]
        if entry is not None and (entry.state == "ready" or entry.claim in snapshot.claims):
            continue
        if entry is not None and entry.state == "claimed":
            # Its claimer died before it wrote down the user, or while it shrank the pool.
            yield _suspect(AnomalyKind.OVERDUE, "claimed for nobody", task, claim_id=entry.claim)
        elif last is not None:
            yield _suspect(
                AnomalyKind.ORPHAN_TASK, "its assignment is over", last, task_id=task.task_id
            )
        elif snapshot.now - task.launched_at >= limits.launch:
            why = f"{entry.state} and assigned to nobody" if entry else "it announces nothing"
            yield _suspect(AnomalyKind.ORPHAN_TASK, why, task)


def _marks(snapshot: FleetSnapshot) -> Iterator[Suspect]:
    for user_id, mark in snapshot.marks.items():
        rows = snapshot.by_user.get(user_id, ())
        worker_id = mark.partition(":")[2]
        if worker_id in snapshot.running or any(mark == mark_of(row) for row in rows):
            continue
        kind = (
            AnomalyKind.STALE_MARK
            if any(row.worker_id for row in rows)
            else AnomalyKind.ORPHAN_MARK
        )
        why = "another worker serves the user" if rows else "nobody serves the user"
        yield Suspect(kind=kind, why=why, user_id=user_id, worker_id=worker_id, value=mark)
    for user_id in snapshot.reported.keys() - snapshot.marks.keys():
        yield Suspect(kind=AnomalyKind.STALE_MARK, why="metadata without a mark", user_id=user_id)


def _entries(snapshot: FleetSnapshot) -> Iterator[Suspect]:
    """Finds workers on the list of free ones that do not run."""
    for pool, workers in snapshot.free.items():
        for worker_id in workers - snapshot.running.keys():
            entry = snapshot.entries.get(worker_id)
            yield Suspect(
                kind=AnomalyKind.STALE_MARK,
                why="a free worker that does not run",
                worker_id=worker_id,
                pool=pool,
                value=str(entry.expires) if entry else "",
            )


def _overdue(snapshot: FleetSnapshot, limits: OverdueLimits) -> Iterator[Suspect]:
    for row in snapshot.open:
        why = _late(snapshot, limits, row)
        if why:
            tasks = snapshot.running.get(row.worker_id) if row.worker_id else None
            yield _suspect(AnomalyKind.OVERDUE, why, row, task_id=tasks[0].task_id if tasks else "")


def _late(snapshot: FleetSnapshot, limits: OverdueLimits, row: AssignmentRow) -> str:
    """Returns why this assignment is overdue; '' if it is not."""
    runs, marked = row.worker_id in snapshot.running, snapshot.serves(row)
    if not row.present:
        return "" if runs else "an earlier assignment that nobody closed"
    reported = snapshot.reported.get(row.user_id) if marked else None
    if reported is not None and reported.state == "Draining":
        return "drains for too long"
    last = reported.last_activity if reported is not None else 0.0
    if last and snapshot.now - last > limits.idle:
        return "idle for too long"
    if row.connected or marked:
        return "" if runs or marked else "its worker is gone"
    return "claimed for too long" if row.age > limits.connect else ""


#: Up to three anomalies are never an outage; more are one from a fifth of all on.
MAX_ANOMALIES_WITHOUT_OUTAGE = 3
MIN_OUTAGE_SHARE = 0.2
#: Seconds after which a pass is too old to be compared with.
MAX_PASS_AGE_S = 600.0


@dataclass(frozen=True, kw_only=True)
class ScanSummary:
    """Holds what a scan of all workers says about possible outages."""

    place: PassBasis
    size: int
    anomalies: int
    in_service: int
    #: Workers in service whose mark is missing.
    unmarked: int
    #: Workers in Valkey that the launcher does not list.
    unlisted: int


def is_many(count: int, of: int) -> bool:
    return count > MAX_ANOMALIES_WITHOUT_OUTAGE and count >= MIN_OUTAGE_SHARE * of


def guard_reason(scan: ScanSummary, before: PassRecord | None, *, override: bool = False) -> str:
    """Returns why maintenance must not act now; '' if it may. With `override` it may though much
    looks odd at once, but not when two passes saw different servers or data, and so cannot
    agree."""
    if not scan.place.generation:
        return "the generation is missing"
    if before is None or before.age > MAX_PASS_AGE_S:
        return "the first pass in a while"
    if not before.place.generation:
        return "the pass before could not read"
    if scan.place.generation != before.place.generation:
        return "the generation has changed"
    if scan.place.server != before.place.server:
        return "Valkey was restarted"
    if override:
        return ""
    if is_many(before.place.tasks - scan.place.tasks, before.place.tasks):
        return "the launcher lists far fewer tasks"
    if is_many(scan.unlisted, scan.size):
        return "the launcher does not list living workers"
    if is_many(scan.unmarked, scan.in_service):
        return "many marks are missing"
    if is_many(scan.anomalies, scan.size):
        return "too many anomalies at once"
    return ""
