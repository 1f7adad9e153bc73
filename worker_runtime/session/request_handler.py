"""Decodes each request, has it carried out, and always answers it, after its events."""

from __future__ import annotations

import msgspec

from worker_runtime.process.log import Log
from worker_runtime.process.shared_state import SharedState, WorkerActivity
from worker_runtime.protocol.errors import BerthError, MalformedMessage, OutcomeUnknown, WorkerLost
from worker_runtime.protocol.messages import Answer, Failure, PlaceOrder, decode
from worker_runtime.protocol.requests import Frame, QueryAccount, Request, encode_report, parse_frame
from worker_runtime.session.queue_reader import QueueItem
from worker_runtime.session.send_buffer import SendBuffer
from worker_runtime.trading.broker_sessions import BrokerSessions
from worker_runtime.trading.order_changer import OrderChanger
from worker_runtime.trading.order_submitter import OrderPostponed, OrderSubmitter
from worker_runtime.trading.reconciliation import AccountReader


class RequestHandler:
    def __init__(
        self,
        submitter: OrderSubmitter,
        changer: OrderChanger,
        reader: AccountReader,
        *,
        broker_sessions: BrokerSessions,
        send_buffer: SendBuffer,
        shared_state: SharedState,
        log: Log,
    ) -> None:
        self._submitter = submitter
        self._changer = changer
        self._reader = reader
        self._broker_sessions = broker_sessions
        self._send_buffer = send_buffer
        self._shared_state = shared_state
        self._log = log
        #: The last request and its answer, until they are logged.
        self._answered: tuple[Request, Answer] | None = None

    def handle(self, item: QueueItem) -> None:
        """Executes one popped request and puts its events and its answer into the send buffer.

        Raises nothing but `OrderPostponed`.
        """
        try:
            frame = parse_frame(item.raw)
        except MalformedMessage:
            self._log.error("request_unreadable", size=len(item.raw))
            self._send_buffer.discard_item(item.raw)
            return
        try:
            request = self._read(frame)
        except MalformedMessage as error:
            self._log.error("request_malformed", request_id=frame.request_id, code=error.code)
            answer = _refusal(frame.request_id, error)
            self._send_buffer.add_answer(frame.raw, answer, _find_reply_channel(frame.payload))
            return
        self._shared_state.state = WorkerActivity.Processing
        try:
            done = self._carry_out(request, item)
        except OrderPostponed:
            raise
        except BerthError as error:
            done = _refusal(request.request_id, error)
        except Exception as error:  # the boundary of one request: it is answered whatever happens
            self._log.crash("request_crashed", error)
            done = _refusal(request.request_id, BerthError("the worker failed"))
        finally:
            self._shared_state.state = self._broker_sessions.state()
        self._send_buffer.add_answer(frame.raw, done, request.reply_to)
        self._answered = request, done

    def log_answer(self) -> None:
        """Logs the last answer. Call it after the answer was sent, so that nobody waits for the log."""
        if self._answered is None:
            return
        (request, answer), self._answered = self._answered, None
        code = answer.failure.code if answer.failure else ""
        if isinstance(request, QueryAccount):
            self._log.info("query_answered", account=request.account_id, code=code)
            return
        event = "order_answered" if isinstance(request, PlaceOrder) else "change_answered"
        state = answer.outcome.state.value if answer.outcome else ""
        self._log.info(event, order_id=request.order_id, state=state, code=code)

    def answer_leftover(self, item: bytes) -> None:
        """Answers an item that a former worker popped and left. It is never executed again."""
        try:
            frame = parse_frame(item)
            request: Request = decode(frame.payload, Request)
        except MalformedMessage:
            self._log.error("leftover_unreadable", size=len(item))
            self._send_buffer.discard_item(item)
            return
        if isinstance(request, PlaceOrder):
            self._log.warning("order_left_behind", order_id=request.order_id)
            outcome, failure = self._submitter.settle_leftover(request)
            answer = Answer(request_id=request.request_id, outcome=outcome, failure=failure)
        else:
            self._log.warning("request_left_behind", request_id=request.request_id)
            queries = isinstance(request, QueryAccount)
            error = WorkerLost() if queries else OutcomeUnknown("the worker that had the request was lost")
            answer = _refusal(request.request_id, error)
        self._send_buffer.add_answer(item, answer, request.reply_to)

    def _read(self, frame: Frame) -> Request:
        request: Request = decode(frame.payload, Request)
        if request.request_id != frame.request_id:
            raise MalformedMessage("the request id of the frame is not the request's")
        if request.user_id != self._shared_state.user_id:
            raise MalformedMessage("the request belongs to another user")
        return request

    def _carry_out(self, request: Request, item: QueueItem) -> Answer:
        if isinstance(request, QueryAccount):
            report = self._reader.read_account(request, item)
            return Answer(request_id=request.request_id, report=encode_report(report))
        if isinstance(request, PlaceOrder):
            placed = self._submitter.submit_order(request, item)
            return Answer(request_id=request.request_id, outcome=placed.outcome, failure=placed.failure)
        outcome, failure = self._changer.change_order(request, item)
        return Answer(request_id=request.request_id, outcome=outcome, failure=failure)


def _refusal(request_id: str, error: BerthError) -> Answer:
    return Answer(request_id=request_id, failure=Failure.of(error))


class _ReplyTo(msgspec.Struct):
    reply_to: str = ""


def _find_reply_channel(payload: bytes) -> str:
    """The reply channel of a request that cannot be decoded as a whole; '' if there is none."""
    try:
        return msgspec.json.decode(payload, type=_ReplyTo).reply_to
    except (msgspec.DecodeError, UnicodeDecodeError, RecursionError):
        return ""
