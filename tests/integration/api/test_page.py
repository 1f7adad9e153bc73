"""The pages of operators: who gets in, what a session may do, when it ends; on PostgreSQL and
Valkey."""

from __future__ import annotations

import asyncio
import re
from datetime import UTC, date, datetime, timedelta
from decimal import Decimal
from urllib.parse import urlsplit

import pytest
from sqlalchemy import text

from api.http.auth import COOKIE, CSRF_HEADER
from api.page import rendering
from infra.database.trading import instrument_loads
from infra.settings import Settings
from tests.support.api.pages import csrf_header, logged_in_browser
from tests.support.systems.api import ServedApi, make_key, running_api
from tests.support.waiting import until
from worker_runtime.protocol.instruments import Instrument, InstrumentKind

HALT = {"scope": "all", "state": "halted", "reason": "a test"}


async def test_nobody_sees_a_page_without_logging_in(api: ServedApi) -> None:
    async with logged_in_browser(api) as client:
        for path in ("/", f"/page/users/{api.user}", "/page/changes?of=workers"):
            answer = await client.get(path)
            assert (answer.status_code, answer.headers["location"]) == (303, "/page/login")
        wrong = await client.post("/page/login", data={"key": "berth_guess"})
        assert wrong.status_code == 401
        assert "not a valid API key" in wrong.text
        assert COOKIE not in client.cookies


@pytest.mark.parametrize(
    ("headers", "status"),
    [
        ({"sec-fetch-site": "cross-site"}, 403),
        ({"sec-fetch-site": "cross-site", "origin": "http://api"}, 403),
        # A proxy changed Host.
        ({"sec-fetch-site": "same-origin", "origin": "https://berth.example"}, 303),
        ({"origin": "http://evil.example"}, 403),
        ({"origin": "http://api:81"}, 403),
        ({"origin": "null"}, 403),
        ({"origin": "http://api"}, 303),
    ],
)
async def test_a_form_of_another_site_logs_nobody_in(
    api: ServedApi, headers: dict[str, str], status: int
) -> None:
    async with logged_in_browser(api) as client:
        answer = await client.post("/page/login", data={"key": api.admin_key}, headers=headers)
        assert answer.status_code == status
        name = f"__Host-{COOKIE}" if "berth.example" in headers.get("origin", "") else COOKIE
        assert (name in client.cookies) == (status == 303)


@pytest.mark.parametrize("proto", ["http", "https"])
async def test_the_cookie_is_out_of_reach_of_scripts_and_of_other_sites(
    api: ServedApi, proto: str
) -> None:
    async with logged_in_browser(api) as client:
        origin = {"origin": f"{proto}://api"}
        answer = await client.post("/page/login", data={"key": api.admin_key}, headers=origin)
    flags = {flag.strip().lower() for flag in answer.headers["set-cookie"].split(";")[1:]}
    assert {"httponly", "samesite=strict", "max-age=43200", "path=/"} <= flags
    assert ("secure" in flags) == (proto == "https")
    name = answer.headers["set-cookie"].partition("=")[0]
    assert name == (f"__Host-{COOKIE}" if proto == "https" else COOKIE)


async def test_what_changes_something_needs_the_sessions_csrf_token(api: ServedApi) -> None:
    async with (
        logged_in_browser(api, api.admin_key) as client,
        logged_in_browser(api, api.admin_key) as other,
    ):
        stolen = await csrf_header(other)
        for headers in ({}, {CSRF_HEADER: "x"}, {CSRF_HEADER: "-"}, stolen):
            answer = await client.put("/v1/switches", json=HALT, headers=headers)
            assert (answer.status_code, answer.json()["code"]) == (403, "FORBIDDEN")
        answer = await client.put("/v1/switches", json=HALT, headers=await csrf_header(client))
        assert answer.status_code == 200
        assert answer.json()["state"] == "halted"
        answer = await client.put(
            "/v1/switches", json=HALT | {"state": "open"}, headers=await csrf_header(client)
        )
        assert answer.status_code == 200


async def test_a_session_has_the_rights_of_its_key_and_of_nobody_else(
    api: ServedApi, settings: Settings
) -> None:
    operator = await make_key(settings, "operator")
    async with logged_in_browser(api, operator) as client, logged_in_browser(api, api.key) as user:
        answer = await client.get("/v1/api-keys")
        assert answer.json()["code"] == "FORBIDDEN"
        assert (await client.get("/v1/audit")).status_code == 200
        # A user's own key sees the user's page, and no other.
        assert (await user.get("/")).status_code == 403
        assert (await user.get("/page/users/somebody")).status_code == 404
        page = await user.get(f"/page/users/{api.user}")
        assert page.status_code == 200
        assert "/worker/resume" not in page.text  # for operators only
        assert "/worker/stop" in page.text
        assert (await user.get("/page/changes?of=orders")).status_code == 403


async def test_the_page_of_keys_flags_those_of_before_and_shows_users_their_own(
    api: ServedApi,
) -> None:
    # The test's administrator has a key without scopes.
    async with logged_in_browser(api, api.admin_key) as client:
        shown = (await client.get("/page/keys")).text
        assert "made before scopes, rotate it" in shown
        assert "credentials, jobs, keys, read, trade, webhooks" in shown
    async with logged_in_browser(api, api.key) as client:
        page = await client.get("/page/keys")
        assert page.status_code == 200
        assert "the first key" in page.text
        assert "made before scopes" not in page.text
        assert f'class="brand" href="/page/users/{api.user}"' in page.text
        assert (await client.get("/page/audit")).status_code == 403
    async with api.client(api.admin_key) as admin:
        body = {"role": "operator", "label": "looks", "scopes": ["read"]}
        key = (await admin.post("/api-keys", json=body)).json()["api_key"]
    async with logged_in_browser(api, key) as client:
        fleet = (await client.get("/")).text
        assert "/page/users" in fleet
        assert "/page/audit" not in fleet
        halt = await client.put("/v1/switches", json=HALT, headers=await csrf_header(client))
        assert halt.json()["code"] == "SCOPE_MISSING"


async def test_log_out_ends_the_session_and_not_the_key(api: ServedApi) -> None:
    async with logged_in_browser(api, api.admin_key) as client:
        token = client.cookies[COOKIE]
        assert (await client.post("/page/logout")).status_code == 403
        assert (
            await client.post("/page/logout", headers=await csrf_header(client))
        ).status_code == 204
        assert COOKIE not in client.cookies
        client.cookies.set(COOKIE, token)  # a copy that somebody kept
        await until(lambda: api.services.authenticator.found_before(token) is None)
        assert (await client.get("/v1/audit")).status_code == 401
    async with api.client(api.admin_key) as admin:
        entries = (await admin.get("/audit", params={"action": "page."})).json()["entries"]
    assert [entry["action"] for entry in entries] == ["page.logged_out", "page.logged_in"]
    assert [entry["data"] for entry in entries] == [entries[0]["data"]] * 2


async def test_a_revoked_session_ends_in_all_processes_and_its_key_stays_valid(
    settings: Settings,
) -> None:
    async with (
        running_api(settings) as api,
        running_api(settings) as other,
        logged_in_browser(api, api.admin_key) as client,
        logged_in_browser(other) as elsewhere,
    ):
        await asyncio.wait_for(other.services.notifications.listening.wait(), 10)
        token = client.cookies[COOKIE]
        elsewhere.cookies.set(COOKIE, token)
        assert (await elsewhere.get("/v1/audit")).status_code == 200
        async with api.client(api.admin_key) as admin:
            [entry] = (await admin.get("/audit", params={"action": "page."})).json()["entries"]
            assert (await admin.delete(f"/api-keys/{entry['data']['id']}")).status_code == 200
            await until(
                lambda: other.services.authenticator.found_before(token) is None, seconds=2.0
            )
            assert (await elsewhere.get("/v1/audit")).status_code == 401
            assert (await admin.get("/audit")).status_code == 200


async def test_a_session_ends_with_its_key_at_once_and_by_itself(
    api: ServedApi, settings: Settings
) -> None:
    async with api.client(api.admin_key) as admin:
        made = (await admin.post("/api-keys", json={"role": "operator", "label": "Erika"})).json()
        async with (
            logged_in_browser(api, made["api_key"]) as client,
            logged_in_browser(api, api.admin_key) as second,
        ):
            assert (await client.get("/v1/audit")).status_code == 200
            assert (await admin.delete(f"/api-keys/{made['id']}")).status_code == 200
            await until(
                lambda: api.services.authenticator.found_before(client.cookies[COOKIE]) is None
            )
            assert (await client.get("/v1/audit")).status_code == 401
            assert (await client.get("/")).headers["location"] == "/page/login"
            async with api.services.database.session() as session:
                ended = text("update api_keys set expires_at = :at where session_of is not null")
                await session.execute(ended, {"at": datetime.now(UTC) - timedelta(seconds=1)})
            api.services.authenticator.forget_all()
            assert (await second.get("/v1/audit")).status_code == 401
        async with logged_in_browser(api, api.admin_key):
            pass
        entries = (await admin.get("/audit", params={"action": "page."})).json()["entries"]
    assert [entry["action"] for entry in entries] == ["page.logged_in"] * 3
    async with api.services.database.session() as session:
        count = text("select count(*) from api_keys where session_of is not null")
        assert await session.scalar(count) == 1  # a log-in removes those that have ended


async def test_a_sessions_key_is_no_api_key_and_an_api_key_is_no_session(api: ServedApi) -> None:
    async with logged_in_browser(api, api.admin_key) as client, logged_in_browser(api) as other:
        token = client.cookies[COOKIE]
        assert (await other.get("/v1/audit", headers={"X-API-Key": token})).status_code == 401
        other.cookies.set(COOKIE, api.admin_key)
        assert (await other.get("/v1/audit")).status_code == 401
        keys = (await client.get("/v1/api-keys")).json()["api_keys"]
        assert not [key for key in keys if token.startswith(key["prefix"])]
        # Not logged in.
        assert (await other.post("/page/login", data={"key": token})).status_code == 303
        assert other.cookies[COOKIE] == api.admin_key


async def test_sessions_share_the_limit_of_their_key(settings: Settings) -> None:
    async with running_api(settings.model_copy(update={"limit_key": 2.0})) as api:
        answers = []
        async with (
            logged_in_browser(api, api.admin_key) as first,
            logged_in_browser(api, api.admin_key) as second,
        ):
            for _ in range(8):
                answers += [
                    (await client.get("/v1/audit")).status_code for client in (first, second)
                ]
    assert answers.count(429) >= 4


async def test_a_page_shows_what_it_can_while_temporal_is_away(api: ServedApi) -> None:
    async with logged_in_browser(api, api.admin_key) as client:
        fleet, user = await client.get("/"), await client.get(f"/page/users/{api.user}")
    assert (fleet.status_code, user.status_code) == (200, 200)
    assert "Temporal" in fleet.text
    assert "Temporal" in user.text
    assert "No orders." in user.text


async def test_no_page_runs_a_script_or_style_that_we_do_not_serve(api: ServedApi) -> None:
    async with logged_in_browser(api, api.admin_key) as client:
        menu_paths = [path for path, _, _ in rendering.MENU]
        for path in (
            *menu_paths,
            f"/page/users/{api.user}",
            "/page/login",
            "/v1/docs",
            "/page/users/no%7Bbody",
        ):
            page = await client.get(path)
            assert page.headers["content-security-policy"] == rendering.POLICY, path
            assert page.headers["cache-control"] == "no-store"
            assert not re.search(r"<style|\bstyle=|\bon\w+=|<script(?! src=)", page.text), path
            for source in re.findall(r'(?:src|href)="([^"#]+)"', page.text):
                assert not urlsplit(source).netloc, source
                if source.startswith(("/page/static", "/page/swagger")):
                    resource = await client.get(source)
                    assert (resource.status_code, len(resource.content) > 100) == (200, True), (
                        source
                    )


async def test_texts_of_others_are_escaped(api: ServedApi) -> None:
    reason = "<script>alert(1)</script>"
    async with logged_in_browser(api, api.admin_key) as client:
        body = {"scope": "user", "user_id": api.user, "state": "halted", "reason": reason}
        assert (
            await client.put("/v1/switches", json=body, headers=await csrf_header(client))
        ).status_code == 200
        page = await client.get(f"/page/users/{api.user}")
    assert "&lt;script&gt;alert(1)" in page.text
    assert reason not in page.text


async def test_operators_find_instruments_and_approve_changed_lots(
    api: ServedApi, settings: Settings
) -> None:
    database = api.services.database
    async with api.client(api.admin_key) as admin:
        await admin.post("/users", json={"user_id": "lists", "scopes": ["read"]})
        body = {"broker": "paper", "api_key": "a", "secret_key": "b"}
        await admin.put("/users/lists/accounts/main/credentials", json=body)
    await database.write(instrument_loads.set_source, "paper", "lists", "main", actor="op")
    for units in (1000, 100):
        listed = Instrument(
            code="2330",
            name="<TSMC>",
            market="stock",
            kind=InstrumentKind.STOCK,
            lot_units=units,
            lot_value=Decimal(units),
        )
        load = await database.write(instrument_loads.begin_load, "paper", date(2026, 11, 23))
        await database.write(instrument_loads.stage_page, load.id, [listed])
        await database.write(instrument_loads.switch_list, load.id)
    async with (
        logged_in_browser(api, await make_key(settings, "operator")) as client,
        logged_in_browser(api, api.key) as user,
    ):
        page = (await client.get("/page/instruments", params={"query": "tsm"})).text
        assert "&lt;TSMC&gt;" in page
        assert "/v1/instruments/sources/paper/load" in page
        assert "Orders are checked with 1000 units" in page
        other = (await client.get("/page/instruments", params={"query": "9", "kind": ""})).text
        assert "TSMC" not in other
        [change] = await database.fetch(instrument_loads.open_changes)
        act = f"/v1/instruments/changes/{change.id}/approve"
        assert act in (await client.get("/page/attention")).text
        done = await client.post(act, json={"reason": "yes"}, headers=await csrf_header(client))
        assert done.status_code == 200, done.text
        assert act not in (await client.get("/page/attention")).text
        assert (await user.get("/page/instruments")).status_code == 403
