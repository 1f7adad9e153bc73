"""Contains requests to a worker about its orders, and orders as the broker lists them."""

from __future__ import annotations

from decimal import Decimal

import msgspec

from tests.support.workers.harness import GENERATION, WorkerHarness
from tests.support.workers.process import SpawnedWorker
from worker_runtime.protocol.broker_reports import BrokerOrder
from worker_runtime.protocol.messages import Answer, Fill, OrderState, PlaceOrder, encode
from worker_runtime.protocol.requests import CancelOrder, QueryAccount, ReplaceOrder

FILL = Fill(fill_id="f1", quantity=2, price=Decimal("100.5"), at_ms=1_795_410_000_001)


def make_broker_order(order: PlaceOrder, state: OrderState, *fills: Fill) -> BrokerOrder:
    return BrokerOrder(
        broker_order_id=f"b-{order.order_id}",
        tag=order.tag,
        symbol=order.symbol,
        side=order.side,
        quantity=order.quantity,
        price_type=order.price_type,
        price=order.price,
        time_in_force=order.time_in_force,
        state=state,
        fills=list(fills),
    )


def make_cancel(
    order: PlaceOrder, request_id: str = "cancel-1", broker_order_id: str | None = None
) -> CancelOrder:
    return CancelOrder(
        request_id=request_id,
        order_id=order.order_id,
        user_id=order.user_id,
        account_id=order.account_id,
        symbol=order.symbol,
        tag=order.tag,
        broker_order_id=broker_order_id,
        reply_to="",
        generation=GENERATION,
    )


def make_change(
    order: PlaceOrder, request_id: str = "change-1", generation: str = GENERATION
) -> ReplaceOrder:
    words = msgspec.structs.asdict(make_cancel(order, request_id)) | {"generation": generation}
    return ReplaceOrder(**words, quantity=1, price=None)


def make_price_change(
    order: PlaceOrder, request_id: str, *, reduce_only: bool = False
) -> ReplaceOrder:
    plain = make_change(order, request_id)
    return msgspec.structs.replace(plain, price=Decimal("101"), reduce_only=reduce_only)


def ask_worker(
    harness: WorkerHarness, request: CancelOrder | ReplaceOrder | QueryAccount
) -> Answer:
    harness.enqueue_raw(request.request_id, encode(request))
    return harness.answer(request.request_id)


def place_unknown_order(harness: WorkerHarness, worker: SpawnedWorker) -> PlaceOrder:
    """Places an order that the broker lists, and whose outcome the worker does not know."""
    order = harness.order(symbol="LOST")
    harness.enqueue(order)
    harness.answer(order.request_id)
    worker.broker_lists(make_broker_order(order, OrderState.SUBMITTED))
    return order


def outcome_code(harness: WorkerHarness, request_id: str) -> str:
    """Returns the state of the order, or the code with which it was rejected."""
    answer = harness.answer(request_id)
    assert answer.outcome is not None
    if answer.failure is None:
        return answer.outcome.state.value
    assert answer.outcome.state is OrderState.REJECTED
    return answer.failure.code
