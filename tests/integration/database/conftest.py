"""Contains the database of a test, with a user and an account."""

from __future__ import annotations

from collections.abc import AsyncIterator

import pytest

from infra.database import users
from infra.database.engine import Database
from tests.support.orders.stored import put_account


@pytest.fixture
async def database(migrated_database: str) -> AsyncIterator[Database]:
    database = Database(migrated_database, pool_wait=30.0)
    async with database.session() as session:
        await users.create_user(session, "42")
        await put_account(database, session_user="42", session=session)
    yield database
    await database.close()
