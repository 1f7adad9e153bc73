"""Clients that send the head of their request slowly, or without an end, on real sockets."""

from __future__ import annotations

import asyncio
import time
from collections.abc import AsyncIterator
from contextlib import suppress

import httpx
import pytest
import uvicorn
from fastapi import FastAPI, Request
from fastapi.responses import StreamingResponse

from api.http.middleware import MAX_HEAD_BYTES, MAX_PIPELINED_REQUESTS, HeadLimitingProtocol
from infra.local.process import free_port
from tests.support.waiting import until

HEAD = b"GET /hello HTTP/1.1\r\nHost: here\r\n"
STREAM = b"GET /stream HTTP/1.1\r\nHost: here\r\n\r\n"
CHUNKED = b"POST /headers HTTP/1.1\r\nHost: here\r\nTransfer-Encoding: chunked\r\n\r\n2\r\n{}\r\n"
CLIENTS = 1000


class HastyProtocol(HeadLimitingProtocol):
    #: Twice what a busy machine needs until a thousand clients are connected and one is served.
    head_time = 8.0


@pytest.fixture
async def port() -> AsyncIterator[int]:
    app = FastAPI()

    @app.get("/hello")
    async def hello() -> str:
        return "hello"

    @app.get("/stream")
    async def stream() -> StreamingResponse:
        async def lines() -> AsyncIterator[str]:
            yield "first\n"
            await asyncio.Event().wait()

        return StreamingResponse(lines())

    @app.post("/headers")
    async def headers(request: Request) -> list[str]:
        """The names of the request's headers, once all of it is here."""
        await request.body()
        return sorted(request.headers)

    number = free_port()
    config = uvicorn.Config(app, port=number, http=HastyProtocol, log_config=None, access_log=False)
    server = uvicorn.Server(config)
    serving = asyncio.create_task(server.serve())
    await until(lambda: server.started)
    yield number
    server.should_exit = True
    await serving


async def drip(port: int, first: bytes, then: bytes, pause: float) -> tuple[float, bytes]:
    """Sends `first`, and then bytes of `then` one by one; returns when it was cut off (s), and the
    answer."""
    reader, writer = await asyncio.open_connection("127.0.0.1", port)
    began = time.monotonic()
    writer.write(first)
    read = asyncio.create_task(reader.read())
    with suppress(ConnectionError):
        for number in range(10_000):
            await asyncio.wait({read}, timeout=pause)
            if read.done():
                break
            writer.write(then[number % len(then) :][:1])
    writer.close()
    return time.monotonic() - began, (b"" if read.exception() else read.result())


async def test_a_thousand_clients_with_slow_heads_are_cut_off_and_others_are_served(
    port: int,
) -> None:
    slow = [asyncio.create_task(drip(port, b"", HEAD, 0.25)) for _ in range(CLIENTS)]
    await asyncio.sleep(0.5)
    async with httpx.AsyncClient(base_url=f"http://127.0.0.1:{port}") as client:
        assert (await client.get("/hello")).json() == "hello"
    assert not any(task.done() for task in slow)
    async with asyncio.timeout(30):
        assert {answer for _, answer in await asyncio.gather(*slow)} == {b""}


@pytest.mark.parametrize("then", [HEAD, b"\r\n"])
async def test_a_slow_second_head_on_a_kept_connection_is_cut_off_too(
    port: int, then: bytes
) -> None:
    async with asyncio.timeout(30):
        seconds, answer = await drip(port, HEAD + b"\r\n", then, 0.25)
    assert answer.startswith(b"HTTP/1.1 200")
    assert answer.count(b"HTTP/1.1") == 1
    assert seconds >= HastyProtocol.head_time


async def test_a_slow_body_is_not_a_slow_head(port: int) -> None:
    head = b"GET /hello HTTP/1.1\r\nHost: here\r\nConnection: close\r\nContent-Length: 9\r\n\r\n"
    async with asyncio.timeout(30):
        _, answer = await drip(port, head, b"x" * 9, 0.3)
    assert answer.startswith(b"HTTP/1.1 200")


async def test_a_head_without_an_end_is_refused_at_once(port: int) -> None:
    reader, writer = await asyncio.open_connection("127.0.0.1", port)
    began = time.monotonic()
    writer.write(HEAD + b"x: " + b"y" * 2 * MAX_HEAD_BYTES)
    answer = await reader.read()
    assert answer.startswith(b"HTTP/1.1 431 ")
    assert b'"code": "HEAD_TOO_LARGE"' in answer
    assert time.monotonic() - began < HastyProtocol.head_time
    writer.close()


async def exchange(port: int, *parts: bytes) -> bytes:
    """Sends the first part, each other one when an answer to the one before has begun; returns all
    that came until the connection ended."""
    reader, writer = await asyncio.open_connection("127.0.0.1", port)
    answer = b""
    with suppress(ConnectionError):
        for part in parts[:-1]:
            writer.write(part)
            answer += await reader.readuntil(b"first\n")
        writer.write(parts[-1])
        while read := await reader.read(65536):
            answer += read
    writer.close()
    return answer


async def test_trailers_and_a_head_behind_an_open_answer_are_bounded_and_no_trailer_is_a_header(
    port: int,
) -> None:
    began = time.monotonic()
    last = CHUNKED.replace(b"Host:", b"Connection: close\r\nHost:")
    answer = await exchange(port, last + b"0\r\nX-Api-Key: secret\r\n\r\n")
    assert answer.startswith(b"HTTP/1.1 200 ")
    assert answer.endswith(b'["connection","host","transfer-encoding"]')

    trailers = await exchange(port, CHUNKED + b"0\r\n" + b"a:b\r\n" * MAX_HEAD_BYTES)
    assert trailers.startswith(b"HTTP/1.1 431 ")
    extension = await exchange(port, CHUNKED + b"2;" + b"x" * 2 * MAX_HEAD_BYTES)
    assert extension.startswith(b"HTTP/1.1 431 ")

    # 431 would be taken for a part of the answer that is under way.
    second = await exchange(port, STREAM, HEAD + b"x: " + b"y" * 2 * MAX_HEAD_BYTES)
    assert second.count(b"HTTP/1.1 ") == 1
    queued = await exchange(port, STREAM, (HEAD + b"\r\n") * 2 * MAX_PIPELINED_REQUESTS)
    assert queued.count(b"HTTP/1.1 ") == 1
    assert time.monotonic() - began < HastyProtocol.head_time


async def test_requests_that_wait_for_an_earlier_answer_are_answered_in_order(port: int) -> None:
    last = HEAD + b"Connection: close\r\n\r\n"
    answer = await exchange(port, (HEAD + b"\r\n") * (MAX_PIPELINED_REQUESTS // 2) + last)
    assert answer.count(b"HTTP/1.1 200 ") == MAX_PIPELINED_REQUESTS // 2 + 1


async def test_a_slow_head_behind_an_open_answer_is_cut_off_and_an_open_answer_alone_is_not(
    port: int,
) -> None:
    reader, writer = await asyncio.open_connection("127.0.0.1", port)
    try:
        writer.write(STREAM)
        await reader.readuntil(b"first\n\r\n")
        async with asyncio.timeout(30):
            seconds, _ = await drip(port, STREAM, HEAD, 0.25)
        assert seconds >= HastyProtocol.head_time
        with pytest.raises(TimeoutError):
            await asyncio.wait_for(reader.read(1), 1)
    finally:
        writer.close()
