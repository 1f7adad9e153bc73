"""What this session knows of the orders it has taken, and the events that follow from it.

The broker tells of the same thing more than once: `place` returns the fills so far, and each comes again
as an `OrderChanged`, perhaps before `place` returns, perhaps twice. Every event has an id that follows
from what happened, and each id is told once.
"""

from __future__ import annotations

from collections import OrderedDict, deque
from collections.abc import Callable
from dataclasses import dataclass
from decimal import Decimal

from worker_runtime.boottime import wall_ms
from worker_runtime.brokers.port import ConnectionKey
from worker_runtime.log import Log
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


@dataclass(slots=True)
class _Entry:
    order: PlaceOrder
    outcome: OrderOutcome
    failure: Failure | None = None


class Ledger:
    """Orders by our id, by the broker's id and by their tag."""

    def __init__(self, epoch: int, tell: Callable[[OrderEvent], None], log: Log) -> None:
        self._epoch = epoch
        self._tell = tell
        self._log = log
        self._entries: OrderedDict[str, _Entry] = OrderedDict()
        self._by_broker_id: dict[tuple[str, str], str] = {}
        self._by_tag: dict[tuple[str, str], str] = {}
        self._told: OrderedDict[str, None] = OrderedDict()
        self._unmatched: deque[tuple[ConnectionKey, OrderChanged]] = deque(maxlen=_UNMATCHED)

    def answer_of(self, order_id: str) -> tuple[OrderOutcome, Failure | None] | None:
        """What is known of an order that this session has taken before; None if it has not."""
        entry = self._entries.get(order_id)
        return (entry.outcome, entry.failure) if entry else None

    def submitting(self, order: PlaceOrder) -> None:
        """To be called right before the submission: from here on the id is never submitted again."""
        unknown = OrderOutcome(order_id=order.order_id, state=OrderState.UNKNOWN)
        self._remember(order, unknown, Failure.of(OutcomeUnknown()))
        self._by_tag[order.account_id, order.tag] = order.order_id

    def settled(self, order: PlaceOrder, outcome: OrderOutcome, failure: Failure) -> None:
        """Notes an outcome that did not come from the broker's answer."""
        self._remember(order, outcome, failure)

    def placed(self, order: PlaceOrder, placed: ExchangeOrder) -> OrderOutcome:
        """Notes the broker's answer to a submission and tells its events; returns the outcome."""
        entry = self._remember(order, outcome_of(order.order_id, placed))
        self._by_broker_id[order.account_id, placed.broker_order_id] = order.order_id
        if placed.state not in (OrderState.REJECTED, OrderState.UNKNOWN):
            self._emit(entry, "submitted", state=OrderState.SUBMITTED)
        self._advance(entry, placed)
        waiting, self._unmatched = self._unmatched, deque(maxlen=_UNMATCHED)
        for key, change in waiting:
            self.changed(key, change)
        return entry.outcome

    def changed(self, key: ConnectionKey, change: OrderChanged) -> None:
        """Takes in what the broker reports of an order."""
        account_id, told = key.account_id, change.order
        order_id = self._by_broker_id.get((account_id, told.broker_order_id))
        if order_id is None:
            order_id = self._by_tag.get((account_id, told.tag)) if told.tag else None
            if order_id is not None:
                entry = self._entries[order_id]
                if entry.outcome.broker_order_id not in (None, told.broker_order_id):
                    order_id = None  # a tag used again
        if order_id is None:
            self._log.info("order_change_unmatched", broker_order_id=told.broker_order_id)
            self._unmatched.append((key, change))
            return
        self._by_broker_id[account_id, told.broker_order_id] = order_id
        entry = self._entries[order_id]
        late = sum(fill.quantity for fill in told.fills) < entry.outcome.filled_quantity
        if not late and entry.outcome.state not in FINAL_ORDER_STATES:
            entry.outcome = outcome_of(order_id, told)
            entry.failure = None
        self._advance(entry, told, change.fill)

    def _advance(self, entry: _Entry, told: ExchangeOrder, fill: Fill | None = None) -> None:
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
                price=average(fills[:number]),
                broker_order_id=told.broker_order_id,
            )
        if told.state in (
            OrderState.SUBMITTED,
            OrderState.CANCELLED,
            OrderState.REJECTED,
            OrderState.EXPIRED,
        ):
            self._emit(
                entry,
                told.state.value,
                state=told.state,
                filled=filled,
                price=average(fills),
                broker_order_id=told.broker_order_id,
                reason=told.reason,
            )

    def _emit(
        self,
        entry: _Entry,
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
        if len(self._told) > _REMEMBERED:
            self._told.popitem(last=False)
        self._tell(
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

    def _remember(self, order: PlaceOrder, outcome: OrderOutcome, failure: Failure | None = None) -> _Entry:
        entry = self._entries[order.order_id] = _Entry(order, outcome, failure)
        if len(self._entries) > _REMEMBERED:
            forgotten, old = self._entries.popitem(last=False)
            if self._by_tag.get((old.order.account_id, old.order.tag)) == forgotten:
                del self._by_tag[old.order.account_id, old.order.tag]
            if old.outcome.broker_order_id is not None:
                self._by_broker_id.pop((old.order.account_id, old.outcome.broker_order_id), None)
        return entry


def average(fills: list[Fill]) -> Decimal | None:
    """Average price of the fills, weighted by their quantities; None without fills."""
    quantity = sum(fill.quantity for fill in fills)
    if quantity <= 0:
        return None
    if len({fill.price for fill in fills}) == 1:
        return fills[0].price
    total = sum((fill.price * fill.quantity for fill in fills), Decimal(0))
    return (total / quantity).quantize(_PRECISION)


def outcome_of(order_id: str, told: ExchangeOrder) -> OrderOutcome:
    """What the broker's view of an order means for our caller."""
    return OrderOutcome(
        order_id=order_id,
        state=told.state,
        broker_order_id=told.broker_order_id,
        filled_quantity=sum(fill.quantity for fill in told.fills),
        average_price=average(told.fills),
        reason=told.reason,
    )
