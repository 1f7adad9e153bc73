"""Which job comes next: priorities that age, first in first out, fair queues, groups and limits."""

from __future__ import annotations

from tests.support.jobs.queue import KEYS, QueueStage, claim, die, end, ids
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


def test_a_higher_priority_comes_first_and_equals_come_in_order(stage: QueueStage) -> None:
    runner = stage.runner()
    for number in range(12):
        stage.enqueue(f"j{number}", priority=(3, 9, 5)[number % 3])
    assert drain(runner) == [*(f"j{n}" for n in (1, 4, 7, 10, 2, 5, 8, 11, 0, 3, 6, 9))]


def test_types_of_one_queue_share_one_order(stage: QueueStage) -> None:
    runner = stage.runner()
    for number in range(9):
        stage.enqueue(f"j{number}", name=f"type{number % 3}")
    assert drain(runner) == [f"j{number}" for number in range(9)]


def test_a_job_that_waited_long_overtakes_a_higher_priority(stage: QueueStage) -> None:
    stage.setting("boost:default", 0.001)  # one microsecond a step
    runner = stage.runner()
    stage.enqueue("low", priority=0)
    stage.enqueue("high", priority=9)
    assert drain(runner) == ["low", "high"]


def test_the_scheduler_queue_knows_no_priorities(stage: QueueStage) -> None:
    runner = stage.runner()
    for number in range(6):
        stage.enqueue(f"j{number}", queue="scheduler", priority=number)
    assert drain(runner) == [f"j{number}" for number in range(6)]


def test_queues_share_turns_by_weight(stage: QueueStage) -> None:
    runner = stage.runner()
    stage.setting(job_calls.weight_field("a"), 3)
    for number in range(80):
        stage.enqueue(f"a{number}", queue="a", priority=9)
        stage.enqueue(f"b{number}", queue="b", priority=0)
    first = drain(runner)[:40]
    assert sum(job.startswith("a") for job in first) == 30


def test_a_queue_that_was_empty_saves_up_no_turns(stage: QueueStage) -> None:
    runner = stage.runner()
    for number in range(30):
        stage.enqueue(f"a{number}", queue="a")
    for _ in range(20):
        end(runner, claim(runner)[0])
    for number in range(10):
        stage.enqueue(f"b{number}", queue="b")
    first = drain(runner)[:10]
    assert sum(job.startswith("b") for job in first) == 5


def share_of(queue: str, jobs: list[str]) -> float:
    return sum(job.startswith(queue) for job in jobs) / len(jobs)


def fill(stage: QueueStage, queue: str, jobs: int, name: str = "work") -> None:
    for number in range(jobs):
        stage.enqueue(f"{queue}-{stage.now_ms()}-{number}", queue=queue, name=name)


def test_a_queue_pays_for_no_turns_that_it_took_alone(stage: QueueStage) -> None:
    runner = stage.runner()
    fill(stage, "busy", 40)
    drain(runner)
    fill(stage, "flood", 30)
    fill(stage, "busy", 10)
    assert share_of("busy", drain(runner)[:20]) >= 0.45


def test_a_suspended_queue_saves_up_no_turns(stage: QueueStage) -> None:
    runner = stage.runner()
    fill(stage, "a", 20)
    fill(stage, "b", 60)
    stage.call(job_calls.suspend(queue="a"))
    for _ in range(40):
        end(runner, claim(runner)[0])
    stage.call(job_calls.resume(queue="a"))
    assert 0.45 <= share_of("a", drain(runner)[:20]) <= 0.55


def test_a_queue_at_its_limit_saves_up_no_turns(stage: QueueStage) -> None:
    runner = stage.runner()
    stage.setting(job_calls.limit_field("export"), 0)
    fill(stage, "a", 20, "export")
    fill(stage, "b", 60)
    for _ in range(40):
        end(runner, claim(runner)[0])
    stage.setting(job_calls.limit_field("export"), 5)
    assert 0.45 <= share_of("a", drain(runner)[:20]) <= 0.55


def test_queues_of_other_runners_take_no_turns_from_these(stage: QueueStage) -> None:
    runner, other = stage.runner(queues=("b", "c")), stage.runner(queues=("a",))
    stage.setting(job_calls.weight_field("c"), 3)
    fill(stage, "a", 60)
    fill(stage, "b", 60)
    fill(stage, "c", 60)
    order = []
    for _ in range(20):
        for _ in range(3):
            end(other, claim(other)[0])
        jobs = claim(runner)
        order += ids(jobs)
        end(runner, jobs[0])
    assert 0.7 <= share_of("c", order) <= 0.8


def test_a_runner_takes_only_from_its_queues(stage: QueueStage) -> None:
    runner = stage.runner(queues=("b", "c"))
    for queue in "abc":
        stage.enqueue(queue, queue=queue)
    assert sorted(drain(runner)) == ["b", "c"]
    assert claim(stage.runner())[0].job_id == "a"


def test_one_claim_can_take_several(stage: QueueStage) -> None:
    runner = stage.runner()
    for number in range(5):
        stage.enqueue(f"j{number}")
    assert ids(claim(runner, 3)) == ["j0", "j1", "j2"]
    assert ids(claim(runner, 3)) == ["j3", "j4"]


def test_jobs_of_a_group_run_one_after_the_other_in_their_order(stage: QueueStage) -> None:
    runner = stage.runner()
    for number in range(4):
        stage.enqueue(f"g{number}", group="customer", priority=number)
    stage.enqueue("other")
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


def test_a_group_waits_for_the_retry_of_its_first_job(stage: QueueStage) -> None:
    runner = stage.runner()
    stage.enqueue("g0", group="g")
    stage.enqueue("g1", group="g")
    assert end(runner, claim(runner)[0], JobStatus.RETRY, delay=3600) == "retry"
    assert claim(runner) == []
    stage.make_due("g0")
    (again,) = claim(runner)
    assert (again.job_id, again.attempt) == ("g0", 2)
    end(runner, again, JobStatus.FAILED)
    assert ids(claim(runner)) == ["g1"]


def test_a_cancelled_member_lets_its_group_go_on(stage: QueueStage) -> None:
    runner = stage.runner()
    for number in range(3):
        stage.enqueue(f"g{number}", group="g")
    assert stage.call(job_calls.cancel("g1", KEYS)) == "cancelled"
    assert stage.call(job_calls.cancel("g0", KEYS)) == "cancelled"
    assert drain(runner) == ["g2"]
    assert stage.client.execute("EXISTS", job_keys.group(job_keys.FLEET_TAG, "g")) == 0


def test_a_type_at_its_limit_is_stepped_over(stage: QueueStage) -> None:
    runner, other = stage.runner("r", node="n1"), stage.runner("o", node="n2")
    stage.setting(job_calls.limit_field("export"), 2)
    for number in range(50):
        stage.enqueue(f"e{number}", name="export", priority=9)
    stage.enqueue("mail", name="mail", priority=0)
    assert ids(claim(runner, 1) + claim(other, 9)) == ["e0", "e1", "mail"]
    assert claim(other) == []
    stage.client.execute("DEL", *other.doorbells())
    end(runner, next(iter(runner.list_held() or [])))
    # Room again: an idle runner is woken.
    assert stage.client.execute("LLEN", *other.doorbells()) == 1
    assert ids(claim(other)) == ["e2"]


def test_a_limit_of_a_node_counts_that_node_alone(stage: QueueStage) -> None:
    one, two = stage.runner("one", node="n1"), stage.runner("two", node="n1")
    three = stage.runner("three", node="n2")
    stage.setting(job_calls.node_limit_field("export"), 1)
    for number in range(4):
        stage.enqueue(f"e{number}", name="export")
    assert ids(claim(one, 5)) == ["e0"]
    assert ids(claim(two, 5)) == []
    assert ids(claim(three, 5)) == ["e1"]


def test_what_a_dead_runner_counted_for_is_free_again(stage: QueueStage) -> None:
    one, two = stage.runner("one"), stage.runner("two")
    stage.setting(job_calls.limit_field("export"), 1)
    stage.enqueue("e0", name="export", idempotent=True)
    stage.enqueue("e1", name="export", idempotent=True)
    claim(one)
    assert claim(two) == []
    assert die(one, two) == {"e0": "returned"}
    assert ids(claim(two)) == ["e0"]


def test_a_clock_that_steps_back_changes_no_order(stage: QueueStage) -> None:
    runner = stage.runner()
    stage.enqueue("j0")
    ahead = 4_000_000_000_000_000  # as if the clock had stood in the year 2096
    stage.setting("sequence", ahead)
    for number in range(1, 4):
        stage.enqueue(f"j{number}")
    assert drain(runner) == ["j0", "j1", "j2", "j3"]
