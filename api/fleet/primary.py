"""The primary: one of all API processes, which runs one-time tasks.

Among the processes of a host it holds an exclusive `flock`, which the kernel frees when it dies;
among hosts PostgreSQL's advisory lock, on a connection of its own. A process learns late that it
lost that lock, so what the primary does commits on this very connection: a process that lost it
changes nothing any more.
"""

import asyncio
import os
import socket
import time
from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass
from datetime import datetime, timedelta
from functools import partial
from pathlib import Path

import structlog
from sqlalchemy.ext.asyncio import AsyncConnection, AsyncSession

from infra.database import reports, startup
from infra.database.engine import DatabaseUnavailable, outage_of
from infra.database.locks import lead, send_sign_of_life
from infra.database.startup import PRIMARY_LOCK_ID, StartupTask
from infra.market.calendar import HOME_ZONE, Calendar
from infra.processes import try_lock
from infra.settings import Settings

#: Seconds between two attempts of a waiting process to lock its host's file. With the next interval
#: and a connect (10 ms), this is the gap after a primary's death.
FILE_LOCK_RETRY_INTERVAL_S = 0.1
#: Seconds between two attempts to take PostgreSQL's lock. One process of each host tries.
DATABASE_LOCK_RETRY_INTERVAL_S = 0.2
#: Seconds until a process that lost PostgreSQL tries again.
RECONNECT_INTERVAL_S = 1.0
#: Seconds between two signs of life on the lock's connection, well within `MAX_SILENCE_S`.
SIGN_OF_LIFE_INTERVAL_S = 5.0
#: Seconds between two rounds of tasks that failed.
TASK_RETRY_INTERVAL_S = 60.0

log = structlog.get_logger()


def startup_tasks(settings: Settings, calendar: Calendar) -> tuple[StartupTask, ...]:
    """Returns all one-time tasks, in their order."""
    end = timedelta(seconds=settings.trading_day_end)
    today = (datetime.now(HOME_ZONE) - end).date() + timedelta(days=1)
    backfill = partial(reports.backfill_reports, calendar=calendar, end=end, before=today)
    return (StartupTask(name="daily_reports", step=backfill),)


@asynccontextmanager
async def host_lock(path: Path) -> AsyncIterator[None]:
    """Waits until this process is the only one of its host that holds the file.

    Where none can be written or locked (NFS) it returns at once: PostgreSQL's lock alone decides.
    """
    file = -1
    try:
        try:
            path.parent.mkdir(parents=True, exist_ok=True)
            file = os.open(path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
            while not try_lock(file):  # noqa: ASYNC110 - the kernel tells nobody
                await asyncio.sleep(FILE_LOCK_RETRY_INTERVAL_S)
        except OSError as error:
            log.warning("primary_without_file", reason=str(error))
        yield
    finally:
        if file >= 0:
            os.close(file)


@dataclass(frozen=True, eq=False)
class Primary:
    """A background loop of each API process. The schema must be up to date."""

    settings: Settings
    tasks: Sequence[StartupTask]
    period: float = TASK_RETRY_INTERVAL_S

    async def run(self) -> None:
        while True:
            try:
                async with host_lock(self.settings.data_dir / "primary.lock"):
                    await lead(
                        self.settings.session_database_url,
                        PRIMARY_LOCK_ID,
                        self._serve,
                        standby=DATABASE_LOCK_RETRY_INTERVAL_S,
                    )
            except DatabaseUnavailable as error:
                log.warning("primary_lost", reason=error.detail)
            except Exception:  # the loop continues: without a primary nothing of this is done
                log.exception("primary_failed")
            await asyncio.sleep(RECONNECT_INTERVAL_S)

    async def _serve(self, connection: AsyncConnection) -> None:
        """Serves as the primary, with the connection that holds the lock. Ends only by an error."""
        name = startup.holder_name(socket.gethostname(), os.getpid(), time.time())
        await startup.prepare_holder(connection, name)
        # Transactions begin here.
        await connection.execution_options(isolation_level="READ COMMITTED")
        log.info("primary_began")
        while True:
            for task in self.tasks:
                await self._finish(connection, task)
            end = time.monotonic() + self.period
            while time.monotonic() < end:
                await asyncio.sleep(min(SIGN_OF_LIFE_INTERVAL_S, self.period))
                async with connection.begin():
                    await send_sign_of_life(connection)

    async def _finish(self, connection: AsyncConnection, task: StartupTask) -> None:
        """Takes all steps that are left of a task. One that fails is tried again in the next
        round."""
        try:
            has_more = True
            while has_more:
                async with (
                    AsyncSession(connection, expire_on_commit=False) as session,
                    session.begin(),
                ):
                    has_more = await startup.run_step(session, task)
        except Exception as error:
            # A time limit of its own. After one of asyncpg the connection is closed, which ends
            # this anyway.
            if not isinstance(error, TimeoutError) and outage_of(error) is not None:
                raise
            log.exception("startup_task_failed", task=task.name)
