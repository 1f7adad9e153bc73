"""The desk's log does not stand between an order and its answer."""

from __future__ import annotations

import os
from decimal import Decimal
from typing import Any

from worker_runtime.process.log import Log
from worker_runtime.process.shared_state import SharedState, WorkerActivity
from worker_runtime.protocol.messages import (
    Answer,
    Failure,
    OrderOutcome,
    OrderState,
    PlaceOrder,
    PriceType,
    Side,
    TimeInForce,
    encode,
)
from worker_runtime.session.queue_reader import QueueItem
from worker_runtime.session.request_handler import RequestHandler

ORDER = PlaceOrder(
    request_id="r1",
    order_id="o1",
    user_id="u1",
    account_id="a1",
    symbol="2330",
    side=Side.BUY,
    quantity=1,
    price_type=PriceType.LIMIT,
    price=Decimal("100.5"),
    time_in_force=TimeInForce.ROD,
    tag="t1",
    reply_to="",
    generation="g1",
)


class Filling:
    """Stands for `Placing`."""

    def execute(self, order: PlaceOrder, piece: QueueItem) -> tuple[OrderOutcome, Failure | None]:
        return OrderOutcome(order_id=order.order_id, state=OrderState.FILLED), None


class Answers:
    """Stands for the outbox."""

    def __init__(self) -> None:
        self.waiting: list[Answer] = []

    def answer(self, item: bytes, answer: Answer, channel: str) -> None:
        self.waiting.append(answer)


class ConnectedSession:
    """Stands for the connections."""

    def state(self) -> WorkerActivity:
        return WorkerActivity.Active


def test_an_answer_is_logged_once_and_not_before_it_can_be_sent() -> None:
    reader, writer = os.pipe2(os.O_NONBLOCK)
    board, outbox = SharedState(), Answers()
    board.assign("u1", "c1", 1)
    others: dict[str, Any] = {"connections": ConnectedSession(), "outbox": outbox}
    placing: Any = Filling()
    nothing: Any = None
    desk = RequestHandler(placing, nothing, nothing, **others, board=board, log=Log(output=writer))
    desk.handle(QueueItem("request", b"1|r1|" + encode(ORDER), 0, "g1"))
    assert [answer.request_id for answer in outbox.waiting] == ["r1"]
    os.write(writer, b"sent\n")  # here the outbox is flushed
    desk.note()
    desk.note()
    first, second = os.read(reader, 4096).splitlines()
    assert first == b"sent"
    assert b'"order_answered"' in second
    os.close(reader)
    os.close(writer)
