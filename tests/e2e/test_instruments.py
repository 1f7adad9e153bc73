"""Instruments from the paper exchange's list to the look-up, through a worker that nobody trades
with."""

from __future__ import annotations

from typing import Any

from tests.support.systems.local import RunningSystem, Trader, until

SOURCES = "/v1/instruments/sources"


def lister(system: RunningSystem) -> Trader:
    """A user whose key may only read, with an account at the exchange."""
    user_id, account_id = "instruments", "lists"
    admin = system.stack.admin_key
    body = {"user_id": user_id, "scopes": ["read"]}
    made = system.call("POST", "/v1/users", admin, json=body)
    assert made.status_code == 201, made.text
    system.exchange(lambda exchange: exchange.register(account_id, "k", "s", person_id=user_id))
    stored = system.call(
        "PUT",
        f"/v1/users/{user_id}/accounts/{account_id}/credentials",
        admin,
        json={"broker": "paper", "api_key": "k", "secret_key": "s", "person_id": user_id},
    )
    assert stored.is_success, stored.text
    return Trader(user_id, made.json()["api_key"], account_id)


def source_of(system: RunningSystem) -> dict[str, Any]:
    answer = system.call("GET", SOURCES, system.stack.admin_key)
    [source] = answer.json()["sources"]
    return dict(source)


def test_the_brokers_list_is_loaded_through_a_user_who_does_not_trade(
    system: RunningSystem,
) -> None:
    admin = system.stack.admin_key
    trader = system.trader()
    refused = system.call(
        "PUT",
        f"{SOURCES}/paper",
        admin,
        json={"user_id": trader.user_id, "account_id": trader.account_id},
    )
    assert refused.json()["code"] == "INSTRUMENT_SOURCE_TRADES"

    lists = lister(system)
    designated = system.call(
        "PUT",
        f"{SOURCES}/paper",
        admin,
        json={"user_id": lists.user_id, "account_id": lists.account_id},
    )
    assert designated.is_success, designated.text
    begun = system.call("POST", f"{SOURCES}/paper/load", admin, json={})
    assert begun.status_code == 202, begun.text

    def loaded() -> dict[str, Any] | None:
        load = source_of(system)["last_load"]
        return load if load is not None and load["state"] != "running" else None

    load = until(loaded, "the end of the load")
    assert (load["state"], load["error"]) == ("loaded", "")
    assert load["instruments"] > 100
    assert source_of(system)["missed_days"] == 0

    # Its worker is of a pool of its own, in which none was ready.
    start = f"/v1/users/{lists.user_id}/worker/start"
    worker = system.call("POST", start, admin, params={"wait": 40}).json()
    assert (worker["pool"], worker["warm"]) == ("instruments", False), worker

    key = trader.api_key
    stock = system.call("GET", "/v1/instruments/paper/2330", key).json()
    assert (stock["kind"], stock["lot_units"]) == ("stock", 1000)
    kinds = {
        kind: system.call("GET", "/v1/instruments", key, params={"kind": kind}).json()
        for kind in ("future", "option", "warrant")
    }
    assert all(page["instruments"] for page in kinds.values()), kinds

    # The same list again changes nothing.
    system.call("POST", f"{SOURCES}/paper/load", admin, json={})

    def loaded_again() -> dict[str, Any] | None:
        again = loaded()
        return again if again is not None and again["began_at"] != load["began_at"] else None

    again = until(loaded_again, "the end of the second load")
    assert (again["state"], again["added"], again["removed"], again["pending"]) == (
        "loaded",
        0,
        0,
        0,
    )
