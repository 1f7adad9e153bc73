"""The list of running workers, from Temporal's index."""

from __future__ import annotations

import asyncio
import json
import os
import socket
import time
from collections.abc import Awaitable, Callable
from pathlib import Path
from typing import Any

import pytest
from sqlalchemy import text
from temporalio.api.workflowservice.v1 import PauseWorkflowExecutionRequest

from infra.database.workers import passes
from infra.settings import Settings
from infra.temporal.executions import list_open
from tests.support.api.pages import logged_in_browser
from tests.support.commands import CommandForker
from tests.support.systems.api import ServedApi, operator, running_api
from tests.support.workflows.user_worker_stub import LifecycleStub
from workflows.names import USER_WORKER, user_worker_id


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

        async def workers(**filters: str | int) -> dict[str, Any]:
            answer = await admin.get("/workers", params=filters)
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


async def test_a_paused_worker_stays_in_the_list_and_says_that_it_is_paused(
    whole_api: ServedApi, lifecycle: LifecycleStub
) -> None:
    api = whole_api
    entity = user_worker_id(api.user)
    temporal = api.services.control.client
    async with api.client(api.admin_key) as admin:
        assert (await admin.post(f"/users/{api.user}/worker/start")).status_code == 200
        request = PauseWorkflowExecutionRequest(
            namespace=temporal.namespace, workflow_id=entity, reason="by a test", request_id=entity
        )
        await temporal.workflow_service.pause_workflow_execution(request)

        async def is_listed_as_paused() -> bool:
            runs = await list_open(temporal, (USER_WORKER,))
            return any(run.is_paused for run in runs if run.workflow_id == entity)

        end = time.monotonic() + 40
        while not await is_listed_as_paused():
            assert time.monotonic() < end
            await asyncio.sleep(0.05)
        rows = (await admin.get("/workers", params={"user_id": api.user})).json()["workers"]
        assert [row["user_id"] for row in rows] == [api.user]
        answer = await admin.get(f"/users/{api.user}/worker")
        assert (answer.status_code, answer.json()["code"]) == (503, "WORKFLOW_PAUSED"), answer.text
    await temporal.get_workflow_handle(entity).terminate()


@pytest.mark.parametrize(
    ("filters", "where"),
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
async def test_an_invalid_filter_is_refused_and_named(
    whole_api: ServedApi, filters: dict[str, str], where: str
) -> None:
    async with whole_api.client(whole_api.admin_key) as admin:
        answer = await admin.get("/workers", params=filters)
    assert (answer.status_code, answer.json()["code"]) == (422, "INVALID_REQUEST"), answer.text
    assert where in answer.json()["detail"]


async def test_a_users_key_sees_no_list(api: ServedApi) -> None:
    async with api.client(api.key) as user:
        answer = await user.get("/workers")
    assert (answer.status_code, answer.json()["code"]) == (403, "FORBIDDEN")


async def test_operators_see_the_last_pass_of_maintenance(api: ServedApi) -> None:
    async with api.client(api.admin_key) as admin:
        assert (await admin.get("/fleet")).json() == {"states": None, "maintenance": None}
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
        async with api.services.database.session() as session:
            await passes.begin_pass(
                session,
                place=passes.PassBasis(server="s"),
                boot="b",
                boottime=61.0,
                scanned=4,
                scan_seconds=0.5,
                guarded="",
                suspects=[],
                confirmed=[],
            )
        listed = (await admin.get("/fleet/maintenance")).json()["passes"]
        assert [entry["workers"] for entry in listed] == [4, 3]
        assert (await admin.get("/fleet/maintenance?limit=1")).json()["passes"] == listed[:1]
        assert (await admin.get("/fleet/maintenance?odd=true")).json()["passes"] == [last]
    async with logged_in_browser(api, api.admin_key) as client:
        page = (await client.get("/page/servers")).text
    # The last pass found nothing.
    assert page.count("orphan_task 1") == page.count("stopped 1") == 1
    assert (last["workers"], last["outcomes"], last["guarded"]) == (3, {"stopped": 1}, None)
    assert last["total_seconds"] >= last["scan_seconds"] == 0.25
    async with api.client(api.key) as user:
        assert (await user.get("/fleet")).status_code == 403
        assert (await user.get("/fleet/maintenance")).status_code == 403


async def servers(api: ServedApi) -> dict[str, dict[str, Any]]:
    async with api.client(api.admin_key) as admin:
        answer = await admin.get("/fleet/servers")
    assert answer.status_code == 200, answer.text
    states: dict[str, dict[str, Any]] = answer.json()["servers"]
    return states


async def test_operators_see_the_launcher_as_the_last_pass_met_it(api: ServedApi) -> None:
    async def launcher(server: str, guarded: str) -> tuple[str, str]:
        async with api.services.database.session() as session:
            await passes.begin_pass(
                session,
                place=passes.PassBasis(server=server, tasks=3 if server else 0),
                boot="b",
                boottime=1.0,
                scanned=3,
                scan_seconds=0.25,
                guarded=guarded,
                suspects=[],
                confirmed=[],
            )
        launcher_state = (await servers(api))["launcher"]
        return launcher_state["state"], launcher_state["reason"]

    assert (await servers(api))["launcher"]["state"] == "unknown"
    assert await launcher("s", "") == ("up", "it lists 3 workers")
    assert await launcher("s", "half of the marks are missing") == ("up", "it lists 3 workers")
    assert await launcher("", passes.LAUNCHER_UNREAD) == ("down", "the launcher could not be read")
    assert await launcher("", "Valkey could not be read") == ("unknown", "Valkey could not be read")
    assert await launcher("s", "") == ("up", "it lists 3 workers")
    async with api.services.database.session() as session:
        await session.execute(
            text("update maintenance_passes set began_at = began_at - interval '4 minutes'")
        )
    assert (await servers(api))["launcher"]["state"] == "unknown"


async def test_operators_see_the_paper_exchange_while_somebody_has_an_account_there(
    settings: Settings,
) -> None:
    async def nothing(_: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        writer.close()

    server = await asyncio.start_server(nothing, "127.0.0.1", 0)
    port = server.sockets[0].getsockname()[1]
    for address in (f"127.0.0.1:{port}", "127.0.0.1:1", "127.0.0.1:99999", "nowhere"):
        async with running_api(settings.model_copy(update={"exchange_address": address})) as api:
            exchange = (await servers(api))["paper exchange"]
            state = "up" if address.endswith(f":{port}") else "down"
            assert (exchange["state"], bool(exchange["reason"])) == (state, state == "down"), (
                address
            )
    server.close()
    async with running_api(settings) as other:
        async with other.services.database.session() as session:
            await session.execute(text("update broker_accounts set broker = 'shioaji'"))
        assert "paper exchange" not in await servers(other)


async def test_operators_see_orchestrators_and_queues_that_none_serves(
    whole_api: ServedApi, lifecycle: LifecycleStub, commands: CommandForker, tmp_path: Path
) -> None:
    listed = await servers(whole_api)
    ours = f"orchestrator {os.getpid()}@{socket.gethostname()}"
    assert listed[ours]["state"] == "up"
    assert "berth-lifecycle" in listed[ours]["reason"]
    assert listed["temporal"]["state"] == "up"
    assert listed["queue berth-launch"] == {
        "state": "down",
        "ms": None,
        "seen_at": None,
        "reason": "no orchestrator serves it",
    }
    assert "queue berth-lifecycle" not in listed
    async with operator(whole_api, commands, tmp_path) as berth:
        shown = await berth("servers", COLUMNS="200")
    assert shown.code == 1  # something is down
    assert "no orchestrator serves it" in shown.out
    assert ours in shown.out


async def test_servers_that_are_down_are_said_and_what_they_would_tell_is_left_out(
    api: ServedApi,
) -> None:
    listed = await servers(api)
    assert listed["temporal"]["state"] == "down"
    assert not [name for name in listed if name.startswith(("orchestrator", "queue"))]
    async with api.client(api.key) as user:
        assert (await user.get("/fleet/servers")).status_code == 403


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
        assert await status("--odd", "20") == shown
        assert len(json.loads(await status("--odd", "20", "--json"))) == 1


async def test_without_temporal_the_list_says_so(api: ServedApi) -> None:
    async with api.client(api.admin_key) as admin:
        answer = await admin.get("/workers")
    body = answer.json()
    assert (answer.status_code, body["code"], body["dependency"]) == (
        503,
        "TEMPORAL_UNAVAILABLE",
        "temporal",
    )
