"""Closing or opening a position: what must hold between the look at the broker's position and the order.

The broker knows no order that can only reduce. So a closing order is written only under a lock of its account
and symbol, and only if nothing that could have changed the position, or could still close it, stands beside.
The order of an entry, too, and only if nothing at all works there.
"""

from __future__ import annotations

from collections.abc import Collection
from datetime import datetime

from sqlalchemy import and_, func, or_, select
from sqlalchemy.ext.asyncio import AsyncSession

from infra.database.models import Order
from infra.database.order_states import OPEN_STATES

#: The first half of these advisory locks; the timeline's writers have another.
_LOCKS = 0x6275


async def clock(session: AsyncSession) -> datetime:
    """PostgreSQL's own time, by which orders are stamped."""
    found = await session.scalar(select(func.clock_timestamp()))
    assert isinstance(found, datetime)  # noqa: S101
    return found


async def alone(session: AsyncSession, user_id: str, account_id: str, symbol: str) -> None:
    """Waits until nobody else closes or enters here; holds until the transaction ends."""
    name = func.hashtext(f"{user_id}/{account_id}/{symbol}")
    await session.execute(select(func.pg_advisory_xact_lock(_LOCKS, name)))


async def in_the_way(
    session: AsyncSession,
    user_id: str,
    account_id: str,
    symbol: str,
    side: str,
    since: datetime,
    but: Collection[str] = (),
) -> Order | None:
    """An order that works on this side ('': on either), or any that was filled since `since`.

    Those with a client order id in `but` are not looked for.
    """
    works = Order.state.in_(OPEN_STATES)
    order: Order | None = await session.scalar(
        select(Order)
        .where(Order.user_id == user_id, Order.account_id == account_id, Order.symbol == symbol)
        .where(Order.client_order_id.not_in(but))
        .where(
            or_(
                and_(works, Order.side == side) if side else works,
                and_(Order.updated_at >= since, Order.filled_quantity > 0),
            )
        )
        .order_by(Order.created_at.desc())
        .limit(1)
    )
    return order


async def by_client_ids(session: AsyncSession, user_id: str, ids: Collection[str]) -> dict[str, Order]:
    """The user's orders with these client order ids, by that id."""
    found = await session.scalars(
        select(Order).where(Order.user_id == user_id, Order.client_order_id.in_(ids))
    )
    return {order.client_order_id: order for order in found}
