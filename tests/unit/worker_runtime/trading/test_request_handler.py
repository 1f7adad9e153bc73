"""The request handler's log does not delay an order's answer."""

from __future__ import annotations

import os
import time
from typing import Any

from tests.support.message_signing import SECRETS
from tests.support.orders.limit_order import ORDER
from worker_runtime.process.clock import NS_PER_S
from worker_runtime.process.log import Log
from worker_runtime.process.shared_state import SharedState, WorkerActivity
from worker_runtime.protocol.messages import (
    Answer,
    OrderOutcome,
    OrderState,
    PlaceOrder,
    encode,
)
from worker_runtime.protocol.requests import sign_request
from worker_runtime.session.request_handler import RequestHandler
from worker_runtime.trading.order_tracker import OrderResult
from worker_runtime.trading.queue_item import QueueItem


class FillingSubmitter:
    """Replaces `OrderSubmitter`: fills each order."""

    def has_outcome_of(self, order_id: str) -> bool:
        return False

    def submit_order(self, order: PlaceOrder, item: QueueItem) -> OrderResult:
        return OrderResult(OrderOutcome(order_id=order.order_id, state=OrderState.FILLED))


class AnswerBuffer:
    """Replaces the send buffer."""

    def __init__(self) -> None:
        self.waiting: list[Answer] = []

    def add_answer(self, item: bytes, answer: Answer, channel: str) -> None:
        self.waiting.append(answer)


class ConnectedSession:
    """Replaces `BrokerSessions`: each one is connected."""

    def state(self) -> WorkerActivity:
        return WorkerActivity.Active


def test_an_answer_is_logged_once_and_not_before_it_can_be_sent() -> None:
    reader, writer = os.pipe2(os.O_NONBLOCK)
    shared_state, send_buffer = SharedState(), AnswerBuffer()
    shared_state.write_message_keys(SECRETS.for_worker("u1", 1))
    shared_state.assign("u1", "c1", 1)
    others: dict[str, Any] = {"broker_sessions": ConnectedSession(), "send_buffer": send_buffer}
    submitter: Any = FillingSubmitter()
    nothing: Any = None
    request_handler = RequestHandler(
        submitter,
        nothing,
        nothing,
        nothing,
        **others,
        shared_state=shared_state,
        log=Log(output=writer),
    )
    mac = sign_request(SECRETS.request_keys("u1"), "u1", "r1", 1, encode(ORDER))
    raw = f"1|r1|{mac}|".encode() + encode(ORDER)
    request_handler.handle(QueueItem("request", raw, time.monotonic_ns() + NS_PER_S, "g1"))
    assert [answer.request_id for answer in send_buffer.waiting] == ["r1"]
    os.write(writer, b"sent\n")  # here the send buffer is flushed
    request_handler.log_answer()
    request_handler.log_answer()
    first, second = os.read(reader, 4096).splitlines()
    assert first == b"sent"
    assert b'"order_answered"' in second
    os.close(reader)
    os.close(writer)
