"""Some types of jobs are prefetched; claimed jobs that have not started are released in time."""

from __future__ import annotations

import time

from worker_runtime.jobs.prefetch import (
    MAX_BRIEF_RUNTIME_S,
    PREFETCH_TIMEOUT_S,
    PrefetchedJobs,
    RuntimeEstimate,
)
from worker_runtime.jobs.protocol.messages import Job
from worker_runtime.jobs.queue import ClaimedJob


def add_quick_runs(estimate: RuntimeEstimate, name: str = "n", times: int = 20) -> None:
    for _ in range(times):
        estimate.add_run(name, MAX_BRIEF_RUNTIME_S / 10)


def test_a_type_is_brief_after_some_quick_runs_and_not_before() -> None:
    estimate = RuntimeEstimate()
    assert estimate.brief_types() == ""
    estimate.add_run("n", 0.0)
    assert estimate.brief_types() == ""
    add_quick_runs(estimate)
    assert estimate.brief_types() == "n"
    add_quick_runs(estimate, "m")
    assert estimate.brief_types() == "m,n"


def test_one_moment_without_cpu_does_not_make_a_type_slow_but_slow_runs_do() -> None:
    estimate = RuntimeEstimate()
    add_quick_runs(estimate)
    estimate.add_run("n", 60.0)
    assert estimate.brief_types() == "n"
    estimate.add_run("n", 60.0)
    assert estimate.brief_types() == ""
    add_quick_runs(estimate)
    assert estimate.brief_types() == "n"


def test_runs_of_middling_length_are_not_brief() -> None:
    estimate = RuntimeEstimate()
    for _ in range(100):
        estimate.add_run("n", 0.005)
    assert estimate.brief_types() == ""


def prefetched_jobs(*fences: int) -> PrefetchedJobs:
    jobs = PrefetchedJobs()
    for fence in fences:
        job_id = f"j{fence}"
        jobs.add(ClaimedJob(job_id, b"", fence, 1, 0, waited_ms=100), Job(job_id=job_id, name="n"))
    return jobs


def test_prefetched_jobs_start_in_the_order_of_their_claims_and_keep_waiting() -> None:
    jobs = prefetched_jobs(1, 2)
    time.sleep(PREFETCH_TIMEOUT_S)
    first = jobs.pop_next()
    assert first.claimed.fence == 1
    assert first.waited_ms() >= 100 + PREFETCH_TIMEOUT_S * 1000
    assert jobs.fences() == {2}


def test_jobs_that_have_waited_for_too_long_are_released_and_do_not_start() -> None:
    jobs = prefetched_jobs(1, 2)
    assert 0 < jobs.seconds_until_due() <= PREFETCH_TIMEOUT_S
    assert jobs.may_start()
    time.sleep(PREFETCH_TIMEOUT_S)
    assert [waiting_job.claimed.fence for waiting_job in jobs.to_release()] == [1, 2]
    assert not jobs.may_start()
    assert jobs.seconds_until_due() > 3600
    jobs.clear()
    assert not jobs
    assert not jobs.to_release()


def test_jobs_marked_for_release_are_released_until_that_is_confirmed() -> None:
    jobs = prefetched_jobs(1)
    jobs.mark_for_release()
    assert jobs.to_release()
    assert jobs.to_release()
    assert not jobs.may_start()


def test_marking_nothing_for_release_holds_up_nothing() -> None:
    jobs = prefetched_jobs()
    jobs.mark_for_release()
    jobs.add(ClaimedJob("j", b"", 1, 1, 0), Job(job_id="j", name="n"))
    assert jobs.may_start()


def test_one_is_removed_by_its_id_and_fence() -> None:
    jobs = prefetched_jobs(1, 2)
    assert jobs.remove("j1", 2) is None
    waiting = jobs.remove("j1", 1)
    assert waiting is not None
    assert waiting.claimed.job_id == "j1"
    assert jobs.fences() == {2}


def test_a_job_added_after_the_last_marked_one_was_removed_starts() -> None:
    jobs = prefetched_jobs(1)
    jobs.mark_for_release()
    assert jobs.remove("j1", 1) is not None
    jobs.add(ClaimedJob("j2", b"", 2, 1, 0), Job(job_id="j2", name="n"))
    assert jobs.may_start()
