"""Requested changes of orders, recorded before anything is sent, so that none is made twice.

A request is stored as an event of its order under the caller's request id.
"""

import uuid
from dataclasses import dataclass, replace
from datetime import datetime
from decimal import Decimal
from typing import Any, Self

import msgspec
from sqlalchemy import func, or_, select, update
from sqlalchemy.dialects.postgresql import insert
from sqlalchemy.ext.asyncio import AsyncSession

from infra.database import audit
from infra.database.models import Order, OrderEventRow
from worker_runtime.protocol.messages import OrderState


@dataclass(frozen=True, kw_only=True)
class OrderChange:
    """A smaller total quantity (lots), another price, or both; with its generation and deadline."""

    quantity: int | None
    price: Decimal | None
    generation: str
    deadline_at: datetime
    #: The epoch of the first worker that can have got it.
    first_epoch: int = 0
    #: The band of another price, for the worker (`ReplaceOrder`).
    price_band: Decimal | None = None

    def asks_the_same(self, other: Self) -> bool:
        return (self.quantity, self.price) == (other.quantity, other.price)


#: The end of the id of an event that confirms a change; a caller's request id cannot contain `#`.
_CONFIRMED = "#confirmed"


def request_id_of(order_id: uuid.UUID, kind: str, request_id: str) -> str:
    """Returns the id of a caller's request for one order."""
    return f"{order_id}:{kind}:{request_id}"


async def note_change(
    session: AsyncSession, order: Order, request_id: str, change: OrderChange, *, actor: str
) -> OrderChange | None:
    """Records a requested change; returns the earlier one with this id if there is one."""
    asked = {
        "quantity": change.quantity,
        "price": None if change.price is None else str(change.price),
    }
    words = ", ".join(f"{name} {value}" for name, value in asked.items() if value is not None)
    data = {**msgspec.to_builtins(change), "reason": f"change asked for: {words}"}
    event_id = request_id_of(order.id, "replace", request_id)
    if not await _add_event(session, order.id, event_id, order.state, data):
        return await find_change(session, order.id, request_id)
    entry = {"request_id": request_id, **asked}
    audit.append_entry(session, actor, "order.replace_requested", f"order:{order.id}", **entry)
    return None


async def find_change(
    session: AsyncSession, order_id: uuid.UUID, request_id: str
) -> OrderChange | None:
    event_id = request_id_of(order_id, "replace", request_id)
    data = await session.scalar(
        select(OrderEventRow.data).where(OrderEventRow.event_id == event_id)
    )
    return None if data is None else msgspec.convert(data, OrderChange)


async def was_confirmed(session: AsyncSession, event_id: str) -> bool:
    """Returns True if a change is known to have been made. `event_id` is the id of its request."""
    return await session.get(OrderEventRow, f"{event_id}{_CONFIRMED}") is not None


async def confirm_changes(
    session: AsyncSession, order_id: uuid.UUID, quantity: int, price: Decimal | None
) -> None:
    """Applies the quantity and price that the broker shows, where they are those of unconfirmed
    changes.

    Ignores a price requested before one that is already confirmed, since the broker's list may be
    behind; the quantity can only fall.
    """
    prefix = request_id_of(order_id, "replace", "")
    events = await session.execute(
        select(OrderEventRow.event_id, OrderEventRow.data)
        .where(
            OrderEventRow.order_id == order_id,
            OrderEventRow.event_id.startswith(prefix, autoescape=True),
        )
        .order_by(OrderEventRow.at.desc())
    )
    by_event = {event_id: data for event_id, data in events}
    price_confirmed = False
    for event_id, data in by_event.items():
        if event_id.endswith(_CONFIRMED):
            continue
        change = msgspec.convert(data, OrderChange)
        confirmed = f"{event_id}{_CONFIRMED}" in by_event
        if not confirmed:
            shown = replace(
                change,
                quantity=change.quantity if change.quantity == quantity else None,
                price=change.price if change.price == price and not price_confirmed else None,
            )
            if shown.quantity is None and shown.price is None:
                continue
            confirmed = shown.asks_the_same(change)
            await apply_change(session, order_id, shown, event_id if confirmed else "")
        price_confirmed = price_confirmed or (confirmed and change.price is not None)


async def _add_event(
    session: AsyncSession, order_id: uuid.UUID, event_id: str, state: str, data: dict[str, Any]
) -> bool:
    """Adds an event of now to an order; False if there is one with this id."""
    now = func.clock_timestamp()
    row = insert(OrderEventRow).values(
        event_id=event_id, order_id=order_id, state=state, at=now, data=data
    )
    added = await session.scalar(row.on_conflict_do_nothing().returning(OrderEventRow.event_id))
    return added is not None


async def apply_change(
    session: AsyncSession, order_id: uuid.UUID, change: OrderChange, event_id: str = ""
) -> None:
    """Updates an order after the broker has changed it; safe to repeat. The quantity only falls.
    `event_id`: of the request that is confirmed by it."""
    quantity = (
        Order.quantity if change.quantity is None else func.least(Order.quantity, change.quantity)
    )
    price = Order.price if change.price is None else change.price
    differs = or_(Order.quantity != quantity, Order.price.is_distinct_from(price))
    changed = update(Order).where(Order.id == order_id, differs)
    changed = changed.values(quantity=quantity, price=price, updated_at=func.clock_timestamp())
    await session.execute(changed.execution_options(synchronize_session=False))
    if event_id:  # behind the order, as the recorder locks them
        made = {"reason": "change made"}
        await _add_event(session, order_id, f"{event_id}{_CONFIRMED}", OrderState.SUBMITTED, made)
