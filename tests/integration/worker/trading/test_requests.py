"""Cancels, changes and queries of a user's worker."""

from __future__ import annotations

from decimal import Decimal

import msgspec
import pytest

from tests.integration.worker.trading.test_listing import FILL, at_broker
from tests.support.workers.harness import GENERATION, WorkerStage
from tests.support.workers.process import SpawnedWorker, eventually
from worker_runtime.protocol import keys
from worker_runtime.protocol.messages import Answer, OrderEvent, OrderState, PlaceOrder, encode
from worker_runtime.protocol.requests import CancelOrder, QueryAccount, ReplaceOrder, decode_report


def cancel(
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


def change(
    order: PlaceOrder, request_id: str = "change-1", generation: str = GENERATION
) -> ReplaceOrder:
    words = msgspec.structs.asdict(cancel(order, request_id)) | {"generation": generation}
    return ReplaceOrder(**words, quantity=1, price=None)


def query(stage: WorkerStage, request_id: str = "query-1", **changes: object) -> QueryAccount:
    whole = QueryAccount(
        request_id=request_id,
        user_id=stage.user,
        account_id="a1",
        positions=True,
        balance=True,
        reply_to="",
        generation=GENERATION,
    )
    return msgspec.structs.replace(whole, **changes)


def ask(stage: WorkerStage, request: CancelOrder | ReplaceOrder | QueryAccount) -> Answer:
    stage.enqueue_raw(request.request_id, encode(request))
    return stage.answer(request.request_id)


@pytest.fixture
def worker(stage: WorkerStage) -> SpawnedWorker:
    return stage.active()


def working(stage: WorkerStage, worker: SpawnedWorker) -> PlaceOrder:
    """An order that the broker lists, of unknown outcome for the worker."""
    order = stage.order(symbol="LOST")
    stage.enqueue(order)
    stage.answer(order.request_id)
    worker.broker_lists(at_broker(order, OrderState.SUBMITTED))
    return order


def test_an_order_is_found_by_its_tag_and_cancelled(
    stage: WorkerStage, worker: SpawnedWorker
) -> None:
    order = working(stage, worker)
    answer = ask(stage, cancel(order))
    assert answer.failure is None
    assert answer.outcome is not None
    assert (answer.outcome.order_id, answer.outcome.state) == (order.order_id, OrderState.CANCELLED)
    assert stage.states(order.order_id)[1:] == ["unknown", "submitted", "cancelled"]
    assert [entry["broker_order_id"] for entry in worker.ledger("cancel")] == [
        f"b-{order.order_id}"
    ]


def test_an_order_of_a_former_session_is_cancelled_by_the_brokers_id(
    stage: WorkerStage, worker: SpawnedWorker
) -> None:
    order = stage.order()
    worker.broker_lists(at_broker(order, OrderState.SUBMITTED))
    answer = ask(stage, cancel(order, broker_order_id=f"b-{order.order_id}"))
    assert answer.outcome is not None
    assert answer.outcome.state is OrderState.CANCELLED


def test_a_change_is_answered_with_the_order_as_it_stands(
    stage: WorkerStage, worker: SpawnedWorker
) -> None:
    order = working(stage, worker)
    answer = ask(stage, change(order))
    assert answer.outcome is not None
    assert (answer.outcome.state, answer.failure) == (OrderState.SUBMITTED, None)
    [entry] = worker.ledger("replace")
    assert (entry["broker_order_id"], entry["quantity"]) == (f"b-{order.order_id}", 1)
    changes = [
        event for event in stage.events() if isinstance(event, OrderEvent) and event.quantity
    ]
    assert [(event.order_id, event.quantity) for event in changes] == [(order.order_id, 1)]


@pytest.mark.parametrize(
    ("name", "code"), [("refuse-change", "ORDER_REJECTED"), ("lose-change", "OUTCOME_UNKNOWN")]
)
def test_a_change_without_success_is_made_once_and_leaves_the_order_as_it_was(
    stage: WorkerStage, worker: SpawnedWorker, name: str, code: str
) -> None:
    order = working(stage, worker)
    worker.tell_broker(name)
    for request in (cancel(order), change(order)):
        answer = ask(stage, request)
        assert answer.failure is not None
        assert answer.failure.code == code
    assert len(worker.ledger("cancel")) == len(worker.ledger("replace")) == 1
    assert stage.states(order.order_id)[-1] == "submitted"


def test_a_cancel_of_what_the_broker_does_not_list_sends_nothing(
    stage: WorkerStage, worker: SpawnedWorker
) -> None:
    answer = ask(stage, cancel(stage.order()))
    assert answer.failure is not None
    assert answer.failure.code == "ORDER_REJECTED"
    assert worker.ledger("cancel") == []


def test_a_change_of_another_generation_is_not_made_and_a_cancel_is(
    stage: WorkerStage, worker: SpawnedWorker
) -> None:
    order = working(stage, worker)
    changed = ask(stage, change(order, generation="before the flush"))
    assert changed.failure is not None
    assert changed.failure.code == "OUTCOME_UNKNOWN"
    cancelled = ask(stage, msgspec.structs.replace(cancel(order), generation="before the flush"))
    assert cancelled.failure is None
    assert worker.ledger("replace") == []


def test_a_change_that_is_pushed_again_is_made_once(
    stage: WorkerStage, worker: SpawnedWorker
) -> None:
    order = working(stage, worker)
    item = stage.enqueue_raw("change-1", encode(change(order)))
    assert stage.answer("change-1").failure is None
    stage.push_item(item)
    assert stage.send().failure is None
    assert len(worker.ledger("replace")) == 1


def test_a_query_reports_the_account_and_our_orders_learn_from_it(
    stage: WorkerStage, worker: SpawnedWorker
) -> None:
    lost = stage.order(symbol="LOST")
    stage.enqueue(lost)
    stage.answer(lost.request_id)
    other = stage.order()
    worker.broker_lists(
        at_broker(lost, OrderState.FILLED, FILL), at_broker(other, OrderState.SUBMITTED)
    )
    answer = ask(stage, query(stage))
    assert answer.report is not None
    report = decode_report(answer.report)
    assert [order.tag for order in report.orders] == [lost.tag, other.tag]
    assert report.balance is not None
    assert (report.balance.cash, report.balance.available) == (Decimal(10), Decimal(7))
    assert (report.complete, report.absence_certain, report.positions) == (True, True, [])
    assert stage.states(lost.order_id)[-1] == "filled"
    only = ask(stage, query(stage, "query-2", tags=(other.tag,), balance=False))
    assert only.report is not None
    assert [order.tag for order in decode_report(only.report).orders] == [other.tag]


def test_a_query_that_the_broker_does_not_answer_fails_with_its_code(
    stage: WorkerStage, worker: SpawnedWorker
) -> None:
    worker.tell_broker("unlisted")
    answer = ask(stage, query(stage))
    assert answer.failure is not None
    assert (answer.failure.code, answer.report) == ("BROKER_UNREACHABLE", None)


def test_what_a_lost_worker_had_in_hand_is_answered_and_never_executed(stage: WorkerStage) -> None:
    order = stage.order()
    for request in (cancel(order), query(stage)):
        stage.enqueue_raw(request.request_id, encode(request))
        stage.client.execute(
            "LMOVE", keys.requests(stage.user), keys.processing(stage.user), "RIGHT", "LEFT"
        )
    worker = stage.active()
    codes = [stage.answer(name).failure for name in ("cancel-1", "query-1")]
    assert [failure.code for failure in codes if failure] == ["OUTCOME_UNKNOWN", "WORKER_LOST"]
    eventually(lambda: stage.processing() == 0, "the processing list is empty")
    assert worker.ledger("cancel") == []
