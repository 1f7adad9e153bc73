"""Accounts stand on their own, and what a broker has rejected is tried once."""

import os
import signal
from typing import Any

import pytest

from infra.lab.processes import processes_of
from tests.support.systems.local import RunningSystem, Trader, until
from worker_runtime.protocol.messages import OrderState


def _account(system: RunningSystem, trader: Trader, account_id: str) -> dict[str, Any]:
    shown = system.call("GET", f"/v1/users/{trader.user_id}", trader.api_key).json()
    account: dict[str, Any] = next(
        account for account in shown["accounts"] if account["account_id"] == account_id
    )
    return account


def _store(system: RunningSystem, trader: Trader, account_id: str, key: str, **body: Any) -> Any:
    path = f"/v1/users/{trader.user_id}/accounts/{account_id}/credentials"
    known = {"broker": "paper", "api_key": key, "secret_key": "secret", **body}
    return system.call("PUT", path, trader.api_key, json=known)


def _second_account(system: RunningSystem, trader: Trader, key: str) -> str:
    """Registered at the exchange under the key `key`."""
    account_id = f"{trader.account_id}-2"
    system.exchange(lambda admin: admin.register(account_id, "key", "secret", trader.user_id))
    assert _store(system, trader, account_id, key).is_success
    return account_id


def _sessions(system: RunningSystem, account_id: str) -> int:
    return len(system.exchange(lambda admin: admin.sessions(account_id, open=True)))


def test_credentials_that_were_rejected_cost_one_login_and_one_worker(
    system: RunningSystem,
) -> None:
    trader = system.trader(wrong_key=True)
    first = system.order(trader)
    assert (first.status_code, first.json()["code"]) == (422, "LOGIN_REJECTED")
    rejected = until(
        lambda: (
            account
            if (account := _account(system, trader, trader.account_id))["login_code"]
            else None
        ),
        "the rejection is remembered",
    )
    assert (rejected["login"], rejected["login_code"]) == ("rejected", "LOGIN_REJECTED")
    claims = system.claims()
    for _ in range(3):
        order = system.order(trader)
        assert (order.status_code, order.json()["code"]) == (422, "LOGIN_REJECTED")
        assert "order" not in order.json()  # none was accepted
        start = system.begin(trader).result(30)
        assert (start.status_code, start.json()["code"]) == (422, "LOGIN_REJECTED")
        path = f"/v1/users/{trader.user_id}/accounts/{trader.account_id}/positions"
        asked = system.call("GET", path, trader.api_key)
        assert (asked.status_code, asked.json()["code"]) == (422, "LOGIN_REJECTED")
    assert system.claims().keys() <= claims.keys()  # no worker left the pool

    # A person who has put it right at the broker asks for another try; somebody who has not is told
    # again.
    retry = f"/v1/users/{trader.user_id}/accounts/{trader.account_id}/retry"
    tried = system.call("POST", retry, trader.api_key)
    assert (tried.status_code, tried.json()["login"], tried.json()["version"]) == (200, "idle", 2)
    assert system.order(trader).json()["code"] == "LOGIN_REJECTED"
    system.exchange(
        lambda admin: admin.register(trader.account_id, "wrong", "secret", trader.user_id)
    )
    until(
        lambda: _account(system, trader, trader.account_id)["login"] == "rejected",
        "remembered again",
    )
    assert system.call("POST", retry, trader.api_key).json()["version"] == 3
    assert system.order(trader).status_code == 201


def test_one_account_that_cannot_log_in_stops_no_other(system: RunningSystem) -> None:
    trader = system.trader()
    bad = _second_account(system, trader, "wrong")
    first = system.order(trader)
    assert (first.status_code, first.json()["state"]) == (201, OrderState.FILLED)
    refused = system.order(trader, account_id=bad)
    assert (refused.status_code, refused.json()["code"]) == (422, "LOGIN_REJECTED")
    until(lambda: _account(system, trader, bad)["login"] == "rejected", "the rejection is shown")
    assert _account(system, trader, trader.account_id)["login"] == "connected"

    # A session that is killed comes back with what may log in.
    worker = system.start_until_active(trader)
    session = processes_of(worker["worker_id"]).session
    assert session
    os.kill(session, signal.SIGKILL)
    assert system.order(trader).status_code in (201, 202)
    until(lambda: system.order(trader).status_code == 201, "it trades again")

    # New credentials revive the other one in the same worker.
    assert _store(system, trader, bad, "key").is_success
    until(lambda: _account(system, trader, bad)["login"] == "connected", "it is revived")
    assert system.order(trader, account_id=bad).status_code == 201
    assert system.start_until_active(trader)["worker_id"] == worker["worker_id"]
    assert (_sessions(system, trader.account_id), _sessions(system, bad)) == (1, 1)


def test_wrong_newer_credentials_leave_the_account_trading_until_its_worker_ends(
    system: RunningSystem,
) -> None:
    trader = system.trader()
    system.start_until_active(trader)
    assert _store(system, trader, trader.account_id, "wrong").is_success
    shown = until(
        lambda: (
            account
            if (account := _account(system, trader, trader.account_id))["login_code"]
            else None
        ),
        "the rejection is remembered",
    )
    assert shown["login"] == "connected"  # with the older credentials
    assert system.order(trader).status_code == 201
    reload = f"/v1/users/{trader.user_id}/worker/reload-credentials"
    again = system.call("POST", reload, trader.api_key, params={"wait": 20})
    assert (again.status_code, again.json()["code"]) == (422, "LOGIN_REJECTED")
    assert system.order(trader).status_code == 201
    system.call("POST", f"/v1/users/{trader.user_id}/worker/stop", trader.api_key)
    until(lambda: not system.open_sessions(trader), "the worker's end")
    claims = system.claims()
    assert system.order(trader).json()["code"] == "LOGIN_REJECTED"
    assert system.claims().keys() <= claims.keys()


@pytest.mark.parametrize("turned", [{"simulation": False}, {"broker": "shioaji"}])
def test_an_account_turns_neither_its_broker_nor_live(
    system: RunningSystem, turned: dict[str, Any]
) -> None:
    trader = system.trader()
    refused = _store(system, trader, trader.account_id, "key", **turned)
    assert (refused.status_code, refused.json()["code"]) == (409, "ACCOUNT_DIFFERS")
    assert _account(system, trader, trader.account_id)["version"] == 1
    assert _store(system, trader, f"{trader.account_id}-live", "key", **turned).is_success


def test_two_accounts_of_ours_are_never_one_at_the_broker(system: RunningSystem) -> None:
    trader = system.trader()
    number = f"{trader.account_id}-at-the-broker"
    system.exchange(lambda admin: admin.register(number, "key", "secret", trader.user_id))
    assert (
        _store(system, trader, "mine", "key", broker_account=number).json()["login"] == "verified"
    )
    for other in ({"broker_account": number}, {"broker_account": trader.account_id}):
        refused = _store(system, trader, "again", "key", **other)
        assert (refused.status_code, refused.json()["code"]) == (409, "ACCOUNT_DIFFERS")
    live = {"broker": "shioaji", "broker_account": "9A95-0123456", "simulation": False}
    assert _store(system, trader, "real", "key", **live).is_success
    assert _store(system, trader, "simulated", "key", **{**live, "simulation": True}).is_success
    assert _store(system, trader, "mine", "key").json()["version"] == 2  # it keeps its number
    assert _account(system, trader, "mine")["broker_account"] == number
    assert system.order(trader, account_id="mine").status_code == 201
    assert len(system.exchange(lambda admin: admin.ledger(number))) == 1
