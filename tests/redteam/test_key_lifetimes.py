"""What somebody with an API key that is about to end can keep: no wider key, and nothing that its
revocation does not end."""

from __future__ import annotations

import re
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from datetime import UTC, datetime, timedelta
from typing import Any

import httpx
import pytest
from sqlalchemy import text

from api.http.auth import COOKIE, CSRF_HEADER
from tests.integration.api.accounts.test_scopes import client_at, make
from tests.support.systems.api import ServedApi, an_order

#: Scopes and sources of the key that somebody stole.
SCOPES, SOURCES, PEER = ["keys", "read"], ["192.0.2.0/24"], "192.0.2.7"
WIDER: list[dict[str, Any]] = [
    {},
    {"scopes": ["keys", "read", "trade"]},
    {"scopes": SCOPES, "sources": ["0.0.0.0/0"]},
    {"scopes": SCOPES, "sources": ["192.0.2.0/23"]},
    {"scopes": SCOPES, "sources": ["192.0.2.7", "198.51.100.1"]},
    {"scopes": SCOPES, "sources": ["::/0"]},
    {"scopes": SCOPES, "sources": ["::ffff:0:0/96"]},
    {"scopes": SCOPES, "sources": ["::ffff:198.51.100.1"]},
]


def in_an_hour() -> str:
    return (datetime.now(UTC) + timedelta(hours=1)).isoformat()


@asynccontextmanager
async def browser(api: ServedApi, key: str) -> AsyncIterator[httpx.AsyncClient]:
    """Logged in to the pages with a user's key, with the token that acts need."""
    transport = httpx.ASGITransport(api.app, client=(PEER, 1))
    async with httpx.AsyncClient(transport=transport, base_url="http://api", timeout=40) as client:
        assert (await client.post("/page/login", data={"key": key})).status_code == 303
        page = await client.get(f"/page/users/{api.user}")
        match = re.search(r'name="csrf-token" content="(\w+)"', page.text)
        assert match
        client.headers[CSRF_HEADER] = match[1]
        yield client


async def let_end(api: ServedApi, key_id: str) -> None:
    """Makes the key one that ended a day ago."""
    async with api.services.database.session() as session:
        ended = text("update api_keys set expires_at = now() - interval '1 day' where id = :id")
        await session.execute(ended, {"id": key_id})
    api.services.authenticator.forget_all()


async def test_a_key_makes_no_key_that_may_do_more_or_be_used_from_elsewhere(
    api: ServedApi,
) -> None:
    """Neither by itself nor by a session that began with it."""
    stolen = await make(
        api, role="admin", user_id=None, scopes=SCOPES, sources=SOURCES, expires_at=in_an_hour()
    )
    key = stolen["api_key"]
    async with client_at(api, key, PEER) as by_key, browser(api, key) as by_session:
        for wider in WIDER:
            body = {"role": "admin", "label": "evil", **wider}
            for thief, path in ((by_key, "/api-keys"), (by_session, "/v1/api-keys")):
                refused = await thief.post(path, json=body)
                answer = (wider, refused.status_code, refused.json()["code"])
                assert answer == (wider, 403, "GRANT_TOO_WIDE")


async def test_rotating_a_key_widens_nothing_and_lasts_as_long_as_it_was_made_for(
    api: ServedApi,
) -> None:
    key = await make(api, scopes=SCOPES, sources=SOURCES, expires_at=in_an_hour())
    for _ in range(3):
        async with client_at(api, key["api_key"], PEER) as thief:
            rotated = await thief.post("/api-keys/self/rotate", json={})
        assert rotated.status_code == 201, rotated.text
        key = rotated.json()
        assert (key["scopes"], key["sources"]) == (SCOPES, SOURCES)
        life = datetime.fromisoformat(key["expires_at"]) - datetime.now(UTC)
        assert timedelta(minutes=59) < life <= timedelta(hours=1, seconds=1)


async def test_a_key_without_the_scope_keys_does_not_prolong_itself(api: ServedApi) -> None:
    made = await make(api, scopes=["read", "trade"], expires_at=in_an_hour())
    async with api.client(made["api_key"]) as thief:
        refused = await thief.post("/api-keys/self/rotate", json={})
    assert (refused.status_code, refused.json()["code"]) == (403, "SCOPE_MISSING")


async def test_a_key_does_not_rotate_one_that_has_no_sources_or_never_ends(
    api: ServedApi,
) -> None:
    """By that it would get what it may not make: the new key is shown to whoever rotates."""
    stolen = await make(api, scopes=SCOPES, sources=SOURCES, expires_at=in_an_hour())
    endless = await make(api, scopes=SCOPES, expires_at=None)
    async with client_at(api, stolen["api_key"], PEER) as thief:
        refused = await thief.post(f"/api-keys/{endless['id']}/rotate", json={})
    assert (refused.status_code, refused.json()["code"]) == (403, "GRANT_TOO_WIDE")


async def test_what_a_key_made_that_has_ended_is_still_found_and_ended_by_its_revocation(
    api: ServedApi,
) -> None:
    """A key of an hour makes one without an end. The way back is the same after that hour."""
    stolen = await make(api, role="admin", user_id=None, expires_at=in_an_hour())
    body = {"role": "admin", "label": "evil", "expires_at": None}
    async with api.client(stolen["api_key"]) as thief:
        endless = (await thief.post("/api-keys", json=body)).json()
        user_key = {"role": "user", "user_id": api.user, "label": "evil", "expires_at": None}
        second = (await thief.post("/api-keys", json=user_key)).json()
        rotated = (await thief.post("/api-keys/self/rotate", json={})).json()
    await let_end(api, stolen["id"])
    made = (endless, second, rotated)
    async with api.client(api.admin_key) as admin:
        gone = await admin.delete(f"/api-keys/{stolen['id']}", params={"keys": True})
    assert {key["id"] for key in gone.json()["api_keys"]} == {key["id"] for key in made}
    for key in made:
        async with api.client(key["api_key"]) as thief:
            assert (await thief.get("/api-keys/self")).status_code == 401


async def test_an_administrators_key_with_keys_makes_one_that_outlives_it_and_makes_others(
    api: ServedApi,
) -> None:
    stolen = await make(api, role="admin", user_id=None, scopes=["keys"], expires_at=in_an_hour())
    body = {"role": "admin", "label": "evil", "scopes": ["keys"], "expires_at": None}
    async with api.client(stolen["api_key"]) as thief:
        endless = (await thief.post("/api-keys", json=body)).json()
    await let_end(api, stolen["id"])
    async with api.client(stolen["api_key"]) as thief:
        assert (await thief.get("/api-keys/self")).status_code == 401
    async with api.client(endless["api_key"]) as thief:
        assert (await thief.get("/api-keys/self")).json()["expires_at"] is None
        assert (await thief.post("/api-keys", json=body)).status_code == 201


async def test_a_session_of_a_user_ends_when_all_of_their_keys_are_revoked(
    api: ServedApi,
) -> None:
    """Also for what a page asks for, and for an act with the session's token."""
    async with browser(api, api.key) as thief, api.client(api.admin_key) as admin:
        token = thief.cookies[COOKIE]
        assert (await thief.get(f"/v1/users/{api.user}/orders")).status_code == 200
        listed = await admin.get("/api-keys", params={"user_id": api.user})
        for key in listed.json()["api_keys"]:
            assert (await admin.delete(f"/api-keys/{key['id']}")).status_code == 200
        api.services.authenticator.forget_all()  # as the notice does it, a moment later
        thief.cookies.set(COOKIE, token)
        page = await thief.get(f"/page/users/{api.user}")
        assert (page.status_code, page.headers["location"]) == (303, "/page/login")
        assert (await thief.get(f"/v1/users/{api.user}/orders")).status_code == 401
        for method, path, body in (
            ("POST", f"/users/{api.user}/orders", an_order()),
            ("POST", "/api-keys/self/rotate", {}),
            ("GET", f"/users/{api.user}/orders/events", None),
        ):
            answer = await thief.request(method, f"/v1{path}", json=body)
            assert (path, answer.status_code) == (path, 401)
        # A new key of the user does not bring an old session back.
        fresh = await make(api)
        api.services.authenticator.forget_all()
        assert (await thief.get(f"/v1/users/{api.user}/orders")).status_code == 401
    async with api.client(fresh["api_key"]) as user:
        assert (await user.get(f"/users/{api.user}/orders")).status_code == 200


@pytest.mark.parametrize("with_webhooks", [False, True])
async def test_a_revoked_keys_webhook_places_orders_only_if_it_was_left(
    api: ServedApi, with_webhooks: bool
) -> None:
    maker = await make(api)
    body = {"account_id": "main", "quantity_unit": "lots", "label": "evil"}
    async with api.client(maker["api_key"]) as thief:
        hook = (await thief.post(f"/users/{api.user}/webhooks", json=body)).json()
    async with api.client(api.admin_key) as admin:
        flags = {"webhooks": with_webhooks}
        gone = await admin.delete(f"/api-keys/{maker['id']}", params=flags)
        assert gone.json()["webhooks_left"] == int(not with_webhooks)
    async with client_at(api, "", PEER) as anybody:
        signal = await anybody.post(f"/webhooks/{hook['token']}/orders", json={})
    assert (signal.status_code == 404) == with_webhooks, signal.text
