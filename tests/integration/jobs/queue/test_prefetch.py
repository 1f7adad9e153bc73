"""Prefetching: which jobs are claimed beyond the free slots, and how they are given back."""

from __future__ import annotations

from typing import Any

import pytest

from tests.support.jobs.queue import KEYS, QueueHarness, claim, die, end, ending, ids
from worker_runtime.jobs.protocol import calls as job_calls
from worker_runtime.jobs.protocol import keys as job_keys
from worker_runtime.jobs.protocol.messages import JobStatus
from worker_runtime.jobs.queue import ClaimedJob, JobQueue

FLEET = job_keys.FLEET_TAG


def prefetch(
    runner: JobQueue, want: int = 1, extra: int = 8, brief: str = "work"
) -> list[ClaimedJob]:
    claims = runner.finish_and_claim([], want, extra, brief)[1]
    assert claims is not None
    return claims.jobs


def fill(harness: QueueHarness, *job_ids: str, **fields: Any) -> None:
    for job_id in job_ids:
        harness.enqueue(job_id, **{"idempotent": True, **fields})


def subqueue(
    harness: QueueHarness, name: str = "work", queue: str = "default"
) -> list[tuple[bytes, float]]:
    reply = harness.client.execute(
        "ZRANGE", job_keys.subqueue(FLEET, queue, name), 0, -1, "WITHSCORES"
    )
    return [(job_id, float(score)) for job_id, score in zip(reply[::2], reply[1::2], strict=True)]


def running(harness: QueueHarness) -> int:
    return int(harness.client.execute("HGET", job_keys.running(FLEET, "work"), "n") or 0)


def test_plain_jobs_are_prefetched_in_their_order(harness: QueueHarness) -> None:
    runner = harness.runner()
    fill(harness, "a", "b", "c", "d")
    fill(harness, "first", priority=9)
    assert ids(prefetch(runner, 1, 3)) == ["first", "a", "b", "c"]
    assert running(harness) == 4
    assert ids(prefetch(runner, 0, 3)) == ["d"]
    assert sorted(ids(runner.list_held() or [])) == ["a", "b", "c", "d", "first"]


def test_one_call_ends_jobs_and_prefetches_others_while_all_slots_are_busy(
    harness: QueueHarness,
) -> None:
    runner = harness.runner()
    fill(harness, "a", "b", "c")
    first, _ = prefetch(runner, 1, 1)
    outcomes, claims = runner.finish_and_claim([ending(first)], 0, 8, "work")
    assert outcomes == ["done"]
    assert claims is not None
    assert ids(claims.jobs) == ["c"]


@pytest.mark.parametrize(
    "fields",
    [{"idempotent": False}, {"group": "g"}, {"unique": "u"}, {"name": "other"}],
    ids=["must not run twice", "in a group", "with a unique key", "not brief"],
)
def test_a_job_that_is_not_plain_is_not_prefetched_and_keeps_its_place(
    harness: QueueHarness, fields: dict[str, Any]
) -> None:
    runner = harness.runner()
    fill(harness, "a")
    fill(harness, "b", **fields)
    fill(harness, "c")
    name = fields.get("name", "work")
    before = subqueue(harness, name)[-2:]
    assert ids(prefetch(runner)) == ["a"]
    assert subqueue(harness, name)[-2:] == before
    assert ids(claim(runner, 3)) == ["b", "c"]


@pytest.mark.parametrize(
    "fields", [{"idempotent": False}, {"group": "g"}, {"unique": "u"}, {"name": "other"}]
)
def test_nothing_is_prefetched_behind_a_job_that_is_not_plain(
    harness: QueueHarness, fields: dict[str, Any]
) -> None:
    runner = harness.runner()
    fill(harness, "a", **fields)
    fill(harness, "b", "c")
    assert ids(prefetch(runner)) == ["a"]
    assert ids(prefetch(runner, 0)) == ["b", "c"]


@pytest.mark.parametrize(
    "setting", [job_calls.limit_field, job_calls.node_limit_field, job_calls.rate_field]
)
def test_a_type_with_a_limit_or_a_rate_is_not_prefetched(
    harness: QueueHarness, setting: Any
) -> None:
    runner = harness.runner()
    harness.setting(setting("work"), 100)
    fill(harness, "a", "b", rate_key="k")
    assert ids(prefetch(runner)) == ["a"]
    assert ids(prefetch(runner, 0)) == []
    assert harness.field("b", "state") == "waiting"
    assert harness.field("b", "granted") is None


def test_a_job_that_came_back_from_a_crash_is_claimed_alone(harness: QueueHarness) -> None:
    runner, finder = harness.runner("one"), harness.runner("two")
    fill(harness, "a", "b", "c")
    assert ids(prefetch(runner)) == ["a", "b", "c"]
    die(runner, finder)
    fill(harness, "d")
    for job_id in ("a", "b", "c", "d"):
        (job,) = prefetch(finder)
        assert job.job_id == job_id
        end(finder, job)


def test_a_suspended_queue_is_not_prefetched(harness: QueueHarness) -> None:
    runner = harness.runner()
    fill(harness, "a", "b")
    assert ids(prefetch(runner, 1, 0)) == ["a"]
    harness.call(job_calls.suspend(queue="default"))
    assert ids(prefetch(runner, 0)) == []


def test_other_runners_are_woken_for_what_is_left(harness: QueueHarness) -> None:
    runner = harness.runner()
    harness.runner("idle")
    fill(harness, "a", "b", "c")
    harness.client.execute("DEL", *runner.doorbells())
    prefetch(runner, 1, 1)
    assert harness.client.execute("LLEN", job_keys.doorbell(FLEET)) == 1


def test_a_released_job_is_as_if_it_had_not_been_claimed(harness: QueueHarness) -> None:
    runner, other = harness.runner("one"), harness.runner("two")
    harness.setting(job_calls.weight_field("default"), 4)
    fill(harness, "a", "b", "c", "d")
    before = subqueue(harness)
    ready = job_keys.ready(FLEET)
    first, *rest = prefetch(runner, 1, 2)
    harness.client.execute("DEL", job_keys.doorbell(FLEET))
    assert runner.release(rest) == ["returned", "returned"]
    assert subqueue(harness) == before[1:]
    assert float(harness.client.execute("ZSCORE", ready, "default")) == 0.25
    assert [harness.field("b", field) for field in ("state", "attempt", "crashes")] == [
        "waiting",
        "0",
        "0",
    ]
    assert (running(harness), ids(runner.list_held() or [])) == (1, ["a"])
    assert harness.client.execute("LLEN", job_keys.doorbell(FLEET)) == 1
    again = claim(other, 3)
    assert [(job.job_id, job.attempt) for job in again] == [("b", 1), ("c", 1), ("d", 1)]
    assert end(runner, rest[0]) == "gone"
    assert end(runner, first) == "done"
    assert end(other, again[0]) == "done"


def test_a_queue_that_is_empty_meanwhile_gets_its_turns_back(harness: QueueHarness) -> None:
    runner = harness.runner()
    fill(harness, "a", "b", "c")
    _, *rest = prefetch(runner)
    assert runner.release(rest) == ["returned", "returned"]
    assert float(harness.client.execute("ZSCORE", job_keys.ready(FLEET), "default")) == 1


def test_releasing_twice_releases_once(harness: QueueHarness) -> None:
    runner, other = harness.runner("one"), harness.runner("two")
    fill(harness, "a", "b")
    _, job = prefetch(runner)
    assert runner.release([job]) == ["returned"]
    assert runner.release([job]) == ["gone"]
    assert ids(claim(other)) == ["b"]
    assert runner.release([job]) == ["gone"]
    assert (harness.field("b", "state"), harness.field("b", "attempt"), running(harness)) == (
        "running",
        "1",
        2,
    )


def test_a_runner_that_was_reaped_releases_nothing(harness: QueueHarness) -> None:
    runner, finder = harness.runner("one"), harness.runner("two")
    fill(harness, "a", "b")
    _, job = prefetch(runner)
    die(runner, finder)
    assert runner.release([job]) == ["gone"]
    assert harness.field("b", "attempt") == "1"
    assert running(harness) == 0


def test_a_cancelled_job_is_not_released_and_ends_as_cancelled(harness: QueueHarness) -> None:
    runner = harness.runner()
    fill(harness, "a", "b", "c")
    _, *rest = prefetch(runner)
    assert harness.call(job_calls.cancel("b", KEYS)) == "asked"
    assert runner.release(rest) == ["cancelled", "returned"]
    assert harness.field("b", "state") == "running"
    assert end(runner, rest[0], JobStatus.CANCELLED) == "cancelled"
    assert ids(claim(runner, 3)) == ["c"]


def test_the_first_of_a_group_keeps_its_place_when_it_is_released(harness: QueueHarness) -> None:
    runner = harness.runner()
    fill(harness, "a", "b", group="g")
    (job,) = claim(runner)
    assert runner.release([job]) == ["returned"]
    assert (harness.field("a", "state"), harness.field("b", "state")) == ("waiting", "grouped")
    assert ids(claim(runner, 2)) == ["a"]


def test_a_queue_of_no_weight_gets_its_jobs_back_too(harness: QueueHarness) -> None:
    runner = harness.runner()
    harness.call(job_calls.configure({job_calls.weight_field("default"): "0"}))
    fill(harness, "a", "b", "c")
    _, *rest = prefetch(runner, 1, 1)
    assert runner.release(rest) == ["returned"]
    assert (running(harness), ids(runner.list_held() or [])) == (1, ["a"])
    assert sorted(ids(prefetch(runner, 2, 0))) == ["b", "c"]


@pytest.mark.parametrize("weight", ["0", "2"])
def test_the_only_job_of_a_queue_goes_back_whatever_its_weight(
    harness: QueueHarness, weight: str
) -> None:
    runner = harness.runner()
    harness.call(job_calls.configure({job_calls.weight_field("default"): weight}))
    fill(harness, "only")
    for _ in range(3):
        [only] = prefetch(runner, 1, 0)
        assert runner.release([only]) == ["returned"]
        assert (harness.field("only", "state"), harness.field("only", "attempt")) == (
            "waiting",
            "0",
        )
    harness.call(job_calls.configure({job_calls.weight_field("default"): None}))
    assert ids(prefetch(runner, 1, 0)) == ["only"]


def test_a_claim_says_which_jobs_are_plain(harness: QueueHarness) -> None:
    runner, finder = harness.runner("one"), harness.runner("two")
    harness.call(job_calls.configure({job_calls.limit_field("narrow"): "1"}))
    fill(harness, "crashed")
    claim(runner)
    die(runner, finder)
    fill(harness, "plain")
    fill(harness, "limited", name="narrow")
    fill(harness, "once", idempotent=False)
    fill(harness, "grouped", group="g")
    fill(harness, "unique", unique="u")
    fill(harness, "slow", name="slow")
    claimed = {job.job_id: job.plain for job in prefetch(finder, 7, 0, "work,narrow")}
    assert claimed.pop("plain") == 1
    assert set(claimed.values()) == {0}
    assert len(claimed) == 6
