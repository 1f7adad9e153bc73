"""The broker sessions of a worker, with a market in memory."""

from __future__ import annotations

from collections.abc import Callable, Sequence

from tests.support.brokers.fake import FakeBroker, FakeMarket
from tests.support.brokers.rate_limiters import CountingBudget
from worker_runtime.brokers.port import Broker, ConnectionKey, OnOrderChanged
from worker_runtime.process.clock import NS_PER_S, boot_ns
from worker_runtime.process.log import Log
from worker_runtime.process.shared_state import Lease, SharedState
from worker_runtime.protocol.errors import (
    BerthError,
)
from worker_runtime.protocol.messages import AccountLogin, Credentials, WorkerEventKind
from worker_runtime.trading.account_lister import AccountLister
from worker_runtime.trading.account_session import OpenedAccount
from worker_runtime.trading.broker_pauses import BrokerPauses
from worker_runtime.trading.broker_sessions import BrokerSessions
from worker_runtime.trading.health import HealthMonitor
from worker_runtime.trading.login_attempts import LoginAttempts
from worker_runtime.trading.session_recovery import SessionRecovery

CREDENTIALS = Credentials(api_key="key", secret_key="secret")


class MarketConnections:
    """Connections to a market whose logins fail as the test says."""

    def __init__(self, *names: str, away_limit: float = 300.0) -> None:
        self.market = FakeMarket()
        self.shared_state = SharedState()
        self.shared_state.lease_session = boot_ns() + 60 * NS_PER_S
        self.reported: list[tuple[str, str]] = []
        #: Error of the next logins, by account.
        self.faults: dict[str, BerthError] = {}
        self.logins: list[str] = []
        #: Error code and rejected version of each account, as last reported.
        self.logins_told: dict[str, tuple[str, int]] = {}
        #: Seconds that the logins were given.
        self.timeouts: list[float] = []
        self.budget = CountingBudget()
        self.health = HealthMonitor(self.shared_state, self._tell)
        lease, log = Lease(self.shared_state), Log("ERROR")
        attempts = LoginAttempts(
            lambda: self._broker,
            client="w1/1",
            lease=lease,
            on_order=lambda key, change: None,
            wake=lambda: None,
            log=log,
        )
        #: Lists an account and compares it; a test may set another one.
        self.reconcile: Callable[[ConnectionKey, Broker, float], bool] = lambda *_: True
        pauses = BrokerPauses(self.budget)
        lister = AccountLister(
            lease=lease,
            shared_state=self.shared_state,
            rate_limiter=self.budget,
            pauses=pauses,
            reconcile=lambda key, broker, timeout: self.reconcile(key, broker, timeout),
            log=log,
        )
        self.broker_sessions = BrokerSessions(
            attempts,
            lease=lease,
            shared_state=self.shared_state,
            health=self.health,
            rate_limiter=self.budget,
            pauses=pauses,
            lister=lister,
            login_pause=2.0,
            log=log,
        )
        self.recovery = SessionRecovery(
            self.broker_sessions,
            shared_state=self.shared_state,
            add_event=self._tell,
            log=Log("ERROR"),
            away_limit=away_limit,
        )
        self.accounts = [self.account(name) for name in names]

    def account(self, name: str, version: int = 1) -> OpenedAccount:
        self.market.register(name, CREDENTIALS.api_key, CREDENTIALS.secret_key)
        return OpenedAccount(
            ConnectionKey("fake", "stock", True, name), version, CREDENTIALS, [name]
        )

    def connected(self) -> MarketConnections:
        self.broker_sessions.load(self.accounts)
        self.broker_sessions.connect_all(5.0)
        while self.broker_sessions.collect_logins(5.0):
            pass
        for session in self.broker_sessions.account_sessions():
            self.broker_sessions.relist(session, 5.0)
        self.health.update(self.broker_sessions.account_sessions(), "attempt 1")
        return self

    def end_session(self, name: str) -> None:
        for session in [opened for opened in self.market.sessions if opened.account == name]:
            self.market.sessions.remove(session)
        self.broker_sessions.drop_if_ended(self.broker_sessions.session(name))

    def end_sessions(self) -> None:
        self.market.sessions.clear()

    def kinds(self) -> list[str]:
        return [kind for kind, _ in self.reported]

    def _tell(self, kind: WorkerEventKind, detail: str, logins: Sequence[AccountLogin]) -> None:
        self.reported.append((kind.value, detail))
        if logins:
            self.logins_told = {login.account_id: (login.code, login.rejected) for login in logins}

    def settle_logins(self) -> None:
        """Waits for the logins in threads of their own, as the request loop's step does."""
        while self.broker_sessions.collect_logins(5.0):
            self.health.update(self.broker_sessions.account_sessions())

    def run_due(self, times: int = 1) -> None:
        for _ in range(times):
            self.recovery.run_due(60.0)
            self.settle_logins()

    def _broker(self, key: ConnectionKey, client: str, on_order: OnOrderChanged) -> Broker:
        connections = self

        class Troubled(FakeBroker):
            def login(self, credentials: Credentials, timeout: float) -> None:
                connections.logins.append(self.account)
                connections.timeouts.append(timeout)
                if (fault := connections.faults.get(self.account)) is not None:
                    raise fault
                super().login(credentials, timeout)

        return Troubled(self.market, key.account_id, client, on_order)
