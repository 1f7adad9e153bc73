"""The bounded connection pool, and how long callers waited for it."""

from __future__ import annotations

import time
from collections.abc import AsyncIterator, Mapping
from contextlib import asynccontextmanager
from dataclasses import dataclass
from typing import Any

import asyncpg
from sqlalchemy import event, make_url
from sqlalchemy.dialects.postgresql.asyncpg import dialect as asyncpg_dialect
from sqlalchemy.exc import DBAPIError, DisconnectionError, InterfaceError
from sqlalchemy.exc import TimeoutError as PoolTimeout
from sqlalchemy.ext.asyncio import AsyncEngine, AsyncSession, async_sessionmaker, create_async_engine

from infra.database.single import Single, SinglePool, is_outage
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


class _OutagesNamed:
    """A class: a generator as a context takes longer, and each order waits for it."""

    def __enter__(self) -> None: ...

    def __exit__(self, kind: object, error: BaseException | None, trace: object) -> None:
        if isinstance(error, Exception) and (outage := outage_of(error)) is not None:
            raise outage from error


def outages_named() -> _OutagesNamed:
    """Whatever tells that PostgreSQL is away, raised within, becomes `DatabaseUnavailable`."""
    return _OutagesNamed()


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


class Database:
    """What repositories get: sessions, each in one transaction."""

    def __init__(self, url: str, *, pool_size: int = 8, pool_wait: float = 2.0) -> None:
        self.engine = create_engine(url, pool_size=pool_size, pool_wait=pool_wait)
        self.pool_wait = PoolWait()
        self._sessions = async_sessionmaker(self.engine, expire_on_commit=False)
        # The same pool: only what each connection is told differs.
        single = self.engine.execution_options(isolation_level="AUTOCOMMIT")
        self._singles = async_sessionmaker(single, expire_on_commit=False)
        arguments = _single_arguments(url)
        self._alone = SinglePool(lambda: asyncpg.connect(**arguments), pool_size, self.pool_wait.add)
        self._patience = pool_wait

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
        """The first row of one statement, which is a transaction of its own, on a connection beside those of
        the sessions.

        Raises `DatabaseUnavailable`: then it may have been carried out or not.
        """
        with outages_named():
            return await self._alone.row(single, values, self._patience)

    async def close(self) -> None:
        self._alone.close()
        await self.engine.dispose()
