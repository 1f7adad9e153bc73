"""Which job comes next: priorities that age, first in first out, fair queues, groups and limits."""

from __future__ import annotations

from tests.support.jobs.queue import KEYS, QueueHarness, claim, die, end, ids
from worker_runtime.jobs.protocol import calls as job_calls
from worker_runtime.jobs.protocol import keys as job_keys
from worker_runtime.jobs.protocol.messages import JobStatus
from worker_runtime.jobs.queue import JobQueue


def drain(runner: JobQueue) -> list[str]:
    """Claims and ends until nothing is left; the order in which jobs came."""
    order = []
    while jobs := claim(runner):
        order += ids(jobs)
        end(runner, jobs[0])
    return order


def test_a_higher_priority_comes_first_and_equals_come_in_order(harness: QueueHarness) -> None:
    runner = harness.runner()
    for number in range(12):
        harness.enqueue(f"j{number}", priority=(3, 9, 5)[number % 3])
    assert drain(runner) == [*(f"j{n}" for n in (1, 4, 7, 10, 2, 5, 8, 11, 0, 3, 6, 9))]


def test_types_of_one_queue_share_one_order(harness: QueueHarness) -> None:
    runner = harness.runner()
    for number in range(9):
        harness.enqueue(f"j{number}", name=f"type{number % 3}")
    assert drain(runner) == [f"j{number}" for number in range(9)]


def test_a_job_that_waited_long_overtakes_a_higher_priority(harness: QueueHarness) -> None:
    harness.setting("boost:default", 0.001)  # one microsecond a step
    runner = harness.runner()
    harness.enqueue("low", priority=0)
    harness.enqueue("high", priority=9)
    assert drain(runner) == ["low", "high"]


def test_the_scheduler_queue_knows_no_priorities(harness: QueueHarness) -> None:
    runner = harness.runner()
    for number in range(6):
        harness.enqueue(f"j{number}", queue="scheduler", priority=number)
    assert drain(runner) == [f"j{number}" for number in range(6)]


def test_queues_share_turns_by_weight(harness: QueueHarness) -> None:
    runner = harness.runner()
    harness.setting(job_calls.weight_field("a"), 3)
    for number in range(80):
        harness.enqueue(f"a{number}", queue="a", priority=9)
        harness.enqueue(f"b{number}", queue="b", priority=0)
    first = drain(runner)[:40]
    assert sum(job.startswith("a") for job in first) == 30


def test_a_queue_that_was_empty_saves_up_no_turns(harness: QueueHarness) -> None:
    runner = harness.runner()
    for number in range(30):
        harness.enqueue(f"a{number}", queue="a")
    for _ in range(20):
        end(runner, claim(runner)[0])
    for number in range(10):
        harness.enqueue(f"b{number}", queue="b")
    first = drain(runner)[:10]
    assert sum(job.startswith("b") for job in first) == 5


def share_of(queue: str, jobs: list[str]) -> float:
    return sum(job.startswith(queue) for job in jobs) / len(jobs)


def fill(harness: QueueHarness, queue: str, jobs: int, name: str = "work") -> None:
    for number in range(jobs):
        harness.enqueue(f"{queue}-{harness.now_ms()}-{number}", queue=queue, name=name)


def test_a_queue_pays_for_no_turns_that_it_took_alone(harness: QueueHarness) -> None:
    runner = harness.runner()
    fill(harness, "busy", 40)
    drain(runner)
    fill(harness, "flood", 30)
    fill(harness, "busy", 10)
    assert share_of("busy", drain(runner)[:20]) >= 0.45


def test_a_suspended_queue_saves_up_no_turns(harness: QueueHarness) -> None:
    runner = harness.runner()
    fill(harness, "a", 20)
    fill(harness, "b", 60)
    harness.call(job_calls.suspend(queue="a"))
    for _ in range(40):
        end(runner, claim(runner)[0])
    harness.call(job_calls.resume(queue="a"))
    assert 0.45 <= share_of("a", drain(runner)[:20]) <= 0.55


def test_a_queue_at_its_limit_saves_up_no_turns(harness: QueueHarness) -> None:
    runner = harness.runner()
    harness.setting(job_calls.limit_field("export"), 0)
    fill(harness, "a", 20, "export")
    fill(harness, "b", 60)
    for _ in range(40):
        end(runner, claim(runner)[0])
    harness.setting(job_calls.limit_field("export"), 5)
    assert 0.45 <= share_of("a", drain(runner)[:20]) <= 0.55


def test_queues_of_other_runners_take_no_turns_from_these(harness: QueueHarness) -> None:
    runner, other = harness.runner(queues=("b", "c")), harness.runner(queues=("a",))
    harness.setting(job_calls.weight_field("c"), 3)
    fill(harness, "a", 60)
    fill(harness, "b", 60)
    fill(harness, "c", 60)
    order = []
    for _ in range(20):
        for _ in range(3):
            end(other, claim(other)[0])
        jobs = claim(runner)
        order += ids(jobs)
        end(runner, jobs[0])
    assert 0.7 <= share_of("c", order) <= 0.8


def test_a_runner_takes_only_from_its_queues(harness: QueueHarness) -> None:
    runner = harness.runner(queues=("b", "c"))
    for queue in "abc":
        harness.enqueue(queue, queue=queue)
    assert sorted(drain(runner)) == ["b", "c"]
    assert claim(harness.runner())[0].job_id == "a"


def test_one_claim_can_take_several(harness: QueueHarness) -> None:
    runner = harness.runner()
    for number in range(5):
        harness.enqueue(f"j{number}")
    assert ids(claim(runner, 3)) == ["j0", "j1", "j2"]
    assert ids(claim(runner, 3)) == ["j3", "j4"]


def test_jobs_of_a_group_run_one_after_the_other_in_their_order(harness: QueueHarness) -> None:
    runner = harness.runner()
    for number in range(4):
        harness.enqueue(f"g{number}", group="customer", priority=number)
    harness.enqueue("other")
    held = claim(runner, 9)
    assert ids(held) == ["other", "g0"] or ids(held) == ["g0", "other"]
    order = ["g0"]
    group = next(job for job in held if job.job_id == "g0")
    while group:
        end(runner, group)
        following = claim(runner)
        order += ids(following)
        if not following:
            break
        group = following[0]
    assert order == ["g0", "g1", "g2", "g3"]


def test_a_group_waits_for_the_retry_of_its_first_job(harness: QueueHarness) -> None:
    runner = harness.runner()
    harness.enqueue("g0", group="g")
    harness.enqueue("g1", group="g")
    assert end(runner, claim(runner)[0], JobStatus.RETRY, delay=3600) == "retry"
    assert claim(runner) == []
    harness.make_due("g0")
    (again,) = claim(runner)
    assert (again.job_id, again.attempt) == ("g0", 2)
    end(runner, again, JobStatus.FAILED)
    assert ids(claim(runner)) == ["g1"]


def test_a_cancelled_member_lets_its_group_continue(harness: QueueHarness) -> None:
    runner = harness.runner()
    for number in range(3):
        harness.enqueue(f"g{number}", group="g")
    assert harness.call(job_calls.cancel("g1", KEYS)) == "cancelled"
    assert harness.call(job_calls.cancel("g0", KEYS)) == "cancelled"
    assert drain(runner) == ["g2"]
    assert harness.client.execute("EXISTS", job_keys.group(job_keys.FLEET_TAG, "g")) == 0


def test_a_type_at_its_limit_is_stepped_over(harness: QueueHarness) -> None:
    runner, other = harness.runner("r", node="n1"), harness.runner("o", node="n2")
    harness.setting(job_calls.limit_field("export"), 2)
    for number in range(50):
        harness.enqueue(f"e{number}", name="export", priority=9)
    harness.enqueue("mail", name="mail", priority=0)
    assert ids(claim(runner, 1) + claim(other, 9)) == ["e0", "e1", "mail"]
    assert claim(other) == []
    harness.client.execute("DEL", *other.doorbells())
    end(runner, next(iter(runner.list_held() or [])))
    # Room again: an idle runner is woken.
    assert harness.client.execute("LLEN", *other.doorbells()) == 1
    assert ids(claim(other)) == ["e2"]


def test_a_limit_of_a_node_counts_that_node_alone(harness: QueueHarness) -> None:
    first, second = harness.runner("one", node="n1"), harness.runner("two", node="n1")
    third = harness.runner("three", node="n2")
    harness.setting(job_calls.node_limit_field("export"), 1)
    for number in range(4):
        harness.enqueue(f"e{number}", name="export")
    assert ids(claim(first, 5)) == ["e0"]
    assert ids(claim(second, 5)) == []
    assert ids(claim(third, 5)) == ["e1"]


def test_what_a_dead_runner_counted_for_is_free_again(harness: QueueHarness) -> None:
    first, second = harness.runner("one"), harness.runner("two")
    harness.setting(job_calls.limit_field("export"), 1)
    harness.enqueue("e0", name="export", idempotent=True)
    harness.enqueue("e1", name="export", idempotent=True)
    claim(first)
    assert claim(second) == []
    assert die(first, second) == {"e0": "returned"}
    assert ids(claim(second)) == ["e0"]


def test_a_clock_that_steps_back_changes_no_order(harness: QueueHarness) -> None:
    runner = harness.runner()
    harness.enqueue("j0")
    ahead = 4_000_000_000_000_000  # as if the clock had stood in the year 2096
    harness.setting("sequence", ahead)
    for number in range(1, 4):
        harness.enqueue(f"j{number}")
    assert drain(runner) == ["j0", "j1", "j2", "j3"]
