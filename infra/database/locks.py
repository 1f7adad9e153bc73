"""Work that one process does at a time: whoever has the turn does it, the others come again later.

One process among several does a piece of work: whoever holds an advisory lock of PostgreSQL.

The lock belongs to one connection of its own and ends with it. It must be a direct connection, or one of a
pooler in session mode.
"""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable
from typing import Any

import structlog
from sqlalchemy import func, select, text
from sqlalchemy.ext.asyncio import AsyncConnection, AsyncSession

from infra import tasks
from infra.database.engine import DatabaseUnavailable, create_engine, outages_named


async def take_turn(session: AsyncSession, name: str) -> bool:
    """Whether the turn of this name is ours, until the session's transaction ends.

    PostgreSQL gives it back when the connection breaks, so nobody keeps it beyond his death.
    """
    got = await session.scalar(select(func.pg_try_advisory_xact_lock(func.hashtextextended(name, 0))))
    return bool(got)


#: Seconds between two tries of a process that stands by.
STANDBY = 2.0
#: Seconds without a statement after which PostgreSQL ends a leader's connection: a process that is stopped
#: or cut off must not keep the others from the work. Its own work has to ask something more often.
SILENCE = 30

_TRY = text("select pg_try_advisory_lock(:lock)")

log = structlog.get_logger()


async def lead(url: str, lock: int, work: Callable[[AsyncConnection], Awaitable[None]]) -> None:
    """Waits until this process holds `lock`, then does `work`, for as long as it holds it.

    `work` gets the connection that holds the lock, in autocommit, and is cancelled the moment that breaks.
    Raises `DatabaseUnavailable` then, and when there is no connection to be had: call it again.
    """
    engine = create_engine(url, pool_size=1)
    try:
        with outages_named():
            async with engine.connect() as plain:
                connection = await plain.execution_options(isolation_level="AUTOCOMMIT")
                lost = asyncio.Event()
                raw: Any = (await connection.get_raw_connection()).driver_connection
                raw.add_termination_listener(lambda _: lost.set())
                await connection.execute(text(f"set idle_session_timeout = '{SILENCE}s'"))
                # One that is stopped between the messages of a statement is not idle to PostgreSQL.
                await connection.execute(text(f"set transaction_timeout = '{SILENCE}s'"))
                while not await connection.scalar(_TRY, {"lock": lock}):  # noqa: ASYNC110 — another process frees it
                    await asyncio.sleep(STANDBY)
                log.info("leads", lock=f"{lock:x}")
                await _work_until_lost(lost, work(connection))
    finally:
        await engine.dispose()


async def _work_until_lost(lost: asyncio.Event, work: Awaitable[None]) -> None:
    working, waiting = asyncio.ensure_future(work), asyncio.create_task(lost.wait())
    try:
        await asyncio.wait({working, waiting}, return_when=asyncio.FIRST_COMPLETED)
        if not working.done():
            raise DatabaseUnavailable("PostgreSQL: the connection that held the lock broke")
        await working
    finally:
        await tasks.cancel_tasks(working, waiting)
