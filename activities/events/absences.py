"""Decides when a missing mark means that a worker is dead; without I/O.

Other reasons for a missing mark concern many workers at once (Valkey was emptied, restarted or out of reach)
or end within seconds (the worker renews it). In doubt nobody is signalled (no-healthy-kill).
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping

from activities.maintenance.anomalies import is_many
from infra.database.workers.sessions import WorkerInService

#: Seconds between two reads after which what happened in between is unknown.
GAP = 10.0
#: Seconds after which a worker that is still unmarked is signalled again.
SIGNAL_AGAIN = 60.0


class Absences:
    """Which marks are missing, and since when. `now` is in seconds of a monotonic clock.

    `confirm`: seconds that a mark must be missing at every read before its workflow is signalled. `settle`:
    seconds without a decision after the first read, after Valkey was out of reach or emptied, and after many
    marks were missing, so that workers can renew. It is the lifetime of a mark.
    """

    def __init__(self, *, confirm: float, settle: float) -> None:
        self._confirm = confirm
        self._settle = settle
        self._updated_at: float | None = None
        self._generation = ""
        self._settled_at = 0.0
        self._since: dict[WorkerInService, float] = {}
        self._signalled_at: dict[WorkerInService, float] = {}
        self._without_workflow: set[WorkerInService] = set()
        #: Whether too many were missing at the last read to signal anybody.
        self.many = False

    @property
    def missing(self) -> list[WorkerInService]:
        """Workers whose marks were missing at the last read."""
        return list(self._since)

    def reset(self) -> None:
        """A read failed: what was known before does not count any more."""
        self._updated_at = None
        self._since.clear()

    def update(
        self, now: float, generation: str, marks: Mapping[WorkerInService, bytes | None]
    ) -> list[WorkerInService]:
        """Adds one read: the mark of each worker in service. Returns the workers to signal now."""
        updated_at, self._updated_at = self._updated_at, now
        if updated_at is None or now - updated_at > GAP or generation != self._generation:
            self._since.clear()
            self._settled_at = now + self._settle
        self._generation = generation
        missing = [one for one, mark in marks.items() if mark != one.mark]
        self._since = {one: self._since.get(one, now) for one in missing}
        self._signalled_at = {one: at for one, at in self._signalled_at.items() if one in self._since}
        self._without_workflow &= self._since.keys()
        counted = len(missing) - len(self._without_workflow)
        self.many = is_many(counted, len(marks))
        if self.many:
            self._settled_at = now + self._settle
        if self.many or now < self._settled_at:
            return []
        return [one for one in missing if self._due_at(one) <= now]

    def _due_at(self, one: WorkerInService) -> float:
        if one in self._without_workflow:
            return float("inf")
        signalled_at = self._signalled_at.get(one)
        due = self._since[one] + self._confirm
        return due if signalled_at is None else max(due, signalled_at + SIGNAL_AGAIN)

    def pause(self, now: float, period: float) -> float:
        """Seconds until the next read: `period`, or less if a worker becomes due before."""
        times = (max(self._due_at(one), self._settled_at) for one in self._since)
        return min((at - now for at in times if now < at < now + period), default=period)

    def signalled(self, now: float, one: WorkerInService) -> None:
        self._signalled_at[one] = now

    def without_workflow(self, one: WorkerInService) -> None:
        """It has no workflow to signal, and does not count as missing while its mark is."""
        self._without_workflow.add(one)

    def restored(self, now: float, ones: Iterable[WorkerInService]) -> None:
        """Their owner keys were restored, without which they could not renew."""
        for one in ones:
            self._since[one] = now + self._settle
