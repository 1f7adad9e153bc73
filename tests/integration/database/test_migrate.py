"""Migrations as a job: locks, concurrent indexes, a failure on the way, and a newer schema."""

import asyncio
import re
import shutil
from pathlib import Path

import asyncpg
import pytest
from sqlalchemy import make_url

from infra.database.migrate import (
    TURN_CHECK_INTERVAL_S,
    LockAttempts,
    MigrationFailed,
    SchemaCheck,
    alembic_config,
    migrate,
    newest_revision,
)

_REVISION = """
from alembic import op
from infra.database.migrate import without_transaction

revision = "{number}"
down_revision = "{before}"
branch_labels = None
depends_on = None


def upgrade():
{body}
"""
_INDEX = """    with without_transaction():
        op.execute("drop index concurrently if exists orders_by_symbol")
        op.execute("create index concurrently orders_by_symbol on orders (symbol)")"""

_OF_INDEX = "where indexrelid = 'orders_by_symbol'::regclass"


@pytest.fixture
def scripts(tmp_path: Path) -> Path:
    """This release's migrations, to which a test adds."""
    ours = Path(alembic_config().get_main_option("script_location") or "")
    shutil.copytree(ours, tmp_path / "migrations")
    return tmp_path / "migrations"


def add_revision(scripts: Path, number: str, body: str) -> None:
    names = sorted(path.name[:4] for path in (scripts / "versions").glob("[0-9]*.py"))
    before = [name for name in names if name < number][-1]
    made = _REVISION.format(number=number, before=before, body=body)
    (scripts / "versions" / f"{number}_of_a_test.py").write_text(made, encoding="utf-8")


async def connect(url: str) -> asyncpg.Connection:
    return await asyncpg.connect(make_url(url).set(drivername="postgresql").render_as_string(False))


async def test_a_migration_that_gets_no_lock_gives_way_and_tries_again(
    migrated_database: str, scripts: Path
) -> None:
    attempts = LockAttempts(timeout_s=0.2, pause_s=0.2)
    add_revision(scripts, "9001", "    op.execute('alter table users add column more text')")
    holder, reader = await connect(migrated_database), await connect(migrated_database)
    held = holder.transaction()
    await held.start()
    await holder.execute("lock table users in access share mode")
    job = asyncio.create_task(migrate(migrated_database, scripts, attempts))
    async with asyncio.timeout(20):
        for _ in range(3):  # it blocks nobody for longer than its own wait
            await asyncio.sleep(0.3)
            await reader.fetch("select count(*) from users", timeout=2)
        assert not job.done()
        await held.rollback()
        assert (await job)[1] == "9001"
    assert await reader.fetchval("select count(more) from users") == 0
    await asyncio.gather(holder.close(), reader.close())


async def test_a_lock_that_is_held_for_ever_ends_the_job_with_a_sentence(
    migrated_database: str, scripts: Path
) -> None:
    attempts = LockAttempts(timeout_s=0.1, pause_s=0.05, count=3)
    add_revision(scripts, "9001", "    op.execute('alter table users add column more text')")
    holder = await connect(migrated_database)
    async with holder.transaction():
        await holder.execute("lock table users in access share mode")
        with pytest.raises(MigrationFailed, match="got no lock in 3 tries"):
            await migrate(migrated_database, scripts, attempts)
    await holder.close()


async def test_what_was_migrated_before_a_failure_stays_and_the_next_run_continues(
    migrated_database: str, scripts: Path
) -> None:
    add_revision(scripts, "9001", "    op.execute('alter table users add column one text')")
    add_revision(
        scripts,
        "9002",
        "    op.execute('alter table users add column two text')\n    op.execute('select 1/0')",
    )
    with pytest.raises(
        MigrationFailed, match=re.escape("the migration after 9001: ") + ".*division by zero"
    ):
        await migrate(migrated_database, scripts)
    add_revision(scripts, "9002", "    op.execute('alter table users add column two text')")
    assert await migrate(migrated_database, scripts) == ("9001", "9002")
    assert await migrate(migrated_database, scripts) == ("9002", "9002")


async def test_an_index_is_made_while_rows_are_written_and_after_an_interrupted_one(
    migrated_database: str, scripts: Path
) -> None:
    add_revision(scripts, "9001", _INDEX)
    writer = await connect(migrated_database)
    # What an interrupted one leaves: its name, and no index that counts.
    await writer.execute("create index orders_by_symbol on orders (symbol)")
    await writer.execute(f"update pg_index set indisvalid = false {_OF_INDEX}")  # noqa: S608
    held = writer.transaction()
    await held.start()
    await writer.execute("lock table orders in row exclusive mode")
    jobs = [asyncio.create_task(migrate(migrated_database, scripts)) for _ in range(2)]
    async with asyncio.timeout(20):
        await asyncio.sleep(TURN_CHECK_INTERVAL_S * 2)
        assert not any(job.done() for job in jobs)  # it waits for what runs, longer than for a lock
        await held.rollback()
        # The other one waited for its turn.
        assert [(await job)[1] for job in jobs] == ["9001", "9001"]
    assert await writer.fetchval(f"select indisvalid from pg_index {_OF_INDEX}")  # noqa: S608
    await writer.close()


async def test_a_release_works_on_a_newer_schema_and_not_on_an_older_one(
    empty_database: str, scripts: Path
) -> None:
    check = SchemaCheck(empty_database)
    waiting = asyncio.create_task(check.run())
    async with asyncio.timeout(20):
        await check.tried.wait()
        assert not check.ready
        add_revision(scripts, "9001", "    op.execute('alter table users add column more text')")
        await migrate(empty_database, scripts)
        await waiting
    assert check.ready
    # Nor does the job of this release change what a newer one made.
    assert await migrate(empty_database) == ("9001", "9001")
    assert newest_revision() < "9001"


async def test_a_list_and_its_source_are_of_the_accounts_market_after_the_migration(
    empty_database: str, scripts: Path
) -> None:
    for path in (scripts / "versions").glob("002[2-9]*.py"):
        path.unlink()
    assert (await migrate(empty_database, scripts))[1] == "0021"
    before = await connect(empty_database)
    await before.execute("insert into users (id) values ('lists')")
    await before.execute(
        "insert into broker_accounts (user_id, account_id, broker, broker_type, simulation)"
        " values ('lists', 'main', 'paper', 'futures', true)"
    )
    await before.execute(
        "insert into instrument_sources (broker, user_id, account_id, set_by)"
        " values ('paper', 'lists', 'main', 'op')"
    )
    await before.execute(
        "insert into instrument_loads (broker, user_id, account_id, trading_day, state)"
        " values ('paper', 'lists', 'main', '2026-11-23', 'loaded'),"
        " ('paper', 'lists', 'main', '2026-11-24', 'failed')"
    )
    await before.execute(
        "insert into instruments (broker, code, market, kind, lot_units, lot_value, loaded_on)"
        " values ('paper', '2330', 'stock', 'stock', 1000, 1000, '2026-11-23'),"
        " ('paper', 'TXFA7', 'futures', 'future', 1, 200, '2026-11-23')"
    )
    await migrate(empty_database)
    assert await before.fetchval("select market from instrument_sources") == "futures"
    loads = await before.fetch("select market, markets from instrument_loads order by id")
    assert [(load["market"], sorted(load["markets"])) for load in loads] == [
        ("futures", ["futures", "stock"]),
        ("futures", []),
    ]
    await before.close()
