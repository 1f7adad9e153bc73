"""Requests that place an order: what is taken, what is refused and how, and what outcomes
become."""

from __future__ import annotations

import json
from dataclasses import dataclass, field
from datetime import UTC, datetime
from types import SimpleNamespace

import httpx
import pytest
from redis.exceptions import ConnectionError as RedisConnectionError
from structlog.testing import capture_logs

from api.app import create_app
from api.http.auth import Authenticator, Principal
from api.http.errors import ClientOrderIdReused
from api.http.middleware import MAX_BODY_BYTES
from api.http.rights import Role
from api.orders import schemas
from api.orders.placer import PlacementResult
from infra.database.engine import DatabaseUnavailable
from infra.settings import Settings
from worker_runtime.protocol.errors import LoginLimited
from worker_runtime.protocol.messages import OrderState, PriceType, Side, TimeInForce

BODY = {
    "client_order_id": "a-1",
    "account_id": "main",
    "symbol": "2330",
    "side": "buy",
    "quantity": 1,
}
PLAIN = {**BODY, "price": "1005.50"}
JSON = {"Content-Type": "application/json"}
PLAIN_TEXT = {"Content-Type": "text/plain"}
WITH_PARAMETER = {"Content-Type": "application/json; a=b"}
WAIT = 4.0


def with_plain(**changes: object) -> bytes:
    return json.dumps({**PLAIN, **changes}).encode()


def an_order(state: OrderState = OrderState.FILLED) -> schemas.OrderView:
    return schemas.OrderView(
        id="0199f1c2a5b87c3e9d4f6a1b2c3d4e5f",
        client_order_id="a-1",
        user_id="alice",
        account_id="main",
        symbol="2330",
        side=Side.BUY,
        quantity=1,
        price_type=PriceType.LIMIT,
        price=None,
        time_in_force=TimeInForce.ROD,
        state=state,
        final=state == OrderState.FILLED,
        broker_order_id="P1",
        filled_quantity=1,
        average_price=None,
        code=None,
        reason=None,
        accepted_at=datetime(2026, 11, 21, tzinfo=UTC),
    )


@dataclass
class ScriptedPlacer:
    """Gives every order the same outcome."""

    outcome: PlacementResult | Exception = field(
        default_factory=lambda: PlacementResult(an_order(), new=True)
    )
    asked: list[tuple[str, schemas.OrderRequest, float, str]] = field(default_factory=list)

    async def place_order(
        self, user_id: str, body: schemas.OrderRequest, wait: float, actor: str
    ) -> PlacementResult:
        self.asked.append((user_id, body, wait, actor))
        if isinstance(self.outcome, Exception):
            raise self.outcome
        return self.outcome


async def lookup(key: str) -> Principal | None:
    if key == "down":
        raise DatabaseUnavailable("PostgreSQL: away")
    roles = {"alice": Role.USER, "bob": Role.USER, "staff": Role.ADMIN}
    return Principal(f"key-{key}", roles[key], key) if key in roles else None


def client(placer: ScriptedPlacer, key: str | None = "alice") -> httpx.AsyncClient:
    app = create_app(Settings.model_construct())
    app.state.services = SimpleNamespace(
        settings=Settings.model_construct(order_wait=WAIT),
        placer=placer,
        authenticator=Authenticator(lookup, 60.0),
        limits=None,
    )
    headers = {"X-Request-ID": "r-1", **({"X-API-Key": key} if key else {})}
    return httpx.AsyncClient(
        transport=httpx.ASGITransport(app), base_url="http://api/v1", headers=headers
    )


async def place(
    placer: ScriptedPlacer, content: bytes, headers: dict[str, str], path: str, key: str | None
) -> httpx.Response:
    async with client(placer, key) as http:
        return await http.post(path, content=content, headers=headers)


@pytest.mark.parametrize(
    ("content", "headers", "path", "key", "status"),
    [
        (json.dumps(PLAIN).encode(), JSON, "/users/alice/orders", "alice", 201),
        (json.dumps(PLAIN).encode(), JSON, "/users/alice/orders", "staff", 201),
        (json.dumps(PLAIN).encode(), JSON, "/users/alice/orders", "bob", 404),
        (json.dumps(PLAIN).encode(), JSON, "/users/alice/orders", "nobody", 401),
        (json.dumps(PLAIN).encode(), JSON, "/users/alice/orders", None, 401),
        (json.dumps(PLAIN).encode(), JSON, "/users/alice/orders", "down", 503),
        (json.dumps(PLAIN).encode(), JSON, "/users/alice/orders/", "alice", 201),
        (json.dumps(PLAIN).encode(), JSON, f"/users/{'a' * 64}/orders", "staff", 201),
        (json.dumps(PLAIN).encode(), JSON, f"/users/{'a' * 65}/orders", "staff", 422),
        (json.dumps(PLAIN).encode(), JSON, "/users/-1/orders", "alice", 422),
        (json.dumps(PLAIN).encode(), JSON, "/users/alice%0A/orders", "staff", 422),
        (json.dumps(PLAIN).encode(), {}, "/users/alice/orders", "alice", 422),
        (json.dumps(PLAIN).encode(), PLAIN_TEXT, "/users/alice/orders", "alice", 422),
        (json.dumps(PLAIN).encode(), WITH_PARAMETER, "/users/alice/orders", "alice", 201),
        (json.dumps(BODY).encode(), JSON, "/users/alice/orders", "alice", 422),
        (json.dumps(BODY).encode(), JSON, "/users/alice/orders", "nobody", 401),
        (with_plain(quantity="1"), JSON, "/users/alice/orders", "alice", 422),
        (with_plain(prise=1), JSON, "/users/alice/orders", "alice", 422),
        (with_plain(price=float("nan")), JSON, "/users/alice/orders", "alice", 422),
        (json.dumps(PLAIN).encode("utf-16"), JSON, "/users/alice/orders", "alice", 201),
        (b'{"price": 1, "price": 2', JSON, "/users/alice/orders", "alice", 422),
        (b"\xff", JSON, "/users/alice/orders", "alice", 422),
        (b"[" * 20_000, JSON, "/users/alice/orders", "alice", 422),
        (b"null", JSON, "/users/alice/orders", "alice", 422),
        (b"", JSON, "/users/alice/orders", "alice", 422),
        (b" " * (MAX_BODY_BYTES + 1), JSON, "/users/alice/orders", "alice", 413),
    ],
)  # fmt: skip
async def test_only_a_complete_order_of_somebody_who_may_place_it_is_taken(
    content: bytes, headers: dict[str, str], path: str, key: str | None, status: int
) -> None:
    placer = ScriptedPlacer()
    answer = await place(placer, content, headers, path, key)
    assert answer.status_code == status, answer.text
    assert len(placer.asked) == (1 if status == 201 else 0)


@pytest.mark.parametrize(
    ("outcome", "status"),
    [
        (PlacementResult(an_order(OrderState.QUEUED), new=True), 202),
        (PlacementResult(an_order(), new=False), 200),
        (PlacementResult(an_order(), new=True, failure=LoginLimited("later")), 429),
        (ClientOrderIdReused(), 409),
        (RedisConnectionError("Error 111 connecting to 10.0.0.1:6379"), 503),
        (RuntimeError("canary"), 500),
    ],
)
async def test_an_outcome_has_its_status(outcome: PlacementResult | Exception, status: int) -> None:
    content = json.dumps(PLAIN).encode()
    with capture_logs():  # the default renderer takes seconds for the traceback of a 500
        answer = await place(ScriptedPlacer(outcome), content, JSON, "/users/alice/orders", "alice")
    assert answer.status_code == status
    assert b"canary" not in answer.content
    assert b"10.0.0.1" not in answer.content


async def test_of_two_keys_the_first_counts() -> None:
    keys = [("X-API-Key", "alice"), ("X-API-Key", "bob"), ("Content-Type", "application/json")]
    async with client(ScriptedPlacer(), None) as http:
        answer = await http.post("/users/alice/orders", content=json.dumps(PLAIN), headers=keys)
    assert answer.status_code == 201
