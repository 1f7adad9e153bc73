"""Each route is in the table of rights, and each role gets what the table says."""

from __future__ import annotations

import re
from pathlib import Path
from types import SimpleNamespace

import httpx
import pytest

from api.app import create_app
from api.http.auth import Authenticator, Principal
from api.http.rights import RIGHTS, Role
from infra.settings import Settings

APP = create_app(Settings(data_dir=Path("unused")))
#: Method and path of every route that takes a key.
ROUTES = [
    f"{method.upper()} {path.removeprefix('/v1')}"
    for path, operations in APP.openapi()["paths"].items()
    for method, operation in operations.items()
    if operation.get("security")
]
#: For the parts of paths that are no free text.
PARTS = {"order_id": "0" * 32, "webhook_id": "0" * 32, "key_id": "0" * 32, "number": "1", "user_id": "alice"}


def test_the_table_has_every_route_with_a_key_and_no_other() -> None:
    assert set(RIGHTS) == set(ROUTES)


@pytest.mark.parametrize("role", Role)
@pytest.mark.parametrize("route", ROUTES)
async def test_each_role_is_let_through_or_refused_as_the_table_says(route: str, role: Role) -> None:
    async def look_up(_: str) -> Principal:
        return Principal("k", role, "alice" if role is Role.USER else None)

    # Nothing behind the authentication is there: whoever is let through meets an error of another kind.
    APP.state.services = SimpleNamespace(authenticator=Authenticator(look_up, 1.0), limits=None)
    method, _, path = route.partition(" ")
    path = re.sub(r"{(\w+)}", lambda found: PARTS.get(found[1], "x"), path)
    async with httpx.AsyncClient(transport=httpx.ASGITransport(APP), base_url="http://api") as client:
        answer = await client.request(method, f"/v1{path}", headers={"X-API-Key": "k"})
    refused = answer.status_code == 403 and answer.json()["code"] == "FORBIDDEN"
    assert refused == (role not in RIGHTS[route])


def test_an_operator_has_no_right_to_what_makes_keys_stores_secrets_or_trades() -> None:
    refused = {route for route, roles in RIGHTS.items() if Role.OPERATOR not in roles}
    account = "/users/{user_id}/accounts/{account_id}"
    assert refused == {
        "POST /users",
        "POST /users/{user_id}/enable",
        "DELETE /users/{user_id}",
        f"DELETE {account}",
        "GET /api-keys",
        "POST /api-keys",
        "POST /api-keys/{key_id}/rotate",
        "DELETE /api-keys/{key_id}",
        "PUT /images",
        "DELETE /images",
        f"PUT {account}/credentials",
        "PUT /users/{user_id}/statement-addresses",
        "POST /users/{user_id}/webhooks",
        "PATCH /users/{user_id}/webhooks/{webhook_id}",
        "POST /users/{user_id}/webhooks/{webhook_id}/resume",
        "POST /users/{user_id}/webhooks/{webhook_id}/rotate",
        "POST /users/{user_id}/orders",
        "POST /orders/{order_id}/replace",
        f"POST {account}/intents",
    }


def test_an_administrator_has_every_right() -> None:
    assert all(Role.ADMIN in roles for roles in RIGHTS.values())
