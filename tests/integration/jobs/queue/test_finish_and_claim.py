"""The ends of jobs and the next claim in one script: repeated, late and unknown ones."""

from __future__ import annotations

import time
from typing import Any

import pytest

from tests.support.jobs.queue import QueueHarness, claim, claiming, die, ending, ids
from worker_runtime.jobs.protocol import calls as job_calls
from worker_runtime.jobs.protocol import keys as job_keys
from worker_runtime.jobs.protocol import scripts as job_scripts
from worker_runtime.jobs.protocol.messages import JobStatus
from worker_runtime.jobs.queue import ClaimedJob, JobQueue

FLEET = job_keys.FLEET_TAG


def sent(runner: JobQueue, number: int, *ended: ClaimedJob) -> tuple[list[bytes], list[Any]]:
    """One call as it was sent, with the number of its claim."""
    ends = [value for job in ended for value in ending(job).arguments()]
    args = (*claiming(runner, number), *ends)
    *outcomes, claims = runner.client.run(
        job_scripts.FINISH_AND_CLAIM, [job_keys.meta(FLEET)], args
    )
    return outcomes, claims


def running(harness: QueueHarness, name: str = "work") -> int:
    return int(harness.client.execute("HGET", job_keys.running(FLEET, name), "n") or 0)


def test_one_call_ends_jobs_and_takes_the_next_ones(harness: QueueHarness) -> None:
    runner = harness.runner()
    for number in range(4):
        harness.enqueue(f"j{number}")
    first, second = claim(runner, 2)
    outcomes, claims = runner.finish_and_claim([ending(first), ending(second, JobStatus.FAILED)], 3)
    assert outcomes == ["done", "failed"]
    assert claims is not None
    assert ids(claims.jobs) == ["j2", "j3"]
    assert ids(runner.list_held() or []) == ["j2", "j3"]
    assert running(harness) == 2


def test_a_call_that_comes_twice_ends_nothing_twice_and_takes_nothing(
    harness: QueueHarness,
) -> None:
    runner = harness.runner()
    harness.enqueue("j0")
    harness.enqueue("j1")
    harness.enqueue("j2")
    (job,) = claim(runner)
    assert sent(runner, 2, job)[0] == [b"done"]
    assert sent(runner, 2, job) == ([b"gone"], [b"stale", -1])
    assert ids(runner.list_held() or []) == ["j1"]
    assert harness.client.execute("XLEN", job_keys.events(FLEET)) == 1
    assert running(harness) == 1


def test_a_call_that_comes_late_still_writes_its_ends(harness: QueueHarness) -> None:
    runner = harness.runner()
    harness.enqueue("j0")
    harness.enqueue("j1")
    (job,) = claim(runner)
    runner.list_held()  # after the lost connection; what was sent before it takes nothing any more
    assert sent(runner, 2, job) == ([b"done"], [b"stale", -1])
    assert harness.result("j0") is not None
    assert running(harness) == 0
    outcomes, claims = runner.finish_and_claim([ending(job)], 1)
    assert outcomes == ["gone"]
    assert claims is not None
    assert ids(claims.jobs) == ["j1"]


def test_a_call_of_a_runner_that_was_taken_over_writes_and_takes_nothing(
    harness: QueueHarness,
) -> None:
    slow, quick = harness.runner("slow"), harness.runner("quick")
    harness.enqueue("j", idempotent=True)
    (job,) = claim(slow)
    assert die(slow, quick) == {"j": "returned"}
    outcomes, claims = slow.finish_and_claim([ending(job)], 1)
    assert outcomes == ["gone"]
    assert claims is not None
    assert (claims.status, claims.jobs) == ("lost", [])
    assert ids(claim(quick)) == ["j"]


def test_a_server_that_has_forgotten_the_scripts_gets_them_again(harness: QueueHarness) -> None:
    runner = harness.runner()
    harness.enqueue("j0")
    harness.enqueue("j1")
    harness.client.execute("SCRIPT", "FLUSH")
    (job,) = claim(runner)
    harness.client.execute("SCRIPT", "FLUSH")
    outcomes, claims = runner.finish_and_claim([ending(job)], 1)
    assert outcomes == ["done"]
    assert claims is not None
    harness.client.execute("SCRIPT", "FLUSH")
    assert runner.finish_and_claim([ending(claims.jobs[0])], 0) == (["done"], None)
    assert running(harness) == 0


def test_what_ends_makes_room_under_a_limit_in_the_same_turn(harness: QueueHarness) -> None:
    runner = harness.runner()
    harness.setting(job_calls.limit_field("work"), 1)
    for number in range(3):
        harness.enqueue(f"j{number}")
    (job,) = claim(runner, 2)
    outcomes, claims = runner.finish_and_claim([ending(job)], 2)
    assert outcomes == ["done"]
    assert claims is not None
    assert ids(claims.jobs) == ["j1"]
    assert running(harness) == 1


@pytest.mark.parametrize("name", ["work", "other"])
def test_the_counts_of_what_runs_follow_a_turn(harness: QueueHarness, name: str) -> None:
    runner = harness.runner()
    harness.enqueue("j0", name)
    harness.enqueue("j1", "work")
    (job,) = claim(runner)
    assert running(harness, name) == 1
    runner.finish_and_claim([ending(job)], 1)
    assert (running(harness, "work"), running(harness, "other")) == (1, 0)


def test_a_retry_that_is_due_at_once_may_be_taken_in_the_same_turn(harness: QueueHarness) -> None:
    runner = harness.runner()
    harness.enqueue("j")
    (job,) = claim(runner)
    outcomes, claims = runner.finish_and_claim([ending(job, JobStatus.RETRY)], 1)
    assert outcomes == ["retry"]
    assert claims is not None
    assert [(again.job_id, again.attempt) for again in claims.jobs] == [("j", 2)]
    assert ids(runner.list_held() or []) == ["j"]
    assert running(harness) == 1


def test_a_user_who_makes_up_thousands_of_queues_and_jobs_holds_up_nobody(
    harness: QueueHarness,
) -> None:
    """Their worker may write what it likes there, and Valkey serves nobody else while a script
    runs."""
    tag, runner = job_keys.user_tag("mallory"), harness.runner()
    name = runner.identity.runner_id
    harness.client.execute("HSET", job_keys.runner(tag, name), "number", 0, "name", "r")
    for start in range(0, 5_000, 1_000):
        numbers = range(start, start + 1_000)
        queues = [word for number in numbers for word in ("0", f"q{number}")]
        harness.client.execute("ZADD", job_keys.ready(tag), *queues)
        made_up = [word for number in numbers for word in ("0", f"job-{number}")]
        harness.client.execute("ZADD", job_keys.subqueue(tag, "q0", "work"), *made_up)
    harness.client.execute("ZADD", f"jobs:{{{tag}}}:subqueues:q0", "0", "work")
    began = time.monotonic()
    claims = harness.client.run(
        job_scripts.FINISH_AND_CLAIM, [job_keys.meta(tag)], claiming(runner, 1)
    )
    assert time.monotonic() - began < 1.0
    assert claims == [[b"empty", -1]]
