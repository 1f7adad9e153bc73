"""Which orders go with a claim: those that a worker may have to know again at the broker."""

from __future__ import annotations

from dataclasses import replace
from datetime import UTC, datetime, timedelta
from decimal import Decimal

from sqlalchemy import text

from infra.database.engine import Database
from infra.database.orders import acceptance, recording
from infra.database.orders import listing as order_list
from infra.database.orders.acceptance import NewOrder
from tests.support.orders.stored import make_new_order, make_order_event
from worker_runtime.protocol.messages import OrderState, PriceType

TODAY = datetime.now(UTC).date() + timedelta(days=1)  # Taipei may be a day ahead


async def accept(database: Database, new: NewOrder, *states: OrderState) -> str:
    async with database.session() as session:
        order_id = str((await acceptance.accept_order(session, new)).order.id)
        for state in states:
            await recording.record_event(
                session, make_order_event(order_id, f"{order_id}-{state.value}", state)
            )
    return order_id


async def test_orders_that_are_not_final_go_with_the_accounts_oldest_first(
    database: Database,
) -> None:
    limit = replace(
        make_new_order("a"), price_type="LMT", price=Decimal("100.5"), trading_day=TODAY
    )
    resting = await accept(database, limit, OrderState.SUBMITTED)
    await accept(database, replace(make_new_order("b"), trading_day=TODAY), OrderState.FILLED)
    unknown = await accept(
        database, replace(make_new_order("c"), symbol="2317", trading_day=TODAY), OrderState.UNKNOWN
    )
    async with database.session() as session:
        accounts, orders = await order_list.open_orders_with_accounts(session, "42")
        stored = await recording.get_order(session, orders[0].order_id)  # type: ignore[arg-type]
    assert [account.account_id for account in accounts] == ["main"]
    assert [order.order_id for order in orders] == [resting, unknown]
    assert (orders[0].price, orders[0].price_type, orders[0].quantity) == (
        Decimal("100.5"),
        PriceType.LIMIT,
        2,
    )
    assert (orders[0].tag, orders[0].user_id, orders[0].generation) == (stored.tag, "42", "g")


async def test_an_order_of_the_day_before_is_known_by_the_brokers_id_or_by_its_own_tag(
    database: Database,
) -> None:
    # As at 01:00 in TAIFEX's evening, or on Monday after Friday's.
    yesterday = TODAY - timedelta(days=2)
    named = await accept(
        database, replace(make_new_order("a"), trading_day=yesterday), OrderState.SUBMITTED
    )
    others = [
        await accept(
            database,
            replace(make_new_order(name), symbol=name, trading_day=day),
            OrderState.UNKNOWN,
        )
        for name, day in (("b", yesterday), ("c", TODAY))
    ]
    async with database.session() as session:
        await session.execute(
            text("update orders set broker_order_id = 'b1' where state = 'submitted'")
        )
    async with database.session() as session:
        _, orders = await order_list.open_orders_with_accounts(session, "42")
    assert [(order.order_id, order.broker_order_id) for order in orders] == [
        (named, "b1"),
        *((order_id, None) for order_id in others),
    ]
    assert len({order.tag for order in orders}) == 3


async def test_an_order_says_whether_its_submission_was_begun(database: Database) -> None:
    told = [OrderState.QUEUED, OrderState.SUBMITTING, OrderState.UNKNOWN, OrderState.SUBMITTED]
    ids = [await accept(database, replace(make_new_order("a"), trading_day=TODAY))]
    for number, state in enumerate(told):
        new = replace(make_new_order(f"b{number}"), symbol=f"S{number}", trading_day=TODAY)
        ids.append(await accept(database, new, state))
    async with database.session() as session:
        _, orders = await order_list.open_orders_with_accounts(session, "42")
    assert [(order.order_id, order.begun) for order in orders] == list(
        zip(ids, [False, False, True, True, True], strict=True)
    )


async def test_a_user_without_accounts_or_orders_has_none(database: Database) -> None:
    async with database.session() as session:
        assert await order_list.open_orders_with_accounts(session, "nobody") == ([], [])
        assert (await order_list.open_orders_with_accounts(session, "42"))[1] == []
