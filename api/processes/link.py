"""Tells the master what an API process counts,
and asks it what all processes have counted together.

Whatever goes wrong here costs metrics, never an order.
"""

import asyncio
import itertools
import socket
from collections.abc import AsyncIterator
from contextlib import AbstractAsyncContextManager, AsyncExitStack, asynccontextmanager, suppress
from typing import Final, NamedTuple, Protocol

import msgspec
import structlog
from prometheus_client import REGISTRY, CollectorRegistry

from api.processes.messages import (
    Alive,
    Ask,
    Counted,
    Failed,
    FromMaster,
    Gather,
    Gathered,
    encode_frame,
    receive,
    send,
)
from infra import tasks
from infra.process_metrics import read_samples, registry_of

#: Seconds between two messages of each loop. A process that is killed loses what it counted since.
REPORT_INTERVAL_S: Final = 1.0
#: Seconds that a scrape waits for the master, which gives the other processes 0.8 of them.
GATHER_TIMEOUT_S: Final = 1.0
#: Seconds for the last words of a process that ends.
LAST_REPORT_TIMEOUT_S: Final = 0.5

log = structlog.get_logger()


class GatheredCounts(NamedTuple):
    """Holds what all processes of this API have counted."""

    processes: int
    #: The number of processes that answered. 0: not even the master did, so the counts are missing.
    answered: int
    died: int
    counted: CollectorRegistry


class ProcessCounts(Protocol):
    async def gather(self) -> GatheredCounts: ...

    def running(self) -> AbstractAsyncContextManager[None]: ...

    def begin_to_serve(self) -> None: ...


class OwnCounts:
    """Returns the counts of an API that runs as one process, without a master."""

    async def gather(self) -> GatheredCounts:
        return GatheredCounts(1, 1, 0, REGISTRY)

    @asynccontextmanager
    async def running(self) -> AsyncIterator[None]:
        yield

    def begin_to_serve(self) -> None:
        """Does nothing: no master waits for it."""


class MasterLink:
    """The connection of one of several processes to the master that started it."""

    def __init__(self, connection: socket.socket, processes: int) -> None:
        """Takes `processes`, the number that there should be."""
        self._connection = connection
        self._processes = processes
        self._numbers = itertools.count(1)
        self._waiting: dict[int, asyncio.Future[Gathered]] = {}
        self._scrapes: tasks.SharedTasks[str, GatheredCounts] = tasks.SharedTasks()
        self._writer: asyncio.StreamWriter | None = None
        self._serves = asyncio.Event()

    @asynccontextmanager
    async def running(self) -> AsyncIterator[None]:
        """Tells the master what this process counts, and of its life once it serves, until the
        block is left.

        The error that ends the block is reported, too, and all that was counted until then.
        """
        reader, writer = await asyncio.open_unix_connection(sock=self._connection)
        self._writer = writer
        try:
            async with AsyncExitStack() as stack:
                for loop in (self._answer(reader), self._report_counts(), self._report_life()):
                    await stack.enter_async_context(tasks.running(loop))
                yield
        except Exception as error:
            send(writer, Failed(f"{type(error).__name__}: {error}"))
            raise
        finally:
            # uvloop raises RuntimeError for a connection that the master has closed.
            with suppress(OSError, RuntimeError, TimeoutError):
                async with asyncio.timeout(LAST_REPORT_TIMEOUT_S):
                    send(writer, Counted(await read_samples()))
                    writer.write_eof()
                    await writer.drain()
                    writer.close()
                    await writer.wait_closed()

    def begin_to_serve(self) -> None:
        self._serves.set()

    async def gather(self) -> GatheredCounts:
        """Return what all processes have counted, in `GATHER_TIMEOUT_S`. Simultaneous scrapes share
        it."""
        return await asyncio.shield(self._scrapes.join("scrape", self._gather))

    async def _gather(self) -> GatheredCounts:
        number = next(self._numbers)
        answer: asyncio.Future[Gathered] = asyncio.get_running_loop().create_future()
        self._waiting[number] = answer
        try:
            async with asyncio.timeout(GATHER_TIMEOUT_S):
                self._send(Gather(number, await read_samples()))
                gathered = await answer
        except TimeoutError:
            # Our own samples alone are less than what the last
            # scrape showed, and a counter must not fall.
            log.warning("metrics_not_gathered", reason="the master does not answer")
            return GatheredCounts(self._processes, 0, 0, CollectorRegistry())
        finally:
            del self._waiting[number]
        return GatheredCounts(
            self._processes, gathered.answered, gathered.died, registry_of(gathered.samples)
        )

    def _send(self, message: Alive | Counted | Gather) -> None:
        if self._writer is not None:
            send(self._writer, message)

    async def _report_life(self) -> None:
        await self._serves.wait()
        while True:
            self._send(Alive())
            await asyncio.sleep(REPORT_INTERVAL_S)

    async def _report_counts(self) -> None:
        while True:
            await asyncio.sleep(REPORT_INTERVAL_S)
            await self._send_counts(0)

    async def _send_counts(self, number: int) -> None:
        try:
            self._send(Counted(await read_samples(), number))
        except Exception:  # the boundary of the loops: they continue
            log.exception("metrics_not_counted")

    async def _answer(self, reader: asyncio.StreamReader) -> None:
        """Answers the master until it closes the connection."""
        decoder = msgspec.msgpack.Decoder(FromMaster)
        with suppress(EOFError, OSError, OverflowError):
            while True:
                match await receive(reader, decoder):
                    case Ask(number):
                        await self._send_counts(number)
                    case Gathered(number=number) as gathered:
                        answer = self._waiting.get(number)
                        if answer is not None and not answer.done():
                            answer.set_result(gathered)


def report_failure(connection: socket.socket, error: BaseException) -> None:
    """Tells the master why this process ends before it has begun to serve."""
    with suppress(OSError):
        connection.settimeout(LAST_REPORT_TIMEOUT_S)
        connection.sendall(encode_frame(Failed(f"{type(error).__name__}: {error}")))
