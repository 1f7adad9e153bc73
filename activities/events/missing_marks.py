"""Decides from repeated reads of all marks which workers to signal; without I/O.

`MarkWatcher` (`mark_watcher.py`) reads the marks and signals.
"""

from collections.abc import Iterable, Mapping

from activities.maintenance.anomalies import is_many
from infra.database.workers.sessions import WorkerInService

#: Seconds between two reads after which what happened in between is unknown.
MAX_READ_GAP_S = 10.0
#: Seconds after which a worker that is still unmarked is signalled again.
SIGNAL_RETRY_INTERVAL_S = 60.0


class MissingMarkTracker:
    """Tracks which marks are missing and since when, and decides when a missing mark means that its
    worker is dead.

    A mark is missing because

    - Valkey was emptied, restarted, replaced or out of reach: this concerns many workers, and ends
      once they have renewed their marks;
    - the worker renews it late: this ends within seconds;
    - the worker is dead or cut off. If Valkey kept its data and could be read all the time, the
      mark has expired together with the worker's lease, and the worker has fenced itself.

    Only in the last case may the workflow be signalled; in doubt it is not (no-healthy-kill). If
    many marks are missing, the cause may be a lost host or an outage, so the tracker waits longer.

    All instants and durations are in seconds, instants of one monotonic clock.

    `confirm`: for how long a mark must be missing at every read before its workflow is signalled.
    `settle`: the time without a decision after the first read, and after Valkey was out of reach,
    emptied, restarted or replaced, so that workers can renew. It is the lifetime of a mark. While
    many marks are missing, a mark must be missing for a third of it instead of `confirm`; when most
    are back, no decision is made for a third of it, because workers that reach Valkey again renew
    within seconds.
    """

    def __init__(self, *, confirm: float, settle: float) -> None:
        self._confirm = confirm
        self._settle = settle
        #: Takes the place of `confirm` while many marks are missing.
        self._confirm_many = max(confirm, settle / 3)
        self._updated_at: float | None = None
        self._valkey_identity = ""
        #: For how long a mark must be missing now: `_confirm` or `_confirm_many`.
        self._min_absence = confirm
        #: No decision is made before this instant.
        self._settled_at = 0.0
        self._missing_since: dict[WorkerInService, float] = {}
        self._signalled_at: dict[WorkerInService, float] = {}
        self._without_workflow: set[WorkerInService] = set()
        #: The last read missed so many marks that the cause may be an outage.
        self.many = False

    @property
    def missing(self) -> list[WorkerInService]:
        """Workers whose marks were missing at the last read."""
        return list(self._missing_since)

    def reset(self) -> None:
        """Forgets what was known before, because a read failed."""
        self._updated_at = None
        self._missing_since.clear()

    def update(
        self, now: float, valkey_identity: str, marks: Mapping[WorkerInService, bytes | None]
    ) -> list[WorkerInService]:
        """Adds one read: the mark of each worker in service. Returns the workers to signal now, the
        longest due first.

        `valkey_identity` names Valkey's generation and server process: another one means that the
        data are new.
        """
        updated_at, self._updated_at = self._updated_at, now
        was_read_before = updated_at is not None and now - updated_at <= MAX_READ_GAP_S
        if not was_read_before or valkey_identity != self._valkey_identity:
            self._missing_since.clear()
            self._settled_at = now + self._settle
        self._valkey_identity = valkey_identity
        missing = [worker for worker, mark in marks.items() if mark != worker.mark]
        self._missing_since = {worker: self._missing_since.get(worker, now) for worker in missing}
        self._signalled_at = {
            worker: at for worker, at in self._signalled_at.items() if worker in self._missing_since
        }
        self._without_workflow &= self._missing_since.keys()
        counted = len(missing) - len(self._without_workflow)
        were_many, self.many = self.many, is_many(counted, len(marks))
        self._min_absence = self._confirm_many if self.many else self._confirm
        if were_many and not self.many:  # most are back: the others may be about to
            self._settled_at = max(self._settled_at, now + self._confirm_many)
        if now < self._settled_at:
            return []
        return sorted(
            (worker for worker in missing if self._due_at(worker) <= now), key=self._due_at
        )

    def _due_at(self, worker: WorkerInService) -> float:
        """Returns the instant from which this worker may be signalled."""
        if worker in self._without_workflow:
            return float("inf")
        signalled_at = self._signalled_at.get(worker)
        due = self._missing_since[worker] + self._min_absence
        return due if signalled_at is None else max(due, signalled_at + SIGNAL_RETRY_INTERVAL_S)

    def seconds_until_read(self, now: float, period: float) -> float:
        """Returns the seconds until the next read: `period`, or less if a worker becomes due
        before."""
        times = (max(self._due_at(worker), self._settled_at) for worker in self._missing_since)
        return min((at - now for at in times if now < at < now + period), default=period)

    def note_signalled(self, now: float, worker: WorkerInService) -> None:
        self._signalled_at[worker] = now

    def note_without_workflow(self, worker: WorkerInService) -> None:
        """Notes a worker that has no workflow to signal. As long as its mark is missing, it is not
        due, and does not count among the missing."""
        self._without_workflow.add(worker)

    def note_restored(self, now: float, workers: Iterable[WorkerInService]) -> None:
        """Notes workers whose owner keys were restored. They could not renew before, so they get
        the lifetime of a mark more."""
        for worker in workers:
            self._missing_since[worker] = now + self._settle
