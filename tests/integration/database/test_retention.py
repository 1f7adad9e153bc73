"""What grows is listed, and is deleted once it is older than its setting says."""

import asyncio
import re
import uuid
from collections import Counter
from collections.abc import AsyncIterator
from datetime import timedelta
from pathlib import Path

import pytest
from sqlalchemy import func, select, text
from sqlalchemy.exc import DBAPIError

from infra.database import retention
from infra.database.engine import Database
from infra.database.trading import reconciliations
from infra.settings import Settings
from worker_runtime.jobs.protocol import keys as job_keys
from worker_runtime.protocol import keys

PAGE = Path(__file__).resolve().parents[3] / "docs" / "reference" / "retention.md"
#: Days: shorter than the defaults, so that each setting is seen to count.
SETTINGS = Settings(
    order_days=100, audit_days=400, alert_days=20, worker_history_days=50, dead_letter_days=10
)
#: What a row needs besides its age; `:n` is a number of its own, `:at` its time.
ROWS = {
    "order_tags": "(user_id, account_id, trading_day, last) values ('u' || :n, 'a', :at, 1)",
    "order_twins": "(user_id, fingerprint, client_order_id, at) values ('u' || :n, 'f', 'c', :at)",
    "reconciliations": "(user_id, account_id, epoch, differences, blocks, at, resolved_at) "
    "values ('u', 'a', 1, '{}', false, :at, :at)",
    "daily_reports": "(day, since, until, figures) values (cast(:at as date), :at, :at, '{}')",
    "audit_trail": "(at, actor, action, subject, data) values (:at, 'a', 'b', 'c', '{}')",
    "api_keys": "(id, key_hash, prefix, role, revoked_at) "
    "values (gen_random_uuid(), 'h' || :n, 'p', 'admin', :at)",
    "webhooks": "(id, token_hash, secret_hash, user_id, account_id, revoked_at) "
    "values (gen_random_uuid(), 't' || :n, 's', 'alice', 'main', :at)",
    "daily_acts": "(user_id, day, acts) values ('u' || :n, cast(:at as date), 1)",
    "webhook_calls": "(webhook_id, user_id, account_id, state, received_at, completed_at)"
    " values (gen_random_uuid(), 'u', 'a', 'done', :at, :at)",
    "webhook_deliveries": "(webhook_id, digest, at) values (gen_random_uuid(), 'd', :at)",
    "worker_transitions": "(user_id, chain, number, at, before, after, reason, worker_id, epoch, "
    "recorded_at) values ('u', 'c', :n, :at, 'a', 'b', 'r', 'w', 1, :at)",
    "worker_scripts": "(sha, source, seen_at) values ('s' || :n, 'lua', :at)",
    "maintenance_passes": "(began_at, generation, server, tasks, boot, boottime, scanned, "
    "scan_seconds, "
    "guarded, found, suspects, confirmed) values (:at, 'g', 's', 0, 'b', 0, 0, 0, '', '{}', "
    "'[]', '[]')",
    "failed_logins": "(user_id, at) values ('u', :at)",
    "dead_letters": "(id, kind, source, subject, user_id, reason, message, last_at) "
    "values (gen_random_uuid(), 'event', 's', 'x', 'u', 'r', '', :at)",
    "entity_findings": "(entity, kind, state, reason, seen_at) "
    "values ('e' || :n, 'user', 'rebuilt', 'r', :at)",
    "instruments": "(broker, code, market, kind, lot_units, lot_value, loaded_on, listed) "
    "values ('paper', 'c' || :n, 'stock', 'stock', 1, 1, cast(:at as date), false)",
    "instrument_loads": "(broker, user_id, account_id, trading_day, state, began_at) "
    "values ('paper', 'u', 'a', cast(:at as date), 'failed', :at)",
    "instrument_changes": "(broker, code, old_lot_units, old_lot_value, new_lot_units, "
    "new_lot_value, since, resolution, resolved_at) "
    "values ('paper', 'c', 1, 1, 2, 2, cast(:at as date), 'approved', :at)",
    "kept_jobs": "(user_id, job_id, sealed, digest, outcome, ended_at) "
    "values ('', 'j' || :n, '', '', 'done', :at)",
    "orders": "(id, user_id, account_id, client_order_id, fingerprint, symbol, side, quantity, "
    "price_type, "
    "time_in_force, tag, trading_day, state, generation, deadline_at, created_at) values ("
    "gen_random_uuid(), 'alice', 'main', 'o' || :n, 'f', '2330', 'buy', 1, 'market', 'day', "
    "'t' || :n, :at, "
    "'filled', 'g', :at, :at)",
}


@pytest.fixture
async def database(migrated_database: str) -> AsyncIterator[Database]:
    opened_database = Database(migrated_database)
    async with opened_database.session() as session:
        await session.execute(text("insert into users (id) values ('alice')"))
        await session.execute(
            text(
                "insert into broker_accounts (user_id, account_id, broker, broker_type, "
                "simulation) "
                "values ('alice', 'main', 'paper', 'paper', true)"
            )
        )
    yield opened_database
    await opened_database.close()


async def put(database: Database, table: str, number: int, days: float) -> None:
    """A row that is so old."""
    statement = (
        ROWS[table].replace(":at", "(now() - cast(:age as interval))").replace(":n", str(number))
    )
    async with database.session() as session:
        await session.execute(
            text(f"insert into {table} {statement}"), {"age": timedelta(days=days)}
        )


async def count(database: Database, table: str) -> int:
    async with database.session() as session:
        return int(await session.scalar(select(func.count()).select_from(text(table))) or 0)


@pytest.mark.parametrize("table", retention.PURGED)
async def test_a_row_goes_when_it_is_as_old_as_its_setting_says(
    database: Database, table: str
) -> None:
    # Scripts are kept at least 90 days, twins at most one.
    days = {"worker_scripts": 90, "order_twins": 1}.get(table) or getattr(
        SETTINGS, retention.PURGED[table][0]
    )
    before = await count(database, table)
    for number, age in enumerate((days + 1.1, days + 30, days - 1.1, 0)):
        await put(database, table, number, age)
    assert await retention.purge(database, SETTINGS) == {table: 2}
    assert await count(database, table) == before + 2
    assert await retention.purge(database, SETTINGS) == {}


async def test_orders_go_with_their_events_and_only_if_nobody_needs_them(
    database: Database,
) -> None:
    for number in range(4):
        await put(database, "orders", number, 200)
    async with database.session() as session:
        await session.execute(
            text("update orders set state = 'unknown' where client_order_id = 'o1'")
        )
        await session.execute(
            text("update orders set attention = 'why' where client_order_id = 'o2'")
        )
        await session.execute(
            text(
                "insert into order_events (event_id, order_id, state, at, data) "
                "select client_order_id || n, id, state, now(), '{}' from orders, "
                "generate_series(1, 3) n"
            )
        )
    assert await retention.purge(database, SETTINGS) == {"orders": 2}
    assert await count(database, "order_events") == 6


async def test_positions_stay_explained_when_the_orders_behind_them_go(database: Database) -> None:
    old = timedelta(days=200)
    async with database.session() as session:
        reconciliations.note_first_comparison(
            session,
            user_id="alice",
            account_id="main",
            epoch=1,
            held={"positions": [{"symbol": "2330", "ours": 0, "broker": 3}]},
        )
    for number in range(3):
        await put(database, "orders", number, 200)
    async with database.session() as session:
        await session.execute(text("update orders set filled_quantity = 1"))
        await session.execute(
            text("update orders set side = 'sell', lot = 'odd' where client_order_id = 'o2'")
        )
        await session.execute(
            text("update reconciliations set resolved_at = now() - cast(:old as interval)"),
            {"old": old},
        )
    for _ in range(2):
        async with database.session() as session:
            ours = Counter(await reconciliations.filled_positions(session, "alice", "main"))
            known = await reconciliations.earlier_comparisons(session, "alice", "main")
        assert known.begun
        assert ours["2330"] + known.base["2330"] == 3000 + 2000 - 1
        await retention.purge(database, SETTINGS)
    assert await count(database, "orders") == 0


async def test_more_rows_than_one_transaction_takes_go_and_two_at_once_may_try(
    database: Database,
) -> None:
    async with database.session() as session:
        await session.execute(
            text(
                "insert into webhook_deliveries (webhook_id, digest, at) "
                "select gen_random_uuid(), 'd', now() - interval '21 days' from "
                "generate_series(1, :rows)"
            ),
            {"rows": 2 * retention.ROWS_PER_TRANSACTION + 1},
        )
    done = await asyncio.gather(*(retention.purge(database, SETTINGS) for _ in range(3)))
    assert (
        sum(deleted.get("webhook_deliveries", 0) for deleted in done)
        <= 2 * retention.ROWS_PER_TRANSACTION + 1
    )
    await retention.purge(database, SETTINGS)
    assert await count(database, "webhook_deliveries") == 0


async def test_a_key_goes_after_its_sessions_and_what_is_in_use_stays(database: Database) -> None:
    key, of_it = uuid.uuid4(), uuid.uuid4()
    insert = text(
        "insert into api_keys (id, key_hash, prefix, role, expires_at, session_of) "
        "values (:id, gen_random_uuid(), 'p', 'admin', now() - interval '500 days', :owner)"
    )
    async with database.session() as session:
        await session.execute(insert, {"id": key, "owner": None})
        await session.execute(insert, {"id": of_it, "owner": key})
    await put(database, "webhook_deliveries", 1, 100)
    async with database.session() as session:
        await session.execute(text("update webhook_deliveries set held_until = now()"))
    assert await retention.purge(database, SETTINGS) == {"api_keys": 1}
    assert await retention.purge(database, SETTINGS) == {"api_keys": 1}
    assert await count(database, "webhook_deliveries") == 1


async def test_a_year_of_the_audit_trail_cannot_be_deleted_nor_any_of_it_changed(
    database: Database,
) -> None:
    for number, days in enumerate((364, 367)):
        await put(database, "audit_trail", number, days)
    refused = [
        "delete from audit_trail",
        "update audit_trail set actor = 'x'",
        "truncate audit_trail",
    ]
    for statement in refused:
        with pytest.raises(DBAPIError, match="append-only"):
            async with database.session() as session:
                await session.execute(text(statement))
    async with database.session() as session:
        await session.execute(
            text("delete from audit_trail where at < now() - interval '366 days'")
        )
    assert await count(database, "audit_trail") == 1


def listed(heading: str) -> dict[str, str]:
    """First column → what follows, of the table under this heading of the page."""
    part = PAGE.read_text(encoding="utf-8").partition(f"## {heading}\n")[2].partition("\n## ")[0]
    rules: dict[str, str] = {}
    for names, rest in re.findall(r"^\| (`[^|]*) \|(.*)\|$", part, re.M):
        rules |= dict.fromkeys(re.findall(r"`([^`]+)`", names), rest)
    return rules


async def test_every_table_is_on_the_page_with_the_setting_that_counts(database: Database) -> None:
    async with database.session() as session:
        tables = set(
            await session.scalars(
                text("select tablename from pg_tables where schemaname = 'public'")
            )
        )
    growing, kept = listed("Tables that grow"), listed("Tables that hold what is there")
    assert growing.keys() | kept.keys() == tables
    assert growing.keys() & kept.keys() == set()
    assert retention.PURGED.keys() <= growing.keys()
    # Elsewhere: an order's events go with it, launches and assignments together.
    assert growing.keys() - retention.PURGED.keys() == {
        "order_events",
        "worker_launches",
        "worker_sessions",
    }
    for table, (setting, _) in retention.PURGED.items():
        assert f"BERTH_{setting.upper()}" in growing[table], table


def test_every_key_without_an_end_of_its_own_is_on_the_page() -> None:
    rows = re.findall(
        r"^\| (\S+) \| (\w+) \| ([^|]*?) \|", f"{keys.__doc__}\n{job_keys.__doc__}", re.M
    )
    timed = re.compile(
        r"^\d[\d,]* (s|min|h|d|days?)\b|^deadline|a lease|its window|a burst|^while it matters$"
    )
    endless = {
        key
        for key, kind, lives in rows
        if kind not in ("channel", "type") and not timed.search(lives)
    }
    assert len(rows) > 50
    assert listed("Keys in Valkey without an end of their own").keys() == endless


async def test_ended_jobs_of_an_application_go_after_a_day_unless_they_failed(
    database: Database,
) -> None:
    insert = (
        "insert into kept_jobs (user_id, job_id, sealed, digest, outcome, ended_at)"
        " values (:owner, :id, '', '', :outcome, now() - make_interval(hours => :hours))"
    )
    rows = [
        ("app:shop", "old", "done", 25),
        ("app:shop", "failed", "failed", 25),
        ("app:shop", "young", "done", 23),
        ("", "fleet", "done", 25),
        ("alice", "user", "done", 25),
    ]
    async with database.session() as session:
        for owner, job_id, outcome, hours in rows:
            values = {"owner": owner, "id": job_id, "outcome": outcome, "hours": hours}
            await session.execute(text(insert), values)
    await retention.purge(database, Settings(data_dir=Path("unused")))
    async with database.session() as session:
        kept = set(await session.scalars(text("select job_id from kept_jobs")))
    assert kept == {"failed", "young", "fleet", "user"}
