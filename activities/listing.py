"""An order as the broker lists it, told as the event that nobody heard."""

from __future__ import annotations

from decimal import Decimal

from infra.database.models import Order
from worker_runtime.protocol.exchange import ExchangeOrder
from worker_runtime.protocol.messages import OrderEvent


def filled_of(listed: ExchangeOrder) -> int:
    """Lots."""
    return sum(fill.quantity for fill in listed.fills)


def may_be(order: Order, listed: ExchangeOrder) -> bool:
    """Whether a listed order with our tag can be this one.

    The symbol may be another: an order for a rolling code (TXFR1) is listed under the contract that the code
    stood for then, and a code is written differently in lists of some brokers. No tag of ours stands for a
    second order, so the symbol adds no proof; but whoever demanded it would hold an order that works at the
    broker for one that never arrived. The side and a quantity that is not larger (it only falls) keep out an
    order of somebody else's program that happens to have the tag.
    """
    return order.side == listed.side and listed.quantity <= order.quantity


def listed_event(order: Order, listed: ExchangeOrder, at_ms: int) -> OrderEvent:
    """The same event for the same listing, so that a repeat changes nothing; of no worker: epoch 0."""
    filled = filled_of(listed)
    smaller = 0 < listed.quantity < order.quantity
    changed = smaller or (None not in (order.price, listed.price) and order.price != listed.price)
    worth = sum((fill.price * fill.quantity for fill in listed.fills), Decimal(0))
    return OrderEvent(
        event_id=f"{order.id}:listed:{listed.state.value}:{filled}",
        order_id=str(order.id),
        user_id=order.user_id,
        epoch=0,
        state=listed.state,
        at_ms=at_ms,
        broker_order_id=listed.broker_order_id,
        filled_quantity=filled,
        average_price=worth / filled if filled else None,
        reason=listed.reason,
        quantity=listed.quantity if changed else None,
        price=listed.price if changed else None,
    )
