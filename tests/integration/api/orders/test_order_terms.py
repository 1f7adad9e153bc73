"""Lots, conditions, open and close types over the API: what may go together, what arrives, what is
shown."""

from __future__ import annotations

import csv
import io
from datetime import UTC, datetime
from decimal import Decimal
from typing import Any
from uuid import UUID

import httpx
import pytest
from sqlalchemy import select

from infra.database.models import AuditEntry
from infra.database.orders import listing, recording
from infra.database.trading import limits as trading_limits
from infra.database.trading.models import AccountLimits
from tests.support.api.accounts import put_account
from tests.support.api.scripted_answers import answer_positions, answer_submitted
from tests.support.systems.api import ServedApi, StartWorker, an_order
from tests.support.workers.api_worker import filled
from worker_runtime.protocol.broker_reports import Position
from worker_runtime.protocol.messages import PriceType
from worker_runtime.protocol.order_terms import OrderCondition

ODD: dict[str, Any] = {"lot": "intraday_odd", "quantity": 999}
MARKET = {"price_type": "MKT", "price": None, "time_in_force": "IOC"}
RANGE: dict[str, Any] = {"price_type": "MKP", "price": None}
FUTURES: dict[str, Any] = {"account_id": "futures", "symbol": "TXFA6"}


async def place(
    user: httpx.AsyncClient, api: ServedApi, number: int = 1, **changes: Any
) -> httpx.Response:
    return await user.post(f"/users/{api.user}/orders", json=an_order(number, **changes))


@pytest.mark.parametrize(
    ("changes", "code"),
    [
        ({**ODD, "quantity": 1000}, "ORDER_TERMS_RULE"),
        ({**ODD, **MARKET}, "PRICE_TYPE_RULE"),
        ({**ODD, "time_in_force": "IOC"}, "PRICE_TYPE_RULE"),
        ({**ODD, "condition": "margin"}, "ORDER_TERMS_RULE"),
        ({**ODD, "lot": "odd", "condition": "short_selling"}, "ORDER_TERMS_RULE"),
        ({"lot": "fixing", **MARKET}, "PRICE_TYPE_RULE"),
        ({"lot": "fixing", "quantity": 500}, "ORDER_TERMS_RULE"),
        ({**RANGE, "time_in_force": "IOC"}, "PRICE_TYPE_RULE"),
        ({"open_close": "new"}, "ORDER_TERMS_RULE"),
        ({**FUTURES, **RANGE, "time_in_force": "ROD"}, "PRICE_TYPE_RULE"),
        ({**FUTURES, "lot": "odd"}, "ORDER_TERMS_RULE"),
        ({**FUTURES, "condition": "margin"}, "ORDER_TERMS_RULE"),
        ({"lot": "block"}, "INVALID_REQUEST"),
        ({**RANGE, "price": "5"}, "INVALID_REQUEST"),
    ],
)
async def test_what_the_market_does_not_take_together_is_refused_before_it_is_written(
    api: ServedApi, user: httpx.AsyncClient, changes: dict[str, Any], code: str
) -> None:
    await put_account(api, "futures", "paper", "futures")
    answer = await place(user, api, **changes)
    assert (answer.status_code, answer.json()["code"]) == (422, code), answer.text
    assert (await user.get(f"/users/{api.user}/orders")).json()["orders"] == []


@pytest.mark.parametrize(
    "terms",
    [
        {"lot": "intraday_odd", "quantity": 1, "condition": "cash", "open_close": "auto"},
        {"lot": "odd", "quantity": 999, "condition": "cash", "open_close": "auto"},
        {
            "lot": "fixing",
            "quantity": 499,
            "price": "100",
            "condition": "margin",
            "open_close": "auto",
        },
        {"lot": "common", "quantity": 1, "condition": "short_selling", "open_close": "auto"},
        {**FUTURES, "lot": "common", "condition": "cash", "open_close": "day_trade"},
        {**FUTURES, **RANGE, "time_in_force": "FOK", "open_close": "cover"},
    ],
)
async def test_the_terms_arrive_and_are_shown_everywhere(
    api: ServedApi, user: httpx.AsyncClient, start_worker: StartWorker, terms: dict[str, Any]
) -> None:
    await put_account(api, "futures", "paper", "futures")
    worker = await start_worker(api.user)
    answer = await place(user, api, **terms)
    assert answer.status_code == 201, answer.text
    body = answer.json()
    named = {"lot", "condition", "open_close", "price_type", "quantity"}
    asked = an_order(1, **terms)
    assert {name: body[name] for name in named} == {
        name: asked.get(name, body[name]) for name in named
    }
    [order] = worker.popped
    assert order.v == 2
    assert (order.lot, order.condition, order.open_close) == (
        body["lot"],
        body["condition"],
        body["open_close"],
    )
    again = await place(user, api, **terms)
    assert (again.status_code, again.json()["id"]) == (200, body["id"])
    other = await place(
        user, api, **(terms | {"lot": "common", "condition": "cash", "open_close": "auto"})
    )
    assert other.json()["code"] == "CLIENT_ORDER_ID_REUSED"
    shown = (await user.get(f"/orders/{body['id']}")).json()
    assert {name: shown[name] for name in named} == {name: body[name] for name in named}
    exported = await user.get(f"/users/{api.user}/orders.csv")
    [row] = csv.DictReader(io.StringIO(exported.text))
    assert (row["lot"], row["condition"], row["open_close"]) == (
        body["lot"],
        body["condition"],
        body["open_close"],
    )
    async with api.services.database.session() as session:
        stored = await recording.get_order(session, UUID(body["id"]))
        now = datetime.now(UTC)
        [line] = await listing.orders_of_statement(
            session, api.user, stored.created_at, now, limit=5
        )
        noted = await session.scalar(
            select(AuditEntry.data).where(AuditEntry.action == "order.accepted")
        )
    assert noted is not None
    assert (stored.lot, line.lot, noted["lot"]) == (body["lot"],) * 3


async def test_an_order_without_them_is_what_it_was(
    api: ServedApi, user: httpx.AsyncClient, start_worker: StartWorker
) -> None:
    """A client of release 0.1.0, and a worker: no field of the message changes its meaning."""
    worker = await start_worker(api.user)
    first = await place(user, api)
    assert (first.json()["lot"], first.json()["condition"], first.json()["open_close"]) == (
        "common",
        "cash",
        "auto",
    )
    assert worker.popped[0].v == 1
    named = await place(user, api, lot="common", condition="cash", open_close="auto")
    assert (named.status_code, named.json()["id"]) == (200, first.json()["id"])


async def test_shares_of_an_odd_lot_are_not_counted_as_lots(
    api: ServedApi, user: httpx.AsyncClient, start_worker: StartWorker
) -> None:
    await start_worker(api.user)
    own = AccountLimits(max_quantity=2, max_notional=Decimal(1_000_000))
    async with api.services.database.session() as session:
        await trading_limits.put_limits(session, api.user, "main", own, actor="key:1")
    assert (await place(user, api, 1, **ODD, price="1001")).status_code == 201  # 999,999 TWD
    refused = await place(user, api, 2, **ODD, price="1001.01")
    assert (refused.status_code, refused.json()["code"]) == (422, "NOTIONAL_LIMIT")
    assert "1000008.99 TWD" in refused.json()["detail"]


@pytest.mark.parametrize("terms", [{**ODD, "quantity": 100}, {"lot": "fixing", "quantity": 40}])
async def test_only_the_quantity_of_a_lot_that_trades_apart_changes(
    api: ServedApi, user: httpx.AsyncClient, start_worker: StartWorker, terms: dict[str, Any]
) -> None:
    await start_worker(api.user, answer_submitted)
    order = (await place(user, api, **terms)).json()
    body = {"request_id": "r", "price": "1000"}
    answer = await user.post(f"/orders/{order['id']}/replace", json=body)
    assert (answer.status_code, answer.json()["code"]) == (422, "REPLACE_INVALID"), answer.text
    assert "cancel it" in answer.json()["detail"]


async def test_a_range_market_order_goes_with_a_claim_as_a_market_order(
    api: ServedApi, user: httpx.AsyncClient, start_worker: StartWorker
) -> None:
    await put_account(api, "futures", "paper", "futures")
    await start_worker(api.user, answer_submitted)
    assert (await place(user, api, **FUTURES, **RANGE, time_in_force="IOC")).status_code == 201
    async with api.services.database.session() as session:
        _, [open_order] = await listing.open_orders_with_accounts(session, api.user)
    assert open_order.price_type is PriceType.MARKET


def position(quantity: int, odd_shares: int = 0, condition: str = "cash") -> Position:
    return Position(
        symbol="2330",
        quantity=quantity,
        odd_shares=odd_shares,
        condition=OrderCondition(condition),
        average_price=Decimal(1000),
    )


@pytest.mark.parametrize(
    ("held", "asked", "expected"),
    [
        ([position(2, 345)], {}, ("sell", 2, "common", "cash")),
        ([position(2, 345)], {"lot": "odd"}, ("sell", 345, "odd", "cash")),
        (
            [position(0, 345)],
            {"lot": "intraday_odd", "quantity": 5},
            ("sell", 5, "intraday_odd", "cash"),
        ),
        ([position(-2, 0, "short_selling")], {}, ("buy", 2, "common", "short_selling")),
        ([position(3, 0, "margin")], {}, ("sell", 3, "common", "margin")),
        (
            [position(1), position(3, 0, "margin")],
            {"condition": "margin"},
            ("sell", 3, "common", "margin"),
        ),
        ([position(1), position(3, 0, "margin")], {}, "CLOSE_INVALID"),
        ([position(0, 345)], {}, "NO_POSITION"),
        ([position(2)], {"lot": "odd"}, "NO_POSITION"),
        ([position(2)], {"condition": "margin"}, "NO_POSITION"),
        ([position(2, 345)], {"lot": "odd", "quantity": 346}, "CLOSE_INVALID"),
    ],
)
async def test_a_close_takes_the_lots_or_the_shares_of_one_condition(
    api: ServedApi,
    user: httpx.AsyncClient,
    start_worker: StartWorker,
    held: list[Position],
    asked: dict[str, Any],
    expected: tuple[str, int, str, str] | str,
) -> None:
    worker = await start_worker(api.user, filled)
    worker.reply = answer_positions(*held)
    body = {"client_order_id": "x", "price_type": "LMT", "price": "1000", **asked}
    answer = await user.post(f"/users/{api.user}/accounts/main/positions/2330/close", json=body)
    if isinstance(expected, str):
        assert answer.json()["code"] == expected, answer.text
        assert worker.popped == []
        return
    assert answer.status_code == 200, answer.text
    [order] = worker.popped
    assert (order.side, order.quantity, order.lot, order.condition) == expected
    assert order.reduce_only
    again = await user.post(f"/users/{api.user}/accounts/main/positions/2330/close", json=body)
    assert (again.status_code, len(worker.popped)) == (200, 1)


async def test_an_entry_on_margin_closes_what_was_sold_short_first(
    api: ServedApi, user: httpx.AsyncClient, start_worker: StartWorker
) -> None:
    worker = await start_worker(api.user, filled)
    worker.reply = answer_positions(position(-2, 0, "short_selling"))
    body = {"client_order_id": "i", "intent": "long_entry", "symbol": "2330", "quantity": 1}
    path = f"/users/{api.user}/accounts/main/intents?wait=10"
    answer = await user.post(path, json=body | {"condition": "margin"})
    assert answer.status_code == 200, answer.text
    sent = [(order.side, order.quantity, order.condition) for order in worker.popped]
    assert sent == [("buy", 2, "short_selling"), ("buy", 1, "margin")]


async def test_an_entry_of_shares_does_not_open_beside_lots_on_the_other_side(
    api: ServedApi, user: httpx.AsyncClient, start_worker: StartWorker
) -> None:
    worker = await start_worker(api.user, filled)
    worker.reply = answer_positions(position(-2, 0, "short_selling"))
    body = {
        "client_order_id": "i",
        "intent": "long_entry",
        "symbol": "2330",
        "quantity": 5,
        "lot": "odd",
    }
    path = f"/users/{api.user}/accounts/main/intents?wait=10"
    answer = await user.post(path, json=body | {"price_type": "LMT", "price": "1000"})
    assert (answer.json()["code"], worker.popped) == ("CLOSE_INVALID", []), answer.text


async def test_positions_show_lots_shares_and_condition(
    api: ServedApi, user: httpx.AsyncClient, start_worker: StartWorker
) -> None:
    worker = await start_worker(api.user)
    worker.reply = answer_positions(position(2, 345), position(0, -7, "short_selling"), position(0))
    rows = (await user.get(f"/users/{api.user}/accounts/main/positions")).json()["positions"]
    shown = [
        (row["direction"], row["quantity"], row["odd_shares"], row["condition"]) for row in rows
    ]
    assert shown == [("long", 2, 345, "cash"), ("short", 0, 7, "short_selling")]
