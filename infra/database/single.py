"""Single statements, each a transaction of its own, on connections of asyncpg that no session uses.

For what every order waits for: of the 1.3 ms that one took through SQLAlchemy's pool, 0.5 were the pool's.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Awaitable, Callable, Mapping
from typing import Any

import asyncpg
from sqlalchemy import ClauseElement
from sqlalchemy.dialects.postgresql.asyncpg import dialect as asyncpg_dialect
from sqlalchemy.sql.compiler import SQLCompiler

Connect = Callable[[], Awaitable[asyncpg.Connection]]


def is_outage(error: BaseException | None) -> bool:
    """SQLSTATE classes 08 (connection), 53 (out of resources) and 57P (shutting down, starting), and what
    asyncpg says when the connection ended under it."""
    if isinstance(error, asyncpg.InterfaceError):
        return True
    state = str(getattr(error, "sqlstate", "") or "")
    return state[:2] in {"08", "53"} or state[:3] == "57P"


class Single:
    """One statement as asyncpg takes it, for `Database.row`."""

    def __init__(self, statement: ClauseElement) -> None:
        compiled = statement.compile(dialect=asyncpg_dialect())  # type: ignore[no-untyped-call]
        assert isinstance(compiled, SQLCompiler)  # noqa: S101 - what that dialect compiles with
        self.text = str(compiled)
        self._names = tuple(compiled.positiontup or ())

    def arguments(self, values: Mapping[str, Any]) -> list[Any]:
        return [values[name] for name in self._names]


class SinglePool:
    """At most `size` connections, made when they are needed; the one used last is used next.

    `waited` is told the seconds until there was a connection.
    """

    def __init__(self, connect: Connect, size: int, waited: Callable[[float], object]) -> None:
        self._connect = connect
        self._room = asyncio.Semaphore(size)
        self._waited = waited
        self._free: list[asyncpg.Connection] = []

    async def row(self, single: Single, values: Mapping[str, Any], wait: float) -> asyncpg.Record | None:
        """The first row of a statement, on a connection that is there within `wait` seconds. It stays if the
        statement ended, with a row or with an error of its own; else a reply may still come, and nobody else
        may read it.

        Raises `TimeoutError`, and what connecting raises.
        """
        connection = await self._take(wait)
        ended = False
        try:
            row = await connection.fetchrow(single.text, *single.arguments(values))
            ended = True
            return row
        except (asyncpg.PostgresError, asyncpg.InterfaceError) as error:
            ended = not is_outage(error)
            raise
        finally:
            self._room.release()  # nobody who waited for it runs before what follows
            if ended and not connection.is_closed():
                self._free.append(connection)
            else:
                connection.terminate()

    async def _take(self, wait: float) -> asyncpg.Connection:
        started = time.perf_counter()
        if self._room.locked():
            async with asyncio.timeout(wait):
                await self._room.acquire()
        else:
            await self._room.acquire()  # at once, without a timer
        try:
            connection = self._idle() or await self._connect()
        except BaseException:
            self._room.release()
            raise
        self._waited(time.perf_counter() - started)
        return connection

    def _idle(self) -> asyncpg.Connection | None:
        while self._free:
            connection = self._free.pop()
            if not connection.is_closed():  # its end may have been seen while nobody used it
                return connection
        return None

    def close(self) -> None:
        """Ends what is idle."""
        while self._free:
            self._free.pop().terminate()
