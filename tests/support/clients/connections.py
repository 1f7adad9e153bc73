"""Contains clients' calls from a test's event loop, and a network that loses what it carries."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from typing import Any

from infra.client.client import AsyncBerthClient, BerthClient
from infra.client.events import StreamEvent
from infra.local.process import HOST

#: Makes the client of the test's kind, for an address and a key.
Connect = Callable[[str, str], Any]


class ClientCalls:
    """A client of either kind: calls are awaited, streams read by `take`."""

    def __init__(self, client: BerthClient | AsyncBerthClient) -> None:
        self.client = client

    async def __call__(self, name: str, *args: Any, **given: Any) -> Any:
        method = getattr(self.client, name)
        if isinstance(self.client, BerthClient):
            return await asyncio.to_thread(method, *args, **given)
        return await method(*args, **given)

    async def take(self, stream: Any) -> StreamEvent[Any]:
        """The next event of a stream."""
        next_event = (
            asyncio.to_thread(next, stream)
            if isinstance(self.client, BerthClient)
            else anext(stream)
        )
        event: StreamEvent[Any] = await asyncio.wait_for(next_event, 30)
        return event

    async def leave(self, stream: Any) -> None:
        if isinstance(self.client, BerthClient):
            await asyncio.to_thread(stream.close)
        else:
            await stream.aclose()


class ApiLine:
    """The way to an API: it loses answers, and is cut on demand."""

    def __init__(self, port: int) -> None:
        self._port = port
        self._open: set[asyncio.StreamWriter] = set()
        #: So many answers are still to be lost: the request goes through, and the connection is
        #: cut.
        self.lose = 0
        #: So many connections were made.
        self.made = 0
        self.url = ""

    def cut(self) -> None:
        """Ends all connections."""
        for writer in self._open:
            writer.transport.abort()

    async def accepted(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        there, away = await asyncio.open_connection(HOST, self._port)
        self._open |= {writer, away}
        self.made += 1
        try:
            await asyncio.gather(
                self._carry(reader, away), self._carry(there, writer, answers=True)
            )
        except ConnectionError:
            pass
        finally:
            self._open -= {writer, away}
            writer.close()
            away.close()

    async def _carry(
        self, source: asyncio.StreamReader, target: asyncio.StreamWriter, *, answers: bool = False
    ) -> None:
        while data := await source.read(65536):
            if answers and self.lose:
                self.lose -= 1
                break
            target.write(data)
        raise ConnectionResetError  # ends the other direction


@asynccontextmanager
async def line_to(url: str) -> AsyncIterator[ApiLine]:
    """A line to the API at this address."""
    line = ApiLine(int(url.removesuffix("/v1").rsplit(":", 1)[1]))
    server = await asyncio.start_server(line.accepted, HOST, 0)
    line.url = f"http://{HOST}:{server.sockets[0].getsockname()[1]}"
    async with server:
        yield line
        line.cut()
