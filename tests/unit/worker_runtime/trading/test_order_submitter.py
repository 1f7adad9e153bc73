"""An order whose grants are void each time ends with its deadline."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

from tests.support.orders.limit_order import ORDER
from worker_runtime.brokers.port import ConnectionKey
from worker_runtime.process.log import Log
from worker_runtime.process.shared_state import SharedState
from worker_runtime.protocol.errors import DeadlineExceeded
from worker_runtime.protocol.messages import OrderEvent, OrderState
from worker_runtime.protocol.requests import OPEN_SWITCH
from worker_runtime.trading.order_submitter import OrderSubmitter, UnknownOutcomes
from worker_runtime.trading.order_tracker import OrderTracker
from worker_runtime.trading.queue_item import QueueItem
from worker_runtime.trading.rate_limiter import CallKind


class LateGrants:
    """Replaces `BrokerCalls`: each grant is void when the order could be sent, until its time is
    up."""

    grant_is_fresh = False

    def __init__(self) -> None:
        self.grants = 0

    def ensure_session(self, account_id: str, item: QueueItem) -> object:
        return object()

    def session(self, account_id: str) -> object:
        key = ConnectionKey("paper", "stock", True, account_id)
        account = SimpleNamespace(key=key)
        return SimpleNamespace(account=account, books_awaited=False, differs_since=0)

    def spend_budget(self, account_id: str, kind: CallKind, item: QueueItem) -> None:
        self.grants += 1

    def call_timeout(self, item: QueueItem) -> float:
        if self.grants >= 3:
            raise DeadlineExceeded
        return 1.0


class AcceptingSendBuffer:
    """Replaces the send buffer, of which Valkey takes everything."""

    journaled = True
    switch_is_stale = False
    switch = OPEN_SWITCH

    def add_journal_entry(self, order_id: str) -> None: ...

    def read_switch(self) -> None: ...

    def add_event(self, event: OrderEvent) -> None: ...

    def flush(self) -> bool:
        return True


def test_an_order_whose_grant_is_always_too_old_expires() -> None:
    calls: Any = LateGrants()
    send_buffer: Any = AcceptingSendBuffer()
    log = Log("CRITICAL")
    tracker = OrderTracker(1, send_buffer.add_event, log)
    submitter = OrderSubmitter(
        calls,
        tracker,
        UnknownOutcomes(tracker),
        send_buffer=send_buffer,
        shared_state=SharedState(),
        log=log,
    )
    done = submitter.submit_order(
        ORDER, QueueItem("request", b"", 0, ORDER.generation, OPEN_SWITCH)
    )
    assert done.outcome.state is OrderState.EXPIRED
    assert calls.grants == 3
