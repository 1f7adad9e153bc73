"""Proxies between our processes and servers, which kill a process as it sends a certain message.

All that a process does for an order and that others can see passes a connection to Valkey,
PostgreSQL, Temporal or the exchange. So a proxy on each of these lines sees every step, and kills
the process (SIGKILL) either before its message is passed on, or after that had its effect and
before the answer is. Nothing of it is in the product.
"""

from __future__ import annotations

import asyncio
import contextlib
import os
import signal
import threading
import zlib
from dataclasses import dataclass, field
from enum import Enum
from pathlib import Path
from types import TracebackType
from typing import Self

import psutil

from infra.local.process import HOST, free_port

_CHUNK = 1 << 20
#: How data begins that is compressed.
_GZIP = b"\x1f\x8b\x08"


class ServerLine(Enum):
    """What the connection leads to."""

    VALKEY = "valkey"
    POSTGRES = "postgres"
    TEMPORAL = "temporal"
    EXCHANGE = "exchange"


class Program(Enum):
    """Whose process is killed."""

    API = "api"
    SESSION = "session"
    ORCHESTRATOR = "orchestrator"


class When(Enum):
    #: What it sent never arrives.
    BEFORE = "before"
    #: What it sent had its effect; it never hears of it.
    AFTER = "after"


@dataclass(eq=False)
class KillPoint:
    """A message at which a process is killed, once.

    `says` lists what one message after the other on one connection has to contain; the process is
    killed at the last. `hears` is what the answer has to contain (with `AFTER`), or, without
    `says`, what is pushed.

    `cut`: with `BEFORE`, the commands of the message that come before this word still arrive.
    """

    program: Program
    line: ServerLine
    when: When
    says: tuple[tuple[bytes, ...], ...] = ()
    hears: tuple[bytes, ...] = ()
    cut: bytes = b""
    reached: threading.Event = field(default_factory=threading.Event)

    def __str__(self) -> str:
        return (
            f"{self.program.value} {self.when.value} {self.says or self.hears} on {self.line.value}"
        )


@dataclass(eq=False)
class _ProxiedConnection:
    """One connection of a process and its other half."""

    line: ServerLine
    near: asyncio.StreamWriter
    far: asyncio.StreamWriter
    #: How many messages of a kill point were seen here.
    heard: dict[KillPoint, int] = field(default_factory=dict)
    #: The kill point that the next answer reaches.
    doomed: KillPoint | None = None
    program: Program | None = None
    pid: int = 0

    def abort(self) -> None:
        self.near.transport.abort()
        self.far.transport.abort()


class KillPointProxies:
    """Use it as a context manager. Runs in a thread of its own; its methods may be called from any
    thread."""

    def __init__(self) -> None:
        self.ports = {line: free_port() for line in ServerLine}
        #: Ports of the real servers; to be set before the first process connects.
        self.targets: dict[ServerLine, int] = {}
        self._loop = asyncio.new_event_loop()
        self._thread = threading.Thread(target=self._run, name="proxies", daemon=True)
        self._ready = threading.Event()
        self._armed: list[KillPoint] = []

    def arm(self, kill_point: KillPoint) -> KillPoint:
        """From now on it waits for its message."""
        self._armed.append(kill_point)
        return kill_point

    def disarm(self, kill_point: KillPoint) -> None:
        with contextlib.suppress(ValueError):
            self._armed.remove(kill_point)

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
        servers = [self._loop.run_until_complete(self._listen(line)) for line in ServerLine]
        self._ready.set()
        self._loop.run_forever()
        for server in servers:
            server.close()
        pending = asyncio.all_tasks(self._loop)
        for task in pending:
            task.cancel()
        self._loop.run_until_complete(asyncio.gather(*pending, return_exceptions=True))

    async def _listen(self, line: ServerLine) -> asyncio.Server:
        async def accepted(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
            await self._accepted(line, reader, writer)

        return await asyncio.start_server(accepted, HOST, self.ports[line])

    async def _accepted(
        self, line: ServerLine, reader: asyncio.StreamReader, writer: asyncio.StreamWriter
    ) -> None:
        try:
            far_reader, far_writer = await asyncio.open_connection(HOST, self.targets[line])
        except OSError:
            writer.transport.abort()
            return
        pair = _ProxiedConnection(line, writer, far_writer)
        try:
            await asyncio.gather(self._asks(pair, reader), self._answers(pair, far_reader))
        finally:
            pair.abort()

    async def _asks(self, pair: _ProxiedConnection, reader: asyncio.StreamReader) -> None:
        with contextlib.suppress(OSError):
            while data := await reader.read(_CHUNK):
                kill_point = self._met(
                    pair, data + _unpacked(data) if pair.line is ServerLine.TEMPORAL else data
                )
                if kill_point is not None and kill_point.when is When.BEFORE:
                    pair.far.write(_up_to(data, kill_point.cut))
                    await pair.far.drain()
                    self._spring(pair, kill_point)
                    return
                pair.doomed = kill_point or pair.doomed
                pair.far.write(data)
                await pair.far.drain()
        pair.abort()

    async def _answers(self, pair: _ProxiedConnection, reader: asyncio.StreamReader) -> None:
        with contextlib.suppress(OSError):
            while data := await reader.read(_CHUNK):
                kill_point = self._fate(pair, data)
                if kill_point is not None:
                    self._spring(pair, kill_point)
                    return
                pair.near.write(data)
                await pair.near.drain()
        pair.abort()

    def _met(self, pair: _ProxiedConnection, data: bytes) -> KillPoint | None:
        """Returns the kill point whose last message this is."""
        for kill_point in list(self._armed):
            if kill_point.line is not pair.line or not kill_point.says:
                continue
            seen = pair.heard.get(kill_point, 0)
            if (
                not all(word in data for word in kill_point.says[seen])
                or _program(pair) is not kill_point.program
            ):
                continue
            pair.heard[kill_point] = seen + 1
            if seen + 1 == len(kill_point.says):
                pair.heard[kill_point] = 0  # the answer may not be the one
                return kill_point
        return None

    def _fate(self, pair: _ProxiedConnection, data: bytes) -> KillPoint | None:
        """Returns the kill point that this answer reaches."""
        kill_point, pair.doomed = pair.doomed, None
        if (
            kill_point is not None
            and kill_point in self._armed
            and all(word in data for word in kill_point.hears)
        ):
            return kill_point
        for pushed in list(self._armed):
            if (
                pushed.line is not pair.line
                or pushed.says
                or not all(word in data for word in pushed.hears)
            ):
                continue
            if _program(pair) is pushed.program:
                return pushed
        return None

    def _spring(self, pair: _ProxiedConnection, kill_point: KillPoint) -> None:
        self.disarm(kill_point)
        with contextlib.suppress(ProcessLookupError):
            os.kill(pair.pid, signal.SIGKILL)
        pair.abort()
        kill_point.reached.set()


def _unpacked(data: bytes) -> bytes:
    """What the gRPC messages of a chunk say that are compressed."""
    unpacked = b""
    start = data.find(_GZIP)
    while start >= 0:
        with contextlib.suppress(zlib.error):
            unpacked += zlib.decompressobj(wbits=31).decompress(data[start:])
        start = data.find(_GZIP, start + 1)
    return unpacked


def _up_to(data: bytes, word: bytes) -> bytes:
    """The whole RESP commands before the one that contains `word`."""
    if not word:
        return b""
    return data[: data.rfind(b"\r\n*", 0, data.index(word)) + 2]


def _program(pair: _ProxiedConnection) -> Program | None:
    """Of the process at the near end; looked up once a connection, and only when something
    matched."""
    if not pair.pid:
        _, port = pair.near.get_extra_info("peername")
        pair.pid = _owner_of(port, pair.near.get_extra_info("sockname")[1])
        with contextlib.suppress(psutil.Error):
            pair.program = _kind(psutil.Process(pair.pid)) if pair.pid else None
    return pair.program


def _kind(process: psutil.Process) -> Program | None:
    if process.name().startswith("berth-session"):
        return Program.SESSION
    words = process.cmdline()
    if "activities" in words:
        return Program.ORCHESTRATOR
    parent = process.parent()
    if "api" in words or (parent is not None and "api" in parent.cmdline()):
        return Program.API
    return None


def _owner_of(near: int, far: int) -> int:
    """The pid that has the connection from port `near` to port `far` of this host; 0: nobody."""
    local_address = f":{near:04X} "
    other = f":{far:04X} "
    for row in Path("/proc/net/tcp").read_text().splitlines()[1:]:
        fields = row.split()
        if f"{fields[1]} ".endswith(local_address) and f"{fields[2]} ".endswith(other):
            link = f"socket:[{fields[9]}]"
            for entry in Path("/proc").iterdir():
                if entry.name.isdigit() and _has(entry, link):
                    return int(entry.name)
    return 0


def _has(process: Path, link: str) -> bool:
    with contextlib.suppress(OSError):
        return any(os.readlink(descriptor) == link for descriptor in (process / "fd").iterdir())
    return False
