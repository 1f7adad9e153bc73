"""A TCP proxy on 127.0.0.1 whose connections can go silent: bytes vanish both ways, and nothing is
closed."""

from __future__ import annotations

import asyncio
import contextlib
import threading
from types import TracebackType
from typing import Self

from infra.local.process import HOST, free_port

_CHUNK = 65536


class _Pair:
    """One connection and its other half."""

    def __init__(self, near: asyncio.StreamWriter, far: asyncio.StreamWriter) -> None:
        self.near, self.far = near, far
        #: Whether what the client sends is lost, and what the server replies.
        self.deaf = self.silent = False

    def abort(self) -> None:
        self.near.transport.abort()
        self.far.transport.abort()


class SilentProxy:
    """Use it as a context manager. Runs in a thread of its own; its methods may be called from any
    thread."""

    def __init__(self, target: int = 0) -> None:
        self.port = free_port()
        #: The port of the real server; to be set before the first client connects.
        self.target = target
        #: Connections that were accepted so far.
        self.accepted = 0
        self._pairs: set[_Pair] = set()
        self._silences_new = False
        self._loop = asyncio.new_event_loop()
        self._thread = threading.Thread(
            target=self._run, name=f"silent-proxy-{self.port}", daemon=True
        )
        self._ready = threading.Event()

    @property
    def address(self) -> str:
        return f"{HOST}:{self.port}"

    def silence(self, *, new: bool = False, replies_only: bool = False) -> int:
        """Silences all present connections for ever, with `new` also those to come, until `heal`.

        With `replies_only` the server still hears what these are told. Returns how many there were.
        """

        async def silence() -> int:
            self._silences_new = new
            for pair in self._pairs:
                pair.silent, pair.deaf = True, not replies_only
            return len(self._pairs)

        return asyncio.run_coroutine_threadsafe(silence(), self._loop).result(10)

    def heal(self) -> None:
        """New connections are served; silenced ones stay silent."""
        self._loop.call_soon_threadsafe(setattr, self, "_silences_new", False)

    def __enter__(self) -> Self:
        self._thread.start()
        assert self._ready.wait(10)
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self._loop.call_soon_threadsafe(self._loop.stop)
        self._thread.join(10)
        self._loop.close()

    # --- in the thread ----------------------------------------------------------------------------

    def _run(self) -> None:
        asyncio.set_event_loop(self._loop)
        server = self._loop.run_until_complete(asyncio.start_server(self._accept, HOST, self.port))
        self._ready.set()
        self._loop.run_forever()
        server.close()
        for pair in list(self._pairs):
            pair.abort()
        tasks = asyncio.all_tasks(self._loop)
        for task in tasks:
            task.cancel()
        self._loop.run_until_complete(asyncio.gather(*tasks, return_exceptions=True))

    async def _accept(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        self.accepted += 1
        try:
            far_reader, far = await asyncio.open_connection(HOST, self.target)
        except OSError:
            writer.transport.abort()
            return
        pair = _Pair(writer, far)
        pair.silent = pair.deaf = self._silences_new
        self._pairs.add(pair)
        try:
            await asyncio.gather(
                self._pump(pair, reader, far, asks=True),
                self._pump(pair, far_reader, writer, asks=False),
            )
        except asyncio.CancelledError:  # the proxy ends
            return
        finally:
            self._pairs.discard(pair)
            pair.abort()

    async def _pump(
        self, pair: _Pair, reader: asyncio.StreamReader, writer: asyncio.StreamWriter, *, asks: bool
    ) -> None:
        with contextlib.suppress(OSError):
            while data := await reader.read(_CHUNK):
                if not (pair.deaf if asks else pair.silent):
                    writer.write(data)
        if pair.silent:  # the end of a silent connection is not passed on, either
            await asyncio.Future[None]()
        pair.abort()
