"""A session whose life is limited is renewed ahead of its end, in a quiet moment."""

from __future__ import annotations

import time
from collections.abc import Callable

import pytest

from tests.support.brokers.market_connections import MarketConnections
from worker_runtime.process.clock import wall_ms
from worker_runtime.protocol.errors import (
    BerthError,
    BrokerUnreachable,
    LoginLimited,
    LoginRejected,
    RateLimited,
)
from worker_runtime.trading.account_session import AccountSession, OpenedAccount
from worker_runtime.trading.rate_limiter import CallKind, WaitLimit


def ending(
    connections: MarketConnections, begins_in_s: float = -1.0, ends_in_s: float = 1000.0
) -> AccountSession:
    """The session of the account a1, whose renewal begins and whose life ends so soon."""
    session = connections.broker_sessions.session("a1")
    now = time.monotonic()
    session.renewal_at, session.ends_at = now + begins_in_s, now + ends_in_s
    return session


def ask_s_ago(connections: MarketConnections, seconds: float) -> None:
    connections.shared_state.last_activity_ms = wall_ms() - int(seconds * 1000)


def test_the_record_says_how_long_a_session_lives() -> None:
    connections = MarketConnections("a1")
    connections.accounts = [
        OpenedAccount(
            connections.accounts[0].key._replace(broker="paper"),
            1,
            connections.accounts[0].credentials,
            ["a1"],
        )
    ]
    session = connections.connected().broker_sessions.session("a1")
    now = time.monotonic()
    assert session.ends_at - now == pytest.approx(86_400, abs=10)
    assert session.ends_at - session.renewal_at == pytest.approx(1800)
    assert not session.renewal_due(quiet_s=3600.0)


def test_a_new_session_is_opened_before_the_old_one_is_closed() -> None:
    connections = MarketConnections("a1").connected()
    old, session = connections.market.sessions[0], ending(connections)
    ask_s_ago(connections, 120.0)
    connections.run_due()
    assert connections.logins == ["a1", "a1"]
    assert session.broker is connections.market.sessions[0] is not old
    assert len(connections.market.sessions) == 1
    assert session.listed
    assert session.account.on_second_connection
    # Nobody was without a session: no event.
    assert connections.kinds() == ["connected"]
    ending(connections)
    connections.run_due()
    assert not session.account.on_second_connection


@pytest.mark.parametrize(
    ("quiet_s", "ends_in_s", "renewed"),
    [
        (120.0, 1000.0, True),
        (5.0, 1000.0, False),  # somebody trades: later
        (5.0, 0.9, True),  # it is late: between two requests
    ],
)
def test_a_session_is_renewed_in_a_quiet_moment_while_there_is_time(
    quiet_s: float, ends_in_s: float, renewed: bool
) -> None:
    connections = MarketConnections("a1").connected()
    ending(connections, ends_in_s=ends_in_s)
    ask_s_ago(connections, quiet_s)
    connections.run_due()
    assert len(connections.logins) == 1 + renewed


@pytest.mark.parametrize(
    "open_question",
    [
        lambda session: setattr(session, "suspect", True),
        lambda session: setattr(session, "listed", False),
        lambda session: setattr(session, "books_awaited", True),
    ],
    ids=["an answer is missing", "orders are not listed", "books are not compared"],
)
def test_a_session_about_which_something_is_open_is_not_renewed(
    open_question: Callable[[AccountSession], None],
) -> None:
    connections = MarketConnections("a1").connected()
    session = ending(connections)
    open_question(session)
    assert not session.renewal_due(quiet_s=3600.0)


def test_a_renewal_that_fails_keeps_the_session_and_is_tried_again() -> None:
    connections = MarketConnections("a1").connected()
    old, session = connections.market.sessions[0], ending(connections)
    connections.faults["a1"] = BrokerUnreachable()
    ask_s_ago(connections, 120.0)
    connections.run_due()
    assert session.broker is old
    assert old.alive()
    connections.run_due()  # not at once
    assert len(connections.logins) == 2
    del connections.faults["a1"]
    session.renewal_backoff.reset()
    connections.run_due()
    assert session.broker is not old
    assert connections.kinds() == ["connected"]


def test_refused_credentials_are_not_tried_again_neither_before_nor_after_the_end() -> None:
    connections = MarketConnections("a1", "a2").connected()
    session = ending(connections)
    connections.faults["a1"] = LoginRejected("the key was revoked")
    ask_s_ago(connections, 120.0)
    connections.run_due(3)
    assert session.broker is not None
    assert connections.logins_told["a1"] == ("", 1)
    ending(connections, ends_in_s=0.0)
    connections.run_due(3)
    assert session.broker is None
    assert connections.logins.count("a1") == 2
    assert connections.logins_told["a1"] == ("LOGIN_REJECTED", 1)


def test_a_session_beyond_its_life_takes_no_order_a_new_one_does() -> None:
    connections = MarketConnections("a1").connected()
    old = connections.market.sessions[0]
    ending(connections, ends_in_s=0.0)
    broker = connections.broker_sessions.ensure_session("a1", 5.0)
    assert broker is not old
    assert broker.alive()
    assert connections.logins == ["a1", "a1"]


@pytest.mark.parametrize("no_logins_left", [False, True])
def test_without_a_free_connection_the_old_session_is_closed_first_if_a_login_is_left(
    no_logins_left: bool,
) -> None:
    connections = MarketConnections("a1").connected()
    old, session = connections.market.sessions[0], ending(connections)
    open_at_login: list[int] = []

    def refuse(account: OpenedAccount, wait_limit: WaitLimit) -> None:
        if account.on_second_connection:
            raise LoginLimited("all connections are taken")

    def spend(
        account: OpenedAccount, kind: CallKind, wait_limit: WaitLimit, *, cost: int = 1
    ) -> None:
        if kind is CallKind.LOGIN:
            open_at_login.append(len(connections.market.sessions))
            if no_logins_left:
                raise RateLimited(retry_after=60.0)

    connections.budget.connect = refuse  # type: ignore[method-assign]
    connections.budget.spend = spend  # type: ignore[method-assign]
    ask_s_ago(connections, 120.0)
    connections.run_due()
    assert open_at_login == [1]
    assert (session.broker is old) is no_logins_left
    assert not session.account.on_second_connection
    assert len(connections.market.sessions) == 1


def test_a_reload_of_the_same_credentials_keeps_the_connection_that_the_session_has() -> None:
    connections = MarketConnections("a1").connected()
    session = ending(connections)
    ask_s_ago(connections, 120.0)
    connections.run_due()
    connections.broker_sessions.replace(connections.accounts, 5.0)
    assert session.account.on_second_connection


@pytest.mark.parametrize("fault", [BrokerUnreachable(), LoginLimited(retry_after=5.0)])
def test_where_the_old_session_was_closed_first_a_failed_login_is_tried_as_after_any_end(
    fault: BerthError,
) -> None:
    connections = MarketConnections("a1").connected()
    session = ending(connections)
    connections.faults["a1"] = fault

    def refuse(account: OpenedAccount, wait_limit: WaitLimit) -> None:
        if account.on_second_connection:
            raise LoginLimited("all connections are taken")

    connections.budget.connect = refuse  # type: ignore[method-assign]
    ask_s_ago(connections, 120.0)
    connections.run_due()
    assert session.broker is None
    assert session.error is fault
    assert not session.login_backoff.due()
