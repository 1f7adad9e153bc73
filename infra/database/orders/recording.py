"""Recording what happens to orders: events are stored once, and an order only ever moves forward.

The rules are those of `states.py` and `merging.py`, in SQL: `_FORWARD`, and the condition of
`_ADVANCE`.
"""

import time
import uuid
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from datetime import UTC, datetime, timedelta
from typing import Any, NamedTuple, Self

import msgspec
from sqlalchemy import ARRAY, Integer, String, Uuid, any_, bindparam, func, literal, select, text
from sqlalchemy.ext.asyncio import AsyncSession

from infra.database.engine import Database, SingleStatement
from infra.database.models import Order, OrderEventRow
from infra.database.orders.changes import confirm_changes
from infra.database.orders.merging import OrderStanding, taken_before
from infra.database.orders.states import FINAL_RANK, IN_QUEUE, RANK, OrderNotFound, rank
from worker_runtime.protocol.messages import OrderEvent, OrderOutcome, OrderState

_RANKS = msgspec.json.encode({state.value: place for state, place in RANK.items()}).decode()
_ALL_STATES = tuple(OrderState)
#: How long after the end of its worker a fill may reach Valkey. What a worker's keys sign later
#: than that is for a person to look at.
MAX_EVENT_DELAY = timedelta(days=1)
#: Events of an order that are read, the last ones. No order has as many fills, but its worker may
#: say so.
MAX_EVENTS_READ = 1000

_OWN_RANK = "cast(cast(:ranks as jsonb) ->> orders.state as int)"
#: The assignments of an UPDATE of `orders` joined with `step`, which has one row for each order.
#: Of the database they read the order's row only. PostgreSQL reads that row again after a wait for
#: its lock, but would not read other rows again. The reason code may come after the state: an event
#: has none, and the answer with the same state has one.
_FORWARD = f"""
         state = case when step.rank > {_OWN_RANK} then step.state else orders.state end,
         reason_code = case when step.rank > {_OWN_RANK}
                                 or step.state = orders.state and orders.reason_code is null
                            then step.reason_code else orders.reason_code end,
         reason = case when step.rank > {_OWN_RANK} then step.reason else orders.reason end,
         broker_order_id = coalesce(orders.broker_order_id, step.broker_order_id),
         filled_quantity = greatest(orders.filled_quantity, step.filled_quantity),
         average_price = case when step.filled_quantity > orders.filled_quantity
                              then step.average_price else orders.average_price end,
         verify_at = case when step.rank >= :final then null else orders.verify_at end,
         attention = case when step.rank >= :final then null else orders.attention end,
         attention_at = case when step.rank >= :final then null else orders.attention_at end,
         updated_at = clock_timestamp()
"""
_ADVANCE = text(f"""
update orders set {_FORWARD}
  from (select cast(:state as text) as state, cast(:rank as int) as rank,
               cast(:reason_code as text) as reason_code, cast(:reason as text) as reason,
               cast(:broker_order_id as text) as broker_order_id,
               cast(:filled_quantity as int) as filled_quantity,
               cast(:average_price as numeric) as average_price) as step
 where orders.id = :order_id and orders.state = any(:among)
   and (step.rank > {_OWN_RANK}
        or step.state = orders.state and orders.reason_code is null and step.reason_code is not null
        or step.filled_quantity > orders.filled_quantity
        or orders.broker_order_id is null and step.broker_order_id is not null)
""").bindparams(  # noqa: S608 - constants of ours
    bindparam("among", type_=ARRAY(String)),
    bindparam("order_id", type_=Uuid),
    bindparam("ranks", type_=String),
    bindparam("final", type_=Integer),
)
# The steps of the statement that records a batch of events (`_RECORD`). Each may read the rows of
# the steps before it.

#: The events of the batch. `place` is an event's index in it.
_GIVEN = """
  select e.*
    from jsonb_to_recordset(cast(:events as jsonb)) as e(
         place int, received timestamptz, event_id text, order_id uuid, user_id text, epoch bigint,
         state text, rank int, at timestamptz, broker_order_id text, filled_quantity int,
         average_price numeric, reason text, data jsonb)
"""
#: The orders of the batch that exist. Their ids also come as an array: the planner overestimates
#: the rows of a JSON document and would read all orders. A batch of 20 took 24 to 46 ms with 43,000
#: orders, and takes 12 to 17 ms this way.
_OURS = "select id, user_id from orders where id = any(cast(:ids as uuid[]))"
#: The events whose order belongs to the event's user. `expired`: the event was received more than
#: `MAX_EVENT_DELAY` after the end of its assignment, or the assignment is purged (the oldest are
#: purged first). Events that the servers make have epoch 0 and do not expire.
_OF_OURS = f"""
  select given.*, exists (
           select from worker_sessions as ended
            where ended.user_id = given.user_id and ended.epoch = given.epoch
              and ended.ended_at
                  < given.received - interval '{MAX_EVENT_DELAY.total_seconds():.0f} seconds')
         or given.epoch > 0
           and given.epoch < coalesce((select min(kept.epoch) from worker_sessions as kept
                                        where kept.user_id = given.user_id), 0) as expired
    from given join ours on ours.id = given.order_id and ours.user_id = given.user_id
"""  # noqa: S608 - constants of ours
#: One row for each event that counts, even if the batch has it twice.
_KNOWN = "select distinct on (event_id) * from of_ours where not expired order by event_id, place"
#: Stores them. Has no row for an event that was stored before.
_NOTED = """
  insert into order_events (event_id, order_id, state, at, data)
  select event_id, order_id, state, at, data from known order by place
  on conflict (event_id) do nothing
  returning event_id
"""
#: The events that are new.
_FRESH = "select known.* from known join noted using (event_id)"
#: For each order, the state that is furthest among its new events.
_FURTHEST = """
  select distinct on (order_id) order_id, state, rank, reason
    from fresh order by order_id, rank desc, place
"""
#: For each order, the largest fill among its new events.
_FULLEST = """
  select distinct on (order_id) order_id, filled_quantity, average_price
    from fresh order by order_id, filled_quantity desc, place
"""
#: For each order, the broker's id, if one of its new events has it.
_NAMED = "select order_id, min(broker_order_id) as broker_order_id from fresh group by order_id"
#: Moves each order forward.
_MOVED = f"""
  update orders set {_FORWARD}
    from (select *, cast(null as text) as reason_code
            from furthest join fullest using (order_id) join named using (order_id)) as step
   where orders.id = step.order_id and orders.id = any(cast(:ids as uuid[]))
"""  # noqa: S608 - a constant of ours
#: Records a whole batch in one statement: the recorder's CPU per order fell from 5.7 to under 1 ms.
#: Returns the fields of `RecordedEvents`. An expired event that was stored in time is not `late`
#: when it comes again.
_RECORD = text(f"""
with given as ({_GIVEN}),
     ours as materialized ({_OURS}),
     of_ours as ({_OF_OURS}),
     known as ({_KNOWN}),
     noted as ({_NOTED}),
     fresh as ({_FRESH}),
     furthest as ({_FURTHEST}),
     fullest as ({_FULLEST}),
     named as ({_NAMED}),
     moved as ({_MOVED})
select (select array_agg(event_id) from noted) as fresh,
       (select array_agg(distinct cast(order_id as text)) from given
         where (order_id, user_id) not in (select id, user_id from ours)) as unknown,
       (select array_agg(place) from of_ours where not expired) as accepted,
       (select array_agg(place) from of_ours
         where expired and not exists (
               select from order_events as earlier
                where earlier.event_id = of_ours.event_id)) as late
""").bindparams(  # noqa: S608 - constants of ours
    bindparam("events", type_=String),
    bindparam("ids", type_=ARRAY(Uuid)),
    bindparam("ranks", type_=String),
    bindparam("final", type_=Integer),
)
_RECORD_ALONE = SingleStatement(_RECORD)


#: What `orders_behind` reads: not whole rows, which a later read in the same session would reuse.
_STANDING_COLUMNS = (
    Order.id,
    Order.state,
    Order.reason_code,
    Order.reason,
    Order.broker_order_id,
    Order.filled_quantity,
    Order.average_price,
    Order.attention,
)


@dataclass(frozen=True)
class RecordedEvents:
    """Says what became of a batch of events."""

    #: Ids of the events that were new.
    fresh: frozenset[str]
    #: Ids of orders that do not exist, or are of another user than the event; their events are not
    #: stored.
    unknown: frozenset[str]
    #: Places in the batch of events that count, new or not.
    accepted: frozenset[int]
    #: Places of events from assignments that had ended `MAX_EVENT_DELAY` before; not stored.
    late: frozenset[int]

    @classmethod
    def of(cls, row: Mapping[str, Any]) -> Self:
        return cls(
            *(frozenset(row[name] or ()) for name in ("fresh", "unknown", "accepted", "late"))
        )


async def get_order(session: AsyncSession, order_id: uuid.UUID) -> Order:
    """Raises `OrderNotFound`."""
    order = await session.scalar(select(Order).where(Order.id == order_id))
    if order is None:
        raise OrderNotFound(f"there is no order {order_id}")
    return order


async def lock_order(session: AsyncSession, order_id: uuid.UUID) -> Order | None:
    """Returns the order, which nobody else changes until the transaction ends; None if there is
    none."""
    order: Order | None = await session.scalar(
        select(Order).where(Order.id == order_id).with_for_update()
    )
    return order


class SubmissionTrace(NamedTuple):
    """Holds what an order's events say of its submission."""

    #: When its last event happened; None: it has none.
    last_event_at: datetime | None
    #: Epoch of the last worker that was about to submit it; None: no event says so.
    submitter_epoch: int | None


async def submission_trace(session: AsyncSession, order_id: uuid.UUID) -> SubmissionTrace:
    """Returns when anything was last recorded of an order, and who was about to submit it."""
    submitting = OrderEventRow.state == OrderState.SUBMITTING
    submitter = func.max(OrderEventRow.data["epoch"].as_integer()).filter(submitting)
    events = select(func.max(OrderEventRow.at), submitter).where(OrderEventRow.order_id == order_id)
    return SubmissionTrace(*(await session.execute(events)).one())


async def orders_behind(
    session: AsyncSession, outcomes: Mapping[uuid.UUID, tuple[OrderOutcome, str | None]]
) -> list[uuid.UUID]:
    """Returns the orders that `apply_outcome` would change. `outcomes`: outcome and code by order
    id."""
    # An array keeps the statement the same for any number of orders.
    ids = literal(list(outcomes), ARRAY(Uuid))
    rows = await session.execute(select(*_STANDING_COLUMNS).where(Order.id == any_(ids)))
    standings = {row.id: OrderStanding.of(row) for row in rows}
    return [
        order_id
        for order_id, standing in standings.items()
        if standing.after(*outcomes[order_id]) is not standing
    ]


async def events_of_order(session: AsyncSession, order_id: uuid.UUID) -> list[OrderEventRow]:
    """Returns the last `MAX_EVENTS_READ` of an order in the order in which they happened."""
    rows = await session.scalars(
        select(OrderEventRow)
        .where(OrderEventRow.order_id == order_id)
        .order_by(OrderEventRow.recorded_at.desc())
        .limit(MAX_EVENTS_READ)
    )
    # Workers report whole milliseconds, and a batch is recorded at once: among equals the state
    # decides.
    return sorted(rows, key=lambda row: (row.at, rank(row.state), row.recorded_at))


async def record_events(
    session: AsyncSession, events: Sequence[OrderEvent], received_ms: Sequence[int] = ()
) -> RecordedEvents:
    """Stores events and moves their orders forward.

    A repeat changes nothing. An event that comes after later ones is stored, but never moves an
    order back; a final state never changes. An event that shows a quantity or price confirms the
    change that asked for it. `received_ms`: when each event reached Valkey; by default now. Raises
    `ValueError` for an order id that is no UUID.
    """
    row = (await session.execute(_RECORD, _batch_values(events, received_ms))).one()
    recorded = RecordedEvents.of(dict(row._mapping))
    for place, event in enumerate(events):
        if event.quantity is not None and place in recorded.accepted:
            await confirm_changes(session, uuid.UUID(event.order_id), event.quantity, event.price)
    return recorded


async def record_events_alone(
    database: Database, events: Sequence[OrderEvent], received_ms: Sequence[int] = ()
) -> RecordedEvents:
    """Records events as `record_events` does, without a session; none may have a quantity. Raises
    `DatabaseUnavailable`."""
    row = await database.row(_RECORD_ALONE, _batch_values(events, received_ms))
    assert row is not None  # noqa: S101 - a select without a from has a row
    return RecordedEvents.of(dict(row))


async def traces_of(database: Database, order_ids: Iterable[str]) -> dict[str, str]:
    """Returns the contexts of the traces of these orders, by order id; leaves out orders without a
    trace."""
    first = [f"{order_id}:accepted" for order_id in order_ids]
    trace = OrderEventRow.data["trace"].astext
    async with database.session(autocommit=True) as session:
        rows = await session.execute(
            select(OrderEventRow.order_id, trace).where(
                OrderEventRow.event_id == any_(literal(first, ARRAY(String))), trace.is_not(None)
            )
        )
        return {str(order_id): context for order_id, context in rows}


def event_of_ours(
    order_id: Any, user_id: str, name: str, state: OrderState, reason: str
) -> OrderEvent:
    """Returns an event of this moment that no worker reports."""
    return OrderEvent(
        event_id=f"{order_id}:{name}",
        order_id=str(order_id),
        user_id=user_id,
        epoch=0,
        state=state,
        at_ms=time.time_ns() // 1_000_000,
        reason=reason,
    )


async def record_event(session: AsyncSession, event: OrderEvent) -> bool:
    """Records one event; False for a repeat. Raises `OrderNotFound`."""
    recorded = await record_events(session, [event])
    if recorded.unknown:
        raise OrderNotFound(f"event {event.event_id}: there is no order {event.order_id}")
    return bool(recorded.fresh)


async def apply_outcome(
    session: AsyncSession, outcome: OrderOutcome, reason_code: str | None = None
) -> None:
    """Moves an order forward to a worker's answer; safe to repeat, in any order with events.

    A withdrawal settles only an order that is still in its queue. An order that was being submitted
    becomes unknown (`taken_before`).
    """
    if outcome.withdrawn:
        await _advance(session, outcome, reason_code, among=IN_QUEUE)
        unknown = taken_before(outcome.order_id)
        await _advance(session, unknown, None, among=[OrderState.SUBMITTING])
    else:
        await _advance(session, outcome, reason_code, among=_ALL_STATES)


async def _advance(
    session: AsyncSession,
    outcome: OrderOutcome,
    reason_code: str | None,
    *,
    among: Iterable[OrderState],
) -> None:
    """Moves the order forward if it is in one of the states `among`."""
    values = {
        "order_id": uuid.UUID(outcome.order_id),
        "state": outcome.state.value,
        "rank": rank(outcome.state),
        "reason_code": reason_code,
        "reason": outcome.reason,
        "broker_order_id": outcome.broker_order_id,
        "filled_quantity": outcome.filled_quantity,
        "average_price": outcome.average_price,
        "among": [state.value for state in among],
        "ranks": _RANKS,
        "final": FINAL_RANK,
    }
    await session.execute(_ADVANCE, values)


def _batch_values(events: Sequence[OrderEvent], received_ms: Sequence[int]) -> dict[str, Any]:
    received = received_ms or [time.time_ns() // 1_000_000] * len(events)
    rows = [
        _without_nul(_row_of(event))
        | {"place": place, "received": datetime.fromtimestamp(at / 1000, UTC)}
        for place, (event, at) in enumerate(zip(events, received, strict=True))
    ]
    return {
        "events": msgspec.json.encode(rows).decode(),
        "ids": list({uuid.UUID(event.order_id) for event in events}),
        "ranks": _RANKS,
        "final": FINAL_RANK,
    }


def _row_of(event: OrderEvent) -> dict[str, Any]:
    return {
        "event_id": event.event_id,
        "order_id": str(uuid.UUID(event.order_id)),
        "user_id": event.user_id,
        "epoch": event.epoch,
        "state": event.state.value,
        "rank": rank(event.state),
        "at": datetime.fromtimestamp(event.at_ms / 1000, UTC),
        "broker_order_id": event.broker_order_id,
        "filled_quantity": event.filled_quantity,
        "average_price": event.average_price,
        "reason": event.reason,
        "data": msgspec.to_builtins(event),
    }


def _without_nul(value: Any) -> Any:
    """Removes NUL characters, which PostgreSQL refuses in text and in jsonb."""
    if isinstance(value, str):
        return value.replace("\x00", "")
    if isinstance(value, dict):
        return {name: _without_nul(inner) for name, inner in value.items()}
    return value
