"""Changes that were asked of orders: written before anything is sent, so that none is made twice.

A request is an event of its order, so it stands in the order's timeline as well. Its id is the caller's own.
"""

from __future__ import annotations

import uuid
from dataclasses import dataclass, replace
from datetime import datetime
from decimal import Decimal
from typing import Any

from sqlalchemy import func, or_, select, update
from sqlalchemy.dialects.postgresql import insert
from sqlalchemy.ext.asyncio import AsyncSession

from infra.database import audit
from infra.database.models import Order, OrderEventRow
from worker_runtime.protocol.messages import OrderState


@dataclass(frozen=True, kw_only=True)
class OrderChange:
    """A smaller total quantity (lots), another price, or both; with the generation and deadline it had."""

    quantity: int | None
    price: Decimal | None
    generation: str
    deadline_at: datetime

    def asks_the_same(self, other: OrderChange) -> bool:
        return (self.quantity, self.price) == (other.quantity, other.price)


#: Ends the id of the mark that a change was confirmed; no caller's request id has such a character.
_CONFIRMED = "#confirmed"


def request_id_of(order_id: uuid.UUID, kind: str, request_id: str) -> str:
    """The id under which a caller's request for one order is known everywhere."""
    return f"{order_id}:{kind}:{request_id}"


async def note_change(
    session: AsyncSession, order: Order, request_id: str, change: OrderChange, *, actor: str
) -> OrderChange | None:
    """Writes down that a change is asked for; returns the first one under this id if there was one."""
    wanted = [f"quantity {change.quantity}" if change.quantity is not None else ""]
    wanted += [f"price {change.price}" if change.price is not None else ""]
    reason = "change asked for: " + ", ".join(filter(None, wanted))
    price = None if change.price is None else str(change.price)
    data = {
        "reason": reason,
        "quantity": change.quantity,
        "price": price,
        "generation": change.generation,
        "deadline_at": change.deadline_at.isoformat(),
    }
    event_id = request_id_of(order.id, "replace", request_id)
    inserted = await session.scalar(
        insert(OrderEventRow)
        .values(event_id=event_id, order_id=order.id, state=order.state, at=func.clock_timestamp(), data=data)
        .on_conflict_do_nothing()
        .returning(OrderEventRow.event_id)
    )
    if inserted is not None:
        audit.append_entry(
            session,
            actor=actor,
            action="order.replace_requested",
            subject=f"order:{order.id}",
            request_id=request_id,
            quantity=change.quantity,
            price=price,
        )
        return None
    return await find_change(session, order.id, request_id)


async def find_change(session: AsyncSession, order_id: uuid.UUID, request_id: str) -> OrderChange | None:
    """The change that was asked for under this id, if any."""
    event_id = request_id_of(order_id, "replace", request_id)
    data = await session.scalar(select(OrderEventRow.data).where(OrderEventRow.event_id == event_id))
    return None if data is None else _change_of(data)


async def confirm_changes(
    session: AsyncSession, order_id: uuid.UUID, quantity: int, price: Decimal | None
) -> bool:
    """Takes over what the broker shows of an order, if it is what changes asked for whose outcome was not
    known yet: of one, or of several that were under way together. No price that was asked for before the last
    one so confirmed: a list may be behind. (The quantity only falls anyway.)"""
    prefix = request_id_of(order_id, "replace", "")
    events = await session.execute(
        select(OrderEventRow.event_id, OrderEventRow.data)
        .where(OrderEventRow.order_id == order_id, OrderEventRow.event_id.startswith(prefix, autoescape=True))
        .order_by(OrderEventRow.at.desc())
    )
    found = {event_id: data for event_id, data in events}
    priced = False  # by a change that is confirmed
    taken = False
    for event_id, data in found.items():
        if event_id.endswith(_CONFIRMED):
            continue
        change = _change_of(data)
        if f"{event_id}{_CONFIRMED}" in found:
            priced = priced or change.price is not None
            continue
        shown = replace(
            change,
            quantity=change.quantity if change.quantity == quantity else None,
            price=change.price if change.price == price and not priced else None,
        )
        if shown.quantity is None and shown.price is None:
            continue
        taken = True
        await apply_change(session, order_id, shown)
        if shown.asks_the_same(change):
            priced = priced or change.price is not None
            await _note_confirmed(session, order_id, event_id)
    return taken


async def _note_confirmed(session: AsyncSession, order_id: uuid.UUID, event_id: str) -> None:
    """Notes that the change is known to have been made."""
    mark = insert(OrderEventRow).values(
        event_id=f"{event_id}{_CONFIRMED}",
        order_id=order_id,
        state=OrderState.SUBMITTED,
        at=func.clock_timestamp(),
        data={"reason": "change made"},
    )
    await session.execute(mark.on_conflict_do_nothing())


def _change_of(data: dict[str, Any]) -> OrderChange:
    return OrderChange(
        quantity=data["quantity"],
        price=None if data["price"] is None else Decimal(data["price"]),
        generation=data["generation"],
        deadline_at=datetime.fromisoformat(data["deadline_at"]),
    )


async def apply_change(session: AsyncSession, order_id: uuid.UUID, change: OrderChange) -> None:
    """After the broker has made the change; safe to repeat. The quantity only falls."""
    quantity = Order.quantity if change.quantity is None else func.least(Order.quantity, change.quantity)
    price = Order.price if change.price is None else change.price
    await session.execute(
        update(Order)
        .where(Order.id == order_id)
        .where(or_(Order.quantity != quantity, Order.price.is_distinct_from(price)))
        .values(quantity=quantity, price=price, updated_at=func.clock_timestamp())
        .execution_options(synchronize_session=False)
    )
