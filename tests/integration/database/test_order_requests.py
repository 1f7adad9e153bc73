"""Changes of orders whose answer nobody heard: the books learn of them from what the broker
shows."""

from __future__ import annotations

import asyncio
import uuid
from dataclasses import replace
from datetime import UTC, datetime, timedelta
from decimal import Decimal

import pytest
from msgspec import structs

from infra.database.engine import Database
from infra.database.models import Order
from infra.database.orders import acceptance, recording
from infra.database.orders import changes as order_changes
from infra.database.orders.changes import OrderChange
from tests.support.orders.stored import make_new_order, make_order_event
from worker_runtime.protocol.messages import OrderState


async def resting(database: Database) -> uuid.UUID:
    """An order of 5 lots at 100, at the broker."""
    limit = replace(
        make_new_order(uuid.uuid4().hex), price_type="LMT", price=Decimal(100), quantity=5
    )
    async with database.session() as session:
        order = (await acceptance.accept_order(session, limit)).order
        await recording.record_event(
            session, make_order_event(str(order.id), f"{order.id}:s", OrderState.SUBMITTED)
        )
    return order.id


async def ask(
    database: Database,
    order_id: uuid.UUID,
    request_id: str,
    quantity: int | None,
    price: str | None,
) -> None:
    """As the API does before it sends a change; and then it dies."""
    change = OrderChange(
        quantity=quantity,
        price=None if price is None else Decimal(price),
        generation="g",
        deadline_at=datetime.now(UTC) + timedelta(seconds=30),
    )
    async with database.session() as session:
        order = await recording.get_order(session, order_id)
        assert (
            await order_changes.note_change(session, order, request_id, change, actor="test")
            is None
        )


async def shown(
    database: Database,
    order_id: uuid.UUID,
    quantity: int,
    price: str,
    state: OrderState = OrderState.SUBMITTED,
) -> Order:
    """The order after an event that shows it like this."""
    told = structs.replace(
        make_order_event(str(order_id), uuid.uuid4().hex, state),
        quantity=quantity,
        price=Decimal(price),
    )
    async with database.session() as session:
        await recording.record_events(session, [told])
    async with database.session() as session:
        return await recording.get_order(session, order_id)


async def test_a_change_whose_api_died_is_applied_once_the_broker_shows_it(
    database: Database,
) -> None:
    order_id = await resting(database)
    await ask(database, order_id, "r", 2, "101")
    for _ in range(2):
        order = await shown(database, order_id, 2, "101.00")
        assert (order.quantity, order.price, order.state) == (2, Decimal(101), "submitted")
    async with database.session() as session:
        events = [row.event_id for row in await recording.events_of_order(session, order_id)]
    assert events.count(f"{order_id}:replace:r#confirmed") == 1


async def test_a_change_that_was_not_requested_is_not_applied(database: Database) -> None:
    order_id = await resting(database)
    order = await shown(database, order_id, 2, "101")
    assert (order.quantity, order.price) == (5, Decimal(100))
    await ask(database, order_id, "r", 3, "102")
    order = await shown(database, order_id, 2, "101")
    assert (order.quantity, order.price) == (5, Decimal(100))


async def test_a_list_that_is_behind_takes_no_change_back(database: Database) -> None:
    order_id = await resting(database)
    await ask(database, order_id, "first", 4, "101")
    assert (await shown(database, order_id, 4, "101")).price == Decimal(101)
    await ask(database, order_id, "second", 3, "102")
    assert (await shown(database, order_id, 4, "101")).price == Decimal(101)
    assert (await shown(database, order_id, 3, "102")).price == Decimal(102)
    order = await shown(database, order_id, 4, "101")
    assert (order.quantity, order.price) == (3, Decimal(102))


@pytest.mark.parametrize(
    "listings", [[(5, "101"), (3, "101")], [(3, "100"), (3, "101")], [(3, "101")]]
)
async def test_two_concurrent_changes_are_both_applied(
    database: Database, listings: list[tuple[int, str]]
) -> None:
    """In whatever order they were made, and however often the broker was asked."""
    order_id = await resting(database)
    await ask(database, order_id, "price", None, "101")
    await ask(database, order_id, "quantity", 3, None)
    for quantity, price in listings:
        order = await shown(database, order_id, quantity, price)
    assert (order.quantity, order.price) == (3, Decimal(101))
    async with database.session() as session:
        ids = [row.event_id for row in await recording.events_of_order(session, order_id)]
    assert sum(event_id.endswith("#confirmed") for event_id in ids) == 2


async def test_of_two_prices_under_way_together_the_last_one_shown_holds(
    database: Database,
) -> None:
    order_id = await resting(database)
    await ask(database, order_id, "first", 4, "101")
    await ask(database, order_id, "second", None, "102")
    assert (await shown(database, order_id, 4, "101")).price == Decimal(101)
    for price in ("102", "101"):  # then a list that is behind
        order = await shown(database, order_id, 4, price)
        assert (order.quantity, order.price) == (4, Decimal(102))


async def test_a_change_that_another_one_outran_leaves_its_quantity(database: Database) -> None:
    order_id = await resting(database)
    await ask(database, order_id, "first", 4, "101")
    await ask(database, order_id, "second", None, "102")
    for price in ("102", "101"):  # then a list that is behind
        order = await shown(database, order_id, 4, price)
        assert (order.quantity, order.price) == (4, Decimal(102))


async def test_an_order_that_ended_right_after_its_change_shows_what_it_was_for(
    database: Database,
) -> None:
    order_id = await resting(database)
    await ask(database, order_id, "r", 2, "101")
    order = await shown(database, order_id, 2, "101", OrderState.FILLED)
    assert (order.quantity, order.price, order.state) == (2, Decimal(101), "filled")


async def test_an_event_and_the_answer_may_tell_of_a_change_at_once(database: Database) -> None:
    """Both lock the order first: else each would wait for the other, and one would fail."""
    order_id = await resting(database)
    await ask(database, order_id, "r", 2, "101")
    told = structs.replace(
        make_order_event(str(order_id), uuid.uuid4().hex, OrderState.PART_FILLED),
        quantity=2,
        price=Decimal(101),
    )
    made = OrderChange(
        quantity=2, price=Decimal(101), generation="g", deadline_at=datetime.now(UTC)
    )

    async def answered() -> None:
        async with database.session() as session:
            await order_changes.apply_change(session, order_id, made, f"{order_id}:replace:r")

    async with database.session() as session:
        await recording.record_events(session, [structs.replace(told, quantity=None, price=None)])
        answer = asyncio.create_task(answered())
        await asyncio.sleep(0.3)
        assert not answer.done()  # it waits for the order
        await order_changes.confirm_changes(session, order_id, 2, Decimal(101))
    await answer
    async with database.session() as session:
        order = await recording.get_order(session, order_id)
        events = [row.event_id for row in await recording.events_of_order(session, order_id)]
    assert (order.quantity, order.price) == (2, Decimal(101))
    assert events.count(f"{order_id}:replace:r#confirmed") == 1
