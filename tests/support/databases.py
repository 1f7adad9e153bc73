"""Databases with all tables and no rows: emptied after each test and used again.

To make one from a template, and to drop it, takes two programs, a copy of some 300 files and a
checkpoint.
"""

from __future__ import annotations

import asyncio
import itertools
import os
from concurrent.futures import ThreadPoolExecutor
from types import TracebackType
from typing import Self

import asyncpg
from sqlalchemy import select
from sqlalchemy.ext.asyncio import AsyncSession

from infra.database.migrate import migrate_as_owner
from infra.database.models import WorkerSession
from infra.database.workers import launches
from infra.database.workers import sessions as worker_sessions
from infra.local.process import HOST
from infra.local.servers import PostgresServer
from infra.settings import Settings

#: The role of the services.
SERVICES = "berth_services"
_ROLE = f"""
do $$ begin create role {SERVICES} login; exception when duplicate_object then null; end $$
"""
#: Ends every open connection, as `drop database … with (force)` would.
_ALONE = """
select pg_terminate_backend(pid, 5000) from pg_stat_activity
where datname = current_database() and pid <> pg_backend_pid() and backend_type = 'client backend'
"""
#: Only tables with rows are truncated: that makes new files for a table and all its indexes. As a
#: replica, so that the trigger of the audit trail, which nobody may shorten, lets it be.
_EMPTY = """
do $$
declare
  one regclass;
  filled text[] := '{}';
  found boolean;
begin
  set local session_replication_role = replica;
  for one in
    select oid from pg_class
    where relkind = 'r' and relnamespace = 'public'::regnamespace and relname <> 'alembic_version'
  loop
    execute format('select exists (select from %s)', one) into found;
    if found then
      filled := filled || one::text;
    end if;
  end loop;
  if filled <> '{}' then
    execute 'truncate ' || array_to_string(filled, ', ') || ' cascade';
  end if;
  for one in
    select oid from pg_class where relkind = 'S' and relnamespace = 'public'::regnamespace
  loop
    execute format('alter sequence %s restart', one);
  end loop;
end $$
"""
#: All that a migration makes, and what a test may do to it.
_SHAPE = """
select md5(string_agg(line, e'\\n' order by line)) from (
  select format('%s %s %s %s', relname, relkind, reloptions, relacl) from pg_class
  where relnamespace = 'public'::regnamespace
  union all
  select format('%s %s %s %s %s', attrelid::regclass, attname, atttypid, attnotnull, attacl)
  from pg_attribute join pg_class on attrelid = pg_class.oid
  where relnamespace = 'public'::regnamespace
  union all
  select format('%s %s', conname, pg_get_constraintdef(oid)) from pg_constraint
  where connamespace = 'public'::regnamespace
  union all
  select format('%s %s %s', tgname, tgrelid::regclass, tgenabled)
  from pg_trigger where not tgisinternal
  union all
  select format('%s %s', proname, md5(prosrc))
  from pg_proc where pronamespace = 'public'::regnamespace
  union all
  select format('%s', version_num) from alembic_version
  union all
  select format('%s %s', setrole, setconfig) from pg_db_role_setting
) as lines (line)
"""


async def assign_launched_worker(session: AsyncSession, claim_id: str, worker_id: str) -> None:
    """Gives a claim a worker that was launched for its pool."""
    pool = await session.scalar(
        select(WorkerSession.pool).where(WorkerSession.claim_id == claim_id)
    )
    await launches.record_launch(
        session, worker_id=worker_id, pool=pool or "", version="1", task_id="t"
    )
    await worker_sessions.assign_worker(session, claim_id=claim_id, worker_id=worker_id, warm=True)


def drop_database(server: PostgresServer, name: str) -> None:
    """Ends a database's connections and removes it; a missing one is no error."""

    async def drop() -> None:
        link = await asyncpg.connect(
            host=HOST, port=server.port, user=server.user, database="postgres", ssl=False
        )
        try:
            await link.execute(f'drop database if exists "{name}" with (force)')
        finally:
            await link.close()

    with ThreadPoolExecutor(max_workers=1) as thread:  # an event loop may run in this one
        thread.submit(asyncio.run, drop()).result()


class MigratedDatabases:
    """Of one server. `take` and `give_back` may be called while an event loop runs in this
    thread."""

    def __init__(self, server: PostgresServer, prefix: str = "migrated") -> None:
        self._server = server
        self._prefix = f"{prefix}_{os.getpid()}"
        self._template = f"{self._prefix}_template"
        self._shape = ""
        self._free: list[str] = []
        self._numbers = itertools.count(1)
        self._thread = ThreadPoolExecutor(max_workers=1)

    def __enter__(self) -> Self:
        owner = self._server.create_database(self._template)
        self._thread.submit(asyncio.run, self._ask(self._template, _ROLE, "select 1")).result()
        settings = Settings(
            database_owner_url=owner, database_url=f"postgresql+asyncpg://{SERVICES}@{HOST}/"
        )
        self._thread.submit(asyncio.run, migrate_as_owner(settings)).result()
        self._shape = self._thread.submit(asyncio.run, self._ask(self._template, _SHAPE)).result()
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self._thread.shutdown()

    def take(self) -> str:
        """The name of one with all tables and no rows."""
        if self._free:
            return self._free.pop()
        name = f"{self._prefix}_{next(self._numbers)}"
        self._server.create_database(name, self._template)
        return name

    def give_back(self, name: str) -> None:
        """Empties it. One whose tables are not what they were is dropped."""
        shape = self._thread.submit(asyncio.run, self._ask(name, _ALONE, _EMPTY, _SHAPE)).result()
        if shape == self._shape:
            self._free.append(name)
        else:
            drop_database(self._server, name)

    async def _ask(self, name: str, *statements: str) -> str:
        """What the last statement says."""
        server = self._server
        link = await asyncpg.connect(
            host=HOST, port=server.port, user=server.user, database=name, ssl=False
        )
        try:
            *before, last = statements
            for statement in before:
                await link.execute(statement)
            return str(await link.fetchval(last))
        finally:
            await link.close()
