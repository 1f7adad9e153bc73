"""One bad message stops nothing: what cannot be handled goes to the dead letters, and the loop goes
on."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from datetime import UTC, datetime, timedelta
from uuid import UUID

import asyncpg
import msgspec
import pytest
from sqlalchemy import select, text
from sqlalchemy.exc import DBAPIError, MultipleResultsFound, StatementError

from activities.events.recorder import Recorder
from activities.events.stream import RECORDER_GROUP, EventStream
from infra.database import dead_letters, retention
from infra.database.dead_letters import DeadLetter, DeadLetterRow, DeadLetters, TryCounter
from infra.database.engine import DatabaseUnavailable
from infra.database.orders import recording
from infra.valkey.client import reply_of
from tests.support.activities.event_streams import (
    accept_new_order,
    make_order_event,
    make_worker_event,
    run_streams,
    wait_until_acknowledged,
)
from tests.support.activities.harness import ActivityHarness
from worker_runtime.protocol import keys
from worker_runtime.protocol.authentication import sign
from worker_runtime.protocol.messages import Event, OrderState, encode
from worker_runtime.protocol.worker_reports import EVENT


async def add_altered(harness: ActivityHarness, event: Event, **fields: object) -> None:
    """What a hostile worker sends: not what our code writes, but with its own keys."""
    altered = msgspec.json.encode(msgspec.json.decode(encode(event)) | fields)
    mac = sign(harness.secrets.assignment_keys(event.user_id, event.epoch), b"event/1", altered)
    await reply_of(harness.client.xadd(keys.EVENTS, {EVENT: f"{mac} ".encode() + altered}))


async def rows(harness: ActivityHarness) -> Sequence[DeadLetterRow]:
    async with harness.database.session() as session:
        return (await session.scalars(select(DeadLetterRow).order_by(DeadLetterRow.first_at))).all()


async def state_of(harness: ActivityHarness, order_id: str) -> str:
    async with harness.database.session() as session:
        return (await recording.get_order(session, UUID(order_id))).state


@pytest.mark.parametrize(
    "altered",
    [
        {"at_ms": 10**18},
        {"at_ms": -1},
        {"average_price": "NaN"},
        {"average_price": "1e400"},
        {"filled_quantity": 2**40},
        {"order_id": "no uuid"},
        {"event_id": "x" * 500},
    ],
    ids=lambda altered: " ".join(altered),
)
async def test_an_order_event_that_nobody_can_handle_stops_no_other(
    harness: ActivityHarness, altered: dict[str, object]
) -> None:
    order_id = await accept_new_order(harness)
    await add_altered(harness, make_order_event(order_id, 1, OrderState.SUBMITTED), **altered)
    await add_altered(harness, make_order_event(order_id, 2, OrderState.FILLED))
    stream = EventStream(
        harness.client,
        RECORDER_GROUP,
        Recorder(harness.database),
        harness.secrets,
        dead_letters=DeadLetters(harness.database),
    )
    async with run_streams(stream):
        await wait_until_acknowledged(harness)
    assert await state_of(harness, order_id) == "filled"
    [letter] = await rows(harness)
    assert (letter.kind, letter.user_id, letter.count) == ("event", "u1", 1)
    assert letter.reason.startswith("MALFORMED_MESSAGE")


class OneBadHandler:
    """Fails on one sequence, and for a while on all."""

    def __init__(self, bad: int, error: Exception | None = None) -> None:
        self.bad = bad
        self.error = error
        self.away = 2
        self.handled: list[int] = []

    async def handle(self, events: Sequence[Event], received_ms: Sequence[int] = ()) -> None:
        if self.away:
            self.away -= 1
            raise DatabaseUnavailable
        numbers = [getattr(event, "sequence", 0) for event in events]
        if self.bad in numbers:
            raise self.error or ValueError(f"secret-canary {self.bad}")
        self.handled += numbers


async def test_a_batch_that_fails_is_handled_one_by_one_and_an_outage_is_waited_for(
    harness: ActivityHarness,
) -> None:
    handler = OneBadHandler(bad=2)
    for number in (1, 2, 3):
        await add_altered(harness, make_worker_event(number))
    stream = EventStream(
        harness.client,
        RECORDER_GROUP,
        handler,
        harness.secrets,
        dead_letters=DeadLetters(harness.database),
    )
    async with run_streams(stream):
        await wait_until_acknowledged(harness)
    assert handler.handled == [1, 3]
    [letter] = await rows(harness)
    # The text of an unexpected error may quote anything.
    assert (letter.kind, letter.source, letter.reason) == ("recorder", "u1:1", "ValueError")
    assert '"sequence":2' in letter.text


async def test_a_message_with_a_fault_of_nobody_knows_whom_is_given_up_after_some_tries(
    harness: ActivityHarness,
) -> None:
    handler = OneBadHandler(
        bad=2, error=DBAPIError("select", {}, asyncpg.InternalServerError("a bug"))
    )
    for number in (1, 2, 3):
        await add_altered(harness, make_worker_event(number))
    stream = EventStream(
        harness.client,
        RECORDER_GROUP,
        handler,
        harness.secrets,
        dead_letters=DeadLetters(harness.database),
        most_tries=2,
    )
    async with run_streams(stream):
        await wait_until_acknowledged(harness)
    assert handler.handled == [1, 3]
    [letter] = await rows(harness)
    assert letter.reason.startswith("InternalServerError")


@pytest.mark.parametrize(
    ("error", "gives_up"),
    [
        (StatementError("a bind value", "select", {}, ValueError()), True),
        (MultipleResultsFound(), True),
        (DBAPIError("select", {}, asyncpg.DataError("of the driver")), True),
        (asyncpg.UniqueViolationError(), True),
        (asyncpg.InsufficientPrivilegeError(), False),
        (asyncpg.UndefinedTableError(), False),
        (asyncpg.ReadOnlySQLTransactionError(), False),
        (asyncpg.TooManyConnectionsError(), False),
        (asyncpg.DeadlockDetectedError(), False),
        (DatabaseUnavailable(), False),
        (ConnectionResetError(), False),
    ],
    ids=lambda value: type(value).__name__ if isinstance(value, Exception) else "",
)
def test_the_class_of_a_fault_says_whether_a_message_is_given_up_at_once(
    error: Exception, gives_up: bool
) -> None:
    assert TryCounter().gives_up(error) == gives_up


async def test_made_up_worker_ids_count_for_one_sender(harness: ActivityHarness) -> None:
    """The MAC covers the user and the epoch only. A worker fills only its own part."""
    for number in range(3):
        await add_altered(harness, make_worker_event(number, worker=f"made up {number}"), at_ms=-1)
    stream = EventStream(
        harness.client,
        RECORDER_GROUP,
        Recorder(harness.database),
        harness.secrets,
        dead_letters=DeadLetters(harness.database),
    )
    async with run_streams(stream):
        await wait_until_acknowledged(harness)
    assert [letter.source for letter in await rows(harness)] == ["u1:1"] * 3


def letter(number: int, source: str = "w1") -> DeadLetter:
    message = f"message {number} \x00 \ud800".encode("utf-8", "surrogatepass") + b"\xff"
    return DeadLetter(
        kind="event", source=source, user_id="u\x00", reason="a\x00b", message=message
    )


async def test_a_repeated_letter_only_counts(harness: ActivityHarness) -> None:
    box = DeadLetters(harness.database)
    await box.put([letter(1), letter(1)])
    await asyncio.gather(*(box.put([letter(1)]) for _ in range(5)))
    [row] = await rows(harness)
    assert (row.count, row.user_id, row.reason) == (7, "u", "ab")
    assert row.first_at < row.last_at


async def test_a_worker_fills_only_its_own_part_of_the_list(harness: ActivityHarness) -> None:
    box = DeadLetters(harness.database)
    await box.put(
        [letter(number) for number in range(dead_letters.MAX_OPEN_LETTERS_PER_SOURCE + 20)]
    )
    listed = await rows(harness)
    assert len(listed) == dead_letters.MAX_OPEN_LETTERS_PER_SOURCE + 1
    assert max(row.count for row in listed) == 20
    await box.put([letter(1, source="w2"), letter(3)])
    assert len(await rows(harness)) == len(listed) + 1
    async with harness.database.session() as session:
        assert await dead_letters.count_letters(session) == {"event": len(listed), "overflow": 1}


async def test_what_failed_at_a_known_time_is_counted_once_when_the_list_is_full(
    harness: ActivityHarness,
) -> None:
    box, began, max_letters = (
        DeadLetters(harness.database),
        datetime.now(UTC),
        dead_letters.MAX_OPEN_LETTERS_PER_SOURCE,
    )
    failed = [
        DeadLetter(
            kind="job", subject=f"j{n}", source="fleet jobs", at=began + timedelta(seconds=n)
        )
        for n in range(max_letters + 3)
    ]
    for _ in range(2):
        await box.put(failed)
        listed = await rows(harness)
        assert len(listed) == max_letters + 1
        assert {row.kind: row.count for row in listed} == {"job": 1, "overflow": 3}


async def fill(harness: ActivityHarness, kind: str, *, closed: bool = False) -> None:
    async with harness.database.session() as session:
        await session.execute(
            text(
                "insert into dead_letters (id, kind, source, subject, user_id, reason, "
                "message, closed_at) "
                "select gen_random_uuid(), :kind, 's' || n, '', '', '', '', case when :closed "
                "then now() end "
                "from generate_series(1, :most) as n"
            ),
            {"most": dead_letters.MAX_OPEN_LETTERS, "kind": kind, "closed": closed},
        )


@pytest.mark.parametrize(("kind", "closed"), [("event", True), ("job", False), ("workflow", False)])
async def test_closed_letters_and_those_of_other_kinds_leave_room_for_a_message(
    harness: ActivityHarness, kind: str, closed: bool
) -> None:
    await fill(harness, kind, closed=closed)
    await DeadLetters(harness.database).put([letter(1)])
    assert [row.kind for row in (await rows(harness))[dead_letters.MAX_OPEN_LETTERS :]] == ["event"]


async def test_made_up_senders_share_one_letter_once_the_list_is_full(
    harness: ActivityHarness,
) -> None:
    await fill(harness, "event")
    box = DeadLetters(harness.database)
    await box.put([letter(number, source=f"made up {number}") for number in range(50)])
    listed = await rows(harness)
    assert len(listed) == dead_letters.MAX_OPEN_LETTERS + 1
    assert listed[-1].count == 50


async def test_old_letters_are_gone(harness: ActivityHarness) -> None:
    box = DeadLetters(harness.database)
    await box.put([letter(1)])
    async with harness.database.session() as session:
        await session.execute(
            text("update dead_letters set last_at = last_at - cast(:age as interval)"),
            {"age": timedelta(days=14, seconds=1)},
        )
    await box.put([letter(2)])
    await retention.purge(harness.database, harness.settings)
    [row] = await rows(harness)
    assert row.message.startswith(b"message 2")
