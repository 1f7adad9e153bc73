"""Users who traded of late, page by page along the orders' index (`orders_by_user`)."""

from __future__ import annotations

from datetime import datetime

from sqlalchemy import func, select
from sqlalchemy.ext.asyncio import AsyncSession

from infra.database.models import Order


async def count(session: AsyncSession, since: datetime) -> int:
    """Users with an order since then, whatever became of it."""
    found = await session.scalar(
        select(func.count(func.distinct(Order.user_id))).where(Order.created_at >= since)
    )
    return int(found or 0)


async def page(session: AsyncSession, since: datetime, *, after: str, limit: int) -> list[str]:
    """The next `limit` of them behind `after`, in order of their ids."""
    rows = await session.scalars(
        select(Order.user_id)
        .where(Order.created_at >= since, Order.user_id > after)
        .group_by(Order.user_id)
        .order_by(Order.user_id)
        .limit(limit)
    )
    return list(rows)
