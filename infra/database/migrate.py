"""Migrations: the job that brings a database to the schema of this release, and the check of its
processes.

A migration only adds (expand); what a release uses no longer is removed by the one after it
(contract). So a process works on the schema of its own release and on a newer one, never on an
older one.
"""

import asyncio
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from importlib.resources import files
from pathlib import Path

import structlog
from alembic import command, op
from alembic.config import Config
from alembic.runtime.migration import MigrationContext
from alembic.script import ScriptDirectory
from sqlalchemy import Connection, make_url, text
from sqlalchemy.exc import DBAPIError, SQLAlchemyError
from sqlalchemy.ext.asyncio import AsyncEngine

from infra.database.engine import (
    DatabaseUnavailable,
    open_engine,
    outage_of,
    outages_named,
    require_session,
)
from infra.settings import Settings
from worker_runtime.protocol.errors import BerthError

#: The name of this advisory lock; any constant would do.
_LOCK_ID = 0x6265727468
#: Seconds that a statement of a migration waits for a lock of the service. Others queue behind it
#: meanwhile, so it gives up soon and tries again.
LOCK_TIMEOUT_S = 2.0
#: Seconds between two looks of a process that waits for its turn, or for the schema.
TURN_CHECK_INTERVAL_S = 0.5

log = structlog.get_logger()


class MigrationFailed(BerthError, code="MIGRATION_FAILED"):
    """A migration failed. Those before it are done; another `berth migrate` continues with this
    one."""


def alembic_config(scripts: Path | None = None) -> Config:
    config = Config()
    config.set_main_option(
        "script_location", str(scripts or files("infra.database") / "migrations")
    )
    return config


def newest_revision(scripts: Path | None = None) -> str:
    """Returns the schema of this release. Revisions are numbers of four digits."""
    return ScriptDirectory.from_config(alembic_config(scripts)).get_current_head() or ""


def _revision_of(connection: Connection) -> str:
    return MigrationContext.configure(connection).get_current_revision() or ""


@contextmanager
def without_transaction() -> Iterator[None]:
    """Leaves the transaction for `create index concurrently` in a migration; commits first what
    this migration did before.

    It is not undone if the migration fails, so its statements must bear a repeat: `drop index
    concurrently if exists` first, because an interrupted one leaves an index that is not valid.
    """
    with op.get_context().autocommit_block():
        # It waits for running transactions and blocks nobody meanwhile.
        op.execute("set lock_timeout = 0")
        yield
        op.execute(f"set lock_timeout = '{LOCK_TIMEOUT_S}s'")


@dataclass(frozen=True, kw_only=True)
class LockAttempts:
    """How often a migration tries to get the locks of its statements, and how long it waits."""

    timeout_s: float = LOCK_TIMEOUT_S
    pause_s: float = 3.0
    count: int = 20


async def migrate(
    database_url: str, scripts: Path | None = None, attempts: LockAttempts | None = None
) -> tuple[str, str]:
    """Runs the missing migrations, each in a transaction of its own; one process does, others wait
    for it.

    Returns the revisions before and after; a database that is newer than this release stays as it
    is. Raises `MigrationFailed`, `DatabaseUnavailable`.
    """
    attempts = attempts or LockAttempts()
    require_session(database_url)
    with outages_named():
        async with (
            open_engine(database_url, pool_size=2, command_timeout=None) as engine,
            engine.connect() as holder,
        ):
            await holder.execution_options(isolation_level="AUTOCOMMIT")
            # A statement that waited for the lock would hold up indexes that are made concurrently.
            while not await holder.scalar(text(f"select pg_try_advisory_lock({_LOCK_ID})")):  # noqa: ASYNC110
                await asyncio.sleep(TURN_CHECK_INTERVAL_S)
            before = await holder.run_sync(_revision_of)
            for number in range(1, attempts.count + 1):
                if await _upgraded(engine, scripts, attempts, number):
                    break
                await asyncio.sleep(attempts.pause_s)
            return before, await holder.run_sync(_revision_of)


#: What the role of the services may do to tables that it does not own: no change of the schema, of
#: a trigger or of what was migrated.
_GRANTS = (
    "grant usage on schema public to {0}",
    "grant select, insert, update, delete on all tables in schema public to {0}",
    "grant usage, select, update on all sequences in schema public to {0}",
    "revoke insert, update, delete on alembic_version from {0}",
)
#: The statement that makes the role of the services; no row where it is there. Compose's owner may
#: make none.
_MISSING_ROLE = text(
    "select format('create role %I login password %L', cast(:name as text), cast(:password as "
    "text)) "
    "where not exists (select from pg_roles where rolname = :name)"
)


async def migrate_as_owner(settings: Settings) -> tuple[str, str]:
    """Calls `migrate` as the role that owns the tables (`database_owner_url`), if it is not that of
    the services.

    Makes that of the services, with the password in `database_url`, where it is missing.
    Raises what `migrate` raises.
    """
    done = await migrate(settings.database_owner_url or settings.session_database_url)
    if settings.database_owner_url:
        login = make_url(settings.database_url)
        with outages_named():
            async with (
                open_engine(settings.database_owner_url, pool_size=1) as engine,
                engine.begin() as connection,
            ):
                role = engine.dialect.identifier_preparer.quote(login.username or "")
                known = {"name": login.username, "password": login.password}
                if create := await connection.scalar(_MISSING_ROLE, known):
                    await connection.exec_driver_sql(create)
                for grant in _GRANTS:
                    await connection.execute(text(grant.format(role)))
    return done


async def _upgraded(
    engine: AsyncEngine, scripts: Path | None, attempts: LockAttempts, number: int
) -> bool:
    """Upgrades the schema; False if a lock was not to be had, and what is left may be tried
    again."""
    async with engine.connect() as connection:
        revision = await connection.run_sync(_revision_of)
        if revision >= newest_revision(scripts):
            return True
        await connection.execute(text(f"set lock_timeout = '{attempts.timeout_s}s'"))
        await connection.commit()
        try:
            await connection.run_sync(_upgrade, alembic_config(scripts))
        except DBAPIError as error:
            if outage_of(error) is not None:
                raise
            await connection.rollback()
            revision = await connection.run_sync(_revision_of)
            if getattr(error.orig, "sqlstate", "") != "55P03":  # lock_not_available
                raise MigrationFailed(
                    f"the migration after {revision or 'none'}: {error.orig}"
                ) from error
            if number == attempts.count:
                raise MigrationFailed(
                    f"the migration after {revision or 'none'} got no lock in {number} tries: a "
                    "transaction holds a table for long (pg_stat_activity shows it); end it and "
                    "run the job again"
                ) from error
            log.warning("migration_waits_for_a_lock", after=revision, tries=number)
            return False
    return True


def _upgrade(connection: Connection, config: Config) -> None:
    config.attributes["connection"] = connection
    command.upgrade(config, "head")


class SchemaCheck:
    """Checks whether the database has the tables of this release, or of a newer one. Changes
    nothing."""

    def __init__(self, database_url: str) -> None:
        self._url = database_url
        self._wanted = newest_revision()
        self.ready = False
        #: Set after the first attempt, whatever came of it.
        self.tried = asyncio.Event()

    def require(self) -> None:
        """Raises `DatabaseUnavailable` until the tables are there."""
        if not self.ready:
            raise DatabaseUnavailable(
                "PostgreSQL: the schema is older than this release; `berth migrate`"
            )

    async def passes(self) -> bool:
        """Looks once at the schema. Raises `DatabaseUnavailable` if it cannot."""
        async with open_engine(self._url, pool_size=1) as engine:
            reason = await self._try(engine)
        if not self.ready and "berth migrate" not in reason:
            raise DatabaseUnavailable(f"PostgreSQL: {reason}")
        return self.ready

    async def run(self) -> None:
        """Returns when the schema is there; waits as long as it is not, or PostgreSQL is away."""
        told = ""
        async with open_engine(self._url, pool_size=1) as engine:
            while not self.ready:
                reason = await self._try(engine)
                self.tried.set()
                if reason and reason != told:
                    log.warning("schema_not_ready", reason=reason, needed=self._wanted)
                told = reason
                if not self.ready:
                    await asyncio.sleep(TURN_CHECK_INTERVAL_S)
        log.info("schema_ready")

    async def _try(self, engine: AsyncEngine) -> str:
        """Returns why the schema is not ready; '' if it is."""
        try:
            async with engine.connect() as connection:
                revision = await connection.run_sync(_revision_of)
        except (OSError, SQLAlchemyError) as error:
            return type(error).__name__
        self.ready = revision >= self._wanted
        return "" if self.ready else f"it is at {revision or 'nothing'}: run `berth migrate`"
