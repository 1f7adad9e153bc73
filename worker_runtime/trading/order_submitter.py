"""Submits one order to its broker: at most once, and always with an outcome.

Invariants: *submit-once* (nothing here repeats a submission; what may have reached the broker is
unknown), *nothing-lost* (the journal entry and the event SUBMITTING are in Valkey before the broker
is called).
"""

import time
from collections.abc import Iterable
from dataclasses import KW_ONLY, dataclass

from worker_runtime.brokers.port import Broker, ConnectionKey
from worker_runtime.process.clock import NS_PER_MS, NS_PER_S, wall_ms
from worker_runtime.process.log import Log
from worker_runtime.process.shared_state import SharedState
from worker_runtime.protocol.broker_record import terms_of
from worker_runtime.protocol.broker_reports import BrokerOrder
from worker_runtime.protocol.contract_codes import may_be_same_contract
from worker_runtime.protocol.errors import (
    AccountBlocked,
    BerthError,
    BrokerMaintenance,
    BrokerUnreachable,
    DeadlineExceeded,
    LeaseLost,
    LoginLimited,
    NotionalLimit,
    OutcomeUnknown,
    PriceBand,
    ReducingOnly,
    SymbolBlocked,
    TradingHalted,
    WorkerUnavailable,
)
from worker_runtime.protocol.installed_brokers import installed_brokers, market_of
from worker_runtime.protocol.messages import (
    Failure,
    OrderEvent,
    OrderOutcome,
    OrderState,
    PlaceOrder,
)
from worker_runtime.protocol.requests import ReplaceOrder, SwitchState, UserSwitch
from worker_runtime.trading.broker_calls import BrokerCalls
from worker_runtime.trading.order_tracker import OrderResult, OrderTracker
from worker_runtime.trading.queue_item import QueueItem
from worker_runtime.trading.rate_limiter import CallKind, CountUnavailable
from worker_runtime.trading.send_buffer import SendBuffer

#: Errors after which a broker session may be back in a moment. (Maintenance takes longer.)
_TRANSIENT_ERRORS = (BrokerUnreachable, LoginLimited, LeaseLost)
#: Nanoseconds by which the clocks of two Valkey servers may differ: one sets a deadline, the other
#: reads it.
_MAX_CLOCK_SKEW_NS = NS_PER_S
#: Seconds that a popped order waits until a new Valkey server has the switch. The watcher writes it
#: within two seconds.
SWITCH_TIMEOUT_S = 10.0
#: Nanoseconds by which an order's time of acceptance, which is calculated from its deadline, may be
#: off. Deadline, lifetime and remaining time are each rounded to milliseconds: 10 ms covers that.
_DEADLINE_ROUNDING_NS = NS_PER_S // 100
#: Nanoseconds after which PostgreSQL knows of an unknown outcome: the recorder needs milliseconds,
#: the API's `OutcomeWriter` 2 to 4 s. Must be shorter than the time after which a broker's list
#: proves that it lacks the order (`absent_after`).
_RECORDED_AFTER_NS = 5 * NS_PER_S


class OrderPostponed(Exception):
    """The order was not begun and can wait in its queue until there is a broker session, a current
    switch or a Valkey that counts."""

    def __init__(self, order: PlaceOrder) -> None:
        super().__init__(order.order_id)
        self.order = order


def check_switch(switch: UserSwitch, order: PlaceOrder | ReplaceOrder) -> None:
    """Raises `TradingHalted` or `ReducingOnly`.

    Cancels, smaller quantities and queries pass every switch.
    """
    state = switch.of(order.account_id)
    if state is SwitchState.HALTED:
        raise TradingHalted
    if state is SwitchState.REDUCING and not order.reduce_only:
        raise ReducingOnly


def check_price_bounds(request: PlaceOrder | ReplaceOrder, broker: Broker) -> None:
    """Raises `PriceBand` or `NotionalLimit`. Without a reference price nothing is refused."""
    most_price = request.most_price if isinstance(request, PlaceOrder) else None
    if request.price_band is None and most_price is None:
        return
    reference = broker.reference_price(request.symbol)
    if not reference:
        return
    if request.price is None:
        if most_price is not None and reference > most_price:
            raise NotionalLimit(
                f"At the reference price {reference}, the order is above the account's limit. "
                "Reduce its quantity."
            )
    elif (
        request.price_band is not None
        and abs(request.price - reference) > reference * request.price_band
    ):
        raise PriceBand(
            f"Price {request.price} is more than {request.price_band:.1%} away from the reference "
            f"price {reference}."
        )


def check_terms(order: PlaceOrder, key: ConnectionKey) -> None:
    """Raises `PriceTypeRule` or `OrderTermsRule` for terms that are not in this worker's record of
    the broker, and `BrokerNotInstalled` for a market that is not in it, for example because the API
    has a newer record. Sends nothing, asks nobody."""
    if key.broker not in installed_brokers():
        return  # then there is no adapter either, and so no session to place orders with
    _, market = market_of(key.broker, key.broker_type)
    refusal = market.refusal(*terms_of(order))
    if refusal is not None:
        raise refusal


def flush_and_check_switch(
    request: PlaceOrder | ReplaceOrder,
    item: QueueItem,
    kind: CallKind,
    *,
    broker_calls: BrokerCalls,
    send_buffer: SendBuffer,
    wait: float = SWITCH_TIMEOUT_S,
) -> None:
    """Flushes the send buffer (an order's journal entry) and reads the switch, in one round trip.

    Call it right before the broker call. Raises the error that forbids the call. `wait`: seconds to
    wait for a switch that is stale.
    """
    until = time.monotonic() + wait
    while True:
        send_buffer.read_switch()
        if not send_buffer.flush():
            raise WorkerUnavailable(
                "The request was not sent to the broker, because Valkey could not record it. Try "
                "again with a new id."
            )
        if isinstance(request, PlaceOrder) and not send_buffer.journaled:
            raise OutcomeUnknown(
                "A worker had already begun to submit this order. Berth asks the broker for "
                "its state."
            )
        if send_buffer.switch_is_stale:
            if time.monotonic() >= until:
                raise WorkerUnavailable(
                    "The order was not submitted, because Valkey has restarted and does not yet "
                    "know whether trading is allowed. Try again with a new id."
                )
            broker_calls.await_next_check(item)
            continue
        check_switch(send_buffer.switch, request)  # once more: a reconnect may have taken seconds
        if broker_calls.grant_is_fresh:
            return
        # Valkey took long: the grant is void, and the order may be too late.
        broker_calls.call_timeout(item)
        broker_calls.spend_budget(request.account_id, kind, item)


class UnknownOutcomes:
    """Tracks orders of unknown outcome, and refuses the queued orders that they block.

    PostgreSQL refuses new orders in a symbol with an unknown order, but orders that were in the
    queue by then have passed that check. The worker refuses these, by the same rule and with the
    same code. It refuses no order that PostgreSQL accepted after it had learned of the unknown
    outcome: only PostgreSQL knows whether a listing or an operator has settled it since.
    """

    def __init__(self, tracker: OrderTracker) -> None:
        self._tracker = tracker
        #: By order id, with the CLOCK_MONOTONIC ns at which the outcome became unknown.
        self._unknown: dict[str, tuple[PlaceOrder, int]] = {}

    def load_open_orders(self, orders: Iterable[PlaceOrder]) -> None:
        """Adds the orders that a former session began and whose outcome our books do not have."""
        for order in orders:
            if order.begun and order.broker_order_id is None:
                self.add(order)

    def add(self, order: PlaceOrder) -> None:
        self._unknown.setdefault(order.order_id, (order, time.monotonic_ns()))

    def check_order(self, order: PlaceOrder, item: QueueItem) -> None:
        """Raises `SymbolBlocked` if an earlier order of unknown outcome blocks this one."""
        if order.unknown_blocks == "off":
            return
        accepted = item.deadline_ns - order.lifetime_ms * NS_PER_MS
        for order_id, (other, since) in list(self._unknown.items()):
            known = self._tracker.known_outcome(order_id)
            if known is None or known.outcome.state is not OrderState.UNKNOWN:
                del self._unknown[order_id]  # the broker has reported it since
            elif accepted < since + _RECORDED_AFTER_NS and _blocks(other, order):
                raise SymbolBlocked(
                    f"the outcome of order {order_id} in this account is unknown; Berth asks "
                    "the broker"
                )


def _blocks(other: PlaceOrder, order: PlaceOrder) -> bool:
    same = other.account_id == order.account_id
    return same and (
        order.unknown_blocks == "account" or may_be_same_contract(other.symbol, order.symbol)
    )


@dataclass(eq=False, repr=False)
class OrderSubmitter:
    """Submits orders for one user."""

    broker_calls: BrokerCalls
    tracker: OrderTracker
    unknown_outcomes: UnknownOutcomes
    _: KW_ONLY
    send_buffer: SendBuffer
    shared_state: SharedState
    log: Log
    switch_wait: float = SWITCH_TIMEOUT_S

    def has_outcome_of(self, order_id: str) -> bool:
        """Returns True if this session has an outcome of the order."""
        return self.tracker.known_outcome(order_id) is not None

    def was_open_or_begun(self, order_id: str) -> bool:
        """Returns True if our books had the order as open, or this worker began to submit it."""
        return order_id in self.tracker or order_id in self.shared_state.submissions

    def submit_order(self, order: PlaceOrder, item: QueueItem) -> OrderResult:
        """Submits the order unless something forbids it. Raises nothing but `OrderPostponed`."""
        known = self.tracker.known_outcome(order.order_id)
        if known is not None:  # submit-once: this session or a former one has taken it
            return known
        try:
            return self._check_and_submit(order, item)
        except OrderPostponed:
            raise
        except BerthError as error:
            reason = error
        except Exception as error:  # the boundary of one request: it is answered whatever happens
            self.log.crash("order_crashed", error)
            may_be_submitted = self.tracker.known_outcome(order.order_id) is not None
            reason = (
                OutcomeUnknown("the worker failed")
                if may_be_submitted
                else BerthError("the worker failed")
            )
        state = OrderState.REJECTED
        if isinstance(reason, OutcomeUnknown):
            state = OrderState.UNKNOWN
        elif isinstance(reason, DeadlineExceeded):
            state = OrderState.EXPIRED
        return self._record_outcome(order, state, reason)

    def _check_and_submit(self, order: PlaceOrder, item: QueueItem) -> OrderResult:
        """Submits the order after all checks, or returns the outcome that a new session's list of
        orders has of it. Raises what forbids the order, or `OrderPostponed`."""
        if order.order_id in self.shared_state.submissions:
            raise OutcomeUnknown("an earlier session process had begun to submit the order")
        self._check_item(order, item)
        broker = self._ensure_session(order, item)
        check_terms(order, self.broker_calls.session(order.account_id).account.key)
        self._check_books(order, item)
        known = self.tracker.known_outcome(order.order_id)
        if known is not None:
            return known
        # After the list of orders was read, because it may have settled some unknown outcomes.
        self.unknown_outcomes.check_order(order, item)
        check_price_bounds(order, broker)
        self._spend_budget(order, item)
        outcome = self._submit(order, item, broker)
        if outcome.state is OrderState.UNKNOWN:
            self.unknown_outcomes.add(order)
        return OrderResult(outcome)

    def record_leftover(self, order: PlaceOrder) -> OrderResult:
        """Records the outcome of an order that a former worker popped and left. It may have been
        submitted, so it is unknown unless the broker's list has said otherwise."""
        known = self.tracker.known_outcome(order.order_id)
        if known is not None and known.outcome.state is not OrderState.UNKNOWN:
            return known
        return self._record_outcome(
            order,
            OrderState.UNKNOWN,
            OutcomeUnknown("the worker that had taken the order was lost"),
        )

    def _check_item(self, order: PlaceOrder, item: QueueItem) -> None:
        """Raises what forbids the order as it was popped, or `OrderPostponed` while the Valkey that
        it came from has no current switch."""
        if self._may_be_in_older_copy(order, item):
            raise OutcomeUnknown(
                "Valkey was replaced and may hold old data. An earlier worker may have submitted "
                "this order. Berth asks the broker."
            )
        if item.switch_is_stale:
            if item.seconds_left() <= 0:
                raise DeadlineExceeded
            self.log.warning(
                "order_postponed", order_id=order.order_id, code="SWITCH_OF_ANOTHER_SERVER"
            )
            raise OrderPostponed(order)
        check_switch(item.switch, order)

    def _may_be_in_older_copy(self, order: PlaceOrder, item: QueueItem) -> bool:
        """Returns True if an earlier worker of this user may have executed the order already.

        A server that was promoted or restarted may have lost its last writes, among them the pop of
        the order. This worker knows what it has submitted itself. The previous worker has ended
        and cannot be asked.
        """
        if not order.lifetime_ms or self.shared_state.epoch <= 1:
            return False
        accepted = item.deadline_ns - order.lifetime_ms * NS_PER_MS
        before = accepted < self.shared_state.assigned_ns + _DEADLINE_ROUNDING_NS
        return before and accepted < item.server_since_ns + _MAX_CLOCK_SKEW_NS

    def _ensure_session(self, order: PlaceOrder, item: QueueItem) -> Broker:
        """Returns a broker session for the order.

        Raises `OrderPostponed` if the order should wait for one. If another account of the user has
        a session, its orders would wait behind this one, so this raises the login's error instead.
        """
        try:
            return self.broker_calls.ensure_session(order.account_id, item)
        except BrokerMaintenance:
            raise
        except _TRANSIENT_ERRORS as error:
            if item.seconds_left() > 0 and self.broker_calls.has_other_session(order.account_id):
                raise
            raise self._postponement(order, item, error) from None
        except CountUnavailable as error:
            raise self._postponement(order, item, error) from None

    def _check_books(self, order: PlaceOrder, item: QueueItem) -> None:
        """Raises `OrderPostponed` while the account waits for its first comparison of books, and
        `AccountBlocked` if a difference was found after the order was accepted. PostgreSQL refuses
        later orders until a person has looked."""
        session = self.broker_calls.session(order.account_id)
        if session.books_awaited:
            raise self._postponement(order, item, AccountBlocked("the books are not compared yet"))
        if item.deadline_ns - order.lifetime_ms * NS_PER_MS < session.differs_since:
            raise AccountBlocked(AccountBlocked.title())

    def _spend_budget(self, order: PlaceOrder, item: QueueItem) -> None:
        """Waits for room within the broker's limits.

        Raises `OrderPostponed` while Valkey cannot count.
        """
        try:
            self.broker_calls.spend_budget(order.account_id, CallKind.ORDER, item)
        except CountUnavailable as error:
            raise self._postponement(order, item, error) from None

    def _postponement(self, order: PlaceOrder, item: QueueItem, error: BerthError) -> Exception:
        if item.seconds_left() <= 0:
            return DeadlineExceeded(
                f"The deadline passed while the order waited ({error.code}: {error.detail})."
            )
        self.log.warning("order_postponed", order_id=order.order_id, code=error.code)
        return OrderPostponed(order)

    def _submit(self, order: PlaceOrder, item: QueueItem, broker: Broker) -> OrderOutcome:
        """Journals the order and calls the broker. Raises `OutcomeUnknown` if the order may have
        reached it; any other `BerthError` means that it was not placed."""
        self.send_buffer.add_journal_entry(order.order_id)
        self._add_event(order, OrderState.SUBMITTING)
        flush_and_check_switch(
            order,
            item,
            CallKind.ORDER,
            broker_calls=self.broker_calls,
            send_buffer=self.send_buffer,
            wait=self.switch_wait,
        )

        def place(timeout: float) -> BrokerOrder:
            self.tracker.mark_submitting(order)
            self.shared_state.submissions.add(order.order_id)
            return broker.place(order, timeout)

        return self.tracker.record_placement(
            order, self.broker_calls.call_once(order.account_id, item, place)
        )

    def _record_outcome(
        self, order: PlaceOrder, state: OrderState, error: BerthError
    ) -> OrderResult:
        outcome = OrderOutcome(
            order_id=order.order_id, state=state, reason=f"{error.code}: {error.detail}"
        )
        failure = Failure.of(error)
        self.tracker.record_outcome(order, outcome, failure)
        if state is OrderState.UNKNOWN:
            self.unknown_outcomes.add(order)
        self._add_event(order, state, outcome.reason)
        return OrderResult(outcome, failure)

    def _add_event(self, order: PlaceOrder, state: OrderState, reason: str | None = None) -> None:
        self.send_buffer.add_event(
            OrderEvent(
                event_id=f"{order.order_id}:{state.value}",
                order_id=order.order_id,
                user_id=order.user_id,
                epoch=self.shared_state.epoch,
                state=state,
                at_ms=wall_ms(),
                reason=reason,
            )
        )
