"""Orders: accepted once, then only ever moved forward."""

from __future__ import annotations

import uuid
from collections.abc import Sequence
from dataclasses import dataclass
from datetime import UTC, date, datetime
from decimal import Decimal
from typing import Any

import msgspec
from sqlalchemy import ARRAY, Integer, String, Uuid, bindparam, case, false, func, or_, select, text, update
from sqlalchemy.ext.asyncio import AsyncSession

from infra.database.engine import Database, SingleStatement
from infra.database.models import Order, OrderEventRow
from infra.database.orders import changes as order_requests
from infra.database.orders import changes as withdrawals
from infra.database.orders import checks as blocking
from infra.database.orders.states import FINAL_RANK, RANK, rank
from worker_runtime.protocol.errors import BerthError
from worker_runtime.protocol.messages import OrderEvent, OrderOutcome


class OrderNotFound(BerthError):
    """There is no such order."""

    code = "ORDER_NOT_FOUND"


@dataclass(frozen=True, kw_only=True)
class NewOrder:
    """An order as a client asked for it. `trading_day` is the date in Taipei, not UTC's."""

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
    #: It can only make a position smaller.
    reduce_only: bool = False
    #: What was asked of us, when that was more than this order.
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


#: Six digits to the base 36. (`string_agg` over `generate_series` took 36 us.)
_TAG = " || ".join(
    f"substr('0123456789ABCDEFGHIJKLMNOPQRSTUVWXYZ', cast(number.tag / {36**place} % 36 as int) + 1, 1)"
    for place in reversed(range(6))
)
#: One statement, one round trip: what blocks it, the tag counter, the order, its first event and the audit
#: entry. A client order id that was used before makes no row and burns a tag number, which does no harm.
#: The tag is the day in two characters and the order's number on it in four (1.6 million): none comes again
#: within 1,296 days. A broker may list orders of several days at once (TAIFEX's evening ends at 05:00, and
#: Friday's belongs to Monday), so however days are counted, none is a safe time to begin anew.
_ACCEPT = text(f"""
with unsettled as ({blocking.UNSETTLED_ORDERS}), blocked as (
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
select placed.* from placed
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
    """Writes an order before it goes anywhere (O1); a repeated client order id returns the first one.

    Raises `UnknownAccount` if the user has no such account, `TradingHalted` and `ReducingOnly` by the
    switches (the worker looks again, right before the broker), `SymbolBlocked` while an order of unknown
    outcome stands in the way (O3), `AccountBlocked` while the books differ from the broker's. A repeat is
    never blocked.
    """
    row = (await session.execute(_ACCEPT_TYPED, _values(new))).one_or_none()
    if row is None:
        return await _repeat_or_refusal(session, new)
    return AcceptedOrder(Order(**row._asdict()), new=True, same_request=True)


async def accept_order_alone(database: Database, new: NewOrder) -> AcceptedOrder:
    """`accept_order` in a transaction of its own, without a session. Raises `DatabaseUnavailable`, too."""
    row = await database.row(_ACCEPT_ALONE, _values(new))
    if row is not None:
        return AcceptedOrder(Order(**row), new=True, same_request=True)
    async with database.session(autocommit=True) as session:
        return await _repeat_or_refusal(session, new)


def _values(new: NewOrder) -> dict[str, Any]:
    return {"id": uuid.uuid4(), **{name: getattr(new, name) for name in new.__dataclass_fields__}}


async def _repeat_or_refusal(session: AsyncSession, new: NewOrder) -> AcceptedOrder:
    first = await session.scalar(
        select(Order).where(Order.user_id == new.user_id, Order.client_order_id == new.client_order_id)
    )
    if first is None:
        raise await blocking.find_refusal(
            session,
            user_id=new.user_id,
            account_id=new.account_id,
            symbol=new.symbol,
            reduce_only=new.reduce_only,
            unknown_blocks=new.unknown_blocks,
        )
    return AcceptedOrder(first, new=False, same_request=first.fingerprint == new.fingerprint)


async def get_order(session: AsyncSession, order_id: uuid.UUID) -> Order:
    """Raises `OrderNotFound`."""
    order = await session.scalar(select(Order).where(Order.id == order_id))
    if order is None:
        raise OrderNotFound(f"there is no order {order_id}")
    return order


async def events_of_order(session: AsyncSession, order_id: uuid.UUID) -> list[OrderEventRow]:
    """All events of an order, in the order in which they happened."""
    rows = await session.scalars(
        select(OrderEventRow)
        .where(OrderEventRow.order_id == order_id)
        .order_by(OrderEventRow.at, OrderEventRow.recorded_at)
    )
    # Workers tell whole milliseconds, and a batch is recorded at once: among equals the state decides.
    return sorted(rows, key=lambda row: (row.at, rank(row.state)))


def _moves_to(state: str) -> Any:
    """True in SQL when this state is further along than the order's own."""
    wanted = rank(state)
    behind = [known.value for known, place in RANK.items() if place < wanted]
    return Order.state.in_(behind)


async def _advance_order(
    session: AsyncSession,
    order_id: uuid.UUID,
    *,
    state: str,
    broker_order_id: str | None,
    filled_quantity: int,
    average_price: Decimal | None,
    reason_code: str | None,
    reason: str | None,
) -> None:
    moves = _moves_to(state)
    ends = moves if rank(state) == FINAL_RANK else false()
    # An event may bring the state first, without the code that the answer to the same state carries.
    explains = (Order.state == state) & Order.reason_code.is_(None) & (reason_code is not None)
    fills_more = Order.filled_quantity < filled_quantity
    names = Order.broker_order_id.is_(None) & (broker_order_id is not None)
    await session.execute(
        update(Order)
        .where(Order.id == order_id)
        .where(or_(moves, explains, fills_more, names))
        .values(
            state=case((moves, state), else_=Order.state),
            reason_code=case((or_(moves, explains), reason_code), else_=Order.reason_code),
            reason=case((moves, reason), else_=Order.reason),
            broker_order_id=func.coalesce(Order.broker_order_id, broker_order_id),
            filled_quantity=func.greatest(Order.filled_quantity, filled_quantity),
            average_price=case((fills_more, average_price), else_=Order.average_price),
            # Nobody has to look at an order that is final: neither the sweeper nor a person.
            verify_at=case((ends, None), else_=Order.verify_at),
            attention=case((ends, None), else_=Order.attention),
            attention_at=case((ends, None), else_=Order.attention_at),
            updated_at=func.clock_timestamp(),
        )
        .execution_options(synchronize_session=False)
    )


@dataclass(frozen=True)
class RecordedEvents:
    """What became of a batch of events."""

    #: Ids of the events that were not known before.
    fresh: frozenset[str]
    #: Ids of the orders that nobody knows; their events are not stored.
    unknown: frozenset[str]


#: A whole batch in one statement: the recorder's cost an order fell from 5.7 to under 1 ms of CPU. Of the
#: fresh events of an order the one that is furthest along gives its state, the one with most filled its fill.
#: The ids come as an array, too: of the rows of a JSON document the planner expects so many that it reads
#: all orders. A batch of 20 took 5 ms with 300 orders and 24 to 46 ms with 43,000; so 3 and 12 to 17 ms.
#: Whatever depends on the order's row is computed from that row alone: after a wait for its lock PostgreSQL
#: looks again at the row, but not at what was joined to it, and would leave the order out.
_RECORD = text("""
with given as (
  select e.*, row_number() over () as place
    from jsonb_to_recordset(cast(:events as jsonb)) as e(
         event_id text, order_id uuid, state text, rank int, at timestamptz, broker_order_id text,
         filled_quantity int, average_price numeric, reason text, data jsonb)
), ours as materialized (
  select id from orders where id = any(cast(:ids as uuid[]))
), known as (
  select distinct on (given.event_id) given.*
    from given join ours on ours.id = given.order_id
   order by given.event_id, given.place
), noted as (
  insert into order_events (event_id, order_id, state, at, data)
  select event_id, order_id, state, at, data from known order by place
  on conflict (event_id) do nothing
  returning event_id
), fresh as (
  select known.* from known join noted using (event_id)
), furthest as (
  select distinct on (order_id) order_id, state, rank, reason from fresh order by order_id, rank desc, place
), fullest as (
  select distinct on (order_id) order_id, filled_quantity, average_price
    from fresh order by order_id, filled_quantity desc, place
), named as (
  select order_id, min(broker_order_id) as broker_order_id from fresh group by order_id
), moved as (
  update orders
     set state = case when furthest.rank > cast(cast(:ranks as jsonb) ->> orders.state as int)
                      then furthest.state else orders.state end,
         reason_code = case when furthest.rank > cast(cast(:ranks as jsonb) ->> orders.state as int)
                      then null else orders.reason_code end,
         reason = case when furthest.rank > cast(cast(:ranks as jsonb) ->> orders.state as int)
                      then furthest.reason else orders.reason end,
         broker_order_id = coalesce(orders.broker_order_id, named.broker_order_id),
         filled_quantity = greatest(orders.filled_quantity, fullest.filled_quantity),
         average_price = case when fullest.filled_quantity > orders.filled_quantity
                              then fullest.average_price else orders.average_price end,
         verify_at = case when furthest.rank >= :final then null else orders.verify_at end,
         attention = case when furthest.rank >= :final then null else orders.attention end,
         attention_at = case when furthest.rank >= :final then null else orders.attention_at end,
         updated_at = clock_timestamp()
    from furthest join fullest using (order_id) join named using (order_id)
   where orders.id = furthest.order_id and orders.id = any(cast(:ids as uuid[]))
)
select (select array_agg(event_id) from noted) as fresh,
       (select array_agg(distinct cast(order_id as text)) from given
         where order_id not in (select id from ours)) as unknown
""").bindparams(
    bindparam("events", type_=String),
    bindparam("ids", type_=ARRAY(Uuid)),
    bindparam("ranks", type_=String),
    bindparam("final", type_=Integer),
)
_RECORD_ALONE = SingleStatement(_RECORD)
_RANKS = msgspec.json.encode({state.value: place for state, place in RANK.items()}).decode()


def _storable(value: Any) -> Any:
    """Without NUL characters, which PostgreSQL refuses in text and in jsonb."""
    if isinstance(value, str):
        return value.replace("\x00", "")
    if isinstance(value, dict):
        return {name: _storable(inner) for name, inner in value.items()}
    return value


def _row_of(event: OrderEvent) -> dict[str, Any]:
    return {
        "event_id": event.event_id,
        "order_id": str(uuid.UUID(event.order_id)),
        "state": event.state.value,
        "rank": rank(event.state),
        "at": datetime.fromtimestamp(event.at_ms / 1000, UTC),
        "broker_order_id": event.broker_order_id,
        "filled_quantity": event.filled_quantity,
        "average_price": event.average_price,
        "reason": event.reason,
        "data": msgspec.to_builtins(event),
    }


async def record_events(session: AsyncSession, events_of_order: Sequence[OrderEvent]) -> RecordedEvents:
    """Stores events and moves their orders forward, all in one statement.

    Repeats change nothing. A late event is stored and changes nothing that is further along; a final state
    never changes. What an event shows of an order's quantity and price is taken over if that was asked for
    (`order_requests.confirm`). Raises `ValueError` for an order id that is none.
    """
    row = (await session.execute(_RECORD, _record_values(events_of_order))).one()
    for event in events_of_order:
        if event.quantity is not None:
            await order_requests.confirm_changes(
                session, uuid.UUID(event.order_id), event.quantity, event.price
            )
    return RecordedEvents(frozenset(row.fresh or ()), frozenset(row.unknown or ()))


async def record_events_alone(database: Database, events_of_order: Sequence[OrderEvent]) -> RecordedEvents:
    """`record_events` in a transaction of its own, without a session, of events that show no quantity: as
    nearly always. Raises `DatabaseUnavailable`, too."""
    row = await database.row(_RECORD_ALONE, _record_values(events_of_order))
    assert row is not None  # noqa: S101 - a select without a from has a row
    return RecordedEvents(frozenset(row["fresh"] or ()), frozenset(row["unknown"] or ()))


def _record_values(events_of_order: Sequence[OrderEvent]) -> dict[str, Any]:
    return {
        "events": msgspec.json.encode([_storable(_row_of(event)) for event in events_of_order]).decode(),
        "ids": list({uuid.UUID(event.order_id) for event in events_of_order}),
        "ranks": _RANKS,
        "final": FINAL_RANK,
    }


async def record_event(session: AsyncSession, event: OrderEvent) -> bool:
    """As `record_events` for one; False for a repeat. Raises `OrderNotFound` for an order we do not know."""
    recorded = await record_events(session, [event])
    if recorded.unknown:
        raise OrderNotFound(f"event {event.event_id}: there is no order {event.order_id}")
    return bool(recorded.fresh)


async def apply_outcome(session: AsyncSession, outcome: OrderOutcome, reason_code: str | None = None) -> None:
    """Moves the order forward to what the worker answered; safe to repeat, in any order with events."""
    if outcome.withdrawn:
        await withdrawals.apply_withdrawal(session, outcome, reason_code)
        return
    await _advance_order(
        session,
        uuid.UUID(outcome.order_id),
        state=outcome.state.value,
        broker_order_id=outcome.broker_order_id,
        filled_quantity=outcome.filled_quantity,
        average_price=outcome.average_price,
        reason_code=reason_code,
        reason=outcome.reason,
    )
