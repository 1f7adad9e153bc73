"""The bounded connection pools, and how long callers waited for them."""

from __future__ import annotations

import time
from collections.abc import AsyncIterator, Iterator, Mapping
from contextlib import asynccontextmanager, contextmanager
from dataclasses import dataclass
from typing import Any

import asyncpg
from sqlalchemy import ClauseElement, event, make_url
from sqlalchemy.dialects.postgresql.asyncpg import dialect as asyncpg_dialect
from sqlalchemy.exc import DBAPIError, DisconnectionError, InterfaceError
from sqlalchemy.exc import TimeoutError as PoolTimeout
from sqlalchemy.ext.asyncio import AsyncEngine, AsyncSession, async_sessionmaker, create_async_engine
from sqlalchemy.sql.compiler import SQLCompiler

from worker_runtime.protocol.errors import BerthError

#: Seconds that a transaction may wait for its own process: one that is stopped, or cut off, must not keep its
#: locks. A claim holds its user's row while it asks Valkey, whose socket timeout is 5 s.
IDLE_IN_TRANSACTION = 20


#: How asyncpg connects. Seconds.
_CONNECT: dict[str, Any] = {
    "timeout": 5.0,  # of a connect, about 10 ms; a busy host stands still for 2 to 3 s
    "command_timeout": 10.0,
    "server_settings": {
        "application_name": "berth",
        "jit": "off",
        "idle_in_transaction_session_timeout": f"{IDLE_IN_TRANSACTION}s",
    },
}
#: Single statements come again and again, and what is best for one is for all: planned once for a connection,
#: not anew for each of the first five, nor every five minutes. Planning an acceptance takes 2 ms.
_CONNECT_SINGLE = {
    **_CONNECT,
    "max_cached_statement_lifetime": 0,
    "server_settings": {**_CONNECT["server_settings"], "plan_cache_mode": "force_generic_plan"},
}


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
        connect_args=_CONNECT,
    )
    event.listen(engine.sync_engine, "checkout", _replace_closed)
    return engine


def _replace_closed(connection: Any, _record: Any, _proxy: Any) -> None:
    """The pool connects anew: asyncpg saw the server close this connection while nobody used it."""
    if connection.driver_connection.is_closed():
        raise DisconnectionError


@contextmanager
def outages_named() -> Iterator[None]:
    """Turns every error that means PostgreSQL is away into `DatabaseUnavailable`."""
    try:
        yield
    except Exception as error:
        if (outage := outage_of(error)) is not None:
            raise outage from error
        raise


def is_outage(error: BaseException | None) -> bool:
    """Tells a lost or refused connection from an error of the statement itself.

    SQLSTATE classes 08 (connection), 53 (out of resources) and 57P (shutting down, starting), and what
    asyncpg raises when the connection ended under it.
    """
    if isinstance(error, asyncpg.InterfaceError):
        return True
    state = str(getattr(error, "sqlstate", "") or "")
    return state[:2] in {"08", "53"} or state[:3] == "57P"


def outage_of(error: Exception) -> DatabaseUnavailable | None:
    """What an error is called if it tells that PostgreSQL is away, else None."""
    match error:
        case OSError() | PoolTimeout() | InterfaceError():
            return DatabaseUnavailable(f"PostgreSQL: {type(error).__name__}")
        case asyncpg.InterfaceError() | asyncpg.PostgresError() if is_outage(error):
            return DatabaseUnavailable(f"PostgreSQL: {type(error).__name__}")
        case DBAPIError() if error.connection_invalidated or is_outage(error.orig):
            return DatabaseUnavailable(f"PostgreSQL: {type(error.orig).__name__}")
    return None


def _single_arguments(url: str) -> dict[str, Any]:
    """What asyncpg is to be told, as SQLAlchemy tells it for the same URL."""
    _, address = asyncpg_dialect().create_connect_args(make_url(url))  # type: ignore[no-untyped-call]
    address.pop("prepared_statement_name_func", None)
    statements = address.pop("prepared_statement_cache_size", None)
    if statements is not None:  # asyncpg's name for it; 0 behind a pooler that changes servers
        address["statement_cache_size"] = statements
    return {**address, **_CONNECT_SINGLE}


async def _keep_as_it_is(_: asyncpg.Connection) -> None:
    """Single statements leave nothing behind on a connection, so the pool sends no `RESET` after each."""


class SingleStatement:
    """One statement as asyncpg takes it, for `Database.row`."""

    def __init__(self, statement: ClauseElement) -> None:
        compiled = statement.compile(dialect=asyncpg_dialect())  # type: ignore[no-untyped-call]
        assert isinstance(compiled, SQLCompiler)  # noqa: S101 - what that dialect compiles with
        self.text = str(compiled)
        self._names = tuple(compiled.positiontup or ())

    def arguments(self, values: Mapping[str, Any]) -> list[Any]:
        return [values[name] for name in self._names]


class Database:
    """What repositories get: sessions, each in one transaction."""

    def __init__(self, url: str, *, pool_size: int = 8, pool_wait: float = 2.0) -> None:
        self.engine = create_engine(url, pool_size=pool_size, pool_wait=pool_wait)
        self.pool_wait = PoolWait()
        self._sessions = async_sessionmaker(self.engine, expire_on_commit=False)
        # The same pool: only what each connection is told differs.
        single = self.engine.execution_options(isolation_level="AUTOCOMMIT")
        self._singles = async_sessionmaker(single, expire_on_commit=False)
        self._url = url
        self._size = pool_size
        self._patience = pool_wait
        self._single_pool: asyncpg.Pool | None = None

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

    async def row(self, single: SingleStatement, values: Mapping[str, Any]) -> asyncpg.Record | None:
        """Returns the first row of one statement, which is a transaction of its own.

        Its connection is asyncpg's own, beside those of the sessions: SQLAlchemy's pool took 0.5 ms of the
        1.3 ms of an order's acceptance. Raises `DatabaseUnavailable`: the statement may have been carried
        out or not.
        """
        with outages_named():
            pool = self._single_pool or await self._open_single_pool()
            started = time.perf_counter()
            async with pool.acquire(timeout=self._patience) as connection:
                self.pool_wait.add(time.perf_counter() - started)
                return await connection.fetchrow(single.text, *single.arguments(values))

    async def _open_single_pool(self) -> asyncpg.Pool:
        """Opens the pool at the first statement; with no connection of its own yet it never waits."""
        self._single_pool = asyncpg.create_pool(
            min_size=0,
            max_size=self._size,
            max_inactive_connection_lifetime=0,
            reset=_keep_as_it_is,
            **_single_arguments(self._url),
        )
        await self._single_pool
        return self._single_pool

    async def close(self) -> None:
        if self._single_pool is not None:
            self._single_pool.terminate()
        await self.engine.dispose()
