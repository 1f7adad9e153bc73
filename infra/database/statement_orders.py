"""The orders of a user's daily statement, with no more of each than a statement says."""

from __future__ import annotations

from datetime import datetime

from sqlalchemy import select
from sqlalchemy.ext.asyncio import AsyncSession

from infra.database.models import Order
from worker_runtime.protocol.job_work import OrderRow
from worker_runtime.protocol.messages import FINAL_ORDER_STATES, OrderState


async def between(
    session: AsyncSession, user_id: str, since: datetime, until: datetime, *, limit: int
) -> list[OrderRow]:
    """Accepted at or after `since` and before `until`, at most `limit`; by account and symbol.

    Ids, times and reasons are left out: they are most of an order's bytes once it is packed.
    """
    columns = (
        *(Order.account_id, Order.symbol, Order.side, Order.quantity),
        *(Order.state, Order.attention, Order.filled_quantity, Order.average_price),
    )
    rows = await session.execute(
        select(*columns)
        .where(Order.user_id == user_id, Order.created_at >= since, Order.created_at < until)
        .order_by(Order.account_id, Order.symbol, Order.side, Order.id)
        .limit(limit)
    )
    return [
        OrderRow(
            accepted_at="",
            id="",
            client_order_id="",
            account_id=row.account_id,
            symbol=row.symbol,
            side=row.side,
            quantity=row.quantity,
            price_type="",
            price=None,
            time_in_force="",
            state=_shown(row.state, row.attention),
            filled_quantity=row.filled_quantity,
            average_price=row.average_price,
        )
        for row in rows
    ]


def _shown(state: str, attention: str | None) -> str:
    """As the API shows it: an order that waits for a person says so."""
    waits = attention is not None and state not in FINAL_ORDER_STATES
    return OrderState.NEEDS_ATTENTION.value if waits else state
