"""Cancels and changes of working orders: at most one call, and an answer in any case.

What becomes of the order follows from the broker's events and lists; the answer says what the call did.
"""

from __future__ import annotations

from worker_runtime.brokers.port import Broker
from worker_runtime.protocol.errors import BerthError, OrderRejected, OutcomeUnknown
from worker_runtime.protocol.exchange import ExchangeOrder, OrderChanged
from worker_runtime.protocol.messages import FINAL_ORDER_STATES, Failure, OrderOutcome
from worker_runtime.protocol.requests import CancelOrder, ReplaceOrder
from worker_runtime.session.queue_reader import QueueItem
from worker_runtime.trading.broker_calls import BrokerCalls
from worker_runtime.trading.order_tracker import OrderTracker, order_outcome_of
from worker_runtime.trading.rate_limiter import CallKind


class OrderChanger:
    """Carries out `CancelOrder` and `ReplaceOrder`."""

    def __init__(self, broker_calls: BrokerCalls, tracker: OrderTracker) -> None:
        self._broker_calls = broker_calls
        self._tracker = tracker

    def change_order(
        self, request: CancelOrder | ReplaceOrder, item: QueueItem
    ) -> tuple[OrderOutcome | None, Failure | None]:
        """The order after the call, or what is known of it, with the failure of the call."""
        try:
            told = self._change(request, item)
        except BerthError as error:
            known = self._tracker.known_outcome(request.order_id)
            return known[0] if known else None, Failure.of(error)
        key = self._broker_calls.key_of(request.account_id)
        self._tracker.apply_change(key, OrderChanged(event_id="", order=told))
        return order_outcome_of(request.order_id, told), None

    def _change(self, request: CancelOrder | ReplaceOrder, item: QueueItem) -> ExchangeOrder:
        # With another generation Valkey has lost data, and the first copy of this may have been executed. An
        # order can be taken back twice without harm.
        if isinstance(request, ReplaceOrder) and request.generation != item.generation:
            raise OutcomeUnknown("the change was queued under another generation of Valkey")
        broker = self._broker_calls.ensure_session(request.account_id, item, listed=False)
        order_id = self._broker_order_id(request, broker, item)
        looks = broker.queries_before_change(order_id)
        self._broker_calls.spend_budget(
            request.account_id, CallKind.QUERY_AND_CHANGE if looks else CallKind.ORDER, item
        )

        def call(timeout: float) -> ExchangeOrder:
            if isinstance(request, CancelOrder):
                return broker.cancel(order_id, timeout)
            return broker.replace(order_id, request.quantity, request.price, timeout)

        return self._broker_calls.call_once(request.account_id, item, call)

    def _broker_order_id(self, request: CancelOrder | ReplaceOrder, broker: Broker, item: QueueItem) -> str:
        """The broker's id of the order, from its list if nobody knows it; raises `OrderRejected`."""
        known = request.broker_order_id or self._tracker.broker_id_of(request.order_id)
        if known is not None:
            return known
        listed = self._broker_calls.query(request.account_id, item, broker.orders).orders
        self._tracker.reconcile_list(self._broker_calls.key_of(request.account_id), listed)
        known = self._tracker.broker_id_of(request.order_id)
        if known is not None:
            return known
        working = [order for order in listed if order.state not in FINAL_ORDER_STATES]
        found = [order.broker_order_id for order in working if order.tag and order.tag == request.tag]
        if len(found) != 1:
            raise OrderRejected("the broker lists no such working order; nothing was sent")
        return found[0]
