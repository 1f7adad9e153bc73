"""What is not as it should be among workers: maintenance's judgement of one look, without I/O.

Each rule concerns one user or one worker, so a look at a few of them judges as a look at all does. Nothing
here says that anything may be done about it: two looks have to agree, and the guard has to allow it.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field
from enum import StrEnum

from infra.database.maintenance import Assignment, Suspect
from infra.launchers.port import Task


class Kind(StrEnum):
    """The four of requirement M1, and that of M4."""

    ORPHAN_MARK = "orphan_mark"
    ORPHAN_TASK = "orphan_task"
    STALE_MARK = "stale_mark"
    DUPLICATE = "duplicate"
    OVERDUE = "overdue"


@dataclass(frozen=True, kw_only=True)
class Told:
    """A worker's metadata, as far as they tell of its state."""

    state: str
    task_id: str
    #: Unix seconds of its last order or control message; 0: unknown.
    last_activity: float


@dataclass(frozen=True, kw_only=True)
class Entry:
    """A pool worker's entry in Valkey."""

    state: str
    claim: str
    #: When it ends unless it is renewed, in ms by Valkey's clock; -1: never.
    expires: int


@dataclass(frozen=True, kw_only=True)
class Limits:
    """Seconds after which something counts as overdue."""

    #: Of a claim that has not connected.
    connect: float
    #: Of a worker that nobody uses, and that should have ended.
    idle: float


@dataclass(kw_only=True)
class Picture:
    """All workers, or some, at one look."""

    #: Assignments that are not over.
    open: list[Assignment]
    tasks: list[Task]
    #: User → what his mark says.
    marks: dict[str, str]
    #: User → his worker's metadata.
    told: dict[str, Told]
    #: Worker → its entry in its pool.
    entries: dict[str, Entry]
    #: Pool → the workers on its list of free ones.
    free: dict[str, set[str]]
    #: Worker → its last assignment; of running workers without an open one.
    last: dict[str, Assignment] = field(default_factory=dict)
    #: Valkey's clock, Unix seconds.
    now: float = 0.0

    def __post_init__(self) -> None:
        self.by_worker: dict[str, list[Assignment]] = defaultdict(list)
        self.by_user: dict[str, list[Assignment]] = defaultdict(list)
        for one in self.open:
            self.by_user[one.user_id].append(one)
            if one.worker_id:
                self.by_worker[one.worker_id].append(one)
        self.claims = {one.claim_id for one in self.open}
        self.running: dict[str, list[Task]] = defaultdict(list)
        for task in self.tasks:
            self.running[task.worker_id].append(task)

    @property
    def size(self) -> int:
        """How many workers it shows, whoever knows of them."""
        marked = {mark.partition(":")[2] for mark in self.marks.values()}
        return len({*self.running, *self.by_worker, *marked})

    def serves(self, one: Assignment) -> bool:
        """Its worker has the user's mark."""
        return self.marks.get(one.user_id) == mark_of(one)

    @property
    def unmarked(self) -> int:
        """Workers in service whose mark is missing."""
        return sum(1 for one in self.open if one.present and one.connected and not self.serves(one))

    @property
    def in_service(self) -> int:
        return sum(1 for one in self.open if one.present and one.connected)

    @property
    def unlisted(self) -> int:
        """Workers that show themselves in Valkey, and that the launcher does not list."""
        assigned = sum(1 for one in self.open if self.serves(one) and one.worker_id not in self.running)
        free = {worker for some in self.free.values() for worker in some}
        return assigned + sum(1 for one in free if one in self.entries and one not in self.running)


def mark_of(one: Assignment) -> str:
    return f"{one.epoch}:{one.worker_id}"


def find(picture: Picture, limits: Limits) -> list[Suspect]:
    """All anomalies, each at most once."""
    found = dict.fromkeys(
        (
            *_duplicates(picture),
            *_orphan_tasks(picture),
            *_marks(picture),
            *_entries(picture),
            *_overdue(picture, limits),
        )
    )
    return list(found)


def _of(kind: Kind, why: str, one: Assignment, task_id: str = "") -> Suspect:
    return Suspect(
        kind=kind,
        why=why,
        user_id=one.user_id,
        worker_id=one.worker_id,
        task_id=task_id,
        claim_id=one.claim_id,
        epoch=one.epoch,
        pool=one.pool,
    )


def _duplicates(picture: Picture) -> Iterator[Suspect]:
    """Two workers of one user, or two tasks of one worker: the older one goes."""
    for rows in picture.by_user.values():
        for one in rows:
            if not one.present and one.worker_id:
                for task in picture.running.get(one.worker_id, ()):
                    yield _of(Kind.DUPLICATE, "the user has a later worker", one, task.task_id)
    for worker_id, tasks in picture.running.items():
        if len(tasks) < 2:
            continue
        named = {one.task_id for one in picture.by_worker.get(worker_id, ())}
        kept = next((task for task in tasks if task.task_id in named), None)
        kept = kept or max(tasks, key=lambda task: (task.launched_at, task.task_id))
        for task in tasks:
            if task is not kept:
                yield Suspect(
                    kind=Kind.DUPLICATE,
                    why="the worker runs twice",
                    worker_id=worker_id,
                    task_id=task.task_id,
                    pool=task.pool,
                )


def _orphan_tasks(picture: Picture) -> Iterator[Suspect]:
    """They run and belong to nobody: neither to a user nor, as free ones, to their pool."""
    for worker_id, tasks in picture.running.items():
        if worker_id in picture.by_worker:
            continue
        entry, last, task = picture.entries.get(worker_id), picture.last.get(worker_id), tasks[0]
        if entry is not None and (entry.state == "ready" or entry.claim in picture.claims):
            continue
        if entry is not None and entry.state == "claimed":
            # Its claimer died before it had written down for whom, or the pool was shrinking.
            yield Suspect(
                kind=Kind.OVERDUE,
                why="claimed for nobody",
                worker_id=worker_id,
                task_id=task.task_id,
                claim_id=entry.claim,
                pool=task.pool,
            )
        elif last is not None:
            yield _of(Kind.ORPHAN_TASK, "its assignment is over", last, task.task_id)
        else:
            why = f"{entry.state} and assigned to nobody" if entry else "it announces nothing"
            yield Suspect(
                kind=Kind.ORPHAN_TASK, why=why, worker_id=worker_id, task_id=task.task_id, pool=task.pool
            )


def _marks(picture: Picture) -> Iterator[Suspect]:
    for user_id, mark in picture.marks.items():
        rows = picture.by_user.get(user_id, ())
        worker_id = mark.partition(":")[2]
        if worker_id in picture.running or any(mark == mark_of(one) for one in rows):
            continue
        kind = Kind.STALE_MARK if any(one.worker_id for one in rows) else Kind.ORPHAN_MARK
        why = "another worker serves the user" if rows else "nobody serves the user"
        yield Suspect(kind=kind, why=why, user_id=user_id, worker_id=worker_id, value=mark)
    for user_id in picture.told.keys() - picture.marks.keys():
        yield Suspect(kind=Kind.STALE_MARK, why="metadata without a mark", user_id=user_id)


def _entries(picture: Picture) -> Iterator[Suspect]:
    """Free workers that are none: on the list, and neither running nor renewing their entry."""
    for pool, workers in picture.free.items():
        for worker_id in workers - picture.running.keys():
            entry = picture.entries.get(worker_id)
            yield Suspect(
                kind=Kind.STALE_MARK,
                why="a free worker that does not run",
                worker_id=worker_id,
                pool=pool,
                value=str(entry.expires) if entry else "",
            )


def _overdue(picture: Picture, limits: Limits) -> Iterator[Suspect]:
    for one in picture.open:
        why = _late(picture, limits, one)
        if why:
            tasks: Iterable[Task] = picture.running.get(one.worker_id, ()) if one.worker_id else ()
            yield _of(Kind.OVERDUE, why, one, next((task.task_id for task in tasks), ""))


def _late(picture: Picture, limits: Limits, one: Assignment) -> str:
    """Why this assignment should have gone on or ended; '': it need not."""
    runs, marked = one.worker_id in picture.running, picture.serves(one)
    if not one.present:
        return "" if runs else "an earlier assignment that nobody closed"
    told = picture.told.get(one.user_id) if marked else None
    if told is not None and told.state == "Draining":
        return "drains for too long"
    if told is not None and told.last_activity and picture.now - told.last_activity > limits.idle:
        return "idle for too long"
    if one.connected or marked:
        return "" if runs or marked else "its worker is gone"
    return "claimed for too long" if one.age > limits.connect else ""
