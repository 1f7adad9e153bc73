"""The timeline of a user's worker: each change once, in order, and sent to those who listen."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from dataclasses import asdict
from datetime import UTC, datetime

import asyncpg
import pytest
from temporalio.exceptions import ApplicationError
from temporalio.testing import ActivityEnvironment

from activities.events.recorder import TimelineActivity
from infra.database.engine import Database
from infra.database.models import WorkerTransition
from infra.database.workers import timeline
from workflows.user_worker.messages import RecordTimeline, Transition, WorkerState


@pytest.fixture
async def database(migrated_database: str) -> AsyncIterator[Database]:
    database = Database(migrated_database, pool_wait=30.0)
    yield database
    await database.close()


def row(number: int, reason: str = "") -> Transition:
    return Transition(
        number=number, at=1_000.5 + number, before="PoolIdle", after="Claimed", reason=reason
    )


async def record(database: Database, user_id: str, chain: str, *rows: Transition) -> int:
    async with database.session() as session:
        changes = [asdict(transition) for transition in rows]
        return await timeline.record_transitions(
            session, user_id=user_id, chain=chain, transitions=changes
        )


async def stored(
    database: Database, user_id: str, after: int = 0, limit: int = 100
) -> list[WorkerTransition]:
    async with database.session() as session:
        return await timeline.transitions_of_user(session, user_id, after=after, limit=limit)


async def test_a_transition_recorded_twice_is_stored_once(database: Database) -> None:
    assert await record(database, "42", "run-1", row(1), row(2)) == 2
    assert await record(database, "42", "run-1", row(2), row(3)) == 1
    assert await record(database, "42", "run-1", row(1), row(2), row(3)) == 0
    assert await record(database, "42", "run-2", row(1)) == 1
    transitions = await stored(database, "42")
    assert [(transition.chain, transition.number) for transition in transitions] == [
        ("run-1", 1),
        ("run-1", 2),
        ("run-1", 3),
        ("run-2", 1),
    ]
    assert transitions[0].at == datetime.fromtimestamp(1_001.5, UTC)


async def test_a_reader_continues_behind_what_it_has_seen(database: Database) -> None:
    await record(database, "42", "run-1", *(row(number) for number in range(1, 8)))
    await record(database, "43", "run-2", row(1))
    first = await stored(database, "42", limit=3)
    rest = await stored(database, "42", after=first[-1].id)
    assert [transition.number for transition in first + rest] == [1, 2, 3, 4, 5, 6, 7]


async def test_ids_of_one_user_appear_in_order_with_several_writers(database: Database) -> None:
    """A reader that resumes behind the highest id it saw must not miss one that is committed
    later."""
    seen: list[int] = []

    async def write(chain: str) -> None:
        for number in range(1, 11):
            await record(database, "42", chain, row(number))

    async def read() -> None:
        while len(seen) < 40:
            seen.extend(
                transition.id
                for transition in await stored(database, "42", after=seen[-1] if seen else 0)
            )

    async with asyncio.timeout(30):
        await asyncio.gather(read(), *(write(f"run-{number}") for number in range(4)))
    assert seen == sorted(seen)
    assert seen == [transition.id for transition in await stored(database, "42")]


async def test_listeners_are_notified_of_new_transitions(
    database: Database, migrated_database: str
) -> None:
    heard: asyncio.Queue[str] = asyncio.Queue()
    listener = await asyncpg.connect(migrated_database.replace("postgresql+asyncpg", "postgresql"))

    def hear(*notice: object) -> None:
        heard.put_nowait(str(notice[-1]))

    await listener.add_listener(timeline.TIMELINE_CHANNEL, hear)
    try:
        await record(database, "42", "run-1", row(1))
        await record(database, "42", "run-1", row(1))
        await record(database, "43", "run-2", row(1))
        async with asyncio.timeout(10):
            assert [await heard.get(), await heard.get()] == ["42", "43"]
        assert heard.empty()
    finally:
        await listener.close()


async def test_the_activity_writes_what_the_workflow_noted(database: Database) -> None:
    request = RecordTimeline(
        user_id="42",
        chain="run-1",
        transitions=(
            Transition(
                number=1,
                at=1_000.0,
                before=WorkerState.CONNECTING,
                after=WorkerState.ACTIVE,
                reason="a NUL \x00 in the broker's text",
                worker_id="p-1",
                epoch=3,
                deadline=2_800.0,
            ),
            Transition(number=2, at=1_001.0, before="Active", after="Terminated"),
        ),
    )
    for _ in range(2):
        await ActivityEnvironment().run(TimelineActivity(database).record_timeline, request)
    first, last = await stored(database, "42")
    assert (first.before, first.after, first.worker_id, first.epoch) == (
        "Connecting",
        "Active",
        "p-1",
        3,
    )
    assert first.reason == "a NUL   in the broker's text"
    assert first.deadline == datetime.fromtimestamp(2_800, UTC)
    assert last.deadline is None


async def test_rows_that_the_database_never_takes_are_not_tried_for_an_hour(
    database: Database,
) -> None:
    transition = Transition(number=1, at=1_000.0, before="PoolIdle", after="Claimed")
    request = RecordTimeline(user_id="u" * 65, chain="run-1", transitions=(transition,))
    with pytest.raises(ApplicationError) as refused:
        await ActivityEnvironment().run(TimelineActivity(database).record_timeline, request)
    assert refused.value.non_retryable
