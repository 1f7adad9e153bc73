"""Real processes that start together, and a pool that loses its connections."""

from __future__ import annotations

import asyncio
import sys

from sqlalchemy import text

from infra.database.engine import Database, DatabaseUnavailable
from infra.database.migrate import migrate

_MIGRATE = (
    "import asyncio, sys; from infra.database.migrate import migrate; asyncio.run(migrate(sys.argv[1]))"
)


async def test_three_processes_that_start_together_migrate_once(empty_database: str) -> None:
    started = [
        await asyncio.create_subprocess_exec(
            sys.executable, "-c", _MIGRATE, empty_database, stderr=asyncio.subprocess.PIPE
        )
        for _ in range(3)
    ]
    ended = await asyncio.gather(*(process.communicate() for process in started))
    assert [process.returncode for process in started] == [0, 0, 0], [errors for _, errors in ended]
    database = Database(empty_database)
    async with database.session() as session:
        assert await session.scalar(text("select count(*) from alembic_version")) == 1
    await database.close()


async def test_after_its_connections_were_cut_the_pool_comes_back_by_itself(empty_database: str) -> None:
    await migrate(empty_database)
    database = Database(empty_database, pool_size=2)
    cutter = Database(empty_database, pool_size=1)
    async with database.session() as session:
        pid = await session.scalar(text("select pg_backend_pid()"))
    async with cutter.session() as session:
        assert await session.scalar(text("select pg_terminate_backend(:pid, 30000)"), {"pid": pid})
    failures = 0
    for _ in range(3):
        try:
            async with database.session() as session:
                assert await session.scalar(text("select 1")) == 1
        except DatabaseUnavailable:
            failures += 1
    assert failures <= 1
    await cutter.close()
    await database.close()


async def test_a_caller_waits_for_a_connection_at_most_pool_wait_seconds(empty_database: str) -> None:
    database = Database(empty_database, pool_size=1, pool_wait=0.1)
    async with database.session():
        try:
            async with asyncio.timeout(5), database.session():
                refused = False
        except DatabaseUnavailable:
            refused = True
    assert refused
    async with database.session() as session:
        assert await session.scalar(text("select 1")) == 1
    assert database.pool_wait.count >= 2
    await database.close()
