"""Runs one-time tasks of the primary, such as backfills, and tells who the primary is.

A task is a chain of steps. Each step is one transaction, which also stores how far the task has
come: what a process did before it died is either done and noted, or neither. The task's row is
locked meanwhile, so two processes that both take themselves for the primary do each step once.
"""

from collections.abc import Awaitable, Callable, Sequence
from datetime import UTC, datetime
from typing import Any, NamedTuple

from sqlalchemy import String, func, select, text
from sqlalchemy.dialects.postgresql import insert
from sqlalchemy.ext.asyncio import AsyncConnection, AsyncSession
from sqlalchemy.orm import Mapped, mapped_column

from infra.database.models import Base

#: The advisory lock that the primary among the API processes holds; any constant would do.
PRIMARY_LOCK_ID = 0x7072696D
#: The beginning of the name of the connection that holds the lock:
#: `_NAME <Unix seconds> <host>:<pid>`, at most 63 bytes.
_NAME = "berth-primary"

#: Does one part of a task; gets what the part before returned (at first an empty dict), None ends
#: the task. PostgreSQL ends a step after 30 s (`locks.MAX_SILENCE_S`).
StartupStep = Callable[[AsyncSession, dict[str, Any]], Awaitable[dict[str, Any] | None]]


class StartupTask(NamedTuple):
    #: Never used again for another task: what is done stays done.
    name: str
    step: StartupStep


class StartupTaskRow(Base):
    __tablename__ = "startup_tasks"

    name: Mapped[str] = mapped_column(String(64), primary_key=True)
    #: The value that the last step returned.
    progress: Mapped[dict[str, Any]] = mapped_column(server_default=text("'{}'"))
    steps: Mapped[int] = mapped_column(server_default="0")
    began_at: Mapped[datetime] = mapped_column(server_default=func.clock_timestamp())
    ended_at: Mapped[datetime | None]


async def run_step(session: AsyncSession, task: StartupTask) -> bool:
    """Runs the next step in the session's transaction; False: the task had ended before."""
    await session.execute(insert(StartupTaskRow).values(name=task.name).on_conflict_do_nothing())
    row = await session.get_one(
        StartupTaskRow, task.name, with_for_update=True, populate_existing=True
    )
    if row.ended_at is not None:
        return False
    progress = await task.step(session, dict(row.progress))
    row.steps += 1
    if progress is None:
        row.ended_at = await session.scalar(select(func.clock_timestamp()))
    else:
        row.progress = progress
    return True


async def list_startup_tasks(session: AsyncSession) -> Sequence[StartupTaskRow]:
    """Lists all tasks that were ever begun, the oldest first."""
    return (await session.scalars(select(StartupTaskRow).order_by(StartupTaskRow.began_at))).all()


class PrimaryHolder(NamedTuple):
    """The process that holds the primary's lock; without values: none does at the moment."""

    host: str | None = None
    pid: int | None = None
    since: datetime | None = None


_HOLDER = text(f"""
select split_part(application_name, ' ', 3) as process,
       split_part(application_name, ' ', 2) as since
  from pg_locks join pg_stat_activity using (pid)
 where locktype = 'advisory' and objid = {PRIMARY_LOCK_ID} and granted
   and application_name like '{_NAME} %'
   and pg_locks.database = (select oid from pg_database where datname = current_database())
""")  # noqa: S608 - constants of ours


def holder_name(host: str, pid: int, now: float) -> str:
    """Returns the name of the connection of the primary."""
    return f"{_NAME} {int(now)} {host[:30]}:{pid}"


async def prepare_holder(connection: AsyncConnection, name: str) -> None:
    """Gives the primary's connection its name and its time limit for statements.

    The limit is below asyncpg's of 10 s, which closes the connection: one slow task would cost the
    lock.
    """
    await connection.execute(
        text("select set_config('application_name', :name, false)"), {"name": name}
    )
    await connection.execute(text("set statement_timeout = '9s'"))
    await connection.commit()


async def read_holder(session: AsyncSession) -> PrimaryHolder:
    """Returns who is the primary now, as PostgreSQL's locks show."""
    holder = (await session.execute(_HOLDER)).one_or_none()
    if holder is None:
        return PrimaryHolder()
    host, _, pid = holder.process.rpartition(":")
    return PrimaryHolder(host, int(pid), datetime.fromtimestamp(int(holder.since), UTC))
