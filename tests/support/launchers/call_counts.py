"""What a launcher asks of its platform: how many calls, and how much comes back."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager, suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import NamedTuple

from infra.launchers.port import Launcher


class Cost(NamedTuple):
    calls: int
    #: Bytes of the answers, or tasks in them.
    size: int

    def since(self, before: Cost) -> Cost:
        return Cost(self.calls - before.calls, self.size - before.size)


class CountedLauncher(NamedTuple):
    launcher: Launcher
    cost: Callable[[], Cost]


@dataclass
class CountingProxy:
    """Stands before a Unix socket and counts what passes."""

    target: Path
    calls: int = 0
    size: int = 0
    _connections: set[asyncio.Task[None]] = field(default_factory=set)

    def cost(self) -> Cost:
        return Cost(self.calls, self.size)

    async def end(self) -> None:
        """Returns when the last connection is closed, which its client does."""
        if self._connections:
            await asyncio.wait(self._connections, timeout=10)

    async def accepted(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        if (task := asyncio.current_task()) is not None:
            self._connections.add(task)
            task.add_done_callback(self._connections.discard)
        far_reader, far_writer = await asyncio.open_unix_connection(str(self.target))
        try:
            await asyncio.gather(
                self._pass_on(reader, far_writer, is_question=True),
                self._pass_on(far_reader, writer, is_question=False),
            )
        finally:
            for side in (writer, far_writer):
                side.close()
                with suppress(OSError):
                    await side.wait_closed()

    async def _pass_on(
        self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter, *, is_question: bool
    ) -> None:
        with suppress(OSError):
            while data := await reader.read(65536):
                self.calls += is_question
                self.size += 0 if is_question else len(data)
                writer.write(data)
            writer.write_eof()


@asynccontextmanager
async def counting_proxy(target: Path, listening: Path) -> AsyncIterator[CountingProxy]:
    proxy = CountingProxy(target)
    server = await asyncio.start_unix_server(proxy.accepted, str(listening))
    try:
        yield proxy
    finally:
        server.close()
        await proxy.end()
