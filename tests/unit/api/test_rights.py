"""Each route is in the table of rights, and each role gets what the table says."""

from __future__ import annotations

import re
from contextlib import nullcontext
from pathlib import Path
from types import SimpleNamespace

import httpx
import pytest

from api.app import create_app
from api.http.auth import Authenticator, Principal
from api.http.errors import KeySourceRefused
from api.http.rights import RIGHTS, SCOPES_OF, Role, Scope, known_scopes
from infra.networks import parse_network
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
PARTS = {
    "order_id": "0" * 32,
    "webhook_id": "0" * 32,
    "key_id": "0" * 32,
    "number": "1",
    "user_id": "alice",
}


def test_the_table_has_every_route_with_a_key_and_no_other() -> None:
    assert set(RIGHTS) == set(ROUTES)


@pytest.mark.parametrize("role", Role)
@pytest.mark.parametrize("route", ROUTES)
async def test_each_role_is_let_through_or_refused_as_the_table_says(
    route: str, role: Role
) -> None:
    code = await code_of(route, role, None)
    assert (code == "FORBIDDEN") == (role not in RIGHTS[route].roles)
    assert code != "SCOPE_MISSING"  # a key of before has all scopes


@pytest.mark.parametrize("role", Role)
@pytest.mark.parametrize("route", ROUTES)
async def test_each_scope_is_let_through_or_refused_as_the_table_says(
    route: str, role: Role
) -> None:
    right = RIGHTS[route]
    needed = right.scopes_for(role)
    for scopes in (frozenset[Scope](), *(frozenset({scope}) for scope in Scope)):
        code = await code_of(route, role, scopes)
        if role not in right.roles:
            assert code == "FORBIDDEN"
        else:
            missing = not scopes.issuperset(needed) and right.or_scope not in scopes
            assert (code == "SCOPE_MISSING") == missing, scopes
    if role in right.roles:
        for scope in needed:
            others = frozenset(Scope) - {scope, right.or_scope}
            assert await code_of(route, role, others) == "SCOPE_MISSING"
        assert await code_of(route, role, frozenset(needed)) != "SCOPE_MISSING"


def test_what_lets_a_webhook_place_orders_needs_the_scope_for_orders_too() -> None:
    """Otherwise a key with `webhooks` alone would trade by a webhook that it makes."""
    hooks = {route for route in ROUTES if "/webhooks" in route and Role.USER in RIGHTS[route].roles}
    trading = {route for route in hooks if Scope.TRADE in RIGHTS[route].scopes_for(Role.USER)}
    webhook_path = "/users/{user_id}/webhooks/{webhook_id}"
    assert trading == {
        "POST /users/{user_id}/webhooks",
        f"PATCH {webhook_path}",
        f"POST {webhook_path}/resume",
        f"POST {webhook_path}/rotate",
    }


async def code_of(route: str, role: Role, scopes: frozenset[Scope] | None) -> str:
    """Returns the code with which a key of this role and these scopes is refused; '' if it is let
    through."""

    async def look_up(_: str) -> Principal:
        return Principal("k", role, "alice" if role is Role.USER else None, scopes=scopes)

    # There is nothing behind the authentication: a request that is let through meets another
    # kind of error.
    APP.state.services = SimpleNamespace(authenticator=Authenticator(look_up, 1.0), limits=None)
    method, _, path = route.partition(" ")
    path = re.sub(r"{(\w+)}", lambda placeholder: PARTS.get(placeholder[1], "x"), path)
    async with httpx.AsyncClient(
        transport=httpx.ASGITransport(APP), base_url="http://api"
    ) as client:
        answer = await client.request(method, f"/v1{path}", headers={"X-API-Key": "k"})
    if answer.status_code != 403:
        return ""
    problem = answer.json()
    if problem["code"] == "SCOPE_MISSING":
        assert any(f"`{scope}`" in problem["detail"] for scope in RIGHTS[route].scopes_for(role))
    return str(problem["code"])


def test_the_scopes_of_a_role_are_those_that_its_routes_need() -> None:
    assert SCOPES_OF[Role.USER] == {"read", "trade", "credentials", "webhooks", "jobs", "keys"}
    assert SCOPES_OF[Role.ADMIN] == frozenset(Scope)
    assert set(Scope) - SCOPES_OF[Role.OPERATOR] == {"credentials", "images"}
    free = {route for route, right in RIGHTS.items() if right.scope is None}
    assert free == {"GET /api-keys/self", "DELETE /api-keys/self"}


def test_a_read_scope_changes_nothing() -> None:
    writing = [route for route, right in RIGHTS.items() if not route.startswith("GET")]
    assert not [
        route for route in writing if Scope.READ in (RIGHTS[route].scope, RIGHTS[route].staff_scope)
    ]


def test_a_scope_of_a_later_release_grants_nothing() -> None:
    assert known_scopes(["read", "mint"]) == frozenset({Scope.READ})
    assert known_scopes(["mint"]) == frozenset()
    assert known_scopes(None) is None


@pytest.mark.parametrize(
    ("source", "peer", "refused"),
    [
        ("192.0.2.0/24", "192.0.2.7", False),
        ("192.0.2.0/24", "192.0.3.7", True),
        ("192.0.2.0/24", "::ffff:192.0.2.7", False),
        ("2001:db8::/32", "2001:db8::1", False),
        ("2001:db8::/32", "192.0.2.7", True),
        ("0.0.0.0/0", "unknown", True),
    ],
)
def test_a_key_with_sources_is_refused_from_elsewhere(
    source: str, peer: str, refused: bool
) -> None:
    caller = Principal("k", Role.USER, "alice", sources=(parse_network(source),))
    with pytest.raises(KeySourceRefused, match=re.escape(peer)) if refused else nullcontext():
        caller.require_source(peer)


def test_an_operator_has_no_right_to_what_makes_keys_stores_secrets_or_trades() -> None:
    refused = {route for route, right in RIGHTS.items() if Role.OPERATOR not in right.roles}
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
    assert all(Role.ADMIN in right.roles for right in RIGHTS.values())
