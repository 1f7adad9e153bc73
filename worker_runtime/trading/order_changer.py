"""Cancels and changes working orders: at most one call, and always an answer.

The answer says what the call did; the order's further life follows from the broker's events and
lists.
"""

from worker_runtime.brokers.port import Broker
from worker_runtime.protocol.broker_record import BrokerRecord, QuantityChange
from worker_runtime.protocol.broker_reports import BrokerOrder, OrderChanged
from worker_runtime.protocol.errors import BerthError, OrderRejected, OrderTermsRule, OutcomeUnknown
from worker_runtime.protocol.installed_brokers import installed_brokers
from worker_runtime.protocol.messages import FINAL_ORDER_STATES, Failure, OrderOutcome
from worker_runtime.protocol.requests import CancelOrder, ReplaceOrder
from worker_runtime.trading.broker_calls import BrokerCalls
from worker_runtime.trading.order_submitter import check_price_bounds, flush_and_check_switch
from worker_runtime.trading.order_tracker import OrderTracker, order_outcome_of
from worker_runtime.trading.queue_item import QueueItem
from worker_runtime.trading.rate_limiter import CallKind
from worker_runtime.trading.send_buffer import SendBuffer


class OrderChanger:
    """Carries out `CancelOrder` and `ReplaceOrder`."""

    def __init__(
        self, broker_calls: BrokerCalls, tracker: OrderTracker, send_buffer: SendBuffer
    ) -> None:
        self._broker_calls = broker_calls
        self._tracker = tracker
        self._send_buffer = send_buffer

    def change_order(
        self, request: CancelOrder | ReplaceOrder, item: QueueItem
    ) -> tuple[OrderOutcome | None, Failure | None]:
        """Returns the order after the call, or what is known of it, and the call's failure."""
        try:
            changed = self._change(request, item)
        except BerthError as error:
            known = self._tracker.known_outcome(request.order_id)
            return known.outcome if known else None, Failure.of(error)
        key = self._broker_calls.session(request.account_id).account.key
        self._tracker.apply_change(key, OrderChanged(event_id="", order=changed))
        return order_outcome_of(request.order_id, changed), None

    def _change(self, request: CancelOrder | ReplaceOrder, item: QueueItem) -> BrokerOrder:
        # Under another generation Valkey has lost data, and a first copy of this change may have
        # been executed. Cancelling twice does no harm.
        if isinstance(request, ReplaceOrder) and request.generation != item.generation:
            raise OutcomeUnknown("the change was queued under another generation of Valkey")
        broker = self._broker_calls.ensure_session(request.account_id, item, listed=False)
        if isinstance(request, ReplaceOrder) and request.quantity is not None:
            key = self._broker_calls.session(request.account_id).account.key
            if (plugin := installed_brokers().get(key.broker)) is not None:
                check_quantity_change(plugin.record)
        order_id = self._broker_order_id(request, broker, item)
        if isinstance(request, ReplaceOrder) and request.price is not None:
            check_price_bounds(request, broker)
        shrinks = isinstance(request, ReplaceOrder) and request.quantity is not None
        queries = broker.queries_before_change(order_id, quantity=shrinks)
        kind = CallKind.QUERY_AND_CHANGE if queries else CallKind.ORDER
        self._broker_calls.spend_budget(request.account_id, kind, item)
        # A new price is checked like that of a new order.
        if isinstance(request, ReplaceOrder) and request.price is not None:
            calls, buffer = self._broker_calls, self._send_buffer
            flush_and_check_switch(request, item, kind, broker_calls=calls, send_buffer=buffer)

        def call(timeout: float) -> BrokerOrder:
            if isinstance(request, CancelOrder):
                return broker.cancel(order_id, timeout)
            return broker.replace(
                order_id, request.quantity, request.price, timeout, request.confirmed
            )

        return self._broker_calls.call_once(request.account_id, item, call)

    def _broker_order_id(
        self, request: CancelOrder | ReplaceOrder, broker: Broker, item: QueueItem
    ) -> str:
        """Returns the broker's id of the order, from its list if it is not known.

        Raises `OrderRejected`.
        """
        known = request.broker_order_id or self._tracker.broker_id_of(request.order_id)
        if known is not None:
            return known
        listed = self._broker_calls.query(request.account_id, item, broker.orders).orders
        self._tracker.reconcile_list(
            self._broker_calls.session(request.account_id).account.key, listed
        )
        known = self._tracker.broker_id_of(request.order_id)
        if known is not None:
            return known
        working = [order for order in listed if order.state not in FINAL_ORDER_STATES]
        matches = [
            order.broker_order_id for order in working if order.tag and order.tag == request.tag
        ]
        if len(matches) != 1:
            raise OrderRejected("the broker lists no such working order; nothing was sent")
        return matches[0]


def check_quantity_change(record: BrokerRecord) -> None:
    """Raises `OrderTermsRule` if the broker's record says that quantities cannot be changed."""
    if record.quantity_change is QuantityChange.UNSUPPORTED:
        raise OrderTermsRule(
            f"{record.title} does not change quantities. Cancel the order and place another one."
        )
