"""Signals over HTTP on the whole system: what each becomes, by the exchange's ledger."""

from __future__ import annotations

import asyncio
import time
from concurrent.futures import ThreadPoolExecutor
from datetime import UTC, datetime
from functools import partial
from typing import Any

import httpx
import pytest
from sqlalchemy import text

from infra.database.engine import Database
from infra.exchange.behaviour import Behaviour
from infra.market.calendar import load_calendar
from infra.market.signal_symbols import front_contract
from tests.support.systems.local import RunningSystem, until
from tests.support.systems.signals import TraderHook, ledger_of, make_hook
from tests.support.systems.trading import read_position_terms, set_price, wait_for_final_orders


def test_a_unit_is_asked_for_and_a_hundred_shares_are_no_hundred_lots(
    system: RunningSystem,
) -> None:
    trader = system.trader()
    path, body = f"/v1/users/{trader.user_id}/webhooks", {"account_id": trader.account_id}
    refused = system.call("POST", path, trader.api_key, json=body)
    assert (refused.status_code, refused.json()["code"]) == (422, "INVALID_REQUEST")
    assert '"quantity_unit": "shares"' in refused.json()["detail"]
    set_price(system, "2330")
    split = make_hook(system, trader, odd="split")
    bought = split.send("buy", quantity="100", price="100")
    assert bought.status_code in (200, 201), bought.text
    until(lambda: ledger_of(split) == [("buy", 100, "intraday_odd")], "the odd lot at the exchange")
    both = split.send("buy", quantity="2300.0", price="100").json()
    assert [leg["quantity"] for leg in both["legs"]] == [2, 300]
    strict, down = make_hook(system, trader), make_hook(system, trader, odd="round_down")
    refused = strict.send("buy", quantity="100")
    assert (refused.status_code, refused.json()["code"]) == (422, "ODD_LOT_REFUSED")
    rounded = down.send("buy", quantity="1100").json()
    assert rounded["quantity"] == 1, rounded
    nothing = down.send("buy", quantity="100").json()
    assert (nothing["outcome"], nothing["legs"]) == ("nothing_to_do", [])
    assert sorted(ledger_of(split)) == [
        ("buy", 1, "common"),
        ("buy", 2, "common"),
        ("buy", 100, "intraday_odd"),
        ("buy", 300, "intraday_odd"),
    ]


def test_a_webhook_of_before_keeps_lots_and_is_unconfirmed_until_somebody_says_so(
    system: RunningSystem,
) -> None:
    hook = make_hook(system, quantity_unit="lots")
    # A webhook of an earlier release has no unit.
    asyncio.run(_forget_unit(system, hook))
    path = f"/v1/users/{hook.trader.user_id}/webhooks"
    (row,) = system.call("GET", path, hook.trader.api_key).json()["webhooks"]
    assert row["quantity_unit"] is None
    assert hook.send("buy", quantity="3", symbol="2317").json()["quantity"] == 3
    changed = system.call(
        "PATCH", f"{path}/{hook.id}", hook.trader.api_key, json={"quantity_unit": "shares"}
    )
    assert changed.json()["quantity_unit"] == "shares"
    assert hook.send("buy", quantity="3000", symbol="2317").json()["quantity"] == 3
    assert hook.net() == 6


async def _forget_unit(system: RunningSystem, hook: TraderHook) -> None:
    url = system.stack.settings.database_url
    async with Database(url, pool_size=1) as database, database.session() as session:
        statement = text("update webhooks set quantity_unit = null where id = :id")
        await session.execute(statement, {"id": hook.id})


def test_a_reversal_is_not_doubled_and_a_target_is_reached_from_anywhere(
    system: RunningSystem,
) -> None:
    hook = make_hook(system, quantity_unit="lots", entry_mode="delta")
    assert hook.send("long_entry", quantity="2", symbol="MXFL6").status_code in (200, 201)
    # TradingView's contracts on a reversal from 2 to -3 are 5.
    reversed_ = hook.send("short_entry", quantity="5", symbol="MXFL6").json()
    assert [(leg["side"], leg["quantity"]) for leg in reversed_["legs"]] == [
        ("sell", 2),
        ("sell", 3),
    ]
    assert hook.net() == -3
    for size, side in (
        ("2", "long"),
        ("-1", "short"),
        ("4", "short"),
        ("0", "flat"),
        ("0", "flat"),
    ):
        answer = hook.send("position", position_size=size, market_position=side, symbol="MXFL6")
        assert answer.status_code in (200, 201), answer.text
        target = -int(size) if side == "short" and not size.startswith("-") else int(size)
        assert hook.net() == target
    assert answer.json()["outcome"] == "nothing_to_close"


def test_an_exit_and_the_entry_right_behind_it_are_both_carried_out_in_order(
    system: RunningSystem,
) -> None:
    hook = make_hook(system, quantity_unit="lots")
    assert hook.send("long_entry", quantity="2", symbol="MXFL6").status_code in (200, 201)
    bodies = [
        hook.body("long_exit", symbol="MXFL6"),
        hook.body("short_entry", quantity=1, symbol="MXFL6"),
    ]
    with ThreadPoolExecutor(2) as threads:
        first = threads.submit(hook.post, bodies[0])
        time.sleep(0.2)
        second = threads.submit(hook.post, bodies[1])
        assert {first.result().status_code, second.result().status_code} <= {201, 202}
    until(lambda: hook.net() == -1, "both signals at the exchange")
    sold = [("sell", 2, "common"), ("sell", 1, "common")]
    assert ledger_of(hook)[1:] == sold
    # Right after a fill, too.
    assert hook.post(hook.body("long_entry", quantity=3, symbol="MXFL6")).status_code in (201, 202)
    until(lambda: hook.net() == 3, "the entry right after the fill")


def test_an_exit_larger_than_the_position_closes_what_there_is(system: RunningSystem) -> None:
    hook = make_hook(system, quantity_unit="lots")
    hook.send("buy", quantity="2")
    wait_for_final_orders(system, hook.trader)
    exit_ = hook.send("long_exit", quantity="5").json()
    assert exit_["reason"] == "the position is 2, so 2 of 5 are closed"
    assert [leg["quantity"] for leg in exit_["legs"]] == [2]
    wait_for_final_orders(system, hook.trader)
    nothing = hook.send("long_exit", quantity="5")
    assert (nothing.status_code, nothing.json()["outcome"]) == (201, "nothing_to_close")
    assert read_position_terms(system, hook.trader) == []


@pytest.mark.parametrize(
    "fields",
    [
        {"action": " BUY "},
        *({"price": price} for price in ("", "0", "1005.5", "{{close}}")),
        {"quantity": "1.0"},
        {"time_in_force": "ioc", "price_type": "market"},
    ],
)
def test_what_alerts_write_in_many_ways_is_understood(
    system: RunningSystem, fields: dict[str, Any]
) -> None:
    hook = make_hook(system, quantity_unit="lots")
    said = {"action": "buy", "quantity": "1", **fields}
    answer = hook.send(said.pop("action"), **said)
    assert (answer.status_code, answer.json().get("quantity")) in ((200, 1), (201, 1)), answer.text
    assert hook.net() == 1


def test_what_is_not_understood_is_answered_with_the_sentence_that_helps(
    system: RunningSystem,
) -> None:
    hook = make_hook(system, quantity_unit="lots")
    cases: list[tuple[dict[str, Any], str]] = [
        ({"quantity": "{{strategy.order.contracts}}"}, "quantity still has the placeholder"),
        ({"quantity": "1.5"}, "quantity: it is not whole"),
        ({"quantity": None}, "buy needs a quantity"),
        ({"symbol": "NASDAQ:AAPL"}, "there is no exchange NASDAQ"),
    ]
    for fields, sentence in cases:
        answer = hook.post(hook.body("buy", **{"quantity": 1, **fields}))
        assert answer.status_code == 422
        assert answer.json()["detail"].startswith(sentence), answer.text
        assert hook.secret not in answer.text
    assert ledger_of(hook) == []


def test_limits_between_ticks_are_rounded_to_the_safe_side_or_refused(
    system: RunningSystem,
) -> None:
    set_price(system, "2454", 1000)
    safe = make_hook(system, quantity_unit="lots")
    limit = {"price_type": "LMT", "price": "1005.5", "symbol": "2454", "quantity": 1}
    assert safe.send("buy", **limit).json()["price"] == "1005"
    assert safe.send("sell", **limit).json()["price"] == "1010"
    strict = make_hook(system, quantity_unit="lots", price_rounding="refuse")
    refused = strict.send("buy", **limit)
    assert (refused.status_code, refused.json()["code"]) == (422, "PRICE_OFF_TICK")


def test_symbols_are_those_of_charts_and_what_operators_name(system: RunningSystem) -> None:
    hook = make_hook(system, quantity_unit="lots")
    front = front_contract("TXF", load_calendar(), datetime.now(UTC))
    for sent, symbol in (
        ("TWSE:2330", "2330"),
        ("2330.TW", "2330"),
        ("TXF1!", front),
        ("TAIFEX:TXF1!", front),
    ):
        assert hook.send("buy", symbol=sent, quantity=1).json()["symbol"] == symbol
    admin = system.stack.admin_key
    named = system.call("PUT", "/v1/symbols/fitx", admin, json={"symbol": "TXF1!"})
    assert (named.status_code, named.json()["name"]) == (200, "FITX")
    refused = system.call("PUT", "/v1/symbols/fitx", hook.trader.api_key, json={"symbol": "2330"})
    assert refused.status_code == 403
    body = hook.body("buy", symbol="FITX", quantity=1)
    first = hook.post(body)
    # A repeat after the table was edited is the same order, in the same contract.
    system.call("PUT", "/v1/symbols/FITX", admin, json={"symbol": "2330"})
    until(lambda: hook.post(body).status_code == 200, "the outcome")
    assert (hook.post(body).json()["symbol"], len(ledger_of(hook))) == (front, 5)
    assert first.status_code in (201, 202)
    gone = system.call("DELETE", "/v1/symbols/FITX", admin)
    assert gone.status_code == 204
    path = "/v1/audit?subject=symbol_name:FITX"
    acts = [entry["action"] for entry in system.call("GET", path, admin).json()["entries"]]
    assert sorted(set(acts)) == ["symbol_name.deleted", "symbol_name.set"]


def test_the_old_path_is_the_same_place(system: RunningSystem) -> None:
    hook = make_hook(system, quantity_unit="lots")
    body = hook.body("buy", quantity=1)
    before = system.call("POST", hook.path.replace("/signals", "/orders"), "", json=body)
    assert before.status_code in (201, 202)
    until(lambda: hook.post(body).status_code == 200, "the repeat on the new path")
    assert hook.net() == 1


def test_a_signal_whose_process_is_killed_is_carried_on_once_and_those_behind_it_too(
    system: RunningSystem,
) -> None:
    hook = make_hook(system, quantity_unit="lots", entry_mode="delta")
    assert hook.send("long_entry", quantity="2", symbol="MXFL6").status_code in (200, 201)
    wait_for_final_orders(system, hook.trader)
    slow = Behaviour(latency_ms=1500)
    system.exchange(lambda admin: admin.set_behaviour(hook.trader.account_id, slow))
    bodies = [
        hook.body("short_entry", quantity=5, symbol="MXFL6"),
        hook.body("position", position_size=4, symbol="MXFL6"),
    ]
    for body in bodies:
        assert hook.post(body).status_code in (201, 202)
    until(lambda: len(system.ledger(hook.trader)) >= 2, "the close at the exchange")
    system.stack.api.kill()
    system.stack.api.start()
    for body in bodies:
        until(partial(_ended, hook, body), "the signal's outcome")
    # What the restart left no time for was refused, and nothing was placed twice.
    whole = [
        ("buy", 2, "common"),
        ("sell", 2, "common"),
        ("sell", 3, "common"),
        ("buy", 3, "common"),
        ("buy", 4, "common"),
    ]
    refused = [body for body in bodies if hook.post(body).status_code == 409]
    assert ledger_of(hook) == whole if not refused else ledger_of(hook)[:2] == whole[:2]
    assert len(ledger_of(hook)) <= len(whole)
    path = f"/v1/users/{hook.trader.user_id}/orders"
    orders = system.call("GET", path, hook.trader.api_key).json()["orders"]
    assert len(orders) == len(ledger_of(hook))


def _ended(hook: TraderHook, body: dict[str, Any]) -> bool:
    try:
        answer = hook.post(body)
    except httpx.HTTPError:
        return False
    assert answer.status_code in (200, 202, 404, 409, 503), answer.text
    return answer.status_code in (200, 409)
