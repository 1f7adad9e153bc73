"""Handles what every request needs: its id, the limit of its body, an access log line, and a last resort.

Plain ASGI, because Starlette's `BaseHTTPMiddleware` runs each request in a task and a stream of its own.
"""

from __future__ import annotations

import re
import time
from collections.abc import MutableMapping
from secrets import token_hex
from typing import Any

import structlog
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from api.http.errors import BodyTooLarge
from api.http.problems import redacted_path, response_of
from worker_runtime.protocol.errors import BerthError

#: Bytes. An order takes 300, credentials with a certificate about 8,000.
MAX_BODY = 64 * 1024
_REQUEST_ID = re.compile(r"[A-Za-z0-9._-]{1,64}")


class RequestMiddleware:
    """ASGI middleware: `X-Request-ID` in and out, 413, access log, 500 as a problem."""

    def __init__(self, app: ASGIApp) -> None:
        self.app = app
        self.log = structlog.get_logger()

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            await self.app(scope, receive, send)
            return
        began = time.perf_counter()
        headers = dict(scope["headers"])
        request_id = _accepted_id(headers.get(b"x-request-id", b"")) or token_hex(16)
        scope.setdefault("state", {})["request_id"] = request_id
        status = 0

        async def send_with_id(message: Message) -> None:
            nonlocal status
            if message["type"] == "http.response.start":
                status = message["status"]
                message["headers"] = [*message.get("headers", ()), (b"x-request-id", request_id.encode())]
            await send(message)

        async def fail(error: BerthError) -> None:
            scope["berth.code"] = error.code
            response = response_of(error, instance=redacted_path(scope["path"]), request_id=request_id)
            await response(scope, receive, send_with_id)

        try:
            body = await _limited(headers, receive)
            if body is None:
                await fail(BodyTooLarge())
            else:
                await self.app(scope, body, send_with_id)
        except Exception:  # the boundary of a request: whatever happened, the caller gets a problem
            self.log.exception("request_failed", request_id=request_id, path=redacted_path(scope["path"]))
            if status:
                raise  # the answer has begun: only cutting the connection tells the caller
            await fail(BerthError("an error on our side; the log has it under this request id"))
        finally:
            self.log.info(
                "request",
                request_id=request_id,
                method=scope["method"],
                path=redacted_path(scope["path"]),
                status=status,
                ms=round((time.perf_counter() - began) * 1000, 2),
                **_caller(scope),
            )


def _caller(scope: MutableMapping[str, Any]) -> dict[str, str]:
    found = {}
    if principal := scope["state"].get("principal"):
        found["key_id"] = str(principal.key_id)
    if code := scope.get("berth.code"):
        found["code"] = code
    return found


def _accepted_id(given: bytes) -> str:
    """The caller's request id if it is fit for a log line, else ''."""
    text = given.decode("latin-1")
    return text if _REQUEST_ID.fullmatch(text) else ""


async def _limited(headers: dict[bytes, bytes], receive: Receive) -> Receive | None:
    """`receive` for a body within the limit; None for a larger one."""
    length = headers.get(b"content-length")
    if length is not None:  # the HTTP parser holds the client to it
        return receive if length.isdigit() and int(length) <= MAX_BODY else None
    if b"transfer-encoding" not in headers:
        return receive
    # Chunked: nobody said how much comes, so it is counted before anyone reads it.
    chunks: list[bytes] = []
    size = 0
    more = True
    while more:
        message = await receive()
        if message["type"] != "http.request":
            break
        chunks.append(message.get("body", b""))
        size += len(chunks[-1])
        if size > MAX_BODY:
            return None
        more = message.get("more_body", False)
    return replay_messages([{"type": "http.request", "body": b"".join(chunks), "more_body": False}], receive)


def replay_messages(messages: list[Message], receive: Receive) -> Receive:
    """`receive` that first gives these messages again."""
    left = iter(messages)

    async def replay() -> Message:
        message = next(left, None)
        return await receive() if message is None else message

    return replay
