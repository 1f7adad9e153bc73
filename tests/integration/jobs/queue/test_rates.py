"""Rates for each key of a type, kept inside the claim."""

from __future__ import annotations

from itertools import pairwise

from tests.support.jobs.queue import KEYS, QueueHarness, claim, end, ids
from worker_runtime.jobs.protocol import calls as job_calls
from worker_runtime.jobs.protocol.messages import JobStatus
from worker_runtime.jobs.queue import JobQueue

#: Milliseconds: no test lasts as long, so nothing comes by itself.
LONG = 3_600_000


def drain(runner: JobQueue) -> list[str]:
    order: list[str] = []
    while jobs := claim(runner):
        order += ids(jobs)
        end(runner, jobs[0])
    return order


def test_a_key_has_its_burst_and_then_waits_while_others_continue(harness: QueueHarness) -> None:
    harness.setting(job_calls.rate_field("work"), LONG)
    harness.setting(job_calls.rate_burst_field("work"), 2)
    runner = harness.runner()
    for number in range(4):
        harness.enqueue(f"a{number}", rate_key="a")
    for number in range(3):
        harness.enqueue(f"b{number}", rate_key="b")
    harness.enqueue("free")
    assert drain(runner) == ["a0", "a1", "b0", "b1", "free"]
    assert [harness.field(job, "state") for job in ("a2", "a3", "b2")] == ["delayed"] * 3


def test_each_job_that_comes_too_early_has_a_time_of_its_own(harness: QueueHarness) -> None:
    harness.setting(job_calls.rate_field("work"), LONG)
    runner = harness.runner()
    for number in range(4):
        harness.enqueue(f"j{number}", rate_key="a")
    assert drain(runner) == ["j0"]
    due = [int(harness.field(f"j{number}", "due") or 0) for number in (1, 2, 3)]
    assert [later - sooner for sooner, later in pairwise(due)] == [LONG, LONG]
    assert drain(runner) == []  # nobody looks at them again before
    for number in (2, 1, 3):
        harness.make_due(f"j{number}")
    assert sorted(drain(runner)) == ["j1", "j2", "j3"]


def test_another_attempt_asks_for_its_turn_again(harness: QueueHarness) -> None:
    harness.setting(job_calls.rate_field("work"), LONG)
    runner = harness.runner()
    harness.enqueue("j", rate_key="a", retry_delay=0.0)
    [job] = claim(runner)
    assert end(runner, job, JobStatus.RETRY) == "retry"
    assert claim(runner) == []
    harness.make_due("j")
    assert ids(claim(runner)) == ["j"]


def test_types_and_jobs_without_a_rate_or_a_key_are_not_held_up(harness: QueueHarness) -> None:
    harness.setting(job_calls.rate_field("work"), LONG)
    runner = harness.runner()
    for number in range(3):
        harness.enqueue(f"other{number}", name="other", rate_key="a")
        harness.enqueue(f"keyless{number}")
    assert len(drain(runner)) == 6


def test_a_rate_holds_for_all_jobs_of_an_own_type_that_declares_none(harness: QueueHarness) -> None:
    """An operator may set a rate for any type. Its jobs name no rate key."""
    harness.setting(job_calls.rate_field("shop/jobs.resize"), LONG)
    runner = harness.runner()
    for number in range(3):
        harness.enqueue(f"j{number}", name="shop/jobs.resize", type_version=1 + number % 2)
    harness.enqueue("unlimited", name="shop/jobs.send", type_version=1)
    assert drain(runner) == ["j0", "unlimited"]
    assert [harness.field(job, "state") for job in ("j1", "j2")] == ["delayed"] * 2


def test_a_delayed_turn_can_be_cancelled(harness: QueueHarness) -> None:
    harness.setting(job_calls.rate_field("work"), LONG)
    runner = harness.runner()
    harness.enqueue("j0", rate_key="a")
    harness.enqueue("j1", rate_key="a")
    assert drain(runner) == ["j0"]
    assert harness.call(job_calls.cancel("j1", KEYS)) == "cancelled"
    assert claim(runner) == []


def test_a_flood_of_one_key_is_put_off_in_pieces(harness: QueueHarness) -> None:
    harness.setting(job_calls.rate_field("work"), LONG)
    runner = harness.runner()
    for number in range(501):
        harness.enqueue(f"j{number}", rate_key="a")
    harness.enqueue("last", name="other", priority=0)
    claims = runner.finish_and_claim([], 2)[1]
    assert claims is not None
    assert ids(claims.jobs) == ["j0"]
    assert claims.due == 0.0  # the runner comes back at once
    assert [job for _ in range(3) for job in ids(claim(runner))] == ["last"]


def test_jobs_flow_at_their_rate(harness: QueueHarness) -> None:
    harness.setting(job_calls.rate_field("work"), 20)
    runner = harness.runner()
    for number in range(4):
        harness.enqueue(f"j{number}", rate_key="a")
    began = 0
    order: list[str] = []
    late: list[int] = []
    while len(order) < 4:
        for job in claim(runner):
            at = int(harness.field(job.job_id, "started_at") or 0)
            began = began or at
            late.append(at - began)
            order.append(job.job_id)
            end(runner, job)
    assert order == ["j0", "j1", "j2", "j3"]
    assert all(ms >= 20 * number - 1 for number, ms in enumerate(late)), late
