"""The kill switch and another price: what was asked for before a halt is not sent to the broker
after it."""

from __future__ import annotations

from typing import Any

import msgspec
import pytest

from tests.support.workers.harness import WorkerHarness
from tests.support.workers.order_in_hand import (
    HALTED,
    REDUCING,
    GrantingBrokerCalls,
    OrderInHand,
    write_switch,
)
from tests.support.workers.process import SpawnedWorker
from tests.support.workers.trading import (
    ask_worker,
    make_cancel,
    make_change,
    make_price_change,
    place_unknown_order,
)
from worker_runtime.process.log import Log
from worker_runtime.protocol import keys
from worker_runtime.protocol.requests import OPEN_SWITCH, ReplaceOrder, UserSwitch
from worker_runtime.trading.order_changer import OrderChanger
from worker_runtime.trading.order_tracker import OrderTracker
from worker_runtime.trading.queue_item import QueueItem


@pytest.fixture
def worker(harness: WorkerHarness) -> SpawnedWorker:
    return harness.active()


def code(harness: WorkerHarness, request: ReplaceOrder) -> str:
    failure = ask_worker(harness, request).failure
    return "" if failure is None else failure.code


def test_no_price_is_changed_while_halted_and_a_quantity_still_falls(
    harness: WorkerHarness, worker: SpawnedWorker
) -> None:
    order = place_unknown_order(harness, worker)
    write_switch(harness, HALTED)
    assert code(harness, make_price_change(order, "p1")) == "TRADING_HALTED"
    assert code(harness, make_price_change(order, "p2", reduce_only=True)) == "TRADING_HALTED"
    assert worker.ledger("replace") == []
    assert code(harness, make_change(order, "q1")) == ""
    assert [entry["price"] for entry in worker.ledger("replace")] == ["None"]
    assert ask_worker(harness, make_cancel(order)).failure is None


def test_while_reducing_only_the_price_of_what_reduces_is_changed(
    harness: WorkerHarness, worker: SpawnedWorker
) -> None:
    order = place_unknown_order(harness, worker)
    write_switch(harness, REDUCING)
    assert code(harness, make_price_change(order, "p1")) == "REDUCING_ONLY"
    assert worker.ledger("replace") == []
    assert code(harness, make_price_change(order, "p2", reduce_only=True)) == ""
    assert [entry["price"] for entry in worker.ledger("replace")] == ["101"]
    write_switch(harness, UserSwitch(version=3))
    assert code(harness, make_price_change(order, "p3")) == ""


class BudgetWait(GrantingBrokerCalls):
    """The wait for the broker's budget, in which somebody halts the user."""

    def ensure_session(
        self, account_id: str, item: QueueItem, *, listed: bool = True
    ) -> BudgetWait:
        return self

    def queries_before_change(self, broker_order_id: str, *, quantity: bool = False) -> bool:
        return False


def test_a_halt_counts_though_it_came_after_the_change_was_popped(harness: WorkerHarness) -> None:
    calls: Any = BudgetWait(lambda: write_switch(harness, HALTED), lambda: None)
    hand = OrderInHand(harness, calls)
    item = hand.queue_reader.pop()
    assert item.switch == OPEN_SWITCH
    changer = OrderChanger(
        calls, OrderTracker(1, hand.send_buffer.add_event, Log("ERROR")), hand.send_buffer
    )
    order = harness.order()
    request = msgspec.structs.replace(
        make_price_change(order, "p1"), broker_order_id=f"b-{order.order_id}"
    )
    _, failure = changer.change_order(request, item)
    assert failure is not None
    assert (failure.code, calls.changed) == ("TRADING_HALTED", 0)


def test_a_missing_switch_changes_no_price(harness: WorkerHarness, worker: SpawnedWorker) -> None:
    order = place_unknown_order(harness, worker)
    harness.client.execute("DEL", keys.switch(harness.user))
    assert code(harness, make_price_change(order, "p1")) == "TRADING_HALTED"
    assert worker.ledger("replace") == []
