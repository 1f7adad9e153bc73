"""Migration of a database to the newest schema, safe to start in several processes at once."""

from __future__ import annotations

from importlib.resources import files

from alembic import command
from alembic.config import Config
from alembic.runtime.migration import MigrationContext
from alembic.script import ScriptDirectory
from sqlalchemy import Connection, text

from infra.database.engine import create_engine

#: The name of this advisory lock; any constant would do.
_LOCK = 0x6265727468


def alembic_config() -> Config:
    config = Config()
    config.set_main_option("script_location", str(files("infra.database") / "migrations"))
    return config


def _upgrade(connection: Connection) -> None:
    config = alembic_config()
    wanted = ScriptDirectory.from_config(config).get_current_head()
    if MigrationContext.configure(connection).get_current_revision() == wanted:
        return
    config.attributes["connection"] = connection
    command.upgrade(config, "head")


async def migrate(database_url: str) -> None:
    """Runs the missing migrations in one transaction. Other processes wait for its advisory lock."""
    engine = create_engine(database_url, pool_size=1)
    try:
        async with engine.begin() as connection:
            await connection.execute(text("select pg_advisory_xact_lock(:lock)"), {"lock": _LOCK})
            await connection.run_sync(_upgrade)
    finally:
        await engine.dispose()
