"""What the broker lists after a login: missed fills are told, strangers reported, requests wait for
it."""

from __future__ import annotations

import msgspec

from tests.support.waiting import eventually
from tests.support.workers.harness import WorkerHarness
from tests.support.workers.trading import FILL, make_broker_order
from worker_runtime.protocol.messages import OrderEvent, OrderState


def test_a_fill_that_was_missed_is_told_before_the_first_request_is_taken(
    harness: WorkerHarness,
) -> None:
    missed, stranger = harness.order(), harness.order()
    harness.open_orders = [missed]
    worker = harness.ready()
    worker.broker_lists(
        make_broker_order(missed, OrderState.FILLED, FILL),
        make_broker_order(stranger, OrderState.SUBMITTED),
    )
    first = harness.order()
    harness.enqueue(first)
    assert harness.claim(worker).failure is None
    harness.answer(first.request_id)
    told = [event for event in harness.events() if isinstance(event, OrderEvent)]
    assert [(event.order_id, event.state) for event in told[:2]] == [
        (missed.order_id, OrderState.FILLED),
        (first.order_id, OrderState.SUBMITTING),
    ]
    assert (told[0].fill, told[0].broker_order_id) == (FILL, f"b-{missed.order_id}")
    [report] = harness.reports()
    assert (report.account_id, report.complete, report.absence_certain) == ("a1", True, True)
    assert [order.tag for order in report.orders] == [stranger.tag]


def test_an_order_is_known_by_the_brokers_id_where_its_tag_is_used_by_another_one(
    harness: WorkerHarness,
) -> None:
    yesterdays = harness.order(broker_order_id="b-old", tag="same")
    todays = harness.order(tag="same")
    harness.open_orders = [yesterdays, todays]
    worker = harness.ready()
    worker.broker_lists(make_broker_order(todays, OrderState.CANCELLED))
    assert harness.claim(worker).failure is None
    assert harness.states(todays.order_id) == ["cancelled"]
    assert harness.states(yesterdays.order_id) == []


def test_an_open_order_that_still_waits_is_executed_and_one_that_the_broker_has_is_not(
    harness: WorkerHarness,
) -> None:
    waiting, there = harness.order(), harness.order()
    harness.open_orders = [waiting, there]
    worker = harness.ready()
    worker.broker_lists(make_broker_order(there, OrderState.SUBMITTED))
    harness.enqueue(waiting)
    harness.enqueue(there)
    assert harness.claim(worker).failure is None
    answer = harness.answer(there.request_id)
    assert answer.outcome is not None
    assert (answer.outcome.state, answer.failure) == (OrderState.SUBMITTED, None)
    assert worker.placed() == [waiting.order_id]


def test_an_order_whose_submission_was_begun_is_unknown_and_not_placed_though_the_list_lacks_it(
    harness: WorkerHarness,
) -> None:
    """Valkey came back older: the order is in its queue again, without a journal entry."""
    begun, waiting = harness.order(), harness.order()
    harness.open_orders = [msgspec.structs.replace(begun, begun=True), waiting]
    worker = harness.ready()
    harness.enqueue(begun)
    harness.enqueue(waiting)
    assert harness.claim(worker).failure is None
    answer = harness.answer(begun.request_id)
    assert answer.outcome is not None
    assert answer.failure is not None
    assert (answer.outcome.state, answer.failure.code) == (OrderState.UNKNOWN, "OUTCOME_UNKNOWN")
    assert harness.answer(waiting.request_id).failure is None
    assert worker.placed() == [waiting.order_id]


def test_an_order_that_the_broker_lists_while_it_waits_for_the_list_is_not_placed(
    harness: WorkerHarness,
) -> None:
    there = harness.order()
    harness.open_orders = [there]
    worker = harness.ready()
    worker.tell_broker("unlisted")
    worker.broker_lists(make_broker_order(there, OrderState.SUBMITTED))
    harness.enqueue(there)
    assert harness.claim(worker).failure is None
    eventually(lambda: harness.processing() == 1, "it was popped and waits for the list")
    (worker.folder / "unlisted").unlink()
    answer = harness.answer(there.request_id)
    assert answer.outcome is not None
    assert (answer.outcome.state, answer.failure) == (OrderState.SUBMITTED, None)
    assert worker.placed() == []


def test_without_a_listing_requests_wait_and_the_worker_says_why(harness: WorkerHarness) -> None:
    worker = harness.ready()
    worker.tell_broker("unlisted")
    assert harness.claim(worker).failure is None
    eventually(lambda: harness.kinds() == ["degraded"], "the missing list is reported")
    order, late = harness.order(), harness.order()
    harness.enqueue(late, ttl_ms=4_000)  # it has to be taken before that, to hear why it waits
    refused = harness.answer(late.request_id)
    assert refused.failure is not None
    assert refused.failure.code == "DEADLINE_EXCEEDED"
    assert "BROKER_UNREACHABLE" in refused.failure.detail
    harness.enqueue(order)
    (worker.folder / "unlisted").unlink()
    assert harness.answer(order.request_id).failure is None
    assert worker.placed() == [order.order_id]
    eventually(lambda: harness.kinds() == ["degraded", "connected"], "it is healthy again")


def test_positions_that_could_not_be_read_are_asked_for_until_they_are(
    harness: WorkerHarness,
) -> None:
    worker = harness.ready()
    worker.tell_broker("positions-away")
    assert harness.claim(worker).failure is None
    assert harness.send().failure is None, "orders are taken meanwhile"
    eventually(lambda: len(harness.reports()) >= 2, "it was tried again")
    assert not any(report.complete for report in harness.reports())
    (worker.folder / "positions-away").unlink()
    eventually(lambda: harness.reports()[-1].complete, "the positions are known", patience=15.0)
    told = len(harness.reports())
    assert harness.send().failure is None
    assert (len(harness.reports()), len(worker.ledger("login"))) == (told, 1)


def test_an_order_of_unknown_outcome_is_settled_by_the_list_after_a_reconnect(
    harness: WorkerHarness,
) -> None:
    worker = harness.active()
    lost = harness.order(symbol="LOST")
    harness.enqueue(lost)
    assert harness.answer(lost.request_id).failure is not None
    worker.broker_lists(make_broker_order(lost, OrderState.FILLED, FILL))
    assert harness.send(symbol="DOWN").failure is not None
    assert harness.send().failure is None
    assert len(worker.ledger("login")) == 2
    assert harness.states(lost.order_id) == ["submitting", "unknown", "filled"]
    assert [report.orders for report in harness.reports()] == [[], []]
