"""Closing the broker sessions inside the lease's margin, however many accounts there are."""

from __future__ import annotations

from contextlib import suppress
from threading import Barrier, BrokenBarrierError

from worker_runtime.board import Board
from worker_runtime.boottime import SECOND, boot_ns
from worker_runtime.brokers.fake import FakeBroker, FakeMarket
from worker_runtime.brokers.port import ConnectionKey, OnOrderChanged
from worker_runtime.budget import Unlimited
from worker_runtime.connection import Account
from worker_runtime.connections import Connections
from worker_runtime.health import Health
from worker_runtime.lease import MARGIN, Lease
from worker_runtime.log import Log
from worker_runtime.protocol.messages import Credentials

NAMES = ("a1", "a2", "a3")


class SlowToClose(FakeBroker):
    """Its logout ends when those of all the accounts have begun."""

    def __init__(
        self, market: FakeMarket, key: ConnectionKey, client: str, on_order: OnOrderChanged, together: Barrier
    ) -> None:
        super().__init__(market, key.account_id, client, on_order)
        self.together = together

    def close(self) -> None:
        with suppress(BrokenBarrierError):  # the test looks at the barrier
            self.together.wait(30.0)
        super().close()


def test_all_sessions_are_closed_at_once_and_the_board_says_so_afterwards() -> None:
    market, board, together = FakeMarket(), Board(), Barrier(len(NAMES))
    board.lease_session = boot_ns() + 30 * SECOND

    def factory(key: ConnectionKey, client: str, on_order: OnOrderChanged) -> SlowToClose:
        return SlowToClose(market, key, client, on_order, together)

    connections = Connections(
        lambda: factory,
        client="w1/1",
        lease=Lease(board),
        board=board,
        reconcile=lambda key, broker, timeout: None,
        on_order=lambda key, change: None,
        health=Health(board, lambda kind, detail: None),
        budget=Unlimited(),
        log=Log("ERROR"),
    )
    for name in NAMES:
        market.register(name, "key", "secret")
    credentials = Credentials(api_key="key", secret_key="secret")
    keys = [ConnectionKey("fake", "stock", True, name) for name in NAMES]
    connections.load(Account(key, 1, credentials) for key in keys)
    connections.connect_all(5.0)
    assert (len(market.sessions), board.broker_open) == (3, 1)
    connections.close_all()
    assert (together.broken, len(market.sessions), board.broker_open) == (False, 0, 0)


def test_a_wait_for_valkey_ends_with_the_usable_lease_while_a_broker_session_is_open() -> None:
    board = Board()
    lease = Lease(board)
    board.lease_session = boot_ns() + 60 * SECOND
    assert lease.wait_limit() > 1_000_000
    board.broker_open = 1
    assert 60.0 - MARGIN - 30.0 < lease.wait_limit() <= 60.0 - MARGIN
    board.lease_session = boot_ns() + 3 * SECOND
    assert lease.wait_limit() == 0.1
