"""Acceptance of an order: one statement writes it, its tag, its first event and its audit entry."""

from __future__ import annotations

import uuid
from dataclasses import dataclass
from datetime import date, datetime
from decimal import Decimal
from typing import Any

from sqlalchemy import String, bindparam, select, text
from sqlalchemy.ext.asyncio import AsyncSession

from infra.database.engine import Database, SingleStatement
from infra.database.models import Order
from infra.database.orders.checks import UNSETTLED_ORDERS, find_refusal
from worker_runtime.protocol.messages import PlaceOrder, PriceType, Side, TimeInForce


@dataclass(frozen=True, kw_only=True)
class NewOrder:
    """An order as a client asked for it. `trading_day` is the date in Taipei."""

    user_id: str
    account_id: str
    client_order_id: str
    fingerprint: str
    symbol: str
    side: str
    quantity: int
    price_type: str
    price: Decimal | None
    time_in_force: str
    generation: str
    deadline_at: datetime
    trading_day: date
    actor: str = "api"
    #: The order can only make a position smaller.
    reduce_only: bool = False
    #: The request that this order is a part of, if there was one: a reversal, a webhook, a closed position.
    origin: str = ""
    #: What an order of unknown outcome blocks: further orders of its account in its `symbol`, of the whole
    #: `account`, or nothing (`off`).
    unknown_blocks: str = "symbol"


@dataclass(frozen=True)
class AcceptedOrder:
    order: Order
    #: False: the client order id was used before, and `order` is that first order.
    new: bool
    same_request: bool


#: By name: a newer schema may have more columns than this release knows.
_COLUMNS = ", ".join(f"placed.{column.name}" for column in Order.__table__.columns)
#: Six digits to the base 36. (`string_agg` over `generate_series` took 36 us.)
_TAG = " || ".join(
    f"substr('0123456789ABCDEFGHIJKLMNOPQRSTUVWXYZ', cast(number.tag / {36**place} % 36 as int) + 1, 1)"
    for place in reversed(range(6))
)
#: One statement and one round trip. A client order id that was used before makes no row and only uses up a
#: tag number. A tag is the day in two characters and the order's number on that day in four (1.6 million), so
#: none repeats within 1,296 days. Numbers alone could not restart each day: a broker may list orders of
#: several days at once (TAIFEX's evening session ends at 05:00, and Friday's belongs to Monday).
_ACCEPT = text(f"""
with unsettled as ({UNSETTLED_ORDERS}), blocked as (
  select 1 from unsettled
  union all
  select 1 from reconciliations
   where user_id = :user_id and account_id = :account_id and blocks and resolved_at is null
  union all
  select 1 from switches
   where (state = 'halted' or state = 'reducing' and not :reduce_only)
     and scope in ('all', 'user\\:' || :user_id, 'self\\:' || :user_id,
                   'account\\:' || :user_id || '\\:' || :account_id,
                   'self\\:' || :user_id || '\\:' || :account_id)
), counter as (
  insert into order_tags (user_id, account_id, trading_day, last)
  select user_id, account_id, :trading_day, 1 from broker_accounts
   where user_id = :user_id and account_id = :account_id and not exists (select from blocked)
  on conflict (user_id, account_id, trading_day) do update set last = order_tags.last + 1
  returning last
), number as (
  select cast((cast(:trading_day as date) - date '2026-01-01') % 1296 as bigint) * 1679616
         + last % 1679616 as tag
    from counter
), placed as (
  insert into orders (id, user_id, account_id, client_order_id, fingerprint, symbol, side, quantity,
                      price_type, price, time_in_force, tag, trading_day, state, generation, deadline_at,
                      reduce_only, origin)
  select :id, :user_id, :account_id, :client_order_id, :fingerprint, :symbol, :side, :quantity,
         :price_type, :price, :time_in_force,
         {_TAG},
         :trading_day, 'accepted', :generation, :deadline_at, :reduce_only, :origin
  from number
  on conflict on constraint orders_client_order_id do nothing
  returning *
), noted as (
  insert into order_events (event_id, order_id, state, at, data)
  select id || '\\:accepted', id, 'accepted', created_at, cast('{{}}' as jsonb) from placed
), audited as (
  insert into audit_trail (actor, action, subject, data)
  select :actor, 'order.accepted', 'order\\:' || id,
         jsonb_build_object('user', user_id, 'account', account_id, 'client_order_id', client_order_id,
                            'symbol', symbol, 'side', side, 'quantity', quantity)
  from placed
)
select {_COLUMNS} from placed
""")  # noqa: S608 - a constant of ours
# asyncpg wants a type for each parameter; they are those of the columns.
_ACCEPT_TYPED = _ACCEPT.bindparams(
    bindparam("actor", type_=String),
    bindparam("unknown_blocks", type_=String),
    *(
        bindparam(column.name, type_=column.type)
        for column in Order.__table__.columns
        if column.name in _ACCEPT.compile().params
    ),
).columns(*Order.__table__.columns)


_ACCEPT_ALONE = SingleStatement(_ACCEPT_TYPED)


async def accept_order(session: AsyncSession, new: NewOrder) -> AcceptedOrder:
    """Writes an order before it is sent anywhere; a repeated client order id returns the first order.

    Raises `UnknownAccount` if the user has no such account; `TradingHalted` or `ReducingOnly` by the switches
    (the worker checks again, right before the broker); `SymbolBlocked` while an order of unknown outcome
    blocks it; `AccountBlocked` while the account differs from the broker's books. A repeat is never blocked.
    """
    row = (await session.execute(_ACCEPT_TYPED, _values_of(new))).one_or_none()
    if row is None:
        return await _repeat_or_refusal(session, new)
    return AcceptedOrder(Order(**row._asdict()), new=True, same_request=True)


async def accept_order_alone(database: Database, new: NewOrder) -> AcceptedOrder:
    """`accept_order` as one statement without a session. Raises `DatabaseUnavailable`, too."""
    row = await database.row(_ACCEPT_ALONE, _values_of(new))
    if row is not None:
        return AcceptedOrder(Order(**row), new=True, same_request=True)
    async with database.session(autocommit=True) as session:
        return await _repeat_or_refusal(session, new)


def _values_of(new: NewOrder) -> dict[str, Any]:
    return {"id": uuid.uuid4(), **{name: getattr(new, name) for name in new.__dataclass_fields__}}


async def _repeat_or_refusal(session: AsyncSession, new: NewOrder) -> AcceptedOrder:
    first = await session.scalar(
        select(Order).where(Order.user_id == new.user_id, Order.client_order_id == new.client_order_id)
    )
    if first is None:
        raise await find_refusal(
            session,
            user_id=new.user_id,
            account_id=new.account_id,
            symbol=new.symbol,
            reduce_only=new.reduce_only,
            unknown_blocks=new.unknown_blocks,
        )
    return AcceptedOrder(first, new=False, same_request=first.fingerprint == new.fingerprint)


def place_request(
    order: Order, reply_to: str, unknown_blocks: str = "symbol", lasts: float | None = None
) -> PlaceOrder:
    """Makes the request of an order's row. `reply_to` is the channel of the waiting process, or ''.

    `lasts`: seconds from acceptance to the deadline; None takes them from the row.
    """
    if lasts is None:
        lasts = (order.deadline_at - order.created_at).total_seconds()
    order_id = str(order.id)
    return PlaceOrder(
        request_id=order_id,
        order_id=order_id,
        user_id=order.user_id,
        account_id=order.account_id,
        symbol=order.symbol,
        side=Side(order.side),
        quantity=order.quantity,
        price_type=PriceType(order.price_type),
        price=order.price,
        time_in_force=TimeInForce(order.time_in_force),
        tag=order.tag,
        reply_to=reply_to,
        generation=order.generation,
        reduce_only=order.reduce_only,
        unknown_blocks=unknown_blocks,
        lifetime_ms=max(1, round(lasts * 1000)),
    )
