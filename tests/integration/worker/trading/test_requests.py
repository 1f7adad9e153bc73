"""Cancels, changes and queries of a user's worker."""

from __future__ import annotations

from decimal import Decimal

import msgspec
import pytest

from tests.integration.worker.trading.test_listing import FILL, at_broker
from tests.support.workers.harness import GENERATION, WorkerHarness
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


def query(harness: WorkerHarness, request_id: str = "query-1", **changes: object) -> QueryAccount:
    whole = QueryAccount(
        request_id=request_id,
        user_id=harness.user,
        account_id="a1",
        positions=True,
        balance=True,
        reply_to="",
        generation=GENERATION,
    )
    return msgspec.structs.replace(whole, **changes)


def ask(harness: WorkerHarness, request: CancelOrder | ReplaceOrder | QueryAccount) -> Answer:
    harness.enqueue_raw(request.request_id, encode(request))
    return harness.answer(request.request_id)


@pytest.fixture
def worker(harness: WorkerHarness) -> SpawnedWorker:
    return harness.active()


def working(harness: WorkerHarness, worker: SpawnedWorker) -> PlaceOrder:
    """An order that the broker lists, of unknown outcome for the worker."""
    order = harness.order(symbol="LOST")
    harness.enqueue(order)
    harness.answer(order.request_id)
    worker.broker_lists(at_broker(order, OrderState.SUBMITTED))
    return order


def test_an_order_is_found_by_its_tag_and_cancelled(
    harness: WorkerHarness, worker: SpawnedWorker
) -> None:
    order = working(harness, worker)
    answer = ask(harness, cancel(order))
    assert answer.failure is None
    assert answer.outcome is not None
    assert (answer.outcome.order_id, answer.outcome.state) == (order.order_id, OrderState.CANCELLED)
    assert harness.states(order.order_id)[1:] == ["unknown", "submitted", "cancelled"]
    assert [entry["broker_order_id"] for entry in worker.ledger("cancel")] == [
        f"b-{order.order_id}"
    ]


def test_an_order_of_a_former_session_is_cancelled_by_the_brokers_id(
    harness: WorkerHarness, worker: SpawnedWorker
) -> None:
    order = harness.order()
    worker.broker_lists(at_broker(order, OrderState.SUBMITTED))
    answer = ask(harness, cancel(order, broker_order_id=f"b-{order.order_id}"))
    assert answer.outcome is not None
    assert answer.outcome.state is OrderState.CANCELLED


def test_a_change_is_answered_with_the_order_as_it_stands(
    harness: WorkerHarness, worker: SpawnedWorker
) -> None:
    order = working(harness, worker)
    answer = ask(harness, change(order))
    assert answer.outcome is not None
    assert (answer.outcome.state, answer.failure) == (OrderState.SUBMITTED, None)
    [entry] = worker.ledger("replace")
    assert (entry["broker_order_id"], entry["quantity"]) == (f"b-{order.order_id}", 1)
    changes = [
        event for event in harness.events() if isinstance(event, OrderEvent) and event.quantity
    ]
    assert [(event.order_id, event.quantity) for event in changes] == [(order.order_id, 1)]


@pytest.mark.parametrize(
    ("name", "code"), [("refuse-change", "ORDER_REJECTED"), ("lose-change", "OUTCOME_UNKNOWN")]
)
def test_a_change_without_success_is_made_once_and_leaves_the_order_as_it_was(
    harness: WorkerHarness, worker: SpawnedWorker, name: str, code: str
) -> None:
    order = working(harness, worker)
    worker.tell_broker(name)
    for request in (cancel(order), change(order)):
        answer = ask(harness, request)
        assert answer.failure is not None
        assert answer.failure.code == code
    assert len(worker.ledger("cancel")) == len(worker.ledger("replace")) == 1
    assert harness.states(order.order_id)[-1] == "submitted"


def test_a_cancel_of_what_the_broker_does_not_list_sends_nothing(
    harness: WorkerHarness, worker: SpawnedWorker
) -> None:
    answer = ask(harness, cancel(harness.order()))
    assert answer.failure is not None
    assert answer.failure.code == "ORDER_REJECTED"
    assert worker.ledger("cancel") == []


def test_a_change_of_another_generation_is_not_made_and_a_cancel_is(
    harness: WorkerHarness, worker: SpawnedWorker
) -> None:
    order = working(harness, worker)
    changed = ask(harness, change(order, generation="before the flush"))
    assert changed.failure is not None
    assert changed.failure.code == "OUTCOME_UNKNOWN"
    cancelled = ask(harness, msgspec.structs.replace(cancel(order), generation="before the flush"))
    assert cancelled.failure is None
    assert worker.ledger("replace") == []


def test_a_change_that_is_pushed_again_is_made_once(
    harness: WorkerHarness, worker: SpawnedWorker
) -> None:
    order = working(harness, worker)
    item = harness.enqueue_raw("change-1", encode(change(order)))
    assert harness.answer("change-1").failure is None
    harness.push_item(item)
    assert harness.send().failure is None
    assert len(worker.ledger("replace")) == 1


def test_a_query_reports_the_account_and_our_orders_learn_from_it(
    harness: WorkerHarness, worker: SpawnedWorker
) -> None:
    lost = harness.order(symbol="LOST")
    harness.enqueue(lost)
    harness.answer(lost.request_id)
    other = harness.order()
    worker.broker_lists(
        at_broker(lost, OrderState.FILLED, FILL), at_broker(other, OrderState.SUBMITTED)
    )
    answer = ask(harness, query(harness))
    assert answer.report is not None
    report = decode_report(answer.report)
    assert [order.tag for order in report.orders] == [lost.tag, other.tag]
    assert report.balance is not None
    assert (report.balance.cash, report.balance.available) == (Decimal(10), Decimal(7))
    assert (report.complete, report.absence_certain, report.positions) == (True, True, [])
    assert harness.states(lost.order_id)[-1] == "filled"
    only = ask(harness, query(harness, "query-2", tags=(other.tag,), balance=False))
    assert only.report is not None
    assert [order.tag for order in decode_report(only.report).orders] == [other.tag]


def test_a_query_that_the_broker_does_not_answer_fails_with_its_code(
    harness: WorkerHarness, worker: SpawnedWorker
) -> None:
    worker.tell_broker("unlisted")
    answer = ask(harness, query(harness))
    assert answer.failure is not None
    assert (answer.failure.code, answer.report) == ("BROKER_UNREACHABLE", None)


def test_what_a_lost_worker_had_in_hand_is_answered_and_never_executed(
    harness: WorkerHarness,
) -> None:
    order = harness.order()
    for request in (cancel(order), query(harness)):
        harness.enqueue_raw(request.request_id, encode(request))
        harness.client.execute(
            "LMOVE", keys.requests(harness.user), keys.processing(harness.user), "RIGHT", "LEFT"
        )
    worker = harness.active()
    codes = [harness.answer(name).failure for name in ("cancel-1", "query-1")]
    assert [failure.code for failure in codes if failure] == ["OUTCOME_UNKNOWN", "WORKER_LOST"]
    eventually(lambda: harness.processing() == 0, "the processing list is empty")
    assert worker.ledger("cancel") == []
