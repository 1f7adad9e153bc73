"""An order that went to the broker past Berth is a difference, until an operator has closed it."""

from __future__ import annotations

from tests.support.systems.local import RunningSystem, Trader
from tests.support.systems.trading import open_exchange_session, wait_for_difference


def log_in_again(system: RunningSystem, trader: Trader) -> None:
    system.exchange(lambda admin: admin.end_sessions(trader.account_id))


def test_orders_past_berth_are_shown_until_a_person_has_closed_them(system: RunningSystem) -> None:
    trader = system.trader()
    with open_exchange_session(system, trader) as session:
        before = session.buy("2317", 2)  # the account traded before Berth knew it
    assert system.order(trader).json()["state"] == "filled"
    first = wait_for_difference(system, trader)
    assert first["differences"] == {"foreign_orders": [before]}
    staff = system.stack.admin_key
    path, why = "/v1/reconciliations/{}/resolve", {"reason": "bought by hand"}
    assert system.call("POST", path.format(first["id"]), staff, json=why).status_code == 200

    with open_exchange_session(system, trader) as session:
        past = session.buy("2454", 2)
    log_in_again(system, trader)
    second = wait_for_difference(system, trader)
    assert second["differences"] == {
        "foreign_orders": [past],
        "positions": [{"symbol": "2454", "ours": 0, "broker": 1}],
    }
    waiting = system.call("GET", "/v1/reconciliations", staff).json()["reconciliations"]
    assert second["id"] in [row["id"] for row in waiting]
    # Shown, and by default it blocks nothing.
    assert system.order(trader).json()["state"] == "filled"
    assert system.call("POST", path.format(second["id"]), staff, json=why).status_code == 200

    with open_exchange_session(system, trader) as session:
        last = session.buy("2603", 2)
    log_in_again(system, trader)
    assert wait_for_difference(system, trader)["differences"] == {
        "foreign_orders": [last],
        "positions": [{"symbol": "2603", "ours": 0, "broker": 1}],
    }
