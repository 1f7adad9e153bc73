"""Whose turn it is: one at a time, and given back by the end of the transaction, also by a broken
one."""

from __future__ import annotations

from collections.abc import AsyncIterator

import pytest

from infra.database import locks
from infra.database.engine import Database


@pytest.fixture
async def database(empty_database: str) -> AsyncIterator[Database]:
    made = Database(empty_database)
    yield made
    await made.close()


async def test_one_at_a_time_has_the_turn_and_the_end_gives_it_back(database: Database) -> None:
    async with database.session() as first, database.session() as other:
        assert await locks.take_turn(first, "move")
        assert not await locks.take_turn(other, "move")
        assert await locks.take_turn(other, "something else")
        await first.commit()
        assert await locks.take_turn(other, "move")


async def test_a_failure_gives_it_back(database: Database) -> None:
    async def fails() -> None:
        async with database.session() as session:
            assert await locks.take_turn(session, "move")
            raise RuntimeError("on the way")

    with pytest.raises(RuntimeError):
        await fails()
    async with database.session() as other:
        assert await locks.take_turn(other, "move")
