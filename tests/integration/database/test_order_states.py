"""What an order's row says when its event and its answer come in either order."""

from __future__ import annotations

import asyncio
import itertools
import uuid
from dataclasses import replace
from decimal import Decimal

import pytest
from sqlalchemy import text, update

from infra.database.engine import Database
from infra.database.models import Order
from infra.database.orders import acceptance, recording
from infra.database.orders.merging import OrderStanding
from tests.support.orders.stored import make_new_order, make_order_event
from worker_runtime.protocol.messages import FINAL_ORDER_STATES, OrderOutcome, OrderState


@pytest.mark.parametrize("event_first", [True, False])
async def test_a_rejected_order_keeps_its_code_whether_event_or_answer_comes_first(
    database: Database,
    event_first: bool,
) -> None:
    async with database.session() as session:
        order_id = (await acceptance.accept_order(session, make_new_order())).order.id
    told = make_order_event(str(order_id), "rejected", OrderState.REJECTED)
    outcome = OrderOutcome(order_id=str(order_id), state=OrderState.REJECTED, reason="no margin")
    async with database.session() as session:
        if event_first:
            await recording.record_event(session, told)
        await recording.apply_outcome(session, outcome, "ORDER_REJECTED")
        await recording.record_event(session, told)
    async with database.session() as session:
        assert (await recording.get_order(session, order_id)).reason_code == "ORDER_REJECTED"


async def test_the_first_code_of_a_rejected_order_stays(database: Database) -> None:
    async with database.session() as session:
        order_id = (await acceptance.accept_order(session, make_new_order())).order.id
    outcome = OrderOutcome(order_id=str(order_id), state=OrderState.REJECTED)
    for code in ("ORDER_REJECTED", "LATER"):
        async with database.session() as session:
            await recording.apply_outcome(session, outcome, code)
    async with database.session() as session:
        assert (await recording.get_order(session, order_id)).reason_code == "ORDER_REJECTED"


async def test_an_unknown_order_can_be_put_on_a_persons_list_and_still_be_settled(
    database: Database,
) -> None:
    async with database.session() as session:
        order_id = (await acceptance.accept_order(session, make_new_order())).order.id
    numbers = itertools.count()
    for state in (OrderState.UNKNOWN, OrderState.NEEDS_ATTENTION, OrderState.FILLED):
        async with database.session() as session:
            await recording.record_event(
                session, make_order_event(str(order_id), f"e{next(numbers)}", state)
            )
        async with database.session() as session:
            assert (await recording.get_order(session, order_id)).state == state.value


async def test_events_of_one_millisecond_stand_in_the_order_of_an_orders_life(
    database: Database,
) -> None:
    async with database.session() as session:
        order_id = (await acceptance.accept_order(session, make_new_order())).order.id
    life = [OrderState.SUBMITTING, OrderState.SUBMITTED, OrderState.PART_FILLED, OrderState.FILLED]
    together = [
        make_order_event(str(order_id), f"{9 - place}", state) for place, state in enumerate(life)
    ]
    async with database.session() as session:
        await recording.record_events(session, together)
    async with database.session() as session:
        told = [row.state for row in await recording.events_of_order(session, order_id)]
    assert [state for state in told if state != OrderState.ACCEPTED] == life


async def test_of_an_order_with_endless_events_the_last_ones_are_read(database: Database) -> None:
    """Its worker may report any number of them, and everyone who looks at the order reads them."""
    async with database.session() as session:
        order_id = (await acceptance.accept_order(session, make_new_order())).order.id
        many = [
            make_order_event(str(order_id), f"e{number}", OrderState.SUBMITTED)
            for number in range(recording.MAX_EVENTS_READ + 10)
        ]
        await recording.record_events(session, many)
    async with database.session() as session:
        await recording.record_event(
            session, make_order_event(str(order_id), "end", OrderState.FILLED)
        )
        events = await recording.events_of_order(session, order_id)
    assert len(events) == recording.MAX_EVENTS_READ
    assert events[-1].state == "filled"


async def test_a_fill_that_had_to_wait_for_another_writer_of_the_order_still_counts(
    database: Database,
) -> None:
    """Both are told by different processes, and the first one is slow with its commit."""
    async with database.session() as session:
        order_id = (await acceptance.accept_order(session, make_new_order())).order.id

    async def fill() -> None:
        async with database.session() as session:
            await recording.record_event(
                session, make_order_event(str(order_id), "e2", OrderState.FILLED, 1)
            )

    async with database.session() as slow:
        await recording.record_event(
            slow, make_order_event(str(order_id), "e1", OrderState.SUBMITTED)
        )
        filling = asyncio.create_task(fill())
        waits = text(
            "select count(*) from pg_stat_activity where datname = current_database() and"
            " wait_event_type = 'Lock'"
        )
        async with database.session(autocommit=True) as observer:
            async with asyncio.timeout(20):
                while not await observer.scalar(waits):
                    assert not filling.done()
    await filling
    async with database.session() as session:
        order = await recording.get_order(session, order_id)
    assert (order.state, order.filled_quantity) == (OrderState.FILLED, 1)


#: States that an order's row may have.
ROW_STATES = [state for state in OrderState if state is not OrderState.NEEDS_ATTENTION]


@pytest.mark.parametrize("begins_at", ROW_STATES)
async def test_an_outcome_is_merged_in_python_as_it_is_in_sql(
    database: Database, begins_at: OrderState
) -> None:
    """Callers see what `OrderStanding.after` says, often before the row says it."""
    async with database.session() as session:
        order_id = (await acceptance.accept_order(session, make_new_order())).order.id
    codes = [(None, "SECOND"), ("FIRST", "SECOND")]
    # No final order has `attention`.
    reasons_to_look = [None] if begins_at in FINAL_ORDER_STATES else [None, "look"]
    combinations = itertools.product(codes, ROW_STATES, [0, 2], [False, True], reasons_to_look)
    async with database.session() as session:
        for (code, next_code), state, lots, withdrawn, attention in combinations:
            if withdrawn and state not in FINAL_ORDER_STATES:
                continue  # what is withdrawn ends there
            row_values = {
                "state": begins_at,
                "reason_code": code,
                "reason": "earlier",
                "broker_order_id": None if lots else "B1",
                "filled_quantity": 1,
                "average_price": Decimal(10),
                "attention": attention,
            }
            outcome = OrderOutcome(
                order_id=str(order_id),
                state=state,
                broker_order_id="B2",
                filled_quantity=lots,
                average_price=Decimal(20),
                reason="later",
                withdrawn=withdrawn,
            )
            await session.execute(update(Order).values(row_values))
            standing = OrderStanding.of(await recording.get_order(session, order_id))
            behind = await recording.orders_behind(session, {order_id: (outcome, next_code)})
            await recording.apply_outcome(session, outcome, next_code)
            session.expire_all()
            stored = OrderStanding.of(await recording.get_order(session, order_id))
            assert standing.after(outcome, next_code) == stored, outcome
            assert behind == ([] if stored == standing else [order_id])


async def _withdrawn_at(database: Database, state: OrderState, final: OrderState) -> uuid.UUID:
    """An order in this state that was found in its queue, and taken back."""
    async with database.session() as session:
        new = replace(make_new_order(uuid.uuid4().hex), symbol=uuid.uuid4().hex)
        order_id = (await acceptance.accept_order(session, new)).order.id
        await recording.record_event(
            session, make_order_event(str(order_id), f"{order_id}:{state}", state)
        )
    outcome = OrderOutcome(order_id=str(order_id), state=final, reason="taken back", withdrawn=True)
    for _ in range(2):
        async with database.session() as session:
            await recording.apply_outcome(session, outcome, "DEADLINE_EXCEEDED")
    return order_id


@pytest.mark.parametrize("final", [OrderState.CANCELLED, OrderState.REJECTED, OrderState.EXPIRED])
@pytest.mark.parametrize("state", [OrderState.ACCEPTED, OrderState.QUEUED])
async def test_an_order_that_no_worker_took_is_final_when_it_is_taken_back(
    database: Database, state: OrderState, final: OrderState
) -> None:
    order_id = await _withdrawn_at(database, state, final)
    async with database.session() as session:
        order = await recording.get_order(session, order_id)
    assert (order.state, order.reason_code, order.reason) == (
        final,
        "DEADLINE_EXCEEDED",
        "taken back",
    )
    assert order.verify_at is None


@pytest.mark.parametrize("final", [OrderState.CANCELLED, OrderState.REJECTED, OrderState.EXPIRED])
@pytest.mark.parametrize(
    ("state", "expected"),
    [
        (OrderState.SUBMITTING, OrderState.UNKNOWN),
        (OrderState.UNKNOWN, OrderState.UNKNOWN),
        (OrderState.SUBMITTED, OrderState.SUBMITTED),
        (OrderState.PART_FILLED, OrderState.PART_FILLED),
    ],
)
async def test_an_order_that_a_worker_took_is_never_final_by_being_found_in_a_queue(
    database: Database, state: OrderState, expected: OrderState, final: OrderState
) -> None:
    """A copy of Valkey that lagged behind holds it there again."""
    order_id = await _withdrawn_at(database, state, final)
    async with database.session() as session:
        order = await recording.get_order(session, order_id)
    assert (order.state, order.reason_code) == (expected, None)
    assert order.verify_at is not None
    async with database.session() as session:
        await recording.record_event(
            session, make_order_event(str(order_id), f"{order_id}:f", OrderState.FILLED, 2)
        )
    async with database.session() as session:
        assert (await recording.get_order(session, order_id)).state == OrderState.FILLED
