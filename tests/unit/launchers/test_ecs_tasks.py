"""The cache believes events in any order, and no single listing or denial."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from infra.launchers.ecs.records import with_position
from infra.launchers.ecs.task_cache import (
    MAX_EXITS_REMEMBERED,
    MIN_DENIAL_GAP_S,
    SETTLING_TIME_S,
    STOPPED,
    SeenTask,
    TaskCache,
)
from infra.worker_task import Task, worker_exit


def seen(
    number: int = 1, version: int = 1, status: str = "RUNNING", *, tagged: bool = True
) -> SeenTask:
    task = Task(
        task_id=f"task-{number}",
        worker_id=f"w-{number}",
        pool="default",
        version="0.1.0" if tagged else "",
        launched_at=100.0,
    )
    end = worker_exit(task.task_id, task.worker_id, code=0, at=200.0)
    return SeenTask(
        task=task,
        version=version,
        status=status,
        token=f"token-{number}" if tagged else "",
        tagged=tagged,
        end=with_position(end) if status == STOPPED else None,
    )


@given(st.permutations([*range(1, 6), 3, 5]), st.data())
def test_events_in_any_order_and_number_give_one_end(order: list[int], data: st.DataObject) -> None:
    history = {1: "PROVISIONING", 2: "PENDING", 3: "RUNNING", 4: "STOPPING", 5: STOPPED}
    tasks = TaskCache()
    ends = [
        tasks.apply(seen(1, version, history[version], tagged=data.draw(st.booleans())))
        for version in order
    ]
    assert len([end for end in ends if end is not None]) == 1
    assert tasks.running() == []


def test_a_later_state_stays_and_the_version_of_the_worker_with_it() -> None:
    tasks = TaskCache()
    tasks.apply(seen(1, 3, "RUNNING"))
    tasks.apply(seen(1, 2, "PENDING"))
    tasks.apply(seen(1, 4, "RUNNING", tagged=False))
    assert [task.version for task in tasks.running()] == ["0.1.0"]
    assert tasks.unknown(["task-1"]) == set()
    task = tasks.of_token("token-1")
    assert task is not None
    assert task.version == 4


def test_a_task_known_by_events_only_is_to_be_described() -> None:
    tasks = TaskCache()
    tasks.apply(seen(1, tagged=False))
    assert tasks.unknown(["task-1", "task-2"]) == {"task-1", "task-2"}


def test_one_denial_loses_nobody_and_a_second_does_after_a_minute() -> None:
    tasks = TaskCache()
    tasks.apply(seen())
    assert tasks.note_denied("task-1", 1000.0) is None
    assert tasks.note_denied("task-1", 1000.0 + MIN_DENIAL_GAP_S / 2) is None
    assert tasks.note_denied("task-1", 1000.0 + MIN_DENIAL_GAP_S) == seen()
    tasks.apply(seen(version=2))
    assert tasks.note_denied("task-1", 2000.0) is None  # it was there in between: counted anew


def test_a_launch_of_our_own_is_not_lost_while_ecs_may_not_show_it() -> None:
    tasks = TaskCache()
    tasks.note_launched("task-1", 1000.0)
    tasks.apply(seen())
    for moment in (1001.0, 1100.0, 1000.0 + SETTLING_TIME_S - 1):
        assert tasks.note_denied("task-1", moment) is None
    assert tasks.note_denied("task-1", 1000.0 + SETTLING_TIME_S) is None
    assert tasks.note_denied("task-1", 1000.0 + SETTLING_TIME_S + MIN_DENIAL_GAP_S) is not None


def test_an_ended_task_keeps_its_token_and_is_never_denied() -> None:
    tasks = TaskCache()
    tasks.apply(seen())
    tasks.apply(seen(1, 2, STOPPED))
    assert tasks.note_denied("task-1", 1000.0) is None
    assert tasks.of_token("token-1") is not None
    assert tasks.of_worker("w-1") == []


def test_old_ends_are_forgotten_in_the_end() -> None:
    tasks = TaskCache()
    for number in range(MAX_EXITS_REMEMBERED + 1):
        tasks.apply(seen(number, 1, STOPPED))
    assert not tasks.has_ended("task-0")
    assert tasks.of_token("token-0") is None
    assert tasks.has_ended("task-1")
