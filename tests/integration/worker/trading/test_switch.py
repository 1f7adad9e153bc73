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
from tests.support.workers.harness import WorkerHarness
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


def switch(harness: WorkerHarness, user_switch: UserSwitch) -> None:
    assert (
        harness.client.run(
            WRITE_SWITCH, [keys.switch(harness.user)], switch_args(harness.user, user_switch)
        )
        == b"ok"
    )


def of_another_server(harness: WorkerHarness) -> None:
    """As in a copy of Valkey that lagged when it was promoted."""
    switch(harness, UserSwitch(version=3, server="another one"))


def code(harness: WorkerHarness, request_id: str) -> str:
    answer = harness.answer(request_id)
    assert answer.outcome is not None
    if answer.failure is None:
        return answer.outcome.state.value
    assert answer.outcome.state is OrderState.REJECTED
    return answer.failure.code


def test_orders_that_were_queued_before_the_halt_are_refused(harness: WorkerHarness) -> None:
    worker = harness.active()
    slow, *queued = harness.order(symbol="SLOW"), harness.order(), harness.order()
    for order in (slow, *queued):
        harness.enqueue(order)
    eventually(worker.placed, "the slow order is at the broker")
    switch(harness, HALTED)
    worker.tell_broker("gate")
    assert [code(harness, order.request_id) for order in queued] == ["TRADING_HALTED"] * 2
    assert code(harness, slow.request_id) == "filled"
    assert worker.placed() == [slow.order_id]
    switch(harness, UserSwitch(version=3))
    again = harness.order()
    harness.enqueue(again)
    assert code(harness, again.request_id) == "filled"


def test_a_missing_switch_means_halted(harness: WorkerHarness) -> None:
    worker = harness.active()
    harness.client.execute("DEL", keys.switch(harness.user))
    answer = harness.send()
    assert answer.failure is not None
    assert answer.failure.code == "TRADING_HALTED"
    assert worker.placed() == []


@pytest.mark.parametrize("field", [b"nonsense", b"\xff", b""])
def test_a_switch_that_makes_no_sense_means_halted(harness: WorkerHarness, field: bytes) -> None:
    harness.active()
    harness.client.execute("HSET", keys.switch(harness.user), "*", field)
    answer = harness.send()
    assert answer.failure is not None
    assert answer.failure.code == "TRADING_HALTED"


def test_while_reducing_only_orders_that_reduce_are_taken(harness: WorkerHarness) -> None:
    worker = harness.active()
    switch(harness, REDUCING)
    opening, closing = harness.order(), harness.order(reduce_only=True)
    harness.enqueue(opening)
    harness.enqueue(closing)
    assert code(harness, opening.request_id) == "REDUCING_ONLY"
    assert code(harness, closing.request_id) == "filled"
    assert worker.placed() == [closing.order_id]


def overwrite(harness: WorkerHarness, words: list[str | int]) -> None:
    """What somebody does who can only write to Valkey."""
    harness.client.execute("DEL", keys.switch(harness.user))
    harness.client.execute("HSET", keys.switch(harness.user), SWITCH_VERSION, *words)


def test_a_forged_switch_opens_nothing(harness: WorkerHarness) -> None:
    worker = harness.active()
    switch(harness, HALTED)
    mac = harness.client.execute("HGET", keys.switch(harness.user), SWITCH_MAC).decode()
    stranger = UserSwitch(version=9).words(SECRETS.request_keys("another"), harness.user)
    forgeries: list[list[str | int]] = [
        [9, "*", "open"],
        [9, "*", "open", SWITCH_MAC, mac],
        stranger,
    ]
    for forged in forgeries:
        overwrite(harness, forged)
        order = harness.order()
        harness.enqueue(order)
        assert code(harness, order.request_id) == "TRADING_HALTED"
    assert worker.placed() == []
    assert len(worker.logged("switch_refused")) == 1


@pytest.mark.parametrize("replaced", [False, True])
def test_an_older_genuine_switch_does_not_undo_a_newer_halt(
    harness: WorkerHarness, replaced: bool
) -> None:
    worker = harness.active()
    switch(harness, UserSwitch(version=5))
    first = harness.order()
    harness.enqueue(first)
    assert code(harness, first.request_id) == "filled"
    switch(harness, UserSwitch(version=6, every=SwitchState.HALTED))
    halted = harness.order()
    harness.enqueue(halted)
    assert code(harness, halted.request_id) == "TRADING_HALTED"
    overwrite(harness, switch_words(harness.user, UserSwitch(version=5)))
    if replaced:
        os.kill(worker.child("session"), signal.SIGKILL)
        harness.revive(worker)
    order = harness.order()
    harness.enqueue(order)
    assert code(harness, order.request_id) == "TRADING_HALTED"
    switch(harness, UserSwitch(version=7))
    last = harness.order()
    harness.enqueue(last)
    assert code(harness, last.request_id) == "filled"


def test_a_switch_of_one_account_leaves_the_others_alone(harness: WorkerHarness) -> None:
    harness.active()
    order = harness.order()
    switch(harness, UserSwitch(version=1, accounts={"another": SwitchState.HALTED}))
    harness.enqueue(order)
    assert code(harness, order.request_id) == "filled"
    switch(harness, UserSwitch(version=2, accounts={order.account_id: SwitchState.HALTED}))
    again = harness.order()
    harness.enqueue(again)
    assert code(harness, again.request_id) == "TRADING_HALTED"


def test_a_halt_counts_though_it_came_after_the_pop(harness: WorkerHarness) -> None:
    """The broker's session ended, so the order that was popped waits for a new login."""
    worker = harness.active()
    worker.tell_broker("ended")
    worker.tell_broker("away")
    switch(harness, OPEN_SWITCH)
    order = harness.order()
    harness.enqueue(order, ttl_ms=60_000)
    eventually(
        lambda: len(worker.ledger("login")) >= 2, "the order was popped, and its login failed"
    )
    switch(harness, HALTED)
    (worker.folder / "away").unlink()
    assert code(harness, order.request_id) == "TRADING_HALTED"
    assert worker.placed() == []


@pytest.mark.parametrize(("last", "expected"), [("halted", "TRADING_HALTED"), ("open", "filled")])
def test_requests_stay_in_their_queue_until_the_switch_was_told_to_the_server_that_has_it(
    harness: WorkerHarness, last: str, expected: str
) -> None:
    of_another_server(harness)
    worker = harness.active()
    order = harness.order()
    harness.enqueue(order)
    eventually(lambda: worker.logged("switch_of_another_server"), "the worker sees that")
    assert harness.reload(worker, "l1", a1=("better", 2)).failure is None  # control messages pass
    assert harness.client.execute("LLEN", keys.requests(harness.user)) == 1
    assert worker.placed() == []
    switch(harness, UserSwitch(version=4, every=SwitchState(last), server=harness.client.server()))
    assert code(harness, order.request_id) == expected
    assert worker.logged("switch_is_back")


def test_an_order_in_hand_waits_until_the_switch_was_told_to_the_server_that_has_it(
    harness: WorkerHarness,
) -> None:
    """As when the server was restarted, and the reply to the pop was lost with its connection."""
    worker = harness.active()
    worker.tell_broker("ended")
    worker.tell_broker("away")
    order = harness.order()
    harness.enqueue(order, ttl_ms=60_000)
    eventually(
        lambda: worker.logged("order_postponed"), "the order was popped, and its login failed"
    )
    of_another_server(harness)
    (worker.folder / "away").unlink()
    eventually(lambda: worker.logged("switch_of_another_server"), "the worker sees that")
    assert harness.states(order.order_id) == []
    assert worker.placed() == []
    switch(harness, UserSwitch(version=4, server=harness.client.server()))
    assert code(harness, order.request_id) == "filled"
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

    def spend_budget(self, account_id: str, kind: CallKind, item: QueueItem) -> None:
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

    def __init__(self, harness: WorkerHarness, calls: Any, switch_wait: float = 60.0) -> None:
        harness.own("w1", 1)
        self.order = harness.order()
        self.item = harness.enqueue(self.order)
        shared_state, log = SharedState(), Log("ERROR")
        shared_state.session_number = 1
        shared_state.write_message_keys(harness.secrets.for_worker(harness.user, 1))
        shared_state.assign(harness.user, "c1", 1)
        self.queue_reader = RequestQueueReader(harness.client, shared_state, "w1", log)
        self.send_buffer = SendBuffer(
            harness.client, harness.config(worker_id="w1"), shared_state, log
        )
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
    harness: WorkerHarness,
) -> None:
    def copied() -> None:
        switch(harness, UserSwitch(version=4, server=harness.client.server()))

    calls = Granting(lambda: of_another_server(harness), copied)
    assert Hand(harness, calls).submitted() == (
        OrderState.REJECTED,
        "ORDER_REJECTED",
        "by the broker",
    )
    assert calls.changed == 1


def test_an_order_in_hand_is_halted_by_what_the_server_is_told_at_last(
    harness: WorkerHarness,
) -> None:
    def copied() -> None:
        switch(
            harness, UserSwitch(version=4, every=SwitchState.HALTED, server=harness.client.server())
        )

    calls = Granting(lambda: of_another_server(harness), copied)
    done = Hand(harness, calls).submitted()
    assert done is not None
    assert done[:2] == (OrderState.REJECTED, "TRADING_HALTED")
    assert calls.changed == 0


def test_an_order_in_hand_whose_deadline_passes_before_the_server_is_told_expires(
    harness: WorkerHarness,
) -> None:
    def late() -> None:
        raise DeadlineExceeded

    calls = Granting(lambda: of_another_server(harness), late)
    done = Hand(harness, calls).submitted()
    assert done is not None
    assert done[:2] == (OrderState.EXPIRED, "DEADLINE_EXCEEDED")
    assert calls.changed == 0


def test_an_order_in_hand_does_not_wait_for_ever_for_the_switch_and_is_not_called_halted(
    harness: WorkerHarness,
) -> None:
    calls = Granting(lambda: of_another_server(harness), lambda: None)
    done = Hand(harness, calls, switch_wait=0.0).submitted()
    assert done is not None
    assert done[:2] == (OrderState.REJECTED, "WORKER_UNAVAILABLE")
    assert calls.changed == 0


class Uncounting(Granting):
    """Valkey, which counts, is away when the order's call is to be counted."""

    def __init__(self) -> None:
        super().__init__(lambda: None, lambda: None)

    def spend_budget(self, account_id: str, kind: CallKind, item: QueueItem) -> None:
        raise CountUnavailable("away")


def test_an_order_that_cannot_be_counted_is_not_begun_and_goes_back_to_its_queue(
    harness: WorkerHarness,
) -> None:
    calls = Uncounting()
    hand = Hand(harness, calls)
    assert hand.submitted() is None
    assert len(hand.send_buffer) == 0
    assert hand.queue_reader.put_back(hand.item, hand.order.order_id) == "queued"
    # Its time is up before Valkey counts again: it is answered.
    done = hand.submitted(late=True)
    assert done is not None
    assert done[:2] == (OrderState.EXPIRED, "DEADLINE_EXCEEDED")
    assert "RATE_LIMITED" in done[2]
