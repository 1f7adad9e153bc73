"""Cancels, changes and queries of a user's worker."""

from __future__ import annotations

from decimal import Decimal

import msgspec
import pytest

from tests.support.waiting import eventually
from tests.support.workers.harness import GENERATION, WorkerHarness
from tests.support.workers.process import SpawnedWorker
from tests.support.workers.trading import (
    FILL,
    ask_worker,
    make_broker_order,
    make_cancel,
    make_change,
    place_unknown_order,
)
from worker_runtime.protocol import keys
from worker_runtime.protocol.messages import OrderEvent, OrderState, encode
from worker_runtime.protocol.requests import QueryAccount, decode_report


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


@pytest.fixture
def worker(harness: WorkerHarness) -> SpawnedWorker:
    return harness.active()


def test_an_order_is_found_by_its_tag_and_cancelled(
    harness: WorkerHarness, worker: SpawnedWorker
) -> None:
    order = place_unknown_order(harness, worker)
    answer = ask_worker(harness, make_cancel(order))
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
    worker.broker_lists(make_broker_order(order, OrderState.SUBMITTED))
    answer = ask_worker(harness, make_cancel(order, broker_order_id=f"b-{order.order_id}"))
    assert answer.outcome is not None
    assert answer.outcome.state is OrderState.CANCELLED


def test_a_change_is_answered_with_the_order_as_it_stands(
    harness: WorkerHarness, worker: SpawnedWorker
) -> None:
    order = place_unknown_order(harness, worker)
    answer = ask_worker(harness, make_change(order))
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
    order = place_unknown_order(harness, worker)
    worker.tell_broker(name)
    for request in (make_cancel(order), make_change(order)):
        answer = ask_worker(harness, request)
        assert answer.failure is not None
        assert answer.failure.code == code
    assert len(worker.ledger("cancel")) == len(worker.ledger("replace")) == 1
    assert harness.states(order.order_id)[-1] == "submitted"


def test_a_cancel_of_what_the_broker_does_not_list_sends_nothing(
    harness: WorkerHarness, worker: SpawnedWorker
) -> None:
    answer = ask_worker(harness, make_cancel(harness.order()))
    assert answer.failure is not None
    assert answer.failure.code == "ORDER_REJECTED"
    assert worker.ledger("cancel") == []


def test_a_change_of_another_generation_is_not_made_and_a_cancel_is(
    harness: WorkerHarness, worker: SpawnedWorker
) -> None:
    order = place_unknown_order(harness, worker)
    changed = ask_worker(harness, make_change(order, generation="before the flush"))
    assert changed.failure is not None
    assert changed.failure.code == "OUTCOME_UNKNOWN"
    cancelled = ask_worker(
        harness, msgspec.structs.replace(make_cancel(order), generation="before the flush")
    )
    assert cancelled.failure is None
    assert worker.ledger("replace") == []


def test_a_change_that_is_pushed_again_is_made_once(
    harness: WorkerHarness, worker: SpawnedWorker
) -> None:
    order = place_unknown_order(harness, worker)
    item = harness.enqueue_raw("change-1", encode(make_change(order)))
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
        make_broker_order(lost, OrderState.FILLED, FILL),
        make_broker_order(other, OrderState.SUBMITTED),
    )
    answer = ask_worker(harness, query(harness))
    assert answer.report is not None
    report = decode_report(answer.report)
    assert [order.tag for order in report.orders] == [lost.tag, other.tag]
    assert report.balance is not None
    assert (report.balance.cash, report.balance.available) == (Decimal(10), Decimal(7))
    assert (report.complete, report.absence_certain, report.positions) == (True, True, [])
    assert harness.states(lost.order_id)[-1] == "filled"
    only = ask_worker(harness, query(harness, "query-2", tags=(other.tag,), balance=False))
    assert only.report is not None
    assert [order.tag for order in decode_report(only.report).orders] == [other.tag]


def test_a_query_that_the_broker_does_not_answer_fails_with_its_code(
    harness: WorkerHarness, worker: SpawnedWorker
) -> None:
    worker.tell_broker("unlisted")
    answer = ask_worker(harness, query(harness))
    assert answer.failure is not None
    assert (answer.failure.code, answer.report) == ("BROKER_UNREACHABLE", None)


def test_what_a_lost_worker_had_in_hand_is_answered_and_never_executed(
    harness: WorkerHarness,
) -> None:
    order = harness.order()
    for request in (make_cancel(order), query(harness)):
        harness.enqueue_raw(request.request_id, encode(request))
        harness.client.execute(
            "LMOVE", keys.requests(harness.user), keys.processing(harness.user), "RIGHT", "LEFT"
        )
    worker = harness.active()
    codes = [harness.answer(name).failure for name in ("cancel-1", "query-1")]
    assert [failure.code for failure in codes if failure] == ["OUTCOME_UNKNOWN", "WORKER_LOST"]
    eventually(lambda: harness.processing() == 0, "the processing list is empty")
    assert worker.ledger("cancel") == []
