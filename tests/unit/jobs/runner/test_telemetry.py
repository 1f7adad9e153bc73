"""What a runner counts goes out once, and waits until it was heard."""

from __future__ import annotations

import json

from worker_runtime.jobs.protocol.messages import Job, JobStatus
from worker_runtime.jobs.telemetry import JobCounters

JOB = Job(job_id="j", name="work", queue="q", priority=7)


def counted(tally: JobCounters) -> tuple[int, dict[str, int]]:
    number, parcel = tally.parcel()
    return number, json.loads(parcel) if parcel else {}


def test_waits_and_runs_fall_into_their_buckets() -> None:
    tally = JobCounters()
    for waited in (0, 1, 2, 4_000_000):
        tally.started(JOB, waited)
    tally.ended(JOB, JobStatus.DONE, 7)
    tally.ended(None, JobStatus.FAILED, 0)
    tally.renewed_late()
    tally.reaped("returned")
    assert counted(tally)[1] == {
        "wait|q|7|0": 2,
        "wait|q|7|1": 1,
        "wait|q|7|17": 1,
        "wait|q|7|sum": 4_000_003,
        "ended|q|work|done": 1,
        "run|work|3": 1,
        "run|work|sum": 7,
        "ended|||failed": 1,
        "late": 1,
        "reaped|returned": 1,
    }


def test_a_job_that_never_began_counts_as_ended_and_not_as_a_run() -> None:
    tally = JobCounters()
    tally.ended(JOB, JobStatus.CANCELLED, None)
    assert counted(tally)[1] == {"ended|q|work|cancelled": 1}


def test_a_parcel_stays_the_same_until_it_was_heard() -> None:
    tally = JobCounters()
    assert counted(tally) == (0, {})
    tally.renewed_late()
    assert counted(tally) == (1, {"late": 1})
    tally.renewed_late()
    assert counted(tally) == (1, {"late": 1})  # the reply was lost: the same, under the same number
    tally.heard()
    assert counted(tally) == (2, {"late": 1})
    tally.heard()
    assert counted(tally) == (2, {})
