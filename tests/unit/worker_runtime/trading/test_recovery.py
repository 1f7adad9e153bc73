"""What a session does about broker sessions that end, and what it tells."""

from __future__ import annotations

from collections.abc import Sequence

import pytest

from tests.support.brokers.fake import FakeBroker, FakeMarket
from tests.unit.worker_runtime.trading.test_rate_limiter import UnlimitedRateLimiter
from worker_runtime.brokers.port import Broker, ConnectionKey, OnOrderChanged
from worker_runtime.process.clock import SECOND, boot_ns, wall_ms
from worker_runtime.process.log import Log
from worker_runtime.process.replacement import WorkerExit
from worker_runtime.process.shared_state import Lease, SharedState, health_text
from worker_runtime.protocol.errors import (
    BerthError,
    BrokerError,
    BrokerUnreachable,
    LeaseLost,
    LoginLimited,
    LoginRejected,
    RateLimited,
)
from worker_runtime.protocol.launch import ExitCode
from worker_runtime.protocol.messages import AccountLogin, Credentials, Failure, WorkerEventKind
from worker_runtime.trading.account_session import OpenedAccount
from worker_runtime.trading.broker_sessions import BrokerSessions
from worker_runtime.trading.health import HealthMonitor
from worker_runtime.trading.login_attempts import LoginAttempts
from worker_runtime.trading.rate_limiter import CallKind, WaitLimit
from worker_runtime.trading.session_recovery import SessionRecovery

CREDENTIALS = Credentials(api_key="key", secret_key="secret")


class CountingBudget(UnlimitedRateLimiter):
    """A rate limiter that writes down how long its callers would wait, and may be used up."""

    def __init__(self) -> None:
        super().__init__()
        self.waits: list[float] = []
        self.asked: list[WaitLimit] = []
        self.full = False

    def spend(
        self, account: OpenedAccount, kind: CallKind, wait_limit: WaitLimit, *, cost: int = 1
    ) -> None:
        self._note(wait_limit)
        if self.full:
            raise RateLimited(retry_after=7.0)

    def connect(self, account: OpenedAccount, wait_limit: WaitLimit) -> None:
        self._note(wait_limit)

    def _note(self, wait_limit: WaitLimit) -> None:
        self.asked.append(wait_limit)
        self.waits.append(wait_limit())


class MarketConnections:
    """Connections to a market whose logins fail as the test says."""

    def __init__(self, *names: str, away_limit: float = 300.0) -> None:
        self.market = FakeMarket()
        self.shared_state = SharedState()
        self.shared_state.lease_session = boot_ns() + 60 * SECOND
        self.reported: list[tuple[str, str]] = []
        #: Error of the next logins, by account.
        self.faults: dict[str, BerthError] = {}
        self.logins: list[str] = []
        #: What is wrong with each account, and the version that was rejected, as it was told last.
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
        self.broker_sessions = BrokerSessions(
            attempts,
            lease=lease,
            shared_state=self.shared_state,
            health=self.health,
            rate_limiter=self.budget,
            reconcile=lambda key, broker, timeout: True,
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
        setting = self

        class Troubled(FakeBroker):
            def login(self, credentials: Credentials, timeout: float) -> None:
                setting.logins.append(self.account)
                setting.timeouts.append(timeout)
                if (fault := setting.faults.get(self.account)) is not None:
                    raise fault
                super().login(credentials, timeout)

        return Troubled(self.market, key.account_id, client, on_order)


def test_two_accounts_that_end_together_are_one_change_of_the_worker() -> None:
    setting = MarketConnections("a1", "a2").connected()
    setting.end_sessions()
    setting.run_due(4)
    assert setting.kinds()[:3] == ["connected", "reconnecting", "connected"]
    assert setting.logins_told == {"a1": ("", 0), "a2": ("", 0)}
    assert (health_text(setting.shared_state), setting.shared_state.accounts_connected) == (
        "well",
        2,
    )


def test_a_known_end_is_repaired_for_the_order_that_needs_the_session() -> None:
    setting = MarketConnections("a1").connected()
    setting.end_sessions()
    assert setting.broker_sessions.ensure_session("a1", 5.0).alive()
    assert setting.kinds() == ["connected", "reconnecting", "connected"]


@pytest.mark.parametrize("fault", [BrokerUnreachable(), LoginLimited()])
def test_a_broker_that_is_away_is_told_once_however_often_it_is_tried(fault: BerthError) -> None:
    setting = MarketConnections("a1").connected()
    setting.faults["a1"] = fault
    setting.end_sessions()
    for _ in range(5):
        setting.recovery.run_due(60.0)
        with pytest.raises(type(fault)):
            setting.broker_sessions.ensure_session("a1", 5.0)
    assert setting.kinds() == ["connected", "reconnecting", "degraded"]
    assert health_text(setting.shared_state) == f"degraded: {fault.code}"


def test_an_order_does_not_count_against_a_login_limit() -> None:
    setting = MarketConnections("a1").connected()
    setting.end_sessions()
    setting.faults["a1"] = BrokerUnreachable()
    for _ in range(5):  # then the next login's time is half a minute away
        with pytest.raises(BrokerUnreachable):
            setting.broker_sessions.ensure_session("a1", 5.0)
    setting.faults["a1"] = LoginLimited()
    before = len(setting.logins)
    for _ in range(5):
        with pytest.raises(LoginLimited):
            setting.broker_sessions.ensure_session("a1", 5.0)
    assert len(setting.logins) == before + 1


def test_an_sdk_that_fails_three_times_costs_the_process() -> None:
    setting = MarketConnections("a1").connected()
    setting.faults["a1"] = BrokerError("broken")
    setting.end_sessions()
    for _ in range(3):
        with pytest.raises(BrokerError):
            setting.broker_sessions.ensure_session("a1", 5.0)
    with pytest.raises(WorkerExit) as ends:
        setting.recovery.run_due(60.0)
    assert ends.value.code is ExitCode.SESSION_REPLACE
    assert "failed" not in setting.kinds()


def test_an_sdk_that_fails_for_one_account_costs_the_process_only_when_the_others_are_quiet() -> (
    None
):
    setting = MarketConnections("a1", "a2").connected()
    setting.shared_state.last_activity_ms = wall_ms()
    setting.faults["a1"] = BrokerError("broken")
    setting.end_session("a1")
    session = setting.broker_sessions.session("a1")
    for _ in range(3):
        setting.broker_sessions.retry(session, 5.0)
        setting.settle_logins()
    setting.recovery.raise_if_hopeless()
    assert setting.broker_sessions.ensure_session("a2", 5.0).alive()
    setting.shared_state.last_activity_ms = wall_ms() - 61_000
    with pytest.raises(WorkerExit) as ends:
        setting.recovery.raise_if_hopeless()
    assert ends.value.code is ExitCode.SESSION_REPLACE


def test_a_broker_that_seems_away_for_too_long_costs_the_process() -> None:
    setting = MarketConnections("a1", away_limit=0.0).connected()
    setting.faults["a1"] = BrokerUnreachable()
    setting.end_sessions()
    setting.recovery.run_due(60.0)
    with pytest.raises(WorkerExit) as ends:
        setting.recovery.raise_if_hopeless()
    assert ends.value.code is ExitCode.SESSION_REPLACE


@pytest.mark.parametrize("fault", [LoginLimited(), LeaseLost()])
def test_a_limit_or_a_lost_lease_says_nothing_against_the_process(fault: BerthError) -> None:
    setting = MarketConnections("a1", away_limit=0.0).connected()
    setting.faults["a1"] = fault
    setting.end_sessions()
    setting.recovery.run_due(60.0)
    setting.recovery.raise_if_hopeless()
    assert setting.kinds() == ["connected", "reconnecting", "degraded"]


def test_tries_before_a_lost_lease_do_not_count_after_its_return() -> None:
    setting = MarketConnections("a1", away_limit=0.0).connected()
    setting.faults["a1"] = BrokerUnreachable()
    setting.end_sessions()
    setting.recovery.run_due(60.0)
    setting.broker_sessions.close_all()
    setting.health.parked()
    setting.recovery.raise_if_hopeless()
    assert setting.kinds() == ["connected", "reconnecting", "degraded"]


def test_a_fresh_process_waits_for_a_broker_that_is_away_however_long() -> None:
    setting = MarketConnections("a1", away_limit=0.0)
    setting.faults["a1"] = BrokerUnreachable()
    with pytest.raises(BrokerUnreachable):
        setting.broker_sessions.replace(setting.accounts, 5.0)
    setting.recovery.raise_if_hopeless()
    assert setting.broker_sessions.loaded
    assert setting.kinds() == ["degraded"]


def test_a_fresh_process_whose_sdk_fails_too_ends_the_worker() -> None:
    setting = MarketConnections("a1")
    setting.faults["a1"] = BrokerError("broken")
    with pytest.raises(BrokerError):
        setting.broker_sessions.replace(setting.accounts, 5.0)
    with pytest.raises(WorkerExit) as ends:
        setting.recovery.raise_if_hopeless()
    assert ends.value.code is ExitCode.BROKER_FAILED
    assert setting.reported == [("failed", "BROKER_ERROR: broken")]


def test_beside_an_account_that_is_well_a_failing_one_is_tried_again() -> None:
    setting = MarketConnections("a1", "a2")
    setting.faults["a2"] = BrokerError("broken")
    setting.broker_sessions.replace(setting.accounts, 5.0)
    setting.settle_logins()
    setting.recovery.raise_if_hopeless()
    assert set(setting.kinds()) == {"connected"}
    assert setting.logins_told["a2"] == ("BROKER_ERROR", 0)
    assert setting.broker_sessions.ensure_session("a1", 5.0).alive()
    with pytest.raises(BrokerError, match="broken"):  # at once, and without a login
        setting.broker_sessions.ensure_session("a2", 5.0)
    assert setting.logins.count("a2") == 1


def test_a_refused_login_is_not_tried_again_and_the_others_count_as_well() -> None:
    setting = MarketConnections("a1", "a2").connected()
    setting.faults["a2"] = LoginRejected()
    setting.end_sessions()
    setting.run_due(5)
    assert sorted(setting.logins) == ["a1", "a1", "a2", "a2"]
    assert setting.reported[-1] == ("connected", "without a2: LOGIN_REJECTED")
    assert setting.logins_told == {"a1": ("", 0), "a2": ("LOGIN_REJECTED", 1)}
    assert health_text(setting.shared_state) == "degraded: LOGIN_REJECTED"


def test_a_fresh_process_goes_on_without_a_refused_account() -> None:
    setting = MarketConnections("a1", "a2")
    setting.faults["a1"] = LoginRejected()
    setting.broker_sessions.replace(setting.accounts, 5.0)
    setting.settle_logins()
    setting.recovery.raise_if_hopeless()
    assert setting.reported[-1] == ("connected", "without a1: LOGIN_REJECTED")


def test_a_fresh_process_with_one_refused_and_one_away_goes_on_trying() -> None:
    setting = MarketConnections("a1", "a2")
    setting.faults = {"a1": LoginRejected(), "a2": BrokerUnreachable()}
    with pytest.raises(BrokerUnreachable):
        setting.broker_sessions.replace(setting.accounts, 5.0)
    setting.recovery.raise_if_hopeless()
    assert setting.kinds() == ["degraded"]


def test_when_all_are_refused_the_worker_ends() -> None:
    setting = MarketConnections("a1").connected()
    setting.faults["a1"] = LoginRejected("expired")
    setting.end_sessions()
    setting.recovery.run_due(60.0)
    with pytest.raises(WorkerExit) as ends:
        setting.recovery.run_due(60.0)
    assert ends.value.code is ExitCode.BROKER_FAILED
    assert setting.reported[-1] == ("failed", "LOGIN_REJECTED: expired")
    assert setting.logins_told == {"a1": ("LOGIN_REJECTED", 1)}


def test_newer_credentials_replace_a_refused_account_even_while_the_broker_is_away() -> None:
    setting = MarketConnections("a1", "a2").connected()
    setting.faults["a1"] = LoginRejected()
    setting.end_sessions()
    setting.run_due(3)
    setting.faults["a1"] = BrokerUnreachable()
    with pytest.raises(BrokerUnreachable):
        setting.broker_sessions.replace([setting.account("a1", version=2)], 5.0)
    assert setting.broker_sessions.versions() == {"a1": 2, "a2": 1}
    assert setting.logins_told == {"a1": ("BROKER_UNREACHABLE", 0), "a2": ("", 0)}


def test_wrong_new_credentials_leave_a_good_session_as_it_is() -> None:
    setting = MarketConnections("a1").connected()
    before = setting.broker_sessions.ensure_session("a1", 5.0)
    setting.faults["a1"] = LoginRejected()
    with pytest.raises(LoginRejected):
        setting.broker_sessions.replace([setting.account("a1", version=2)], 5.0)
    setting.recovery.raise_if_hopeless()
    assert setting.broker_sessions.ensure_session("a1", 5.0) is before
    assert setting.kinds() == ["connected", "connected"]
    assert setting.logins_told == {"a1": ("", 2)}


def test_a_lost_lease_is_told_and_its_return_heals() -> None:
    setting = MarketConnections("a1").connected()
    setting.broker_sessions.close_all()
    setting.health.parked()
    assert health_text(setting.shared_state) == "degraded: LEASE_LOST"
    setting.recovery.run_due(60.0)
    assert setting.kinds() == ["connected", "degraded", "connected"]


def test_a_request_waits_for_its_budget_until_its_deadline_and_a_login_as_long_as_before() -> None:
    setting = MarketConnections("a1").connected()
    setting.end_sessions()
    setting.broker_sessions.ensure_session("a1", 90.0, at_most=2.0)
    assert setting.budget.waits[-2] > 80
    assert 1.0 < setting.timeouts[-1] <= 2.0


def test_where_there_is_no_room_in_time_the_caller_hears_when_there_will_be() -> None:
    setting = MarketConnections("a1").connected()
    setting.broker_sessions.session("a1").suspect = True
    setting.budget.full = True
    with pytest.raises(RateLimited) as refused:
        setting.broker_sessions.ensure_session("a1", 5.0)
    assert refused.value.retry_after == 7.0
    failure = Failure.of(refused.value)
    assert (failure.retry_after_ms, failure.error().retry_after) == (7000, 7.0)


def test_without_the_lease_nobody_waits_for_a_budget() -> None:
    setting = MarketConnections("a1").connected()
    setting.broker_sessions.session("a1").suspect = True
    setting.broker_sessions.ensure_session("a1", 90.0)
    patience = setting.budget.asked[-1]
    assert patience() > 80
    setting.shared_state.lease_session = 0
    assert patience() == 0
