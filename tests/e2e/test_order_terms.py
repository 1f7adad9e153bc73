"""Odd lots, margin, short sales and range market orders on the real system, by the exchange's
ledger."""

from __future__ import annotations

from dataclasses import replace
from datetime import UTC, datetime
from decimal import Decimal
from typing import Any
from uuid import uuid4

from tests.support.systems.local import RunningSystem, Trader, until
from tests.support.systems.trading import (
    account_path,
    post_and_wait,
    read_position_terms,
    set_price,
    wait_for_final_orders,
)
from worker_runtime.protocol.messages import PriceType
from worker_runtime.protocol.order_terms import OpenClose, OrderCondition, OrderLot

LIMIT: dict[str, Any] = {"price_type": "LMT", "price": "100", "time_in_force": "ROD"}


def close(
    system: RunningSystem, trader: Trader, symbol: str = "2330", **body: Any
) -> dict[str, Any]:
    wait_for_final_orders(system, trader)
    path = f"{account_path(trader)}/positions/{symbol}/close"
    closed: dict[str, Any] = post_and_wait(
        system, trader, path, client_order_id=uuid4().hex, **body
    ).json()
    return closed


def test_odd_lots_margin_and_short_sales_are_bought_shown_and_closed(system: RunningSystem) -> None:
    trader = system.trader()
    set_price(system, "2330")
    expected: list[dict[str, Any]] = [
        {"lot": "intraday_odd", "quantity": 600},
        {"lot": "odd", "quantity": 600},
        {"condition": "margin", "quantity": 2},
        {"condition": "short_selling", "side": "sell", "quantity": 3},
    ]
    for terms in expected:
        answer = system.order(trader, **LIMIT, **terms)
        assert (answer.status_code, answer.json()["state"]) == (201, "filled"), answer.text
    assert read_position_terms(system, trader) == [
        ("long", 1, 200, "cash"),
        ("long", 2, 0, "margin"),
        ("short", 3, 0, "short_selling"),
    ]
    assert [(entry.lot, entry.condition, entry.quantity) for entry in system.ledger(trader)] == [
        (OrderLot.INTRADAY_ODD, OrderCondition.CASH, 600),
        (OrderLot.ODD, OrderCondition.CASH, 600),
        (OrderLot.COMMON, OrderCondition.MARGIN, 2),
        (OrderLot.COMMON, OrderCondition.SHORT_SELLING, 3),
    ]
    refused = system.order(trader, **LIMIT, condition="short_selling", quantity=4).json()
    assert (refused["state"], "3 are held" in refused["reason"]) == ("rejected", True)
    assert close(system, trader)["code"] == "CLOSE_INVALID"  # three positions: which one?
    assert close(system, trader, condition="margin")["state"] == "filled"
    assert close(system, trader, condition="short_selling")["side"] == "buy"
    odd = close(system, trader, lot="odd", **LIMIT)
    assert (odd["state"], odd["quantity"], odd["lot"]) == ("filled", 200, "odd")
    assert close(system, trader)["quantity"] == 1
    assert read_position_terms(system, trader) == []


def test_an_odd_lot_outlives_its_worker_and_is_filled_in_its_own_book(
    system: RunningSystem,
) -> None:
    trader = system.trader()
    set_price(system, "2890")
    held = system.order(trader, **LIMIT, symbol="2890", lot="intraday_odd", quantity=600)
    assert held.json()["state"] == "filled", held.text
    rests = system.order(
        trader, **LIMIT | {"price": "50"}, symbol="2890", lot="intraday_odd", quantity=600
    )
    assert rests.json()["state"] == "submitted", rests.text
    before = system.start_until_active(trader)["worker_id"]
    system.kill_worker(before)
    set_price(system, "2890.intraday_odd", 49)
    until(lambda: system.start_until_active(trader)["worker_id"] != before, "another worker")
    wait_for_final_orders(system, trader)
    assert read_position_terms(system, trader) == [("long", 1, 200, "cash")]
    [_, order] = system.ledger(trader)
    assert (order.lot, order.filled, order.fills[0].price) == (
        OrderLot.INTRADAY_ODD,
        600,
        Decimal(49),
    )
    path = f"/v1/users/{trader.user_id}/reconciliations"
    assert system.call("GET", path, trader.api_key).json()["reconciliations"] == []


def test_a_contract_is_opened_and_covered_at_a_range_of_the_market(system: RunningSystem) -> None:
    stock = system.trader()
    trader = replace(stock, account_id=f"{stock.account_id}-f")
    system.exchange(
        lambda admin: admin.register(trader.account_id, "key", "secret", person_id=stock.user_id)
    )
    stored = system.call(
        "PUT",
        f"/v1{account_path(trader)}/credentials",
        trader.api_key,
        json={
            "broker": "paper",
            "broker_type": "futures",
            "api_key": "key",
            "secret_key": "secret",
            "person_id": trader.user_id,
        },
    )
    assert stored.is_success, stored.text
    ranged = {"symbol": "TXFA6", "price_type": "MKP", "time_in_force": "IOC"}
    resting = system.order(trader, **ranged | {"time_in_force": "ROD"})
    assert (resting.status_code, resting.json()["code"]) == (422, "PRICE_TYPE_RULE")
    opened = system.order(trader, **ranged, open_close="day_trade", quantity=2)
    assert (opened.status_code, opened.json()["state"]) == (201, "filled"), opened.text
    too_many = system.order(trader, **ranged, open_close="cover", side="sell", quantity=3).json()
    assert (too_many["state"], "2 are held" in too_many["reason"]) == ("rejected", True)
    again = close(system, trader, "TXFA6", open_close="new")
    assert again["code"] == "ORDER_TERMS_RULE"
    assert close(system, trader, "TXFA6", open_close="cover", price_type="MKP")["state"] == "filled"
    assert read_position_terms(system, trader) == []
    terms = [
        (entry.price_type, entry.open_close, entry.quantity) for entry in system.ledger(trader)
    ]
    assert terms == [
        (PriceType.RANGE_MARKET, OpenClose.DAY_TRADE, 2),
        (PriceType.RANGE_MARKET, OpenClose.COVER, 2),
    ]


def test_a_signal_buys_an_odd_lot_and_closes_it(system: RunningSystem) -> None:
    trader = system.trader()
    set_price(system, "2317")
    made = system.call(
        "POST",
        f"/v1/users/{trader.user_id}/webhooks",
        trader.api_key,
        json={"account_id": trader.account_id, "quantity_unit": "lots"},
    ).json()

    def alert(action: str, **fields: Any) -> int:
        now = datetime.now(UTC).isoformat()
        body = {
            "secret": made["secret"],
            "time": now,
            "action": action,
            "symbol": "2317",
            "lot": "odd",
        }
        return system.call("POST", made["path"], "", json=body | LIMIT | fields).status_code

    assert alert("buy", quantity=7, condition="margin") == 422
    assert alert("buy", quantity=7) in (200, 201, 202)
    until(
        lambda: [entry.filled for entry in system.ledger(trader)] == [7],
        "the fill of the alert's order",
    )
    wait_for_final_orders(system, trader)
    assert alert("close") in (200, 201, 202)
    until(
        lambda: [entry.filled for entry in system.ledger(trader)] == [7, 7],
        "the fill of the closing order",
    )
    assert {entry.lot for entry in system.ledger(trader)} == {OrderLot.ODD}
