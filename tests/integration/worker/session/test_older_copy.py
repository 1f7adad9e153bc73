"""A queue that may be an older copy: what the worker before may have submitted is not submitted
again."""

from __future__ import annotations

from typing import Any

import pytest

from tests.support.waiting import eventually
from tests.support.workers.harness import WorkerHarness
from worker_runtime.process.log import Log
from worker_runtime.process.shared_state import SharedState
from worker_runtime.protocol import keys
from worker_runtime.protocol.errors import OrderRejected
from worker_runtime.protocol.messages import OrderState, PlaceOrder
from worker_runtime.session.queue_reader import RequestQueueReader
from worker_runtime.trading.order_submitter import OrderSubmitter, UnknownOutcomes
from worker_runtime.trading.order_tracker import OrderTracker
from worker_runtime.trading.queue_item import QueueItem
from worker_runtime.trading.send_buffer import SendBuffer

#: Milliseconds; as the API tells it.
LIFETIME = 60_000
ANOTHER = "another server, so that nothing is known of this one"


def promoted(harness: WorkerHarness, *, ago_ms: int = 0, server: str = "") -> int:
    """Notes, as the watcher does, since when the server is known; returns that, in ms."""
    at_ms = harness.now_ms() - ago_ms
    harness.client.execute(
        "HSET", keys.SERVER_SINCE, "server", server or harness.client.server(), "at_ms", at_ms
    )
    return at_ms


def queued(harness: WorkerHarness, *, accepted_in_ms: int = 0) -> PlaceOrder:
    order = harness.order(lifetime_ms=LIFETIME)
    harness.enqueue(order, ttl_ms=LIFETIME + accepted_in_ms)
    return order


def test_what_a_killed_worker_submitted_is_unknown_to_the_next_one_when_the_queue_has_it_again(
    harness: WorkerHarness,
) -> None:
    first = harness.active()
    order = queued(harness)
    assert harness.answer(order.request_id).failure is None
    first.kill()
    # A copy of the moment before the first worker popped it; the broker's list does not show it
    # yet.
    names = (keys.seen, keys.response, keys.journal)
    harness.client.execute("DEL", *(name(harness.user, order.request_id) for name in names))
    harness.client.execute("DEL", keys.journal(harness.user, order.order_id))
    harness.enqueue(order, ttl_ms=LIFETIME - 1_000)
    since = promoted(harness)
    second = harness.ready()
    assert harness.claim(second, claim_id="c2", epoch=2).failure is None
    answer = harness.answer(order.request_id)
    assert answer.outcome is not None
    assert answer.outcome.state is OrderState.UNKNOWN
    assert answer.failure is not None
    assert "An earlier worker may have submitted this order" in answer.failure.detail
    eventually(
        lambda: harness.now_ms() > since + 1_000, "the clocks of servers may differ by a second"
    )
    after = harness.order(symbol="2317", lifetime_ms=LIFETIME)
    # Accepted long after that, however late it is popped.
    harness.enqueue(after, ttl_ms=LIFETIME + 8_000)
    assert harness.answer(after.request_id).failure is None
    assert (first.placed(), second.placed()) == ([order.order_id], [after.order_id])


class RefusingCalls:
    """Stands for `BrokerCalls`; an order that comes as far as this would be submitted."""

    def ensure_session(self, account_id: str, item: QueueItem) -> object:
        raise OrderRejected("it would have been submitted")


def executed(harness: WorkerHarness, *, epoch: int, accepted_in_ms: int) -> bool:
    """Whether a worker of this epoch carries out an order that was accepted so long after its
    claim."""
    shared_state, log = SharedState(), Log("ERROR")
    shared_state.session_number = 1
    harness.own("w1", epoch)
    shared_state.write_message_keys(harness.secrets.for_worker(harness.user, epoch))
    shared_state.assign(harness.user, "c1", epoch)
    order = queued(harness, accepted_in_ms=accepted_in_ms)
    send_buffer = SendBuffer(harness.client, harness.config(worker_id="w1"), shared_state, log)
    tracker = OrderTracker(epoch, send_buffer.add_event, log)
    calls: Any = RefusingCalls()
    submitter = OrderSubmitter(
        calls,
        tracker,
        UnknownOutcomes(tracker),
        send_buffer=send_buffer,
        shared_state=shared_state,
        log=log,
    )
    queue_reader = RequestQueueReader(harness.client, shared_state, "w1", log)
    assert queue_reader.is_switch_current()
    outcome, failure = submitter.submit_order(order, queue_reader.pop())
    assert failure is not None
    assert (outcome.state, failure.code) in {
        (OrderState.REJECTED, "ORDER_REJECTED"),
        (OrderState.UNKNOWN, "OUTCOME_UNKNOWN"),
    }
    return outcome.state is OrderState.REJECTED


@pytest.mark.parametrize(
    ("epoch", "noted", "expected"),
    [
        pytest.param(2, {}, False, id="the server came after the order"),
        pytest.param(2, {"server": ANOTHER}, False, id="the server is not noted yet"),
        pytest.param(2, {"ago_ms": 60_000}, True, id="the server was there before"),
        pytest.param(2, None, True, id="nobody has noted any server"),
        pytest.param(1, {}, True, id="there was no worker before"),
    ],
)
def test_an_order_that_a_former_worker_may_have_had_is_executed_if_the_queue_can_be_no_older_copy(
    harness: WorkerHarness, epoch: int, noted: dict[str, Any] | None, expected: bool
) -> None:
    if noted is not None:
        promoted(harness, **noted)
    assert executed(harness, epoch=epoch, accepted_in_ms=-10_000) is expected


def test_the_worker_that_was_there_by_then_executes_it(harness: WorkerHarness) -> None:
    # The time in which a pop stands still counts as if the order had been accepted so much earlier.
    promoted(harness, ago_ms=-10_000)
    assert executed(harness, epoch=2, accepted_in_ms=8_000)
