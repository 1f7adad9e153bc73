"""Changes of orders as a stream: in order and complete, also when a transaction commits late."""

from __future__ import annotations

import asyncio
import json
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import Any
from uuid import UUID

import httpx
from sqlalchemy import update

from api.orders.export import FEED_PAGE_SIZE, OrderFeed
from infra.database.models import Order
from tests.support.api.operators import EVENT_TIMEOUT_S, OpenEventStream
from tests.support.api.orders import record_order_state, write_orders
from tests.support.systems.api import ServedApi, served


@asynccontextmanager
async def following(api: ServedApi, url: str, **sent: Any) -> AsyncIterator[OpenEventStream]:
    headers = {"X-API-Key": api.key, **sent.pop("headers", {})}
    async with (
        httpx.AsyncClient(timeout=20) as http,
        http.stream(
            "GET", f"{url}/users/{api.user}/orders/events", headers=headers, **sent
        ) as response,
    ):
        assert response.status_code == 200
        yield OpenEventStream(response)


def states(seen: list[tuple[str, int, dict[str, Any]]]) -> list[tuple[str, str]]:
    return [(data["client_order_id"], data["state"]) for _, _, data in seen]


async def test_a_stream_begins_with_the_open_orders_and_continues_with_changes(
    api: ServedApi,
) -> None:
    (first,) = await write_orders(api)
    await write_orders(api, first=1, state="filled")
    await asyncio.wait_for(api.services.notifications.listening.wait(), EVENT_TIMEOUT_S)
    async with served(api) as url, following(api, url) as stream:
        name, last, data = await stream.event()
        assert (name, data["complete"]) == ("orders", True)
        assert [order["client_order_id"] for order in data["orders"]] == ["c-0"]
        await record_order_state(api, first)
        name, position, data = await stream.event()
        assert (name, data["id"], data["state"], data["final"]) == (
            "order",
            str(first),
            "submitted",
            False,
        )
        assert position > last
        await record_order_state(api, first, state="filled")
        assert (await stream.event())[2]["state"] == "filled"


async def test_what_others_change_and_what_is_not_shown_tells_nothing(api: ServedApi) -> None:
    (order_id,) = await write_orders(api)
    feed = OrderFeed(api.services.database, api.user)
    now = (await feed.current_event()).id
    async with api.services.database.session() as session:
        await session.execute(update(Order).where(Order.id == order_id).values(verify_at=None))
    await record_order_state(api, order_id, state="accepted")
    assert await feed.events_after(now) == []
    assert await OrderFeed(api.services.database, "somebody-else").events_after(0) == []
    await record_order_state(api, order_id)
    assert len(await feed.events_after(now)) == 1


async def test_a_change_that_is_committed_late_is_not_missed(api: ServedApi) -> None:
    early, late = await write_orders(api, 2)
    feed = OrderFeed(api.services.database, api.user)
    last = (await feed.current_event()).id
    async with api.services.database.session() as slow:
        # The older transaction: its number is given out, its commit is not there yet.
        await slow.execute(update(Order).where(Order.id == early).values(state="submitted"))
        await record_order_state(api, late)
        assert await feed.events_after(last) == []  # also not the younger one, which is committed
    seen = [json.loads(event.data)["id"] for event in await feed.events_after(last)]
    assert seen == [str(early), str(late)]


async def test_a_stream_tells_held_changes_as_soon_as_the_late_commit_is_there(
    api: ServedApi,
) -> None:
    early, late = await write_orders(api, 2)
    await asyncio.wait_for(api.services.notifications.listening.wait(), EVENT_TIMEOUT_S)
    async with served(api) as url, following(api, url) as stream:
        await stream.event()
        async with api.services.database.session() as slow:
            await slow.execute(update(Order).where(Order.id == early).values(reason="late"))
            await record_order_state(api, late)
            await asyncio.sleep(0.2)
        seen = [(await stream.event())[2]["id"] for _ in range(2)]
    assert seen == [str(early), str(late)]


async def test_a_client_that_comes_back_misses_nothing_in_the_middle_of_a_batch(
    api: ServedApi,
) -> None:
    made = await write_orders(api, 5)
    async with served(api) as url:
        async with following(api, url) as stream:
            _, begin, _ = await stream.event()
        await record_order_state(api, *made[:3])
        await record_order_state(api, *made[3:])
        async with following(api, url, headers={"Last-Event-ID": str(begin)}) as stream:
            seen = [await stream.event() for _ in range(2)]
        assert {position for _, position, _ in seen} == {begin}  # the batch is not complete
        async with following(api, url, headers={"Last-Event-ID": str(begin)}) as stream:
            seen = [await stream.event() for _ in range(4)]
        async with following(api, url, headers={"Last-Event-ID": str(seen[-1][1])}) as stream:
            seen += [await stream.event() for _ in range(2)]
    assert {client for client, _ in states(seen)} == {f"c-{number}" for number in range(5)}


async def test_orders_beyond_a_page_and_those_changed_twice_are_sent_once(api: ServedApi) -> None:
    made = await write_orders(api, FEED_PAGE_SIZE + 20)
    feed = OrderFeed(api.services.database, api.user)
    begin = (await feed.current_event()).id
    for order_id in made:
        await record_order_state(api, order_id)
    await record_order_state(api, made[0], state="filled")
    seen, last = [], begin
    while page := await feed.events_after(last):
        assert len(page) <= FEED_PAGE_SIZE
        seen += [json.loads(event.data) for event in page]
        last = page[-1].id
    assert [UUID(order["id"]) for order in seen] == [*made[1:], made[0]]
    assert seen[-1]["state"] == "filled"


async def test_a_number_of_another_database_begins_anew(api: ServedApi) -> None:
    await write_orders(api)
    (event,) = await OrderFeed(api.services.database, api.user).events_after(2**62)
    assert (event.name, len(json.loads(event.data)["orders"])) == ("orders", 1)
    assert event.id < 2**62


async def test_only_the_user_and_operators_follow_orders(api: ServedApi) -> None:
    async with api.client(api.key) as user, api.client(api.admin_key) as admin:
        foreign = await user.get("/users/somebody-else/orders/events")
        assert (foreign.status_code, foreign.json()["code"]) == (404, "NOT_FOUND")
        unknown = await admin.get("/users/nobody/orders/events")
        assert (unknown.status_code, unknown.json()["code"]) == (404, "USER_NOT_FOUND")
        for wrong in ("-1", "x", str(2**63)):
            answer = await user.get(f"/users/{api.user}/orders/events", params={"after": wrong})
            assert (answer.status_code, answer.json()["code"]) == (422, "INVALID_REQUEST")
