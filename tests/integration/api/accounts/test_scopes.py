"""API keys with scopes, sources and an end: made, used, rotated and revoked, also by their own
user."""

from __future__ import annotations

import json
import uuid
from datetime import UTC, datetime, timedelta
from pathlib import Path
from typing import Any

import httpx
import pytest
from sqlalchemy import text

from api.http.rights import SCOPES_OF, Role
from infra.database import api_keys
from tests.support.commands import CommandForker
from tests.support.systems.api import ServedApi, an_order, operator


async def make(api: ServedApi, key: str = "", **changes: Any) -> dict[str, Any]:
    """A key of the test's user."""
    body = {"role": "user", "user_id": api.user, "label": "a test", **changes}
    async with api.client(key or api.admin_key) as admin:
        answer = await admin.post("/api-keys", json=body)
    assert answer.status_code == 201, answer.text
    made: dict[str, Any] = answer.json()
    return made


def client_at(api: ServedApi, key: str, peer: str) -> httpx.AsyncClient:
    transport = httpx.ASGITransport(api.app, client=(peer, 1))
    return httpx.AsyncClient(
        transport=transport, base_url="http://api/v1", headers={"X-API-Key": key}
    )


def days_until(shown: str) -> float:
    return (datetime.fromisoformat(shown) - datetime.now(UTC)) / timedelta(days=1)


async def test_a_key_that_reads_places_no_order_and_learns_which_scope_it_lacks(
    api: ServedApi,
) -> None:
    made = await make(api, scopes=["read"])
    assert made["scopes"] == ["read"]
    async with api.client(made["api_key"]) as reader:
        assert (await reader.get(f"/users/{api.user}/orders")).status_code == 200
        refused = await reader.post(f"/users/{api.user}/orders", json=an_order())
        assert (refused.status_code, refused.json()["code"]) == (403, "SCOPE_MISSING")
        assert "`trade`" in refused.json()["detail"]
        body = {"broker": "paper", "api_key": "a", "secret_key": "b"}
        refused = await reader.put(f"/users/{api.user}/accounts/main/credentials", json=body)
        assert "`credentials`" in refused.json()["detail"]
        own = (await reader.get("/api-keys/self")).json()
        assert (own["id"], own["scopes"], own["unrestricted"]) == (made["id"], ["read"], False)
        listed = await reader.get("/api-keys")
        assert "`keys`" in listed.json()["detail"]


async def test_a_key_ends_after_90_days_unless_its_maker_says_something_else(
    api: ServedApi,
) -> None:
    assert 89.9 < days_until((await make(api))["expires_at"]) < 90.1
    soon = (datetime.now(UTC) + timedelta(days=7)).isoformat()
    assert 6.9 < days_until((await make(api, expires_at=soon))["expires_at"]) < 7.1
    assert (await make(api, expires_at=None))["expires_at"] is None
    async with api.client(api.key) as user:
        first = (await user.get("/api-keys/self")).json()
    assert 89.9 < days_until(first["expires_at"]) < 90.1
    assert set(first["scopes"]) == SCOPES_OF[Role.USER]


async def test_a_key_with_sources_works_from_there_only_also_on_the_pages(api: ServedApi) -> None:
    made = await make(api, sources=["192.0.2.0/24", "2001:db8::1"])
    for peer, status in (("192.0.2.9", 200), ("2001:db8::1", 200), ("198.51.100.1", 403)):
        async with client_at(api, made["api_key"], peer) as client:
            answer = await client.get(f"/users/{api.user}/orders")
            assert (peer, answer.status_code) == (peer, status)
            if status == 403:
                assert answer.json()["code"] == "KEY_SOURCE_NOT_ALLOWED"
                assert peer in answer.json()["detail"]
                # What a caller writes into a header of proxies counts for nothing: none is trusted
                # here.
                forged = await client.get(
                    "/api-keys/self", headers={"X-Forwarded-For": "192.0.2.9"}
                )
                assert forged.status_code == 403
                form = {"key": made["api_key"]}
                login = await client.post("http://api/page/login", data=form)
                assert login.status_code == 403
    async with client_at(api, made["api_key"], "192.0.2.9") as browser:
        login = await browser.post("http://api/page/login", data={"key": made["api_key"]})
        assert login.status_code == 303
        cookie = login.headers["set-cookie"].partition(";")[0]
    async with client_at(api, "", "198.51.100.1") as elsewhere:
        del elsewhere.headers["X-API-Key"]
        page = await elsewhere.get(f"http://api/page/users/{api.user}", headers={"Cookie": cookie})
        assert page.status_code == 403


async def stored_key(api: ServedApi, token: str) -> dict[str, Any]:
    """Return scopes and sources as PostgreSQL has them, and who made the key."""
    async with api.client(token) as user:
        own = (await user.get("/api-keys/self")).json()
    async with api.services.database.session() as session:
        row = await api_keys.get_api_key(session, uuid.UUID(own["id"]))
    assert (own["scopes"], own["sources"]) == (row.scopes, row.sources)
    return {"scopes": row.scopes, "sources": row.sources, "made_by": str(row.made_by)}


async def test_a_users_first_key_has_the_scopes_that_were_asked_for(api: ServedApi) -> None:
    async with api.client(api.admin_key) as admin:
        made = await admin.post("/users", json={"scopes": ["trade", "read", "read"]})
        wrong = await admin.post("/users", json={"scopes": ["fleet"]})
        none = await admin.post("/users", json={"scopes": []})
    assert (made.status_code, wrong.status_code, none.status_code) == (201, 422, 422)
    stored = await stored_key(api, made.json()["api_key"])
    assert stored["scopes"] == ["read", "trade"]
    async with api.client(made.json()["api_key"]) as user:
        refused = await user.get("/api-keys")
        assert "`keys`" in refused.json()["detail"]


async def test_a_users_first_key_may_do_no_more_than_the_key_that_made_it(api: ServedApi) -> None:
    """Else who has a key of scope `users` alone would have every other one."""
    weak = await make(api, role="admin", user_id=None, scopes=["users"])
    async with api.client(weak["api_key"]) as thief:
        for wider in ({}, {"scopes": ["trade"]}, {"scopes": None}, {"scopes": ["read", "keys"]}):
            refused = await thief.post("/users", json={"user_id": "evil", **wider})
            assert (refused.status_code, refused.json()["code"]) == (403, "GRANT_TOO_WIDE"), wider
    onboarding = await make(
        api, role="admin", user_id=None, scopes=["users", "read"], sources=["127.0.0.0/8"]
    )
    async with api.client(onboarding["api_key"]) as client:
        assert (await client.get("/users/evil")).status_code == 404
        made = await client.post("/users", json={"scopes": ["read"]})
        assert made.status_code == 201
    assert await stored_key(api, made.json()["api_key"]) == {
        "scopes": ["read"],
        "sources": ["127.0.0.0/8"],
        "made_by": onboarding["id"],
    }


async def test_a_key_gives_no_other_key_more_than_it_has_itself(api: ServedApi) -> None:
    body = {
        "role": "admin",
        "label": "makes keys",
        "scopes": ["keys", "read"],
        "sources": ["192.0.2.0/24"],
    }
    async with api.client(api.admin_key) as admin:
        maker = (await admin.post("/api-keys", json=body)).json()
    async with client_at(api, maker["api_key"], "192.0.2.1") as client:
        mine = {"role": "user", "user_id": api.user, "label": "x"}
        for wider in ({}, {"scopes": ["trade"]}, {"scopes": ["read"], "sources": ["0.0.0.0/0"]}):
            refused = await client.post("/api-keys", json=mine | wider)
            assert (refused.status_code, refused.json()["code"]) == (403, "GRANT_TOO_WIDE"), wider
        made = await client.post("/api-keys", json=mine | {"scopes": ["read"]})
        assert made.json()["sources"] == ["192.0.2.0/24"]  # inherited
        narrower = await client.post(
            "/api-keys", json=mine | {"scopes": ["read"], "sources": ["192.0.2.7"]}
        )
        assert narrower.json()["sources"] == ["192.0.2.7/32"]
        async with api.client(api.key) as user:
            (first, *_) = (await user.get("/api-keys")).json()["api_keys"][::-1]
        stolen = await client.post(f"/api-keys/{first['id']}/rotate", json={})
        assert stolen.json()["code"] == "GRANT_TOO_WIDE"


@pytest.mark.parametrize(
    "wrong",
    [
        {"scopes": ["fleet"]},
        {"scopes": []},
        {"scopes": ["everything"]},
        {"sources": ["192.0.2.1/24"]},
    ],
)
async def test_what_is_no_scope_of_the_role_or_no_network_is_refused(
    api: ServedApi, wrong: dict[str, Any]
) -> None:
    async with api.client(api.admin_key) as admin:
        body = {"role": "user", "user_id": api.user, "label": "x", **wrong}
        answer = await admin.post("/api-keys", json=body)
    assert answer.status_code == 422


async def test_users_list_rotate_and_revoke_their_own_keys_and_no_others(api: ServedApi) -> None:
    async with api.client(api.admin_key) as admin:
        other = (await admin.post("/users", json={"user_id": f"{api.user}-other"})).json()
        (others,) = (await admin.get("/api-keys", params={"user_id": other["user_id"]})).json()[
            "api_keys"
        ]
    spare = await make(api, scopes=["read"], label="spare")
    async with api.client(api.key) as user:
        listed = (await user.get("/api-keys")).json()["api_keys"]
        assert {key["user_id"] for key in listed} == {api.user}
        assert (
            await user.get("/api-keys", params={"user_id": other["user_id"]})
        ).status_code == 404
        for method, path in (("POST", "/rotate"), ("DELETE", "")):
            body: dict[str, Any] | None = {} if method == "POST" else None
            answer = await user.request(method, f"/api-keys/{others['id']}{path}", json=body)
            assert (answer.status_code, answer.json()["code"]) == (404, "API_KEY_NOT_FOUND")
        rotated = (
            await user.post(f"/api-keys/{spare['id']}/rotate", json={"overlap_hours": 0})
        ).json()
        assert rotated["scopes"] == ["read"]
        assert 89.9 < days_until(rotated["expires_at"]) < 90.1
        gone = await user.delete(f"/api-keys/{rotated['id']}")
        assert gone.json()["revoked_at"]
        assert (
            await user.post("/api-keys", json={"role": "admin", "label": "evil"})
        ).status_code == 403


async def test_a_key_that_may_manage_keys_but_not_trade_does_not_rotate_one_that_trades(
    api: ServedApi,
) -> None:
    weak = await make(api, scopes=["read", "keys"])
    strong = await make(api, scopes=["trade"])
    async with api.client(weak["api_key"]) as client:
        refused = await client.post(f"/api-keys/{strong['id']}/rotate", json={})
        assert (refused.status_code, refused.json()["code"]) == (403, "GRANT_TOO_WIDE")
        assert (await client.post("/api-keys/self/rotate", json={})).status_code == 201
        assert (await client.delete(f"/api-keys/{strong['id']}")).status_code == 200


async def test_any_key_ends_itself(api: ServedApi) -> None:
    made = await make(api, scopes=["read"])
    async with api.client(made["api_key"]) as client:
        assert (await client.delete("/api-keys/self")).json()["id"] == made["id"]
        assert (await client.get("/api-keys/self")).status_code == 401


async def test_a_key_of_before_keeps_all_rights_is_flagged_and_gets_an_end_with_its_rotation(
    api: ServedApi,
) -> None:
    token = api.services.tokens.make()
    async with api.services.database.session() as session:
        old = await api_keys.create_api_key(session, token, "user", api.user, "of before")
    async with api.client(token) as user:
        shown = (await user.get("/api-keys/self")).json()
        assert (shown["role"], shown["unrestricted"], shown["scopes"], shown["expires_at"]) == (
            "user",
            True,
            None,
            None,
        )
        assert (await user.put("/switches", json=switch_of(api))).status_code == 200
        rotated = (await user.post("/api-keys/self/rotate", json={})).json()
    assert set(rotated["scopes"]) == SCOPES_OF[Role.USER]
    assert 89.9 < days_until(rotated["expires_at"]) < 90.1
    assert rotated["id"] != str(old.id)


def switch_of(api: ServedApi) -> dict[str, Any]:
    return {
        "scope": "user",
        "user_id": api.user,
        "held_by": "user",
        "state": "open",
        "reason": "a test",
    }


async def test_the_release_before_knows_no_role_word_of_a_key_with_scopes(api: ServedApi) -> None:
    """It reads `role` alone, and raises for a word that is not one of its three."""
    made = await make(api, scopes=["read"])
    async with api.services.database.session() as session:
        statement = text("select role from api_keys where id = :id")
        word = await session.scalar(statement, {"id": uuid.UUID(made["id"])})
        # A process of that release that rotates it copies the word, and no scope: such a key may do
        # nothing.
        token = api.services.tokens.make()
        copied = text(
            "insert into api_keys (id, key_hash, prefix, role, user_id, label)"
            " select gen_random_uuid(), :hash, 'berth_', role, user_id, label from api_keys "
            "where id = :id"
        )
        await session.execute(
            copied, {"hash": api_keys.hash_token(token), "id": uuid.UUID(made["id"])}
        )
    assert word not in {"user", "operator", "admin"}
    async with api.client(token) as client:
        assert (await client.get(f"/users/{api.user}/orders")).json()["code"] == "SCOPE_MISSING"


async def test_an_administrator_that_makes_no_keys_does_not_end_the_bootstrap_key(
    api: ServedApi,
) -> None:
    """Otherwise nobody could make any more."""
    token, database = api.services.tokens.make(), api.services.database
    async with database.session() as session:
        await api_keys.create_api_key(session, token, "admin", label=api_keys.BOOTSTRAP_LABEL)
    async with api.client(token) as first:
        body = {"role": "admin", "label": "Prometheus", "scopes": ["metrics"]}
        assert (await first.post("/api-keys", json=body)).status_code == 201
        assert (await first.get("/api-keys/self")).status_code == 200
        maker = await first.post("/api-keys", json=body | {"scopes": ["keys"]})
        assert maker.status_code == 201
    async with database.session() as session:
        assert await api_keys.find_api_key(session, token) is None


async def test_revoking_a_key_lists_what_it_made_and_ends_it_on_request(api: ServedApi) -> None:
    maker = await make(api)
    async with api.client(maker["api_key"]) as client:
        body = {"account_id": "main", "quantity_unit": "lots", "label": "alerts"}
        hook = (await client.post(f"/users/{api.user}/webhooks", json=body)).json()
        second = (await client.post("/api-keys/self/rotate", json={})).json()
        async with api.client(second["api_key"]) as next_client:
            third = (await next_client.post("/api-keys/self/rotate", json={})).json()
    async with api.client(api.key) as user:
        gone = (await user.delete(f"/api-keys/{maker['id']}")).json()
        assert [
            (webhook["id"], webhook["label"], webhook["revoked_at"]) for webhook in gone["webhooks"]
        ] == [(hook["id"], "alerts", None)]
        assert [key["id"] for key in gone["api_keys"]] == [second["id"], third["id"]]
        assert (gone["webhooks_revoked"], gone["webhooks_left"]) == (0, 1)
        all_of_it = {"webhooks": True, "keys": True}
        gone = (await user.delete(f"/api-keys/{maker['id']}", params=all_of_it)).json()
        assert (gone["webhooks_revoked"], gone["webhooks_left"]) == (1, 0)
        assert all(entry["revoked_at"] for entry in gone["webhooks"] + gone["api_keys"])
    async with api.client(third["api_key"]) as client:
        assert (await client.get("/api-keys/self")).status_code == 401


async def test_commands_make_list_rotate_and_revoke_keys_with_scopes(
    api: ServedApi, commands: CommandForker, tmp_path: Path
) -> None:
    async with operator(api, commands, tmp_path) as berth:
        added = json.loads((await berth("users", "add", "--scope", "read", "--json")).out)
        async with api.client(added["api_key"]) as user:
            assert (await user.get("/api-keys/self")).json()["scopes"] == ["read"]
        made = await berth(
            "api-keys",
            "create",
            "--role",
            "user",
            "--user",
            api.user,
            "--label",
            "bot",
            "--scope",
            "read",
            "--scope",
            "trade",
            "--source",
            "127.0.0.0/8",
            "--json",
        )
        key = json.loads(made.out)
        assert (key["scopes"], key["sources"]) == (["read", "trade"], ["127.0.0.0/8"])
        assert 89.9 < days_until(key["expires_at"]) < 90.1
        monitor = ("--role", "operator", "--label", "prometheus", "--scope", "metrics")
        never = await berth("api-keys", "create", *monitor, "--no-end", "--json")
        assert json.loads(never.out)["expires_at"] is None
        table = (await berth("api-keys", "list", COLUMNS="300")).out
        line = next(line for line in table.splitlines() if key["id"] in line)
        assert "read, trade" in line
        assert "127.0.0.0/8" in line
        assert "all (before scopes)" in table  # the test's administrator
        gone = await berth("api-keys", "revoke", key["id"], "--webhooks", "--keys")
        assert gone.code == 0
