"""An order of unknown outcome stands in the way of those that were in the queue by then."""

from __future__ import annotations

import os
import signal
from decimal import Decimal

import msgspec
import pytest

from tests.support.workers.harness import WorkerStage
from tests.support.workers.process import eventually
from worker_runtime.protocol.broker_reports import BrokerOrder
from worker_runtime.protocol.messages import Answer, OrderState, PlaceOrder

#: Milliseconds until the deadline, as the API tells it. Some orders wait until their worker is
#: launched.
LIFETIME = 60_000


def queued(stage: WorkerStage, **changes: object) -> PlaceOrder:
    order = stage.order(lifetime_ms=LIFETIME, **changes)
    stage.enqueue(order, ttl_ms=LIFETIME)
    return order


def blocked(answer: Answer, by: PlaceOrder) -> bool:
    assert answer.failure is not None
    assert answer.outcome is not None
    assert by.order_id in answer.failure.detail
    return (answer.failure.code, answer.outcome.state) == ("SYMBOL_BLOCKED", OrderState.REJECTED)


def test_orders_behind_one_that_became_unknown_are_refused_in_its_symbol(
    stage: WorkerStage,
) -> None:
    # All of them are accepted, and in the queue, before the first one is submitted.
    lost = queued(stage, symbol="LOST")
    behind = queued(stage, symbol="LOST")
    closing = queued(stage, symbol="LOST", reduce_only=True)
    other_account = queued(stage, symbol="LOST", account_id="a2")
    elsewhere = queued(stage)
    worker = stage.active(accounts={"a1": "good", "a2": "good"})
    assert stage.answer(elsewhere.request_id).failure is None
    assert blocked(stage.answer(behind.request_id), lost)
    # As the API does with one that is not accepted yet.
    assert blocked(stage.answer(closing.request_id), lost)
    assert stage.states(behind.order_id) == ["rejected"]
    assert worker.placed() == [lost.order_id, other_account.order_id, elsewhere.order_id]


@pytest.mark.parametrize(("scope", "passes"), [("symbol", True), ("account", False), ("off", True)])
def test_the_setting_says_what_is_blocked(stage: WorkerStage, scope: str, passes: bool) -> None:
    lost = queued(stage, symbol="LOST")
    behind = queued(stage, symbol="2330", unknown_blocks=scope)
    same = queued(stage, symbol="LOST", unknown_blocks="off")
    worker = stage.active()
    stage.answer(same.request_id)
    assert (stage.answer(behind.request_id).failure is None) is passes
    assert worker.placed() == [lost.order_id, *([behind.order_id] if passes else []), same.order_id]


def test_an_order_accepted_after_the_unknown_one_was_told_is_not_held_up(
    stage: WorkerStage,
) -> None:
    worker = stage.active()
    lost = queued(stage, symbol="LOST")
    stage.answer(lost.request_id)
    # Twenty seconds later, PostgreSQL would have refused this one if the first were still unknown.
    # (Five are enough; the time in which the pop stands still counts against them.)
    later = stage.order(symbol="LOST", lifetime_ms=LIFETIME)
    stage.enqueue(later, ttl_ms=LIFETIME + 20_000)
    stage.answer(later.request_id)
    assert worker.placed() == [lost.order_id, later.order_id]


def test_an_order_begun_by_a_former_worker_blocks_what_is_in_the_queue(stage: WorkerStage) -> None:
    begun = stage.order(begun=True)
    waits = stage.order()  # not begun: it blocks nothing
    stage.open_orders = [begun, waits]
    stage.enqueue(msgspec.structs.replace(waits, lifetime_ms=LIFETIME), ttl_ms=LIFETIME)
    elsewhere = queued(stage, symbol="2317")
    worker = stage.active()
    assert stage.answer(elsewhere.request_id).failure is None
    assert blocked(stage.answer(waits.request_id), begun)
    assert worker.placed() == [elsewhere.order_id]


def test_what_a_replaced_session_had_in_hand_blocks_what_is_in_the_queue(
    stage: WorkerStage,
) -> None:
    worker = stage.active()
    lost = queued(stage, symbol="SLOW")
    eventually(worker.placed, "it is at the broker")
    behind = queued(stage, symbol="SLOW")
    os.kill(worker.both()[0], signal.SIGKILL)
    assert stage.revive(worker).failure is None
    assert blocked(stage.answer(behind.request_id), lost)
    assert worker.placed() == [lost.order_id]


def test_an_unknown_order_in_a_rolling_code_blocks_the_contract_that_it_may_stand_for(
    stage: WorkerStage,
) -> None:
    begun = stage.order(begun=True, symbol="TXFR1")
    stage.open_orders = [begun]
    same, elsewhere = queued(stage, symbol="TXFK6"), queued(stage, symbol="MXFK6")
    worker = stage.active()
    assert stage.answer(elsewhere.request_id).failure is None
    assert blocked(stage.answer(same.request_id), begun)
    assert worker.placed() == [elsewhere.order_id]


def test_an_unknown_order_that_the_list_shows_blocks_nothing(stage: WorkerStage) -> None:
    begun, worker = stage.order(begun=True), stage.ready()
    stage.open_orders = [begun]
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
    behind = queued(stage)
    assert stage.claim(worker).failure is None
    assert stage.answer(behind.request_id).failure is None
    assert worker.placed() == [behind.order_id]
