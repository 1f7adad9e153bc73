"""Orders through the doorbell to the answer."""

from __future__ import annotations

import pytest

from tests.support.message_signing import read_workers_answer
from tests.support.waiting import eventually
from tests.support.workers.harness import WorkerHarness
from tests.support.workers.process import PATIENCE
from worker_runtime.process.valkey import Valkey
from worker_runtime.protocol import keys
from worker_runtime.protocol.messages import OrderEvent, OrderState, encode
from worker_runtime.protocol.requests import parse_frame


def test_an_order_is_filled_answered_and_announced(harness: WorkerHarness) -> None:
    worker = harness.active()
    listener = Valkey(harness.url, timeout=PATIENCE)
    listener.execute("SUBSCRIBE", keys.answers("test"))
    order = harness.order()
    harness.enqueue(order)
    announced = read_workers_answer(listener.receive()[2], harness.user)
    listener.close()
    answer = harness.answer(order.request_id)
    assert announced == answer
    assert answer.failure is None
    assert answer.outcome is not None
    assert answer.outcome.state is OrderState.FILLED
    assert (answer.outcome.filled_quantity, answer.outcome.average_price) == (2, order.price)
    assert harness.states(order.order_id) == ["submitting", "submitted", "filled"]
    assert worker.placed() == [order.order_id]
    assert harness.processing() == 0


def test_the_journal_is_written_before_the_broker_is_called_and_stays(
    harness: WorkerHarness,
) -> None:
    worker = harness.active()
    order = harness.order(symbol="SLOW")
    harness.enqueue(order)
    eventually(worker.placed, "the order is at the broker")
    key = keys.journal(harness.user, order.order_id)
    assert 0 <= harness.now_ms() - int(harness.client.execute("GET", key)) < 60_000
    assert harness.states(order.order_id) == ["submitting"]
    worker.tell_broker("gate")
    harness.answer(order.request_id)
    assert 172_000 < harness.client.execute("TTL", key) <= 172_800


def test_an_order_that_is_in_the_journal_is_not_submitted_again(harness: WorkerHarness) -> None:
    worker = harness.active()
    order = harness.order()
    key = keys.journal(harness.user, order.order_id)
    harness.client.execute("SET", key, "1700000000000")
    harness.enqueue(order)
    answer = harness.answer(order.request_id)
    assert answer.failure is not None
    assert answer.failure.code == "OUTCOME_UNKNOWN"
    assert worker.placed() == []
    assert harness.client.execute("GET", key) == b"1700000000000"


def test_what_is_refused_before_the_broker_has_no_journal(harness: WorkerHarness) -> None:
    harness.active()
    answer = harness.send(account_id="nobody's")
    assert answer.outcome is not None
    assert (
        harness.client.execute("EXISTS", keys.journal(harness.user, answer.outcome.order_id)) == 0
    )


def test_two_orders_are_executed_in_the_order_they_came(harness: WorkerHarness) -> None:
    worker = harness.ready()
    first, second = harness.order(), harness.order()
    harness.enqueue(first)
    harness.enqueue(second)
    harness.claim(worker)
    harness.answer(second.request_id)
    assert worker.placed() == [first.order_id, second.order_id]


def test_a_late_request_leaves_the_queue_and_is_neither_submitted_nor_answered(
    harness: WorkerHarness,
) -> None:
    worker = harness.active()
    slow, late = harness.order(symbol="SLOW"), harness.order()
    harness.enqueue(slow)
    eventually(worker.placed, "the slow order is at the broker")
    deadline_ms = parse_frame(harness.enqueue(late, ttl_ms=1)).deadline_ms
    eventually(lambda: harness.now_ms() > deadline_ms, "the deadline has passed")
    worker.tell_broker("gate")
    assert harness.send().failure is None  # which came after it
    # The sweeper expires it: it may have been pushed again.
    assert not harness.answered(late.request_id)
    assert late.order_id not in worker.placed()
    assert harness.states(late.order_id) == []
    assert harness.processing() == 0


def test_a_malformed_request_is_answered(harness: WorkerHarness) -> None:
    worker = harness.active()
    harness.enqueue_raw("bad1", b'{"type":"place_order","v":1}')
    harness.enqueue_raw("bad2", b"\xff\xfe")
    harness.enqueue_raw("bad3", encode(harness.order(request_id="another")))
    harness.enqueue_raw("bad4", encode(harness.order(request_id="bad4", user_id="somebody else")))
    harness.enqueue_raw("bad5", encode(harness.order(request_id="bad5", v=99)))
    codes = [harness.answer(f"bad{n}").failure for n in (1, 2, 3, 4, 5)]
    assert [failure.code for failure in codes if failure] == [
        *["MALFORMED_MESSAGE"] * 4,
        "UNSUPPORTED_SCHEMA",
    ]
    assert worker.placed() == []
    assert harness.processing() == 0
    assert harness.send().failure is None


def test_an_item_that_is_no_request_at_all_is_dropped(harness: WorkerHarness) -> None:
    worker = harness.active()
    harness.client.execute("LPUSH", keys.requests(harness.user), "garbage")
    assert harness.send().failure is None
    assert len(worker.logged("request_refused")) == 1
    assert harness.processing() == 0


def test_an_order_for_an_unknown_account_is_rejected(harness: WorkerHarness) -> None:
    worker = harness.active()
    answer = harness.send(account_id="nobody's")
    assert answer.failure is not None
    assert answer.failure.code == "UNKNOWN_ACCOUNT"
    assert answer.outcome is not None
    assert answer.outcome.state is OrderState.REJECTED
    assert worker.placed() == []


def test_an_order_that_the_broker_rejects_is_rejected(harness: WorkerHarness) -> None:
    harness.active()
    answer = harness.send(symbol="REJECT")
    assert answer.failure is not None
    assert (answer.failure.code, answer.failure.detail) == ("ORDER_REJECTED", "price limit")
    assert answer.outcome is not None
    assert answer.outcome.state is OrderState.REJECTED
    assert harness.states(answer.outcome.order_id) == ["submitting", "rejected"]


@pytest.mark.parametrize(
    ("symbol", "code"),
    [("LIMITED", "RATE_LIMITED"), ("CLOSED", "BROKER_MAINTENANCE")],
)
def test_an_order_that_the_broker_did_not_let_in_is_rejected_and_the_session_stays(
    harness: WorkerHarness, symbol: str, code: str
) -> None:
    worker = harness.active()
    answer = harness.send(symbol=symbol)
    assert answer.failure is not None
    assert (answer.failure.code, answer.failure.retryable) == (code, True)
    assert answer.outcome is not None
    assert answer.outcome.state is OrderState.REJECTED
    assert harness.send().failure is None
    assert len(worker.ledger("login")) == 1


def test_an_order_without_an_acknowledgement_is_unknown_and_never_sent_again(
    harness: WorkerHarness,
) -> None:
    worker = harness.active()
    for symbol in ("LOST", "CRASH"):
        answer = harness.send(symbol=symbol)
        assert answer.failure is not None
        assert answer.failure.code == "OUTCOME_UNKNOWN"
        assert answer.outcome is not None
        assert answer.outcome.state is OrderState.UNKNOWN
        assert worker.placed().count(answer.outcome.order_id) == 1
    # The connection is checked before it is trusted with the next order.
    pings = len(worker.ledger("ping"))
    assert harness.send().failure is None
    assert pings >= 1


def test_an_order_on_a_session_that_is_down_is_rejected_and_the_next_one_served(
    harness: WorkerHarness,
) -> None:
    worker = harness.active()
    answer = harness.send(symbol="DOWN")
    assert answer.failure is not None
    assert (answer.failure.code, answer.failure.retryable) == ("SESSION_DOWN", True)
    assert harness.send().failure is None
    assert len(worker.ledger("login")) == 2
    assert harness.kinds() == ["connected", "reconnecting", "connected"]


def test_the_same_order_in_a_second_request_is_answered_and_not_submitted(
    harness: WorkerHarness,
) -> None:
    worker = harness.active()
    first = harness.send()
    assert first.outcome is not None
    second = harness.send(order_id=first.outcome.order_id)
    assert second.outcome == first.outcome
    assert worker.placed() == [first.outcome.order_id]


def test_an_order_of_another_generation_leaves_the_queue(harness: WorkerHarness) -> None:
    worker = harness.active()
    order = harness.order(generation="before the flush")
    harness.enqueue(order)
    assert harness.send().failure is None
    assert not harness.answered(order.request_id)  # the sweeper sees that Valkey has lost data
    assert order.order_id not in worker.placed()


def test_a_fill_that_comes_later_and_twice_is_one_event(harness: WorkerHarness) -> None:
    harness.active()
    answer = harness.send(symbol="LATER")
    assert answer.outcome is not None
    order_id = answer.outcome.order_id
    assert answer.outcome.state is OrderState.SUBMITTED
    eventually(lambda: "filled" in harness.states(order_id), "the fill is reported")
    assert harness.send().failure is None  # all that came before has been dealt with by now
    assert harness.states(order_id) == ["submitting", "submitted", "filled"]
    told = [event for event in harness.events(repeats=True) if isinstance(event, OrderEvent)]
    fills = [event.fill for event in told if event.order_id == order_id and event.fill]
    assert [fill.fill_id for fill in fills] == [f"f-{order_id}"]
    assert len({event.event_id for event in told}) == len(told)


def test_what_a_lost_worker_had_taken_is_unknown_and_never_replayed(harness: WorkerHarness) -> None:
    abandoned = harness.order()
    item = harness.enqueue(abandoned)
    harness.client.execute(
        "LMOVE", keys.requests(harness.user), keys.processing(harness.user), "RIGHT", "LEFT"
    )
    assert item
    harness.client.execute("LPUSH", keys.processing(harness.user), "garbage")
    worker = harness.active(accounts={"a1": "good"})
    answer = harness.answer(abandoned.request_id)
    assert answer.failure is not None
    assert answer.failure.code == "OUTCOME_UNKNOWN"
    assert answer.outcome is not None
    assert answer.outcome.state is OrderState.UNKNOWN
    eventually(lambda: harness.processing() == 0, "the processing list is empty")
    assert harness.states(abandoned.order_id) == ["unknown"]
    assert worker.placed() == []


def test_the_broker_gets_no_more_time_than_the_deadline_leaves(harness: WorkerHarness) -> None:
    worker = harness.active(broker_timeout=8.0)
    order = harness.order()
    harness.enqueue(order, ttl_ms=6_000)
    harness.answer(order.request_id)
    long = harness.order()
    harness.enqueue(long, ttl_ms=60_000)
    harness.answer(long.request_id)
    short, longest = [entry["timeout"] for entry in worker.ledger("place")]
    assert 0 < short <= 6.0
    assert longest == 8.0
