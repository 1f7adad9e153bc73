"""The kill switch where it counts: right before the broker."""

from __future__ import annotations

import os
import signal
import time
from collections.abc import Callable
from dataclasses import replace
from types import SimpleNamespace
from typing import Any

import pytest

from tests.support.message_signing import SECRETS, switch_args, switch_words
from tests.support.workers.harness import WorkerStage
from tests.support.workers.process import eventually
from worker_runtime.brokers.port import ConnectionKey
from worker_runtime.process.log import Log
from worker_runtime.process.shared_state import SharedState
from worker_runtime.protocol import keys
from worker_runtime.protocol.broker_reports import BrokerOrder
from worker_runtime.protocol.errors import DeadlineExceeded, OrderRejected
from worker_runtime.protocol.messages import OrderState
from worker_runtime.protocol.requests import (
    OPEN_SWITCH,
    SWITCH_MAC,
    SWITCH_VERSION,
    SwitchState,
    UserSwitch,
)
from worker_runtime.protocol.scripts import WRITE_SWITCH
from worker_runtime.session.queue_reader import RequestQueueReader
from worker_runtime.trading.order_submitter import OrderPostponed, OrderSubmitter, UnknownOutcomes
from worker_runtime.trading.order_tracker import OrderTracker
from worker_runtime.trading.queue_item import QueueItem
from worker_runtime.trading.rate_limiter import CallKind, CountUnavailable
from worker_runtime.trading.send_buffer import SendBuffer

HALTED = UserSwitch(version=1, every=SwitchState.HALTED)
REDUCING = UserSwitch(version=2, every=SwitchState.REDUCING)


def switch(stage: WorkerStage, wanted: UserSwitch) -> None:
    assert (
        stage.client.run(WRITE_SWITCH, [keys.switch(stage.user)], switch_args(stage.user, wanted))
        == b"ok"
    )


def of_another_server(stage: WorkerStage) -> None:
    """As in a copy of Valkey that lagged when it was promoted."""
    switch(stage, UserSwitch(version=3, server="another one"))


def code(stage: WorkerStage, request_id: str) -> str:
    answer = stage.answer(request_id)
    assert answer.outcome is not None
    if answer.failure is None:
        return answer.outcome.state.value
    assert answer.outcome.state is OrderState.REJECTED
    return answer.failure.code


def test_orders_that_were_queued_before_the_halt_are_refused(stage: WorkerStage) -> None:
    worker = stage.active()
    slow, *queued = stage.order(symbol="SLOW"), stage.order(), stage.order()
    for order in (slow, *queued):
        stage.enqueue(order)
    eventually(worker.placed, "the slow order is at the broker")
    switch(stage, HALTED)
    worker.tell_broker("gate")
    assert [code(stage, order.request_id) for order in queued] == ["TRADING_HALTED"] * 2
    assert code(stage, slow.request_id) == "filled"
    assert worker.placed() == [slow.order_id]
    switch(stage, UserSwitch(version=3))
    again = stage.order()
    stage.enqueue(again)
    assert code(stage, again.request_id) == "filled"


def test_a_missing_switch_means_halted(stage: WorkerStage) -> None:
    worker = stage.active()
    stage.client.execute("DEL", keys.switch(stage.user))
    answer = stage.send()
    assert answer.failure is not None
    assert answer.failure.code == "TRADING_HALTED"
    assert worker.placed() == []


@pytest.mark.parametrize("field", [b"nonsense", b"\xff", b""])
def test_a_switch_that_makes_no_sense_means_halted(stage: WorkerStage, field: bytes) -> None:
    stage.active()
    stage.client.execute("HSET", keys.switch(stage.user), "*", field)
    answer = stage.send()
    assert answer.failure is not None
    assert answer.failure.code == "TRADING_HALTED"


def test_while_reducing_only_orders_that_reduce_are_taken(stage: WorkerStage) -> None:
    worker = stage.active()
    switch(stage, REDUCING)
    opening, closing = stage.order(), stage.order(reduce_only=True)
    stage.enqueue(opening)
    stage.enqueue(closing)
    assert code(stage, opening.request_id) == "REDUCING_ONLY"
    assert code(stage, closing.request_id) == "filled"
    assert worker.placed() == [closing.order_id]


def overwrite(stage: WorkerStage, words: list[str | int]) -> None:
    """What somebody does who can only write to Valkey."""
    stage.client.execute("DEL", keys.switch(stage.user))
    stage.client.execute("HSET", keys.switch(stage.user), SWITCH_VERSION, *words)


def test_a_forged_switch_opens_nothing(stage: WorkerStage) -> None:
    worker = stage.active()
    switch(stage, HALTED)
    mac = stage.client.execute("HGET", keys.switch(stage.user), SWITCH_MAC).decode()
    stranger = UserSwitch(version=9).words(SECRETS.request_keys("another"), stage.user)
    forgeries: list[list[str | int]] = [
        [9, "*", "open"],
        [9, "*", "open", SWITCH_MAC, mac],
        stranger,
    ]
    for forged in forgeries:
        overwrite(stage, forged)
        order = stage.order()
        stage.enqueue(order)
        assert code(stage, order.request_id) == "TRADING_HALTED"
    assert worker.placed() == []
    assert len(worker.logged("switch_refused")) == 1


@pytest.mark.parametrize("replaced", [False, True])
def test_an_older_genuine_switch_does_not_undo_a_newer_halt(
    stage: WorkerStage, replaced: bool
) -> None:
    worker = stage.active()
    switch(stage, UserSwitch(version=5))
    first = stage.order()
    stage.enqueue(first)
    assert code(stage, first.request_id) == "filled"
    switch(stage, UserSwitch(version=6, every=SwitchState.HALTED))
    halted = stage.order()
    stage.enqueue(halted)
    assert code(stage, halted.request_id) == "TRADING_HALTED"
    overwrite(stage, switch_words(stage.user, UserSwitch(version=5)))
    if replaced:
        os.kill(worker.child("session"), signal.SIGKILL)
        stage.revive(worker)
    order = stage.order()
    stage.enqueue(order)
    assert code(stage, order.request_id) == "TRADING_HALTED"
    switch(stage, UserSwitch(version=7))
    last = stage.order()
    stage.enqueue(last)
    assert code(stage, last.request_id) == "filled"


def test_a_switch_of_one_account_leaves_the_others_alone(stage: WorkerStage) -> None:
    stage.active()
    order = stage.order()
    switch(stage, UserSwitch(version=1, accounts={"another": SwitchState.HALTED}))
    stage.enqueue(order)
    assert code(stage, order.request_id) == "filled"
    switch(stage, UserSwitch(version=2, accounts={order.account_id: SwitchState.HALTED}))
    again = stage.order()
    stage.enqueue(again)
    assert code(stage, again.request_id) == "TRADING_HALTED"


def test_a_halt_counts_though_it_came_after_the_pop(stage: WorkerStage) -> None:
    """The broker's session ended, so the order that was popped waits for a new login."""
    worker = stage.active()
    worker.tell_broker("ended")
    worker.tell_broker("away")
    switch(stage, OPEN_SWITCH)
    order = stage.order()
    stage.enqueue(order, ttl_ms=60_000)
    eventually(
        lambda: len(worker.ledger("login")) >= 2, "the order was popped, and its login failed"
    )
    switch(stage, HALTED)
    (worker.folder / "away").unlink()
    assert code(stage, order.request_id) == "TRADING_HALTED"
    assert worker.placed() == []


@pytest.mark.parametrize(("last", "expected"), [("halted", "TRADING_HALTED"), ("open", "filled")])
def test_requests_stay_in_their_queue_until_the_switch_was_told_to_the_server_that_has_it(
    stage: WorkerStage, last: str, expected: str
) -> None:
    of_another_server(stage)
    worker = stage.active()
    order = stage.order()
    stage.enqueue(order)
    eventually(lambda: worker.logged("switch_of_another_server"), "the worker sees that")
    assert stage.reload(worker, "l1", a1=("better", 2)).failure is None  # control messages pass
    assert stage.client.execute("LLEN", keys.requests(stage.user)) == 1
    assert worker.placed() == []
    switch(stage, UserSwitch(version=4, every=SwitchState(last), server=stage.client.server()))
    assert code(stage, order.request_id) == expected
    assert worker.logged("switch_is_back")


def test_an_order_in_hand_waits_until_the_switch_was_told_to_the_server_that_has_it(
    stage: WorkerStage,
) -> None:
    """As when the server was restarted, and the reply to the pop was lost with its connection."""
    worker = stage.active()
    worker.tell_broker("ended")
    worker.tell_broker("away")
    order = stage.order()
    stage.enqueue(order, ttl_ms=60_000)
    eventually(
        lambda: worker.logged("order_postponed"), "the order was popped, and its login failed"
    )
    of_another_server(stage)
    (worker.folder / "away").unlink()
    eventually(lambda: worker.logged("switch_of_another_server"), "the worker sees that")
    assert stage.states(order.order_id) == []
    assert worker.placed() == []
    switch(stage, UserSwitch(version=4, server=stage.client.server()))
    assert code(stage, order.request_id) == "filled"
    assert worker.placed() == [order.order_id]


class Granting:
    """Stands for `BrokerCalls`: the wait for the budget ends when the server has become another
    one."""

    grant_is_fresh = True
    account = SimpleNamespace(key=ConnectionKey("paper", "stock", simulation=True, account_id="a1"))

    def __init__(self, granted: Callable[[], None], paused: Callable[[], None]) -> None:
        self._granted = granted
        self._paused = paused
        self.changed = 0
        self.books_awaited, self.differs_since = False, 0

    def ensure_session(self, account_id: str, item: QueueItem) -> object:
        return self

    def session(self, account_id: str) -> object:
        return self

    def spend_budget(self, account_id: str, what: CallKind, item: QueueItem) -> None:
        self._granted()

    def pause(self, item: QueueItem) -> None:
        self._paused()

    def call_once(
        self, account_id: str, item: QueueItem, call: Callable[[float], BrokerOrder]
    ) -> BrokerOrder:
        self.changed += 1
        raise OrderRejected("by the broker")


class Hand:
    """One order in the hand of a worker whose way to the broker is `calls`."""

    def __init__(self, stage: WorkerStage, calls: Any, switch_wait: float = 60.0) -> None:
        stage.own("w1", 1)
        self.order = stage.order()
        self.item = stage.enqueue(self.order)
        shared_state, log = SharedState(), Log("ERROR")
        shared_state.session_number = 1
        shared_state.write_message_keys(stage.secrets.for_worker(stage.user, 1))
        shared_state.assign(stage.user, "c1", 1)
        self.queue_reader = RequestQueueReader(stage.client, shared_state, "w1", log)
        self.send_buffer = SendBuffer(stage.client, stage.config(worker_id="w1"), shared_state, log)
        tracker = OrderTracker(1, self.send_buffer.add_event, log)
        self._submitter = OrderSubmitter(
            calls,
            tracker,
            UnknownOutcomes(tracker),
            send_buffer=self.send_buffer,
            shared_state=shared_state,
            log=log,
            switch_wait=switch_wait,
        )

    def submitted(self, *, late: bool = False) -> tuple[OrderState, str, str] | None:
        """State, code and detail of what the next pop brings; None if it goes back to its queue."""
        item = self.queue_reader.pop()
        if late:
            item = replace(item, deadline_ns=time.monotonic_ns())
        try:
            outcome, failure = self._submitter.submit_order(self.order, item)
        except OrderPostponed:
            return None
        assert failure is not None
        return outcome.state, failure.code, failure.detail


def test_an_order_that_met_the_switch_of_another_server_on_its_way_waits_in_hand_until_that_is_told(
    stage: WorkerStage,
) -> None:
    def copied() -> None:
        switch(stage, UserSwitch(version=4, server=stage.client.server()))

    calls = Granting(lambda: of_another_server(stage), copied)
    assert Hand(stage, calls).submitted() == (
        OrderState.REJECTED,
        "ORDER_REJECTED",
        "by the broker",
    )
    assert calls.changed == 1


def test_an_order_in_hand_is_halted_by_what_the_server_is_told_at_last(stage: WorkerStage) -> None:
    def copied() -> None:
        switch(stage, UserSwitch(version=4, every=SwitchState.HALTED, server=stage.client.server()))

    calls = Granting(lambda: of_another_server(stage), copied)
    done = Hand(stage, calls).submitted()
    assert done is not None
    assert done[:2] == (OrderState.REJECTED, "TRADING_HALTED")
    assert calls.changed == 0


def test_an_order_in_hand_whose_deadline_passes_before_the_server_is_told_expires(
    stage: WorkerStage,
) -> None:
    def late() -> None:
        raise DeadlineExceeded

    calls = Granting(lambda: of_another_server(stage), late)
    done = Hand(stage, calls).submitted()
    assert done is not None
    assert done[:2] == (OrderState.EXPIRED, "DEADLINE_EXCEEDED")
    assert calls.changed == 0


def test_an_order_in_hand_does_not_wait_for_ever_for_the_switch_and_is_not_called_halted(
    stage: WorkerStage,
) -> None:
    calls = Granting(lambda: of_another_server(stage), lambda: None)
    done = Hand(stage, calls, switch_wait=0.0).submitted()
    assert done is not None
    assert done[:2] == (OrderState.REJECTED, "WORKER_UNAVAILABLE")
    assert calls.changed == 0


class Uncounting(Granting):
    """Valkey, which counts, is away when the order's call is to be counted."""

    def __init__(self) -> None:
        super().__init__(lambda: None, lambda: None)

    def spend_budget(self, account_id: str, what: CallKind, item: QueueItem) -> None:
        raise CountUnavailable("away")


def test_an_order_that_cannot_be_counted_is_not_begun_and_goes_back_to_its_queue(
    stage: WorkerStage,
) -> None:
    calls = Uncounting()
    hand = Hand(stage, calls)
    assert hand.submitted() is None
    assert len(hand.send_buffer) == 0
    assert hand.queue_reader.put_back(hand.item, hand.order.order_id) == "queued"
    # Its time is up before Valkey counts again: it is answered.
    done = hand.submitted(late=True)
    assert done is not None
    assert done[:2] == (OrderState.EXPIRED, "DEADLINE_EXCEEDED")
    assert "RATE_LIMITED" in done[2]
