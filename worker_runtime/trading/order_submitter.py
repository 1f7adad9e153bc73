"""Executes one order: at most one submission, and always an outcome.

Invariants: *submit-once* (nothing here repeats a submission; what may have reached the broker is unknown),
*nothing-lost* (the journal and the event SUBMITTING are in Valkey before the broker is called).
"""

from __future__ import annotations

import time

from worker_runtime.brokers.port import Broker
from worker_runtime.process.clock import SECOND, wall_ms
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
    WorkerUnavailable,
)
from worker_runtime.protocol.exchange import ExchangeOrder
from worker_runtime.protocol.messages import Failure, OrderEvent, OrderOutcome, OrderState, PlaceOrder
from worker_runtime.session.queue_reader import QueueItem
from worker_runtime.session.send_buffer import SendBuffer
from worker_runtime.trading.broker_calls import BrokerCalls
from worker_runtime.trading.order_checks import UnknownOutcomes, check_switch
from worker_runtime.trading.order_tracker import OrderTracker
from worker_runtime.trading.rate_limiter import CallKind, CountUnavailable

#: Reasons for which there is no broker session now and may be one in a moment. (Maintenance takes its time.)
_PASSING_ERRORS = (BrokerUnreachable, LoginLimited, LeaseLost)
#: Nanoseconds by which the clocks of two Valkey servers may differ: a deadline is set by one and read by the
#: other.
_CLOCK_DIFFERENCE = SECOND
#: Seconds that an order in hand waits until a Valkey that has just come is told who may trade. The watcher
#: looks every two seconds.
SWITCH_PATIENCE = 10.0
#: Deadlines are whole milliseconds.
_ROUNDING = SECOND // 100


class OrderSubmitter:
    """Carries out `PlaceOrder` for one user."""

    def __init__(
        self,
        calls: BrokerCalls,
        ledger: OrderTracker,
        unsettled: UnknownOutcomes,
        *,
        outbox: SendBuffer,
        board: SharedState,
        log: Log,
        switch_patience: float = SWITCH_PATIENCE,
    ) -> None:
        self._calls = calls
        self._ledger = ledger
        self._unknown_outcomes = unsettled
        self._send_buffer = outbox
        self._shared_state = board
        self._log = log
        self._switch_patience = switch_patience

    def execute(self, order: PlaceOrder, piece: QueueItem) -> tuple[OrderOutcome, Failure | None] | None:
        """What became of it; None: there is time left and no broker session to be had, no switch that says
        anything or no Valkey that counts, and nothing was begun, so the order can wait in its queue. Never
        raises."""
        known = self._ledger.known_outcome(order.order_id)
        if known is not None:  # submit-once: it was taken before, by this session or a former one
            return known
        try:
            if order.order_id in self._shared_state.submissions:
                raise OutcomeUnknown("an earlier session process had begun to submit the order")
            if not self._admit(order, piece):
                return None
            broker = self._broker(order, piece)
            if broker is None:
                return None
            known = self._ledger.known_outcome(order.order_id)
            if known is not None:  # the wait for the session brought the broker's list, and it has the order
                return known
            self._unknown_outcomes.heed(
                order, piece
            )  # after the list, which may have settled what was unknown
            if not self._affords(order, piece):
                return None
            outcome = self._submit(order, piece, broker)
            if outcome.state is OrderState.UNKNOWN:
                self._unknown_outcomes.note(order)
            return outcome, None
        except BerthError as error:
            reason = error
        except Exception as error:  # the boundary of one request: it is answered whatever happens
            self._log.crash("order_crashed", error)
            taken = self._ledger.known_outcome(order.order_id) is not None
            reason = OutcomeUnknown("the worker failed") if taken else BerthError("the worker failed")
        state = OrderState.REJECTED
        if isinstance(reason, OutcomeUnknown):
            state = OrderState.UNKNOWN
        elif isinstance(reason, DeadlineExceeded):
            state = OrderState.EXPIRED
        return self._settle(order, state, reason), Failure.of(reason)

    def left_behind(self, order: PlaceOrder) -> tuple[OrderOutcome, Failure | None]:
        """An order that a former worker popped and left: it may have been submitted, or not.

        What the broker's list has said of it meanwhile is its outcome; else it is unknown.
        """
        known = self._ledger.known_outcome(order.order_id)
        if known is not None and known[0].state is not OrderState.UNKNOWN:
            return known
        error = OutcomeUnknown("the worker that had taken the order was lost")
        return self._settle(order, OrderState.UNKNOWN, error), Failure.of(error)

    def _admit(self, order: PlaceOrder, piece: QueueItem) -> bool:
        """Whether the order may go on as it was popped; false if it is to wait until the switch has been told
        to the server that it came from. Raises what forbids it."""
        if order.generation != piece.generation:
            # Another generation: Valkey has lost data, or this comes out of a lagging copy of it. Whether
            # an earlier copy of this request was executed cannot be known here.
            raise OutcomeUnknown("the order was queued under another generation of Valkey")
        if self._may_be_a_copy(order, piece):
            raise OutcomeUnknown(
                "the order was queued before this server of Valkey came, and before this worker did: the "
                "worker before it may have submitted it, and the queue may be an older copy"
            )
        if piece.unbound:
            if self._calls.remaining(piece) <= 0:
                raise DeadlineExceeded
            self._log.warning("order_postponed", order_id=order.order_id, code="SWITCH_OF_ANOTHER_SERVER")
            return False
        check_switch(piece.switch, order)
        return True

    def _may_be_a_copy(self, order: PlaceOrder, piece: QueueItem) -> bool:
        """Whether an earlier worker of this user may have executed the order already.

        A server that was promoted or restarted may have lost the last that it was told, and with it that the
        order was popped. This worker knows what it has submitted itself; its predecessor, which ended before
        the claim, tells nobody any more.
        """
        if not order.lifetime_ms or self._shared_state.epoch <= 1:
            return False
        accepted = piece.deadline_ns - order.lifetime_ms * SECOND // 1000
        before = accepted < self._shared_state.assigned_ns + _ROUNDING
        return before and accepted < piece.server_since_ns + _CLOCK_DIFFERENCE

    def _broker(self, order: PlaceOrder, piece: QueueItem) -> Broker | None:
        """A session for the order; None if it is worth waiting for one. Orders of other accounts do not wait
        with it: while one of those has a session, its error is raised."""
        try:
            return self._calls.ready(order.account_id, piece)
        except BrokerMaintenance:
            raise
        except _PASSING_ERRORS as error:
            if self._calls.remaining(piece) > 0 and self._calls.has_other_session(order.account_id):
                raise
            self._postpone(order, piece, error)
            return None
        except CountUnavailable as error:
            self._postpone(order, piece, error)
            return None

    def _affords(self, order: PlaceOrder, piece: QueueItem) -> bool:
        """Waits for room within the broker's limits; false if Valkey, which counts, is away for now."""
        try:
            self._calls.spend_budget(order.account_id, CallKind.ORDER, piece)
        except CountUnavailable as error:
            self._postpone(order, piece, error)
            return False
        return True

    def _postpone(self, order: PlaceOrder, piece: QueueItem, error: BerthError) -> None:
        if self._calls.remaining(piece) <= 0:
            raise DeadlineExceeded(f"until then: {error.code}: {error.detail}") from None
        self._log.warning("order_postponed", order_id=order.order_id, code=error.code)

    def _submit(self, order: PlaceOrder, piece: QueueItem, broker: Broker) -> OrderOutcome:
        """The way to the broker, for an order that its person's budget has room for. Raises `OutcomeUnknown`
        if the order may have reached it; any other `BerthError` means that it has not been placed."""
        until = time.monotonic() + self._switch_patience
        self._send_buffer.journal(order.order_id)
        self._tell(order, OrderState.SUBMITTING)
        while True:
            self._send_buffer.read_switch()
            if not self._send_buffer.flush():
                raise WorkerUnavailable("Valkey could not be told of the submission; it was not made")
            if not self._send_buffer.journaled:
                raise OutcomeUnknown("a submission of the order was begun before")
            if self._send_buffer.unbound:
                if time.monotonic() >= until:
                    raise WorkerUnavailable("who may trade was not told to this Valkey yet; it was not made")
                self._calls.pause(piece)
                continue
            check_switch(self._send_buffer.switch, order)  # once more: a reconnect may have taken seconds
            if self._calls.grant_is_fresh:
                break
            self._calls.time_left(piece)  # Valkey took long: that grant is void, and so may the order be
            self._calls.spend_budget(order.account_id, CallKind.ORDER, piece)

        def place(timeout: float) -> ExchangeOrder:
            self._ledger.submitting(order)
            self._shared_state.submissions.note(order.order_id)
            return broker.place(order, timeout)

        return self._ledger.placed(order, self._calls.change(order.account_id, piece, place))

    def _settle(self, order: PlaceOrder, state: OrderState, error: BerthError) -> OrderOutcome:
        outcome = OrderOutcome(order_id=order.order_id, state=state, reason=f"{error.code}: {error.detail}")
        self._ledger.settled(order, outcome, Failure.of(error))
        if state is OrderState.UNKNOWN:
            self._unknown_outcomes.note(order)
        self._tell(order, state, outcome.reason)
        return outcome

    def _tell(self, order: PlaceOrder, state: OrderState, reason: str | None = None) -> None:
        self._send_buffer.event(
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
