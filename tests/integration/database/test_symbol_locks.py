"""The lock under which closes and reversals of a symbol are written."""

from __future__ import annotations

from collections.abc import AsyncIterator

import pytest
from sqlalchemy import text

from infra.database.engine import Database
from infra.database.orders.checks import lock_symbol

#: 25205 is the first half of the names of these locks; the second one is a signed integer.
IS_HELD = text("""
select exists (select from pg_locks
                where locktype = 'advisory' and pid = pg_backend_pid() and classid = 25205
                  and objid = cast(hashtext(:name) as bit(32))::bigint::oid)
""")


@pytest.fixture
async def database(migrated_database: str) -> AsyncIterator[Database]:
    database = Database(migrated_database, pool_wait=30.0)
    yield database
    await database.close()


@pytest.mark.parametrize(
    ("symbol", "locked"),
    [("2330", "233"), ("006208", "006"), ("MXFA6", "MXF"), ("MXFR1", "MXF"), ("TXO20000A6", "TXO")],
)
async def test_a_symbol_is_locked_by_the_name_that_the_release_before_locks(
    database: Database, symbol: str, locked: str
) -> None:
    async with database.session() as session:
        await lock_symbol(session, "alice", "main", symbol)
        assert await session.scalar(IS_HELD, {"name": f"alice/main/{locked}"})
