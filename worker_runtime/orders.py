"""Executes one order request: at most one submission, and always an answer.

Invariants: *submit-once* (nothing here repeats a submission; what may have reached the broker is unknown),
*one-owner* (lease and deadline are checked in this thread right before the call), *nothing-lost* (events
first, then the answer).
"""

from __future__ import annotations

import time

import msgspec

from worker_runtime.board import Board, State
from worker_runtime.boottime import SECOND, wall_ms
from worker_runtime.connections import Connections
from worker_runtime.fills import Ledger
from worker_runtime.inlet import Piece
from worker_runtime.lease import Lease
from worker_runtime.log import Log
from worker_runtime.outbox import Outbox
from worker_runtime.protocol.errors import (
    BerthError,
    DeadlineExceeded,
    Fenced,
    LeaseLost,
    LoginLimited,
    LoginRejected,
    MalformedMessage,
    OrderRejected,
    OutcomeUnknown,
    SessionDown,
    WorkerUnavailable,
)
from worker_runtime.protocol.frames import Frame, parse
from worker_runtime.protocol.messages import (
    Answer,
    Failure,
    OrderEvent,
    OrderOutcome,
    OrderState,
    PlaceOrder,
    Request,
    decode,
)

#: Errors of `Broker.place` after which the order was certainly not accepted (see `brokers/port.py`).
_NOT_PLACED = (OrderRejected, SessionDown, LoginRejected, LoginLimited)


class OrderDesk:
    """Handles the requests of one user."""

    def __init__(
        self,
        connections: Connections,
        *,
        ledger: Ledger,
        lease: Lease,
        outbox: Outbox,
        board: Board,
        broker_timeout: float,
        log: Log,
    ) -> None:
        self._connections = connections
        self._ledger = ledger
        self._lease = lease
        self._outbox = outbox
        self._board = board
        self._broker_timeout = broker_timeout
        self._log = log

    def handle(self, piece: Piece) -> None:
        """Executes one popped request and queues its events and its answer. Never raises."""
        try:
            frame = parse(piece.item)
        except MalformedMessage:
            self._log.error("request_unreadable", size=len(piece.item))
            self._outbox.discard(piece.item)
            return
        try:
            order = self._read(frame)
        except MalformedMessage as error:
            self._log.error("request_malformed", request_id=frame.request_id, code=error.code)
            answer = Answer(request_id=frame.request_id, failure=Failure.of(error))
            self._outbox.answer(frame.raw, answer, _reply_channel(frame.payload))
            return
        outcome, failure = self._execute(order, piece)
        self._log.info(
            "order_answered",
            order_id=order.order_id,
            state=outcome.state.value,
            code=failure.code if failure else "",
        )
        answer = Answer(request_id=order.request_id, outcome=outcome, failure=failure)
        self._outbox.answer(frame.raw, answer, order.reply_to)

    def give_up(self, item: bytes) -> None:
        """Answers an item that a former worker popped and left: it may have been submitted, or not."""
        try:
            frame = parse(item)
            order: PlaceOrder = decode(frame.payload, Request)
        except MalformedMessage:
            self._log.error("leftover_unreadable", size=len(item))
            self._outbox.discard(item)
            return
        self._log.warning("order_left_behind", order_id=order.order_id)
        error = OutcomeUnknown("the worker that had taken the order was lost")
        outcome = self._settle(order, OrderState.UNKNOWN, error)
        answer = Answer(request_id=order.request_id, outcome=outcome, failure=Failure.of(error))
        self._outbox.answer(item, answer, order.reply_to)

    def _read(self, frame: Frame) -> PlaceOrder:
        order: PlaceOrder = decode(frame.payload, Request)
        if order.request_id != frame.request_id:
            raise MalformedMessage("the request id of the frame is not the order's")
        if order.user_id != self._board.user_id:
            raise MalformedMessage("the order belongs to another user")
        return order

    def _execute(self, order: PlaceOrder, piece: Piece) -> tuple[OrderOutcome, Failure | None]:
        known = self._ledger.answer_of(order.order_id)
        if known is not None:  # submit-once: this session has taken the same order before
            return known
        self._board.state = State.Processing
        try:
            return self._submit(order, piece), None
        except BerthError as error:
            reason = error
        except Exception as error:  # the boundary of one request: it is answered whatever happens
            self._log.crash("order_crashed", error)
            taken = self._ledger.answer_of(order.order_id) is not None
            reason = OutcomeUnknown("the worker failed") if taken else BerthError("the worker failed")
        finally:
            self._board.state = self._connections.state()
        state = OrderState.REJECTED
        if isinstance(reason, OutcomeUnknown):
            state = OrderState.UNKNOWN
        elif isinstance(reason, DeadlineExceeded):
            state = OrderState.EXPIRED
        return self._settle(order, state, reason), Failure.of(reason)

    def _submit(self, order: PlaceOrder, piece: Piece) -> OrderOutcome:
        """The way to the broker. Raises `OutcomeUnknown` if the order may have reached it; any other
        `BerthError` means that it has not been placed."""
        if order.generation != piece.generation:
            # Another generation: Valkey has lost data, or this comes out of a lagging copy of it. Whether
            # an earlier copy of this request was executed cannot be known here.
            raise OutcomeUnknown("the order was queued under another generation of Valkey")
        broker = self._connections.ready(order.account_id, self._time_for_call(piece))
        self._tell(order, OrderState.SUBMITTING)
        if not self._outbox.flush():
            raise WorkerUnavailable("Valkey could not be told of the submission; it was not made")
        timeout = self._time_for_call(piece)
        self._ledger.submitting(order)
        try:
            placed = broker.place(order, timeout)
        except _NOT_PLACED as error:
            if not isinstance(error, OrderRejected):
                self._connections.invalidate(order.account_id, error.code)
            raise
        except Exception as error:  # timeout, lost connection, a fault in the adapter: nobody knows
            self._connections.suspect(order.account_id)
            if isinstance(error, OutcomeUnknown):
                raise
            if not isinstance(error, BerthError):
                self._log.crash("place_crashed", error)
            raise OutcomeUnknown(f"the call ended with {type(error).__name__}") from None
        return self._ledger.placed(order, placed)

    def _time_for_call(self, piece: Piece) -> float:
        """Seconds that a broker call may take now; raises if it must not be made."""
        if self._board.fenced:
            raise Fenced
        lease = self._lease.usable()
        if lease <= 0:
            raise LeaseLost
        remaining = (piece.deadline_ns - time.monotonic_ns()) / SECOND
        if remaining <= 0:
            raise DeadlineExceeded
        return min(remaining, lease, self._broker_timeout)

    def _settle(self, order: PlaceOrder, state: OrderState, error: BerthError) -> OrderOutcome:
        outcome = OrderOutcome(order_id=order.order_id, state=state, reason=f"{error.code}: {error.detail}")
        self._ledger.settled(order, outcome, Failure.of(error))
        self._tell(order, state, outcome.reason)
        return outcome

    def _tell(self, order: PlaceOrder, state: OrderState, reason: str | None = None) -> None:
        self._outbox.event(
            OrderEvent(
                event_id=f"{order.order_id}:{state.value}",
                order_id=order.order_id,
                user_id=order.user_id,
                epoch=self._board.epoch,
                state=state,
                at_ms=wall_ms(),
                reason=reason,
            )
        )


class _ReplyTo(msgspec.Struct):
    reply_to: str = ""


def _reply_channel(payload: bytes) -> str:
    """Where to announce the answer to a request that cannot be read as a whole; '' if nowhere."""
    try:
        return msgspec.json.decode(payload, type=_ReplyTo).reply_to
    except (msgspec.DecodeError, UnicodeDecodeError, RecursionError):
        return ""
