"""Gives one process among several what only one may have at a time: a turn, a number, the
leadership of a loop, a lease of due rows."""

import asyncio
from collections.abc import Awaitable, Callable
from typing import Any

import structlog
from sqlalchemy import TextClause, Update, bindparam, func, inspect, select, text, update
from sqlalchemy.ext.asyncio import AsyncConnection, AsyncSession
from sqlalchemy.orm import InstrumentedAttribute

from infra import tasks
from infra.database.engine import DatabaseUnavailable, open_engine, outages_named, require_session

#: Seconds between two attempts of a process on standby to take the lock.
STANDBY_INTERVAL_S = 2.0
#: Seconds without a statement after which PostgreSQL ends a leader's connection, so that a process
#: that is stopped or cut off does not keep the others from the work. The work must send a statement
#: more often.
MAX_SILENCE_S = 30

_NOTHING = text("select 1")
_TRY = text("select pg_try_advisory_lock(:lock)")

log = structlog.get_logger()


def next_number(sequence: str) -> TextClause:
    """Draws the next number, which is never below the present Unix milliseconds: so it grows also
    after an earlier state of the database was restored."""
    now = "cast(extract(epoch from clock_timestamp()) * 1000 as bigint)"
    return text(f"setval('{sequence}', greatest(nextval('{sequence}'), {now}))")


async def wait_for_turn(session: AsyncSession, name: str) -> None:
    """Waits for the turn of this name and keeps it until the transaction ends."""
    await session.execute(select(func.pg_advisory_xact_lock(func.hashtextextended(name, 0))))


async def take_turn(session: AsyncSession, name: str) -> bool:
    """Takes the turn of this name until the transaction or its connection ends; False: another has
    it."""
    return bool(
        await session.scalar(select(func.pg_try_advisory_xact_lock(func.hashtextextended(name, 0))))
    )


def lease_due(due_at: InstrumentedAttribute[Any]) -> Update:
    """Builds an UPDATE that leases rows whose column `due_at` has passed, at most `:most`, oldest
    first.

    It moves `due_at` to `:lease` seconds from now: if the holder dies, the rows are due again after
    that. `returning` may name the CTE `due`, which has it as it was.
    Rows that another process is leasing are skipped, so nobody waits.
    """
    model = due_at.class_
    key = inspect(model).primary_key
    due = (
        select(*key, due_at)
        .where(due_at <= func.now())  # clock_timestamp() would read the whole index
        .order_by(due_at)
        .limit(bindparam("most"))
        .with_for_update(skip_locked=True)
        .cte("due")
    )
    return (
        update(model)
        .where(*(column == due.c[column.name] for column in key))
        .values({due_at: seconds_from_now(bindparam("lease"))})
        .execution_options(synchronize_session=False)
    )


def seconds_from_now(seconds: Any) -> Any:
    """Returns a time by PostgreSQL's clock."""
    return func.clock_timestamp() + func.make_interval(0, 0, 0, 0, 0, 0, seconds)


async def send_sign_of_life(connection: AsyncConnection | AsyncSession) -> None:
    """Sends the shortest statement, which keeps the connection, and its lock, from being ended.

    Raises what SQLAlchemy raises if PostgreSQL does not answer.
    """
    await connection.execute(_NOTHING)


async def try_lock(connection: AsyncConnection, lock: int) -> bool:
    """Takes an advisory lock until the connection ends; False: another connection has it."""
    return bool(await connection.scalar(_TRY, {"lock": lock}))


#: What a leader does, and what a process on standby does; both with the connection of the lock.
ConnectionWork = Callable[[AsyncConnection], Awaitable[None]]


async def lead(
    url: str,
    lock: int,
    work: ConnectionWork,
    *,
    on_standby: ConnectionWork | None = None,
    standby: float = STANDBY_INTERVAL_S,
) -> None:
    """Waits until this process holds the advisory lock `lock`, then runs `work` as long as it holds
    it.

    `on_standby` runs before each new attempt, every `standby` seconds. Both get the connection that
    holds the lock, in autocommit; it must be direct, or of a pooler in session mode. When it
    breaks, `work` is cancelled and `DatabaseUnavailable` is raised, as it is when no connection can
    be opened: call it again.
    """
    require_session(url)
    with outages_named():
        async with open_engine(url, pool_size=1) as engine, engine.connect() as plain:
            connection = await plain.execution_options(isolation_level="AUTOCOMMIT")
            lost = asyncio.Event()
            raw: Any = (await connection.get_raw_connection()).driver_connection
            raw.add_termination_listener(lambda _: lost.set())
            await connection.execute(text(f"set idle_session_timeout = '{MAX_SILENCE_S}s'"))
            # A process stopped between the messages of a statement is not idle to PostgreSQL.
            await connection.execute(text(f"set transaction_timeout = '{MAX_SILENCE_S}s'"))
            while not await try_lock(connection, lock):
                if on_standby is not None:
                    await on_standby(connection)
                await asyncio.sleep(standby)
            log.info("leads", lock=f"{lock:x}")
            await _work_until_lost(lost, work(connection))


async def _work_until_lost(lost: asyncio.Event, work: Awaitable[None]) -> None:
    working, waiting = asyncio.ensure_future(work), asyncio.create_task(lost.wait())
    try:
        await asyncio.wait({working, waiting}, return_when=asyncio.FIRST_COMPLETED)
        if not working.done():
            raise DatabaseUnavailable("PostgreSQL: the connection that held the lock broke")
        await working
    finally:
        await tasks.cancel_tasks(working, waiting)
