"""The list of orders that a person has to look at.

`attention` is next to an order's state and says why. It stays until the order is final: by a
late event of the broker, a recheck, or the person.
"""

import uuid
from collections.abc import Sequence
from dataclasses import dataclass
from datetime import UTC, datetime
from decimal import Decimal

import msgspec
from sqlalchemy import func, or_, select, tuple_, update
from sqlalchemy.ext.asyncio import AsyncSession

from infra.database import audit
from infra.database.models import Order, OrderEventRow
from infra.database.orders.checks import database_clock
from infra.database.orders.recording import get_order
from infra.database.orders.states import IN_QUEUE, OPEN_STATES, rank
from infra.database.orders.watch import VERIFY_AT_WHEN_ASKED
from worker_runtime.protocol.errors import BerthError, OutcomeUnknown
from worker_runtime.protocol.messages import FINAL_ORDER_STATES, OrderState

#: Characters of a reason that are kept.
MAX_REASON_LENGTH = 2_000


class OrderSettled(BerthError, code="ORDER_SETTLED", status=409):
    """The order is already final."""


class ResolutionInvalid(BerthError, code="RESOLUTION_INVALID", status=422):
    """The order cannot have ended in this way; the detail says why."""


@dataclass(frozen=True, kw_only=True)
class Resolution:
    """How an order ended, as a person found out at the broker."""

    state: OrderState
    #: Lots.
    filled_quantity: int
    average_price: Decimal | None
    reason: str


async def demand_attention(session: AsyncSession, order_id: uuid.UUID, reason: str) -> bool:
    """Puts an order on the list; False if it is final. A repeat with the same reason changes
    nothing."""
    reason = reason[:MAX_REASON_LENGTH]
    raised = await session.scalar(
        update(Order)
        .where(Order.id == order_id, Order.state.in_(OPEN_STATES))
        .where(Order.attention.is_distinct_from(reason))
        .values(
            attention=reason,
            attention_at=func.coalesce(Order.attention_at, func.clock_timestamp()),
            verify_at=None,
            updated_at=func.clock_timestamp(),
        )
        .returning(Order.attention_at)
        .execution_options(synchronize_session=False)
    )
    if raised is None:
        open_one = select(Order.id).where(Order.id == order_id, Order.state.in_(OPEN_STATES))
        return await session.scalar(open_one) is not None
    _note_step(session, order_id, OrderState.NEEDS_ATTENTION, reason)
    return True


async def take_over(session: AsyncSession, order_id: uuid.UUID, tag: str, reason: str) -> None:
    """Makes an order stand for an earlier one of its client order id, which a restored database has
    lost.

    It gets that order's tag, by which the broker knows it, is unknown until the broker was asked,
    and is never sent itself. If another order has the tag, a person has to look. Safe to repeat.
    """
    order = await session.get_one(Order, order_id, with_for_update=True, populate_existing=True)
    if order.tag == tag or order.state not in IN_QUEUE:
        return
    same = {name: getattr(order, name) for name in ("user_id", "account_id", "trading_day")}
    taken = await session.scalar(select(Order.id).filter_by(**same, tag=tag))
    order.state, order.updated_at = OrderState.UNKNOWN.value, datetime.now(UTC)
    order.reason_code, order.reason = OutcomeUnknown.code, reason
    _note_step(session, order_id, OrderState.UNKNOWN, f"{OutcomeUnknown.code}: {reason}")
    if taken is None:
        order.tag = tag
    else:
        await demand_attention(
            session, order_id, f"{reason}; its tag {tag} belongs to order {taken} now"
        )
    await session.flush()


async def orders_for_a_person(
    session: AsyncSession,
    *,
    after: tuple[datetime, uuid.UUID] | None = None,
    limit: int = 100,
    unknown: bool = False,
) -> Sequence[Order]:
    """Returns a page of the list, the longest waiting first; `after` is the end of the page before.

    `unknown`: with the orders of unknown outcome about which Berth still asks the broker by itself.
    """
    # The index by state serves this: few orders are open.
    query = select(Order).where(Order.state.in_(OPEN_STATES))
    listed = Order.attention.is_not(None)
    query = query.where(or_(listed, Order.state == OrderState.UNKNOWN.value) if unknown else listed)
    since = func.coalesce(Order.attention_at, Order.created_at)
    if after is not None:
        query = query.where(tuple_(since, Order.id) > after)
    return (await session.scalars(query.order_by(since, Order.id).limit(limit))).all()


def next_step(order: Order) -> str:
    """Says what will happen to an order of this list."""
    if order.attention is not None:
        return (
            "an operator finds out at the broker and resolves it; Berth asks on until its "
            "trading day ends"
        )
    return (
        "Berth asks the broker by itself, in growing pauses; what stays unknown comes to an "
        "operator"
    )


async def recheck_order(session: AsyncSession, order_id: uuid.UUID, *, actor: str) -> Order:
    """Has the sweeper check an order at once. Raises `OrderNotFound`, `OrderSettled`."""
    open_one = update(Order).where(Order.id == order_id, Order.state.in_(OPEN_STATES))
    due = open_one.values(verify_at=VERIFY_AT_WHEN_ASKED).returning(Order)
    order: Order | None = await session.scalar(due)
    if order is None:
        await get_order(session, order_id)
        raise OrderSettled
    audit.append_entry(session, actor, "order.recheck", f"order:{order_id}")
    return order


async def resolve_order(
    session: AsyncSession, order_id: uuid.UUID, resolution: Resolution, *, actor: str
) -> Order:
    """Makes an order final as a person found it at the broker.

    Raises `OrderNotFound`, `OrderSettled`, and `ResolutionInvalid` for an end that contradicts the
    order or its known fills, and while a worker may still send it.
    """
    order = await session.scalar(select(Order).where(Order.id == order_id).with_for_update())
    if order is None:
        order = await get_order(session, order_id)
    if order.state in FINAL_ORDER_STATES:
        raise OrderSettled
    if (
        rank(order.state) <= rank(OrderState.SUBMITTING)
        and await database_clock(session) < order.deadline_at
    ):
        raise ResolutionInvalid(
            "The order may still be sent to the broker until its deadline. Cancel it instead."
        )
    _check_resolution(order, resolution)
    before = order.state
    order.state = resolution.state.value
    order.filled_quantity = resolution.filled_quantity
    order.average_price = resolution.average_price
    order.reason_code = None
    order.reason = resolution.reason[:MAX_REASON_LENGTH]
    order.verify_at = order.attention = order.attention_at = None
    order.updated_at = datetime.now(UTC)
    _note_step(session, order_id, resolution.state, f"resolved by {actor}: {resolution.reason}")
    entry = msgspec.to_builtins(resolution) | {"before": before, "reason": order.reason}
    audit.append_entry(session, actor, "order.resolved", f"order:{order_id}", **entry)
    await session.flush()
    return order


def _check_resolution(order: Order, resolution: Resolution) -> None:
    filled = resolution.filled_quantity
    if resolution.state not in FINAL_ORDER_STATES:
        raise ResolutionInvalid(f"{resolution.state.value} is not a state in which an order ends.")
    if filled > order.quantity:
        raise ResolutionInvalid(f"{filled} lots cannot be filled of an order of {order.quantity}.")
    if filled < order.filled_quantity:
        raise ResolutionInvalid(
            f"The broker has reported {order.filled_quantity} filled lots, which is more."
        )
    if (resolution.state == OrderState.FILLED) != (filled == order.quantity):
        needed = (
            f"`filled` needs all its lots: `--filled {order.quantity} --price …` (their "
            "average price)"
        )
        raise ResolutionInvalid(f"{filled} of {order.quantity} lots are filled; {needed}")
    if resolution.state == OrderState.REJECTED and filled:
        raise ResolutionInvalid("a rejected order has no fills")
    if (filled > 0) != (resolution.average_price is not None):
        pass_both = f"--filled {filled or 1} --price …"
        raise ResolutionInvalid(
            f"filled lots and their average price go together: pass `{pass_both}`"
        )


def _note_step(session: AsyncSession, order_id: uuid.UUID, state: OrderState, reason: str) -> None:
    session.add(
        OrderEventRow(
            event_id=f"{order_id}:{state.value}:{uuid.uuid4().hex}",
            order_id=order_id,
            state=state.value,
            at=datetime.now(UTC),
            data={"reason": reason},
        )
    )
