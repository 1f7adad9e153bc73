"""Every transition reaches the timeline, once and in order, and nobody waits for it."""

from __future__ import annotations

from itertools import pairwise

from temporalio.client import WorkflowExecutionStatus
from temporalio.testing import WorkflowEnvironment

from tests.support.workflows.fakes import (
    FakeFleet,
    ensure_active,
    finished,
    handle,
    serving,
    tell,
    until,
    until_state,
)
from workflows.user_worker.messages import (
    ShutdownRequest,
    Transition,
    UserWorkerSettings,
    WorkerState,
)
from workflows.user_worker.state import ALLOWED, UserWorkerState
from workflows.user_worker.visibility import MAX_PENDING_TRANSITIONS, Timeline
from workflows.user_worker.workflow import UserWorkerWorkflow

LIFE = [
    "PoolIdle",
    "Claimed",
    "Connecting",
    "Active",
    "Reconnecting",
    "Active",
    "Draining",
    "Terminated",
]


def assert_whole(transitions: list[Transition]) -> None:
    """Numbered without a gap, each beginning where the last one ended, all of them in the table."""
    assert [item.number for item in transitions] == list(range(1, len(transitions) + 1))
    assert all(before.after == after.before for before, after in pairwise(transitions))
    assert all(WorkerState(item.after) in ALLOWED[WorkerState(item.before)] for item in transitions)
    assert all(
        (item.deadline is None) == (item.after == WorkerState.TERMINATED) for item in transitions
    )


async def test_a_whole_life_is_written_before_the_run_closes(
    skipping: WorkflowEnvironment, fleet: FakeFleet
) -> None:
    async with serving(skipping.client, fleet.activities()):
        await ensure_active(skipping.client, "u1")
        await tell(skipping.client, "u1", "degraded", 2, "refused")
        await until_state(skipping.client, "u1", WorkerState.RECONNECTING)
        await tell(skipping.client, "u1", "connected", 4)
        await handle(skipping.client, "u1").signal(
            "shutdown", ShutdownRequest(reason="maintenance")
        )
        await finished(skipping, "u1")
        run_id = (await handle(skipping.client, "u1").describe()).run_id
    assert_whole(fleet.timeline)
    assert ["PoolIdle", *(item.after for item in fleet.timeline)] == LIFE
    assert [item.reason for item in fleet.timeline][-4:] == [
        "refused",
        "",
        "maintenance",
        "maintenance",
    ]
    assert {(item.worker_id, item.epoch) for item in fleet.timeline[1:-1]} == {("w1", 1)}
    assert {(batch.user_id, batch.chain) for batch in fleet.written} == {("u1", run_id)}


async def test_a_caller_does_not_wait_for_the_timeline(
    skipping: WorkflowEnvironment, fleet: FakeFleet
) -> None:
    """PostgreSQL cannot be written to: the worker serves all the same, and the run closes when it
    can."""
    fleet.record_failures = 5
    async with serving(skipping.client, fleet.activities()):
        active = await ensure_active(skipping.client, "u1")
        assert active.state == WorkerState.ACTIVE
        await handle(skipping.client, "u1").signal(UserWorkerWorkflow.shutdown)
        await finished(skipping, "u1")
    assert_whole(fleet.timeline)
    assert fleet.timeline[-1].after == WorkerState.TERMINATED


async def test_a_run_closes_after_an_hour_without_its_timeline(
    skipping: WorkflowEnvironment, fleet: FakeFleet
) -> None:
    fleet.record_failures = 10_000
    async with serving(skipping.client, fleet.activities()):
        await ensure_active(skipping.client, "u1")
        await handle(skipping.client, "u1").signal(UserWorkerWorkflow.shutdown)
        await finished(skipping, "u1")
        described = await handle(skipping.client, "u1").describe()
    assert described.status == WorkflowExecutionStatus.COMPLETED
    assert described.close_time is not None
    assert (described.close_time - described.start_time).total_seconds() < 2 * 3600 + 60
    assert not fleet.written


async def test_a_cancel_while_the_timeline_is_written_loses_nothing_of_it(
    skipping: WorkflowEnvironment, fleet: FakeFleet
) -> None:
    fleet.record_failures = 3
    async with serving(skipping.client, fleet.activities()):
        await ensure_active(skipping.client, "u1")
        await handle(skipping.client, "u1").signal(UserWorkerWorkflow.shutdown)

        async def ended() -> bool:
            seen = await handle(skipping.client, "u1").query(UserWorkerWorkflow.view)
            return seen.state == WorkerState.TERMINATED

        await until(ended)
        await handle(skipping.client, "u1").cancel()
        await finished(skipping, "u1")
    assert_whole(fleet.timeline)
    assert fleet.timeline[-1].after == WorkerState.TERMINATED


async def test_what_is_not_written_goes_into_the_next_run_and_numbers_continue(
    skipping: WorkflowEnvironment, fleet: FakeFleet
) -> None:
    fleet.record_failures = 4
    async with serving(skipping.client, fleet.activities()):
        await ensure_active(skipping.client, "u1")
        first = (await handle(skipping.client, "u1").describe()).run_id
        await handle(skipping.client, "u1").signal(UserWorkerWorkflow.renew)

        async def renewed() -> bool:
            return (await handle(skipping.client, "u1").describe()).run_id != first

        await until(renewed)
        await handle(skipping.client, "u1").signal(UserWorkerWorkflow.shutdown)
        await finished(skipping, "u1")
    unique = {item.number: item for item in fleet.timeline}
    assert_whole([unique[number] for number in sorted(unique)])
    assert [unique[number].before for number in sorted(unique)] == [
        "PoolIdle", "Claimed", "Connecting", "Active", "Draining",
    ]  # fmt: skip
    assert {batch.chain for batch in fleet.written} == {first}


def test_only_changes_of_state_are_transitions_and_the_backlog_is_bounded() -> None:
    state = UserWorkerState(user_id="u1", pool="default", settings=UserWorkerSettings()).opened(1.0)
    timeline = Timeline("u1")
    timeline.record(state, state.with_note("credentials refused"))
    assert timeline.carried()["pending"] == []
    for number in range(MAX_PENDING_TRANSITIONS):
        state, before = state.drains("again", 2.0 + number), state
        timeline.record(before, state)
    carried = timeline.carried()
    assert len(carried["pending"]) == carried["number"] == MAX_PENDING_TRANSITIONS
    assert Timeline("u1", carried).carried() == carried
    assert Timeline("u1").carried() == {"number": 0, "pending": [], "branch": ""}
