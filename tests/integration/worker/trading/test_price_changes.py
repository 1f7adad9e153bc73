"""The kill switch and another price: what was asked for before a halt is not sent to the broker
after it."""

from __future__ import annotations

from decimal import Decimal
from typing import Any

import msgspec
import pytest

from tests.integration.worker.trading.test_requests import ask, cancel, change, working
from tests.integration.worker.trading.test_switch import HALTED, REDUCING, Granting, Hand, switch
from tests.support.workers.harness import WorkerStage
from tests.support.workers.process import SpawnedWorker
from worker_runtime.process.log import Log
from worker_runtime.protocol import keys
from worker_runtime.protocol.messages import PlaceOrder
from worker_runtime.protocol.requests import OPEN_SWITCH, ReplaceOrder, UserSwitch
from worker_runtime.trading.order_changer import OrderChanger
from worker_runtime.trading.order_tracker import OrderTracker
from worker_runtime.trading.queue_item import QueueItem


@pytest.fixture
def worker(stage: WorkerStage) -> SpawnedWorker:
    return stage.active()


def repriced(order: PlaceOrder, request_id: str, *, reduce_only: bool = False) -> ReplaceOrder:
    plain = change(order, request_id)
    return msgspec.structs.replace(plain, price=Decimal("101"), reduce_only=reduce_only)


def code(stage: WorkerStage, request: ReplaceOrder) -> str:
    failure = ask(stage, request).failure
    return "" if failure is None else failure.code


def test_no_price_is_changed_while_halted_and_a_quantity_still_falls(
    stage: WorkerStage, worker: SpawnedWorker
) -> None:
    order = working(stage, worker)
    switch(stage, HALTED)
    assert code(stage, repriced(order, "p1")) == "TRADING_HALTED"
    assert code(stage, repriced(order, "p2", reduce_only=True)) == "TRADING_HALTED"
    assert worker.ledger("replace") == []
    assert code(stage, change(order, "q1")) == ""
    assert [entry["price"] for entry in worker.ledger("replace")] == ["None"]
    assert ask(stage, cancel(order)).failure is None


def test_while_reducing_only_the_price_of_what_reduces_is_changed(
    stage: WorkerStage, worker: SpawnedWorker
) -> None:
    order = working(stage, worker)
    switch(stage, REDUCING)
    assert code(stage, repriced(order, "p1")) == "REDUCING_ONLY"
    assert worker.ledger("replace") == []
    assert code(stage, repriced(order, "p2", reduce_only=True)) == ""
    assert [entry["price"] for entry in worker.ledger("replace")] == ["101"]
    switch(stage, UserSwitch(version=3))
    assert code(stage, repriced(order, "p3")) == ""


class BudgetWait(Granting):
    """The wait for the broker's budget, in which somebody halts the user."""

    def ensure_session(
        self, account_id: str, item: QueueItem, *, listed: bool = True
    ) -> BudgetWait:
        return self

    def queries_before_change(self, broker_order_id: str, *, quantity: bool = False) -> bool:
        return False


def test_a_halt_counts_though_it_came_after_the_change_was_popped(stage: WorkerStage) -> None:
    calls: Any = BudgetWait(lambda: switch(stage, HALTED), lambda: None)
    hand = Hand(stage, calls)
    item = hand.queue_reader.pop()
    assert item.switch == OPEN_SWITCH
    changer = OrderChanger(
        calls, OrderTracker(1, hand.send_buffer.add_event, Log("ERROR")), hand.send_buffer
    )
    order = stage.order()
    request = msgspec.structs.replace(repriced(order, "p1"), broker_order_id=f"b-{order.order_id}")
    _, failure = changer.change_order(request, item)
    assert failure is not None
    assert (failure.code, calls.changed) == ("TRADING_HALTED", 0)


def test_a_missing_switch_changes_no_price(stage: WorkerStage, worker: SpawnedWorker) -> None:
    order = working(stage, worker)
    stage.client.execute("DEL", keys.switch(stage.user))
    assert code(stage, repriced(order, "p1")) == "TRADING_HALTED"
    assert worker.ledger("replace") == []
