"""API keys are made, listed and revoked; a revoked one ends at once in all processes."""

from __future__ import annotations

import asyncio
import json
import time
import uuid
from contextlib import AsyncExitStack
from datetime import UTC, datetime, timedelta
from pathlib import Path

import httpx
import msgspec
import pytest
from sqlalchemy import text

from api.app import create_app
from infra.database import api_keys
from infra.settings import Settings
from infra.vault.api_tokens import ApiTokens
from infra.vault.key_file import write_key_file
from infra.vault.secret_versions import SecretVersion
from tests.support.commands import CommandForker
from tests.support.systems.api import ServedApi, operator, running_api, served

#: Seconds from the answer to a revocation until every process refuses the key.
AT_ONCE = 0.1
IMAGE = "registry.example/worker@sha256:" + "cd" * 32


async def refused(client: httpx.AsyncClient, user: str) -> bool:
    return (await client.get(f"/users/{user}/orders")).status_code == 401


async def seconds_until_refused(client: httpx.AsyncClient, user: str) -> float:
    """From now to the beginning of the first request that is refused: what a request takes does not
    count."""
    began = asked = time.monotonic()
    while not await refused(client, user):
        await asyncio.sleep(0.005)
        asked = time.monotonic()
    return asked - began


async def revoke(api: ServedApi, prefix: str) -> None:
    async with api.client(api.admin_key) as admin:
        keys = (await admin.get("/api-keys", params={"user_id": api.user})).json()["api_keys"]
        (key,) = [key for key in keys if prefix.startswith(key["prefix"])]
        answer = await admin.delete(f"/api-keys/{key['id']}", params={"reason": "lost"})
    assert answer.status_code == 200
    assert answer.json()["revoked_at"]


@pytest.mark.parametrize("valkey_up", [True, False])
async def test_a_revoked_key_is_refused_by_all_processes_at_once(
    settings: Settings, valkey_up: bool
) -> None:
    if not valkey_up:
        settings = settings.model_copy(update={"valkey_url": "redis://127.0.0.1:1/0"})
    async with AsyncExitStack() as stack:
        apis = [await stack.enter_async_context(running_api(settings)) for _ in range(3)]
        first = apis[0]
        clients = [await stack.enter_async_context(api.client(first.key)) for api in apis]
        for api, client in zip(apis, clients, strict=True):
            await asyncio.wait_for(api.services.notifications.listening.wait(), 10)
            assert not await refused(client, first.user)  # each remembers the key now
        await revoke(first, first.key)
        taken = await asyncio.gather(
            *(seconds_until_refused(client, first.user) for client in clients)
        )
    assert max(taken) < AT_ONCE, taken


async def test_a_notice_that_was_lost_is_made_up_for(settings: Settings) -> None:
    async with (
        running_api(settings) as api,
        running_api(settings) as other,
        other.client(api.key) as client,
    ):
        assert not await refused(client, api.user)
        async with api.services.database.session() as session:
            await session.execute(
                text(
                    "select pg_terminate_backend(pid, 5000) from pg_stat_activity "
                    "where application_name = 'berth-notices' and datname = current_database()"
                )
            )
        await revoke(api, api.key)
        assert await seconds_until_refused(client, api.user) < settings.api_key_cache / 2


async def test_event_streams_of_a_revoked_key_end_and_others_continue(api: ServedApi) -> None:
    async with served(api) as url, httpx.AsyncClient(base_url=url, timeout=20) as http:
        path = f"/users/{api.user}/worker/events"
        async with (
            http.stream("GET", path, headers={"X-API-Key": api.key}) as own,
            http.stream("GET", path, headers={"X-API-Key": api.admin_key}) as others,
        ):
            lines, others_lines = own.aiter_lines(), others.aiter_lines()
            assert await anext(lines)
            assert await anext(others_lines)
            await revoke(api, api.key)
            async with asyncio.timeout(2):
                async for _ in lines:
                    pass
            assert api.services.streams.open == 1
        again = await http.get(path, headers={"X-API-Key": api.key})
        assert again.status_code == 401


async def test_an_administrator_makes_lists_and_revokes_keys(
    api: ServedApi, commands: CommandForker, tmp_path: Path
) -> None:
    async with operator(api, commands, tmp_path) as berth:
        made = await berth("api-keys", "create", "--role", "operator", "--label", "Erika")
        token = made.out.strip()
        async with api.client(token) as client:
            assert (await client.get("/switches")).status_code == 200
        listed = await berth("api-keys", "list")
        line = next(line for line in listed.out.splitlines() if "Erika" in line)
        assert token not in listed.out
        assert "operator" in line
        gone = await berth("api-keys", "revoke", line.split()[0], "--reason", "left")
        assert gone.code == 0
        async with api.client(token) as client:
            await seconds_until_refused(client, api.user)
        assert "Erika" not in (await berth("api-keys", "list")).out
        assert "Erika" in (await berth("api-keys", "list", "--revoked")).out
        wrong = await berth("api-keys", "create", "--role", "user", "--label", "nobody's")
        assert (wrong.code, "user_id" in wrong.err) == (1, True)
    async with api.services.database.session() as session:
        actions = (
            await session.execute(text("select action, data from audit_trail order by id"))
        ).all()
    assert [action for action, _ in actions[-2:]] == ["api_key.created", "api_key.revoked"]
    assert actions[-1][1]["reason"] == "left"


async def test_a_made_up_key_or_webhook_costs_no_query(settings: Settings) -> None:
    tokens = ApiTokens(settings.api_secret_file)
    genuine = tokens.make()
    malformed = ("x", "berth_" + "a" * 43, genuine[:-1] + "é", "berth_.1." + "0" * 32, "a" * 300)
    well_formed = [ApiTokens(write_versions(settings, number)).make() for number in (1, 2)]
    down = settings.model_copy(
        update={"database_url": "postgresql+asyncpg://berth@127.0.0.1:1/berth"}
    )
    app = create_app(down)
    async with app.router.lifespan_context(app):
        transport = httpx.ASGITransport(app)
        async with httpx.AsyncClient(transport=transport, base_url="http://api/v1") as client:
            for key in (*malformed, *well_formed):
                answer = await client.get("/switches", headers={b"X-API-Key": key.encode()})
                assert (key, answer.status_code) == (key, 401)
                posted = await client.post(f"/webhooks/{key}/orders", json={})
                assert posted.status_code == 404 if len(key) < 256 else 422
            asked = await client.get("/switches", headers={"X-API-Key": genuine})
            assert asked.json()["code"] == "DATABASE_UNAVAILABLE"


def write_versions(settings: Settings, number: int) -> Path:
    """A file with another secret under this version."""
    path = settings.data_dir / f"other-{number}.key"
    write_key_file(path, msgspec.json.encode([SecretVersion(number, b"o" * 32, 0)]), private=True)
    return path


async def test_who_writes_to_postgresql_alone_makes_no_key_that_counts(api: ServedApi) -> None:
    """The token of a key ends in a MAC under the API secret, which PostgreSQL does not have."""
    genuine = api.services.tokens.make()
    made_up = ApiTokens(write_versions(api.settings, 1)).make()
    async with api.services.database.session() as session:
        for token in (genuine, made_up):
            await api_keys.create_api_key(session, token, "admin")
    for token, status in ((genuine, 200), (made_up, 401)):
        async with api.client(token) as client:
            assert (await client.get("/api-keys")).status_code == status


async def test_who_writes_to_postgresql_makes_their_own_key_an_administrators(
    api: ServedApi,
) -> None:
    own = text("update api_keys set role = 'admin', user_id = null where key_hash = :hash")
    async with api.client(api.key) as user:
        assert (await user.get("/users")).status_code == 403
        async with api.services.database.session() as session:
            await session.execute(own, {"hash": api_keys.hash_token(api.key)})
        api.services.authenticator.forget_all()  # as after `api_key_cache` seconds
        assert (await user.get("/users")).status_code == 200


async def test_a_key_ends_by_itself(api: ServedApi) -> None:
    ends = datetime.now(UTC) + timedelta(seconds=1.5)
    body = {
        "role": "user",
        "user_id": api.user,
        "label": "for a moment",
        "expires_at": ends.isoformat(),
    }
    async with served(api) as url, api.client(api.admin_key) as admin:
        made = (await admin.post("/api-keys", json=body)).json()
        async with (
            api.client(made["api_key"]) as client,
            httpx.AsyncClient(timeout=20) as http,
            http.stream(
                "GET", f"{url}/users/{api.user}/orders/events", headers=client.headers
            ) as stream,
        ):
            assert not await refused(client, api.user)  # remembered from here on
            async with asyncio.timeout(3):
                async for _ in stream.aiter_lines():
                    pass
            await seconds_until_refused(client, api.user)
        assert datetime.now(UTC) - ends < timedelta(seconds=0.5)
        listed = (await admin.get("/api-keys")).json()["api_keys"]
        assert made["id"] not in {key["id"] for key in listed}
        past = await admin.post("/api-keys", json=body)
        assert past.status_code == 422


async def test_keys_are_listed_in_pages_and_a_session_cannot_be_rotated(
    api: ServedApi,
) -> None:
    async with api.client(api.admin_key) as admin:
        body = {"role": "operator", "label": "one of five"}
        made = [(await admin.post("/api-keys", json=body)).json()["id"] for _ in range(5)]
        listed: list[str] = []
        cursor: str | None = None
        while len(listed) < len(made):
            params = {"limit": 2} | ({"cursor": cursor} if cursor else {})
            page = (await admin.get("/api-keys", params=params)).json()
            assert len(page["api_keys"]) <= 2
            listed += [key["id"] for key in page["api_keys"]]
            cursor = page["next_cursor"]
        assert listed[:5] == made[::-1]
        async with api.services.database.session() as session:
            until = datetime.now(UTC) + timedelta(hours=1)
            begun = await api_keys.begin_session(
                session, "a token of a session", uuid.UUID(made[0]), until
            )
        answer = await admin.post(f"/api-keys/{begun.id}/rotate", json={})
        assert (answer.status_code, answer.json()["code"]) == (404, "API_KEY_NOT_FOUND")
        assert (await admin.get("/api-keys", params={"cursor": "x"})).status_code == 422


async def test_a_key_is_rotated_with_an_overlap(
    settings: Settings, commands: CommandForker, tmp_path: Path
) -> None:
    async with running_api(settings) as api, running_api(settings) as other:
        async with operator(api, commands, tmp_path) as berth, other.client(api.key) as old:
            await asyncio.wait_for(other.services.notifications.listening.wait(), 10)
            assert not await refused(old, api.user)
            [key] = json.loads((await berth("api-keys", "list", "--user", api.user, "--json")).out)[
                "api_keys"
            ]
            rotated = await berth("api-keys", "rotate", key["id"])
            async with other.client(rotated.out.strip()) as new:
                assert not await refused(new, api.user)
            assert not await refused(old, api.user)
            both = json.loads((await berth("api-keys", "list", "--user", api.user, "--json")).out)[
                "api_keys"
            ]
            expires_at = {row["id"]: row["expires_at"] for row in both}.pop(key["id"])
            hours = (datetime.fromisoformat(expires_at) - datetime.now(UTC)).total_seconds() / 3600
            assert 23.9 < hours < 24
            assert {(row["role"], row["label"]) for row in both} == {("user", "the first key")}
            assert (await berth("api-keys", "rotate", key["id"], "--hours", "0")).code == 0
            assert await seconds_until_refused(old, api.user) < AT_ONCE
            assert "API_KEY_NOT_FOUND" in (await berth("api-keys", "rotate", key["id"])).err
        async with api.services.database.session() as session:
            statement = text(
                "select data->>'to' from audit_trail where action = 'api_key.rotated' order by id"
            )
            noted = (await session.scalars(statement)).all()
    assert set(noted) > {f"key:{row['id']}" for row in both if row["id"] != key["id"]}


async def test_an_administrator_keeps_the_list_of_images(
    api: ServedApi, commands: CommandForker, tmp_path: Path
) -> None:
    async with operator(api, commands, tmp_path) as berth:
        assert (await berth("images", "allow", IMAGE, "--reason", "0.1.1")).code == 0
        assert IMAGE in (await berth("images", "list")).out
        assert (await berth("images", "forbid", IMAGE)).code == 0
        assert IMAGE not in (await berth("images", "list")).out
        assert "IMAGE_NOT_ALLOWED" in (await berth("images", "forbid", IMAGE)).err


@pytest.mark.parametrize(
    ("launcher", "image", "code"),
    [
        ("docker", "worker:latest", 422),
        ("docker", IMAGE, 200),
        ("docker", "sha256:" + "ab" * 32, 200),
        ("ecs", "berth-worker", 422),
        ("ecs", "berth-worker:7", 200),
        ("process", "whatever", 200),
    ],
)
async def test_an_image_is_named_exactly(
    settings: Settings, launcher: str, image: str, code: int
) -> None:
    changed = settings.model_copy(update={"launcher": launcher})
    async with running_api(changed) as api, api.client(api.admin_key) as admin:
        assert (await admin.put("/images", json={"image": image})).status_code == code


async def test_an_api_key_is_stored_as_a_hash_and_ends_when_revoked(api: ServedApi) -> None:
    async with api.services.database.session() as session:
        token = api.services.tokens.make()
        key = await api_keys.create_api_key(session, token, "user", api.user)
    async with api.services.database.session() as session:
        stored = await api_keys.find_api_key(session, token)
        assert stored is not None
        assert token != stored.key_hash
        assert await api_keys.find_api_key(session, "berth_guess") is None
        await api_keys.revoke_api_key(session, key.id)
        stranger = str(uuid.uuid4())
        assert await api_keys.revoked_among(session, [str(key.id), stranger]) == {
            str(key.id),
            stranger,
        }
    async with api.services.database.session() as session:
        assert await api_keys.find_api_key(session, token) is None
        assert key.id not in {
            row.id for row in await api_keys.list_api_keys(session, user_id=api.user)
        }
        rows = await api_keys.list_api_keys(session, user_id=api.user, revoked=True)
        row = next(candidate for candidate in rows if candidate.id == key.id)
        revoked, used = row.revoked_at, row.last_used_at
        assert revoked is not None
        assert used is not None
        assert (await api_keys.revoke_api_key(session, key.id)).revoked_at == revoked
        with pytest.raises(api_keys.ApiKeyNotFound):
            await api_keys.revoke_api_key(session, uuid.uuid4())
