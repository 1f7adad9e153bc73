"""Single statements, each a transaction of its own, on connections of asyncpg that no session uses.

For what every order waits for: of the 1.3 ms that one took through SQLAlchemy's pool, 0.5 were the pool's.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Awaitable, Callable, Mapping
from contextlib import asynccontextmanager
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
    """At most `size` connections, made when they are needed; the one used last is used next."""

    def __init__(self, connect: Connect, size: int) -> None:
        self._connect = connect
        self._room = asyncio.Semaphore(size)
        self._free: list[asyncpg.Connection] = []

    @asynccontextmanager
    async def connection(self, wait: float) -> AsyncIterator[asyncpg.Connection]:
        """A connection for one statement, within `wait` seconds. It stays if the statement ended, with a row
        or with an error of its own; else a reply may still come, and nobody else may read it.

        Raises `TimeoutError`, and what connecting raises.
        """
        async with asyncio.timeout(wait):
            await self._room.acquire()
        try:
            connection = self._idle() or await self._connect()
            ended = False
            try:
                yield connection
                ended = True
            except (asyncpg.PostgresError, asyncpg.InterfaceError) as error:
                ended = not is_outage(error)
                raise
            finally:
                if ended and not connection.is_closed():
                    self._free.append(connection)
                else:
                    connection.terminate()
        finally:
            self._room.release()

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
