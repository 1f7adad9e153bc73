"""The direct way of an order answers as its route does, and takes the plain requests."""

from __future__ import annotations

import json
from dataclasses import dataclass, field
from datetime import UTC, datetime
from types import SimpleNamespace
from typing import Any

import httpx
import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st
from redis.exceptions import ConnectionError as RedisConnectionError
from starlette.types import Message, Receive, Scope, Send

from api.app import create_app
from api.auth import Authenticator, Principal, Role
from api.direct import DirectOrders
from api.errors import ClientOrderIdReused
from api.middleware import MAX_BODY
from api.schemas import orders as schemas
from api.services.placing import Placed
from infra.database.engine import DatabaseUnavailable
from infra.settings import Settings
from worker_runtime.protocol.errors import LoginLimited
from worker_runtime.protocol.messages import OrderState, PriceType, Side, TimeInForce

BODY = {"client_order_id": "a-1", "account_id": "main", "symbol": "2330", "side": "buy", "quantity": 1}
PLAIN = {**BODY, "price": "1005.50"}
JSON = {"Content-Type": "application/json"}
WITH_PARAMETER = {"Content-Type": "application/json; a=b"}
WAIT = 4.0


def an_order(state: OrderState = OrderState.FILLED) -> schemas.Order:
    return schemas.Order(
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
class ScriptedPlacing:
    """Says the same of every order."""

    outcome: Placed | Exception = field(default_factory=lambda: Placed(an_order(), new=True))
    asked: list[tuple[str, schemas.PlaceOrder, float, str]] = field(default_factory=list)

    async def place(self, user_id: str, body: schemas.PlaceOrder, wait: float, actor: str) -> Placed:
        self.asked.append((user_id, body, wait, actor))
        if isinstance(self.outcome, Exception):
            raise self.outcome
        return self.outcome


async def lookup(key: str) -> Principal | None:
    if key == "down":
        raise DatabaseUnavailable("PostgreSQL: away")
    roles = {"alice": Role.USER, "bob": Role.USER, "staff": Role.OPERATOR}
    return Principal(f"key-{key}", roles[key], key) if key in roles else None


def client(placing: ScriptedPlacing, key: str | None = "alice") -> httpx.AsyncClient:
    app = create_app(Settings.model_construct())
    app.state.services = SimpleNamespace(
        settings=Settings.model_construct(order_wait=WAIT),
        placing=placing,
        authenticator=Authenticator(lookup, 60.0),
    )
    headers = {"X-Request-ID": "r-1", **({"X-API-Key": key} if key else {})}
    return httpx.AsyncClient(transport=httpx.ASGITransport(app), base_url="http://api/v1", headers=headers)


async def both(
    placing: ScriptedPlacing, content: bytes, headers: dict[str, str], path: str, key: str | None
) -> tuple[httpx.Response, httpx.Response]:
    """The answer, and that of the route: a query is not for the direct way."""
    async with client(placing, key) as http:
        direct = await http.post(path, content=content, headers=headers)
        return direct, await http.post(f"{path}?wait={WAIT}", content=content, headers=headers)


def same(one: httpx.Response, other: httpx.Response) -> bool:
    return (one.status_code, one.content, one.headers.multi_items()) == (
        other.status_code,
        other.content,
        other.headers.multi_items(),
    )


@pytest.mark.parametrize(
    ("content", "headers", "path", "key", "status"),
    [
        (json.dumps(PLAIN).encode(), JSON, "/users/alice/orders", "alice", 201),
        (json.dumps(PLAIN).encode(), JSON, "/users/alice/orders", "staff", 201),
        (json.dumps(PLAIN).encode(), JSON, "/users/alice/orders", "bob", 404),
        (json.dumps(PLAIN).encode(), JSON, "/users/alice/orders", "nobody", 401),
        (json.dumps(PLAIN).encode(), JSON, "/users/alice/orders", None, 401),
        (json.dumps(PLAIN).encode(), JSON, "/users/alice/orders", "down", 503),
        (json.dumps(PLAIN).encode(), JSON, "/users/alice/orders/", "alice", 307),
        (json.dumps(PLAIN).encode(), JSON, f"/users/{'a' * 64}/orders", "staff", 201),
        (json.dumps(PLAIN).encode(), JSON, f"/users/{'a' * 65}/orders", "staff", 422),
        (json.dumps(PLAIN).encode(), JSON, "/users/-1/orders", "alice", 422),
        (json.dumps(PLAIN).encode(), JSON, "/users/alice%0A/orders", "staff", 422),
        (json.dumps(PLAIN).encode(), {}, "/users/alice/orders", "alice", 422),
        (json.dumps(PLAIN).encode(), {"Content-Type": "text/plain"}, "/users/alice/orders", "alice", 422),
        (json.dumps(PLAIN).encode(), WITH_PARAMETER, "/users/alice/orders", "alice", 201),
        (json.dumps(BODY).encode(), JSON, "/users/alice/orders", "alice", 422),
        (json.dumps(BODY).encode(), JSON, "/users/alice/orders", "nobody", 401),
        (json.dumps({**PLAIN, "quantity": "1"}).encode(), JSON, "/users/alice/orders", "alice", 422),
        (json.dumps({**PLAIN, "prise": 1}).encode(), JSON, "/users/alice/orders", "alice", 422),
        (json.dumps({**PLAIN, "price": float("nan")}).encode(), JSON, "/users/alice/orders", "alice", 422),
        (json.dumps(PLAIN).encode("utf-16"), JSON, "/users/alice/orders", "alice", 201),
        (b'{"price": 1, "price": 2', JSON, "/users/alice/orders", "alice", 422),
        (b"\xff", JSON, "/users/alice/orders", "alice", 422),
        (b"[" * 20_000, JSON, "/users/alice/orders", "alice", 422),
        (b"null", JSON, "/users/alice/orders", "alice", 422),
        (b"", JSON, "/users/alice/orders", "alice", 422),
        (b" " * (MAX_BODY + 1), JSON, "/users/alice/orders", "alice", 413),
    ],
)  # fmt: skip
async def test_a_request_is_answered_as_by_the_route(
    content: bytes, headers: dict[str, str], path: str, key: str | None, status: int
) -> None:
    placing = ScriptedPlacing()
    direct, routed = await both(placing, content, headers, path, key)
    assert direct.status_code == status, direct.text
    if status != 307:  # this names the address with its query
        assert same(direct, routed), (direct.content, routed.content)
    assert len(placing.asked) == (2 if status == 201 else 0)
    assert placing.asked[:1] == placing.asked[1:]


@pytest.mark.parametrize(
    ("outcome", "status"),
    [
        (Placed(an_order(OrderState.QUEUED), new=True), 202),
        (Placed(an_order(), new=False), 200),
        (Placed(an_order(), new=True, failure=LoginLimited("later")), 429),
        (ClientOrderIdReused(), 409),
        (RedisConnectionError("Error 111 connecting to 10.0.0.1:6379"), 503),
        (RuntimeError("canary"), 500),
    ],
)
async def test_an_outcome_is_answered_as_by_the_route(outcome: Placed | Exception, status: int) -> None:
    content = json.dumps(PLAIN).encode()
    direct, routed = await both(ScriptedPlacing(outcome), content, JSON, "/users/alice/orders", "alice")
    assert direct.status_code == status
    assert same(direct, routed)


_numbers = st.from_regex(r"-?[0-9]{1,30}(\.[0-9]{1,30})?([eE][+-]?[0-9]{1,3})?", fullmatch=True)
_values = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | st.text(),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(), inner, max_size=3),
    max_leaves=8,
)


@given(
    st.binary(max_size=12)
    | _numbers.map(str.encode)
    | _values.map(lambda value: json.dumps(value).encode())
    | _values.map(lambda value: json.dumps(value, ensure_ascii=False).encode("utf-8", "surrogatepass"))
)
def test_what_the_direct_way_can_read_the_route_reads_the_same(text: bytes) -> None:
    try:
        found = msgspec.json.decode(text)
    except ValueError:
        return  # the route takes it
    assert repr(json.loads(text)) == repr(found)


async def test_of_two_keys_the_first_counts() -> None:
    keys = [("X-API-Key", "alice"), ("X-API-Key", "bob"), ("Content-Type", "application/json")]
    async with client(ScriptedPlacing(), None) as http:
        answer = await http.post("/users/alice/orders", content=json.dumps(PLAIN), headers=keys)
    assert answer.status_code == 201


def scope_of(path: str = "/v1/users/alice/orders", query: bytes = b"") -> Scope:
    services = SimpleNamespace(
        settings=Settings.model_construct(order_wait=WAIT),
        placing=ScriptedPlacing(),
        authenticator=Authenticator(lookup, 60.0),
    )
    return {
        "type": "http",
        "method": "POST",
        "path": path,
        "query_string": query,
        "headers": [(b"content-type", b"application/json"), (b"x-api-key", b"alice")],
        "app": SimpleNamespace(state=SimpleNamespace(services=services)),
        "state": {},
    }


async def call(scope: Scope, messages: list[Message]) -> tuple[list[Message], list[Message]]:
    """What the direct way sent, and what it left to the route."""
    sent: list[Message] = []
    left: list[Message] = []
    coming = iter(messages)

    async def receive() -> Message:
        return next(coming)

    async def send(message: Message) -> None:
        sent.append(dict(message))

    async def route(scope: Scope, receive: Receive, send: Send) -> None:
        left.extend([await receive() for _ in messages])

    await DirectOrders(route)(scope, receive, send)
    return sent, left


def pieces(*parts: bytes) -> list[Message]:
    return [
        {"type": "http.request", "body": part, "more_body": number < len(parts)}
        for number, part in enumerate(parts, 1)
    ]


async def test_a_plain_order_does_not_come_to_the_route() -> None:
    scope = scope_of()
    text = json.dumps(PLAIN).encode()
    sent, left = await call(scope, pieces(text[:20], text[20:]))
    assert (sent[0]["status"], left) == (201, [])
    assert scope["state"]["principal"].key_id == "key-alice"


@pytest.mark.parametrize(
    ("scope", "messages"),
    [
        (scope_of(query=b"wait=0"), pieces(json.dumps(PLAIN).encode())),
        (scope_of(path="/v1/users/alice/intents"), pieces(b"{}")),
        (scope_of(), pieces(b"{", b"}")),
        (scope_of(), [*pieces(b"{", b"}")[:1], {"type": "http.disconnect"}]),
    ],
)
async def test_what_is_left_to_the_route_comes_there_whole(scope: Scope, messages: list[Message]) -> None:
    assert await call(scope, messages) == ([], messages)


async def test_other_protocols_pass() -> None:
    lifespan: dict[str, Any] = {"type": "lifespan"}
    assert await call(lifespan, [{"type": "lifespan.startup"}]) == ([], [{"type": "lifespan.startup"}])
