"""The databases of the tests themselves: what one test left, the next one does not find."""

from __future__ import annotations

from collections.abc import Iterator

import asyncpg
import pytest

from infra.database import users
from infra.database.engine import Database
from infra.local.process import HOST
from infra.local.servers import PostgresServer
from tests.support.databases import MigratedDatabases


@pytest.fixture
def databases(postgres_server: PostgresServer) -> Iterator[MigratedDatabases]:
    with MigratedDatabases(postgres_server, "own") as databases:
        yield databases


async def fetch_value(server: PostgresServer, name: str, statement: str) -> object:
    link = await asyncpg.connect(
        host=HOST, port=server.port, user=server.user, database=name, ssl=False
    )
    try:
        return await link.fetchval(statement)
    finally:
        await link.close()


async def test_rows_and_numbers_of_an_earlier_test_are_gone_and_open_connections_are_ended(
    postgres_server: PostgresServer, databases: MigratedDatabases
) -> None:
    name = databases.take()
    database = Database(postgres_server.url(name))
    async with database.session() as session:
        await users.create_user(session, "left-behind")
    await database.close()
    await fetch_value(postgres_server, name, "select nextval('switch_version')")
    left_open = await asyncpg.connect(
        host=HOST, port=postgres_server.port, user=postgres_server.user, database=name, ssl=False
    )
    await left_open.execute("begin; insert into users (id) values ('half-done')")
    databases.give_back(name)
    assert databases.take() == name
    assert await fetch_value(postgres_server, name, "select count(*) from users") == 0
    assert await fetch_value(postgres_server, name, "select nextval('switch_version')") == 1
    with pytest.raises((asyncpg.PostgresError, asyncpg.InterfaceError, OSError)):
        await left_open.execute("commit")


async def test_a_database_whose_tables_a_test_has_changed_is_not_used_again(
    postgres_server: PostgresServer, databases: MigratedDatabases
) -> None:
    name = databases.take()
    await fetch_value(postgres_server, name, "alter table users add column more text")
    databases.give_back(name)
    assert databases.take() != name
