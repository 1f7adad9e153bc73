"""Users are listed, disabled, enabled and removed; accounts are removed. What is open keeps
them."""

from __future__ import annotations

import asyncio
from typing import Any

import httpx
import pytest
from sqlalchemy import text

from infra.database import users
from infra.database.models import WorkerSession
from tests.support.api.webhooks import create_webhook, make_signal, post_signal
from tests.support.systems.api import ServedApi, StartWorker, an_order, make_key, running_api
from tests.support.workers.api_worker import silent

PAPER = {"broker": "paper", "api_key": "k", "secret_key": "s"}


async def refused(client: httpx.AsyncClient, method: str, path: str, **how: Any) -> tuple[int, str]:
    answer = await client.request(method, path, **how)
    return answer.status_code, answer.json()["code"]


async def until_refused(user: httpx.AsyncClient, path: str) -> None:
    """The notice that a key is another one now takes a moment; what a process remembers lasts for
    longer."""
    async with asyncio.timeout(5):
        while (answer := await user.get(path)).status_code == 200:  # noqa: ASYNC110
            await asyncio.sleep(0.01)
    assert (answer.status_code, answer.json()["code"]) == (403, "USER_DISABLED")


async def newest_act(admin: httpx.AsyncClient) -> tuple[str, str]:
    [entry] = (await admin.get("/audit", params={"limit": 1})).json()["entries"]
    return entry["action"], entry["subject"]


async def rows(api: ServedApi, query: str) -> list[Any]:
    async with api.services.database.session() as session:
        return list(await session.scalars(text(query), {"user": api.user}))


async def test_users_are_listed_in_pages_and_shown_with_their_accounts(api: ServedApi) -> None:
    operator = await make_key(api.settings, "operator")
    async with api.client(api.admin_key) as admin, api.client(operator) as staff:
        for name in ("zeta-1", "zeta-2", "zeta-3"):
            await admin.post("/users", json={"user_id": name})
        first = (await staff.get("/users", params={"prefix": "zeta-", "limit": 2})).json()
        assert [user["user_id"] for user in first["users"]] == ["zeta-1", "zeta-2"]
        rest = {"prefix": "zeta-", "cursor": first["next_cursor"]}
        last = (await staff.get("/users", params=rest)).json()
        assert ([user["user_id"] for user in last["users"]], last["next_cursor"]) == (
            ["zeta-3"],
            None,
        )
        assert await refused(staff, "GET", "/users/nobody") == (404, "USER_NOT_FOUND")
        assert await refused(staff, "GET", "/users?prefix=a%25") == (422, "INVALID_REQUEST")
    async with api.client(api.key) as user:
        shown = (await user.get(f"/users/{api.user}")).json()
        assert await refused(user, "GET", "/users") == (403, "FORBIDDEN")
        assert await refused(user, "GET", "/users/zeta-1") == (404, "NOT_FOUND")
    assert (shown["user_id"], shown["disabled_at"]) == (api.user, None)
    [account] = shown["accounts"]
    assert (account["account_id"], account["broker"], account["version"]) == ("main", "paper", 1)
    assert "canary" not in str(shown)


async def test_a_disabled_user_is_refused_with_every_key_until_it_is_enabled(
    whole_api: ServedApi, start_worker: StartWorker
) -> None:
    api = whole_api
    await start_worker(api.user)
    hook = await create_webhook(api)
    orders = f"/users/{api.user}/orders"
    async with api.client(api.key) as user, api.client(api.admin_key) as admin:
        assert (await user.post(orders, json=an_order(1))).status_code == 201
        done = await admin.post(f"/users/{api.user}/disable", json={"reason": "a test"})
        assert done.status_code == 200, done.text
        again = await admin.post(f"/users/{api.user}/disable")
        assert again.json()["disabled_at"] == done.json()["disabled_at"]
        await until_refused(user, f"/users/{api.user}")
        assert await refused(user, "POST", orders, json=an_order(2)) == (403, "USER_DISABLED")
        assert await refused(admin, "POST", orders, json=an_order(2)) == (403, "USER_DISABLED")
        assert (await post_signal(api, hook, make_signal(hook))).json()["code"] == "USER_DISABLED"
        # A repeat is no new order.
        assert (await admin.post(orders, json=an_order(1))).status_code == 200
        page = (await admin.get("/users", params={"disabled": True})).json()
        assert [user["user_id"] for user in page["users"]] == [api.user]
        assert (await admin.post(f"/users/{api.user}/enable")).json()["disabled_at"] is None
        assert (await admin.post(orders, json=an_order(2))).status_code == 201
        audit = (
            await admin.get("/audit", params={"subject": f"user:{api.user}", "action": "user."})
        ).json()
    acts = [(entry["action"], entry["data"].get("reason")) for entry in audit["entries"]]
    again_and_back = [("user.disabled", "requested"), ("user.disabled", "a test")]
    assert acts[:3] == [("user.enabled", "requested"), *again_and_back]


async def test_a_user_is_disabled_also_while_nobody_can_end_its_worker(api: ServedApi) -> None:
    async with api.client(api.admin_key) as admin:
        answer = await admin.post(f"/users/{api.user}/disable")
        assert (answer.status_code, answer.json()["code"]) == (503, "TEMPORAL_UNAVAILABLE")
        assert "The user is disabled" in answer.json()["detail"]
        shown = (await admin.get(f"/users/{api.user}")).json()
        assert shown["disabled_at"] is not None
        assert await refused(admin, "POST", "/users/nobody/disable") == (404, "USER_NOT_FOUND")


@pytest.fixture
async def disabled(api: ServedApi, start_worker: StartWorker) -> dict[str, Any]:
    """The user has an order that nobody answered, and is disabled then."""
    await start_worker(api.user, silent)
    async with api.client(api.key) as user, api.client(api.admin_key) as admin:
        order = await user.post(f"/users/{api.user}/orders?wait=0", json=an_order())
        assert order.status_code == 202, order.text
        await admin.post(f"/users/{api.user}/disable")
    body: dict[str, Any] = order.json()
    return body


async def close(api: ServedApi, order: dict[str, Any]) -> None:
    async with api.services.database.session() as session:
        ended = text("update orders set state = 'cancelled', verify_at = null where id = :id")
        await session.execute(ended, {"id": order["id"]})


async def test_a_user_is_removed_once_nothing_is_open_and_its_orders_stay(
    api: ServedApi, disabled: dict[str, Any]
) -> None:
    path = f"/users/{api.user}"
    async with api.client(api.admin_key) as admin:
        await admin.post(f"{path}/enable")
        answer = await admin.delete(path)
        assert (answer.status_code, answer.json()["code"]) == (409, "STILL_IN_USE")
        assert "disable it first" in answer.json()["detail"]
        await admin.post(f"{path}/disable")
        assert disabled["id"] in (await admin.delete(path)).json()["detail"]
        await close(api, disabled)
        async with api.services.database.session() as session:
            session.add(WorkerSession(claim_id="c", user_id=api.user, epoch=1, pool="p"))
        assert "a worker being claimed" in (await admin.delete(path)).json()["detail"]
        await rows(
            api, "update worker_sessions set worker_id = 'w-1' where user_id = :user returning 1"
        )
        assert "w-1" in (await admin.delete(path)).json()["detail"]
        await rows(
            api, "update worker_sessions set ended_at = now() where user_id = :user returning 1"
        )
        assert (await admin.delete(path)).status_code == 204
        assert await newest_act(admin) == ("user.removed", f"user:{api.user}")
        assert await refused(admin, "DELETE", path) == (404, "USER_NOT_FOUND")
        assert await refused(admin, "POST", f"{path}/enable") == (404, "USER_NOT_FOUND")
        assert await refused(admin, "POST", "/users", json={"user_id": api.user}) == (
            409,
            "USER_EXISTS",
        )
        assert (await admin.get(f"/orders/{disabled['id']}")).status_code == 200
        made = {"role": "user", "label": "x", "user_id": api.user}
        assert await refused(admin, "POST", "/api-keys", json=made) == (404, "USER_NOT_FOUND")
    for table in (
        "credentials",
        "broker_accounts",
        "webhooks",
        "account_limits",
        "statement_addresses",
    ):
        assert await rows(api, f"select 1 from {table} where user_id = :user") == []  # noqa: S608
    assert await rows(api, "select epoch from users where id = :user") != []
    async with api.client(api.key) as user:
        assert await refused(user, "GET", path) == (401, "UNAUTHENTICATED")


async def test_credentials_that_come_while_a_user_is_removed_are_refused(api: ServedApi) -> None:
    path = f"/users/{api.user}/accounts/main/credentials"
    async with api.client(api.admin_key) as admin:
        await admin.post(f"/users/{api.user}/disable")
        async with api.services.database.session() as session:
            await users.remove_user(session, api.user, actor="test", reason="test")
            storing = asyncio.create_task(refused(admin, "PUT", path, json=PAPER))
            waiting = "select 1 from pg_stat_activity where datname = current_database()"
            waiting += " and wait_event_type = 'Lock'"
            async with asyncio.timeout(10):
                while not storing.done() and not await rows(api, waiting):  # noqa: ASYNC110
                    await asyncio.sleep(0.01)
        assert await storing == (404, "USER_NOT_FOUND")
    assert await rows(api, "select 1 from credentials where user_id = :user") == []


async def test_an_account_is_removed_and_may_come_back(
    api: ServedApi, start_worker: StartWorker
) -> None:
    await start_worker(api.user, silent)
    account = f"/users/{api.user}/accounts/main"
    hook = await create_webhook(api)
    async with api.client(api.key) as user, api.client(api.admin_key) as admin:
        await admin.put(f"{account}/limits", json={"max_quantity": 5})
        order = (await user.post(f"/users/{api.user}/orders?wait=0", json=an_order())).json()
        assert await refused(user, "DELETE", account) == (409, "STILL_IN_USE")
        await close(api, order)
        assert (await user.delete(account, params={"reason": "moved"})).status_code == 204
        assert await newest_act(admin) == ("account.removed", f"account:{api.user}/main")
        assert await refused(user, "DELETE", account) == (404, "ACCOUNT_NOT_FOUND")
        # Also what is on its way right now: it is refused, and not written for an account that is
        # gone.
        refusal = await refused(user, "POST", f"/users/{api.user}/orders", json=an_order(2))
        assert refusal == (422, "UNKNOWN_ACCOUNT")
        assert (await post_signal(api, hook, make_signal(hook))).json()["code"] == "WEBHOOK_UNKNOWN"
        assert (await user.get(f"/users/{api.user}")).json()["accounts"] == []
        assert (await user.put(f"{account}/credentials", json=PAPER)).json()["version"] == 1
        assert (await admin.get(f"{account}/limits")).json()["max_quantity"] is None
        assert (await user.get(f"/orders/{order['id']}")).json()["account_id"] == "main"


async def test_every_process_refuses_a_disabled_user_at_once(api: ServedApi) -> None:
    path = f"/users/{api.user}"
    async with running_api(api.settings) as other, other.client(api.key) as user:
        assert (await user.get(path)).status_code == 200
        async with api.client(api.admin_key) as admin:
            await admin.post(f"{path}/disable")
        await until_refused(user, path)
