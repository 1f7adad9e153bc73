"""An order whose grants are void each time ends with its deadline."""

from __future__ import annotations

from typing import Any

from tests.unit.worker_runtime.trading.test_request_handler import ORDER
from worker_runtime.process.log import Log
from worker_runtime.process.shared_state import SharedState
from worker_runtime.protocol.errors import DeadlineExceeded
from worker_runtime.protocol.messages import OrderEvent, OrderState
from worker_runtime.protocol.switches import OPEN
from worker_runtime.session.queue_reader import QueueItem
from worker_runtime.trading.order_checks import UnknownOutcomes
from worker_runtime.trading.order_submitter import OrderSubmitter
from worker_runtime.trading.order_tracker import OrderTracker
from worker_runtime.trading.rate_limiter import CallKind


class Late:
    """Stands for `Calls`: each grant is void when the order could be sent, until its time is up."""

    grant_is_fresh = False

    def __init__(self) -> None:
        self.grants = 0

    def ready(self, account_id: str, piece: QueueItem) -> object:
        return object()

    def spend_budget(self, account_id: str, what: CallKind, piece: QueueItem) -> None:
        self.grants += 1

    def time_left(self, piece: QueueItem) -> float:
        if self.grants >= 3:
            raise DeadlineExceeded
        return 1.0


class Taking:
    """Stands for the outbox, of which Valkey takes everything."""

    journaled = True
    unbound = False
    switch = OPEN

    def journal(self, order_id: str) -> None: ...

    def read_switch(self) -> None: ...

    def event(self, event: OrderEvent) -> None: ...

    def flush(self) -> bool:
        return True


def test_an_order_whose_grant_is_always_too_old_expires() -> None:
    calls: Any = Late()
    outbox: Any = Taking()
    log = Log("CRITICAL")
    ledger = OrderTracker(1, outbox.event, log)
    placing = OrderSubmitter(
        calls, ledger, UnknownOutcomes(ledger), outbox=outbox, board=SharedState(), log=log
    )
    done = placing.execute(ORDER, QueueItem("request", b"", 0, ORDER.generation, OPEN))
    assert done is not None
    assert done[0].state is OrderState.EXPIRED
    assert calls.grants == 3
