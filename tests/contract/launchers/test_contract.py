"""What every launcher promises."""

from __future__ import annotations

import asyncio

import pytest

from infra.launchers.port import Launcher
from infra.worker_task import LaunchFailed
from tests.support.launchers.call_counts import Cost
from tests.support.launchers.exits import read_exits
from tests.support.launchers.harnesses import LauncherHarness
from tests.support.launchers.worker_specs import spec


async def test_a_launched_worker_is_listed_with_what_it_was_launched_as(
    harness: LauncherHarness,
) -> None:
    launcher = harness.client()
    task = await launcher.launch(spec("w-1"), "token-1")
    assert (task.worker_id, task.pool, task.version) == ("w-1", "default", "plain")
    assert await launcher.list() == [task]


async def test_the_same_token_gives_the_same_task_and_launches_once(
    harness: LauncherHarness,
) -> None:
    launcher = harness.client()
    first, *others = await asyncio.gather(
        *(launcher.launch(spec("w-1"), "token-1") for _ in range(10))
    )
    assert all(other == first for other in others)
    assert await launcher.list() == [first]


async def test_a_token_keeps_its_task_after_the_end_of_the_worker(harness: LauncherHarness) -> None:
    launcher = harness.client()
    task = await launcher.launch(spec("w-1"), "token-1")
    await launcher.stop(task.task_id, "test")
    assert await launcher.launch(spec("w-1"), "token-1") == task
    assert await launcher.list() == []


async def test_a_second_token_for_a_running_worker_is_refused(harness: LauncherHarness) -> None:
    launcher = harness.client()
    task = await launcher.launch(spec("w-1"), "token-1")
    with pytest.raises(LaunchFailed):
        await launcher.launch(spec("w-1"), "token-2")
    assert await launcher.list() == [task]


async def test_stop_returns_when_the_worker_has_ended_and_the_exit_says_why(
    harness: LauncherHarness,
) -> None:
    launcher = harness.client()
    task = await launcher.launch(spec("w-1"), "token-1")
    await launcher.stop(task.task_id, "no longer wanted")
    assert await launcher.list() == []
    (end,) = await read_exits(launcher.exits(), 1)
    assert (end.task_id, end.worker_id, end.reason) == (task.task_id, "w-1", "stopped")
    assert end.detail["stop_reason"] == "no longer wanted"


async def test_a_task_is_asked_for_by_its_id_and_a_worker_by_its_own(
    harness: LauncherHarness,
) -> None:
    launcher = harness.client()
    task = await launcher.launch(spec("w-1"), "token-1")
    neighbour = await launcher.launch(spec("w-2"), "token-2")
    assert await launcher.is_running(task.task_id)
    assert list(await launcher.find_tasks("w-1")) == [task]
    await launcher.stop(task.task_id, "test")
    assert not await launcher.is_running(task.task_id)
    assert not await launcher.find_tasks("w-1")
    assert list(await launcher.find_tasks("w-2")) == [neighbour]
    assert not await launcher.is_running("task-of-nobody")
    assert not await launcher.find_tasks("w-of-nobody")


async def test_a_question_by_id_knows_what_another_client_did_after_our_listing(
    harness: LauncherHarness,
) -> None:
    async with harness.counted() as (watching, _):
        assert await watching.list() == []
        other = harness.client()
        task = await other.launch(spec("w-1"), "token-1")
        assert await watching.is_running(task.task_id)
        assert [task.task_id for task in await watching.find_tasks("w-1")] == [task.task_id]
        await other.stop(task.task_id, "test")
        assert await watching.is_running(task.task_id) is False
        assert not await watching.find_tasks("w-1")


#: Anomalies that are cleaned up, and workers among which they are.
ANOMALIES, FEW, MANY = 2, 4, 20


async def cost_of_listing_and_clean_up(harness: LauncherHarness, workers: int) -> tuple[Cost, Cost]:
    """Launches workers until this many run, and ends `ANOMALIES` of them as `WorkerTerminator`
    does."""
    client = harness.client()
    for number in range(workers):
        await client.launch(spec(f"w-{workers}-{number}"), f"token-{workers}-{number}")
    async with harness.counted() as (launcher, cost):
        before = cost()
        tasks = await launcher.list()
        listed = cost()
        for task in tasks[-ANOMALIES:]:
            assert await launcher.is_running(task.task_id)
            assert len(await launcher.find_tasks(task.worker_id)) == 1
            assert await launcher.stop(task.task_id, "test")
        return listed.since(before), cost().since(listed)


async def test_a_clean_up_costs_the_same_among_few_workers_and_among_many(
    harness: LauncherHarness,
) -> None:
    listing_of_few, among_few = await cost_of_listing_and_clean_up(harness, FEW)
    listing_of_many, among_many = await cost_of_listing_and_clean_up(harness, MANY)
    # The meter sees what grows with the fleet.
    assert listing_of_many.size > 3 * listing_of_few.size
    assert among_many.calls <= 1.25 * among_few.calls
    assert among_many.size <= 1.25 * among_few.size


async def test_stopping_an_unknown_or_ended_task_is_no_error(harness: LauncherHarness) -> None:
    launcher = harness.client()
    task = await launcher.launch(spec("w-1"), "token-1")
    for task_id in (task.task_id, task.task_id, "task-of-nobody"):
        await launcher.stop(task_id, "test")
    assert await launcher.list() == []


async def test_stopping_one_worker_leaves_its_neighbours_alone(harness: LauncherHarness) -> None:
    launcher = harness.client()
    first_task = await launcher.launch(spec("w-1"), "token-1")
    other = await launcher.launch(spec("w-2"), "token-2")
    await launcher.stop(first_task.task_id, "test")
    assert await launcher.list() == [other]


async def test_a_crash_is_reported_while_it_happens(harness: LauncherHarness) -> None:
    launcher = harness.client()
    task = await launcher.launch(spec("w-1"), "token-1")
    exits = launcher.exits()
    listening = asyncio.ensure_future(anext(exits))
    await asyncio.sleep(0)  # the subscription is under way; it must not matter how far it has come
    await harness.crash(task)
    end = await asyncio.wait_for(listening, 20)
    assert (end.task_id, end.exit_code, end.reason) == (task.task_id, -9, "killed")
    assert await launcher.list() == []


async def test_ends_that_nobody_heard_come_first_and_in_order(harness: LauncherHarness) -> None:
    launcher = harness.client()
    for number in (1, 2, 3):
        task = await launcher.launch(spec(f"w-{number}"), f"token-{number}")
        await launcher.stop(task.task_id, "test")
    missed = await read_exits(launcher.exits(), 3)
    assert [end.worker_id for end in missed] == ["w-1", "w-2", "w-3"]


async def test_a_listener_continues_where_it_stopped(harness: LauncherHarness) -> None:
    launcher = harness.client()
    for number in (1, 2, 3):
        task = await launcher.launch(spec(f"w-{number}"), f"token-{number}")
        await launcher.stop(task.task_id, "test")
    exits = launcher.exits()
    await read_exits(exits, 2)
    # The second end was handed out but its successor was not asked for: it may not have been
    # handled.
    again = await read_exits(launcher.exits(), 2)
    assert [end.worker_id for end in again] == ["w-2", "w-3"]


async def test_two_clients_see_one_truth(harness: LauncherHarness) -> None:
    first, second = harness.client(), harness.client()
    tasks = [
        await first.launch(spec("w-1"), "token-1"),
        await second.launch(spec("w-2"), "token-2"),
    ]
    assert await second.launch(spec("w-1"), "token-1") == tasks[0]
    assert await first.list() == await second.list() == tasks
    await second.stop(tasks[0].task_id, "test")
    assert await first.list() == [tasks[1]]


async def test_every_listener_hears_every_end(harness: LauncherHarness) -> None:
    launchers: list[Launcher] = [harness.client(), harness.client()]
    task = await launchers[0].launch(spec("w-1"), "token-1")
    listening = [asyncio.ensure_future(anext(launcher.exits())) for launcher in launchers]
    await harness.crash(task)
    ends = await asyncio.wait_for(asyncio.gather(*listening), 20)
    assert [end.task_id for end in ends] == [task.task_id, task.task_id]
