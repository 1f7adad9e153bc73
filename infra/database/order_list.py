"""A user's orders as lists: filtered, the newest first, a page at a time."""

from __future__ import annotations

import uuid
from collections.abc import Sequence
from dataclasses import dataclass
from datetime import datetime

from sqlalchemy import ColumnElement, Select, and_, or_, select, tuple_
from sqlalchemy.ext.asyncio import AsyncSession

from infra.database.models import Order
from infra.database.order_states import OPEN_STATES
from worker_runtime.protocol.messages import FINAL_ORDER_STATES, OrderState

#: Names for several states at once.
OPEN, FINAL = "open", "final"


@dataclass(frozen=True, kw_only=True)
class Wanted:
    """Which orders of one user; what is None is not asked for."""

    user_id: str
    #: States as they are shown, `open` or `final`; empty: all. An order that waits for a person is
    #: `needs_attention` and nothing else.
    states: frozenset[str] = frozenset()
    account_id: str | None = None
    symbol: str | None = None
    side: str | None = None
    client_order_id: str | None = None
    #: Accepted at or after this time, and before that one.
    since: datetime | None = None
    until: datetime | None = None


#: Where a page ended: time of acceptance and id of its last order. Newer orders do not move it.
Position = tuple[datetime, uuid.UUID]


async def page(
    session: AsyncSession, wanted: Wanted, *, behind: Position | None = None, limit: int = 100
) -> Sequence[Order]:
    """The next orders behind a position, at most `limit`; the newest first."""
    statement = _matching(wanted).order_by(Order.created_at.desc(), Order.id.desc()).limit(limit)
    if behind is not None:
        statement = statement.where(tuple_(Order.created_at, Order.id) < behind)
    return (await session.scalars(statement)).all()


def position(order: Order) -> Position:
    return order.created_at, order.id


def _matching(wanted: Wanted) -> Select[Order]:
    found = select(Order).where(Order.user_id == wanted.user_id)
    for column, value in (
        (Order.account_id, wanted.account_id),
        (Order.symbol, wanted.symbol),
        (Order.side, wanted.side),
        (Order.client_order_id, wanted.client_order_id),
    ):
        if value is not None:
            found = found.where(column == value)
    if wanted.since is not None:
        found = found.where(Order.created_at >= wanted.since)
    if wanted.until is not None:
        found = found.where(Order.created_at < wanted.until)
    if wanted.states:
        found = found.where(or_(*(_in_state(state) for state in sorted(wanted.states))))
    return found


def _in_state(state: str) -> ColumnElement[bool]:
    if state == OPEN:
        return Order.state.in_(OPEN_STATES)
    if state == FINAL:
        return Order.state.in_(FINAL_ORDER_STATES)
    if state == OrderState.NEEDS_ATTENTION:
        raised = and_(Order.state.in_(OPEN_STATES), Order.attention.is_not(None))
        return or_(Order.state == state, raised)
    if state in FINAL_ORDER_STATES:
        return Order.state == state
    return and_(Order.state == state, Order.attention.is_(None))
