"""What the pages of operators show: lists, links, and a fleet of thousands of workers; on real
servers."""

from __future__ import annotations

import asyncio
import html
import os
import re
import time
from contextlib import suppress
from datetime import timedelta
from pathlib import Path
from uuid import uuid4

import httpx
import pytest
from sqlalchemy import text
from temporalio.client import Client
from temporalio.common import SearchAttributePair, TypedSearchAttributes
from temporalio.service import RPCError

from api.http.rights import RIGHTS
from api.page.rendering import HERE, MAX_TABLE_ROWS, MENU
from infra.database.dead_letters import DeadLetter, DeadLetters
from infra.local.servers import TemporalServer
from infra.settings import Settings
from infra.temporal.schedules import SCHEDULES, ensure_schedules
from infra.valkey.client import reply_of
from tests.support.api.orders import demand_attention, place_unknown_order
from tests.support.api.pages import csrf_header, logged_in_browser, read_page
from tests.support.systems.api import ServedApi, StartWorker, an_order, make_key, running_api
from worker_runtime.protocol import keys
from worker_runtime.protocol.messages import WorkerEvent, WorkerEventKind
from worker_runtime.protocol.worker_reports import sign_event
from workflows.names import (
    SA_POOL,
    SA_STATE,
    SA_USER,
    SA_WORKER,
    SEARCH_ATTRIBUTES,
    USER_WORKER,
    user_worker_id,
)

#: More than Temporal gives in one answer. With `BERTH_TEST_WORKERS=5000` the test takes three times
#: as long.
WORKERS = int(os.environ.get("BERTH_TEST_WORKERS", "1500"))
#: Starts under way at a time.
AT_ONCE = 400


async def start_fleet(client: Client, name: str) -> None:
    """Users whose workflows run, as Temporal's index has them. Their first task is not due: it
    would cost the server as much as the start, and nobody serves their queue."""
    turns = asyncio.Semaphore(AT_ONCE)

    async def start(number: int) -> None:
        user = f"{name}{number:04}"
        known = [
            SearchAttributePair(SA_USER, user),
            SearchAttributePair(SA_STATE, "Parked" if number % 100 == 0 else "Active"),
            SearchAttributePair(SA_WORKER, f"w-{number}"),
            SearchAttributePair(SA_POOL, "default"),
        ]
        async with turns:
            await client.start_workflow(
                USER_WORKER,
                id=user_worker_id(user),
                task_queue="nobody",
                search_attributes=TypedSearchAttributes(known),
                start_delay=timedelta(days=1),
            )

    await asyncio.gather(*(start(number) for number in range(WORKERS)))


@pytest.mark.slow
@pytest.mark.timeout(240)
async def test_the_fleet_page_shows_thousands_of_workers_page_by_page(
    settings: Settings, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    folder = tmp_path / "temporal"
    with TemporalServer(folder, durable=False, search_attributes=SEARCH_ATTRIBUTES) as server:
        await start_fleet(await Client.connect(server.address), "many-")
        changed = settings.model_copy(update={"temporal_address": server.address})
        async with running_api(changed) as api, logged_in_browser(api, api.admin_key) as client:
            async with asyncio.timeout(60):  # the index is a moment behind
                while f"<b>{WORKERS - WORKERS // 100}</b>" not in await read_page(client, "/"):  # noqa: ASYNC110
                    await asyncio.sleep(0.2)
            shown, path, began = set[str](), "/", time.monotonic()
            for _ in range(5):
                page = await read_page(client, path)
                rows = set(re.findall(r"/page/users/(many-\d+)", page))
                assert len(rows) == 50
                assert not rows & shown
                shown |= rows
                (path,) = re.findall(r'href="([^"]+)">Next page', page)
            with capsys.disabled():
                print(  # noqa: T201
                    f"a page of 50 of {WORKERS} workers: "
                    f"{(time.monotonic() - began) / 5 * 1000:.0f} ms"
                )
            page = await read_page(client, "/?state=Parked&user=many-12")
            assert re.findall(r"/page/users/(many-\d+)", page) == ["many-1200"]
            assert f"<b>{WORKERS // 100}</b>" in page
            assert "Next page" not in page


async def test_what_waits_for_a_person_is_listed_with_its_way_out(
    api: ServedApi, user: httpx.AsyncClient, start_worker: StartWorker
) -> None:
    order = await place_unknown_order(api, user, start_worker)
    await demand_attention(api, order, "nobody knows <b>why</b>")
    async with logged_in_browser(api, api.admin_key) as client:
        listed = await read_page(client, "/page/attention")
        assert f"/page/orders/{order['id']}" in listed
        assert "nobody knows" in listed
        letters = await client.get("/page/dead-letters")
        assert f"/page/orders/{order['id']}" in letters.text
        assert "<b>why</b>" not in letters.text
        shown = await read_page(client, f"/page/orders/{order['id']}")
    assert "End it by hand" in shown
    async with logged_in_browser(api, api.key) as client:
        own = await read_page(client, f"/page/orders/{order['id']}")
        assert "End it by hand" not in own  # for operators
        assert (await client.get("/page/attention")).status_code == 403
        assert (
            await client.get("/page/orders/00000000000000000000000000000000")
        ).status_code == 404


async def test_orders_of_all_users_and_users_are_listed_in_pages(
    api: ServedApi,
    user: httpx.AsyncClient,
    start_worker: StartWorker,
) -> None:
    await start_worker(api.user)
    path = f"/users/{api.user}/orders"
    placed = [
        (await user.post(path, json=an_order(n, symbol="PAGED"))).json()["id"]
        for n in range(MAX_TABLE_ROWS + 1)
    ]
    async with logged_in_browser(api, await make_key(api.services.settings, "operator")) as client:
        first = await read_page(client, "/page/orders?symbol=PAGED")
        next_link = re.search(r'href="(/page/orders\?[^"]+)">Next page', first)
        assert next_link
        second = await read_page(client, html.unescape(next_link[1]))
        rows = [
            re.findall(r'href="/page/orders/([0-9a-f-]{36})"', page) for page in (first, second)
        ]
        assert [len(page) for page in rows] == [MAX_TABLE_ROWS, 1]
        assert rows[0] + rows[1] == placed[::-1]
        assert f'href="/page/users/{api.user}"' in first
        assert "First page" in second
        assert placed[0] not in await read_page(client, "/page/orders?symbol=PAGED&state=expired")
        old = await client.get(
            "/v1/orders", params={"symbol": "PAGED", "to": "2020-01-01T00:00:00Z"}
        )
        assert old.json()["orders"] == []
        assert f'href="/page/users/{api.user}"' in await read_page(
            client, f"/page/users?prefix={api.user}"
        )
        gone = await read_page(client, f"/page/users?prefix={api.user}&disabled=true")
        assert "No users." in gone
        assert (await client.get("/page/orders?state=nonsense")).status_code == 422
        assert (await client.get("/page/orders?cursor=nonsense")).status_code == 422
    async with logged_in_browser(api, api.key) as own:
        assert (await own.get("/page/orders")).status_code == 403
        assert (await own.get("/page/users")).status_code == 403
        assert (await own.get("/v1/orders")).status_code == 403


async def test_switches_of_5000_users_are_shown_in_pages_and_searched(api: ServedApi) -> None:
    every = text(
        "insert into switches (scope, state, version, actor, reason) "
        "select 'user:many-' || number, case when number % 1000 = 0 then 'reducing' else "
        "'halted' end, "
        "nextval('switch_version'), 'x', 'a test' from generate_series(1, 5000) number"
    )
    async with logged_in_browser(api, api.admin_key) as client:
        assert "No switch was ever set" in await read_page(client, "/page/switches")
        async with api.services.database.session() as session:
            await session.execute(every)
        shown, path = list[str](), "/page/switches?prefix=many-"
        for _ in range(3):
            page = await read_page(client, path)
            shown += re.findall(r"/page/users/(many-\d+)", page)
            (path,) = re.findall(r'href="([^"]+)">Next page', page)
        assert shown == [f"many-{number}" for number in range(5000, 4850, -1)]
        page = await read_page(client, "/page/switches?state=reducing")
        assert re.findall(r"/page/users/(many-\d+)", page) == [
            f"many-{n}" for n in range(5000, 0, -1000)
        ]
        assert "Next page" not in page
        page = await read_page(client, "/page/switches?prefix=many-4242")
        assert re.findall(r"/page/users/(many-\d+)", page) == ["many-4242"]
        assert ">None.<" in await read_page(client, "/page/switches?prefix=nobody")
        assert (await client.get("/page/switches?state=nonsense")).status_code == 422


async def test_servers_schedules_and_passes_lead_to_temporal(
    settings: Settings, temporal_server: TemporalServer
) -> None:
    ui = {"temporal_address": temporal_server.address, "temporal_ui_url": "http://temporal.example"}
    changed = settings.model_copy(update=ui | {"maintenance_period": 3600.0})
    known = [
        f'href="http://temporal.example/namespaces/default/schedules/{schedule}"'
        for schedule in ("maintenance", "daily-report")
    ]
    temporal = await Client.connect(temporal_server.address)
    await ensure_schedules(temporal, changed)
    try:
        async with running_api(changed) as api, logged_in_browser(api, api.admin_key) as client:
            end, missing = time.monotonic() + 20, known
            while missing:  # the list of schedules is a moment behind
                page = await read_page(client, "/page/servers")
                missing = [link for link in known if link not in page]
                assert time.monotonic() < end, (missing, page)
    finally:
        for schedule in SCHEDULES:
            with suppress(RPCError):
                await temporal.get_schedule_handle(schedule).delete()
    for server in (
        "postgresql",
        "valkey",
        "temporal",
        "launcher",
        "paper exchange",
        "queue berth-launch",
    ):
        assert f"<td>{server}</td>" in page
    assert "There was no pass yet" in page


async def test_dead_letters_are_redriven_and_dismissed_by_a_session_with_its_csrf_token(
    settings: Settings,
) -> None:
    changed = settings.model_copy(update={"temporal_ui_url": "http://temporal.example"})
    async with running_api(changed) as api, logged_in_browser(api, api.admin_key) as client:
        secrets, order = api.services.message_secrets, str(uuid4())
        event = WorkerEvent(
            user_id=api.user,
            worker_id="w1",
            epoch=1,
            sequence=1,
            kind=WorkerEventKind.CONNECTED,
            at_ms=1_795_410_000_000,
        )
        entry = sign_event(event, secrets.assignment_keys(api.user, 1))
        failed = [
            DeadLetter(kind="recorder", subject="m-1", reason="a bug", message=entry),
            DeadLetter(kind="alert", subject="mail-1", reason="no receiver"),
            DeadLetter(kind="outcome", subject=order, reason="no such order"),
            DeadLetter(kind="workflow", subject="job/1", reason="a bug"),
            DeadLetter(kind="overflow", subject="more", reason="200 more"),
        ]
        await DeadLetters(api.services.database).put(failed)
        page = await read_page(client, "/page/dead-letters")
        assert f'href="/page/orders/{order}"' in page
        assert 'href="http://temporal.example/namespaces/default/workflows/job%2F1"' in page
        acts = {letter.subject: f"/v1/dead-letters/{letter.id}" for letter in failed}
        assert f"POST {acts['more']}/redrive" not in page
        for url in (f"{acts['m-1']}/redrive", f"{acts['mail-1']}/dismiss"):
            assert f'data-act="POST {url}"' in page
            assert (await client.post(url, json={"reason": "seen"})).status_code == 403
            headers = await csrf_header(client)
            answer = await client.post(url, json={"reason": "seen"}, headers=headers)
            assert answer.status_code == 200, answer.text
        again = await read_page(client, "/page/dead-letters")
        assert await reply_of(api.services.valkey.xlen(keys.EVENTS)) == 1
        for subject, url in acts.items():
            assert (f"{url}/dismiss" in again) == (subject not in ("m-1", "mail-1"))


async def test_a_users_page_shows_the_accounts_and_leads_to_temporal(settings: Settings) -> None:
    changed = settings.model_copy(update={"temporal_ui_url": "http://temporal.example"})
    async with running_api(changed) as api, logged_in_browser(api, api.admin_key) as client:
        page = await read_page(client, f"/page/users/{api.user}")
        assert re.search(r"main: paper stock, simulation; credentials 1 of <time", page)
        report = await read_page(client, "/page/report")
        assert 'href="http://temporal.example/namespaces/default/schedules/daily-report"' in report
        assert (await client.get("/page/users/nobody")).status_code == 404


async def test_the_job_page_shows_what_waits(api: ServedApi) -> None:
    async with logged_in_browser(api, api.admin_key) as client:
        asked = {"job": {"type": "ping", "text": "x"}}
        headers = await csrf_header(client)
        assert (await client.post("/v1/jobs", json=asked, headers=headers)).status_code == 202
        failed = DeadLetter(kind="job", subject=f"mail-{uuid4().hex}", reason="no receiver")
        await DeadLetters(api.services.database).put([failed])
        page = await read_page(client, "/page/jobs")
    assert failed.subject in page
    assert f'data-act="POST /v1/dead-letters/{failed.id}/redrive"' in page
    assert re.search(r"ping 1", page)
    assert "No runner is registered" in page
    assert "Types of applications" in page


def test_templates_and_menu_name_rights_that_exist() -> None:
    named = {right for _, _, right in MENU}
    for template in (HERE / "templates").rglob("*.html"):
        named |= set(
            re.findall(r'"((?:GET|POST|PUT|DELETE) /(?!page/|v1/)[^" ]*)"', template.read_text())
        )
    assert len(named) > 15
    assert named <= set(RIGHTS)
