"""Lists and exports of orders, on a real PostgreSQL."""

from __future__ import annotations

import codecs
import csv
import io
from datetime import datetime, timedelta
from typing import Any
from uuid import UUID

import httpx
import pytest

from api.orders.export import PAGE_SIZE
from infra.database.orders import attention
from infra.market.calendar import HOME_ZONE
from tests.support.api.orders import FIRST_ORDER_AT, write_orders
from tests.support.systems.api import ServedApi
from worker_runtime.jobs.protocol.catalog import OrderRow


async def listed(user: httpx.AsyncClient, api: ServedApi, **query: Any) -> list[str]:
    answer = await user.get(f"/users/{api.user}/orders", params=query)
    assert answer.status_code == 200, answer.text
    return [order["client_order_id"] for order in answer.json()["orders"]]


async def test_pages_are_the_newest_first_and_new_orders_do_not_move_them(
    api: ServedApi, user: httpx.AsyncClient
) -> None:
    await write_orders(api, 7)
    seen, cursor = [], None
    for number in range(3):
        params = {"limit": 3, **({"cursor": cursor} if cursor else {})}
        page = (await user.get(f"/users/{api.user}/orders", params=params)).json()
        seen += [order["client_order_id"] for order in page["orders"]]
        cursor = page["next_cursor"]
        await write_orders(api, first=100 + number)
    assert seen == [f"c-{number}" for number in range(6, -1, -1)]
    assert cursor is None


async def test_orders_of_one_instant_are_all_on_some_page(
    api: ServedApi, user: httpx.AsyncClient
) -> None:
    made = await write_orders(api, 5, created_at=FIRST_ORDER_AT)
    seen, cursor = [], None
    for _ in made:
        params = {"limit": 1, **({"cursor": cursor} if cursor else {})}
        page = (await user.get(f"/users/{api.user}/orders", params=params)).json()
        seen += [UUID(order["id"]) for order in page["orders"]]
        cursor = page["next_cursor"]
    assert sorted(seen) == sorted(made)
    assert cursor is None


async def test_each_filter_leaves_the_others_out(api: ServedApi, user: httpx.AsyncClient) -> None:
    await write_orders(api, 1, first=0, state="filled", symbol="2317", side="sell")
    await write_orders(api, 1, first=1, state="submitted")
    (raised,) = await write_orders(api, 1, first=2)
    await write_orders(api, 1, first=3, state="cancelled")
    async with api.services.database.session() as session:
        assert await attention.demand_attention(session, raised, "not found at the broker")
    assert await listed(user, api, state="open") == ["c-2", "c-1"]
    assert await listed(user, api, state="final") == ["c-3", "c-0"]
    assert await listed(user, api, state="needs_attention") == ["c-2"]
    assert await listed(user, api, state="accepted") == []  # it is shown as needs_attention
    assert await listed(user, api, state=["submitted", "filled"]) == ["c-1", "c-0"]
    assert await listed(user, api, symbol="2317") == await listed(user, api, side="sell") == ["c-0"]
    assert await listed(user, api, client_order_id="c-1") == ["c-1"]
    assert await listed(user, api, account="other") == []
    early, late = FIRST_ORDER_AT + timedelta(minutes=1), FIRST_ORDER_AT + timedelta(minutes=3)
    assert await listed(user, api, **{"from": early.isoformat(), "to": late.isoformat()}) == [
        "c-2",
        "c-1",
    ]
    (shown,) = (await user.get(f"/users/{api.user}/orders?state=needs_attention")).json()["orders"]
    assert (shown["state"], shown["attention"], shown["final"]) == (
        "needs_attention",
        "not found at the broker",
        False,
    )
    assert (await user.get(f"/orders/{raised}")).json()["state"] == "needs_attention"


@pytest.mark.parametrize("path", ["orders", "orders.csv"])
@pytest.mark.parametrize(
    "query",
    [
        {"state": "done"},
        {"account": "no/such"},
        {"symbol": "'; drop table orders"},
        {"side": "long"},
        {"client_order_id": "a b"},
        {"client_order_id": "x" * 65},
        {"from": "yesterday"},
        {"from": "2026-11-20T01:00:00"},  # without a zone
        {"to": "0001-01-01T00:00:00+23:59"},
        {"from": "9999-12-31T23:59:59-12:00"},
        {"from": "2026-11-20T01:00:00Z", "to": "2026-11-20T01:00:00Z"},
        {"statee": "open"},
    ],
)
async def test_a_filter_that_cannot_be_meant_is_refused(
    api: ServedApi, user: httpx.AsyncClient, path: str, query: dict[str, str]
) -> None:
    answer = await user.get(f"/users/{api.user}/{path}", params=query)
    assert (answer.status_code, answer.json()["code"]) == (422, "INVALID_REQUEST")


@pytest.mark.parametrize(
    "query",
    [
        {"limit": 0},
        {"limit": 501},
        {"limit": "many"},
        {"cursor": "x"},
        {"cursor": "!!"},
        {"cursor": "_" * 32},
        {"cursor": "A" * 65},
    ],
)
async def test_a_page_that_no_list_has_is_refused(
    api: ServedApi, user: httpx.AsyncClient, query: dict[str, str]
) -> None:
    answer = await user.get(f"/users/{api.user}/orders", params=query)
    assert (answer.status_code, answer.json()["code"]) == (422, "INVALID_REQUEST")


@pytest.mark.parametrize("path", ["orders", "orders.csv"])
async def test_only_the_user_and_operators_see_a_list(api: ServedApi, path: str) -> None:
    async with api.client(api.key) as user, api.client(api.admin_key) as admin:
        foreign = await user.get(f"/users/somebody-else/{path}")
        assert (foreign.status_code, foreign.json()["code"]) == (404, "NOT_FOUND")
        unknown = await admin.get(f"/users/nobody/{path}")
        assert (unknown.status_code, unknown.json()["code"]) == (404, "USER_NOT_FOUND")
        assert (await admin.get(f"/users/{api.user}/{path}")).status_code == 200


async def test_the_export_has_every_order_once_across_pages(
    api: ServedApi, user: httpx.AsyncClient
) -> None:
    made = await write_orders(api, PAGE_SIZE + 3)
    answer = await user.get(f"/users/{api.user}/orders.csv")
    assert answer.headers["content-type"] == "text/csv; charset=utf-8; header=present"
    assert f"orders-{api.user}.csv" in answer.headers["content-disposition"]
    assert answer.text.count("\r\n") == len(made) + 1
    rows = list(csv.DictReader(io.StringIO(answer.text, newline="")))
    assert tuple(rows[0]) == OrderRow.__struct_fields__
    assert [UUID(row["id"]) for row in rows] == made[::-1]


async def test_an_export_of_nothing_is_its_header(api: ServedApi, user: httpx.AsyncClient) -> None:
    answer = await user.get(f"/users/{api.user}/orders.csv", params={"symbol": "2317"})
    assert answer.text == ",".join(OrderRow.__struct_fields__) + "\r\n"


async def test_a_spreadsheet_runs_nothing_of_an_export(
    api: ServedApi, user: httpx.AsyncClient
) -> None:
    reason = '=HYPERLINK("http://evil","x")\r\n@sum, "quoted"'
    await write_orders(
        api, 1, reason=reason, symbol="-2+3", state="rejected", client_order_id="-cmd"
    )
    answer = await user.get(f"/users/{api.user}/orders.csv")
    (row,) = csv.DictReader(io.StringIO(answer.text, newline=""))
    assert (row["reason"], row["symbol"], row["client_order_id"]) == (
        f"'{reason}",
        "'-2+3",
        "'-cmd",
    )
    assert (row["accepted_at"], row["quantity"], row["reduce_only"]) == (
        "2026-11-20T09:00:00.000000+08:00",
        "1",
        "false",
    )


@pytest.mark.parametrize("path", ["orders", "orders.csv"])
async def test_a_day_is_one_of_the_market_and_counts_as_a_whole(
    api: ServedApi, user: httpx.AsyncClient, path: str
) -> None:
    await write_orders(api, 3)  # 09:00 in Taipei on 2026-11-20, and later

    async def count(**query: str) -> int:
        answer = await user.get(f"/users/{api.user}/{path}", params=query)
        assert answer.status_code == 200, answer.text
        return (
            answer.text.count("client_order_id")
            if path == "orders"
            else answer.text.count("\n") - 1
        )

    assert await count(**{"from": "2026-11-20", "to": "2026-11-20"}) == 3
    assert await count(**{"from": "2026-11-21"}) == 0
    assert await count(**{"to": "2026-11-19"}) == 0
    assert await count(**{"from": "2026-11-20T09:00:00+08:00"}) == 3
    assert await count(**{"from": "2026-11-20T10:00:00+08:00"}) == 0


@pytest.mark.parametrize("path", ["orders", "orders.csv"])
async def test_a_plus_that_was_not_encoded_is_one_nevertheless(
    api: ServedApi, user: httpx.AsyncClient, path: str
) -> None:
    await write_orders(api, 1)
    address = (
        f"/users/{api.user}/{path}?from=2026-11-20T09:00:00+08:00&to=2026-11-20T10:00:00+08:00"
    )
    answer = await user.get(address)
    assert (answer.status_code, "c-0" in answer.text) == (200, True), answer.text
    refused = await user.get(f"/users/{api.user}/{path}?from=2026-11-20T09:00:00")
    (error,) = refused.json()["errors"]
    assert (error["loc"][-1], "%2B" in error["msg"]) == ("from", True)


async def test_an_export_for_a_spreadsheet_begins_with_a_mark_and_has_times_it_reads(
    api: ServedApi, user: httpx.AsyncClient
) -> None:
    reason = "=1+1\r\n餘額不足"
    made = await write_orders(api, PAGE_SIZE + 3, reason=reason, state="rejected")
    address = f"/users/{api.user}/orders.csv"
    plain = (await user.get(address)).content
    marked = (await user.get(address, params={"bom": "1"})).content
    assert not plain.startswith(codecs.BOM_UTF8)
    assert marked.startswith(codecs.BOM_UTF8)
    assert marked.count(codecs.BOM_UTF8) == 1
    rows = list(csv.DictReader(io.StringIO(marked.decode("utf-8-sig"), newline="")))
    expected = list(csv.DictReader(io.StringIO(plain.decode(), newline="")))
    assert [UUID(row["id"]) for row in rows] == made[::-1]
    for row, other in zip(rows, expected, strict=True):
        at = datetime.strptime(row.pop("accepted_at"), "%Y-%m-%d %H:%M:%S.%f").replace(
            tzinfo=HOME_ZONE
        )
        assert abs(at - datetime.fromisoformat(other.pop("accepted_at"))) < timedelta(
            milliseconds=1
        )
        assert row == other
    assert rows[0]["reason"] == f"'{reason}"
    refused = await user.get(f"/users/{api.user}/orders", params={"bom": "1"})
    assert refused.status_code == 422
