"""Which orders the sweeper has to look at, and when again. `verify_at` is the whole of its memory."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from datetime import datetime

from sqlalchemy import Boolean, Float, bindparam, column, func, select, text, update
from sqlalchemy.ext.asyncio import AsyncSession

from infra.database.models import Order
from infra.database.orders.states import OPEN_STATES

#: Leases the orders that are due, oldest first: who dies with them in hand leaves them to the others after
#: the lease. SKIP LOCKED: several may take at the same time, and nobody waits.
_TAKE = text("""
with due as (
  select id from orders where verify_at <= now()  -- not the clock: that would read the whole index
   order by verify_at limit :most for update skip locked
)
update orders set verify_at = clock_timestamp() + make_interval(secs => :lease)
  from due where orders.id = due.id
returning orders.*, clock_timestamp() > orders.deadline_at + make_interval(secs => :grace) as overdue,
          extract(epoch from orders.deadline_at - clock_timestamp()) as remaining
""").bindparams(bindparam("lease", type_=Float), bindparam("grace", type_=Float))
_OVERDUE = column("overdue", Boolean())
_REMAINING = column("remaining", Float())
_TAKEN = _TAKE.columns(*Order.__table__.columns, _OVERDUE, _REMAINING)


@dataclass(frozen=True, slots=True)
class DueOrder:
    """One order in the sweeper's hand."""

    order: Order
    #: Until when the lease runs: `postpone` changes nothing after somebody else has.
    lease: datetime
    #: Its deadline has passed, by PostgreSQL's clock, and `grace` seconds since.
    overdue: bool
    #: Seconds until its deadline.
    remaining: float


async def take_due_orders(session: AsyncSession, *, most: int, lease: float, grace: float) -> list[DueOrder]:
    """Up to `most` orders whose `verify_at` has passed, for `lease` seconds."""
    rows = await session.execute(
        select(Order, _OVERDUE, _REMAINING).from_statement(_TAKEN),
        {"most": most, "lease": lease, "grace": grace},
    )
    return [
        DueOrder(order, order.verify_at, bool(overdue), float(remaining))
        for order, overdue, remaining in rows
        if order.verify_at is not None
    ]


async def postpone(session: AsyncSession, due: DueOrder, seconds: float) -> None:
    """Has the order looked at in so many seconds, unless it is final, or somebody wants it sooner."""
    await session.execute(
        update(Order)
        .where(Order.id == due.order.id, Order.verify_at == due.lease)
        .values(verify_at=func.clock_timestamp() + func.make_interval(0, 0, 0, 0, 0, 0, seconds))
        .execution_options(synchronize_session=False)
    )


async def count_abandoned(session: AsyncSession) -> int:
    """Orders that are open and looked at by nobody: neither the sweeper nor a person. Always 0."""
    lost = select(func.count()).where(
        Order.state.in_(OPEN_STATES), Order.verify_at.is_(None), Order.attention.is_(None)
    )
    return await session.scalar(lost) or 0


def count_by_state(found: Sequence[DueOrder]) -> dict[str, int]:
    """How many orders of each state, for the log."""
    counts: dict[str, int] = {}
    for due in found:
        counts[due.order.state] = counts.get(due.order.state, 0) + 1
    return counts
