"""What a runner counts for the metrics: kept here, sent along with its renewals.

So a job costs no further command. A runner that is killed takes with it what it counted since its last
renewal, a third of a lease. What runners of users' own jobs count is added up over all users.
"""

from __future__ import annotations

from bisect import bisect_left

import msgspec

from worker_runtime.protocol.job_messages import Job, JobStatus
from worker_runtime.protocol.job_metrics import BOUNDS_MS, Count, field

_encode = msgspec.json.Encoder().encode

#: What is counted, and its labels: joined into a field only for a parcel, not for each job.
_Key = tuple[Count, tuple[str | int, ...]]


class Tally:
    """Numbers by field (`protocol/job_metrics.py`)."""

    def __init__(self) -> None:
        self._fresh: dict[_Key, int] = {}
        self._sent: dict[str, int] = {}
        self._number = 0

    def started(self, job: Job, waited_ms: int) -> None:
        self._observe(Count.WAIT, waited_ms, job.queue, job.priority)

    def ended(self, job: Job | None, status: JobStatus, ran_ms: int | None) -> None:
        """`job` is None for one that this runner cannot read or does not know; `ran_ms` if it never began."""
        name, queue = (job.name, job.queue) if job is not None else ("", "")
        self._add(Count.ENDED, (queue, name, status))
        if job is not None and ran_ms is not None:
            self._observe(Count.RUN, ran_ms, name)

    def renewed_late(self) -> None:
        self._add(Count.LATE, ())

    def reaped(self, what: str) -> None:
        """A dead runner's job: `returned`, `failed` or `cancelled`."""
        self._add(Count.REAPED, (what,))

    def parcel(self) -> tuple[int, bytes]:
        """What is to be sent now, with its number; the same again until it was `heard`. Empty: nothing."""
        if not self._sent and self._fresh:
            self._sent = {field(what, *map(str, labels)): n for (what, labels), n in self._fresh.items()}
            self._fresh = {}
            self._number += 1
        return self._number, _encode(self._sent) if self._sent else b""

    def heard(self) -> None:
        self._sent = {}

    def _observe(self, what: Count, value_ms: int, *labels: str | int) -> None:
        self._add(what, (*labels, bisect_left(BOUNDS_MS, value_ms)))
        self._add(what, (*labels, "sum"), value_ms)

    def _add(self, what: Count, labels: tuple[str | int, ...], by: int = 1) -> None:
        key = what, labels
        self._fresh[key] = self._fresh.get(key, 0) + by
