"""The outcome writer writes what the recorder left undone, and leaves it the time to do it."""

from __future__ import annotations

import asyncio
import time
from datetime import UTC, datetime
from uuid import UUID, uuid4

import msgspec
import pytest
from sqlalchemy import select

from api.orders.outcomes import WRITE_INTERVAL_S, NotedOutcome, OutcomeWriter
from infra.database import dead_letters
from infra.database.engine import Database
from infra.database.orders import acceptance, recording
from tests.support.systems.api import ServedApi
from worker_runtime.protocol.messages import OrderOutcome, OrderState


async def accepted(api: ServedApi) -> UUID:
    now = datetime.now(UTC)
    new = acceptance.NewOrder(
        user_id=api.user,
        account_id="main",
        client_order_id=uuid4().hex,
        fingerprint="f",
        symbol="2330",
        side="buy",
        quantity=1,
        price_type="MKT",
        price=None,
        time_in_force="IOC",
        generation="g",
        lifetime_s=30.0,
        trading_day=now.date(),
    )
    return (await acceptance.accept_order_alone(api.services.database, new)).order.id


async def state(database: Database, order_id: UUID) -> str:
    async with database.session() as session:
        return (await recording.get_order(session, order_id)).state


def filled(order_id: UUID) -> NotedOutcome:
    outcome = OrderOutcome(order_id=str(order_id), state=OrderState.FILLED, filled_quantity=1)
    return NotedOutcome(outcome)


async def test_an_outcome_is_written_after_a_period_and_not_before(api: ServedApi) -> None:
    database = api.services.database
    outcome_writer = OutcomeWriter(database)
    order_id = await accepted(api)
    outcome_writer.start()
    await asyncio.sleep(WRITE_INTERVAL_S - 0.1)  # the first round comes at once
    noted = time.monotonic()
    outcome_writer.write_later(filled(order_id))
    while await state(database, order_id) == "accepted":
        assert time.monotonic() < noted + 30
        await asyncio.sleep(0.02)
    assert time.monotonic() - noted >= WRITE_INTERVAL_S
    assert await state(database, order_id) == "filled"
    await outcome_writer.close()


async def test_the_code_of_a_rejection_is_written_though_its_event_came_first(
    api: ServedApi,
) -> None:
    database = api.services.database
    outcome_writer = OutcomeWriter(database)
    order_id = await accepted(api)
    event = recording.event_of_ours(order_id, api.user, "e", OrderState.REJECTED, "no margin")
    async with database.session() as session:
        await recording.record_event(session, event)
    outcome = OrderOutcome(order_id=str(order_id), state=OrderState.REJECTED, reason="no margin")
    outcome_writer.write_later(NotedOutcome(outcome, "ORDER_REJECTED"))
    await outcome_writer.close()
    async with database.session() as session:
        assert (await recording.get_order(session, order_id)).reason_code == "ORDER_REJECTED"


@pytest.mark.parametrize(
    "bad", [{"order_id": "no uuid"}, {"broker_order_id": "b" * 500}, {"reason": "a\x00b"}], ids=str
)
async def test_an_outcome_that_cannot_be_written_holds_up_no_other(
    api: ServedApi, bad: dict[str, str]
) -> None:
    database = api.services.database
    outcome_writer = OutcomeWriter(database)
    first, strange, last = [await accepted(api) for _ in range(3)]
    for order_id in (first, strange, last):
        noted = filled(order_id)
        if order_id == strange:
            noted = NotedOutcome(msgspec.structs.replace(noted.outcome, **bad))
        outcome_writer.write_later(noted)
    await outcome_writer.close()
    assert [await state(database, order_id) for order_id in (first, last)] == ["filled"] * 2
    async with database.session() as session:
        [letter] = await session.scalars(select(dead_letters.DeadLetterRow))
        counts = await dead_letters.count_letters(session)
    assert (letter.kind, letter.source, counts) == ("outcome", letter.subject, {"outcome": 1})


@pytest.mark.parametrize("count", [1, 201])
async def test_whatever_is_noted_is_written_at_the_end(api: ServedApi, count: int) -> None:
    database = api.services.database
    outcome_writer = OutcomeWriter(database)
    ids = [await accepted(api) for _ in range(count)]
    for order_id in ids:
        outcome_writer.write_later(filled(order_id))
    await outcome_writer.close()
    assert {await state(database, order_id) for order_id in ids} == {"filled"}
