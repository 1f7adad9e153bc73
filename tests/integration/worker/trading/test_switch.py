"""The kill switch where it counts: right before the broker."""

from __future__ import annotations

import os
import signal

import pytest

from tests.support.message_signing import SECRETS, switch_words
from tests.support.waiting import eventually
from tests.support.workers.harness import WorkerHarness
from tests.support.workers.order_in_hand import (
    HALTED,
    REDUCING,
    GrantingBrokerCalls,
    OrderInHand,
    write_switch,
)
from tests.support.workers.trading import outcome_code
from worker_runtime.protocol import keys
from worker_runtime.protocol.errors import DeadlineExceeded
from worker_runtime.protocol.messages import OrderState
from worker_runtime.protocol.requests import (
    OPEN_SWITCH,
    SWITCH_MAC,
    SWITCH_VERSION,
    SwitchState,
    UserSwitch,
)
from worker_runtime.trading.queue_item import QueueItem
from worker_runtime.trading.rate_limiter import CallKind, CountUnavailable


def of_another_server(harness: WorkerHarness) -> None:
    """As in a copy of Valkey that lagged when it was promoted."""
    write_switch(harness, UserSwitch(version=3, server="another one"))


def test_orders_that_were_queued_before_the_halt_are_refused(harness: WorkerHarness) -> None:
    worker = harness.active()
    slow, *queued = harness.order(symbol="SLOW"), harness.order(), harness.order()
    for order in (slow, *queued):
        harness.enqueue(order)
    eventually(worker.placed, "the slow order is at the broker")
    write_switch(harness, HALTED)
    worker.tell_broker("gate")
    assert [outcome_code(harness, order.request_id) for order in queued] == ["TRADING_HALTED"] * 2
    assert outcome_code(harness, slow.request_id) == "filled"
    assert worker.placed() == [slow.order_id]
    write_switch(harness, UserSwitch(version=3))
    again = harness.order()
    harness.enqueue(again)
    assert outcome_code(harness, again.request_id) == "filled"


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
    write_switch(harness, REDUCING)
    opening, closing = harness.order(), harness.order(reduce_only=True)
    harness.enqueue(opening)
    harness.enqueue(closing)
    assert outcome_code(harness, opening.request_id) == "REDUCING_ONLY"
    assert outcome_code(harness, closing.request_id) == "filled"
    assert worker.placed() == [closing.order_id]


def overwrite(harness: WorkerHarness, words: list[str | int]) -> None:
    """What somebody does who can only write to Valkey."""
    harness.client.execute("DEL", keys.switch(harness.user))
    harness.client.execute("HSET", keys.switch(harness.user), SWITCH_VERSION, *words)


def test_a_forged_switch_opens_nothing(harness: WorkerHarness) -> None:
    worker = harness.active()
    write_switch(harness, HALTED)
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
        assert outcome_code(harness, order.request_id) == "TRADING_HALTED"
    assert worker.placed() == []
    assert len(worker.logged("switch_refused")) == 1


@pytest.mark.parametrize("replaced", [False, True])
def test_an_older_genuine_switch_does_not_undo_a_newer_halt(
    harness: WorkerHarness, replaced: bool
) -> None:
    worker = harness.active()
    write_switch(harness, UserSwitch(version=5))
    first = harness.order()
    harness.enqueue(first)
    assert outcome_code(harness, first.request_id) == "filled"
    write_switch(harness, UserSwitch(version=6, every=SwitchState.HALTED))
    halted = harness.order()
    harness.enqueue(halted)
    assert outcome_code(harness, halted.request_id) == "TRADING_HALTED"
    overwrite(harness, switch_words(harness.user, UserSwitch(version=5)))
    if replaced:
        os.kill(worker.child("session"), signal.SIGKILL)
        harness.revive(worker)
    order = harness.order()
    harness.enqueue(order)
    assert outcome_code(harness, order.request_id) == "TRADING_HALTED"
    write_switch(harness, UserSwitch(version=7))
    last = harness.order()
    harness.enqueue(last)
    assert outcome_code(harness, last.request_id) == "filled"


def test_a_switch_of_one_account_leaves_the_others_alone(harness: WorkerHarness) -> None:
    harness.active()
    order = harness.order()
    write_switch(harness, UserSwitch(version=1, accounts={"another": SwitchState.HALTED}))
    harness.enqueue(order)
    assert outcome_code(harness, order.request_id) == "filled"
    write_switch(harness, UserSwitch(version=2, accounts={order.account_id: SwitchState.HALTED}))
    again = harness.order()
    harness.enqueue(again)
    assert outcome_code(harness, again.request_id) == "TRADING_HALTED"


def test_a_halt_counts_though_it_came_after_the_pop(harness: WorkerHarness) -> None:
    """The broker's session ended, so the order that was popped waits for a new login."""
    worker = harness.active()
    worker.tell_broker("ended")
    worker.tell_broker("away")
    write_switch(harness, OPEN_SWITCH)
    order = harness.order()
    harness.enqueue(order, ttl_ms=60_000)
    eventually(
        lambda: len(worker.ledger("login")) >= 2, "the order was popped, and its login failed"
    )
    write_switch(harness, HALTED)
    (worker.folder / "away").unlink()
    assert outcome_code(harness, order.request_id) == "TRADING_HALTED"
    assert worker.placed() == []


@pytest.mark.parametrize(("last", "expected"), [("halted", "TRADING_HALTED"), ("open", "filled")])
def test_requests_stay_in_their_queue_until_the_switch_is_written_to_the_server_that_has_it(
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
    write_switch(
        harness, UserSwitch(version=4, every=SwitchState(last), server=harness.client.server())
    )
    assert outcome_code(harness, order.request_id) == expected
    assert worker.logged("switch_is_back")


def test_an_order_in_hand_waits_until_the_switch_is_written_to_the_server_that_has_it(
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
    write_switch(harness, UserSwitch(version=4, server=harness.client.server()))
    assert outcome_code(harness, order.request_id) == "filled"
    assert worker.placed() == [order.order_id]


def test_an_order_that_met_the_switch_of_another_server_on_its_way_waits_until_it_is_written(
    harness: WorkerHarness,
) -> None:
    def copied() -> None:
        write_switch(harness, UserSwitch(version=4, server=harness.client.server()))

    calls = GrantingBrokerCalls(lambda: of_another_server(harness), copied)
    assert OrderInHand(harness, calls).submitted() == (
        OrderState.REJECTED,
        "ORDER_REJECTED",
        "by the broker",
    )
    assert calls.changed == 1


def test_an_order_in_hand_is_halted_by_the_switch_that_the_server_gets_at_last(
    harness: WorkerHarness,
) -> None:
    def copied() -> None:
        write_switch(
            harness, UserSwitch(version=4, every=SwitchState.HALTED, server=harness.client.server())
        )

    calls = GrantingBrokerCalls(lambda: of_another_server(harness), copied)
    done = OrderInHand(harness, calls).submitted()
    assert done is not None
    assert done[:2] == (OrderState.REJECTED, "TRADING_HALTED")
    assert calls.changed == 0


def test_an_order_in_hand_whose_deadline_passes_before_the_server_gets_the_switch_expires(
    harness: WorkerHarness,
) -> None:
    def late() -> None:
        raise DeadlineExceeded

    calls = GrantingBrokerCalls(lambda: of_another_server(harness), late)
    done = OrderInHand(harness, calls).submitted()
    assert done is not None
    assert done[:2] == (OrderState.EXPIRED, "DEADLINE_EXCEEDED")
    assert calls.changed == 0


def test_an_order_in_hand_does_not_wait_for_ever_for_the_switch_and_is_not_called_halted(
    harness: WorkerHarness,
) -> None:
    calls = GrantingBrokerCalls(lambda: of_another_server(harness), lambda: None)
    done = OrderInHand(harness, calls, switch_wait=0.0).submitted()
    assert done is not None
    assert done[:2] == (OrderState.REJECTED, "WORKER_UNAVAILABLE")
    assert calls.changed == 0


class Uncounting(GrantingBrokerCalls):
    """Valkey, which counts, is away when the order's call is to be counted."""

    def __init__(self) -> None:
        super().__init__(lambda: None, lambda: None)

    def spend_budget(self, account_id: str, kind: CallKind, item: QueueItem) -> None:
        raise CountUnavailable("away")


def test_an_order_that_cannot_be_counted_is_not_begun_and_goes_back_to_its_queue(
    harness: WorkerHarness,
) -> None:
    calls = Uncounting()
    hand = OrderInHand(harness, calls)
    assert hand.submitted() is None
    assert len(hand.send_buffer) == 0
    assert hand.queue_reader.put_back(hand.item, hand.order.order_id) == "queued"
    # Its time is up before Valkey counts again: it is answered.
    done = hand.submitted(late=True)
    assert done is not None
    assert done[:2] == (OrderState.EXPIRED, "DEADLINE_EXCEEDED")
    assert "RATE_LIMITED" in done[2]
