"""The sweeper's schedule: which orders it has to check, and when again. `Order.verify_at` holds all
of it."""

import time
from collections.abc import Collection
from dataclasses import dataclass
from datetime import datetime

from sqlalchemy import bindparam, func, literal_column, select, update
from sqlalchemy.ext.asyncio import AsyncSession

from infra.database.locks import lease_due, seconds_from_now
from infra.database.models import Order
from worker_runtime.protocol.messages import OrderState

#: `verify_at` of an order that a person wants checked: before all others.
VERIFY_AT_WHEN_ASKED = func.to_timestamp(0)
#: States in which no worker has reported anything: the sweeper itself recovers them.
_QUEUEABLE = (OrderState.ACCEPTED.value, OrderState.QUEUED.value)
_TAKE = lease_due(Order.verify_at).returning(
    Order,
    literal_column("due.verify_at") == VERIFY_AT_WHEN_ASKED,
    func.clock_timestamp()
    > Order.deadline_at + func.make_interval(0, 0, 0, 0, 0, 0, bindparam("grace")),
    func.extract("epoch", Order.deadline_at - func.clock_timestamp()),
)


@dataclass(frozen=True, slots=True)
class DueOrder:
    """An order that the sweeper has leased."""

    order: Order
    #: A person wants it checked now.
    asked: bool
    #: The end of the lease. `postpone` changes nothing once somebody else has moved it.
    lease: datetime
    #: Its deadline passed at least `grace` seconds ago, by PostgreSQL's clock.
    overdue: bool
    #: Its deadline on this host's `time.monotonic`, seconds. Never later than by PostgreSQL's
    #: clock, however long PostgreSQL's answer took and the order waits to be handled.
    expires_at: float

    @property
    def seconds_left(self) -> float:
        return self.expires_at - time.monotonic()


async def take_due_orders(
    session: AsyncSession, *, limit: int, lease: float, grace: float
) -> list[DueOrder]:
    """Leases up to `limit` orders whose `verify_at` has passed, for `lease` seconds."""
    asked_at = time.monotonic()
    rows = await session.execute(_TAKE, {"most": limit, "lease": lease, "grace": grace})
    return [
        DueOrder(order, bool(asked), order.verify_at, bool(overdue), asked_at + float(remaining))
        for order, asked, overdue, remaining in rows
        if order.verify_at is not None
    ]


async def followed_orders(session: AsyncSession, seconds: float) -> list[str]:
    """Returns orders that are not final, and that nobody checks within the next `seconds`: their
    workflow follows them."""
    later = seconds_from_now(bindparam("seconds"))
    query = select(Order.id).where(Order.verify_at > later, Order.state.not_in(_QUEUEABLE))
    return [str(order) for order in await session.scalars(query, {"seconds": seconds})]


async def make_due(session: AsyncSession, orders: Collection[str]) -> int:
    """Has the sweeper check these orders now, unless they are final or were due anyway; returns how
    many."""
    due = update(Order).where(Order.id.in_(orders), Order.verify_at > func.now())
    changed = await session.scalars(
        due.values(verify_at=func.now())
        .returning(Order.id)
        .execution_options(synchronize_session=False)
    )
    return len(changed.all())


async def postpone(session: AsyncSession, due: DueOrder, seconds: float) -> None:
    """Has the order checked in `seconds`, unless it is final or is to be checked sooner."""
    leased = update(Order).filter_by(id=due.order.id, verify_at=due.lease)
    later = leased.values(verify_at=seconds_from_now(seconds))
    await session.execute(later.execution_options(synchronize_session=False))
