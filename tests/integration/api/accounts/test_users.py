"""Users, keys and credentials: who may do what, and what is never shown."""

from __future__ import annotations

import asyncio
import base64
from collections.abc import AsyncIterator
from typing import Any

import httpx
import pytest
from sqlalchemy import text

from api.http.middleware import MAX_BODY_BYTES
from infra.database import accounts
from infra.database.engine import Database
from infra.settings import Settings
from infra.vault import vault
from infra.vault.key_pairs import load_ring
from tests.support.systems.api import ServedApi, StartWorker, an_order, make_key
from worker_runtime.protocol.bounds import MAX_ACCOUNTS

#: A PKCS#12 in a form that Berth cannot open, which it stores all the same.
CERTIFICATE = b"\x30\x80canary-certificate"
CREDENTIALS = {
    "broker": "shioaji",
    "broker_type": "stock",
    "simulation": False,
    "api_key": "canary-api-key",
    "secret_key": "canary-secret-key",
    "person_id": "canary-person",
    "ca_certificate": base64.b64encode(CERTIFICATE).decode(),
    "ca_password": "canary-ca-password",
}


@pytest.fixture
async def database(settings: Settings) -> AsyncIterator[Database]:
    database = Database(settings.database_url, pool_size=1)
    yield database
    await database.close()


async def keys_of(api: ServedApi) -> dict[str, str | None]:
    """A key for each row of the matrix."""
    async with api.client(api.admin_key) as admin:
        stranger = (await admin.post("/users", json={"user_id": f"{api.user}-stranger"})).json()[
            "api_key"
        ]
    return {
        "none": None,
        "wrong": "berth_no-such-key",
        "stranger": stranger,
        "owner": api.key,
        "operator": await make_key(api.settings, "operator"),
        "admin": api.admin_key,
    }


async def test_each_role_may_do_what_its_rights_allow(
    api: ServedApi, start_worker: StartWorker
) -> None:
    await start_worker(api.user)
    keys = await keys_of(api)
    async with api.client(api.key) as owner:
        order_id = (await owner.post(f"/users/{api.user}/orders", json=an_order(0))).json()["id"]
    credentials = {"broker": "paper", "api_key": "k", "secret_key": "s"}
    # 503: allowed, and stopped only by Temporal, which is down here.
    matrix: dict[tuple[str, str], dict[str, int]] = {
        ("POST", "/users"): {"stranger": 403, "owner": 403, "operator": 403, "admin": 201},
        ("PUT", f"/users/{api.user}/accounts/main/credentials"): {
            "stranger": 404,
            "owner": 200,
            "operator": 403,
        },
        ("POST", f"/users/{api.user}/orders"): {"stranger": 404, "owner": 201, "operator": 403},
        ("GET", f"/orders/{order_id}"): {"stranger": 404, "owner": 200},
        ("GET", f"/users/{api.user}/worker"): {"stranger": 404, "owner": 503},
        ("POST", f"/users/{api.user}/worker/start"): {"stranger": 404, "owner": 503},
        ("POST", f"/users/{api.user}/worker/stop"): {"stranger": 404, "owner": 503},
        ("POST", f"/users/{api.user}/worker/reload-credentials"): {"stranger": 404, "owner": 503},
    }
    number = 0
    for (method, path), expected in matrix.items():
        for caller, key in keys.items():
            number += 1
            body: dict[str, Any] | None = None
            if path == "/users":
                body = {"user_id": f"{api.user}-{number}"}
            elif path.endswith("/credentials"):
                body = credentials
            elif path.endswith("/orders"):
                body = an_order(number)
            expected_status = (
                401 if caller in ("none", "wrong") else expected.get(caller, expected["owner"])
            )
            async with api.client(key) as client:
                answer = await client.request(method, path, json=body)
            assert answer.status_code == expected_status, (method, path, caller, answer.text)
            if expected_status >= 400:
                assert answer.headers["content-type"] == "application/problem+json"


async def test_a_new_user_has_a_key_that_works_once_shown(
    api: ServedApi, database: Database
) -> None:
    async with api.client(api.admin_key) as admin:
        made = await admin.post("/users", json={})
        user_id, key = made.json()["user_id"], made.json()["api_key"]
        again = await admin.post("/users", json={"user_id": user_id})
    assert (again.status_code, again.json()["code"]) == (409, "USER_EXISTS")
    async with api.client(key) as user:
        answer = await user.get(f"/users/{user_id}/worker")
    assert answer.status_code == 503  # known; only Temporal is missing
    async with database.session() as session:
        stored = await session.scalar(text("select string_agg(api_keys::text, ' ') from api_keys"))
    assert key not in str(stored)


async def test_credentials_are_stored_so_that_only_the_orchestrator_can_read_them(
    api: ServedApi, user: httpx.AsyncClient, database: Database, capfd: pytest.CaptureFixture[str]
) -> None:
    answer = await user.put(f"/users/{api.user}/accounts/real/credentials", json=CREDENTIALS)
    assert answer.status_code == 200
    assert answer.json() == {
        "user_id": api.user,
        "account_id": "real",
        "broker": "shioaji",
        "broker_type": "stock",
        "simulation": False,
        "version": 1,
        "login": "not_tried",
        "login_detail": "shioaji counts each login: the user's worker tries them",
        "reload_signalled": False,
        "certificate_expires_at": None,
    }
    async with database.session() as session:
        stored = {
            account.account_id: account
            for account in await accounts.accounts_of_user(session, api.user)
        }
        dump = ""
        for table in ("credentials", "broker_accounts", "audit_trail"):
            rows = text(f"select string_agg(t::text, ' ') from {table} t")  # noqa: S608
            dump += str(await session.scalar(rows))
    ring = load_ring(api.settings.master_key_file)
    clear = await vault.decrypt_credentials(
        stored["real"].encrypted, ring, user_id=api.user, account_id="real"
    )
    assert (clear.api_key, clear.secret_key) == ("canary-api-key", "canary-secret-key")
    assert (clear.ca_certificate, clear.ca_password) == (CERTIFICATE, "canary-ca-password")
    output = capfd.readouterr()
    for place in (dump, answer.text, output.out, output.err):
        assert "canary" not in place
        assert b"canary".hex() not in place
    assert "credentials.stored" in dump


async def test_credentials_that_do_not_fit_are_refused_without_an_echo(
    api: ServedApi, user: httpx.AsyncClient
) -> None:
    body = {**CREDENTIALS, "secret_key": "canary" * 100, "canary_field": 1, "broker": "canary"}
    answer = await user.put(f"/users/{api.user}/accounts/real/credentials", json=body)
    assert answer.status_code == 422
    assert "canary" not in answer.text.replace("canary_field", "")


async def test_a_user_that_does_not_exist_is_not_found(api: ServedApi) -> None:
    body = {"broker": "paper", "api_key": "k", "secret_key": "s"}
    async with api.client(api.admin_key) as admin:
        stored = await admin.put("/users/nobody/accounts/main/credentials", json=body)
        started = await admin.post("/users/nobody/worker/start")
    assert (stored.status_code, stored.json()["code"]) == (404, "USER_NOT_FOUND")
    assert (started.status_code, started.json()["code"]) == (404, "USER_NOT_FOUND")


async def test_a_body_over_64_kib_is_refused(api: ServedApi, user: httpx.AsyncClient) -> None:
    answer = await user.post(f"/users/{api.user}/orders", content=b"{" + b" " * MAX_BODY_BYTES)
    assert (answer.status_code, answer.json()["code"]) == (413, "BODY_TOO_LARGE")


async def test_a_user_has_a_maximum_of_accounts(api: ServedApi, user: httpx.AsyncClient) -> None:
    body = {"broker": "paper", "api_key": "k", "secret_key": "s"}

    async def store(account: str) -> httpx.Response:
        return await user.put(f"/users/{api.user}/accounts/{account}/credentials", json=body)

    answers = [await store(f"a{number}") for number in range(MAX_ACCOUNTS + 1)]
    refused = [answer for answer in answers if answer.status_code != 200]
    assert {(answer.status_code, answer.json()["code"]) for answer in refused} == {
        (409, "TOO_MANY_ACCOUNTS")
    }
    assert (await store("a0")).json()["version"] == 2
    at_once = await asyncio.gather(*(store(f"b{number}") for number in range(4)))
    assert {answer.status_code for answer in at_once} == {409}
