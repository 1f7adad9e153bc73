"""An order whose grants are void each time ends with its deadline."""

from __future__ import annotations

from typing import Any

from tests.unit.worker_runtime.test_desk import ORDER
from worker_runtime.board import Board
from worker_runtime.budget import What
from worker_runtime.fills import Ledger
from worker_runtime.inlet import Piece
from worker_runtime.log import Log
from worker_runtime.orders import Placing
from worker_runtime.protocol.errors import DeadlineExceeded
from worker_runtime.protocol.messages import OrderEvent, OrderState
from worker_runtime.protocol.switches import OPEN
from worker_runtime.unsettled import Unsettled


class Late:
    """Stands for `Calls`: each grant is void when the order could be sent, until its time is up."""

    affordable = False

    def __init__(self) -> None:
        self.grants = 0

    def ready(self, account_id: str, piece: Piece) -> object:
        return object()

    def afford(self, account_id: str, what: What, piece: Piece) -> None:
        self.grants += 1

    def time_left(self, piece: Piece) -> float:
        if self.grants >= 3:
            raise DeadlineExceeded
        return 1.0


class Taking:
    """Stands for the outbox, of which Valkey takes everything."""

    journaled = True
    unbound = False
    switch = OPEN

    def journal(self, order_id: str) -> None: ...

    def ask_switch(self) -> None: ...

    def event(self, event: OrderEvent) -> None: ...

    def flush(self) -> bool:
        return True


def test_an_order_whose_grant_is_always_too_old_expires() -> None:
    calls: Any = Late()
    outbox: Any = Taking()
    log = Log("CRITICAL")
    ledger = Ledger(1, outbox.event, log)
    placing = Placing(calls, ledger, Unsettled(ledger), outbox=outbox, board=Board(), log=log)
    done = placing.execute(ORDER, Piece("request", b"", 0, ORDER.generation, OPEN))
    assert done is not None
    assert done[0].state is OrderState.EXPIRED
    assert calls.grants == 3
