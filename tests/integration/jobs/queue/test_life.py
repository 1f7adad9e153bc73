"""The life of a job: once per id, delayed, unique, leased, fenced, cancelled, requeued."""

from __future__ import annotations

import msgspec
import pytest

from infra.jobs.client import JobClient
from infra.jobs.view import JobInspector
from infra.valkey.client import connect_valkey
from tests.support.jobs.queue import KEYS, QueueHarness, claim, claiming, die, end, ids
from tests.support.message_signing import SECRETS
from worker_runtime.jobs.protocol import calls as job_calls
from worker_runtime.jobs.protocol import keys as job_keys
from worker_runtime.jobs.protocol import scripts as job_scripts
from worker_runtime.jobs.protocol.messages import (
    FLEET_RESULT_TTL_S,
    MAX_JOB_BYTES,
    Job,
    JobResult,
    JobStatus,
    sign_result,
)
from worker_runtime.jobs.queue import FinishedRun, JobQueue, RunnerIdentity
from worker_runtime.protocol.errors import MalformedMessage

FLEET = job_keys.FLEET_TAG


def test_a_job_is_taken_once_whatever_is_repeated(harness: QueueHarness) -> None:
    runner = harness.runner()
    assert [harness.enqueue("j"), harness.enqueue("j")] == ["queued", "seen"]
    (job,) = claim(runner)
    assert harness.enqueue("j") == "seen"
    end(runner, job)
    assert harness.enqueue("j") == "seen"
    assert claim(runner) == []


def test_a_node_on_which_nothing_runs_any_more_leaves_no_trace(harness: QueueHarness) -> None:
    for node in ("host-of-yesterday", "host-of-today"):
        runner = harness.runner(node=node)
        harness.enqueue(node, idempotent=True)
        (job,) = claim(runner)
        assert harness.client.execute("HGETALL", job_keys.running(FLEET, "work")) == [
            node.encode(),
            b"1",
        ]
        end(runner, job)
    assert harness.client.execute("EXISTS", job_keys.running(FLEET, "work")) == 0


def test_a_unique_key_is_taken_until_its_job_has_ended(harness: QueueHarness) -> None:
    runner = harness.runner()
    assert harness.enqueue("a", unique="report:7") == "queued"
    assert harness.call(
        job_calls.enqueue(Job(job_id="b", name="work", unique="report:7"), KEYS)
    ) == [
        "duplicate",
        "a",
    ]
    end(runner, claim(runner)[0], JobStatus.RETRY, delay=3600)
    assert harness.enqueue("c", unique="report:7") == "duplicate"
    harness.make_due("a")
    end(runner, claim(runner)[0])
    assert harness.enqueue("d", unique="report:7") == "queued"


def test_a_delayed_job_waits_and_the_runner_learns_how_long(harness: QueueHarness) -> None:
    runner = harness.runner()
    harness.enqueue("later", delay=3600)
    claims = runner.finish_and_claim([], 1)[1]
    assert claims is not None
    assert claims.status == "empty"
    assert claims.due is not None
    assert 3590 < claims.due <= 3600
    harness.make_due("later")
    assert ids(claim(runner)) == ["later"]


def test_a_renewal_brings_up_what_is_due_and_rings(harness: QueueHarness) -> None:
    runner = harness.runner()
    harness.enqueue("later", delay=3600)
    harness.client.execute("DEL", *runner.doorbells())
    harness.make_due("later")
    runner.renew("idle", [])
    assert harness.client.execute("LLEN", job_keys.doorbell(FLEET)) == 1
    assert ids(claim(runner)) == ["later"]


def test_the_result_is_stored_published_and_kept_for_a_while(harness: QueueHarness) -> None:
    runner = harness.runner()
    harness.enqueue("j")
    (job,) = claim(runner)
    assert end(runner, job) == "done"
    result = harness.result("j")
    assert result is not None
    assert result.status == JobStatus.DONE
    assert 490 < harness.client.execute("TTL", job_keys.result(FLEET, "j")) <= 500
    assert harness.client.execute("EXISTS", job_keys.job(FLEET, "j")) == 0


def test_a_runner_that_was_taken_over_writes_nothing(harness: QueueHarness) -> None:
    slow, quick = harness.runner("slow"), harness.runner("quick")
    harness.enqueue("j", idempotent=True)
    (old,) = claim(slow)
    assert die(slow, quick) == {"j": "returned"}
    assert end(slow, old) == "gone"
    (new,) = claim(quick)
    assert end(slow, old) == "gone"
    assert new.fence > old.fence
    assert (new.attempt, new.crashes) == (2, 1)
    assert not slow.write_progress("j", old.fence, b"50")
    assert quick.write_progress("j", new.fence, b"50")
    assert end(quick, new) == "done"
    assert end(quick, new) == "gone"


def test_a_runner_from_before_a_flush_ends_no_job_of_after_it(harness: QueueHarness) -> None:
    before = harness.runner("before")
    harness.enqueue("j", idempotent=True)
    (old,) = claim(before)
    harness.client.execute("FLUSHALL")
    after = harness.runner("after")
    harness.enqueue("j", idempotent=True)  # by its producer, under the same id
    (new,) = claim(after)
    assert not before.write_progress("j", old.fence, b"50")
    assert end(before, old) == "gone"
    assert end(after, new) == "done"


def test_a_returned_job_keeps_its_place(harness: QueueHarness) -> None:
    first, second = harness.runner("one"), harness.runner("two")
    for number in range(3):
        harness.enqueue(f"j{number}", idempotent=True)
    claim(first)
    die(first, second)
    assert ids(claim(second, 3)) == ["j0", "j1", "j2"]


def test_a_job_that_must_not_run_twice_fails_as_unknown_when_its_runner_dies(
    harness: QueueHarness,
) -> None:
    first, second = harness.runner("one"), harness.runner("two")
    harness.enqueue("j")
    claim(first)
    assert die(first, second) == {"j": "failed"}
    assert claim(second) == []
    result = harness.result("j")
    assert result is not None
    assert result.failure is not None
    assert (result.status, result.failure.code) == (JobStatus.FAILED, "JOB_OUTCOME_UNKNOWN")
    assert harness.client.execute("ZSCORE", job_keys.failed(FLEET), "j") is not None


def test_a_job_that_kills_its_runners_ends_as_failed(harness: QueueHarness) -> None:
    finder = harness.runner("finder")
    harness.enqueue("bomb", idempotent=True)
    fates = []
    for _ in range(3):
        victim = harness.runner("victim")
        claim(victim)
        fates.append(die(victim, finder))
    assert fates == [{"bomb": "returned"}, {"bomb": "returned"}, {"bomb": "failed"}]
    result = harness.result("bomb")
    assert result is not None
    assert result.failure is not None
    assert result.failure.code == "JOB_CRASHED"


def test_a_runner_that_beat_since_is_not_reaped(harness: QueueHarness) -> None:
    first, second = harness.runner("one"), harness.runner("two")
    harness.enqueue("j", idempotent=True)
    claim(first)
    seen = second.beats()[first.identity.runner_id]
    assert first.renew("busy", ["j"]).registered
    assert second.reap(first.identity.runner_id, seen) is None
    assert ids(first.list_held() or []) == ["j"]


def test_a_reaped_runner_learns_that_it_is_lost(harness: QueueHarness) -> None:
    first, second = harness.runner("one"), harness.runner("two")
    die(first, second)
    assert not first.renew("idle", []).registered
    assert first.list_held() is None
    claims = first.finish_and_claim([], 1)[1]
    assert claims is not None
    assert claims.status == "lost"


def test_a_runner_that_leaves_gives_back_without_counting_a_crash(harness: QueueHarness) -> None:
    first, second = harness.runner("one"), harness.runner("two")
    harness.enqueue("again", idempotent=True)
    harness.enqueue("once")
    claim(first, 2)
    assert first.sign_off() == {"again": "returned", "once": "failed"}
    (job,) = claim(second)
    assert (job.job_id, job.crashes) == ("again", 0)
    assert list(second.beats()) == [second.identity.runner_id]


def test_a_claim_whose_reply_was_lost_is_found_and_a_late_one_takes_nothing(
    harness: QueueHarness,
) -> None:
    runner = harness.runner()
    harness.enqueue("j0")
    harness.enqueue("j1")
    (lost,) = claim(runner)
    (held,) = runner.list_held() or []
    assert (held.job_id, held.fence) == ("j0", lost.fence)
    (late,) = runner.client.run(
        job_scripts.FINISH_AND_CLAIM, [job_keys.meta(FLEET)], claiming(runner, 1)
    )
    assert late[0] == b"stale"
    assert ids(claim(runner)) == ["j1"]


def test_a_running_job_is_cancelled_through_its_runner(harness: QueueHarness) -> None:
    runner = harness.runner()
    harness.enqueue("j", idempotent=True)
    (job,) = claim(runner)
    assert harness.call(job_calls.cancel("j", KEYS)) == "asked"
    assert harness.client.execute("LPOP", runner.mailbox()) == f"cancel {job.fence} j".encode()
    # It ended by itself just then: what would have been a retry is the end.
    assert end(runner, job, JobStatus.RETRY) == "cancelled"
    assert harness.call(job_calls.cancel("j", KEYS)) == "unknown"


async def test_a_retry_that_was_cancelled_is_reported_as_cancelled(harness: QueueHarness) -> None:
    runner = harness.runner()
    harness.enqueue("j", idempotent=True)
    (job,) = claim(runner)
    harness.call(job_calls.cancel("j", KEYS))
    result = sign_result(JobResult(job_id="j", status=JobStatus.RETRY), KEYS)
    runner.finish_and_claim([FinishedRun("j", job.fence, JobStatus.RETRY, result)], 0)
    with JobInspector(harness.url) as jobs:
        shown = jobs.job("j")
    client = connect_valkey(harness.url)
    fetched = await JobClient(client, SECRETS).get("j")
    await client.aclose()
    assert shown is not None
    assert fetched is not None
    assert (shown.state, fetched.state) == ("cancelled", "cancelled")


def test_the_end_of_a_cancelled_job_of_the_fleet_outlasts_those_who_note_it(
    harness: QueueHarness,
) -> None:
    runner = harness.runner()
    harness.enqueue("reaped", idempotent=True)
    claim(runner)
    harness.enqueue("waiting")
    for job_id in ("waiting", "reaped"):
        harness.call(job_calls.cancel(job_id, KEYS))
    die(runner, harness.runner())
    for job_id in ("waiting", "reaped"):
        ttl = harness.client.execute("TTL", job_keys.result(FLEET, job_id))
        assert ttl > FLEET_RESULT_TTL_S - 100


def test_a_waiting_and_a_delayed_job_are_cancelled_at_once(harness: QueueHarness) -> None:
    runner = harness.runner()
    harness.enqueue("now")
    harness.enqueue("later", delay=60, unique="key")
    assert [harness.call(job_calls.cancel(job, KEYS)) for job in ("now", "later")] == [
        "cancelled"
    ] * 2
    assert claim(runner) == []
    result = harness.result("later")
    assert result is not None
    assert result.status == JobStatus.CANCELLED
    assert harness.enqueue("next", unique="key") == "queued"


def test_a_cancelled_job_does_not_come_back_after_its_runner_died(harness: QueueHarness) -> None:
    first, second = harness.runner("one"), harness.runner("two")
    harness.enqueue("j", idempotent=True)
    claim(first)
    harness.call(job_calls.cancel("j", KEYS))
    assert die(first, second) == {"j": "cancelled"}
    assert claim(second) == []


def test_failed_jobs_are_requeued_as_new_ones(harness: QueueHarness) -> None:
    runner = harness.runner()
    for name in ("a", "b"):
        harness.enqueue(name, unique=f"key-{name}")
        end(runner, claim(runner)[0], JobStatus.FAILED)
    harness.enqueue("other", unique="key-b")
    assert harness.call(job_calls.requeue(["a", "b", "never"])) == ["a"]
    assert ids(claim(runner)) == ["other"]
    (again,) = claim(runner)
    assert (again.job_id, again.attempt, again.crashes) == ("a", 1, 0)
    assert harness.client.execute("TTL", job_keys.job(FLEET, "a")) == -1


@pytest.mark.parametrize("scope", [{}, {"queue": "default"}, {"runner": "r"}])
def test_suspension_lasts_and_resuming_wakes_the_runners(
    harness: QueueHarness, scope: dict[str, str]
) -> None:
    runner = harness.runner("r")
    harness.enqueue("j")
    assert harness.call(job_calls.suspend(**scope)) == 1
    assert claim(runner) == []
    successor = harness.runner("r")  # after a restart of the runner
    assert claim(successor) == []
    harness.client.execute("DEL", successor.mailbox())
    assert harness.call(job_calls.resume(**scope)) == 1
    assert harness.client.execute("LLEN", successor.mailbox()) == 1
    assert ids(claim(successor)) == ["j"]


def test_users_and_fleet_have_queues_of_their_own(harness: QueueHarness) -> None:
    runner = harness.runner()
    harness.call(job_calls.enqueue(Job(job_id="j", name="work"), KEYS, "42"))
    assert claim(runner) == []
    assert harness.client.execute("EXISTS", job_keys.job("42", "j")) == 1


@pytest.mark.parametrize(
    "fields",
    [
        {"name": "Bad Name"},
        {"queue": "a:b"},
        {"job_id": "{x}"},
        {"job_id": ""},
        {"group": "white space"},
        {"priority": 10},
        {"timeout": 0},
        {"delay": -1.0},
        {"attempts": 0},
        {"args": msgspec.Raw(msgspec.json.encode("x" * MAX_JOB_BYTES))},
    ],
)
def test_what_no_runner_would_take_is_refused_at_once(fields: dict[str, object]) -> None:
    job = Job(**{"job_id": "j", "name": "work", **fields})  # type: ignore[arg-type]
    with pytest.raises(MalformedMessage):
        job_calls.enqueue(job, KEYS)


def test_a_user_leaves_the_newest_fifty_failures_behind_and_the_fleet_all(
    harness: QueueHarness,
) -> None:
    for tag, kept in ((job_keys.user_tag("alice"), 50), (FLEET, 60)):
        runner = JobQueue(harness.client, RunnerIdentity(f"r-{tag}", "r", "n", ("*",)), tag)
        runner.join()
        for number in range(60):
            harness.call(job_calls.enqueue(Job(job_id=f"j{number:02}", name="work"), KEYS, tag))
            end(runner, claim(runner)[0], JobStatus.FAILED)
        expected = [f"j{number:02}" for number in range(60 - kept, 60)]
        listed = harness.client.execute("ZRANGE", job_keys.failed(tag), 0, -1)
        assert [job.decode() for job in listed] == expected
        assert (
            harness.client.execute("EXISTS", *(job_keys.job(tag, f"j{n:02}") for n in range(60)))
            == kept
        )
        lives = harness.client.execute("TTL", job_keys.events(tag))
        assert 0 < lives <= 86_400 if kept == 50 else lives == -1
