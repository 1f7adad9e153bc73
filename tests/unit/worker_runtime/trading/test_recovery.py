"""A session opens broker sessions again that ended, and reports each change once."""

from __future__ import annotations

import pytest

from tests.support.brokers.market_connections import MarketConnections
from worker_runtime.process.clock import wall_ms
from worker_runtime.process.replacement import WorkerExit
from worker_runtime.process.shared_state import health_text
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
from worker_runtime.protocol.messages import Failure


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
def test_a_broker_that_is_away_is_reported_once_however_often_it_is_tried(
    fault: BerthError,
) -> None:
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


def test_a_failing_account_is_retried_while_another_one_is_connected() -> None:
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


def test_a_fresh_process_continues_without_a_refused_account() -> None:
    setting = MarketConnections("a1", "a2")
    setting.faults["a1"] = LoginRejected()
    setting.broker_sessions.replace(setting.accounts, 5.0)
    setting.settle_logins()
    setting.recovery.raise_if_hopeless()
    assert setting.reported[-1] == ("connected", "without a1: LOGIN_REJECTED")


def test_a_fresh_process_with_one_refused_and_one_away_keeps_trying() -> None:
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


def test_a_lost_lease_is_reported_and_its_return_restores_health() -> None:
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
