"""Merges what Shioaji reports of each order:
answers of `place_order`, order and deal events, and `list_trades`.

Deal events may come before the order event and before `place_order` returns. Events may come twice
with the same `event_id`. Which deals of both sources are the same is decided in `deals.py`.
"""

import threading
from collections import OrderedDict
from collections.abc import Iterable, Mapping
from typing import Any

from msgspec.structs import replace

from worker_runtime.brokers.shioaji import mapping
from worker_runtime.brokers.shioaji.deals import DealIds, OrderDeals
from worker_runtime.protocol.broker_reports import BrokerOrder, OrderChanged
from worker_runtime.protocol.messages import (
    FINAL_ORDER_STATES,
    Fill,
    OrderState,
    PriceType,
    TimeInForce,
)

#: Event ids that are remembered, to drop repeats.
_MAX_REMEMBERED_IDS = 4096
#: Kept deals whose order is not known yet.
_MAX_EARLY_DEALS = 256

ShioajiEvent = Mapping[str, Any]


class ReportedOrders:
    """Orders of one account by Shioaji's id. Safe to use from several threads."""

    def __init__(self, blank: mapping.Redactor = str) -> None:
        """Takes `blank`, which removes secrets from what the SDK says of an order."""
        self._blank = blank
        self._lock = threading.Lock()
        self._orders: dict[str, BrokerOrder] = {}
        self._deal_ids = DealIds()
        self._deals: dict[str, OrderDeals] = {}
        #: Orders whose quantity is what an event of a change says, with the quantity before.
        self._before_change: dict[str, int] = {}
        #: Orders that only deals have named so far.
        self._early: OrderedDict[str, None] = OrderedDict()
        self._seen: OrderedDict[str, None] = OrderedDict()

    def merge_trade(self, trade: Any) -> BrokerOrder:
        """Merges a `Trade`; returns all that is known of its order. It has not ended before all
        fills are known that the row counts."""
        reported = mapping.order_of(trade)
        with self._lock:
            known = self._orders.get(reported.broker_order_id)
            deals = self._deals_of(reported.broker_order_id)
            deals.add_listed(reported.fills)
            self._before_change.pop(reported.broker_order_id, None)
            lacks_fills = filled_quantity(deals.fills) < mapping.counted_fills(trade)
            if lacks_fills and reported.state in FINAL_ORDER_STATES:
                reported = replace(reported, state=OrderState.PART_FILLED)
            return self._keep(reported, known, deals.fills)

    def merge_event(self, kind: str, event: ShioajiEvent) -> OrderChanged | None:
        """Merges an event of the order callback; `kind` is SORDER, SDEAL, FORDER or FDEAL. Returns
        None for a repeat, nothing new, or a deal whose order is not known yet."""
        with self._lock:
            if self._repeated(kind, event):
                return None
            return self._deal(event) if kind in ("SDEAL", "FDEAL") else self._order(event)

    # --- inside, under the lock -------------------------------------------------------------------

    def _repeated(self, kind: str, event: ShioajiEvent) -> bool:
        event_id = str(event.get("event_id") or "")
        if not event_id:  # historical records have none; deals are still known by their sequence
            return False
        key = f"{kind} {event_id}"
        if key in self._seen:
            return True
        self._seen[key] = None
        if len(self._seen) > _MAX_REMEMBERED_IDS:
            self._seen.popitem(last=False)
        return False

    def _deal(self, event: ShioajiEvent) -> OrderChanged | None:
        order_id = str(event["trade_id"])
        done = mapping.fill_of(
            order_id, str(event["exchange_seq"]), event["quantity"], event["price"], event["ts"]
        )
        known = self._orders.get(order_id)
        deals = self._deals_of(order_id)
        is_new = deals.add_event(done)
        if known is None:
            self._early[order_id] = None
            if len(self._early) > _MAX_EARLY_DEALS:
                forgotten, _ = self._early.popitem(last=False)
                del self._deals[forgotten]
            return None
        if not is_new:
            return None
        order = self._keep(known, known, deals.fills)
        return OrderChanged(event_id=f"deal-{done.fill_id}", order=order, fill=done)

    def _order(self, event: ShioajiEvent) -> OrderChanged | None:
        operation, order, status = event["operation"], event["order"], event["status"]
        done, kind = operation["op_code"] == "00", operation["op_type"]
        order_id = str(order["id"] or status.get("id") or "")
        if not order_id:  # an order that nobody can be told of; a list shows it
            return None
        known = self._orders.get(order_id)
        if not done and kind not in ("New", "Reject"):
            return None  # a cancel or a change was refused: the order is as it was
        fills = self._deals_of(order_id).fills
        state = known.state if known else OrderState.SUBMITTED
        if kind == "Reject" or not done:
            state = OrderState.REJECTED
        elif kind == "Cancel":
            state = OrderState.CANCELLED
        elif kind == "New":
            state = OrderState.SUBMITTED
        quantity = _quantity_after(kind, event, known, filled_quantity(fills))
        if known is None and kind not in ("New", "Reject"):
            self._before_change[order_id] = max(quantity, int(order["quantity"]))
        elif known is not None and quantity != known.quantity:
            self._before_change.setdefault(order_id, known.quantity)
        price_type = mapping.price_type_of(order["price_type"], order["price"])
        reported = BrokerOrder(
            broker_order_id=order_id,
            # Futures events lack the tag: the one of `place_order` is kept.
            tag=order.get("custom_field") or (known.tag if known else ""),
            symbol=known.symbol if known else str(event["contract"]["code"]),
            side=mapping.side_of(order["action"]),
            quantity=quantity,
            price_type=price_type,
            price=mapping.price_of(order["price"]) if price_type is PriceType.LIMIT else None,
            time_in_force=TimeInForce(
                order.get("time_in_force") or order.get("order_type") or "ROD"
            ),
            state=state,
            reason=operation["op_msg"] or None,
        )
        kept = self._keep(reported, known, fills)
        event_id = str(
            event.get("event_id") or f"{kind}-{operation['op_code']}-{status['exchange_ts']}"
        )
        return OrderChanged(event_id=f"order-{order_id}-{event_id}", order=kept)

    def _keep(
        self, reported: BrokerOrder, known: BrokerOrder | None, fills: list[Fill]
    ) -> BrokerOrder:
        """Stores an order. A final one stays final, whatever a late report says (Sinotrade/Shioaji
        #216, #234). So the quantity that an event of a change says makes none filled: a list tells
        whether anything of it is left."""
        filled, quantity = filled_quantity(fills), reported.quantity
        before = self._before_change.get(reported.broker_order_id)
        if before is not None and filled >= quantity:
            quantity = max(before, filled + 1)
        state = mapping.with_fills(reported.state, filled, quantity)
        if (
            known is not None
            and known.state in FINAL_ORDER_STATES
            and state not in FINAL_ORDER_STATES
        ):
            state = known.state
        reason = None if reported.reason is None else self._blank(reported.reason)
        kept = replace(reported, quantity=quantity, state=state, fills=fills, reason=reason)
        self._orders[reported.broker_order_id] = kept
        self._early.pop(reported.broker_order_id, None)
        return kept

    def _deals_of(self, order_id: str) -> OrderDeals:
        return self._deals.setdefault(order_id, OrderDeals(self._deal_ids))


def filled_quantity(fills: Iterable[Fill]) -> int:
    return sum(fill.quantity for fill in fills)


def _quantity_after(kind: str, event: ShioajiEvent, known: BrokerOrder | None, filled: int) -> int:
    """Returns the order's quantity after an event,
    of which only the first one's numbers can be relied on.

    Recorded in production for one order: New 2, UpdateQty 1, UpdatePrice 2, Cancel 1; and a Cancel
    that carries only the rest of a partly filled order. So the first quantity counts, and it falls
    by an UpdateQty alone. Nobody has seen what that says of a partly filled order: there it changes
    nothing. A list says the same with certainty later.
    """
    order, status = event["order"], event["status"]
    said = int(status.get("order_quantity") or 0)
    if known is None:
        first = int(order["quantity"] if kind == "Cancel" else said or order["quantity"])
        return first + filled if kind == "Cancel" and filled >= first else first
    if kind != "UpdateQty" or filled:
        return known.quantity
    remaining = said or known.quantity - int(status.get("cancel_quantity") or 0)
    return min(known.quantity, max(remaining, 1))
