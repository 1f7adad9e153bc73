"""Closing the broker sessions inside the lease's margin, however many accounts there are."""

from __future__ import annotations

from contextlib import suppress
from threading import Barrier, BrokenBarrierError

from tests.support.brokers.fake import FakeBroker, FakeMarket
from tests.support.brokers.rate_limiters import UnlimitedRateLimiter
from worker_runtime.brokers.port import ConnectionKey, OnOrderChanged
from worker_runtime.process.clock import NS_PER_S, boot_ns
from worker_runtime.process.log import Log
from worker_runtime.process.shared_state import LEASE_MARGIN_S, Lease, SharedState
from worker_runtime.protocol.messages import Credentials
from worker_runtime.trading.account_lister import AccountLister
from worker_runtime.trading.account_session import OpenedAccount
from worker_runtime.trading.broker_pauses import BrokerPauses
from worker_runtime.trading.broker_sessions import BrokerSessions
from worker_runtime.trading.health import HealthMonitor
from worker_runtime.trading.login_attempts import LoginAttempts

NAMES = ("a1", "a2", "a3")


class SlowToClose(FakeBroker):
    """Its logout ends when those of all the accounts have begun."""

    def __init__(
        self,
        market: FakeMarket,
        key: ConnectionKey,
        client: str,
        on_order: OnOrderChanged,
        together: Barrier,
    ) -> None:
        super().__init__(market, key.account_id, client, on_order)
        self.together = together

    def close(self) -> None:
        with suppress(BrokenBarrierError):  # the test looks at the barrier
            self.together.wait(30.0)
        super().close()


def test_all_sessions_are_closed_at_once_and_the_board_says_so_afterwards() -> None:
    market, shared_state, together = FakeMarket(), SharedState(), Barrier(len(NAMES))
    shared_state.lease_session = boot_ns() + 30 * NS_PER_S

    def factory(key: ConnectionKey, client: str, on_order: OnOrderChanged) -> SlowToClose:
        return SlowToClose(market, key, client, on_order, together)

    lease, log = Lease(shared_state), Log("ERROR")
    attempts = LoginAttempts(
        lambda: factory,
        client="w1/1",
        lease=lease,
        on_order=lambda key, change: None,
        wake=lambda: None,
        log=log,
    )
    rate_limiter = UnlimitedRateLimiter()
    pauses = BrokerPauses(rate_limiter)
    lister = AccountLister(
        lease=lease,
        shared_state=shared_state,
        rate_limiter=rate_limiter,
        pauses=pauses,
        reconcile=lambda key, broker, timeout: True,
        log=log,
    )
    broker_sessions = BrokerSessions(
        attempts,
        lease=lease,
        shared_state=shared_state,
        pauses=pauses,
        lister=lister,
        login_pause=2.0,
        health=HealthMonitor(shared_state, lambda kind, detail, logins: None),
        rate_limiter=rate_limiter,
        log=log,
    )
    for name in NAMES:
        market.register(name, "key", "secret")
    credentials = Credentials(api_key="key", secret_key="secret")
    keys = [ConnectionKey("fake", "stock", True, name) for name in NAMES]
    broker_sessions.load(OpenedAccount(key, 1, credentials, ["b"]) for key in keys)
    broker_sessions.connect_all(5.0)
    assert (len(market.sessions), shared_state.broker_open) == (3, 1)
    broker_sessions.close_all()
    assert (together.broken, len(market.sessions), shared_state.broker_open) == (False, 0, 0)


def test_a_wait_for_valkey_ends_with_the_usable_lease_while_a_broker_session_is_open() -> None:
    shared_state = SharedState()
    lease = Lease(shared_state)
    shared_state.lease_session = boot_ns() + 60 * NS_PER_S
    assert lease.wait_limit() > 1_000_000
    shared_state.broker_open = 1
    assert 60.0 - LEASE_MARGIN_S - 30.0 < lease.wait_limit() <= 60.0 - LEASE_MARGIN_S
    shared_state.lease_session = boot_ns() + 3 * NS_PER_S
    assert lease.wait_limit() == 0.1
