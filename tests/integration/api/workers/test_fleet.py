"""The list of running workers, from Temporal's index."""

from __future__ import annotations

import asyncio
import json
import time
from collections.abc import Awaitable, Callable
from pathlib import Path
from typing import Any

import pytest

from infra.database.workers import passes
from tests.commands import CommandForker
from tests.integration.api.conftest import ServedApi, operator
from tests.integration.api.lifecycle import LifecycleStub


async def seen(read: Callable[[], Awaitable[dict[str, Any]]], users: set[str]) -> dict[str, Any]:
    """The answer that lists exactly these users: the index is a moment behind."""
    end = time.monotonic() + 40
    while True:
        body = await read()
        if {row["user_id"] for row in body["workers"]} == users:
            return body
        assert time.monotonic() < end, body
        await asyncio.sleep(0.05)


async def test_operators_see_running_workers_by_state_and_by_user(
    whole_api: ServedApi, lifecycle: LifecycleStub
) -> None:
    api = whole_api
    async with api.client(api.admin_key) as admin:

        async def workers(**wanted: str | int) -> dict[str, Any]:
            answer = await admin.get("/workers", params=wanted)
            assert answer.status_code == 200, answer.text
            body: dict[str, Any] = answer.json()
            return body

        await admin.post("/users", json={"user_id": f"{api.user}-b"})
        for user in (api.user, f"{api.user}-b"):
            assert (await admin.post(f"/users/{user}/worker/start")).status_code == 200
        both = await seen(lambda: workers(user_id=api.user), {api.user, f"{api.user}-b"})
        row = next(row for row in both["workers"] if row["user_id"] == api.user)
        assert (row["state"], row["worker_id"], row["pool"]) == ("Active", "scripted", "default")
        assert row["started_at"].endswith("Z")
        assert both["next_cursor"] is None

        assert (await workers(user_id=f"{api.user}-b"))["workers"][0]["user_id"] == f"{api.user}-b"
        assert (await workers(user_id=api.user, state="Reconnecting"))["workers"] == []
        await seen(lambda: workers(user_id=api.user, state="Active"), {api.user, f"{api.user}-b"})

        first = await workers(user_id=api.user, limit=1)
        second = await workers(user_id=api.user, limit=1, cursor=first["next_cursor"])
        listed = [*first["workers"], *second["workers"]]
        assert {row["user_id"] for row in listed} == {api.user, f"{api.user}-b"}

        await admin.post(f"/users/{api.user}/worker/stop")
        await seen(lambda: workers(user_id=api.user), {f"{api.user}-b"})


@pytest.mark.parametrize(
    ("wanted", "where"),
    [
        ({"state": 'Active" OR "1"="1'}, "state"),
        ({"state": "active"}, "state"),
        ({"user_id": 'a" OR WorkflowId != "'}, "user_id"),
        ({"user_id": "a\n"}, "user_id"),
        ({"limit": "0"}, "limit"),
        ({"limit": "1001"}, "limit"),
        ({"cursor": "not base64!"}, "cursor"),
        ({"cursor": "bm90IGEgdG9rZW4="}, "cursor"),
    ],
)
async def test_a_filter_that_means_nothing_is_refused_by_name(
    whole_api: ServedApi, wanted: dict[str, str], where: str
) -> None:
    async with whole_api.client(whole_api.admin_key) as admin:
        answer = await admin.get("/workers", params=wanted)
    assert (answer.status_code, answer.json()["code"]) == (422, "INVALID_REQUEST"), answer.text
    assert where in answer.json()["detail"]


async def test_a_users_key_sees_no_list(api: ServedApi) -> None:
    async with api.client(api.key) as user:
        answer = await user.get("/workers")
    assert (answer.status_code, answer.json()["code"]) == (403, "FORBIDDEN")


async def test_operators_see_the_last_pass_of_maintenance(api: ServedApi) -> None:
    async with api.client(api.admin_key) as admin:
        assert (await admin.get("/fleet")).json() == {"maintenance": None}
        odd = passes.Suspect(kind="orphan_task", why="it announces nothing", worker_id="w")
        async with api.services.database.session() as session:
            number = await passes.begin_pass(
                session,
                place=passes.PassBasis(generation="g", server="s", tasks=3),
                boot="b",
                boottime=1.0,
                scanned=3,
                scan_seconds=0.25,
                guarded="",
                suspects=[odd],
                confirmed=[odd],
            )
        under_way = (await admin.get("/fleet")).json()["maintenance"]
        assert (under_way["found"], under_way["total_seconds"]) == ({"orphan_task": 1}, None)
        async with api.services.database.session() as session:
            await passes.finish_pass(session, number, {"stopped": 1})
        last = (await admin.get("/fleet")).json()["maintenance"]
    assert (last["workers"], last["outcomes"], last["guarded"]) == (3, {"stopped": 1}, None)
    assert last["total_seconds"] >= last["scan_seconds"] == 0.25
    async with api.client(api.key) as user:
        assert (await user.get("/fleet")).status_code == 403


async def test_the_last_pass_is_a_table_on_the_command_line(
    api: ServedApi, commands: CommandForker, tmp_path: Path
) -> None:
    async with operator(api, commands, tmp_path) as berth:

        async def status(*words: str) -> str:
            done = await berth("maintenance", "status", *words, COLUMNS="200")
            assert done.code == 0
            return done.out

        assert await status() == "no pass yet\n"
        async with api.services.database.session() as session:
            await passes.begin_pass(
                session,
                place=passes.PassBasis(),
                boot="b",
                boottime=1.0,
                scanned=7,
                scan_seconds=0.1,
                guarded="Valkey could not be read",
                suspects=[passes.Suspect(kind="stale_mark", why="w", user_id="u")],
                confirmed=[],
            )
        shown = await status()
        assert "7" in shown
        assert "1 stale_mark" in shown
        assert "Valkey could not be read" in shown
        assert json.loads(await status("--json"))["found"] == {"stale_mark": 1}


async def test_without_temporal_the_list_says_so(api: ServedApi) -> None:
    async with api.client(api.admin_key) as admin:
        answer = await admin.get("/workers")
    body = answer.json()
    assert (answer.status_code, body["code"], body["dependency"]) == (503, "TEMPORAL_UNAVAILABLE", "temporal")
