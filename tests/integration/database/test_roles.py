"""The role of the services uses the tables and cannot change what they are."""

import base64
import hashlib
import hmac
import re
from pathlib import Path

import pytest
from sqlalchemy import make_url, text
from sqlalchemy.exc import DBAPIError

from infra.database.engine import Database
from infra.database.migrate import migrate_as_owner
from infra.database.models import Base
from infra.settings import Settings
from tests.support.commands import CommandForker

TAMPERING = [
    "drop trigger audit_trail_keeps_a_year on audit_trail",
    "alter table audit_trail disable trigger all",
    "create or replace function audit_trail_is_append_only() returns trigger language plpgsql "
    "as $$ begin return new; end $$",
    "truncate orders cascade",
    "drop table orders",
    "alter table users add column more text",
    "create table mine (id int)",
    "create index on orders (symbol)",
    "update alembic_version set version_num = '0001'",
    "set session_replication_role = replica",
]


@pytest.mark.parametrize("statement", TAMPERING)
async def test_what_only_the_owner_may_do_is_refused(
    services_database: str, statement: str
) -> None:
    database = Database(services_database)
    with pytest.raises(DBAPIError, match=r"permission denied|must be owner"):
        async with database.session() as session:
            await session.execute(text(statement))
    await database.close()


async def test_every_table_can_be_read_and_written(services_database: str) -> None:
    database = Database(services_database)
    async with database.session() as session:
        for table in Base.metadata.tables:
            for right in ("select", "insert", "update", "delete"):
                asked = text("select has_table_privilege(:table, :right)")
                assert await session.scalar(asked, {"table": table, "right": right}), (table, right)
        for sequence in ("control_number", "switch_version"):
            number = "select setval(cast(:name as regclass), nextval(cast(:name as regclass)))"
            assert await session.scalar(text(number), {"name": sequence}) == 1
    await database.close()


async def test_a_table_of_a_later_release_is_granted_by_its_migration(
    migrated_database: str, services_database: str, tmp_path: Path, commands: CommandForker
) -> None:
    """Also by the command, which an operator runs."""
    owner, services = Database(migrated_database), Database(services_database)
    async with owner.session() as session:
        await session.execute(text("create table later (id int)"))
    settings = Settings(database_url=services_database, database_owner_url=migrated_database)
    before, after = await migrate_as_owner(settings)
    assert before == after
    async with services.session() as session:
        await session.execute(text("insert into later values (1)"))
    async with owner.session() as session:
        await session.execute(text("revoke all on later from berth_services"))
    urls = {"BERTH_DATABASE_URL": services_database, "BERTH_DATABASE_OWNER_URL": migrated_database}
    done = commands.run("migrate", **urls)
    assert done.code == 0, done.err
    async with services.session() as session:
        await session.execute(text("insert into later values (2)"))
    await owner.close()
    await services.close()


async def test_a_missing_role_of_the_services_is_made_with_its_password(
    migrated_database: str,
) -> None:
    """On AWS, where no script of ours runs in the database. An odd name and password are quoted."""
    name, password = 'Mr. "O\'Neill"', "it's:a?100%"
    login = make_url(migrated_database).set(username=name, password=password)
    settings = Settings(
        database_url=login.render_as_string(hide_password=False),
        database_owner_url=migrated_database,
    )
    owner = Database(migrated_database)
    try:
        await migrate_as_owner(settings)
        await migrate_as_owner(settings)  # and again, when it is there
        async with owner.session() as session:
            asked = (
                "select rolpassword, rolsuper, rolcreaterole from pg_authid where rolname = :name"
            )
            [role] = await session.execute(text(asked), {"name": name})
        assert verifies(role.rolpassword, password)
        assert (role.rolsuper, role.rolcreaterole) == (False, False)
        services = Database(settings.database_url)
        async with services.session() as session:
            assert await session.scalar(text("select count(*) from orders")) == 0
            with pytest.raises(DBAPIError, match="must be owner"):
                await session.execute(text("drop table orders"))
        await services.close()
    finally:
        async with owner.session() as session:
            quoted = await session.scalar(
                text("select quote_ident(cast(:name as text))"), {"name": name}
            )
            await session.execute(text(f"drop owned by {quoted}"))
            await session.execute(text(f"drop role {quoted}"))
        await owner.close()


def verifies(stored: str, password: str) -> bool:
    """Whether this is what PostgreSQL stores of the password: SCRAM-SHA-256$rounds:salt$stored
    key:…"""
    rounds, salt, kept = re.split(r"[$:]", stored)[1:4]
    salted = hashlib.pbkdf2_hmac("sha256", password.encode(), base64.b64decode(salt), int(rounds))
    client_key = hmac.digest(salted, b"Client Key", "sha256")
    return hashlib.sha256(client_key).digest() == base64.b64decode(kept)


async def test_the_services_alone_migrate_nothing(
    services_database: str, commands: CommandForker
) -> None:
    """They need no owner where nothing is to be done, and get a clear refusal where something
    is."""
    done = commands.run("migrate", BERTH_DATABASE_URL=services_database)
    assert done.code == 0, done.err
