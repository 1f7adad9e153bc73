"""A session makes no call in a pause that the broker asked for, or after its SDK was refused."""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import replace

import pytest

from tests.support.brokers.fake import FakeBroker, FakeMarket
from tests.support.brokers.market_connections import MarketConnections
from tests.support.brokers.rate_limiters import UnlimitedRateLimiter
from worker_runtime.brokers.port import ConnectionKey
from worker_runtime.process.clock import NS_PER_S, Backoff, boot_ns
from worker_runtime.process.log import Log
from worker_runtime.process.shared_state import Lease, SharedState, health_text
from worker_runtime.protocol.errors import (
    BerthError,
    BrokerMaintenance,
    BrokerVersionRefused,
    LoginLimited,
    OrderRejected,
    OutcomeUnknown,
)
from worker_runtime.protocol.messages import Credentials
from worker_runtime.trading.account_session import MAX_PAUSE_S, OpenedAccount, apply_min_pause
from worker_runtime.trading.broker_calls import BrokerCalls
from worker_runtime.trading.login_attempts import LoginAttempts
from worker_runtime.trading.queue_item import QueueItem


def paused() -> MarketConnections:
    connections = MarketConnections("a1").connected()
    connections.faults["a1"] = LoginLimited("503", retry_after=60.0)
    connections.end_sessions()
    return connections


def test_e_a_pause_that_the_broker_asked_for_is_kept_in_full() -> None:
    backoff = Backoff(1.0, 60.0)
    backoff.failed(60.0)
    assert 59.5 < backoff.seconds_until_due() <= 72.0
    backoff.reset()
    backoff.failed()
    assert backoff.seconds_until_due() <= 1.0


def test_e_an_account_in_a_pause_logs_in_once_a_minute_at_most() -> None:
    connections = paused()
    before = len(connections.logins)
    for _ in range(5):
        with pytest.raises(LoginLimited) as caught:
            connections.broker_sessions.ensure_session("a1", 5.0)
        connections.recovery.run_due(60.0)
    assert len(connections.logins) == before + 1
    assert caught.value.retry_after is not None
    assert caught.value.retry_after > 50
    with pytest.raises(LoginLimited):  # nor does the workflow's next attempt
        connections.broker_sessions.connect_all(5.0)
    assert len(connections.logins) == before + 1


def test_e_a_pause_that_the_broker_repeats_doubles_up_to_a_bound() -> None:
    session = paused().broker_sessions.session("a1")
    pauses = []
    for _ in range(7):
        session.failed(LoginLimited("503", retry_after=60.0))
        pauses.append(session.login_backoff.seconds_until_due())
    for pause, least in zip(pauses, (60, 120, 240, 480, 960, 960, 960), strict=True):
        assert least - 1 < pause <= least * 1.2
    assert max(pauses) <= MAX_PAUSE_S * 1.2


def test_e_a_ping_that_is_answered_with_503_keeps_the_session_and_is_not_repeated() -> None:
    connections = MarketConnections("a1").connected()
    session = connections.broker_sessions.session("a1")
    assert session.broker is not None
    pings: list[float] = []

    def ping(timeout: float) -> None:
        pings.append(timeout)
        raise BrokerMaintenance("503", retry_after=60.0)

    session.broker.ping = ping  # type: ignore[method-assign]
    session.suspect = True
    logins = len(connections.logins)
    for _ in range(3):
        with pytest.raises(BrokerMaintenance):
            connections.broker_sessions.ensure_session("a1", 5.0)
        connections.recovery.run_due(0.0)
    assert (len(pings), len(connections.logins)) == (1, logins)
    assert session.broker is not None


def test_e_an_sdk_that_the_broker_refuses_is_shown_by_a_code_of_its_own() -> None:
    connections = MarketConnections("a1").connected()
    connections.faults["a1"] = BrokerVersionRefused(retry_after=3600.0)
    connections.end_sessions()
    for _ in range(3):
        connections.recovery.run_due(60.0)
    assert health_text(connections.shared_state) == "degraded: BROKER_VERSION_REFUSED"
    assert connections.broker_sessions.session("a1").login_backoff.seconds_until_due() > 3500


def test_e_a_refused_version_keeps_its_code_while_no_login_is_tried() -> None:
    connections = MarketConnections("a1").connected()
    connections.faults["a1"] = BrokerVersionRefused("503", retry_after=3600.0)
    connections.end_sessions()
    for _ in range(3):
        with pytest.raises(BrokerVersionRefused) as caught:
            connections.broker_sessions.ensure_session("a1", 5.0)
    assert len(connections.logins) == 2
    assert caught.value.retry_after is not None
    assert caught.value.retry_after > 3500


def noted(connections: MarketConnections) -> list[tuple[str, float]]:
    limiter = connections.broker_sessions.rate_limiter
    assert isinstance(limiter, UnlimitedRateLimiter)
    return limiter.pauses


def test_e_a_pause_that_a_login_or_a_ping_meets_is_noted_for_the_person() -> None:
    connections = paused()
    with pytest.raises(LoginLimited):
        connections.broker_sessions.ensure_session("a1", 5.0)
    assert noted(connections) == [("a1", 60.0)]
    pinged = MarketConnections("a1").connected()
    session = pinged.broker_sessions.session("a1")
    assert session.broker is not None

    def ping(timeout: float) -> None:
        raise BrokerMaintenance("503", retry_after=60.0)

    session.broker.ping = ping  # type: ignore[method-assign]
    with pytest.raises(BrokerMaintenance):
        pinged.broker_sessions.ping(session, 5.0)
    assert noted(pinged) == [("a1", 60.0)]


def make_calls(connections: MarketConnections) -> BrokerCalls:
    return BrokerCalls(
        connections.broker_sessions,
        connections.budget,
        lease=Lease(connections.shared_state),
        shared_state=connections.shared_state,
        broker_timeout=5.0,
        log=Log("ERROR"),
    )


def make_item() -> QueueItem:
    return QueueItem("request", b"", time.monotonic_ns() + 30 * NS_PER_S, "g")


def fail_change(connections: MarketConnections, error: BerthError) -> None:
    def call(timeout: float) -> None:
        raise error

    with pytest.raises(type(error)) as caught:
        make_calls(connections).call_once("a1", make_item(), call)
    if isinstance(caught.value, OutcomeUnknown):  # nobody may send it again after the pause
        assert caught.value.retry_after is None


def fail_query(connections: MarketConnections, error: BerthError) -> None:
    def call(timeout: float) -> None:
        raise error

    with pytest.raises(type(error)):
        make_calls(connections).query("a1", make_item(), call)


def fail_listing(connections: MarketConnections, error: BerthError) -> None:
    def reconcile(key: ConnectionKey, broker: object, timeout: float) -> bool:
        raise error

    connections.reconcile = reconcile
    session = connections.broker_sessions.session("a1")
    session.listed = False
    assert connections.broker_sessions.relist(session, 5.0) is error


@pytest.mark.parametrize(
    ("fail", "error"),
    [
        (fail_change, BrokerMaintenance("503", retry_after=60.0)),
        (fail_change, OutcomeUnknown("503", retry_after=60.0)),
        (fail_query, BrokerMaintenance("503", retry_after=60.0)),
        (fail_listing, BrokerMaintenance("503", retry_after=60.0)),
    ],
)
def test_e_a_503_of_a_cancel_a_list_or_an_order_is_followed_by_no_call_and_no_login(
    fail: Callable[[MarketConnections, BerthError], None], error: BerthError
) -> None:
    connections = MarketConnections("a1").connected()
    session = connections.broker_sessions.session("a1")
    broker, logins = session.broker, len(connections.logins)
    assert broker is not None
    sent: list[float] = []

    def ping(timeout: float) -> None:
        sent.append(timeout)

    broker.ping = ping  # type: ignore[method-assign]
    fail(connections, error)

    def reconcile(key: ConnectionKey, broker: object, timeout: float) -> bool:
        sent.append(timeout)
        return True

    connections.reconcile = reconcile
    for _ in range(3):
        for listed in (True, False):  # an order and a cancel
            with pytest.raises(BrokerMaintenance) as caught:
                connections.broker_sessions.ensure_session("a1", 5.0, listed=listed)
            assert caught.value.retry_after is not None
            assert caught.value.retry_after > 50
        connections.recovery.run_due(0.0)
    assert (sent, len(connections.logins), session.broker) == ([], logins, broker)
    assert noted(connections) == [("a1", 60.0)]
    seconds_until_due = connections.recovery.seconds_until_due(0.0)
    assert seconds_until_due is not None
    assert seconds_until_due > 50  # nor does the loop turn for nothing
    connections.end_sessions()  # the broker ends the session meanwhile
    connections.recovery.run_due(0.0)
    with pytest.raises(LoginLimited):
        connections.broker_sessions.ensure_session("a1", 5.0)
    assert len(connections.logins) == logins


def test_e_accounts_of_one_person_share_a_pause() -> None:
    connections = MarketConnections("a1", "a2", "b")
    first, second, other = connections.accounts
    shared = [replace(account, budgets=["person"]) for account in (first, second)]
    connections.accounts = [*shared, other]
    connections.connected()
    fail_query(connections, BrokerMaintenance("503", retry_after=60.0))
    for name in ("a1", "a2"):
        with pytest.raises(BrokerMaintenance):
            connections.broker_sessions.ensure_session(name, 5.0)
    assert connections.broker_sessions.ensure_session("b", 5.0).alive()


def test_e_a_pause_that_grew_in_other_workers_holds_here_as_long() -> None:
    connections = MarketConnections("a1").connected()

    def note_pause(account: OpenedAccount, first_pause_s: float) -> float:
        return 4 * first_pause_s

    connections.budget.note_pause = note_pause  # type: ignore[method-assign]
    fail_query(connections, BrokerMaintenance("503", retry_after=60.0))
    with pytest.raises(BrokerMaintenance) as caught:
        connections.broker_sessions.ensure_session("a1", 5.0)
    assert caught.value.retry_after is not None
    assert caught.value.retry_after > 230


def key_of(broker: str) -> ConnectionKey:
    return ConnectionKey(broker, "stock", True, "a1")


@pytest.mark.parametrize(
    ("broker", "error", "pause"),
    [
        ("shioaji", LoginLimited("503", retry_after=5.0), 60.0),
        ("shioaji", BrokerMaintenance("503", retry_after=120.0), 120.0),
        ("shioaji", LoginLimited("451"), None),  # asks for no pause
        ("shioaji", OrderRejected("no", retry_after=5.0), 5.0),
        ("paper", LoginLimited("503", retry_after=5.0), 5.0),
        ("not installed", LoginLimited("503", retry_after=5.0), 5.0),
    ],
)
def test_a_ban_lasts_at_least_as_long_as_the_brokers_record_says(
    broker: str, error: BerthError, pause: float | None
) -> None:
    apply_min_pause(key_of(broker), error)
    assert error.retry_after == pause


class BanningBroker(FakeBroker):
    def login(self, credentials: Credentials, timeout: float) -> None:
        raise LoginLimited("503", retry_after=1.0)


def test_a_login_that_meets_a_ban_is_silent_as_long_as_the_record_says() -> None:
    market, state = FakeMarket(), SharedState()
    state.lease_session = boot_ns() + 60 * NS_PER_S
    attempts = LoginAttempts(
        lambda: lambda key, client, on_order: BanningBroker(market, "a1", client, on_order),
        client="w",
        lease=Lease(state),
        on_order=lambda key, change: None,
        wake=lambda: None,
        log=Log("ERROR"),
    )
    account = OpenedAccount(key_of("shioaji"), 1, Credentials(api_key="k", secret_key="s"), ["a1"])
    with pytest.raises(LoginLimited) as banned:
        attempts.open(account, 5.0)
    assert banned.value.retry_after == 60.0


@pytest.mark.parametrize("error", [BrokerVersionRefused(retry_after=3600.0), LoginLimited("451")])
def test_e_an_old_version_and_a_sixth_connection_pause_nobody(error: LoginLimited) -> None:
    connections = MarketConnections("a1").connected()
    connections.faults["a1"] = error
    connections.end_sessions()
    with pytest.raises(LoginLimited):
        connections.broker_sessions.ensure_session("a1", 5.0)
    assert noted(connections) == []
