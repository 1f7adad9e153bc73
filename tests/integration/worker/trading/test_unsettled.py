"""An order of unknown outcome blocks those that were in the queue by then."""

from __future__ import annotations

import os
import signal
from decimal import Decimal

import msgspec
import pytest

from tests.support.waiting import eventually
from tests.support.workers.harness import WorkerHarness
from worker_runtime.protocol.broker_reports import BrokerOrder
from worker_runtime.protocol.messages import Answer, OrderState, PlaceOrder

#: Milliseconds until the deadline, as the API tells it. Some orders wait until their worker is
#: launched.
LIFETIME = 60_000


def queued(harness: WorkerHarness, **changes: object) -> PlaceOrder:
    order = harness.order(lifetime_ms=LIFETIME, **changes)
    harness.enqueue(order, ttl_ms=LIFETIME)
    return order


def blocked(answer: Answer, by: PlaceOrder) -> bool:
    assert answer.failure is not None
    assert answer.outcome is not None
    assert by.order_id in answer.failure.detail
    return (answer.failure.code, answer.outcome.state) == ("SYMBOL_BLOCKED", OrderState.REJECTED)


def test_orders_behind_one_that_became_unknown_are_refused_in_its_symbol(
    harness: WorkerHarness,
) -> None:
    # All of them are accepted, and in the queue, before the first one is submitted.
    lost = queued(harness, symbol="LOST")
    behind = queued(harness, symbol="LOST")
    closing = queued(harness, symbol="LOST", reduce_only=True)
    other_account = queued(harness, symbol="LOST", account_id="a2")
    elsewhere = queued(harness)
    worker = harness.active(accounts={"a1": "good", "a2": "good"})
    assert harness.answer(elsewhere.request_id).failure is None
    assert blocked(harness.answer(behind.request_id), lost)
    # As the API does with one that is not accepted yet.
    assert blocked(harness.answer(closing.request_id), lost)
    assert harness.states(behind.order_id) == ["rejected"]
    assert worker.placed() == [lost.order_id, other_account.order_id, elsewhere.order_id]


@pytest.mark.parametrize(("scope", "passes"), [("symbol", True), ("account", False), ("off", True)])
def test_the_setting_says_what_is_blocked(harness: WorkerHarness, scope: str, passes: bool) -> None:
    lost = queued(harness, symbol="LOST")
    behind = queued(harness, symbol="2330", unknown_blocks=scope)
    same = queued(harness, symbol="LOST", unknown_blocks="off")
    worker = harness.active()
    harness.answer(same.request_id)
    assert (harness.answer(behind.request_id).failure is None) is passes
    assert worker.placed() == [lost.order_id, *([behind.order_id] if passes else []), same.order_id]


def test_an_order_accepted_after_the_unknown_one_was_told_is_not_held_up(
    harness: WorkerHarness,
) -> None:
    worker = harness.active()
    lost = queued(harness, symbol="LOST")
    harness.answer(lost.request_id)
    # Twenty seconds later, PostgreSQL would have refused this one if the first were still unknown.
    # (Five are enough; the time in which the pop stands still counts against them.)
    later = harness.order(symbol="LOST", lifetime_ms=LIFETIME)
    harness.enqueue(later, ttl_ms=LIFETIME + 20_000)
    harness.answer(later.request_id)
    assert worker.placed() == [lost.order_id, later.order_id]


def test_an_order_begun_by_a_former_worker_blocks_what_is_in_the_queue(
    harness: WorkerHarness,
) -> None:
    begun = harness.order(begun=True)
    waits = harness.order()  # not begun: it blocks nothing
    harness.open_orders = [begun, waits]
    harness.enqueue(msgspec.structs.replace(waits, lifetime_ms=LIFETIME), ttl_ms=LIFETIME)
    elsewhere = queued(harness, symbol="2317")
    worker = harness.active()
    assert harness.answer(elsewhere.request_id).failure is None
    assert blocked(harness.answer(waits.request_id), begun)
    assert worker.placed() == [elsewhere.order_id]


def test_what_a_replaced_session_had_in_hand_blocks_what_is_in_the_queue(
    harness: WorkerHarness,
) -> None:
    worker = harness.active()
    lost = queued(harness, symbol="SLOW")
    eventually(worker.placed, "it is at the broker")
    behind = queued(harness, symbol="SLOW")
    os.kill(worker.both()[0], signal.SIGKILL)
    assert harness.revive(worker).failure is None
    assert blocked(harness.answer(behind.request_id), lost)
    assert worker.placed() == [lost.order_id]


def test_an_unknown_order_in_a_rolling_code_blocks_the_contract_that_it_may_stand_for(
    harness: WorkerHarness,
) -> None:
    begun = harness.order(begun=True, symbol="TXFR1")
    harness.open_orders = [begun]
    same, elsewhere = queued(harness, symbol="TXFK6"), queued(harness, symbol="MXFK6")
    worker = harness.active()
    assert harness.answer(elsewhere.request_id).failure is None
    assert blocked(harness.answer(same.request_id), begun)
    assert worker.placed() == [elsewhere.order_id]


def test_an_unknown_order_that_the_list_shows_blocks_nothing(harness: WorkerHarness) -> None:
    begun, worker = harness.order(begun=True), harness.ready()
    harness.open_orders = [begun]
    shown = BrokerOrder(
        broker_order_id="b9",
        tag=begun.tag,
        symbol=begun.symbol,
        side=begun.side,
        quantity=begun.quantity,
        price_type=begun.price_type,
        price=Decimal("100.5"),
        time_in_force=begun.time_in_force,
        state=OrderState.SUBMITTED,
        fills=[],
    )
    worker.broker_lists(shown)
    behind = queued(harness)
    assert harness.claim(worker).failure is None
    assert harness.answer(behind.request_id).failure is None
    assert worker.placed() == [behind.order_id]
