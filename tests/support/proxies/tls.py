"""TLS in front of a real server: the programs of our packages are built without it."""

import asyncio
import contextlib
import socket
import ssl
import threading
from pathlib import Path
from typing import Self

from infra.local.process import HOST
from tests.support.proxies.temporal_tls import CertificateAuthority

#: PostgreSQL's first message of a client that wants TLS: its length and a code.
_WANTS_TLS = (8).to_bytes(4, "big") + (80877103).to_bytes(4, "big")


class TlsFront:
    """Serves on `localhost` with a certificate of its own authority; a loop of its own in a
    thread."""

    def __init__(
        self, port: int, folder: Path, *, postgres: bool = False, name: str = "localhost"
    ) -> None:
        """`port`: the real server's. `postgres`: clients ask for TLS first. `name`: in the
        certificate."""
        self._backend = port
        self._postgres = postgres
        authority = CertificateAuthority(folder, "authority")
        self.authority = authority.certificate
        self._context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
        self._context.load_cert_chain(*authority.issue("server", names=(name,)))
        self.port = 0
        #: Connections that came through, by TLS.
        self.secured = 0
        self._loop = asyncio.new_event_loop()
        self._thread = threading.Thread(target=self._loop.run_forever, name="tls front")
        self._links: dict[asyncio.Task[None], list[asyncio.StreamWriter]] = {}
        #: Of all connections so far, both ends. One that was closed may still wait for its peer.
        self._writers: list[asyncio.StreamWriter] = []
        self._sockets: list[socket.socket] = []

    def __enter__(self) -> Self:
        self._thread.start()
        context = None if self._postgres else self._context
        started = asyncio.start_server(self._serve, HOST, 0, ssl=context)
        self._server = asyncio.run_coroutine_threadsafe(started, self._loop).result(10)
        self.port = self._server.sockets[0].getsockname()[1]
        return self

    def __exit__(self, *_: object) -> None:
        asyncio.run_coroutine_threadsafe(self._close(), self._loop).result(10)
        self._loop.call_soon_threadsafe(self._loop.stop)
        self._thread.join(10)
        self._loop.close()

    def cut(self) -> None:
        """Aborts all connections."""
        asyncio.run_coroutine_threadsafe(self._abort(), self._loop).result(10)

    async def _abort(self) -> None:
        for writer in [linked_writer for pair in self._links.values() for linked_writer in pair]:
            writer.transport.abort()

    async def _close(self) -> None:
        """Returns when no connection is open: one that is left to the collector fails a later
        test."""
        self._server.close()
        async with asyncio.timeout(5):
            # One that is on its way in is aborted when it is there.
            while asyncio.all_tasks() - {asyncio.current_task()} or any(
                end.fileno() >= 0 for end in self._sockets
            ):
                for writer in self._writers:
                    writer.transport.abort()
                await asyncio.sleep(0.01)

    def _keep(self, writer: asyncio.StreamWriter) -> None:
        self._writers.append(writer)
        self._sockets.append(writer.get_extra_info("socket"))

    async def _serve(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        task = asyncio.current_task()
        assert task is not None
        self._links[task] = [writer]
        self._keep(writer)
        try:
            with contextlib.suppress(OSError, asyncio.IncompleteReadError):
                await self._pass_on(reader, writer, self._links[task])
        finally:
            for linked_writer in self._links.pop(task):
                linked_writer.close()

    async def _pass_on(
        self,
        reader: asyncio.StreamReader,
        writer: asyncio.StreamWriter,
        ends: list[asyncio.StreamWriter],
    ) -> None:
        if self._postgres:
            if await reader.readexactly(8) != _WANTS_TLS:
                return
            writer.write(b"S")
            await writer.start_tls(self._context)
        self.secured += 1
        back, forth = await asyncio.open_connection(HOST, self._backend)
        ends.append(forth)
        self._keep(forth)
        pumps = [
            asyncio.create_task(_pump(reader, forth)),
            asyncio.create_task(_pump(back, writer)),
        ]
        await asyncio.wait(pumps, return_when=asyncio.FIRST_COMPLETED)
        for pump in pumps:
            pump.cancel()
        await asyncio.gather(*pumps, return_exceptions=True)


async def _pump(source: asyncio.StreamReader, sink: asyncio.StreamWriter) -> None:
    while data := await source.read(65536):
        sink.write(data)
        await sink.drain()
