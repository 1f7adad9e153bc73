"""The kill switch over the API: who may set it, whom it stops, and what stays halted."""

from __future__ import annotations

import asyncio
import time
from typing import Any, cast

import httpx
import pytest
from sqlalchemy import func, select

from infra.database.models import Order
from infra.database.trading import switches
from infra.database.trading.switches import TradingScope
from infra.database.workers import sessions as worker_sessions
from infra.valkey import client as valkey
from infra.valkey.client import reply_of
from tests.support.api.accounts import switch_body
from tests.support.databases import assign_launched_worker
from tests.support.systems.api import ServedApi, StartWorker, an_order, make_key, running_api
from worker_runtime.protocol import keys
from worker_runtime.protocol.messages import PlaceOrder
from worker_runtime.protocol.requests import SwitchState


async def with_worker(api: ServedApi) -> None:
    """The user has an assignment, as a claim makes one."""
    async with api.services.database.session() as session:
        claim = f"claim-{api.user}"
        await worker_sessions.assign_epoch(
            session, user_id=api.user, claim_id=claim, pool="default"
        )
        await assign_launched_worker(session, claim, "w1")


async def in_valkey(api: ServedApi) -> dict[str, str]:
    stored: dict[bytes, bytes] = await cast(
        "Any", api.services.valkey.hgetall(keys.switch(api.user))
    )
    assert stored.pop(b"*mac", None) or not stored  # it is signed, if it is there
    return {name.decode(): value.decode() for name, value in stored.items()}


async def test_a_halt_is_with_the_worker_when_it_is_answered_and_stops_orders_at_once(
    api: ServedApi, user: httpx.AsyncClient
) -> None:
    await with_worker(api)
    async with api.client(api.admin_key) as admin:
        answer = await admin.put("/switches", json=switch_body(user_id=api.user))
        written = await in_valkey(api)
    body = answer.json()
    assert (answer.status_code, body["in_force"], body["held_by"]) == (200, True, "operator")
    server = await valkey.read_server_id(api.services.valkey)
    assert written == {"*version": str(body["version"]), "*": "halted", "*server": server}
    refused = await user.post(f"/users/{api.user}/orders", json=an_order())
    assert (refused.status_code, refused.json()["code"]) == (423, "TRADING_HALTED")
    assert "order" not in refused.json()
    detail = refused.json()["detail"]
    assert detail.startswith(f"{api.user} is halted by ")
    assert detail.endswith(" UTC: a test; cancels still pass")


async def test_a_refusal_names_the_strictest_switch_and_an_opened_one_says_what_still_holds(
    api: ServedApi, user: httpx.AsyncClient
) -> None:
    of_user = {"user_id": api.user}
    async with api.client(api.admin_key) as admin:

        async def put(**body: Any) -> str | None:
            answer = await admin.put("/switches", json=body)
            assert answer.status_code == 200, answer.text
            also: str | None = answer.json()["also"]
            return also

        await put(
            **switch_body("account", account_id="main", **of_user) | {"reason": "the account's"}
        )
        await put(**switch_body("user", "reducing", **of_user) | {"reason": "the user's"})
        refused = (await user.post(f"/users/{api.user}/orders", json=an_order())).json()
        assert refused["code"] == "TRADING_HALTED"
        assert f"{api.user} main is halted by " in refused["detail"]
        assert "the account's" in refused["detail"]
        own = await user.put("/switches", json=switch_body(reason="my own"))
        assert "the user's" in own.json()["also"]
        assert "halted by the user since" in (
            await put(**switch_body("user", "open", **of_user)) or ""
        )
        assert (await user.put("/switches", json=switch_body(state="open"))).json()["also"] is None
        assert await put(**switch_body("account", "open", account_id="main", **of_user)) is None


@pytest.mark.parametrize("scope", ["all", "user", "account"])
async def test_each_scope_halts_and_opens_again(
    api: ServedApi, user: httpx.AsyncClient, start_worker: StartWorker, scope: str
) -> None:
    await start_worker(api.user)
    whom = {
        "user": {"user_id": api.user},
        "account": {"user_id": api.user, "account_id": "main"},
    }.get(scope, {})
    async with api.client(api.admin_key) as admin:
        assert (await admin.put("/switches", json=switch_body(scope, **whom))).status_code == 200
        refused = await user.post(f"/users/{api.user}/orders", json=an_order())
        assert refused.json()["code"] == "TRADING_HALTED"
        assert (
            await admin.put("/switches", json=switch_body(scope, "reducing", **whom))
        ).status_code == 200
        refused = await user.post(f"/users/{api.user}/orders", json=an_order())
        assert refused.json()["code"] == "REDUCING_ONLY"
        assert (
            await admin.put("/switches", json=switch_body(scope, "open", **whom))
        ).status_code == 200
    placed = await user.post(f"/users/{api.user}/orders", json=an_order())
    assert placed.status_code == 201, placed.text


async def test_a_repeat_of_an_order_is_answered_though_trading_is_halted(
    api: ServedApi, user: httpx.AsyncClient, start_worker: StartWorker
) -> None:
    await start_worker(api.user)
    first = await user.post(f"/users/{api.user}/orders", json=an_order())
    await user.put("/switches", json=switch_body())
    again = await user.post(f"/users/{api.user}/orders", json=an_order())
    assert (again.status_code, again.json()["id"]) == (200, first.json()["id"])


async def test_users_halt_their_trading_and_open_only_what_they_halted(
    api: ServedApi, user: httpx.AsyncClient
) -> None:
    assert (await user.put("/switches", json=switch_body())).json()["held_by"] == "user"
    async with api.client(api.admin_key) as admin:
        await admin.put(
            "/switches", json=switch_body("account", user_id=api.user, account_id="main")
        )
        assert (await user.put("/switches", json=switch_body(state="open"))).status_code == 200
        await user.put("/switches", json=switch_body("account", "open", account_id="main"))
        refused = await user.post(f"/users/{api.user}/orders", json=an_order())
        assert refused.json()["code"] == "TRADING_HALTED"
        seen = (await user.get("/switches")).json()
        assert seen["effective"]["accounts"] == {"main": "halted"}
        assert [
            (switch["scope"], switch["held_by"], switch["state"]) for switch in seen["switches"]
        ] == [
            ("account", "user", "open"),
            ("user", "user", "open"),
            ("account", "operator", "halted"),
        ]
        every = (await admin.get("/switches")).json()
        assert (len(every["switches"]), every["effective"]) == (3, None)


async def test_switches_are_listed_in_pages_and_searched_by_user_and_state(api: ServedApi) -> None:
    async with api.services.database.session() as session:
        for number in range(7):
            scope = TradingScope(f"team-{number}", by_user=number == 3)
            state = SwitchState.REDUCING if number == 5 else SwitchState.HALTED
            await switches.put_switch(session, scope, state, actor="x", reason="a test")
        await switches.put_switch(
            session, TradingScope(), SwitchState.OPEN, actor="x", reason="a test"
        )
        await switches.put_switch(
            session, TradingScope("t_am"), SwitchState.OPEN, actor="x", reason=""
        )
    async with api.client(api.admin_key) as admin:

        async def pages(**filters: Any) -> list[list[str | None]]:
            listed_pages, cursor = list[list[str | None]](), None
            while not listed_pages or cursor:
                params = {**filters, **({"cursor": cursor} if cursor else {})}
                body = (await admin.get("/switches", params=params)).json()
                listed_pages.append([switch["user_id"] for switch in body["switches"]])
                cursor = body["next_cursor"]
            return listed_pages

        of_team = [f"team-{number}" for number in range(6, -1, -1)]
        assert await pages() == [["t_am", None, *of_team]]
        assert await pages(limit=4) == [["t_am", None, *of_team[:2]], of_team[2:6], of_team[6:]]
        assert await pages(prefix="team", limit=5) == [of_team[:5], of_team[5:]]
        assert await pages(prefix="t_a") == [["t_am"]]
        assert await pages(state="open") == [["t_am", None]]
        assert await pages(prefix="team-5", state="reducing") == [["team-5"]]
        for wrong in (
            {"state": "shut"},
            {"limit": 0},
            {"limit": 1001},
            {"cursor": "x"},
            {"prefix": "%"},
        ):
            answer = await admin.get("/switches", params=wrong)
            assert (answer.status_code, answer.json()["code"]) == (422, "INVALID_REQUEST"), wrong
    async with api.client(api.key) as user:  # nothing of others, whatever is searched for
        body = (await user.get("/switches", params={"prefix": "team"})).json()
        assert (body["switches"], body["effective"]["all_accounts"]) == ([], "open")


@pytest.mark.parametrize(
    ("body", "status", "code"),
    [
        (switch_body("all"), 403, "FORBIDDEN"),
        (switch_body(user_id="somebody-else"), 404, "NOT_FOUND"),
        (switch_body(held_by="operator"), 403, "FORBIDDEN"),
        (switch_body("account", account_id="nobody's"), 422, "INVALID_REQUEST"),
        (switch_body("account", account_id="missing"), 404, "ACCOUNT_NOT_FOUND"),
        (switch_body("account"), 422, "INVALID_REQUEST"),
        (switch_body("user", account_id="main"), 422, "INVALID_REQUEST"),
        (switch_body(state="closed"), 422, "INVALID_REQUEST"),
        ({"scope": "user", "state": "halted"}, 422, "INVALID_REQUEST"),
        (switch_body() | {"reason": "  "}, 422, "INVALID_REQUEST"),
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
        nobody = await client.put("/switches", json=switch_body())
        unknown = await client.put("/switches", json=switch_body(user_id="nobody"))
        missing = await client.get("/switches", params={"user_id": "nobody"})
    assert (nobody.status_code, nobody.json()["code"]) == (422, "INVALID_REQUEST")
    assert (unknown.status_code, unknown.json()["code"]) == (404, "USER_NOT_FOUND")
    assert missing.json()["code"] == "USER_NOT_FOUND"


async def test_a_halt_is_set_though_valkey_is_away(api: ServedApi) -> None:
    await with_worker(api)
    changed = api.settings.model_copy(update={"valkey_url": "redis://127.0.0.1:1/0"})
    async with running_api(changed) as deaf, deaf.client(deaf.admin_key) as admin:
        answer = await admin.put("/switches", json=switch_body(user_id=api.user))
        seen = (await admin.get("/switches", params={"user_id": api.user})).json()
    assert (answer.status_code, answer.json()["in_force"]) == (202, False)
    assert seen["effective"]["all_accounts"] == "halted"


async def test_a_halt_is_not_in_force_while_a_newer_switch_that_is_not_ours_stands_there(
    api: ServedApi,
) -> None:
    await with_worker(api)
    await reply_of(api.services.valkey.hset(keys.switch(api.user), "*version", str(2**60)))
    async with api.client(api.admin_key) as admin:
        answer = await admin.put("/switches", json=switch_body(user_id=api.user))
    assert (answer.status_code, answer.json()["in_force"]) == (202, False)


async def test_a_halt_is_in_force_though_somebodys_later_change_was_written_before_it(
    api: ServedApi,
) -> None:
    await with_worker(api)
    control = api.services.switches
    async with api.services.database.session() as session:
        await switches.put_switch(
            session, TradingScope(api.user), SwitchState.HALTED, actor="a", reason="r"
        )
        earlier = await switches.read_switches(session)
    later = TradingScope(api.user, by_user=True)
    assert (await control.set_switch(later, SwitchState.REDUCING, actor="b", reason="r"))[1]
    assert await control.write(earlier, await valkey.read_server_id(control.client), [api.user])


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
        answer = await admin.put("/switches", json=switch_body("all"))
        assert answer.json()["in_force"] is True
        accepted = await _count(api)
        later = await user.post(
            f"/users/{api.user}/orders", json=an_order(10_000), params={"wait": 0}
        )
        assert later.json()["code"] == "TRADING_HALTED"
    stop.set()
    await ordering
    assert await _count(api) - accepted <= 1  # one whose statement had begun before the commit


async def _count(api: ServedApi) -> int:
    async with api.services.database.session() as session:
        return int(await session.scalar(select(func.count()).where(Order.user_id == api.user)) or 0)
