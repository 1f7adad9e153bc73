"""A runner holds a limited number of jobs of one receiver; others' jobs pass those that wait."""

from __future__ import annotations

from tests.support.jobs.queue import KEYS, QueueHarness, claim
from worker_runtime.jobs.protocol import calls as job_calls
from worker_runtime.jobs.protocol import keys as job_keys
from worker_runtime.jobs.protocol.messages import JobStatus
from worker_runtime.jobs.queue import ClaimedJob, FinishedRun, JobQueue

FLEET = job_keys.FLEET_TAG


def ids(jobs: list[ClaimedJob]) -> list[str]:
    return [job.job_id for job in jobs]


def claim_beside(
    runner: JobQueue, held: dict[str, int], want: int, limit: int = 2
) -> list[ClaimedJob]:
    claims = runner.finish_and_claim([], want, receiver_limit=limit, receivers=held)[1]
    assert claims is not None
    return claims.jobs


def test_one_receiver_takes_no_more_slots_than_its_share(harness: QueueHarness) -> None:
    for number in range(6):
        harness.enqueue(f"slow{number}", receiver="slow:443")
    harness.enqueue("other", receiver="other:443")
    harness.enqueue("none")
    runner = harness.runner()

    first = claim_beside(runner, {}, 8)

    assert ids(first) == ["slow0", "slow1", "other", "none"]
    assert ids(claim_beside(runner, {"slow:443": 2, "other:443": 1}, 4)) == []


def test_a_parked_job_follows_in_its_order_once_there_is_room(harness: QueueHarness) -> None:
    for number in range(4):
        harness.enqueue(f"slow{number}", receiver="slow:443")
    runner = harness.runner()
    first = claim_beside(runner, {}, 8)
    harness.enqueue("slow4", receiver="slow:443")
    end = FinishedRun(first[0].job_id, first[0].fence, JobStatus.DONE, b"{}")

    outcomes, claims = runner.finish_and_claim(
        [end], 8, receiver_limit=2, receivers={"slow:443": 1}
    )

    assert outcomes == ["done"]
    assert claims is not None
    assert ids(claims.jobs) == ["slow2"]
    assert ids(claim_beside(runner, {"slow:443": 1}, 8)) == ["slow3"]
    assert ids(claim_beside(runner, {}, 8)) == ["slow4"]
    assert not harness.client.execute("KEYS", f"jobs:{{{FLEET}}}:parked*")


def test_another_runner_has_a_share_of_its_own(harness: QueueHarness) -> None:
    for number in range(4):
        harness.enqueue(f"slow{number}", receiver="slow:443")
    runner, other = harness.runner(), harness.runner()
    assert ids(claim_beside(runner, {}, 8)) == ["slow0", "slow1"]
    assert ids(claim_beside(other, {}, 8)) == ["slow2", "slow3"]


def test_thousands_of_jobs_of_a_slow_receiver_hold_up_nobody(harness: QueueHarness) -> None:
    for number in range(1000):
        harness.enqueue(f"slow{number}", receiver="slow:443")
    harness.enqueue("other", receiver="other:443")
    runner, claimed = harness.runner(), list[str]()
    # Each claim puts off a limited number, and says that the next one is due at once.
    for _ in range(10):
        claimed += ids(claim_beside(runner, {"slow:443": 2}, 4))
    assert claimed == ["other"]


def test_a_parked_job_can_be_cancelled(harness: QueueHarness) -> None:
    for number in range(2):
        harness.enqueue(f"slow{number}", receiver="slow:443")
    runner = harness.runner()
    assert ids(claim_beside(runner, {}, 8, limit=1)) == ["slow0"]

    harness.call(job_calls.cancel("slow1", KEYS))

    assert harness.result("slow1") is not None
    assert ids(claim_beside(runner, {}, 8, limit=1)) == []


def test_a_runner_without_a_limit_takes_parked_jobs(harness: QueueHarness) -> None:
    for number in range(3):
        harness.enqueue(f"slow{number}", receiver="slow:443")
    assert ids(claim_beside(harness.runner(), {}, 8, limit=1)) == ["slow0"]
    assert ids(claim(harness.runner(), 8)) == ["slow1", "slow2"]
