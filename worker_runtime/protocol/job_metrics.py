"""What runners count for the metrics, and under which fields of the hash `totals` it stands."""

from __future__ import annotations

from enum import StrEnum

#: Upper bounds of the histograms' buckets, ms; one more bucket holds what is beyond.
BOUNDS_MS = (1, 2, 5, 10, 25, 50, 100, 250, 500, 1000, 2500, 5000, 10_000, 30_000, 60_000, 180_000, 3_600_000)


class Count(StrEnum):
    """Kinds of numbers, with the labels of each."""

    #: queue, priority, then the number of the bucket or `sum` (ms).
    WAIT = "wait"
    #: type of job, then the number of the bucket or `sum` (ms).
    RUN = "run"
    #: queue, type of job, status.
    ENDED = "ended"
    #: Renewals that came more than a third of a lease after their time.
    LATE = "late"
    #: What became of a dead runner's job.
    REAPED = "reaped"


def field(what: Count, *labels: str) -> str:
    """No label has a `|`: names of queues and types are checked."""
    return "|".join((what, *labels))
