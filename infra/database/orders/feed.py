"""Changes of a user's orders, in an order that misses none: who goes on behind the last one has them all.

A trigger writes into `orders.changed` which transaction changed the order last, whoever did it, and tells
`ORDERS_CHANNEL` the user (once a transaction: PostgreSQL drops repeats). Ids of transactions are given out
before
their commit, so a reader takes only what lies below the oldest transaction that is still under way: nothing
can appear there any more. No lock and no counter stands on an order's path for it.

What one transaction changed has one number and is read together. An order that is changed again moves on to
the later number: a reader that is behind sees it once, as it is then.

Numbers hold within one life of a database cluster, also across a failover; not across a restore from a dump.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from sqlalchemy import BigInteger, String, cast, exists, func, select
from sqlalchemy.ext.asyncio import AsyncSession

from infra.database.models import Order
from infra.database.orders.states import OPEN_STATES

#: PostgreSQL tells this channel, with the user's id, of changed orders. Not of new ones: a notice at each
#: commit would let them pass one at a time (PostgreSQL's lock of the notice queue).
ORDERS_CHANNEL = "berth_orders"

#: Everything below is committed and seen, or will never be.
_HORIZON = cast(cast(func.pg_snapshot_xmin(func.pg_current_snapshot()), String), BigInteger)


@dataclass(frozen=True, slots=True)
class FeedOutlook:
    """What lies ahead of a reader."""

    #: Below this number nothing will change any more.
    horizon: int
    #: There are changes behind the reader's number, perhaps not below the horizon yet.
    more: bool


async def changes_behind(
    session: AsyncSession, user_id: str, last: int, *, limit: int = 100
) -> Sequence[Order]:
    """The next changed orders behind the number `last`, in the order of their changes.

    About `limit`: those of one number are never parted.
    """
    rows = await session.scalars(
        select(Order)
        .where(Order.user_id == user_id, Order.changed > last, Order.changed < _HORIZON)
        .order_by(Order.changed)
        .fetch(limit, with_ties=True)
    )
    return sorted(rows, key=lambda order: (order.changed, order.updated_at))


async def read_outlook(session: AsyncSession, user_id: str, last: int) -> FeedOutlook:
    more = exists().where(Order.user_id == user_id, Order.changed > last)
    horizon, found = (await session.execute(select(_HORIZON, more))).one()
    return FeedOutlook(horizon, found)


async def open_orders(session: AsyncSession, user_id: str, *, limit: int = 100) -> Sequence[Order]:
    """The user's orders that are not final, the newest first."""
    rows = await session.scalars(
        select(Order)
        .where(Order.user_id == user_id, Order.state.in_(OPEN_STATES))
        .order_by(Order.created_at.desc())
        .limit(limit)
    )
    return rows.all()
