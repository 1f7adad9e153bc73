"""Tracks the orders of this session and makes events of what the broker reports.

The broker reports the same thing more than once: `place` returns the fills so far, and each comes
again as an `OrderChanged`, perhaps before `place` returns, perhaps twice. The id of an event
follows from what happened, and each id is sent once.
"""

from collections import OrderedDict, deque
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from decimal import Decimal
from typing import NamedTuple

from worker_runtime.brokers.port import ConnectionKey
from worker_runtime.process.clock import wall_ms
from worker_runtime.process.log import Log
from worker_runtime.protocol.broker_reports import BrokerOrder, OrderChanged
from worker_runtime.protocol.errors import OutcomeUnknown
from worker_runtime.protocol.messages import (
    FINAL_ORDER_STATES,
    Failure,
    Fill,
    OrderEvent,
    OrderOutcome,
    OrderState,
    PlaceOrder,
)

#: Orders and event ids that are remembered; a busy day of one person has some hundreds.
_MAX_REMEMBERED_IDS = 20_000
#: Kept changes whose order is not known yet.
_MAX_UNMATCHED_CHANGES = 200
#: Average prices are rounded to six decimals.
_PRICE_PRECISION = Decimal("0.000001")


class OrderResult(NamedTuple):
    """An order's outcome, and the failure if it was not executed as requested."""

    outcome: OrderOutcome
    failure: Failure | None = None


@dataclass(slots=True)
class _TrackedOrder:
    order: PlaceOrder
    outcome: OrderOutcome
    failure: Failure | None = None
    #: True if its submission is known to have begun: by this session, the broker's list or our
    #: books.
    begun: bool = True
    #: True if an event has said that it is filled.
    reported_filled: bool = False
    #: Quantity and price that the broker showed last; None: as ordered.
    terms: tuple[int, Decimal | None] | None = None

    def merge_report(self, reported: BrokerOrder) -> None:
        """Takes the broker's report as the outcome, unless the known outcome is newer."""
        is_older = sum(fill.quantity for fill in reported.fills) < self.outcome.filled_quantity
        if not is_older and self.outcome.state not in FINAL_ORDER_STATES:
            self.outcome = order_outcome_of(self.order.order_id, reported)
            self.failure = None


class OrderTracker:
    """Orders by our id, by the broker's id and by their tag."""

    def __init__(self, epoch: int, add_event: Callable[[OrderEvent], None], log: Log) -> None:
        self._epoch = epoch
        self._add_event = add_event
        self._log = log
        self._entries: OrderedDict[str, _TrackedOrder] = OrderedDict()
        self._by_broker_id: dict[tuple[str, str], str] = {}
        self._by_tag: dict[tuple[str, str], str] = {}
        self._sent_ids: OrderedDict[str, None] = OrderedDict()
        self._unmatched: deque[tuple[ConnectionKey, OrderChanged]] = deque(
            maxlen=_MAX_UNMATCHED_CHANGES
        )

    def known_outcome(self, order_id: str) -> OrderResult | None:
        """Returns what is known of an order whose submission has begun, in this session or a former
        one; None if nothing says so."""
        entry = self._entries.get(order_id)
        return OrderResult(entry.outcome, entry.failure) if entry and entry.begun else None

    def __contains__(self, order_id: str) -> bool:
        return order_id in self._entries

    def broker_id_of(self, order_id: str) -> str | None:
        entry = self._entries.get(order_id)
        return entry.outcome.broker_order_id if entry else None

    def load_open_orders(self, orders: Iterable[PlaceOrder]) -> None:
        """Adds orders of former sessions that are not final in our books.

        Some may still be in the queue.
        """
        for order in orders:
            known = self._entries.get(order.order_id)
            if known is not None:
                known.begun = known.begun or order.begun  # our books may have learnt it since
                continue
            unknown = OrderOutcome(
                order_id=order.order_id,
                state=OrderState.UNKNOWN,
                broker_order_id=order.broker_order_id,
            )
            entry = self._remember(order, unknown, Failure.of(OutcomeUnknown()))
            entry.begun = order.begun or order.broker_order_id is not None
            if order.broker_order_id is not None:
                self._by_broker_id[order.account_id, order.broker_order_id] = order.order_id
            else:
                self._by_tag.setdefault((order.account_id, order.tag), order.order_id)

    def reconcile_list(
        self, key: ConnectionKey, orders: Iterable[BrokerOrder]
    ) -> list[BrokerOrder]:
        """Applies the broker's list of orders, and adds events for changes that were missed.
        Returns the orders that this session does not know."""
        unmatched = [order for order in orders if not self._apply(key.account_id, order)]
        self._apply_unmatched()
        return unmatched

    def mark_submitting(self, order: PlaceOrder) -> None:
        """Marks the order as submitted. Call it right before the submission: from here on the order
        is never submitted again."""
        unknown = OrderOutcome(order_id=order.order_id, state=OrderState.UNKNOWN)
        self._remember(order, unknown, Failure.of(OutcomeUnknown()))
        self._by_tag[order.account_id, order.tag] = order.order_id

    def record_outcome(self, order: PlaceOrder, outcome: OrderOutcome, failure: Failure) -> None:
        """Records an outcome that is not the broker's answer."""
        self._remember(order, outcome, failure)
        if outcome.state is OrderState.UNKNOWN:  # a list may settle it
            self._by_tag.setdefault((order.account_id, order.tag), order.order_id)

    def record_placement(self, order: PlaceOrder, placed: BrokerOrder) -> OrderOutcome:
        """Records the broker's answer to a submission and sends its events; returns the outcome."""
        entry = self._entries.get(order.order_id)
        if entry is None:
            entry = self._remember(order, order_outcome_of(order.order_id, placed))
        entry.merge_report(placed)
        self._by_broker_id[order.account_id, placed.broker_order_id] = order.order_id
        if placed.state not in (OrderState.REJECTED, OrderState.UNKNOWN):
            self._send_event_once(entry, placed, "submitted", OrderState.SUBMITTED, [])
        self._send_progress(entry, placed)
        self._apply_unmatched()
        return entry.outcome

    def apply_change(self, key: ConnectionKey, change: OrderChanged) -> None:
        """Applies what the broker reports of an order, or keeps it until the order is known."""
        if not self._apply(key.account_id, change.order, change.fill):
            self._log.info("order_change_unmatched", broker_order_id=change.order.broker_order_id)
            self._unmatched.append((key, change))

    def _apply_unmatched(self) -> None:
        """Retries the changes that arrived before their order was known."""
        waiting, self._unmatched = self._unmatched, deque(maxlen=_MAX_UNMATCHED_CHANGES)
        for key, change in waiting:
            self.apply_change(key, change)

    def _apply(self, account_id: str, reported: BrokerOrder, fill: Fill | None = None) -> bool:
        order_id = self._order_id_of(account_id, reported)
        if order_id is None:
            return False
        self._by_broker_id[account_id, reported.broker_order_id] = order_id
        entry = self._entries[order_id]
        entry.begun = True
        entry.merge_report(reported)
        self._compare_terms(entry, reported)
        self._send_progress(entry, reported, fill)
        return True

    def _compare_terms(self, entry: _TrackedOrder, reported: BrokerOrder) -> None:
        """Sends an event if the broker shows other terms, even if no answer to a change came. Our
        books take only what was asked for, so an outdated list changes nothing."""
        order = entry.order
        quantity, price = entry.terms or (order.quantity, order.price)
        smaller = 0 < reported.quantity < quantity
        has_other_price = (
            price is not None and reported.price is not None and reported.price != price
        )
        if not smaller and not has_other_price:
            return
        entry.terms = (reported.quantity, reported.price)
        self._add_event(
            OrderEvent(
                event_id=f"{order.order_id}:terms:{reported.quantity}:{reported.price}:{wall_ms()}",
                order_id=order.order_id,
                user_id=order.user_id,
                epoch=self._epoch,
                state=OrderState.PART_FILLED if reported.fills else OrderState.SUBMITTED,
                at_ms=wall_ms(),
                broker_order_id=reported.broker_order_id,
                reason=f"the broker has it with quantity {reported.quantity}, price "
                f"{reported.price}",
                quantity=reported.quantity,
                price=reported.price,
            )
        )

    def _order_id_of(self, account_id: str, reported: BrokerOrder) -> str | None:
        order_id = self._by_broker_id.get((account_id, reported.broker_order_id))
        if order_id is not None or not reported.tag:
            return order_id
        order_id = self._by_tag.get((account_id, reported.tag))
        if order_id is None:
            return None
        entry = self._entries[order_id]
        # Our tags never repeat, but an order that is not ours may have the same one. (The symbol
        # may differ: a rolling code stands for a real one.)
        is_similar = entry.order.side is reported.side and reported.quantity <= entry.order.quantity
        has_other_id = entry.outcome.broker_order_id not in (None, reported.broker_order_id)
        return None if has_other_id or not is_similar else order_id

    def _send_progress(
        self, entry: _TrackedOrder, reported: BrokerOrder, fill: Fill | None = None
    ) -> None:
        """Sends an event for each fill, with the quantity filled so far, and one for the state."""
        fills = list(reported.fills)
        if fill is not None and all(fill.fill_id != known.fill_id for known in fills):
            fills.append(fill)
        # Fills whose events were sent come first, so that a late fill adds to their total.
        fills.sort(
            key=lambda fill: f"{entry.order.order_id}:fill:{fill.fill_id}" not in self._sent_ids
        )
        final = reported.state in FINAL_ORDER_STATES
        for number, known in enumerate(fills, 1):
            fills_so_far = fills[:number]
            is_filled = sum(fill.quantity for fill in fills_so_far) >= reported.quantity
            state = OrderState.FILLED if is_filled else OrderState.PART_FILLED
            if final and number == len(fills):
                state = reported.state
            self._send_event_once(
                entry, reported, f"fill:{known.fill_id}", state, fills_so_far, fill=known
            )
        # An order that was reduced to its filled quantity is filled without a further fill.
        already_sent = reported.state is OrderState.FILLED and entry.reported_filled
        if (final or reported.state is OrderState.SUBMITTED) and not already_sent:
            self._send_event_once(
                entry, reported, reported.state.value, reported.state, fills, reason=reported.reason
            )

    def _send_event_once(
        self,
        entry: _TrackedOrder,
        reported: BrokerOrder,
        event_kind: str,
        state: OrderState,
        fills: list[Fill],
        *,
        fill: Fill | None = None,
        reason: str | None = None,
    ) -> None:
        """Sends an event unless it was sent before. `fills`: all fills up to this event."""
        event_id = f"{entry.order.order_id}:{event_kind}"
        if event_id in self._sent_ids:
            return
        self._sent_ids[event_id] = None
        entry.reported_filled = entry.reported_filled or state is OrderState.FILLED
        if len(self._sent_ids) > _MAX_REMEMBERED_IDS:
            self._sent_ids.popitem(last=False)
        self._add_event(
            OrderEvent(
                event_id=event_id,
                order_id=entry.order.order_id,
                user_id=entry.order.user_id,
                epoch=self._epoch,
                state=state,
                at_ms=wall_ms(),
                broker_order_id=reported.broker_order_id,
                fill=fill,
                filled_quantity=sum(fill.quantity for fill in fills),
                average_price=average_fill_price(fills),
                reason=reason,
            )
        )

    def _remember(
        self, order: PlaceOrder, outcome: OrderOutcome, failure: Failure | None = None
    ) -> _TrackedOrder:
        entry = self._entries[order.order_id] = _TrackedOrder(order, outcome, failure)
        if len(self._entries) > _MAX_REMEMBERED_IDS:
            forgotten, old = self._entries.popitem(last=False)
            if self._by_tag.get((old.order.account_id, old.order.tag)) == forgotten:
                del self._by_tag[old.order.account_id, old.order.tag]
            if old.outcome.broker_order_id is not None:
                self._by_broker_id.pop((old.order.account_id, old.outcome.broker_order_id), None)
        return entry


def average_fill_price(fills: list[Fill]) -> Decimal | None:
    """Returns the average price of the fills, weighted by quantity; None without fills."""
    quantity = sum(fill.quantity for fill in fills)
    if quantity <= 0:
        return None
    if len({fill.price for fill in fills}) == 1:
        return fills[0].price
    total = sum((fill.price * fill.quantity for fill in fills), Decimal(0))
    return (total / quantity).quantize(_PRICE_PRECISION)


def order_outcome_of(order_id: str, reported: BrokerOrder) -> OrderOutcome:
    """Returns the outcome that a broker's report of an order shows."""
    return OrderOutcome(
        order_id=order_id,
        state=reported.state,
        broker_order_id=reported.broker_order_id,
        filled_quantity=sum(fill.quantity for fill in reported.fills),
        average_price=average_fill_price(reported.fills),
        reason=reported.reason,
    )
