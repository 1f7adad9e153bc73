"""A user's orders as lists: filtered, the newest first, a page at a time.

The orders of a user's daily statement, with no more of each than a statement says.

A user's orders that are not final, as a worker needs them to know them again at the broker (O5).

Users who traded of late, page by page along the orders' index (`orders_by_user`).
"""

from __future__ import annotations

import uuid
from collections.abc import Sequence
from dataclasses import dataclass
from datetime import datetime

import msgspec
from sqlalchemy import ColumnElement, Select, String, and_, bindparam, func, or_, select, text, tuple_
from sqlalchemy.ext.asyncio import AsyncSession

from infra.database import accounts
from infra.database.accounts import EncryptedAccount
from infra.database.models import Order
from infra.database.orders.states import OPEN_STATES, RANK
from worker_runtime.jobs.protocol.catalog import OrderRow
from worker_runtime.protocol.messages import FINAL_ORDER_STATES, OrderState, PlaceOrder

#: Names for several states at once.
OPEN, FINAL = "open", "final"


@dataclass(frozen=True, kw_only=True)
class OrderSelection:
    """Which orders of one user; what is None is not asked for."""

    user_id: str
    #: States as they are shown, `open` or `final`; empty: all. An order that waits for a person is
    #: `needs_attention` and nothing else.
    states: frozenset[str] = frozenset()
    account_id: str | None = None
    symbol: str | None = None
    side: str | None = None
    client_order_id: str | None = None
    #: Accepted at or after this time, and before that one.
    since: datetime | None = None
    until: datetime | None = None


#: Where a page ended: time of acceptance and id of its last order. Newer orders do not move it.
OrderPosition = tuple[datetime, uuid.UUID]


async def page_of_orders(
    session: AsyncSession, wanted: OrderSelection, *, behind: OrderPosition | None = None, limit: int = 100
) -> Sequence[Order]:
    """The next orders behind a position, at most `limit`; the newest first."""
    statement = _select_matching(wanted).order_by(Order.created_at.desc(), Order.id.desc()).limit(limit)
    if behind is not None:
        statement = statement.where(tuple_(Order.created_at, Order.id) < behind)
    return (await session.scalars(statement)).all()


def position_of(order: Order) -> OrderPosition:
    return order.created_at, order.id


def _select_matching(wanted: OrderSelection) -> Select[Order]:
    found = select(Order).where(Order.user_id == wanted.user_id)
    for column, value in (
        (Order.account_id, wanted.account_id),
        (Order.symbol, wanted.symbol),
        (Order.side, wanted.side),
        (Order.client_order_id, wanted.client_order_id),
    ):
        if value is not None:
            found = found.where(column == value)
    if wanted.since is not None:
        found = found.where(Order.created_at >= wanted.since)
    if wanted.until is not None:
        found = found.where(Order.created_at < wanted.until)
    if wanted.states:
        found = found.where(or_(*(_in_state(state) for state in sorted(wanted.states))))
    return found


def _in_state(state: str) -> ColumnElement[bool]:
    if state == OPEN:
        return Order.state.in_(OPEN_STATES)
    if state == FINAL:
        return Order.state.in_(FINAL_ORDER_STATES)
    if state == OrderState.NEEDS_ATTENTION:
        raised = and_(Order.state.in_(OPEN_STATES), Order.attention.is_not(None))
        return or_(Order.state == state, raised)
    if state in FINAL_ORDER_STATES:
        return Order.state == state
    return and_(Order.state == state, Order.attention.is_(None))


async def orders_of_statement(
    session: AsyncSession, user_id: str, since: datetime, until: datetime, *, limit: int
) -> list[OrderRow]:
    """Accepted at or after `since` and before `until`, at most `limit`; by account and symbol.

    Ids, times and reasons are left out: they are most of an order's bytes once it is packed.
    """
    columns = (
        *(Order.account_id, Order.symbol, Order.side, Order.quantity),
        *(Order.state, Order.attention, Order.filled_quantity, Order.average_price),
    )
    rows = await session.execute(
        select(*columns)
        .where(Order.user_id == user_id, Order.created_at >= since, Order.created_at < until)
        .order_by(Order.account_id, Order.symbol, Order.side, Order.id)
        .limit(limit)
    )
    return [
        OrderRow(
            accepted_at="",
            id="",
            client_order_id="",
            account_id=row.account_id,
            symbol=row.symbol,
            side=row.side,
            quantity=row.quantity,
            price_type="",
            price=None,
            time_in_force="",
            state=_shown_state(row.state, row.attention),
            filled_quantity=row.filled_quantity,
            average_price=row.average_price,
        )
        for row in rows
    ]


def _shown_state(state: str, attention: str | None) -> str:
    """As the API shows it: an order that waits for a person says so."""
    waits = attention is not None and state not in FINAL_ORDER_STATES
    return OrderState.NEEDS_ATTENTION.value if waits else state


#: The newest that go with a claim: 450 bytes each, and a signed message has at most 256 KiB.
OPEN_ORDERS_LIMIT = 200
#: Days. No broker keeps an order for longer than its trading day; that of an evening before holidays, which
#: belongs to the day after them, has the longest.
OPEN_ORDERS_AGE = 14

_FINAL_STATES = ", ".join(f"'{state.value}'" for state in sorted(FINAL_ORDER_STATES))
_NOT_BEGUN = ", ".join(
    f"'{state.value}'" for state in OrderState if RANK[state] < RANK[OrderState.SUBMITTING]
)
# An order without the broker's id can be known by its tag alone. Those of earlier releases, which begin with
# 00, began anew each day: after its day, such a tag is another order's.
_OPEN_ORDERS = text(f"""
(select cast(coalesce(json_agg(found.message order by found.created_at), '[]') as text)
   from (select created_at, json_build_object(
                'type', 'place_order', 'request_id', id, 'order_id', id, 'user_id', user_id,
                'account_id', account_id, 'symbol', symbol, 'side', side, 'quantity', quantity,
                'price_type', price_type, 'price', cast(price as text), 'time_in_force', time_in_force,
                'tag', tag, 'reply_to', '', 'generation', generation, 'reduce_only', reduce_only,
                'broker_order_id', broker_order_id, 'begun', state not in ({_NOT_BEGUN})) as message
           from orders
          where user_id = :user and state not in ({_FINAL_STATES})
            and created_at > now() - make_interval(days => {OPEN_ORDERS_AGE})
            and (broker_order_id is not null or left(tag, 2) <> '00'
                 or trading_day >= cast(now() at time zone 'Asia/Taipei' as date))
          order by created_at desc
          limit {OPEN_ORDERS_LIMIT}) as found)
""").bindparams(bindparam("user", type_=String))  # noqa: S608 - constants of ours
_decoder = msgspec.json.Decoder(list[PlaceOrder])


async def open_orders_with_accounts(
    session: AsyncSession, user_id: str
) -> tuple[list[EncryptedAccount], list[PlaceOrder]]:
    """`accounts.of_user` and the user's orders that are not final, oldest first, in one round trip."""
    wanted = accounts.select_accounts(user_id).add_columns(_OPEN_ORDERS)
    rows = (await session.execute(wanted, {"user": user_id})).all()
    if not rows:
        return [], []
    return [accounts.account_from_rows(row[0], row[1]) for row in rows], _decoder.decode(rows[0][2])


async def count_recent_users(session: AsyncSession, since: datetime) -> int:
    """Users with an order since then, whatever became of it."""
    found = await session.scalar(
        select(func.count(func.distinct(Order.user_id))).where(Order.created_at >= since)
    )
    return int(found or 0)


async def recent_users_after(session: AsyncSession, since: datetime, *, after: str, limit: int) -> list[str]:
    """The next `limit` of them behind `after`, in order of their ids."""
    rows = await session.scalars(
        select(Order.user_id)
        .where(Order.created_at >= since, Order.user_id > after)
        .group_by(Order.user_id)
        .order_by(Order.user_id)
        .limit(limit)
    )
    return list(rows)
