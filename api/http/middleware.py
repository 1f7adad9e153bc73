"""Handles what every request needs: its id, its source, its path, limits of its head and body, an
access log line, a last resort.

Plain ASGI, because Starlette's `BaseHTTPMiddleware`
runs each request in a task and a stream of its own.
"""

import asyncio
import json
import re
import time
from collections.abc import Callable, MutableMapping, Sequence
from dataclasses import dataclass, field
from secrets import token_hex
from typing import Any

import structlog
from starlette.types import ASGIApp, Message, Receive, Scope, Send
from uvicorn.protocols.http.httptools_impl import HttpToolsProtocol, RequestResponseCycle

from api.http.errors import BodyTooLarge, BodyTooSlow, HeadTooLarge, TooManyRequests
from api.http.limits import RequestLimits
from api.http.paths import ROOT_PATH, local_path, public_path
from api.http.problems import MEDIA_TYPE, body_of, response_of
from api.http.proxies import TrustedProxies
from infra.process_metrics import count_request
from worker_runtime.protocol.errors import BerthError

#: Bytes. An order takes 300, credentials with a certificate about 8,000.
MAX_BODY_BYTES = 64 * 1024
#: Bytes of a body with a job, whose arguments have 64 KiB and may be written with escapes; and of
#: one with a batch of jobs.
MAX_BODY_BYTES_BY_PATH = {"/v1/jobs": 128 * 1024, "/v1/jobs/batch": 1024 * 1024}
#: Seconds in which a body has to arrive. No client of ours takes a second for 64 KiB.
BODY_TIMEOUT_S = 10.0
#: Bytes of a request's head, which uvicorn does not bound. A token and a long query take about
#: 2,000. Trailers, and the framing of a chunk, have as many.
MAX_HEAD_BYTES = 64 * 1024
#: Bytes that are parsed before the limits are looked at again; a read has up to 256,000.
MAX_PART_BYTES = 16 * 1024
#: Requests of one connection that wait for the answer to an earlier one. Proxies send none so.
MAX_PIPELINED_REQUESTS = 32
#: Seconds in which a head has to arrive, which uvicorn does not bound.
HEAD_TIMEOUT_S = 10.0
#: Seconds for which the rest of a head that is too large is read, and thrown away.
DISCARD_TIMEOUT_S = 1.0
_REQUEST_ID = re.compile(r"[A-Za-z0-9._-]{1,64}")


class HeadLimitingProtocol(HttpToolsProtocol):
    """Bounds what a client sends besides bodies, and closes a connection whose next head is late.

    That is heads, also behind an answer that is under way, trailers, the framing of chunks, and
    requests that wait for an answer to an earlier one. Trailers are ignored: they arrive when
    proxies and limits have read the head.
    """

    head_time = HEAD_TIMEOUT_S
    _refused = False
    #: The oldest request whose answer is not complete, or the last one.
    _running: RequestResponseCycle | None = None

    def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]
        super().connection_made(transport)
        self._head_due: asyncio.TimerHandle | None = None
        self._await_head()

    @property
    def _is_answering(self) -> bool:
        return self._running is not None and not self._running.response_complete

    def _await_head(self) -> None:
        if self._head_due is None:
            #: Bytes since a head was complete or a body continued.
            self._size = 0
            self._head_due = self.loop.call_later(self.head_time, self._head_is_late)

    def _head_is_late(self) -> None:
        self._head_due = None
        if self.flow.read_paused:  # requests wait for an answer: the client is not to blame
            self._head_due = self.loop.call_later(self.head_time, self._head_is_late)
        elif self._is_answering:
            self.transport.abort()
        else:
            self.transport.close()

    def data_received(self, data: bytes) -> None:
        for start in range(0, len(data), MAX_PART_BYTES):
            if self._refused or self.transport.is_closing():
                return
            self._receive(data[start : start + MAX_PART_BYTES])

    def _receive(self, data: bytes) -> None:
        if self._head_due is None and not self._is_answering:
            self._await_head()
        self._size += len(data)
        super().data_received(data)
        if self._size > MAX_HEAD_BYTES or len(self.pipeline) > MAX_PIPELINED_REQUESTS:
            self._refuse()

    def _refuse(self) -> None:
        """Answers 431, and reads on for a moment: closed at once, the answer could be lost.

        While an earlier request has no complete answer, 431 would be taken for it: then the
        connection ends without one.
        """
        self._refused = True
        self._head_arrived()
        if self._running is not None and self._is_answering:
            if self._running.response_started or not self._running.more_body:
                self.transport.abort()
                return
            self._disconnect(self._running)
        body = json.dumps(body_of(HeadTooLarge())).encode()
        head = (
            b"HTTP/1.1 431 Request Header Fields Too Large\r\n"
            b"Content-Type: %b\r\nContent-Length: %d\r\n"
        )
        self.transport.write(
            head % (MEDIA_TYPE.encode(), len(body)) + b"Connection: close\r\n\r\n" + body
        )
        self.loop.call_later(DISCARD_TIMEOUT_S, self.transport.close)

    def on_message_begin(self) -> None:
        super().on_message_begin()
        self._await_head()

    def on_headers_complete(self) -> None:
        self._head_arrived()
        self._size = 0
        super().on_headers_complete()
        if not self.pipeline:
            self._running = self.cycle
        # The request keeps the list that it has; trailers go into this one, which nobody reads.
        self.headers = []

    def on_body(self, body: bytes) -> None:
        if self._is_answering:
            self._size = 0
        super().on_body(body)

    def on_response_complete(self) -> None:
        if self.pipeline:
            self._running = self.pipeline[-1][0]
        super().on_response_complete()

    def connection_lost(self, exc: Exception | None) -> None:
        self._head_arrived()
        super().connection_lost(exc)
        if self._running is not None and self._is_answering:
            self._disconnect(self._running)  # uvicorn tells the newest request only

    @staticmethod
    def _disconnect(cycle: RequestResponseCycle) -> None:
        cycle.disconnected = True
        cycle.message_event.set()

    def _head_arrived(self) -> None:
        if self._head_due is not None:
            self._head_due.cancel()
            self._head_due = None


class _HeadAnswered(Exception):
    """A HEAD request has its answer, and what would follow is its body."""


@dataclass(eq=False, repr=False)
class RequestMiddleware:
    """ASGI middleware: `X-Request-ID` in and out, 408, 413, 429, access log, 500 as a problem.

    Routes get a request as if it had come without proxies: from its own client, with the path below
    the root path. A HEAD is a GET whose body is not sent.
    """

    app: ASGIApp
    body_time: float = BODY_TIMEOUT_S
    #: The limits of requests, once they are made.
    limits: Callable[[], RequestLimits | None] = lambda: None
    proxies: TrustedProxies = field(default_factory=TrustedProxies)
    root_path: str = ""

    def __post_init__(self) -> None:
        self.log = structlog.get_logger()

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            await self.app(scope, receive, send)
            return
        began = time.perf_counter()
        self.proxies.resolve(scope)
        scope[ROOT_PATH] = self.root_path
        scope["path"] = local_path(scope["path"], self.root_path)
        method = scope["method"]
        if method == "HEAD":
            scope = {**scope, "method": "GET"}  # the server's own stays: it sends no body
            send = _without_body(send)
        # The first of a repeated header counts, as in Starlette.
        headers = dict(reversed(scope["headers"]))
        request_id = _accepted_id(headers.get(b"x-request-id", b"")) or token_hex(16)
        scope.setdefault("state", {})["request_id"] = request_id
        status = 0
        limited: Sequence[tuple[bytes, bytes]] = ()

        async def send_with_id(message: Message) -> None:
            nonlocal status
            if message["type"] == "http.response.start":
                status = message["status"]
                own = (b"x-request-id", request_id.encode())
                message["headers"] = [*message.get("headers", ()), own, *limited]
            await send(message)

        async def fail(error: BerthError) -> None:
            scope["berth.code"] = error.code
            response = response_of(error, instance=public_path(scope), request_id=request_id)
            await response(scope, receive, send_with_id)

        if (limits := self.limits()) is not None:
            try:
                limit = limits.charge_request(scope, headers)
                limited = limits.headers_of(limit) if limit else ()
            except TooManyRequests as error:  # no line in the log for each: it is a flood
                limited = error.headers
                await fail(error)
                return
        try:
            try:
                async with asyncio.timeout(self.body_time):
                    body = await _limited(
                        headers, receive, MAX_BODY_BYTES_BY_PATH.get(scope["path"], MAX_BODY_BYTES)
                    )
            except TimeoutError:
                await fail(BodyTooSlow())
            else:
                if body is None:
                    await fail(BodyTooLarge())
                else:
                    await self.app(scope, body, send_with_id)
        except _HeadAnswered:
            pass
        except Exception:  # the boundary of a request: whatever happened, the caller gets a problem
            self.log.exception("request_failed", request_id=request_id, path=public_path(scope))
            if status:
                raise  # the answer has begun: only cutting the connection tells the caller
            await fail(BerthError("an error on our side; the log has it under this request id"))
        finally:
            seconds = time.perf_counter() - began
            route, code = getattr(scope.get("route"), "path", ""), scope.get("berth.code")
            count_request(method, route, status, code, seconds)
            self.log.info(
                "request",
                request_id=request_id,
                method=method,
                path=public_path(scope),
                status=status,
                ms=round(seconds * 1000, 2),
                **_caller(scope),
            )


def _without_body(send: Send) -> Send:
    """Returns a `send` that ends an answer behind its head; raises `_HeadAnswered` when a stream
    would begin."""

    async def send_head(message: Message) -> None:
        if message["type"] == "http.response.body":
            await send({"type": "http.response.body", "body": b"", "more_body": False})
            if message.get("more_body", False):
                raise _HeadAnswered
        else:
            await send(message)

    return send_head


def _caller(scope: MutableMapping[str, Any]) -> dict[str, str]:
    fields = {
        name: scope[f"berth.{name}"] for name in ("code", "cause") if f"berth.{name}" in scope
    }
    if principal := scope["state"].get("principal"):
        fields["key_id"] = str(principal.key_id)
    return fields


def _accepted_id(given: bytes) -> str:
    """Returns the caller's request id if it is fit for a log line, else ''."""
    text = given.decode("latin-1")
    return text if _REQUEST_ID.fullmatch(text) else ""


async def _limited(headers: dict[bytes, bytes], receive: Receive, max_bytes: int) -> Receive | None:
    """Returns a `receive` for a body within the limit, when all of it is here; None for a larger
    one."""
    length = headers.get(b"content-length")
    # The HTTP parser holds the client to the length it names.
    if length is not None and not (length.isdigit() and int(length) <= max_bytes):
        return None
    if length == b"0" or (length is None and b"transfer-encoding" not in headers):
        return receive
    # Chunked: nobody said how much comes, so it is counted before anyone reads it.
    chunks: list[bytes] = []
    size = 0
    has_more = True
    while has_more:
        message = await receive()
        if message["type"] != "http.request":
            return replay_messages([message], receive)
        chunks.append(message.get("body", b""))
        size += len(chunks[-1])
        if size > max_bytes:
            return None
        has_more = message.get("more_body", False)
    return replay_messages(
        [{"type": "http.request", "body": b"".join(chunks), "more_body": False}], receive
    )


def replay_messages(messages: list[Message], receive: Receive) -> Receive:
    """Returns a `receive` that first gives these messages again."""
    remaining = iter(messages)

    async def replay() -> Message:
        message = next(remaining, None)
        return await receive() if message is None else message

    return replay
