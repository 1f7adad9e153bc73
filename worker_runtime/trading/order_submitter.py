"""Submits one order to its broker: at most once, and always with an outcome.

Invariants: *submit-once* (nothing here repeats a submission; what may have reached the broker is unknown),
*nothing-lost* (the journal entry and the event SUBMITTING are in Valkey before the broker is called).
"""

from __future__ import annotations

import re
import time
from collections.abc import Iterable

from worker_runtime.brokers.port import Broker
from worker_runtime.process.clock import NS_PER_MS, SECOND, wall_ms
from worker_runtime.process.log import Log
from worker_runtime.process.shared_state import SharedState
from worker_runtime.protocol.errors import (
    BerthError,
    BrokerMaintenance,
    BrokerUnreachable,
    DeadlineExceeded,
    LeaseLost,
    LoginLimited,
    OutcomeUnknown,
    ReducingOnly,
    SymbolBlocked,
    TradingHalted,
    WorkerUnavailable,
)
from worker_runtime.protocol.exchange import ExchangeOrder
from worker_runtime.protocol.messages import Failure, OrderEvent, OrderOutcome, OrderState, PlaceOrder
from worker_runtime.protocol.requests import SwitchState, UserSwitch
from worker_runtime.session.queue_reader import QueueItem
from worker_runtime.session.send_buffer import SendBuffer
from worker_runtime.trading.broker_calls import BrokerCalls
from worker_runtime.trading.order_tracker import OrderResult, OrderTracker
from worker_runtime.trading.rate_limiter import CallKind, CountUnavailable

#: Reasons for which there is no broker session now but may be one in a moment. (Maintenance takes longer.)
_PASSING_ERRORS = (BrokerUnreachable, LoginLimited, LeaseLost)
#: Nanoseconds by which the clocks of two Valkey servers may differ: one sets a deadline, the other reads it.
_CLOCK_DIFFERENCE = SECOND
#: Seconds that an order in hand waits until a new Valkey server knows who may trade. The watcher writes
#: the switch within two seconds.
SWITCH_WAIT = 10.0
#: Deadlines are whole milliseconds.
_ROUNDING = SECOND // 100
#: Nanoseconds after which PostgreSQL knows of an unknown outcome: the recorder needs milliseconds, an API
#: that waits writes it after 2 s. Shorter than the proof takes that the broker does not have the order.
_RECORDED_AFTER = 5 * SECOND
#: TAIFEX as Shioaji names it: the nearest month of a product, or the one after it (TXFR1, TXFR2).
_ROLLING = re.compile(r"[A-Z]{2}[A-Z0-9]R[12]")


class OrderPostponed(Exception):
    """Nothing of the order was begun, and it can wait in its queue until there is a broker session, a current
    switch or a Valkey that counts."""

    def __init__(self, order: PlaceOrder) -> None:
        super().__init__(order.order_id)
        self.order = order


def check_switch(switch: UserSwitch, order: PlaceOrder) -> None:
    """Raises `TradingHalted` or `ReducingOnly`. Cancels and queries pass every switch."""
    state = switch.of(order.account_id)
    if state is SwitchState.HALTED:
        raise TradingHalted
    if state is SwitchState.REDUCING and not order.reduce_only:
        raise ReducingOnly


class UnknownOutcomes:
    """One session's orders of unknown outcome, which block orders that were accepted before anybody knew of
    it.

    PostgreSQL refuses new orders in a symbol with an unknown order, but cannot refuse those that were in the
    queue by then: the worker does, by the same rule and under the same code. It leaves later orders alone,
    because only PostgreSQL knows when a listing or a person has settled the unknown one.
    """

    def __init__(self, tracker: OrderTracker) -> None:
        self._tracker = tracker
        #: By order id, with the CLOCK_MONOTONIC ns at which the outcome became unknown.
        self._unknown: dict[str, tuple[PlaceOrder, int]] = {}

    def load_open_orders(self, orders: Iterable[PlaceOrder]) -> None:
        """Adds orders of former sessions that were begun and of which our books do not know the outcome."""
        for order in orders:
            if order.begun and order.broker_order_id is None:
                self.add(order)

    def add(self, order: PlaceOrder) -> None:
        self._unknown.setdefault(order.order_id, (order, time.monotonic_ns()))

    def check_order(self, order: PlaceOrder, item: QueueItem) -> None:
        """Raises `SymbolBlocked` for an order that was accepted before an order in its way became unknown."""
        if order.unknown_blocks == "off":
            return
        accepted = item.deadline_ns - order.lifetime_ms * NS_PER_MS
        for order_id, (other, since) in list(self._unknown.items()):
            known = self._tracker.known_outcome(order_id)
            if known is None or known.outcome.state is not OrderState.UNKNOWN:
                del self._unknown[order_id]  # the broker has reported it since
            elif accepted < since + _RECORDED_AFTER and _blocks(other, order):
                raise SymbolBlocked(
                    f"the outcome of order {order_id} in this account is unknown; settle it first"
                )


def _blocks(other: PlaceOrder, order: PlaceOrder) -> bool:
    same = other.account_id == order.account_id
    return same and (order.unknown_blocks == "account" or may_be_same_contract(other.symbol, order.symbol))


def may_be_same_contract(one: str, other: str) -> bool:
    """Whether two symbols may name the same contract. Only the broker knows which contract of its product a
    rolling code stands for."""
    rolling = _ROLLING.fullmatch(one) or _ROLLING.fullmatch(other)
    return one == other or (rolling is not None and one[:3] == other[:3])


class OrderSubmitter:
    """Carries out `PlaceOrder` for one user."""

    def __init__(
        self,
        broker_calls: BrokerCalls,
        tracker: OrderTracker,
        unknown_outcomes: UnknownOutcomes,
        *,
        send_buffer: SendBuffer,
        shared_state: SharedState,
        log: Log,
        switch_wait: float = SWITCH_WAIT,
    ) -> None:
        self._broker_calls = broker_calls
        self._tracker = tracker
        self._unknown_outcomes = unknown_outcomes
        self._send_buffer = send_buffer
        self._shared_state = shared_state
        self._log = log
        self._switch_wait = switch_wait

    def submit_order(self, order: PlaceOrder, item: QueueItem) -> OrderResult:
        """Submits the order, unless something forbids it, and returns what became of it. Raises nothing but
        `OrderPostponed`."""
        known = self._tracker.known_outcome(order.order_id)
        if known is not None:  # submit-once: this session or a former one has taken it
            return known
        try:
            if order.order_id in self._shared_state.submissions:
                raise OutcomeUnknown("an earlier session process had begun to submit the order")
            self._check_item(order, item)
            broker = self._ensure_session(order, item)
            known = self._tracker.known_outcome(order.order_id)
            if known is not None:  # the new session's list of orders has it
                return known
            self._unknown_outcomes.check_order(order, item)  # after that list, which may have settled some
            self._spend_budget(order, item)
            outcome = self._submit(order, item, broker)
            if outcome.state is OrderState.UNKNOWN:
                self._unknown_outcomes.add(order)
            return OrderResult(outcome)
        except OrderPostponed:
            raise
        except BerthError as error:
            reason = error
        except Exception as error:  # the boundary of one request: it is answered whatever happens
            self._log.crash("order_crashed", error)
            taken = self._tracker.known_outcome(order.order_id) is not None
            reason = OutcomeUnknown("the worker failed") if taken else BerthError("the worker failed")
        state = OrderState.REJECTED
        if isinstance(reason, OutcomeUnknown):
            state = OrderState.UNKNOWN
        elif isinstance(reason, DeadlineExceeded):
            state = OrderState.EXPIRED
        return self._settle(order, state, reason)

    def settle_leftover(self, order: PlaceOrder) -> OrderResult:
        """The outcome of an order that a former worker popped and left. It may have been submitted, so it is
        unknown unless the broker's list has said otherwise."""
        known = self._tracker.known_outcome(order.order_id)
        if known is not None and known.outcome.state is not OrderState.UNKNOWN:
            return known
        return self._settle(
            order, OrderState.UNKNOWN, OutcomeUnknown("the worker that had taken the order was lost")
        )

    def _check_item(self, order: PlaceOrder, item: QueueItem) -> None:
        """Raises what forbids the order as it was popped, or `OrderPostponed` while the server that it came
        from does not know who may trade."""
        if order.generation != item.generation:
            # Valkey has lost data, or this is a lagging copy of it: an earlier copy of this request may have
            # been executed.
            raise OutcomeUnknown("the order was queued under another generation of Valkey")
        if self._may_be_a_copy(order, item):
            raise OutcomeUnknown(
                "the order was queued before this server of Valkey came, and before this worker did: the "
                "worker before it may have submitted it, and the queue may be an older copy"
            )
        if item.switch_is_stale:
            if item.seconds_left() <= 0:
                raise DeadlineExceeded
            self._log.warning("order_postponed", order_id=order.order_id, code="SWITCH_OF_ANOTHER_SERVER")
            raise OrderPostponed(order)
        check_switch(item.switch, order)

    def _may_be_a_copy(self, order: PlaceOrder, item: QueueItem) -> bool:
        """Whether an earlier worker of this user may have executed the order already.

        A server that was promoted or restarted may have lost its last writes, among them the pop of the
        order. This worker knows what it has submitted itself; its predecessor, which ended before the claim,
        does not say any more.
        """
        if not order.lifetime_ms or self._shared_state.epoch <= 1:
            return False
        accepted = item.deadline_ns - order.lifetime_ms * NS_PER_MS
        before = accepted < self._shared_state.assigned_ns + _ROUNDING
        return before and accepted < item.server_since_ns + _CLOCK_DIFFERENCE

    def _ensure_session(self, order: PlaceOrder, item: QueueItem) -> Broker:
        """A broker session for the order. Raises `OrderPostponed` if it is worth waiting for one, unless
        orders of other accounts, which have a session, would wait with it."""
        try:
            return self._broker_calls.ensure_session(order.account_id, item)
        except BrokerMaintenance:
            raise
        except _PASSING_ERRORS as error:
            if item.seconds_left() > 0 and self._broker_calls.has_other_session(order.account_id):
                raise
            raise self._postponed(order, item, error) from None
        except CountUnavailable as error:
            raise self._postponed(order, item, error) from None

    def _spend_budget(self, order: PlaceOrder, item: QueueItem) -> None:
        """Waits for room within the broker's limits. Raises `OrderPostponed` while Valkey cannot count."""
        try:
            self._broker_calls.spend_budget(order.account_id, CallKind.ORDER, item)
        except CountUnavailable as error:
            raise self._postponed(order, item, error) from None

    def _postponed(self, order: PlaceOrder, item: QueueItem, error: BerthError) -> Exception:
        if item.seconds_left() <= 0:
            return DeadlineExceeded(f"until then: {error.code}: {error.detail}")
        self._log.warning("order_postponed", order_id=order.order_id, code=error.code)
        return OrderPostponed(order)

    def _submit(self, order: PlaceOrder, item: QueueItem, broker: Broker) -> OrderOutcome:
        """Journals the order and calls the broker. Raises `OutcomeUnknown` if the order may have reached it;
        any other `BerthError` means that it was not placed."""
        until = time.monotonic() + self._switch_wait
        self._send_buffer.add_journal_entry(order.order_id)
        self._add_event(order, OrderState.SUBMITTING)
        while True:
            self._send_buffer.read_switch()
            if not self._send_buffer.flush():
                raise WorkerUnavailable("Valkey did not record the submission; it was not made")
            if not self._send_buffer.journaled:
                raise OutcomeUnknown("a submission of the order was begun before")
            if self._send_buffer.switch_is_stale:
                if time.monotonic() >= until:
                    raise WorkerUnavailable(
                        "this server of Valkey does not know who may trade yet; the submission was not made"
                    )
                self._broker_calls.pause(item)
                continue
            check_switch(self._send_buffer.switch, order)  # once more: a reconnect may have taken seconds
            if self._broker_calls.grant_is_fresh:
                break
            # Valkey took long: the grant is void, and the order may be too late.
            self._broker_calls.call_timeout(item)
            self._broker_calls.spend_budget(order.account_id, CallKind.ORDER, item)

        def place(timeout: float) -> ExchangeOrder:
            self._tracker.mark_submitting(order)
            self._shared_state.submissions.add(order.order_id)
            return broker.place(order, timeout)

        return self._tracker.record_placement(
            order, self._broker_calls.call_once(order.account_id, item, place)
        )

    def _settle(self, order: PlaceOrder, state: OrderState, error: BerthError) -> OrderResult:
        outcome = OrderOutcome(order_id=order.order_id, state=state, reason=f"{error.code}: {error.detail}")
        failure = Failure.of(error)
        self._tracker.record_outcome(order, outcome, failure)
        if state is OrderState.UNKNOWN:
            self._unknown_outcomes.add(order)
        self._add_event(order, state, outcome.reason)
        return OrderResult(outcome, failure)

    def _add_event(self, order: PlaceOrder, state: OrderState, reason: str | None = None) -> None:
        self._send_buffer.add_event(
            OrderEvent(
                event_id=f"{order.order_id}:{state.value}",
                order_id=order.order_id,
                user_id=order.user_id,
                epoch=self._shared_state.epoch,
                state=state,
                at_ms=wall_ms(),
                reason=reason,
            )
        )
