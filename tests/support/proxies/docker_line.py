"""A line to the daemon's socket that can be cut: for the launcher it is as if the daemon went
away."""

from __future__ import annotations

import asyncio
import contextlib
from pathlib import Path

from infra import tasks
from tests.support.launchers.node_process import PATIENCE


class DaemonLine:
    def __init__(self, path: Path, daemon: Path) -> None:
        self.path = path
        self._daemon = daemon
        self._server: asyncio.Server | None = None
        self._writers: set[asyncio.StreamWriter] = set()
        self._calls: set[asyncio.Task[None]] = set()
        self._begun = asyncio.Condition()

    async def open(self) -> None:
        self.path.unlink(missing_ok=True)
        self._server = await asyncio.start_unix_server(self._accept, str(self.path))

    async def cut(self) -> None:
        """Nobody listens any more, and all connections break."""
        server, self._server = self._server, None
        if server is not None:
            server.close()
        self.path.unlink(missing_ok=True)
        await tasks.cancel_tasks(*self._calls)
        for writer in self._writers:
            writer.close()
        for writer in self._writers:
            with contextlib.suppress(OSError):
                await writer.wait_closed()
        self._writers.clear()

    async def used(self, count: int) -> None:
        """Waits until that many connections are open."""
        async with asyncio.timeout(PATIENCE), self._begun:
            await self._begun.wait_for(lambda: len(self._calls) >= count)

    async def _accept(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        if self._server is None:  # it was on its way when the line was cut
            writer.close()
            return
        self._writers.add(writer)
        task = asyncio.get_running_loop().create_task(self._relay(reader, writer))
        self._calls.add(task)
        task.add_done_callback(self._calls.discard)
        async with self._begun:
            self._begun.notify_all()

    async def _relay(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        far_reader, far_writer = await asyncio.open_unix_connection(str(self._daemon))
        self._writers.add(far_writer)
        both = [
            asyncio.ensure_future(_pass_on(reader, far_writer)),
            asyncio.ensure_future(_pass_on(far_reader, writer)),
        ]
        try:
            await asyncio.wait(both)
        finally:
            await tasks.cancel_tasks(*both)
            writer.close()
            far_writer.close()


async def _pass_on(source: asyncio.StreamReader, sink: asyncio.StreamWriter) -> None:
    with contextlib.suppress(OSError):
        while data := await source.read(65536):
            sink.write(data)
            await sink.drain()
        if sink.can_write_eof():
            sink.write_eof()
