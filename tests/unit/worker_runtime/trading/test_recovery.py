"""A session opens broker sessions again that ended, and reports each change once."""

from __future__ import annotations

import pytest

from tests.support.brokers.market_connections import MarketConnections
from worker_runtime.process.clock import wall_ms
from worker_runtime.process.replacement import WorkerExit
from worker_runtime.process.shared_state import health_text
from worker_runtime.protocol.errors import (
    BerthError,
    BrokerClockRefused,
    BrokerError,
    BrokerUnreachable,
    LeaseLost,
    LoginLimited,
    LoginRejected,
    RateLimited,
)
from worker_runtime.protocol.launch import ExitCode
from worker_runtime.protocol.messages import Failure


def test_two_accounts_that_end_together_are_one_change_of_the_worker() -> None:
    connections = MarketConnections("a1", "a2").connected()
    connections.end_sessions()
    connections.run_due(4)
    assert connections.kinds()[:3] == ["connected", "reconnecting", "connected"]
    assert connections.logins_told == {"a1": ("", 0), "a2": ("", 0)}
    assert (health_text(connections.shared_state), connections.shared_state.accounts_connected) == (
        "well",
        2,
    )


def test_a_known_end_is_repaired_for_the_order_that_needs_the_session() -> None:
    connections = MarketConnections("a1").connected()
    connections.end_sessions()
    assert connections.broker_sessions.ensure_session("a1", 5.0).alive()
    assert connections.kinds() == ["connected", "reconnecting", "connected"]


@pytest.mark.parametrize("fault", [BrokerUnreachable(), LoginLimited()])
def test_a_broker_that_is_away_is_reported_once_however_often_it_is_tried(
    fault: BerthError,
) -> None:
    connections = MarketConnections("a1").connected()
    connections.faults["a1"] = fault
    connections.end_sessions()
    for _ in range(5):
        connections.recovery.run_due(60.0)
        with pytest.raises(type(fault)):
            connections.broker_sessions.ensure_session("a1", 5.0)
    assert connections.kinds() == ["connected", "reconnecting", "degraded"]
    assert health_text(connections.shared_state) == f"degraded: {fault.code}"


def test_f_the_second_login_is_counted_and_never_sent_after_its_time() -> None:
    """A login whose time stamp the broker found too old is tried again as any other is."""
    connections = MarketConnections("a1").connected()
    connections.end_sessions()
    connections.faults["a1"] = BrokerClockRefused("Sign data is timeout")
    logins, counted = len(connections.logins), len(connections.budget.waits)
    with pytest.raises(BrokerClockRefused):
        connections.broker_sessions.ensure_session("a1", 5.0)
    assert health_text(connections.shared_state) == "degraded: BROKER_CLOCK_REFUSED"
    assert (len(connections.logins), len(connections.budget.waits)) == (logins + 1, counted + 1)
    with pytest.raises(BrokerUnreachable):  # no time is left
        connections.broker_sessions.ensure_session("a1", 0.0)
    assert len(connections.logins) == logins + 1
    del connections.faults["a1"]
    assert connections.broker_sessions.ensure_session("a1", 5.0).alive()
    assert len(connections.logins) == logins + 2
    assert len(connections.budget.waits) == counted + 3  # the login, and the list of orders


def test_179_an_order_does_not_count_against_a_login_limit() -> None:
    connections = MarketConnections("a1").connected()
    connections.end_sessions()
    connections.faults["a1"] = BrokerUnreachable()
    for _ in range(5):  # then the next login's time is half a minute away
        with pytest.raises(BrokerUnreachable):
            connections.broker_sessions.ensure_session("a1", 5.0)
    connections.faults["a1"] = LoginLimited()
    before = len(connections.logins)
    for _ in range(5):
        with pytest.raises(LoginLimited):
            connections.broker_sessions.ensure_session("a1", 5.0)
    assert len(connections.logins) == before + 1


def test_221_an_sdk_that_fails_three_times_costs_the_process() -> None:
    connections = MarketConnections("a1").connected()
    connections.faults["a1"] = BrokerError("broken")
    connections.end_sessions()
    for _ in range(3):
        with pytest.raises(BrokerError):
            connections.broker_sessions.ensure_session("a1", 5.0)
    with pytest.raises(WorkerExit) as ends:
        connections.recovery.run_due(60.0)
    assert ends.value.code is ExitCode.SESSION_REPLACE
    assert "failed" not in connections.kinds()


def test_an_sdk_that_fails_for_one_account_costs_the_process_only_when_the_others_are_quiet() -> (
    None
):
    connections = MarketConnections("a1", "a2").connected()
    connections.shared_state.last_activity_ms = wall_ms()
    connections.faults["a1"] = BrokerError("broken")
    connections.end_session("a1")
    session = connections.broker_sessions.session("a1")
    for _ in range(3):
        connections.broker_sessions.retry(session, 5.0)
        connections.settle_logins()
    connections.recovery.raise_if_hopeless()
    assert connections.broker_sessions.ensure_session("a2", 5.0).alive()
    connections.shared_state.last_activity_ms = wall_ms() - 61_000
    with pytest.raises(WorkerExit) as ends:
        connections.recovery.raise_if_hopeless()
    assert ends.value.code is ExitCode.SESSION_REPLACE


def test_a_broker_that_seems_away_for_too_long_costs_the_process() -> None:
    connections = MarketConnections("a1", away_limit=0.0).connected()
    connections.faults["a1"] = BrokerUnreachable()
    connections.end_sessions()
    connections.recovery.run_due(60.0)
    with pytest.raises(WorkerExit) as ends:
        connections.recovery.raise_if_hopeless()
    assert ends.value.code is ExitCode.SESSION_REPLACE


@pytest.mark.parametrize("fault", [LoginLimited(), LeaseLost()])
def test_a_limit_or_a_lost_lease_says_nothing_against_the_process(fault: BerthError) -> None:
    connections = MarketConnections("a1", away_limit=0.0).connected()
    connections.faults["a1"] = fault
    connections.end_sessions()
    connections.recovery.run_due(60.0)
    connections.recovery.raise_if_hopeless()
    assert connections.kinds() == ["connected", "reconnecting", "degraded"]


def test_tries_before_a_lost_lease_do_not_count_after_its_return() -> None:
    connections = MarketConnections("a1", away_limit=0.0).connected()
    connections.faults["a1"] = BrokerUnreachable()
    connections.end_sessions()
    connections.recovery.run_due(60.0)
    connections.broker_sessions.close_all()
    connections.health.report_lease_ending()
    connections.recovery.raise_if_hopeless()
    assert connections.kinds() == ["connected", "reconnecting", "degraded"]


def test_a_fresh_process_waits_for_a_broker_that_is_away_however_long() -> None:
    connections = MarketConnections("a1", away_limit=0.0)
    connections.faults["a1"] = BrokerUnreachable()
    with pytest.raises(BrokerUnreachable):
        connections.broker_sessions.replace(connections.accounts, 5.0)
    connections.recovery.raise_if_hopeless()
    assert connections.broker_sessions.loaded
    assert connections.kinds() == ["degraded"]


def test_a_fresh_process_whose_sdk_fails_too_ends_the_worker() -> None:
    connections = MarketConnections("a1")
    connections.faults["a1"] = BrokerError("broken")
    with pytest.raises(BrokerError):
        connections.broker_sessions.replace(connections.accounts, 5.0)
    with pytest.raises(WorkerExit) as ends:
        connections.recovery.raise_if_hopeless()
    assert ends.value.code is ExitCode.BROKER_FAILED
    assert connections.reported == [("failed", "BROKER_ERROR: broken")]


def test_a_failing_account_is_retried_while_another_one_is_connected() -> None:
    connections = MarketConnections("a1", "a2")
    connections.faults["a2"] = BrokerError("broken")
    connections.broker_sessions.replace(connections.accounts, 5.0)
    connections.settle_logins()
    connections.recovery.raise_if_hopeless()
    assert set(connections.kinds()) == {"connected"}
    assert connections.logins_told["a2"] == ("BROKER_ERROR", 0)
    assert connections.broker_sessions.ensure_session("a1", 5.0).alive()
    with pytest.raises(BrokerError, match="broken"):  # at once, and without a login
        connections.broker_sessions.ensure_session("a2", 5.0)
    assert connections.logins.count("a2") == 1


def test_a_refused_login_is_not_tried_again_and_the_others_count_as_well() -> None:
    connections = MarketConnections("a1", "a2").connected()
    connections.faults["a2"] = LoginRejected()
    connections.end_sessions()
    connections.run_due(5)
    assert sorted(connections.logins) == ["a1", "a1", "a2", "a2"]
    assert connections.reported[-1] == ("connected", "without a2: LOGIN_REJECTED")
    assert connections.logins_told == {"a1": ("", 0), "a2": ("LOGIN_REJECTED", 1)}
    assert health_text(connections.shared_state) == "degraded: LOGIN_REJECTED"


def test_a_fresh_process_continues_without_a_refused_account() -> None:
    connections = MarketConnections("a1", "a2")
    connections.faults["a1"] = LoginRejected()
    connections.broker_sessions.replace(connections.accounts, 5.0)
    connections.settle_logins()
    connections.recovery.raise_if_hopeless()
    assert connections.reported[-1] == ("connected", "without a1: LOGIN_REJECTED")


def test_a_fresh_process_with_one_refused_and_one_away_keeps_trying() -> None:
    connections = MarketConnections("a1", "a2")
    connections.faults = {"a1": LoginRejected(), "a2": BrokerUnreachable()}
    with pytest.raises(BrokerUnreachable):
        connections.broker_sessions.replace(connections.accounts, 5.0)
    connections.recovery.raise_if_hopeless()
    assert connections.kinds() == ["degraded"]


def test_when_all_are_refused_the_worker_ends() -> None:
    connections = MarketConnections("a1").connected()
    connections.faults["a1"] = LoginRejected("expired")
    connections.end_sessions()
    connections.recovery.run_due(60.0)
    with pytest.raises(WorkerExit) as ends:
        connections.recovery.run_due(60.0)
    assert ends.value.code is ExitCode.BROKER_FAILED
    assert connections.reported[-1] == ("failed", "LOGIN_REJECTED: expired")
    assert connections.logins_told == {"a1": ("LOGIN_REJECTED", 1)}


def test_newer_credentials_replace_a_refused_account_even_while_the_broker_is_away() -> None:
    connections = MarketConnections("a1", "a2").connected()
    connections.faults["a1"] = LoginRejected()
    connections.end_sessions()
    connections.run_due(3)
    connections.faults["a1"] = BrokerUnreachable()
    with pytest.raises(BrokerUnreachable):
        connections.broker_sessions.replace([connections.account("a1", version=2)], 5.0)
    assert connections.broker_sessions.versions() == {"a1": 2, "a2": 1}
    assert connections.logins_told == {"a1": ("BROKER_UNREACHABLE", 0), "a2": ("", 0)}


def test_wrong_new_credentials_leave_a_good_session_as_it_is() -> None:
    connections = MarketConnections("a1").connected()
    before = connections.broker_sessions.ensure_session("a1", 5.0)
    connections.faults["a1"] = LoginRejected()
    with pytest.raises(LoginRejected):
        connections.broker_sessions.replace([connections.account("a1", version=2)], 5.0)
    connections.recovery.raise_if_hopeless()
    assert connections.broker_sessions.ensure_session("a1", 5.0) is before
    assert connections.kinds() == ["connected", "connected"]
    assert connections.logins_told == {"a1": ("", 2)}


def test_a_lost_lease_is_reported_and_its_return_restores_health() -> None:
    connections = MarketConnections("a1").connected()
    connections.broker_sessions.close_all()
    connections.health.report_lease_ending()
    assert health_text(connections.shared_state) == "degraded: LEASE_LOST"
    connections.recovery.run_due(60.0)
    assert connections.kinds() == ["connected", "degraded", "connected"]


def test_a_request_waits_for_its_budget_until_its_deadline_and_a_login_as_long_as_before() -> None:
    connections = MarketConnections("a1").connected()
    connections.end_sessions()
    connections.broker_sessions.ensure_session("a1", 90.0, at_most=2.0)
    assert connections.budget.waits[-2] > 80
    assert 1.0 < connections.timeouts[-1] <= 2.0


def test_where_there_is_no_room_in_time_the_caller_hears_when_there_will_be() -> None:
    connections = MarketConnections("a1").connected()
    connections.broker_sessions.session("a1").suspect = True
    connections.budget.full = True
    with pytest.raises(RateLimited) as refused:
        connections.broker_sessions.ensure_session("a1", 5.0)
    assert refused.value.retry_after == 7.0
    failure = Failure.of(refused.value)
    assert (failure.retry_after_ms, failure.error().retry_after) == (7000, 7.0)


def test_without_the_lease_nobody_waits_for_a_budget() -> None:
    connections = MarketConnections("a1").connected()
    connections.broker_sessions.session("a1").suspect = True
    connections.broker_sessions.ensure_session("a1", 90.0)
    patience = connections.budget.asked[-1]
    assert patience() > 80
    connections.shared_state.lease_session = 0
    assert patience() == 0
