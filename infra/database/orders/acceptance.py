"""Acceptance of an order: one statement writes it, its tag, its first event and its audit entry."""

import time
import uuid
from dataclasses import dataclass, replace
from decimal import Decimal
from typing import Any, NamedTuple

import msgspec
from sqlalchemy import Float, String, bindparam, delete, func, select, text
from sqlalchemy.ext.asyncio import AsyncSession

from infra.database.engine import (
    Database,
    OutcomeUnconfirmed,
    SingleRow,
    SingleStatement,
)
from infra.database.locks import seconds_from_now
from infra.database.models import Order, OrderEventRow
from infra.database.orders.checks import UNSETTLED_ORDERS, CheckedTerms, find_refusal
from infra.database.trading.models import OrderDuplicate
from infra.database.workers.sessions import FIRST_EPOCH
from infra.market.calendar import HOME_ZONE_NAME
from worker_runtime.protocol.broker_record import TAG_LENGTH
from worker_runtime.protocol.contract_codes import same_contract_pattern
from worker_runtime.protocol.errors import BerthError, DuplicateOrder, SymbolBlocked
from worker_runtime.protocol.messages import PlaceOrder, PriceType, Side, TimeInForce
from worker_runtime.protocol.order_terms import OpenClose, OrderCondition, OrderLot

#: Seconds after which an acceptance without an answer is not tried again: the client does not wait
#: for ever.
REPEAT_WITHIN_S = 5.0


@dataclass(frozen=True, kw_only=True)
class NewOrder(CheckedTerms):
    """An order as a client asked for it."""

    client_order_id: str
    fingerprint: str
    side: str
    generation: str
    #: Seconds until it must not be sent any more, from its acceptance by PostgreSQL's clock.
    lifetime_s: float
    actor: str = "api"
    #: The request that this order is a part of, if there was one: a reversal, a webhook, a closed
    #: position.
    origin: str = ""
    #: What an order of unknown outcome blocks: further orders of its account in the same `symbol`,
    #: all orders of the `account`, or nothing (`off`).
    unknown_blocks: str = "symbol"
    #: The context of its trace (`traceparent`); '' if it is not traced. Kept with its first event.
    trace: str = ""


class OrderBounds(NamedTuple):
    """Holds the limits that SQL and the worker enforce later, kept with the order."""

    #: Seconds within which an identical order is refused; 0 if none is. Negative (of an
    #: order with `allow_duplicate`): the order is accepted even if it is a duplicate, and later
    #: duplicates within the window are refused. An order that ended unfilled has no duplicates.
    duplicate_window_s: float = 0.0
    #: For the worker (see `PlaceOrder`).
    price_band: Decimal | None = None
    most_price: Decimal | None = None

    @property
    def price_fields(self) -> dict[str, Decimal]:
        bounds = self._asdict().items()
        return {
            name: bound
            for name, bound in bounds
            if name != "duplicate_window_s" and bound is not None
        }


NO_BOUNDS = OrderBounds()
#: An order as PostgreSQL has it, with the columns of `Order`.
StoredOrder = Order | SingleRow


@dataclass(frozen=True)
class AcceptedOrder:
    order: StoredOrder
    #: Seconds until its deadline.
    seconds_left: float
    #: False: the client order id was used before, and `order` is that first order.
    new: bool
    same_request: bool


#: By name: a newer schema may have more columns than this release knows.
_COLUMNS = ", ".join(f"placed.{column.name}" for column in Order.__table__.columns)
#: A number's tag: `TAG_LENGTH` digits to the base 36 (`string_agg` over `generate_series` took
#: 36 us). It is the day in two characters and the order's number on that day in four (1.6 million),
#: so none repeats within 1,296 days. Numbers alone could not restart each day: a broker may list
#: orders of several days at once (an evening session ends on the next morning, and Friday's belongs
#: to Monday).
_TAG = " || ".join(
    f"substr('0123456789ABCDEFGHIJKLMNOPQRSTUVWXYZ', cast(number.tag / {36**place} % 36 as "
    "int) + 1, 1)"
    for place in reversed(range(TAG_LENGTH))
)
#: Lower bound of today's tag number, so a restored database reuses none: nine for each second of
#: the day (an account with more than nine orders a second may reuse some).
_MIN_TAG_BY_CLOCK = (
    f"cast(least(greatest(9 * extract(epoch from clock_timestamp() at time zone '{HOME_ZONE_NAME}'"
    " - :trading_day), 1), 777600) as bigint)"
)
# The steps of the statement that accepts an order (`_INSERT_ORDER`). Each may read the rows of the
# steps before it. Of `counter`, `number` and `placed` each has one row, or none if the one before
# has none; then no order is written.

#: Has a row for each reason that forbids the order: an earlier order of unknown outcome, an open
#: reconciliation of the account, a disabled user, a switch. `find_refusal` finds the same reasons.
_BLOCKED = """
  select 1 from unsettled
  union all
  select 1 from reconciliations
   where user_id = :user_id and account_id = :account_id and blocks and resolved_at is null
  union all
  select 1 from users where id = :user_id and disabled_at is not null
  union all
  select 1 from switches
   where (state = 'halted' or state = 'reducing' and not :reduce_only)
     and scope in ('all', 'user\\:' || :user_id, 'self\\:' || :user_id,
                   'account\\:' || :user_id || '\\:' || :account_id,
                   'self\\:' || :user_id || '\\:' || :account_id)
"""
#: Takes the account's next number of the day. Has no row if the order is blocked, if there is no
#: such account, or if the broker has rejected its login.
_COUNTER = f"""
  insert into order_tags (user_id, account_id, trading_day, last, used)
  select user_id, account_id, :trading_day, {_MIN_TAG_BY_CLOCK}, 1 from broker_accounts
   where user_id = :user_id and account_id = :account_id and not login_rejected
     and not exists (select from blocked)
  on conflict (user_id, account_id, trading_day) do update
     set last = greatest(order_tags.last + 1, excluded.last), used = order_tags.used + 1
  returning last
"""  # noqa: S608 - a constant of ours
#: Notes the latest order with this fingerprint. Has no row if another one was placed within the
#: window; one that ended unfilled does not count. Not used without a window.
_NOT_DUPLICATE = """
  insert into order_twins (user_id, fingerprint, client_order_id, at)
  select :user_id, :fingerprint, :client_order_id, clock_timestamp() from counter
   where :duplicate_window_s <> 0
  on conflict (user_id, fingerprint) do update
     set client_order_id = excluded.client_order_id, at = excluded.at
   where order_twins.at < excluded.at - :duplicate_window_s * interval '1 second'
      or order_twins.client_order_id = excluded.client_order_id
      or exists (select from orders as ended
                  where ended.user_id = :user_id
                    and ended.client_order_id = order_twins.client_order_id
                    and ended.state in ('rejected', 'expired', 'cancelled')
                    and ended.filled_quantity = 0)
  returning 1
"""
#: Makes the number of the order's tag (`_TAG`) of the day and the account's number of that day.
_NUMBER = """
  select cast((cast(:trading_day as date) - date '2026-01-01') % 1296 as bigint) * 1679616
         + last % 1679616 as tag
    from counter where :duplicate_window_s = 0 or exists (select from not_duplicate)
"""
#: Writes the order. Has no row if the client order id was used before: the first order stays as it
#: is, and the repeat only uses up a number. Of two processes that run this at once with the same
#: id, PostgreSQL lets one write the order, and the other one waits for its commit.
_PLACED = f"""
  insert into orders (id, user_id, account_id, client_order_id, fingerprint, symbol, side, quantity,
                      price_type, price, time_in_force, lot, condition, open_close,
                      tag, trading_day, state, generation, first_epoch, deadline_at, reduce_only,
                      origin)
  select :id, :user_id, :account_id, :client_order_id, :fingerprint, :symbol, :side, :quantity,
         :price_type, :price, :time_in_force, :lot, :condition, :open_close,
         {_TAG},
         :trading_day, 'accepted', :generation, {FIRST_EPOCH},
         clock_timestamp() + :lifetime_s * interval '1 second', :reduce_only, :origin
  from number
  on conflict on constraint orders_client_order_id do nothing
  returning *
"""  # noqa: S608 - a constant of ours
#: Writes the order's first event, with the bounds that the worker enforces.
_NOTED = """
  insert into order_events (event_id, order_id, state, at, data)
  select id || '\\:accepted', id, 'accepted', created_at,
         jsonb_strip_nulls(jsonb_build_object('trace', nullif(:trace, '')))
           || cast(:bounds as jsonb)
    from placed
"""
#: Writes the order's entry of the audit trail.
_AUDITED = """
  insert into audit_trail (actor, action, subject, data)
  select :actor, 'order.accepted', 'order\\:' || id,
         jsonb_build_object('user', user_id, 'account', account_id,
                            'client_order_id', client_order_id, 'symbol', symbol, 'side', side,
                            'quantity', quantity, 'lot', lot)
  from placed
"""
#: Accepts an order in one round trip. Returns its row, or none if it was refused or is a repeat
#: (`_repeat_or_refusal` finds out which).
_INSERT_ORDER = text(f"""
with unsettled as ({UNSETTLED_ORDERS}),
     blocked as ({_BLOCKED}),
     counter as ({_COUNTER}),
     not_duplicate as ({_NOT_DUPLICATE}),
     number as ({_NUMBER}),
     placed as ({_PLACED}),
     noted as ({_NOTED}),
     audited as ({_AUDITED})
select {_COLUMNS} from placed
""")  # noqa: S608 - a constant of ours
# asyncpg wants a type for each parameter; they are those of the columns.
_INSERT_ORDER_TYPED = _INSERT_ORDER.bindparams(
    bindparam("actor", type_=String),
    bindparam("lifetime_s", type_=Float),
    bindparam("duplicate_window_s", type_=Float),
    bindparam("trace", type_=String),
    bindparam("bounds", type_=String),
    bindparam("same_contract", type_=String),
    bindparam("unknown_blocks", type_=String),
    *(
        bindparam(column.name, type_=column.type)
        for column in Order.__table__.columns
        if column.name in _INSERT_ORDER.compile().params
    ),
).columns(*Order.__table__.columns)


_INSERT_ORDER_ALONE = SingleStatement(_INSERT_ORDER_TYPED)


async def accept_order(
    session: AsyncSession, new: NewOrder, bounds: OrderBounds = NO_BOUNDS
) -> AcceptedOrder:
    """Writes an order before it is sent anywhere; a repeated client order id returns the first
    order.

    Raises `UnknownAccount` if the user has no such account; `LoginRejected` if the broker has
    rejected its credentials; `UserDisabled`; `TradingHalted` or `ReducingOnly` by the switches (the
    worker checks again, right before the broker); `SymbolBlocked` while an order of unknown outcome
    blocks it; `AccountBlocked` while the account differs from the broker's books; `DuplicateOrder`.
    A repeat is never blocked.
    """
    row = (await session.execute(_INSERT_ORDER_TYPED, _values_of(new, bounds))).one_or_none()
    if row is None:
        return await _repeat_or_refusal(session, new, bounds.duplicate_window_s)
    return AcceptedOrder(Order(**row._asdict()), new.lifetime_s, new=True, same_request=True)


async def accept_order_alone(
    database: Database, new: NewOrder, bounds: OrderBounds = NO_BOUNDS
) -> AcceptedOrder:
    """Accepts an order as `accept_order` does, in one statement without a session.

    If the answer was lost, it asks once more: the client order id lets the statement write one
    order only. Also raises `DatabaseUnavailable` (nothing was written) and `OutcomeUnconfirmed` (it
    may have been).
    """
    values = _values_of(new, bounds)
    began = time.monotonic()
    try:
        return await _accept_alone(database, new, bounds, values)
    except OutcomeUnconfirmed:
        if time.monotonic() - began > REPEAT_WITHIN_S:
            raise
    try:
        accepted = await _accept_alone(database, new, bounds, values)
    except BerthError as error:
        # A refusal does not settle the first attempt, which may still be running.
        raise OutcomeUnconfirmed(error.detail) from error
    return replace(accepted, new=True) if accepted.order.id == values["id"] else accepted


async def _accept_alone(
    database: Database, new: NewOrder, bounds: OrderBounds, values: dict[str, Any]
) -> AcceptedOrder:
    row = await database.row(_INSERT_ORDER_ALONE, values)
    if row is not None:
        return AcceptedOrder(row, new.lifetime_s, new=True, same_request=True)
    async with database.session(autocommit=True) as session:
        return await _repeat_or_refusal(session, new, bounds.duplicate_window_s)


async def find_duplicate(
    session: AsyncSession, new: NewOrder, window_s: float
) -> DuplicateOrder | None:
    """Returns what `accept_order` would refuse an order with as a duplicate now; None: it is none.
    Writes nothing."""
    ended_unfilled = (
        select(Order.id)
        .where(
            Order.user_id == new.user_id,
            Order.client_order_id == OrderDuplicate.client_order_id,
            Order.state.in_(("rejected", "expired", "cancelled")),
            Order.filled_quantity == 0,
        )
        .exists()
    )
    duplicate = select(OrderDuplicate.client_order_id).where(
        OrderDuplicate.user_id == new.user_id,
        OrderDuplicate.fingerprint == new.fingerprint,
        OrderDuplicate.client_order_id != new.client_order_id,
        OrderDuplicate.at >= seconds_from_now(-window_s),
        ~ended_unfilled,
    )
    other = await session.scalar(duplicate)
    return None if other is None else _duplicate_of(other, window_s)


def _duplicate_of(client_order_id: str, window_s: float) -> DuplicateOrder:
    return DuplicateOrder(
        f"Order {client_order_id} is identical and less than {window_s:g} s old. Set"
        " `allow_duplicate` to place this one too. A signal has no such field: let the strategy"
        " send its position, or set the account's window for duplicates to 0."
    )


async def kept_bounds(session: AsyncSession, order_id: uuid.UUID) -> OrderBounds:
    """Returns the bounds with which an order was accepted, for anyone who sends it later."""
    first = await session.get_one(OrderEventRow, f"{order_id}:accepted")
    band, most_price = (first.data.get(name) for name in ("price_band", "most_price"))
    return OrderBounds(0.0, band and Decimal(band), most_price and Decimal(most_price))


def _values_of(new: NewOrder, bounds: OrderBounds) -> dict[str, Any]:
    values = {name: getattr(new, name) for name in new.__dataclass_fields__}
    price_bounds = msgspec.json.encode(bounds.price_fields).decode()
    return {
        "id": _next_id(),
        "duplicate_window_s": bounds.duplicate_window_s,
        "bounds": price_bounds,
        "same_contract": same_contract_pattern(new.symbol),
        **values,
    }


def _next_id() -> uuid.UUID:
    """Returns a UUID of version 7 (RFC 9562), as `uuid.uuid7` of Python 3.14 and PostgreSQL 18 make
    it.

    It grows with time, so an order, its events and its audit entry come to the ends of their
    indexes. Random ids wrote twice as much WAL, measured with 3 million orders.
    """
    milliseconds = time.time_ns() // 1_000_000
    return uuid.UUID(int=milliseconds << 80 | 7 << 76 | uuid.uuid4().int % (1 << 76))


async def _repeat_or_refusal(
    session: AsyncSession, new: NewOrder, duplicate_window_s: float
) -> AcceptedOrder:
    same_order = (
        OrderDuplicate.user_id == new.user_id,
        OrderDuplicate.fingerprint == new.fingerprint,
    )
    seconds_left = func.extract("epoch", Order.deadline_at - func.clock_timestamp())
    rows = await session.execute(
        select(Order, seconds_left).where(
            Order.user_id == new.user_id, Order.client_order_id == new.client_order_id
        )
    )
    if (row := rows.one_or_none()) is None:
        refusal = await find_refusal(session, new, new.unknown_blocks)
        duplicate = select(OrderDuplicate.client_order_id).where(*same_order)
        if (
            duplicate_window_s > 0
            and refusal is None
            and (other := await session.scalar(duplicate)) is not None
        ):
            raise _duplicate_of(other, duplicate_window_s)
        # None: what blocked the order was settled since.
        raise refusal or SymbolBlocked(
            "What blocked this order is settled now. Place the order again."
        )
    first: Order = row[0]
    same_request = first.fingerprint == new.fingerprint
    if not same_request:  # this order is refused, and has no later duplicates
        own = OrderDuplicate.client_order_id == new.client_order_id
        await session.execute(delete(OrderDuplicate).where(own, *same_order))
    return AcceptedOrder(first, float(row[1]), new=False, same_request=same_request)


#: Lot, condition and type of an order that a worker of release 0.1.0 understands.
_USUAL_TERMS = (OrderLot.COMMON, OrderCondition.CASH, OpenClose.AUTO)


def place_request(
    order: StoredOrder,
    reply_to: str,
    unknown_blocks: str = "symbol",
    lifetime_s: float | None = None,
    trace: str = "",
) -> PlaceOrder:
    """Makes the request of an order's row. `reply_to` is the channel of the waiting process, or ''.

    `lifetime_s`: seconds from acceptance to the deadline; None takes them from the row.
    """
    if lifetime_s is None:
        lifetime_s = (order.deadline_at - order.created_at).total_seconds()
    order_id = str(order.id)
    has_usual_terms = (order.lot, order.condition, order.open_close) == _USUAL_TERMS
    return PlaceOrder(
        v=1 if has_usual_terms else 2,
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
        lot=OrderLot(order.lot),
        condition=OrderCondition(order.condition),
        open_close=OpenClose(order.open_close),
        tag=order.tag,
        reply_to=reply_to,
        trace=trace,
        generation=order.generation,
        reduce_only=order.reduce_only,
        unknown_blocks=unknown_blocks,
        lifetime_ms=max(1, round(lifetime_s * 1000)),
    )
