"""A runner sends its counts once, and keeps them until they were taken."""

from __future__ import annotations

import json

from worker_runtime.jobs.protocol.messages import Job, JobStatus
from worker_runtime.jobs.protocol.telemetry import CounterKind
from worker_runtime.jobs.telemetry import JobCounters

JOB = Job(job_id="j", name="work", queue="q", priority=7)


def counted(counters: JobCounters) -> tuple[int, dict[str, int]]:
    number, batch = counters.next_batch()
    return number, json.loads(batch) if batch else {}


def test_waits_and_runs_fall_into_their_buckets() -> None:
    counters = JobCounters()
    for waited in (0, 1, 2, 4_000_000):
        counters.count_start(JOB, waited)
    counters.count_end(JOB, JobStatus.DONE, 7)
    counters.count_end(None, JobStatus.FAILED, 0)
    counters.add(CounterKind.LATE)
    counters.add(CounterKind.REAPED, ("returned",))
    assert counted(counters)[1] == {
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
    counters = JobCounters()
    counters.count_end(JOB, JobStatus.CANCELLED, None)
    assert counted(counters)[1] == {"ended|q|work|cancelled": 1}


def test_a_batch_stays_the_same_until_it_was_heard() -> None:
    counters = JobCounters()
    assert counted(counters) == (0, {})
    counters.add(CounterKind.LATE)
    assert counted(counters) == (1, {"late": 1})
    counters.add(CounterKind.LATE)
    # The reply was lost: the same, under the same number.
    assert counted(counters) == (1, {"late": 1})
    counters.acknowledged()
    assert counted(counters) == (2, {"late": 1})
    counters.acknowledged()
    assert counted(counters) == (2, {})
