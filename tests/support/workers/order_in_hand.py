"""Contains a switch in Valkey, and an order that a worker has taken from its queue."""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import replace
from types import SimpleNamespace
from typing import Any

from tests.support.message_signing import switch_args
from tests.support.workers.harness import WorkerHarness
from worker_runtime.brokers.port import ConnectionKey
from worker_runtime.process.log import Log
from worker_runtime.process.shared_state import SharedState
from worker_runtime.protocol import keys
from worker_runtime.protocol.broker_reports import BrokerOrder
from worker_runtime.protocol.errors import OrderRejected
from worker_runtime.protocol.messages import OrderState
from worker_runtime.protocol.requests import SwitchState, UserSwitch
from worker_runtime.protocol.scripts import WRITE_SWITCH
from worker_runtime.session.queue_reader import RequestQueueReader
from worker_runtime.trading.order_submitter import OrderPostponed, OrderSubmitter, UnknownOutcomes
from worker_runtime.trading.order_tracker import OrderTracker
from worker_runtime.trading.queue_item import QueueItem
from worker_runtime.trading.rate_limiter import CallKind
from worker_runtime.trading.send_buffer import SendBuffer

HALTED = UserSwitch(version=1, every=SwitchState.HALTED)


REDUCING = UserSwitch(version=2, every=SwitchState.REDUCING)


def write_switch(harness: WorkerHarness, user_switch: UserSwitch) -> None:
    assert (
        harness.client.run(
            WRITE_SWITCH, [keys.switch(harness.user)], switch_args(harness.user, user_switch)
        )
        == b"ok"
    )


class GrantingBrokerCalls:
    """Stands for `BrokerCalls`: runs `granted` when the order waits for room within the limits."""

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

    def await_next_check(self, item: QueueItem) -> None:
        self._paused()

    def call_once(
        self, account_id: str, item: QueueItem, call: Callable[[float], BrokerOrder]
    ) -> BrokerOrder:
        self.changed += 1
        raise OrderRejected("by the broker")


class OrderInHand:
    """Submits one order through `calls`, as a worker that took it from its queue."""

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
