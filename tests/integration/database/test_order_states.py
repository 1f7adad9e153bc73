"""What an order's row says when its event and its answer come in either order."""

from __future__ import annotations

import itertools

import pytest

from infra.database import orders
from infra.database.engine import Database
from tests.integration.database.test_database import database, event, new_order
from worker_runtime.protocol.messages import OrderOutcome, OrderState

__all__ = ["database"]  # the fixture, shared with the room's first file


@pytest.mark.parametrize("event_first", [True, False])
async def test_a_rejected_order_keeps_its_code_whoever_reports_first(
    database: Database,
    event_first: bool,
) -> None:
    async with database.session() as session:
        order_id = (await orders.accept(session, new_order())).order.id
    told = event(str(order_id), "rejected", OrderState.REJECTED)
    outcome = OrderOutcome(order_id=str(order_id), state=OrderState.REJECTED, reason="no margin")
    async with database.session() as session:
        if event_first:
            await orders.record_event(session, told)
        await orders.apply_outcome(session, outcome, "ORDER_REJECTED")
        await orders.record_event(session, told)
    async with database.session() as session:
        assert (await orders.get(session, order_id)).reason_code == "ORDER_REJECTED"


async def test_the_first_code_of_a_rejected_order_stays(database: Database) -> None:
    async with database.session() as session:
        order_id = (await orders.accept(session, new_order())).order.id
    outcome = OrderOutcome(order_id=str(order_id), state=OrderState.REJECTED)
    for code in ("ORDER_REJECTED", "LATER"):
        async with database.session() as session:
            await orders.apply_outcome(session, outcome, code)
    async with database.session() as session:
        assert (await orders.get(session, order_id)).reason_code == "ORDER_REJECTED"


async def test_an_unknown_order_can_be_put_on_a_persons_list_and_still_be_settled(
    database: Database,
) -> None:
    async with database.session() as session:
        order_id = (await orders.accept(session, new_order())).order.id
    numbers = itertools.count()
    for state in (OrderState.UNKNOWN, OrderState.NEEDS_ATTENTION, OrderState.FILLED):
        async with database.session() as session:
            await orders.record_event(session, event(str(order_id), f"e{next(numbers)}", state))
        async with database.session() as session:
            assert (await orders.get(session, order_id)).state == state.value


async def test_events_of_one_millisecond_stand_in_the_order_of_an_orders_life(database: Database) -> None:
    async with database.session() as session:
        order_id = (await orders.accept(session, new_order())).order.id
    life = [OrderState.SUBMITTING, OrderState.SUBMITTED, OrderState.PART_FILLED, OrderState.FILLED]
    together = [event(str(order_id), f"{9 - place}", state) for place, state in enumerate(life)]
    async with database.session() as session:
        await orders.record_events(session, together)
    async with database.session() as session:
        told = [row.state for row in await orders.events(session, order_id)]
    assert [state for state in told if state != OrderState.ACCEPTED] == life
