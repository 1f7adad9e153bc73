"""What this session knows of the orders it has taken, and the events that follow from it.

The broker tells of the same thing more than once: `place` returns the fills so far, and each comes again
as an `OrderChanged`, perhaps before `place` returns, perhaps twice. Every event has an id that follows
from what happened, and each id is told once.
"""

from __future__ import annotations

from collections import OrderedDict, deque
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from decimal import Decimal
from typing import NamedTuple

from worker_runtime.brokers.port import ConnectionKey
from worker_runtime.process.clock import wall_ms
from worker_runtime.process.log import Log
from worker_runtime.protocol.errors import OutcomeUnknown
from worker_runtime.protocol.exchange import ExchangeOrder, OrderChanged
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
_REMEMBERED = 20_000
#: Changes kept whose order is not known yet.
_UNMATCHED = 200
#: Average prices are told to six decimals when they do not come out even.
_PRECISION = Decimal("0.000001")


class OrderResult(NamedTuple):
    """What is known of an order, and why it is not as asked for."""

    outcome: OrderOutcome
    failure: Failure | None = None


@dataclass(slots=True)
class _TrackedOrder:
    order: PlaceOrder
    outcome: OrderOutcome
    failure: Failure | None = None
    #: It is known to have been taken: by this session, because the broker has it, or by our books.
    taken: bool = True
    #: An event has said that it is filled.
    told_filled: bool = False
    #: Quantity and price as the broker showed them last; None: as ordered.
    terms: tuple[int, Decimal | None] | None = None

    def learn(self, told: ExchangeOrder) -> None:
        """The broker's view becomes the outcome, unless it is older than what is known."""
        late = sum(fill.quantity for fill in told.fills) < self.outcome.filled_quantity
        if not late and self.outcome.state not in FINAL_ORDER_STATES:
            self.outcome = order_outcome_of(self.order.order_id, told)
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
        self._told: OrderedDict[str, None] = OrderedDict()
        self._unmatched: deque[tuple[ConnectionKey, OrderChanged]] = deque(maxlen=_UNMATCHED)

    def known_outcome(self, order_id: str) -> OrderResult | None:
        """What is known of an order that was taken before, by this session or a former one; None if nothing
        says that it was."""
        entry = self._entries.get(order_id)
        return OrderResult(entry.outcome, entry.failure) if entry and entry.taken else None

    def broker_id_of(self, order_id: str) -> str | None:
        entry = self._entries.get(order_id)
        return entry.outcome.broker_order_id if entry else None

    def load_open_orders(self, orders: Iterable[PlaceOrder]) -> None:
        """Orders of former sessions that are not final in our books; some may be in the queue yet."""
        for order in orders:
            known = self._entries.get(order.order_id)
            if known is not None:
                known.taken = known.taken or order.begun  # the books may have learnt of it since
                continue
            unknown = OrderOutcome(
                order_id=order.order_id, state=OrderState.UNKNOWN, broker_order_id=order.broker_order_id
            )
            entry = self._remember(order, unknown, Failure.of(OutcomeUnknown()))
            entry.taken = order.begun or order.broker_order_id is not None
            if order.broker_order_id is not None:
                self._by_broker_id[order.account_id, order.broker_order_id] = order.order_id
            else:
                self._by_tag.setdefault((order.account_id, order.tag), order.order_id)

    def reconcile_list(self, key: ConnectionKey, orders: Iterable[ExchangeOrder]) -> list[ExchangeOrder]:
        """Takes in a list of the broker's: what was missed becomes events. Returns those that are not ours,
        as far as this session knows."""
        unmatched = [order for order in orders if not self._apply(key.account_id, order)]
        self._apply_unmatched()
        return unmatched

    def mark_submitting(self, order: PlaceOrder) -> None:
        """To be called right before the submission: from here on the id is never submitted again."""
        unknown = OrderOutcome(order_id=order.order_id, state=OrderState.UNKNOWN)
        self._remember(order, unknown, Failure.of(OutcomeUnknown()))
        self._by_tag[order.account_id, order.tag] = order.order_id

    def record_outcome(self, order: PlaceOrder, outcome: OrderOutcome, failure: Failure) -> None:
        """Notes an outcome that did not come from the broker's answer."""
        self._remember(order, outcome, failure)
        if outcome.state is OrderState.UNKNOWN:  # a list may tell of it
            self._by_tag.setdefault((order.account_id, order.tag), order.order_id)

    def record_placement(self, order: PlaceOrder, placed: ExchangeOrder) -> OrderOutcome:
        """Notes the broker's answer to a submission and tells its events; returns the outcome."""
        entry = self._entries.get(order.order_id)
        if entry is None:
            entry = self._remember(order, order_outcome_of(order.order_id, placed))
        entry.learn(placed)
        self._by_broker_id[order.account_id, placed.broker_order_id] = order.order_id
        if placed.state not in (OrderState.REJECTED, OrderState.UNKNOWN):
            self._emit(entry, "submitted", state=OrderState.SUBMITTED)
        self._advance(entry, placed)
        self._apply_unmatched()
        return entry.outcome

    def apply_change(self, key: ConnectionKey, change: OrderChanged) -> None:
        """Takes in what the broker reports of an order."""
        if not self._apply(key.account_id, change.order, change.fill):
            self._log.info("order_change_unmatched", broker_order_id=change.order.broker_order_id)
            self._unmatched.append((key, change))

    def _apply_unmatched(self) -> None:
        """More is known now: what came too early may have its order."""
        waiting, self._unmatched = self._unmatched, deque(maxlen=_UNMATCHED)
        for key, change in waiting:
            self.apply_change(key, change)

    def _apply(self, account_id: str, told: ExchangeOrder, fill: Fill | None = None) -> bool:
        order_id = self._order_id_of(account_id, told)
        if order_id is None:
            return False
        self._by_broker_id[account_id, told.broker_order_id] = order_id
        entry = self._entries[order_id]
        entry.taken = True
        entry.learn(told)
        self._compare_terms(entry, told)
        self._advance(entry, told, fill)
        return True

    def _compare_terms(self, entry: _TrackedOrder, told: ExchangeOrder) -> None:
        """Tells of a changed order, whoever asked for the change and whether its answer came or not. The
        books take only what was asked for, so a list that is behind changes nothing."""
        order = entry.order
        quantity, price = entry.terms or (order.quantity, order.price)
        smaller = 0 < told.quantity < quantity
        other = price is not None and told.price is not None and told.price != price
        if not smaller and not other:
            return
        entry.terms = (told.quantity, told.price)
        self._add_event(
            OrderEvent(
                event_id=f"{order.order_id}:terms:{told.quantity}:{told.price}:{wall_ms()}",
                order_id=order.order_id,
                user_id=order.user_id,
                epoch=self._epoch,
                state=OrderState.PART_FILLED if told.fills else OrderState.SUBMITTED,
                at_ms=wall_ms(),
                broker_order_id=told.broker_order_id,
                reason=f"the broker has it with quantity {told.quantity}, price {told.price}",
                quantity=told.quantity,
                price=told.price,
            )
        )

    def _order_id_of(self, account_id: str, told: ExchangeOrder) -> str | None:
        order_id = self._by_broker_id.get((account_id, told.broker_order_id))
        if order_id is not None or not told.tag:
            return order_id
        order_id = self._by_tag.get((account_id, told.tag))
        if order_id is None:
            return None
        entry = self._entries[order_id]
        # No tag of ours comes again, but somebody else's order may have it. (The symbol may differ: a rolling
        # code stands for a real one.)
        same = entry.order.side is told.side and told.quantity <= entry.order.quantity
        return order_id if same and entry.outcome.broker_order_id in (None, told.broker_order_id) else None

    def _advance(self, entry: _TrackedOrder, told: ExchangeOrder, fill: Fill | None = None) -> None:
        """Tells the fills, each with what was filled until then, and the state without a fill."""
        fills = list(told.fills)
        if fill is not None and all(fill.fill_id != known.fill_id for known in fills):
            fills.append(fill)
        filled = 0
        for number, known in enumerate(fills, 1):
            filled += known.quantity
            last = number == len(fills)
            whole = filled >= told.quantity
            state = OrderState.FILLED if whole else OrderState.PART_FILLED
            self._emit(
                entry,
                f"fill:{known.fill_id}",
                state=told.state if last and told.state in FINAL_ORDER_STATES else state,
                fill=known,
                filled=filled,
                price=average_fill_price(fills[:number]),
                broker_order_id=told.broker_order_id,
            )
        # Filled without a further fill: an order that was reduced to what it had.
        told_already = told.state is OrderState.FILLED and entry.told_filled
        if (told.state is OrderState.SUBMITTED or told.state in FINAL_ORDER_STATES) and not told_already:
            self._emit(
                entry,
                told.state.value,
                state=told.state,
                filled=filled,
                price=average_fill_price(fills),
                broker_order_id=told.broker_order_id,
                reason=told.reason,
            )

    def _emit(
        self,
        entry: _TrackedOrder,
        what: str,
        *,
        state: OrderState,
        fill: Fill | None = None,
        filled: int = 0,
        price: Decimal | None = None,
        broker_order_id: str | None = None,
        reason: str | None = None,
    ) -> None:
        event_id = f"{entry.order.order_id}:{what}"
        if event_id in self._told:
            return
        self._told[event_id] = None
        entry.told_filled = entry.told_filled or state is OrderState.FILLED
        if len(self._told) > _REMEMBERED:
            self._told.popitem(last=False)
        self._add_event(
            OrderEvent(
                event_id=event_id,
                order_id=entry.order.order_id,
                user_id=entry.order.user_id,
                epoch=self._epoch,
                state=state,
                at_ms=wall_ms(),
                broker_order_id=broker_order_id or entry.outcome.broker_order_id,
                fill=fill,
                filled_quantity=filled,
                average_price=price,
                reason=reason,
            )
        )

    def _remember(
        self, order: PlaceOrder, outcome: OrderOutcome, failure: Failure | None = None
    ) -> _TrackedOrder:
        entry = self._entries[order.order_id] = _TrackedOrder(order, outcome, failure)
        if len(self._entries) > _REMEMBERED:
            forgotten, old = self._entries.popitem(last=False)
            if self._by_tag.get((old.order.account_id, old.order.tag)) == forgotten:
                del self._by_tag[old.order.account_id, old.order.tag]
            if old.outcome.broker_order_id is not None:
                self._by_broker_id.pop((old.order.account_id, old.outcome.broker_order_id), None)
        return entry


def average_fill_price(fills: list[Fill]) -> Decimal | None:
    """Average price of the fills, weighted by their quantities; None without fills."""
    quantity = sum(fill.quantity for fill in fills)
    if quantity <= 0:
        return None
    if len({fill.price for fill in fills}) == 1:
        return fills[0].price
    total = sum((fill.price * fill.quantity for fill in fills), Decimal(0))
    return (total / quantity).quantize(_PRECISION)


def order_outcome_of(order_id: str, told: ExchangeOrder) -> OrderOutcome:
    """What the broker's view of an order means for our caller."""
    return OrderOutcome(
        order_id=order_id,
        state=told.state,
        broker_order_id=told.broker_order_id,
        filled_quantity=sum(fill.quantity for fill in told.fills),
        average_price=average_fill_price(told.fills),
        reason=told.reason,
    )
