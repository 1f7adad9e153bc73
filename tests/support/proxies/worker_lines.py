"""The workers' way to Valkey: a TCP proxy that cuts or silently blocks the connections of one
worker."""

from __future__ import annotations

import asyncio
import contextlib
import re
import threading
from dataclasses import dataclass, field
from enum import Enum
from types import TracebackType
from typing import Self

from infra.local.process import HOST, free_port

_CHUNK = 65536
#: What tells whose a connection is: the ids of workers and the users' hash tags in its commands.
_NAMES = re.compile(rb"\b[pc]-[0-9a-f]{16}\b|\{(user[0-9a-z]+)\}")


class LineTrouble(Enum):
    """What happens to a worker's connections."""

    BLOCKED = "blocked"
    CUT = "cut"


@dataclass(eq=False)
class _WorkerPair:
    """One connection of a worker and its other half; `names` grows with what it asks."""

    near: asyncio.StreamWriter
    far: asyncio.StreamWriter
    names: set[str] = field(default_factory=set)

    def abort(self) -> None:
        self.near.transport.abort()
        self.far.transport.abort()


class WorkerLines:
    """Use it as a context manager. Runs in a thread of its own; its methods may be called from any
    thread."""

    def __init__(self) -> None:
        self.port = free_port()
        #: Port of the real Valkey; to be set before the first worker connects.
        self.target = 0
        self._loop = asyncio.new_event_loop()
        self._thread = threading.Thread(target=self._run, name="worker-lines", daemon=True)
        self._ready = threading.Event()
        self._troubled: dict[str, LineTrouble] = {}
        self._pairs: set[_WorkerPair] = set()
        self._changed = asyncio.Condition()

    @property
    def url(self) -> str:
        return f"redis://{HOST}:{self.port}/0"

    def trouble(self, line: LineTrouble, worker_id: str, user_id: str) -> None:
        """From now on this worker's connections are cut or blocked: those that it has, and new
        ones.

        A new connection that names the user alone passes: it may be the successor's.
        """
        self._loop.call_soon_threadsafe(self._trouble, line, worker_id, user_id)

    def heal(self, worker_id: str) -> None:
        asyncio.run_coroutine_threadsafe(self._heal(worker_id), self._loop).result(10)

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
        server = self._loop.run_until_complete(
            asyncio.start_server(self._accepted, HOST, self.port)
        )
        self._ready.set()
        self._loop.run_forever()
        server.close()
        tasks = asyncio.all_tasks(self._loop)
        for task in tasks:
            task.cancel()
        self._loop.run_until_complete(asyncio.gather(*tasks, return_exceptions=True))

    async def _accepted(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        try:
            far_reader, far_writer = await asyncio.open_connection(HOST, self.target)
        except OSError:
            writer.transport.abort()
            return
        pair = _WorkerPair(writer, far_writer)
        self._pairs.add(pair)
        try:
            await asyncio.gather(
                self._pump(pair, reader, far_writer, asks=True),
                self._pump(pair, far_reader, writer, asks=False),
            )
        finally:
            self._pairs.discard(pair)
            pair.abort()

    async def _pump(
        self,
        pair: _WorkerPair,
        reader: asyncio.StreamReader,
        writer: asyncio.StreamWriter,
        *,
        asks: bool,
    ) -> None:
        with contextlib.suppress(OSError):
            while data := await reader.read(_CHUNK):
                if asks:
                    named = _NAMES.finditer(data)
                    pair.names |= {(match[1] or match[0]).decode() for match in named}
                async with self._changed:
                    await self._changed.wait_for(
                        lambda: self._state(pair) is not LineTrouble.BLOCKED
                    )
                if self._state(pair) is LineTrouble.CUT:
                    break
                writer.write(data)
        pair.abort()

    async def _heal(self, worker_id: str) -> None:
        self._troubled.pop(worker_id, None)
        async with self._changed:
            self._changed.notify_all()

    def _trouble(self, line: LineTrouble, worker_id: str, user_id: str) -> None:
        self._troubled[worker_id] = line
        for pair in list(self._pairs):
            if pair.names & {worker_id, user_id}:
                pair.names.add(worker_id)
                if line is LineTrouble.CUT:
                    pair.abort()

    def _state(self, pair: _WorkerPair) -> LineTrouble | None:
        return next((line for name, line in self._troubled.items() if name in pair.names), None)
