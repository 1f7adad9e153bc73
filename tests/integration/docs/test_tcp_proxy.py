"""The proxy in front of compose's Temporal, on loopback."""

from __future__ import annotations

import asyncio
import os
import subprocess
import sys
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager, closing, suppress

import pytest

from infra.compose.tcp_proxy import CHUNK_BYTES, TcpProxy, main
from infra.local.process import HOST, accepts, free_port
from tests.support.systems.local import until

#: More than the buffers of all sockets on the way hold.
MUCH = 64 * 1024 * 1024
Handler = Callable[[asyncio.StreamReader, asyncio.StreamWriter], Awaitable[None]]


async def echo(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
    while chunk := await reader.read(CHUNK_BYTES):
        writer.write(chunk)
        await writer.drain()
    writer.close()


async def all_connections_end() -> None:
    """Each has a task in the proxy and one in the server, which end with it."""
    if tasks := asyncio.all_tasks() - {asyncio.current_task()}:
        _, pending = await asyncio.wait(tasks, timeout=10)
        assert pending == set()
    await asyncio.sleep(0)  # for what is left to do at closed sockets


@asynccontextmanager
async def proxy_to(handler: Handler) -> AsyncIterator[int]:
    """Yields the port of a proxy in front of a server with this handler."""
    async with await asyncio.start_server(handler, HOST, 0) as server:
        target = server.sockets[0].getsockname()[1]
        async with await TcpProxy(HOST, target).listen(HOST, 0) as listening:
            yield listening.sockets[0].getsockname()[1]
        await all_connections_end()


async def test_all_bytes_arrive_in_both_directions_and_then_the_end() -> None:
    async with proxy_to(echo) as port:
        reader, writer = await asyncio.open_connection(HOST, port)
        sent = os.urandom(3 * 1024 * 1024)
        received = asyncio.create_task(reader.read(-1))
        writer.write(sent)
        await writer.drain()
        writer.write_eof()
        assert await received == sent
        writer.close()


async def test_a_client_that_reads_nothing_stops_the_reading_of_the_server() -> None:
    written = 0
    blocked = asyncio.Event()

    async def pour(_: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        nonlocal written
        try:
            while written < MUCH:
                writer.write(bytes(CHUNK_BYTES))
                async with asyncio.timeout(1):
                    await writer.drain()
                written += CHUNK_BYTES
        except TimeoutError:
            blocked.set()
        writer.transport.abort()

    async with proxy_to(pour) as port:
        _, writer = await asyncio.open_connection(HOST, port, limit=CHUNK_BYTES)
        async with asyncio.timeout(30):
            await blocked.wait()
        assert written < MUCH
        writer.close()


@pytest.mark.parametrize("side", ["client", "server"])
async def test_a_connection_that_one_side_aborts_ends_on_the_other(side: str) -> None:
    ended = asyncio.Event()

    async def serve(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        writer.write(await reader.readexactly(1))
        await writer.drain()
        if side == "server":
            writer.transport.abort()
            return
        with suppress(OSError):
            await reader.read(-1)
        ended.set()
        writer.close()

    async with proxy_to(serve) as port:
        reader, writer = await asyncio.open_connection(HOST, port)
        writer.write(b"x")
        assert await reader.readexactly(1) == b"x"
        if side == "client":
            writer.transport.abort()
            async with asyncio.timeout(10):
                await ended.wait()
        else:
            async with asyncio.timeout(10):
                with suppress(ConnectionResetError):
                    assert await reader.read(-1) == b""
            writer.close()


async def test_clients_are_hung_up_on_while_the_server_is_away_and_served_when_it_is_back(
    capfd: pytest.CaptureFixture[str],
) -> None:
    target = free_port()

    async def ask(port: int) -> bytes:
        reader, writer = await asyncio.open_connection(HOST, port)
        with closing(writer):
            writer.write(b"x")
            try:
                return await reader.read(1)
            except ConnectionResetError:
                return b""

    async with await TcpProxy(HOST, target).listen(HOST, 0) as listening:
        port = listening.sockets[0].getsockname()[1]
        async with asyncio.timeout(10):
            assert [await ask(port) for _ in range(3)] == [b"", b"", b""]
            async with await asyncio.start_server(echo, HOST, target):
                assert await ask(port) == b"x"
                await all_connections_end()
    lines = capfd.readouterr().err.splitlines()
    assert [line.split(": ")[0] for line in lines] == [
        f"{HOST}:{target} does not answer",
        f"{HOST}:{target} answers again",
    ], "one line for each change"


@pytest.mark.parametrize("arguments", [[], ["temporal"], ["temporal:"], [":7233"], ["a:b"]])
def test_a_target_that_is_no_host_and_port_is_refused(
    arguments: list[str], capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(arguments) == 2
    assert "HOST:PORT" in capsys.readouterr().err


def test_it_listens_on_the_servers_port() -> None:
    port = free_port()
    with subprocess.Popen(
        [sys.executable, "-m", "infra.compose.tcp_proxy", f"{HOST}:{port}"]
    ) as proxy:
        try:
            until(lambda: accepts(port), "proxy")
        finally:
            proxy.terminate()
