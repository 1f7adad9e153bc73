"""Somebody with an operator's API key, at every door of the system: the API, its pages, the command
line."""

from __future__ import annotations

import json
import re
from collections.abc import AsyncIterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import httpx
import pytest
from fastapi.routing import APIRoute

from api.http.auth import COOKIE, CSRF_HEADER
from api.http.rights import RIGHTS, Role
from api.page import router as pages
from infra.settings import Settings
from infra.vault.key_file import write_key_file
from infra.vault.secret_versions import load_versions
from tests.support.api.attacks import attack_body, stored_state
from tests.support.commands import CommandForker
from tests.support.systems.api import ServedApi, an_order, make_key, operator

PAGES = [pages.router]


def named(path: str, api: ServedApi) -> str:
    parts = {
        "user_id": api.user,
        "account_id": "main",
        "pool": "default",
        "number": "1",
        "symbol": "2330",
    }
    return re.sub(r"{(\w+)}", lambda match: parts.get(match[1], "0" * 32), path)


@pytest.fixture
async def key(settings: Settings, api: ServedApi) -> str:
    return await make_key(settings, "operator")


@pytest.fixture
async def browser(api: ServedApi, key: str) -> AsyncIterator[httpx.AsyncClient]:
    """A browser in which the operator logged in, with the token that acts need."""
    transport = httpx.ASGITransport(api.app)
    async with httpx.AsyncClient(transport=transport, base_url="http://api", timeout=40) as client:
        assert (await client.post("/page/login", data={"key": key})).status_code == 303
        match = re.search(r'name="csrf-token" content="(\w+)"', (await client.get("/")).text)
        assert match
        client.headers[CSRF_HEADER] = match[1]
        yield client


@pytest.mark.parametrize("door", ["key", "session"])
async def test_what_an_operator_has_no_right_to_is_refused_at_each_door(
    api: ServedApi, key: str, browser: httpx.AsyncClient, door: str
) -> None:
    refused = [route for route, right in RIGHTS.items() if Role.OPERATOR not in right.roles]
    assert {"POST /api-keys", "PUT /images", "POST /users"} <= set(refused)
    before = await stored_state(api)
    async with api.client(key) as client:
        for route in refused:
            method, _, path = route.partition(" ")
            body = None if method == "GET" else attack_body(route)
            if door == "key":
                answer = await client.request(method, named(path, api), json=body)
            else:
                answer = await browser.request(method, f"/v1{named(path, api)}", json=body)
            assert (route, answer.status_code, answer.json()["code"]) == (route, 403, "FORBIDDEN")
    assert await stored_state(api) == before


async def test_a_session_is_no_api_key_and_makes_no_other_session(
    api: ServedApi, browser: httpx.AsyncClient
) -> None:
    """A copied cookie ends with its session: it is neither a key of its own nor a way to a second
    one."""
    token = browser.cookies[COOKIE]
    async with api.client(token) as client:
        assert (await client.get("/audit")).status_code == 401
    again = await browser.post("/page/login", data={"key": token})
    assert (again.headers["location"], "set-cookie" in again.headers) == ("/page/login", False)


async def test_nothing_that_an_operator_reads_holds_a_key_a_credential_or_a_secret(
    api: ServedApi, settings: Settings, key: str, browser: httpx.AsyncClient
) -> None:
    async with api.client(api.key) as user:
        hook = (
            await user.post(
                f"/users/{api.user}/webhooks", json={"account_id": "main", "quantity_unit": "lots"}
            )
        ).json()
    files = (settings.message_key_file, settings.api_secret_file)
    secrets = {json.loads(path.read_bytes())[0]["secret"] for path in files}
    secrets |= {load_versions(path)[0].secret.hex() for path in files}
    secrets |= {
        "canary-key",
        "canary-secret",
        api.key,
        api.admin_key,
        hook["token"],
        hook["secret"],
    }
    seen = []
    async with api.client(key) as client:
        for route, right in RIGHTS.items():
            method, _, path = route.partition(" ")
            if method == "GET" and Role.OPERATOR in right.roles and "events" not in path:
                seen.append(await client.get(named(path, api)))
    pages = {
        route.path for router in PAGES for route in router.routes if isinstance(route, APIRoute)
    }
    assert {"/", "/page/users/{user_id}"} <= pages
    for path in pages:
        # A stream without an end; what ends the session.
        if "changes" not in path and "log" not in path:
            seen.append(await browser.get(named(path, api)))
    assert len([answer for answer in seen if answer.status_code == 200]) > 20
    for answer in seen:
        leaked = [secret for secret in secrets if secret in answer.text]
        assert not leaked, answer.url


async def test_what_an_operators_commands_have_no_right_to_is_refused(
    api: ServedApi, key: str, commands: CommandForker, tmp_path: Path
) -> None:
    before = await stored_state(api)
    stolen = tmp_path / "stolen.json"
    made_up = {"broker": "paper", "api_key": "evil", "secret_key": "evil"}
    write_key_file(stolen, json.dumps(made_up).encode(), private=True)
    image = attack_body("PUT /images")["image"]
    order: dict[str, Any] = an_order()
    attempts = (
        ("users", "add", "evil"),
        ("api-keys", "create", "--role", "admin", "--label", "evil"),
        ("api-keys", "list"),
        ("accounts", "store", api.user, "main", str(stolen)),
        ("images", "allow", image, "--reason", "evil"),
        ("webhooks", "create", api.user, "main", "--quantity-unit", "lots"),
        ("orders", "place", api.user, order["account_id"], "buy", "1", "2330", "--price", "1000"),
    )
    async with operator(replace(api, admin_key=key), commands, tmp_path) as berth:
        for words in attempts:
            refused = await berth(*words)
            assert (words, refused.code, "may not" in refused.err) == (words, 1, True), refused.err
        rolled = await berth(
            "pool", "rollout", "start", "default", "--version", "2", "--image", image
        )
        assert (rolled.code, "IMAGE_NOT_ALLOWED" in rolled.err) == (1, True), rolled.err
    assert await stored_state(api) == before
