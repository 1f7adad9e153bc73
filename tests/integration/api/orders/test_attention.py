"""Orders that need an operator's attention, over the API."""

from __future__ import annotations

import uuid
from typing import Any

import httpx
import pytest

from infra.database.orders import recording
from infra.database.trading import reconciliations
from tests.support.api.orders import demand_attention, place_unknown_order
from tests.support.systems.api import ServedApi, StartWorker, an_order
from tests.support.waiting import until
from worker_runtime.protocol import keys


async def test_an_unknown_order_blocks_its_symbol_and_says_which_it_is(
    api: ServedApi, user: httpx.AsyncClient, start_worker: StartWorker
) -> None:
    order = await place_unknown_order(api, user, start_worker)
    refused = await user.post(f"/users/{api.user}/orders", json=an_order(2))
    assert (refused.status_code, refused.json()["code"]) == (409, "SYMBOL_BLOCKED")
    assert order["id"] in refused.json()["detail"]
    assert "ask an operator to call `resolve`" in refused.json()["detail"]
    async with api.client(api.admin_key) as admin:
        assert (await admin.get("/attention")).json()["orders"] == []
        listed = (await admin.get("/attention?unknown=true&limit=1")).json()
    [shown] = listed["orders"]
    assert (shown["id"], shown["attention_at"], shown["state"]) == (order["id"], None, "unknown")
    assert shown["next_step"].startswith("Berth asks the broker by itself")
    other = await user.post(f"/users/{api.user}/orders", json=an_order(3, symbol="2317"))
    assert other.status_code == 202


async def test_operators_see_what_waits_page_by_page(
    api: ServedApi, user: httpx.AsyncClient, start_worker: StartWorker
) -> None:
    first = await place_unknown_order(api, user, start_worker)
    placed = await user.post(f"/users/{api.user}/orders", json=an_order(2, symbol="2317"))
    second = placed.json()
    await demand_attention(api, first)
    await demand_attention(api, second, "another story")
    async with api.client(api.admin_key) as admin:
        page = (await admin.get("/attention?limit=1")).json()
        [shown] = page["orders"]
        assert (shown["id"], shown["state"], shown["known_state"]) == (
            first["id"],
            "needs_attention",
            "unknown",
        )
        assert (shown["attention"], shown["final"]) == ("nobody knows", False)
        rest = (await admin.get("/attention", params={"cursor": page["next_cursor"]})).json()
        both = (await admin.get("/attention?unknown=true")).json()
        assert [order["id"] for order in both["orders"]] == [first["id"], second["id"]]
        assert both["orders"][0]["next_step"].startswith("an operator finds out at the broker")
    assert [order["id"] for order in rest["orders"]] == [second["id"]]
    assert rest["next_cursor"] is None
    assert (await user.get("/attention")).status_code == 403
    seen = (await user.get(f"/orders/{first['id']}")).json()
    assert (seen["state"], seen["attention"]) == ("needs_attention", "nobody knows")
    assert "needs_attention" in [step["step"] for step in seen["timeline"]]


async def test_a_user_has_an_own_order_looked_at_again_and_no_other(
    api: ServedApi, user: httpx.AsyncClient, start_worker: StartWorker
) -> None:
    order = await place_unknown_order(api, user, start_worker)
    await demand_attention(api, order)
    again = await user.post(f"/orders/{order['id']}/recheck")
    assert (again.status_code, again.json()["state"]) == (202, "needs_attention")
    async with api.services.database.session() as session:
        assert (await recording.get_order(session, uuid.UUID(order["id"]))).verify_at is not None
    async with api.client(api.admin_key) as admin:
        made = await admin.post("/users", json={"user_id": f"{api.user}-other"})
        assert (await admin.post(f"/orders/{uuid.uuid4()}/recheck")).status_code == 404
    async with api.client(made.json()["api_key"]) as other:
        assert (await other.post(f"/orders/{order['id']}/recheck")).status_code == 404


async def test_an_operator_ends_an_order_once_and_its_symbol_is_free(
    api: ServedApi, user: httpx.AsyncClient, start_worker: StartWorker
) -> None:
    order = await place_unknown_order(api, user, start_worker)
    await demand_attention(api, order)
    path = f"/orders/{order['id']}/resolve"
    end = {
        "state": "filled",
        "filled_quantity": 1,
        "average_price": "1005.5",
        "reason": "seen in the app",
    }
    assert (await user.post(path, json=end)).status_code == 403
    async with api.client(api.admin_key) as admin:
        ended = await admin.post(path, json=end)
        assert ended.status_code == 200, ended.text
        assert (ended.json()["state"], ended.json()["average_price"]) == ("filled", "1005.5")
        assert (await admin.get("/attention")).json()["orders"] == []
        for call in (admin.post(path, json=end), admin.post(f"/orders/{order['id']}/recheck")):
            late = await call
            assert (late.status_code, late.json()["code"]) == (409, "ORDER_SETTLED")
    free = await user.post(f"/users/{api.user}/orders", json=an_order(2))
    assert free.status_code == 202


@pytest.mark.parametrize(
    ("body", "code"),
    [
        ({"state": "submitted", "reason": "r"}, "RESOLUTION_INVALID"),
        ({"state": "filled", "reason": "r"}, "RESOLUTION_INVALID"),
        (
            {"state": "filled", "filled_quantity": 2, "average_price": "1", "reason": "r"},
            "RESOLUTION_INVALID",
        ),
        ({"state": "cancelled", "reason": ""}, "INVALID_REQUEST"),
        ({"state": "cancelled", "reason": "a\x00b"}, "INVALID_REQUEST"),
        ({"state": "cancelled", "filled_quantity": -1, "reason": "r"}, "INVALID_REQUEST"),
        ({"state": "cancelled", "filled_quantity": 1.5, "reason": "r"}, "INVALID_REQUEST"),
        ({"state": "gone", "reason": "r"}, "INVALID_REQUEST"),
        ({"state": "cancelled", "reason": "r", "more": 1}, "INVALID_REQUEST"),
    ],
)
async def test_an_end_that_cannot_be_is_refused(
    api: ServedApi,
    user: httpx.AsyncClient,
    start_worker: StartWorker,
    body: dict[str, Any],
    code: str,
) -> None:
    order = await place_unknown_order(api, user, start_worker)
    async with api.client(api.admin_key) as admin:
        refused = await admin.post(f"/orders/{order['id']}/resolve", json=body)
    assert (refused.status_code, refused.json()["code"]) == (422, code)
    assert (await user.get(f"/orders/{order['id']}")).json()["state"] == "unknown"


async def test_differences_with_the_broker_are_shown_and_closed_by_an_operator(
    api: ServedApi, user: httpx.AsyncClient
) -> None:
    async with api.services.database.session() as session:
        row = await reconciliations.note_differences(
            session,
            user_id=api.user,
            account_id="main",
            epoch=1,
            differences={"foreign_orders": ["P-1"]},
            blocks=True,
        )
    assert row is not None
    blocked = await user.post(f"/users/{api.user}/orders", json=an_order())
    assert (blocked.status_code, blocked.json()["code"]) == (409, "ACCOUNT_BLOCKED")
    [shown] = (await user.get(f"/users/{api.user}/reconciliations")).json()["reconciliations"]
    assert (shown["blocks"], shown["differences"]) == (True, {"foreign_orders": ["P-1"]})
    path, why = f"/reconciliations/{shown['id']}/resolve", {"reason": "bought by hand"}
    assert (await user.post(path, json=why)).status_code == 403
    assert (await user.get("/reconciliations")).status_code == 403
    async with api.client(api.admin_key) as admin:
        assert (await admin.get("/reconciliations")).json() == {"reconciliations": [shown]}
        assert (await admin.get(f"/reconciliations?after={shown['id']}")).json() == {
            "reconciliations": []
        }
        closed = await admin.post(path, json=why)
        assert closed.status_code == 200, closed.text
        assert closed.json()["resolved_at"] is not None
        assert (await admin.post(path, json=why)).status_code == 404
        assert (await admin.get("/reconciliations")).json() == {"reconciliations": []}
    freed = (await user.post(f"/users/{api.user}/orders?wait=0", json=an_order())).json()
    # Accepted. That no worker can be started (Temporal is away) may be known by then: a problem has
    # no state.
    assert freed.get("state") == "accepted" or freed.get("code") == "TEMPORAL_UNAVAILABLE", freed


async def test_an_order_that_a_worker_may_still_take_is_not_ended_by_hand(
    api: ServedApi, user: httpx.AsyncClient, start_worker: StartWorker
) -> None:
    await api.services.valkey.set(keys.mark(api.user), "1:scripted", ex=30)
    order = (await user.post(f"/users/{api.user}/orders?wait=0", json=an_order())).json()
    async with api.client(api.admin_key) as admin:
        body = {"state": "cancelled", "reason": "it does not move"}
        refused = await admin.post(f"/orders/{order['id']}/resolve", json=body)
        assert (refused.status_code, refused.json()["code"]) == (422, "RESOLUTION_INVALID")
        assert "Cancel it instead" in refused.json()["detail"]
    worker = await start_worker(api.user)
    await until(lambda: [request.order_id for request in worker.popped] == [order["id"]])
    await until(lambda: api.services.answers.pending == 0)
    shown = (await user.get(f"/orders/{order['id']}")).json()
    assert (shown["state"], shown["filled_quantity"]) == ("filled", 1)
