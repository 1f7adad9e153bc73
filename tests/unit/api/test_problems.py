"""Every error becomes a problem of one shape."""

from __future__ import annotations

import asyncio
from typing import Any

import httpx
import pytest
from fastapi import FastAPI, Request
from redis.exceptions import ConnectionError as RedisConnectionError
from starlette.types import Message
from structlog.testing import capture_logs

from api.http import errors, problems
from api.http.middleware import MAX_BODY_BYTES, RequestMiddleware
from api.users.schemas import CredentialsRequest
from infra.database.engine import DatabaseUnavailable
from infra.database.users import UserExists
from worker_runtime.protocol.errors import (
    BerthError,
    BrokerUnreachable,
    Draining,
    LoginLimited,
    LoginRejected,
    RateLimited,
    UnknownAccount,
    from_code,
)


def application() -> FastAPI:
    app = FastAPI()
    problems.install(app)
    app.add_middleware(RequestMiddleware)

    @app.get("/raise/{code}")
    async def raise_code(code: str) -> None:
        raise from_code(code, "the detail")

    @app.get("/redis")
    async def redis_down() -> None:
        raise RedisConnectionError("Error 111 connecting to 10.0.0.1:6379")

    @app.get("/bug")
    async def bug() -> None:
        raise RuntimeError("canary in a message")

    @app.put("/secret")
    async def secret(body: CredentialsRequest) -> None: ...

    @app.post("/echo")
    async def echo(request: Request) -> int:
        return len(await request.body())

    return app


def client() -> httpx.AsyncClient:
    return httpx.AsyncClient(transport=httpx.ASGITransport(application()), base_url="http://api")


@pytest.mark.parametrize(
    ("kind", "status"),
    [
        (errors.Unauthenticated, 401),
        (errors.Forbidden, 403),
        (errors.NotFound, 404),
        (errors.NoWorker, 404),
        (UserExists, 409),
        (errors.ClientOrderIdReused, 409),
        (UnknownAccount, 422),
        (LoginRejected, 422),
        (LoginLimited, 429),
        (Draining, 503),
        (BrokerUnreachable, 503),
        (errors.OrchestratorUnavailable, 503),
        (BerthError, 500),
    ],
)
async def test_an_error_has_one_status_and_its_code(kind: type[BerthError], status: int) -> None:
    async with client() as http:
        answer = await http.get(f"/raise/{kind.code}")
    body = answer.json()
    assert answer.status_code == body["status"] == status
    assert answer.headers["content-type"] == "application/problem+json"
    assert body["code"] == kind.code
    assert body["title"] == kind.title()
    assert body["instance"] == f"/raise/{kind.code}"
    assert body["request_id"] == answer.headers["x-request-id"]
    assert ("retry-after" in answer.headers) == body["retryable"] == kind.retryable


def test_retry_after_says_how_long_it_takes_where_that_is_known() -> None:
    assert problems.response_of(RateLimited(retry_after=7.2)).headers["retry-after"] == "8"
    assert problems.response_of(RateLimited()).headers["retry-after"] == "1"


@pytest.mark.parametrize(
    ("kind", "name"),
    [
        (errors.TemporalUnavailable, "temporal"),
        (errors.ValkeyUnavailable, "valkey"),
        (DatabaseUnavailable, "postgresql"),
    ],
)
async def test_a_missing_server_is_named(kind: type[BerthError], name: str) -> None:
    async with client() as http:
        answer = await http.get(f"/raise/{kind.code}")
    assert answer.status_code == 503
    assert answer.json()["dependency"] == name


async def test_a_redis_error_is_valkey_being_away_and_only_the_log_shows_an_address() -> None:
    with capture_logs() as lines:
        async with client() as http:
            answer = await http.get("/redis")
    [line] = [entry for entry in lines if entry["event"] == "request"]
    assert line["cause"].startswith("ConnectionError: ")
    assert "10.0.0.1" in line["cause"]
    assert answer.status_code == 503
    assert answer.json()["code"] == "VALKEY_UNAVAILABLE"
    assert "10.0.0.1" not in answer.text


async def test_a_fault_of_ours_is_a_problem_without_its_text() -> None:
    async with client() as http:
        answer = await http.get("/bug")
    assert answer.status_code == 500
    assert answer.json()["code"] == "INTERNAL"
    assert "canary" not in answer.text


@pytest.mark.parametrize(
    ("method", "path", "status"), [("GET", "/none", 404), ("POST", "/bug", 405)]
)
async def test_errors_of_the_router_are_problems(method: str, path: str, status: int) -> None:
    async with client() as http:
        answer = await http.request(method, path)
    assert answer.status_code == answer.json()["status"] == status
    assert answer.headers["content-type"] == "application/problem+json"
    assert (status == 405) == ("allow" in answer.headers)


@pytest.mark.parametrize(
    "content",
    [
        b'{"broker": "canary", "api_key": "canary", "secret_key": "canary", "canary": 1}',
        b'{"api_key": "canary',
        b'["canary"]',
        b"\xff\xfe canary",
    ],
)
async def test_a_validation_problem_says_where_and_never_what(content: bytes) -> None:
    async with client() as http:
        answer = await http.put(
            "/secret", content=content, headers={"content-type": "application/json"}
        )
    assert answer.status_code == 422
    body: dict[str, Any] = answer.json()
    assert body["code"] == "INVALID_REQUEST"
    assert all(set(error) == {"loc", "msg", "type"} for error in body.get("errors", ()))
    assert '"canary"' not in answer.text.replace('"loc": ["body", "canary"]', "")


async def chunks(size: int) -> Any:
    for _ in range(size // 1024):
        yield b"x" * 1024


@pytest.mark.parametrize("chunked", [False, True])
async def test_a_body_over_the_limit_is_refused(chunked: bool) -> None:
    async with client() as http:
        fits = await http.post(
            "/echo", content=chunks(MAX_BODY_BYTES) if chunked else b"x" * MAX_BODY_BYTES
        )
        over = await http.post(
            "/echo",
            content=chunks(MAX_BODY_BYTES + 1024) if chunked else b"x" * (MAX_BODY_BYTES + 1),
        )
    assert fits.json() == MAX_BODY_BYTES
    assert over.status_code == 413
    assert over.json()["code"] == "BODY_TOO_LARGE"


@pytest.mark.parametrize(
    "headers", [[(b"content-length", b"300")], [(b"transfer-encoding", b"chunked")]]
)
async def test_a_body_that_does_not_arrive_in_time_is_given_up(
    headers: list[tuple[bytes, bytes]],
) -> None:
    sent: list[Message] = []
    begun = False

    async def trickle() -> Message:
        """Sends the first byte, and then nothing."""
        nonlocal begun
        if begun:
            await asyncio.get_running_loop().create_future()
        begun = True
        return {"type": "http.request", "body": b"x", "more_body": True}

    async def send(message: Message) -> None:
        await asyncio.sleep(0)
        sent.append(message)

    async def never(*_: object) -> None:
        raise AssertionError("nothing is asked of the application")

    scope = {"type": "http", "method": "POST", "path": "/echo", "headers": headers}
    await asyncio.wait_for(RequestMiddleware(never, body_time=0.05)(scope, trickle, send), 10)
    assert sent[0]["status"] == 408
    assert b"BODY_TOO_SLOW" in sent[1]["body"]


@pytest.mark.parametrize(
    ("given", "taken"),
    [("trace-1.a_B", True), ("two words", False), ("x" * 65, False), ("", False), ('"}', False)],
)
async def test_a_request_id_is_taken_over_if_it_is_fit_for_a_log(given: str, taken: bool) -> None:
    async with client() as http:
        answer = await http.post("/echo", headers={"x-request-id": given})
    assert (answer.headers["x-request-id"] == given) is taken
    assert len(answer.headers["x-request-id"]) > 0
