"""The end of a run decides whether its job is done, failed or retried."""

from __future__ import annotations

import pytest

from worker_runtime.jobs.child_pool import NOT_FORKED_RETRY_DELAY_S, NotForked
from worker_runtime.jobs.child_process import RunOutcome
from worker_runtime.jobs.completion import RunEnd, RunJudge, jittered
from worker_runtime.jobs.protocol.messages import Job, JobStatus, UnknownJob
from worker_runtime.jobs.queue import ClaimedJob
from worker_runtime.protocol.errors import BerthError, MalformedMessage
from worker_runtime.protocol.messages import Failure

JUDGE = RunJudge("runner")


def claimed(attempt: int = 1, crashes: int = 0) -> ClaimedJob:
    return ClaimedJob("j", b"", 7, attempt, crashes)


def died(job: Job, run: ClaimedJob, why: str = "") -> RunEnd:
    return JUDGE.died(run, job, why, "signal 11", "", 0)


def code(end: RunEnd) -> str:
    assert end.result.failure is not None
    return end.result.failure.code


@pytest.mark.parametrize(
    ("attempt", "status"), [(1, JobStatus.RETRY), (9, JobStatus.RETRY), (10, "failed")]
)
def test_a_retryable_error_is_tried_ten_times_in_all(attempt: int, status: str) -> None:
    failure = Failure(code="X", detail="", retryable=True)
    end = JUDGE.reported(
        claimed(attempt), Job(job_id="j", name="n"), RunOutcome(fence=7, failure=failure), "", 0
    )
    assert end.result.status == status


def test_another_error_is_not_tried_again() -> None:
    failure = Failure(code="X", detail="")
    end = JUDGE.reported(
        claimed(), Job(job_id="j", name="n"), RunOutcome(fence=7, failure=failure), "", 0
    )
    assert end.result.status is JobStatus.FAILED


def test_a_retry_waits_at_least_as_long_as_the_job_asked_for() -> None:
    failure = Failure(code="X", detail="", retryable=True)
    outcome = RunOutcome(fence=7, failure=failure, delay=1000.0)
    ends = [JUDGE.reported(claimed(), Job(job_id="j", name="n"), outcome, "", 0) for _ in range(50)]
    assert all(1000 <= end.delay <= 1250 for end in ends)


@pytest.mark.parametrize(
    ("idempotent", "crashes", "why", "expected"),
    [
        (True, 0, "", (JobStatus.RETRY, "JOB_CRASHED")),
        (True, 2, "", (JobStatus.FAILED, "JOB_CRASHED")),
        (True, 0, "timeout", (JobStatus.RETRY, "JOB_TIMEOUT")),
        (False, 0, "", (JobStatus.FAILED, "JOB_OUTCOME_UNKNOWN")),
        (False, 0, "timeout", (JobStatus.FAILED, "JOB_OUTCOME_UNKNOWN")),
        (True, 0, "cancelled", (JobStatus.CANCELLED, "JOB_CANCELLED")),
        (False, 0, "cancelled", (JobStatus.CANCELLED, "JOB_CANCELLED")),
        (True, 0, "memory", (JobStatus.FAILED, "JOB_MEMORY_EXCEEDED")),
        (True, 0, "process_memory", (JobStatus.RETRY, "JOB_MEMORY_EXCEEDED")),
        (True, 2, "process_memory", (JobStatus.FAILED, "JOB_MEMORY_EXCEEDED")),
        (False, 0, "process_memory", (JobStatus.FAILED, "JOB_MEMORY_EXCEEDED")),
    ],
)
def test_the_death_of_a_child(
    idempotent: bool, crashes: int, why: str, expected: tuple[JobStatus, str]
) -> None:
    end = died(Job(job_id="j", name="n", idempotent=idempotent), claimed(crashes=crashes), why)
    assert (end.result.status, code(end)) == expected


@pytest.mark.parametrize(
    ("error", "job", "attempt", "status"),
    [
        (UnknownJob("x"), Job(job_id="j", name="n"), 1, JobStatus.RETRY),
        (NotForked("EAGAIN"), Job(job_id="j", name="n"), 9, JobStatus.RETRY),
        (UnknownJob("x"), Job(job_id="j", name="n"), 10, JobStatus.FAILED),
        (MalformedMessage("x"), None, 1, JobStatus.FAILED),
    ],
)
def test_what_has_not_run_here_may_run_elsewhere(
    error: BerthError, job: Job | None, attempt: int, status: JobStatus
) -> None:
    end = JUDGE.refused(claimed(attempt), job, error)
    assert (end.result.status, code(end)) == (status, error.code)
    assert not end.crashed


def test_a_job_that_got_no_process_is_tried_again_within_seconds() -> None:
    own_pause = JUDGE.refused(claimed(1), Job(job_id="j", name="n"), UnknownJob("x")).delay
    no_process = JUDGE.refused(claimed(1), Job(job_id="j", name="n"), NotForked("EAGAIN")).delay
    quick = Job(job_id="j", name="n", retry_delay=0.05)
    assert own_pause >= 90.0
    assert 0.0 < no_process <= 1.25 * NOT_FORKED_RETRY_DELAY_S
    assert JUDGE.refused(claimed(1), quick, NotForked("EAGAIN")).delay <= 0.0625


def test_retries_spread_out() -> None:
    delays = {jittered(120.0) for _ in range(50)}
    assert len(delays) > 40
    assert all(90 <= delay <= 150 for delay in delays)


def test_what_is_cancelled_before_it_begins_ends_as_cancelled() -> None:
    end = JUDGE.cancelled(claimed(), Job(job_id="j", name="n"))
    assert (end.result.status, code(end)) == (JobStatus.CANCELLED, "JOB_CANCELLED")
    assert not end.crashed
