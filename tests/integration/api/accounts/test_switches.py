"""The kill switch over the API: who may set it, whom it stops, and what stays halted."""

from __future__ import annotations

import asyncio
import time
from typing import Any, cast

import httpx
import pytest
from sqlalchemy import func, select

from infra.database.models import Order
from infra.database.workers import sessions as worker_sessions
from infra.valkey import client as valkey
from tests.integration.api.conftest import ServedApi, StartWorker, an_order, make_key, running_api
from worker_runtime.protocol import keys
from worker_runtime.protocol.messages import PlaceOrder


def halt(scope: str = "user", state: str = "halted", **more: Any) -> dict[str, Any]:
    return {"scope": scope, "state": state, "reason": "a test", **more}


async def with_worker(api: ServedApi) -> None:
    """The user has an assignment, as a claim makes one."""
    async with api.services.database.session() as session:
        claim = f"claim-{api.user}"
        await worker_sessions.assign_epoch(session, user_id=api.user, claim_id=claim, pool="default")
        await worker_sessions.set_worker(session, claim_id=claim, worker_id="w1", task_id="", warm=True)


async def in_valkey(api: ServedApi) -> dict[str, str]:
    found: dict[bytes, bytes] = await cast("Any", api.services.valkey.hgetall(keys.switch(api.user)))
    return {name.decode(): value.decode() for name, value in found.items()}


async def test_a_halt_is_with_the_worker_when_it_is_answered_and_stops_orders_at_once(
    api: ServedApi, user: httpx.AsyncClient
) -> None:
    await with_worker(api)
    async with api.client(api.admin_key) as admin:
        answer = await admin.put("/switches", json=halt(user_id=api.user))
        written = await in_valkey(api)
    body = answer.json()
    assert (answer.status_code, body["in_force"], body["held_by"]) == (200, True, "operator")
    server = await valkey.read_server_id(api.services.valkey)
    assert written == {"*version": str(body["version"]), "*": "halted", "*server": server}
    refused = await user.post(f"/users/{api.user}/orders", json=an_order())
    assert (refused.status_code, refused.json()["code"]) == (423, "TRADING_HALTED")
    assert "order" not in refused.json()


@pytest.mark.parametrize("scope", ["all", "user", "account"])
async def test_each_scope_halts_and_opens_again(
    api: ServedApi, user: httpx.AsyncClient, start_worker: StartWorker, scope: str
) -> None:
    await start_worker(api.user)
    whom = {"user": {"user_id": api.user}, "account": {"user_id": api.user, "account_id": "main"}}.get(
        scope, {}
    )
    async with api.client(api.admin_key) as admin:
        assert (await admin.put("/switches", json=halt(scope, **whom))).status_code == 200
        refused = await user.post(f"/users/{api.user}/orders", json=an_order())
        assert refused.json()["code"] == "TRADING_HALTED"
        assert (await admin.put("/switches", json=halt(scope, "reducing", **whom))).status_code == 200
        refused = await user.post(f"/users/{api.user}/orders", json=an_order())
        assert refused.json()["code"] == "REDUCING_ONLY"
        assert (await admin.put("/switches", json=halt(scope, "open", **whom))).status_code == 200
    placed = await user.post(f"/users/{api.user}/orders", json=an_order())
    assert placed.status_code == 201, placed.text


async def test_a_repeat_of_an_order_is_answered_though_trading_is_halted(
    api: ServedApi, user: httpx.AsyncClient, start_worker: StartWorker
) -> None:
    await start_worker(api.user)
    first = await user.post(f"/users/{api.user}/orders", json=an_order())
    await user.put("/switches", json=halt())
    again = await user.post(f"/users/{api.user}/orders", json=an_order())
    assert (again.status_code, again.json()["id"]) == (200, first.json()["id"])


async def test_a_user_halts_himself_and_opens_only_what_he_halted(
    api: ServedApi, user: httpx.AsyncClient
) -> None:
    assert (await user.put("/switches", json=halt())).json()["held_by"] == "user"
    async with api.client(api.admin_key) as admin:
        await admin.put("/switches", json=halt("account", user_id=api.user, account_id="main"))
        assert (await user.put("/switches", json=halt(state="open"))).status_code == 200
        await user.put("/switches", json=halt("account", "open", account_id="main"))
        refused = await user.post(f"/users/{api.user}/orders", json=an_order())
        assert refused.json()["code"] == "TRADING_HALTED"
        seen = (await user.get("/switches")).json()
        assert seen["effective"]["accounts"] == {"main": "halted"}
        assert [(one["scope"], one["held_by"], one["state"]) for one in seen["switches"]] == [
            ("account", "user", "open"),
            ("user", "user", "open"),
            ("account", "operator", "halted"),
        ]
        every = (await admin.get("/switches")).json()
        assert (len(every["switches"]), every["effective"]) == (3, None)


@pytest.mark.parametrize(
    ("body", "status", "code"),
    [
        (halt("all"), 403, "FORBIDDEN"),
        (halt(user_id="somebody-else"), 404, "NOT_FOUND"),
        (halt(held_by="operator"), 403, "FORBIDDEN"),
        (halt("account", account_id="nobody's"), 422, "INVALID_REQUEST"),
        (halt("account", account_id="missing"), 422, "UNKNOWN_ACCOUNT"),
        (halt("account"), 422, "INVALID_REQUEST"),
        (halt("user", account_id="main"), 422, "INVALID_REQUEST"),
        (halt(state="closed"), 422, "INVALID_REQUEST"),
        ({"scope": "user", "state": "halted"}, 422, "INVALID_REQUEST"),
        (halt() | {"reason": "  "}, 422, "INVALID_REQUEST"),
    ],
)
async def test_what_a_user_may_not_say_is_a_problem(
    user: httpx.AsyncClient, body: dict[str, Any], status: int, code: str
) -> None:
    answer = await user.put("/switches", json=body)
    assert (answer.status_code, answer.json()["code"]) == (status, code)


async def test_an_operator_names_the_user(api: ServedApi) -> None:
    operator = await make_key(api.settings, "operator")
    async with api.client(operator) as client:
        nobody = await client.put("/switches", json=halt())
        unknown = await client.put("/switches", json=halt(user_id="nobody"))
        missing = await client.get("/switches", params={"user_id": "nobody"})
    assert (nobody.status_code, nobody.json()["code"]) == (422, "INVALID_REQUEST")
    assert (unknown.status_code, unknown.json()["code"]) == (404, "USER_NOT_FOUND")
    assert missing.json()["code"] == "USER_NOT_FOUND"


async def test_a_halt_is_set_though_valkey_is_away(api: ServedApi) -> None:
    await with_worker(api)
    changed = api.settings.model_copy(update={"valkey_url": "redis://127.0.0.1:1/0"})
    async with running_api(changed) as deaf, deaf.client(deaf.admin_key) as admin:
        answer = await admin.put("/switches", json=halt(user_id=api.user))
        seen = (await admin.get("/switches", params={"user_id": api.user})).json()
    assert (answer.status_code, answer.json()["in_force"]) == (202, False)
    assert seen["effective"]["all_accounts"] == "halted"


async def test_orders_that_race_a_halt_are_refused_at_the_latest_when_it_is_answered(
    api: ServedApi, user: httpx.AsyncClient, start_worker: StartWorker
) -> None:
    taken: list[float] = []

    def note(order: PlaceOrder) -> None:
        taken.append(time.monotonic())

    await start_worker(api.user, note)
    await with_worker(api)
    stop = asyncio.Event()

    async def keep_ordering() -> None:
        number = 0
        while not stop.is_set():
            number += 1
            await user.post(f"/users/{api.user}/orders", json=an_order(number), params={"wait": 0})

    ordering = asyncio.create_task(keep_ordering())
    async with api.client(api.admin_key) as admin:
        while not taken:  # noqa: ASYNC110
            await asyncio.sleep(0.01)
        answer = await admin.put("/switches", json=halt("all"))
        assert answer.json()["in_force"] is True
        accepted = await _count(api)
        later = await user.post(f"/users/{api.user}/orders", json=an_order(10_000), params={"wait": 0})
        assert later.json()["code"] == "TRADING_HALTED"
    stop.set()
    await ordering
    assert await _count(api) - accepted <= 1  # one whose statement had begun before the commit


async def _count(api: ServedApi) -> int:
    async with api.services.database.session() as session:
        return int(await session.scalar(select(func.count()).where(Order.user_id == api.user)) or 0)
