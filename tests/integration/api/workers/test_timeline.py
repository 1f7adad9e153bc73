"""The timeline as list and as a stream of events, from a real PostgreSQL through a real server."""

from __future__ import annotations

import asyncio
import json
import time
from collections.abc import AsyncIterator
from contextlib import AsyncExitStack, asynccontextmanager

import httpx
import pytest
from sqlalchemy import text

from api.http.streams import MAX_STREAMS_PER_SUBJECT
from tests.support.api.operators import EVENT_TIMEOUT_S, OpenEventStream, record_transitions
from tests.support.systems.api import ServedApi, served
from tests.support.waiting import until


@asynccontextmanager
async def following(
    api: ServedApi,
    url: str,
    *,
    key: str = "",
    headers: dict[str, str] | None = None,
    query: str = "",
) -> AsyncIterator[OpenEventStream]:
    sent = {"X-API-Key": key or api.key, **(headers or {})}
    async with (
        httpx.AsyncClient(timeout=20) as http,
        http.stream(
            "GET", f"{url}/users/{api.user}/worker/events{query}", headers=sent
        ) as response,
    ):
        yield OpenEventStream(response)


async def test_the_list_shows_the_last_changes_or_those_behind_an_id(api: ServedApi) -> None:
    await record_transitions(api, "PoolIdle", "Claimed", "Connecting", "Active")
    async with api.client(api.key) as user:
        path = f"/users/{api.user}/worker/timeline"
        whole = (await user.get(path)).json()
        rows = whole["transitions"]
        assert [(row["before"], row["after"]) for row in rows] == [
            ("PoolIdle", "Claimed"),
            ("Claimed", "Connecting"),
            ("Connecting", "Active"),
        ]
        assert rows[0] | {"id": 0} == {
            "id": 0,
            "at": "2027-01-15T08:00:00Z",
            "before": "PoolIdle",
            "after": "Claimed",
            "reason": "step 0",
            "worker_id": "w-1",
            "epoch": 7,
            "deadline": None,
        }
        assert whole["next_after"] == rows[-1]["id"]
        last = (await user.get(path, params={"limit": 1})).json()
        assert last["transitions"] == rows[-1:]
        behind = (await user.get(path, params={"after": rows[0]["id"], "limit": 1})).json()
        assert (behind["transitions"], behind["next_after"]) == (rows[1:2], rows[1]["id"])
        none = (await user.get(path, params={"after": rows[2]["id"]})).json()
        assert (none["transitions"], none["next_after"]) == ([], rows[2]["id"])


@pytest.mark.parametrize("path", ["timeline", "events"])
async def test_only_the_user_and_operators_see_a_timeline(api: ServedApi, path: str) -> None:
    async with api.client(api.key) as user, api.client(api.admin_key) as admin:
        foreign = await user.get(f"/users/somebody-else/worker/{path}")
        assert (foreign.status_code, foreign.json()["code"]) == (404, "NOT_FOUND")
        unknown = await admin.get(f"/users/nobody/worker/{path}")
        assert (unknown.status_code, unknown.json()["code"]) == (404, "USER_NOT_FOUND")
        wrong = await admin.get(f"/users/{api.user}/worker/{path}", params={"after": "-1"})
        assert (wrong.status_code, wrong.json()["code"]) == (422, "INVALID_REQUEST")


async def test_a_stream_begins_with_the_present_and_continues_with_what_comes(
    api: ServedApi,
) -> None:
    await record_transitions(api, "PoolIdle", "Claimed", "Active")
    await asyncio.wait_for(api.services.notifications.listening.wait(), EVENT_TIMEOUT_S)
    async with served(api) as url, following(api, url) as stream:
        assert stream.response.headers["content-type"].startswith("text/event-stream")
        name, last, data = await stream.event()
        assert (name, data["state"], data["worker_id"], data["epoch"]) == (
            "state",
            "Active",
            "w-1",
            7,
        )
        await record_transitions(api, "Active", "Reconnecting", user="somebody-else")
        await record_transitions(api, "Active", "Reconnecting", first=2)
        name, position, data = await stream.event()
        assert (name, data["before"], data["after"]) == ("transition", "Active", "Reconnecting")
        assert position == data["id"] > last


async def test_a_stream_of_a_user_without_a_worker_begins_with_nothing(api: ServedApi) -> None:
    async with served(api) as url, following(api, url) as stream:
        name, position, data = await stream.event()
    assert (name, position, data["state"], data["since"]) == ("state", 0, None, None)


async def test_a_client_that_comes_back_misses_nothing(api: ServedApi) -> None:
    await record_transitions(api, *(f"State{number}" for number in range(251)))
    async with served(api) as url:
        async with following(api, url, query="?after=0") as stream:
            seen = [(await stream.event()) for _ in range(120)]
        headers = {"Last-Event-ID": str(seen[-1][1])}
        async with following(api, url, headers=headers, query="?after=0") as stream:
            seen += [(await stream.event()) for _ in range(130)]
    assert [data["after"] for _, _, data in seen] == [f"State{number}" for number in range(1, 251)]


async def test_a_client_with_an_id_that_a_restored_database_has_not_begins_anew(
    api: ServedApi,
) -> None:
    await record_transitions(api, "PoolIdle", "Claimed", "Active")
    await asyncio.wait_for(api.services.notifications.listening.wait(), EVENT_TIMEOUT_S)
    async with (
        served(api) as url,
        following(api, url, headers={"Last-Event-ID": str(2**40)}) as stream,
    ):
        name, position, data = await stream.event()
        assert (name, data["state"], position < 2**40) == ("state", "Active", True)
        await record_transitions(api, "Active", "Reconnecting", first=2)
        name, _, data = await stream.event()
        assert (name, data["after"]) == ("transition", "Reconnecting")


async def test_a_stream_outlives_the_connection_on_which_notices_come(api: ServedApi) -> None:
    notices = api.services.notifications
    await asyncio.wait_for(notices.listening.wait(), EVENT_TIMEOUT_S)
    async with served(api) as url, following(api, url) as stream:
        await stream.event()
        async with api.services.database.session() as session:
            killed = await session.scalars(
                text(
                    "select pg_terminate_backend(pid) from pg_stat_activity "
                    "where application_name = 'berth-notices' and datname = current_database()"
                )
            )
            assert killed.all() == [True]
        await until(lambda: not notices.listening.is_set())
        await record_transitions(
            api, "PoolIdle", "Claimed"
        )  # its notice has no listener, or one that is back
        assert (await stream.event())[2]["after"] == "Claimed"
        await asyncio.wait_for(notices.listening.wait(), EVENT_TIMEOUT_S)
        await record_transitions(api, "Claimed", "Active", first=1)
        assert (await stream.event())[2]["after"] == "Active"


async def test_a_client_that_goes_gives_its_place_back(api: ServedApi) -> None:
    async with served(api) as url:
        async with following(api, url) as first, following(api, url) as second:
            await first.event()
            await second.event()
            assert api.services.streams.open == 2
        await until(lambda: api.services.streams.open == 0)


async def test_too_many_streams_are_refused(api: ServedApi) -> None:
    async with served(api) as url, AsyncExitStack() as stack:
        held = []  # a stream that nobody holds is closed
        for _ in range(MAX_STREAMS_PER_SUBJECT):
            held.append(await stack.enter_async_context(following(api, url)))
            await held[-1].event()
        refused = await stack.enter_async_context(following(api, url))
        body = json.loads(await refused.response.aread())
        assert (refused.response.status_code, body["code"]) == (429, "TOO_MANY_STREAMS")
        other = await stack.enter_async_context(following(api, url, key=api.admin_key))
        assert (await other.event())[0] == "state"


async def test_open_streams_end_at_once_when_the_server_stops(api: ServedApi) -> None:
    async with served(api) as url, following(api, url) as stream:
        await stream.event()
        began = time.monotonic()
        api.services.streams.end()
        with pytest.raises(EOFError):  # a clean end, not a broken connection
            await stream.event()
        assert time.monotonic() - began < EVENT_TIMEOUT_S
