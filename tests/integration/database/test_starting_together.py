"""Real processes that start together, and a pool that loses its connections."""

from __future__ import annotations

import asyncio
import sys

import pytest
from prometheus_client import REGISTRY
from sqlalchemy import text

from infra.database.engine import Database, DatabaseUnavailable, SingleStatement
from infra.database.migrate import migrate

_MIGRATE = (
    "import asyncio, sys; from infra.database.migrate import migrate; "
    "asyncio.run(migrate(sys.argv[1]))"
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


async def test_after_its_connections_were_cut_the_pool_comes_back_by_itself(
    empty_database: str,
) -> None:
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


async def test_a_caller_waits_for_a_connection_at_most_pool_wait_seconds(
    empty_database: str,
) -> None:
    count = "berth_database_pool_wait_seconds_count"
    before = REGISTRY.get_sample_value(count) or 0
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
    assert (REGISTRY.get_sample_value(count) or 0) - before >= 3  # the refused one, too
    await database.close()


@pytest.mark.parametrize("single", [False, True])
async def test_callers_get_a_connection_in_the_order_in_which_they_came(
    empty_database: str, single: bool
) -> None:
    database = Database(empty_database, pool_size=1)
    ask = SingleStatement(text("select pg_backend_pid() as pid"))
    turns: list[int] = []

    async def use(number: int) -> None:
        if single:
            await database.row(ask, {})
        else:
            async with database.session() as session:
                await session.execute(text("select 1"))
        turns.append(number)

    callers = []
    for number in range(200):  # they come while connections are given back
        callers.append(asyncio.create_task(use(number)))
        await asyncio.sleep(0.0005)
    await asyncio.gather(*callers)
    assert turns == list(range(200))
    await database.close()
