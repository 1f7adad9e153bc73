"""The bounded connection pool, and how long callers waited for it."""

from __future__ import annotations

import time
from collections.abc import AsyncIterator, Iterator
from contextlib import asynccontextmanager, contextmanager
from dataclasses import dataclass

from sqlalchemy.exc import DBAPIError, InterfaceError
from sqlalchemy.exc import TimeoutError as PoolTimeout
from sqlalchemy.ext.asyncio import AsyncEngine, AsyncSession, async_sessionmaker, create_async_engine

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

    No ping before use: it would cost each order a round trip. A connection that turns out broken is
    dropped with all its elders by SQLAlchemy, and the caller sees the error.
    """
    return create_async_engine(
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


@contextmanager
def outages_named() -> Iterator[None]:
    """Whatever tells that PostgreSQL is away, raised within, becomes `DatabaseUnavailable`."""
    try:
        yield
    except (OSError, PoolTimeout, InterfaceError) as error:
        raise DatabaseUnavailable(f"PostgreSQL: {type(error).__name__}") from error
    except DBAPIError as error:
        if error.connection_invalidated or _is_outage(error):
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

    async def close(self) -> None:
        await self.engine.dispose()


def _is_outage(error: DBAPIError) -> bool:
    """SQLSTATE classes 08 (connection), 53 (out of resources) and 57P (shutting down, starting)."""
    state = str(getattr(error.orig, "sqlstate", "") or "")
    return state[:2] in {"08", "53"} or state[:3] == "57P"
