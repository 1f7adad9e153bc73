"""When a missing mark means that a worker is dead: the watcher's judgement, without I/O.

A mark is missing for many reasons, and only one of them is the death of its worker. The others concern many
workers at once (Valkey was emptied, restarted, out of reach, or cut off from them), or show themselves
within seconds (the worker renews). Invariant *no-healthy-kill*: in doubt nobody is told.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping

from infra.database.workers.sessions import WorkerInService

#: So many may be missing at once whatever their share, and from this share on nobody is told.
FEW = 3
MANY = 0.2
#: Seconds between two looks from which on what happened in between is not known.
GAP = 10.0
#: Seconds after which a worker that is still unmarked is told again: the signal may have been of no use.
SIGNAL_AGAIN = 60.0


class Absences:
    """Which marks are missing, and since when. `now` is in seconds of a clock that only goes forward.

    `confirm`: seconds that a mark must be missing at every look before its worker is told.
    `settle`: seconds without any judgement after the first look, after Valkey was out of reach or emptied,
    and after many marks were missing: the workers need a renewal to come back. The mark's lifetime is
    right, since a worker whose mark stands at the end of it has renewed it meanwhile.
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
        #: Whether, at the last look, too many were missing to tell of any.
        self.many = False

    @property
    def missing(self) -> list[WorkerInService]:
        """Those whose marks were missing at the last look."""
        return list(self._since)

    def reset(self) -> None:
        """A look failed: what was known before it counts no more."""
        self._updated_at = None
        self._since.clear()

    def update(
        self, now: float, generation: str, marks: Mapping[WorkerInService, bytes | None]
    ) -> list[WorkerInService]:
        """Takes one look in: the mark of each worker in service. Returns those that are to be told now."""
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
        self.many = counted > FEW and counted >= MANY * len(marks)
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
        """Seconds until the next look: `period`, or less if somebody becomes due before."""
        times = (max(self._due_at(one), self._settled_at) for one in self._since)
        return min((at - now for at in times if now < at < now + period), default=period)

    def signalled(self, now: float, one: WorkerInService) -> None:
        """Its workflow knows."""
        self._signalled_at[one] = now

    def without_workflow(self, one: WorkerInService) -> None:
        """It has no workflow: nobody can be told, and it does not count as missing while it stays so."""
        self._without_workflow.add(one)

    def restored(self, now: float, ones: Iterable[WorkerInService]) -> None:
        """These could not renew until now, because their owner keys were missing."""
        for one in ones:
            self._since[one] = now + self._settle
