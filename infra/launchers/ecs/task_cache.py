"""A cache of the tasks from ECS's answers and events, which come late, twice and out of order.

ECS is eventually consistent. A task that a listing lacks is not gone: it counts as running until a
description or an event says STOPPED, or until ECS has denied it twice, a minute apart.
https://docs.aws.amazon.com/AmazonECS/latest/APIReference/API_RunTask.html
"""

from collections.abc import Iterable
from dataclasses import dataclass, replace

from infra.worker_task import Task, TaskExit

STOPPED = "STOPPED"
#: Seconds after its launch during which ECS may not show a task yet: it advises up to five minutes.
SETTLING_TIME_S = 300.0
#: Seconds between two denials that make a task a lost one.
MIN_DENIAL_GAP_S = 60.0
#: Exits that are remembered, to recognize repeats. ECS shows each for an hour.
MAX_EXITS_REMEMBERED = 20_000


@dataclass(frozen=True, kw_only=True)
class SeenTask:
    """A task as an answer or event describes it."""

    task: Task
    #: Grows with each change of the task; 0 where the source does not say.
    version: int = 0
    #: PROVISIONING, PENDING, … RUNNING, … STOPPED.
    status: str = "RUNNING"
    #: The token it was launched with; events do not have it.
    token: str = ""
    #: False for an event: it has no tags, so the task's version is unknown.
    tagged: bool = True
    #: Set when it has stopped.
    end: TaskExit | None = None


class TaskCache:
    """Holds what is known of each task. `now` is in seconds of a monotonic clock."""

    def __init__(self) -> None:
        self._running: dict[str, SeenTask] = {}
        self._ended: dict[str, SeenTask] = {}
        self._by_token: dict[str, str] = {}
        #: The running tasks of each worker.
        self._by_worker: dict[str, set[str]] = {}
        #: When each running task was launched by ourselves, and when ECS first denied it.
        self._launched: dict[str, float] = {}
        self._denied: dict[str, float] = {}

    def note_launched(self, task_id: str, now: float) -> None:
        """Notes a launch of our own: the task counts from here on, whatever the listings say."""
        self._launched.setdefault(task_id, now)

    def apply(self, seen: SeenTask) -> TaskExit | None:
        """Stores what was seen; returns the task's exit when it was not known before."""
        task_id = seen.task.task_id
        self._denied.pop(task_id, None)
        if task_id in self._ended:
            return None
        old = self._running.get(task_id)
        if old is not None:
            if seen.status != STOPPED and seen.version and seen.version < old.version:
                return None  # a later one came first
            seen = _joined(old, seen)
        if seen.token:
            self._by_token[seen.token] = task_id
        if seen.status != STOPPED:
            self._running[task_id] = seen
            self._by_worker.setdefault(seen.task.worker_id, set()).add(task_id)
            return None
        self._running.pop(task_id, None)
        if own := self._by_worker.get(seen.task.worker_id):
            own.discard(task_id)
            if not own:
                del self._by_worker[seen.task.worker_id]
        self._launched.pop(task_id, None)
        self._ended[task_id] = seen
        if len(self._ended) > MAX_EXITS_REMEMBERED:
            forgotten = self._ended.pop(next(iter(self._ended)))
            self._by_token.pop(forgotten.token, None)
        return seen.end

    def note_denied(self, task_id: str, now: float) -> SeenTask | None:
        """Returns the task if it is lost:
        denied now and a minute ago, and not launched just now."""
        if (
            task_id not in self._running
            or now - self._launched.get(task_id, now - SETTLING_TIME_S) < SETTLING_TIME_S
        ):
            return None
        first = self._denied.setdefault(task_id, now)
        return self._running[task_id] if now - first >= MIN_DENIAL_GAP_S else None

    def running(self) -> list[Task]:
        return sorted(
            (seen.task for seen in self._running.values()), key=lambda task: task.launched_at
        )

    def running_ids(self) -> set[str]:
        return set(self._running)

    def unknown(self, task_ids: Iterable[str]) -> set[str]:
        """Returns the ids of tasks whose tags we have not seen."""
        tagged = {task_id for task_id, seen in self._running.items() if seen.tagged}
        return set(task_ids) - tagged - self._ended.keys()

    def has_ended(self, task_id: str) -> bool:
        return task_id in self._ended

    def runs(self, task_id: str) -> bool:
        """Returns True if the task runs, as far as we know."""
        return task_id in self._running

    def of_token(self, token: str) -> SeenTask | None:
        task_id = self._by_token.get(token, "")
        return self._running.get(task_id) or self._ended.get(task_id)

    def of_worker(self, worker_id: str) -> list[Task]:
        """Return the running tasks of a worker."""
        return [
            self._running[task_id].task for task_id in sorted(self._by_worker.get(worker_id, ()))
        ]


def _joined(old: SeenTask, new: SeenTask) -> SeenTask:
    """Returns the new state, with the fields that only the old source had."""
    task = new.task if new.tagged else replace(new.task, version=old.task.version)
    return replace(
        new,
        task=replace(task, launched_at=old.task.launched_at),
        version=max(old.version, new.version),
        token=new.token or old.token,
        tagged=new.tagged or old.tagged,
    )
