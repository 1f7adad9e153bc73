"""The bounded connection pool, and how long callers waited for it."""

from __future__ import annotations

import time
from collections.abc import AsyncIterator, Iterator, Mapping
from contextlib import asynccontextmanager, contextmanager
from dataclasses import dataclass
from typing import Any

import asyncpg
from sqlalchemy import ClauseElement, event
from sqlalchemy.dialects.postgresql.asyncpg import dialect as asyncpg_dialect
from sqlalchemy.exc import DBAPIError, DisconnectionError, InterfaceError
from sqlalchemy.exc import TimeoutError as PoolTimeout
from sqlalchemy.ext.asyncio import AsyncEngine, AsyncSession, async_sessionmaker, create_async_engine
from sqlalchemy.sql.compiler import SQLCompiler

from worker_runtime.protocol.errors import BerthError

#: Seconds that a transaction may wait for its own process: one that is stopped, or cut off, must not keep its
#: locks. A claim holds its user's row while it asks Valkey, whose socket timeout is 5 s.
IDLE_IN_TRANSACTION = 20


class DatabaseUnavailable(BerthError):
    """PostgreSQL does not answer."""

    code = "DATABASE_UNAVAILABLE"
    retryable = True


@dataclass(slots=True)
class PoolWait:
    """Waiting for a connection, in seconds (requirement X5: under 0.5 s under load)."""

    count: int = 0
    total: float = 0.0
    worst: float = 0.0

    def add(self, seconds: float) -> None:
        self.count += 1
        self.total += seconds
        self.worst = max(self.worst, seconds)


def create_engine(url: str, *, pool_size: int = 8, pool_wait: float = 2.0) -> AsyncEngine:
    """An engine with at most `pool_size` connections; a caller waits `pool_wait` seconds for one.

    No ping before use: it would cost each order a round trip. One whose end was seen is replaced; one that
    turns out broken is dropped, and the caller sees the error.
    """
    engine = create_async_engine(
        url,
        pool_size=pool_size,
        max_overflow=0,
        pool_timeout=pool_wait,
        pool_pre_ping=False,
        pool_use_lifo=True,
        connect_args={
            "timeout": 5.0,  # of a connect, about 10 ms; a busy host stands still for 2 to 3 s
            "command_timeout": 10.0,
            "server_settings": {
                "application_name": "berth",
                "jit": "off",
                "idle_in_transaction_session_timeout": f"{IDLE_IN_TRANSACTION}s",
            },
        },
    )
    event.listen(engine.sync_engine, "checkout", _replace_closed)
    return engine


def _replace_closed(connection: Any, _record: Any, _proxy: Any) -> None:
    """The pool connects anew: asyncpg saw the server close this connection while nobody used it."""
    if connection.driver_connection.is_closed():
        raise DisconnectionError


class Single:
    """One statement as asyncpg takes it, for `Database.row`."""

    def __init__(self, statement: ClauseElement) -> None:
        compiled = statement.compile(dialect=asyncpg_dialect())  # type: ignore[no-untyped-call]
        assert isinstance(compiled, SQLCompiler)  # noqa: S101 - what that dialect compiles with
        self.text = str(compiled)
        self._names = tuple(compiled.positiontup or ())

    def arguments(self, values: Mapping[str, Any]) -> list[Any]:
        return [values[name] for name in self._names]


@contextmanager
def outages_named() -> Iterator[None]:
    """Whatever tells that PostgreSQL is away, raised within, becomes `DatabaseUnavailable`."""
    try:
        yield
    except (OSError, PoolTimeout, InterfaceError) as error:
        raise DatabaseUnavailable(f"PostgreSQL: {type(error).__name__}") from error
    except DBAPIError as error:
        if error.connection_invalidated or _is_outage(error.orig):
            raise DatabaseUnavailable(f"PostgreSQL: {type(error.orig).__name__}") from error
        raise


class Database:
    """What repositories get: sessions, each in one transaction."""

    def __init__(self, url: str, *, pool_size: int = 8, pool_wait: float = 2.0) -> None:
        self.engine = create_engine(url, pool_size=pool_size, pool_wait=pool_wait)
        self.pool_wait = PoolWait()
        self._sessions = async_sessionmaker(self.engine, expire_on_commit=False)
        # The same pool: only what each connection is told differs.
        single = self.engine.execution_options(isolation_level="AUTOCOMMIT")
        self._singles = async_sessionmaker(single, expire_on_commit=False)

    @asynccontextmanager
    async def session(self, *, autocommit: bool = False) -> AsyncIterator[AsyncSession]:
        """A transaction: committed at the end, rolled back on an error.

        `autocommit`: each statement is a transaction of its own, for work that is one statement. It saves
        the round trips of BEGIN and COMMIT.

        Raises `DatabaseUnavailable` when there is no connection to be had or the connection broke.
        """
        with outages_named():
            sessions = self._singles if autocommit else self._sessions
            async with sessions() as session, session.begin():
                started = time.perf_counter()
                await session.connection()
                self.pool_wait.add(time.perf_counter() - started)
                yield session

    async def row(self, single: Single, values: Mapping[str, Any]) -> asyncpg.Record | None:
        """The first row of one statement, which is a transaction of its own.

        For what every order waits for: of the 2.0 ms that it took through a session, 0.6 were the session's.

        Raises `DatabaseUnavailable`: then it may have been carried out or not.
        """
        with outages_named():
            started = time.perf_counter()
            async with self.engine.connect() as connection:
                pooled = await connection.get_raw_connection()
                driver = pooled.driver_connection
                assert isinstance(driver, asyncpg.Connection)  # noqa: S101 - the engine's URL says so
                self.pool_wait.add(time.perf_counter() - started)
                try:
                    return await driver.fetchrow(single.text, *single.arguments(values))
                except asyncpg.PostgresError as error:
                    if _is_outage(error):
                        await connection.invalidate()
                        raise DatabaseUnavailable(f"PostgreSQL: {type(error).__name__}") from error
                    raise
                except asyncpg.InterfaceError as error:  # the connection ended meanwhile
                    await connection.invalidate()
                    raise DatabaseUnavailable(f"PostgreSQL: {type(error).__name__}") from error
                except BaseException:  # a reply may still come: nobody else may read it
                    await connection.invalidate()
                    raise

    async def close(self) -> None:
        await self.engine.dispose()


def _is_outage(error: BaseException | None) -> bool:
    """SQLSTATE classes 08 (connection), 53 (out of resources) and 57P (shutting down, starting)."""
    state = str(getattr(error, "sqlstate", "") or "")
    return state[:2] in {"08", "53"} or state[:3] == "57P"
