"""Decodes and executes each request, then sends its events and its answer.

Forged, late and stale requests are discarded without an answer. An order that this session knows
gets its first answer again, and one that it has put back expires with an answer.
"""

from collections.abc import Callable
from dataclasses import KW_ONLY, dataclass, field
from typing import cast

import msgspec

from worker_runtime.process.log import Log
from worker_runtime.process.shared_state import SharedState, WorkerActivity
from worker_runtime.protocol.authentication import RefusalCounter
from worker_runtime.protocol.errors import (
    BerthError,
    MalformedMessage,
    OutcomeUnknown,
    WorkerLost,
)
from worker_runtime.protocol.instruments import InstrumentPage
from worker_runtime.protocol.messages import Answer, Failure, PlaceOrder, decode
from worker_runtime.protocol.requests import (
    Frame,
    ListInstruments,
    Query,
    QueryAccount,
    ReplaceOrder,
    Request,
    encode_report,
    parse_frame,
)
from worker_runtime.trading.broker_sessions import BrokerSessions
from worker_runtime.trading.instrument_lists import InstrumentReader
from worker_runtime.trading.order_changer import OrderChanger
from worker_runtime.trading.order_submitter import OrderPostponed, OrderSubmitter
from worker_runtime.trading.queue_item import QueueItem
from worker_runtime.trading.reconciliation import AccountReader
from worker_runtime.trading.send_buffer import SendBuffer


@dataclass(eq=False, repr=False)
class RequestHandler:
    submitter: OrderSubmitter
    changer: OrderChanger
    reader: AccountReader
    instruments: InstrumentReader
    _: KW_ONLY
    broker_sessions: BrokerSessions
    send_buffer: SendBuffer
    shared_state: SharedState
    log: Log
    add_measures: Callable[[Answer], Answer] = lambda answer: answer
    _refused: RefusalCounter = field(default_factory=RefusalCounter, init=False)
    #: The request that was last put back into the queue.
    _postponed_id: str = field(default="", init=False)
    #: The last request and its answer, until they are logged.
    _answered: tuple[Request, Answer] | None = field(default=None, init=False)

    def handle(self, item: QueueItem) -> None:
        """Executes one popped request and puts its events and its answer into the send buffer.

        Discards what is forged, late or replayed. Raises nothing but `OrderPostponed`.
        """
        frame = self._authenticate(item.raw)
        if frame is None:
            return
        try:
            request = self._read(frame)
        except MalformedMessage as error:
            if item.seconds_left() <= 0:
                self._discard(item.raw, "late", frame.request_id)
                return
            self.log.error("request_malformed", request_id=frame.request_id, code=error.code)
            answer = _refusal(frame.request_id, error)
            self.send_buffer.add_answer(frame.raw, answer, _find_reply_channel(frame.payload))
            return
        if self._discard_if_stale(request, item):
            return
        self.shared_state.state = WorkerActivity.Processing
        try:
            answer = self._execute(request, item)
        except OrderPostponed:
            self._postponed_id = request.request_id
            raise
        except BerthError as error:
            answer = _refusal(request.request_id, error)
        except Exception as error:  # the boundary of one request: it is answered whatever happens
            self.log.crash("request_crashed", error)
            answer = _refusal(request.request_id, BerthError("the worker failed"))
        finally:
            self.shared_state.state = self.broker_sessions.state()
        self.send_buffer.add_answer(frame.raw, self.add_measures(answer), request.reply_to)
        self._answered = request, answer

    def log_answer(self) -> None:
        """Logs the last answer.

        Call it after the answer was sent, so that nobody waits for the log.
        """
        if self._answered is None:
            return
        (request, answer), self._answered = self._answered, None
        code = answer.failure.code if answer.failure else ""
        trace_fields = {"trace": request.trace} if request.trace else {}
        if isinstance(request, Query):
            self.log.info("query_answered", account=request.account_id, code=code, **trace_fields)
            return
        event = "order_answered" if isinstance(request, PlaceOrder) else "change_answered"
        state = answer.outcome.state.value if answer.outcome else ""
        self.log.info(event, order_id=request.order_id, state=state, code=code, **trace_fields)

    def answer_leftover(self, item: bytes, generation: str | None = None, now_ms: int = 0) -> None:
        """Answers an item that a former worker popped and left. It is never executed again.

        Items can be replayed. So it answers an outdated item only if the order is listed as open,
        or if this worker began it. An item is outdated if its deadline or its generation is over,
        compared with `now_ms` and `generation` (None: this session popped the item, so it is not
        checked). The sweeper settles other orders.
        """
        frame = self._authenticate(item)
        if frame is None:
            return
        try:
            request = self._read(frame)
        except MalformedMessage:
            self._discard(item, "unreadable", frame.request_id)
            return
        if generation is not None:
            discard_reason = _find_discard_reason(
                request, generation, late=frame.deadline_ms <= now_ms
            )
            if discard_reason and not (
                isinstance(request, PlaceOrder)
                and self.submitter.was_open_or_begun(request.order_id)
            ):
                self._discard(item, discard_reason, request.request_id)
                return
        if isinstance(request, PlaceOrder):
            self.log.warning("order_left_behind", order_id=request.order_id)
            outcome, failure = self.submitter.record_leftover(request)
            answer = Answer(request_id=request.request_id, outcome=outcome, failure=failure)
        else:
            self.log.warning("request_left_behind", request_id=request.request_id)
            error = (
                WorkerLost()
                if isinstance(request, Query)
                else OutcomeUnknown("the worker that had the request was lost")
            )
            answer = _refusal(request.request_id, error)
        self.send_buffer.add_answer(item, answer, request.reply_to)

    def _authenticate(self, item: bytes) -> Frame | None:
        """Returns the parts of an item that a service or the user's own job signed; discards any
        other.

        A discarded item gets no answer, because that would be a genuine answer about the order that
        a forger named. If it is an order, its deadline and the sweeper settle it.
        """
        try:
            frame = parse_frame(item)
        except MalformedMessage:
            self._discard(item, "unreadable")
            return None
        if not frame.is_authentic(
            self.shared_state.message_keys().request, self.shared_state.user_id
        ):
            self._discard(item, "forged", frame.request_id)
            return None
        return frame

    def _discard_if_stale(self, request: Request, item: QueueItem) -> bool:
        """Discards the request, and returns True, if it may have been pushed again: it is late, a
        repeated `ReplaceOrder`, or an order of another generation of Valkey.

        Repeated cancels are executed. An order that this session knows gets its first answer again.
        An order that this session has put back is not discarded when it is late: it is answered as
        expired. Within the deadline, an order is recognised by this worker's memory (also across a
        restart of its session), by the journal, by the open orders in the claim, and by the
        broker's list at the login.
        Remaining risk: an attacker who can delete the journal entry and the event SUBMITTING within
        milliseconds, kill the worker, and push the order again before its deadline, can cause a
        second submission by the user's next worker where the broker's list is late.
        """
        if isinstance(request, PlaceOrder) and self.submitter.has_outcome_of(request.order_id):
            return False
        late = item.seconds_left() <= 0 and request.request_id != self._postponed_id
        discard_reason = _find_discard_reason(request, item.generation, late=late)
        if not discard_reason and isinstance(request, ReplaceOrder):
            if request.request_id in self.shared_state.submissions:
                discard_reason = "repeated"
            self.shared_state.submissions.add(request.request_id)
        if discard_reason:
            self._discard(item.raw, discard_reason, request.request_id)
        return discard_reason != ""

    def _discard(self, item: bytes, reason: str, request_id: str = "") -> None:
        if self._refused.add(reason):
            self.log.error(
                "request_refused", reason=reason, request_id=request_id, count=self._refused.count
            )
        self.send_buffer.discard_item(item)

    def _read(self, frame: Frame) -> Request:
        request: Request = decode(frame.payload, Request)
        if request.request_id != frame.request_id:
            raise MalformedMessage("the request id of the frame is not the request's")
        if request.user_id != self.shared_state.user_id:
            raise MalformedMessage("the request belongs to another user")
        return request

    def _execute(self, request: Request, item: QueueItem) -> Answer:
        if isinstance(request, QueryAccount):
            report = self.reader.read_account(request, item)
            return Answer(request_id=request.request_id, report=encode_report(report))
        if isinstance(request, ListInstruments):
            page = self.instruments.read_page(request, item)
            # It is written as an `InstrumentPage` is.
            return Answer(request_id=request.request_id, instruments=cast(InstrumentPage, page))
        if isinstance(request, PlaceOrder):
            placed = self.submitter.submit_order(request, item)
            return Answer(
                request_id=request.request_id, outcome=placed.outcome, failure=placed.failure
            )
        outcome, failure = self.changer.change_order(request, item)
        return Answer(request_id=request.request_id, outcome=outcome, failure=failure)


def _find_discard_reason(request: Request, generation: str, *, late: bool) -> str:
    """Returns why the request must not be executed, or ''."""
    is_of_other_generation = isinstance(request, PlaceOrder) and request.generation != generation
    return "late" if late else "another generation" if is_of_other_generation else ""


def _refusal(request_id: str, error: BerthError) -> Answer:
    return Answer(request_id=request_id, failure=Failure.of(error))


class _ReplyTo(msgspec.Struct):
    reply_to: str = ""


def _find_reply_channel(payload: bytes) -> str:
    """Returns the reply channel of a request that cannot be decoded as a whole; '' if none."""
    try:
        return msgspec.json.decode(payload, type=_ReplyTo).reply_to
    except (msgspec.DecodeError, UnicodeDecodeError, RecursionError):
        return ""
