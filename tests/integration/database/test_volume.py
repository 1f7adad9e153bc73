"""Tables that hold a year: what is asked often reads what it needs, and no more with each row that
was."""

import uuid
from collections.abc import AsyncIterator
from dataclasses import replace
from datetime import UTC, datetime, timedelta
from typing import Any

import pytest
from sqlalchemy import event, text
from sqlalchemy.ext.asyncio import AsyncSession

from infra.database import audit, retention
from infra.database.engine import Database
from infra.database.orders import acceptance
from infra.database.trading import reconciliations
from infra.database.workers import launches, sessions
from infra.recovery.restore import DATA_UNTIL
from infra.settings import Settings
from tests.support.orders.stored import make_new_order

#: Twenty users with a thousand of each; two of them have ended their last assignments long ago.
ROWS = """
insert into users (id, epoch) select 'u' || n, 1000 from generate_series(1, 20) n;
insert into broker_accounts (user_id, account_id, broker, broker_type, simulation)
select id, 'main', 'paper', 'stock', true from users;
insert into worker_sessions (claim_id, user_id, epoch, pool, worker_id, claimed_at, assigned_at,
                             ended_at)
select u || ' ' || n, 'u' || u, n, 'pool', 'w' || u || ' ' || n, at, at,
       case when u > 18 then at - interval '100 days' when n < 1000 then at end
  from generate_series(1, 1000) n, generate_series(1, 20) u,
       lateral (select now() - (1000 - n) * interval '2 hours' as at) as times;
insert into worker_launches (worker_id, pool, version, launched_at)
select worker_id, 'pool', '1', assigned_at - interval '1 hour' from worker_sessions;
insert into audit_trail (at, actor, action, subject, data)
select now() - (20000 - n) * interval '20 minutes', 'key',
       case n % 2000 when 7 then 'user.disabled' else 'order.accepted' end,
       'order:' || n, '{}' from generate_series(1, 20000) n;
insert into worker_transitions (user_id, chain, number, at, before, after, reason, worker_id, epoch,
                                recorded_at)
select user_id, claim_id, 1, assigned_at, 'a', 'b', 'r', worker_id, epoch, assigned_at
  from worker_sessions order by assigned_at;
insert into order_tags (user_id, account_id, trading_day, last)
select user_id, account_id, date '2026-11-26' - n, 1
  from generate_series(1000, 1, -1) n, broker_accounts;
insert into orders (id, user_id, account_id, client_order_id, fingerprint, symbol, side, quantity,
                    price_type, time_in_force, tag, trading_day, state, generation, deadline_at,
                    created_at, updated_at, broker_order_id, filled_quantity, verify_at)
select gen_random_uuid(), 'u1', 'main', 'c' || n, '', '2330', 'buy', 1,
       'LMT', 'ROD', lpad(n || '', 6, '0'), '2026-11-25', 'filled', 'g', at, at, at,
       'b' || n, n % 2, null
  from generate_series(1, 20000) n,
       lateral (select now() - (20000 - n) * interval '20 minutes' as at) as times;
insert into order_events (event_id, order_id, state, at, data)
select id || ' accepted', id, 'accepted', created_at, '{}' from orders
"""
GROWS = (
    "orders",
    "order_events",
    "audit_trail",
    "worker_sessions",
    "worker_launches",
    "worker_transitions",
    "order_tags",
)


class PlanRecorder:
    """The plans of all statements that a database is asked."""

    def __init__(self, database: Database) -> None:
        self.plans: list[str] = []
        event.listen(database.engine.sync_engine, "before_cursor_execute", self._explain)

    def _explain(self, _link: Any, cursor: Any, statement: str, values: Any, *_: Any) -> None:
        cursor.execute(f"explain {statement}", values)
        self.plans.append("\n".join(line for (line,) in cursor.fetchall()))


@pytest.fixture
async def database(migrated_database: str) -> AsyncIterator[Database]:
    async with Database(migrated_database) as opened_database:
        async with opened_database.session() as session:
            for statement in ROWS.split(";\n"):
                await session.execute(text(statement))
        async with opened_database.session(autocommit=True) as session:
            await session.execute(text("vacuum analyze"))
        yield opened_database


async def ended_long_ago(session: AsyncSession) -> Any:
    await launches.purge_ended(session, 90, ["w1 1000", "w2 1000"])


async def of_the_broker(session: AsyncSession) -> Any:
    assert set(await reconciliations.orders_by_broker_ids(session, "u1", "main", ["b7", "x"])) == {
        "b7"
    }


async def positions(session: AsyncSession) -> Any:
    assert await reconciliations.filled_positions(session, "u1", "main") == {"2330": 10_000_000}


async def acts_of_people(session: AsyncSession) -> Any:
    assert len(await audit.list_entries(session, action="user.", limit=50)) == 10


async def acts_of_an_hour(session: AsyncSession) -> Any:
    since = datetime.now(UTC) - timedelta(hours=1)
    assert len(await audit.list_entries(session, actor="key", since=since, limit=50)) == 3


async def still_needed(session: AsyncSession) -> Any:
    count = await launches.count_launched_before(session, 4e9, ready=["w7 7"], linger=60.0)
    assert count == 19  # eighteen in service, and the one that is named


async def lately_claimed(session: AsyncSession) -> Any:
    assert await sessions.count_claims(session, "pool", 600) == 20


async def end_of_the_data(session: AsyncSession) -> Any:
    until = await session.scalar(DATA_UNTIL)
    assert until is not None
    assert datetime.now(UTC) - until < timedelta(hours=1)


ASKED = (
    ended_long_ago,
    of_the_broker,
    positions,
    acts_of_people,
    acts_of_an_hour,
    still_needed,
    lately_claimed,
    end_of_the_data,
)


async def test_what_is_asked_reads_no_table_from_end_to_end(database: Database) -> None:
    recorder = PlanRecorder(database)
    for ask in ASKED:
        recorder.plans.clear()
        async with database.session() as session:
            await ask(session)
        assert recorder.plans
        for plan in recorder.plans:
            assert not [table for table in GROWS if f"Seq Scan on {table} " in plan], plan
            # Nor a part of an index, such as all that an account has ever ordered.
            assert "orders_tag" not in plan, plan
            assert "Filter: (claimed_at" not in plan, plan


async def test_nor_does_the_deletion_of_old_rows_when_there_are_none(database: Database) -> None:
    recorder = PlanRecorder(database)
    assert set(await retention.purge(database, Settings())) <= {"order_twins"}
    assert len(recorder.plans) == len(retention.PURGED)
    for plan in recorder.plans:
        assert not [table for table in GROWS if f"Seq Scan on {table} " in plan], plan


async def test_assignments_that_ended_long_ago_go_some_at_a_time_and_of_a_user_the_oldest(
    database: Database,
) -> None:
    remaining = text("select user_id, count(*), min(epoch) from worker_sessions group by 1")
    known = text("select count(*) from worker_launches")
    counts = []
    for _ in range(3):
        async with database.session() as session:
            await launches.purge_ended(session, 90, [])
            rows = (await session.execute(remaining)).all()
            assert all(first == 1001 - count for _, count, first in rows)
            counts.append(sum(count for _, count, _ in rows))
            assert await session.scalar(known) == counts[-1]
    assert counts == [19_000, 18_002, 18_002]  # the latest of each user is kept for ever


async def test_ids_of_orders_grow_with_time(database: Database) -> None:
    """So what is written for one lies at the ends of the indexes, and not all over them."""
    ids: list[uuid.UUID] = []
    async with database.session() as session:
        for number in range(20):
            new = replace(make_new_order(f"n{number}", f"f{number}"), user_id="u2")
            ids.append((await acceptance.accept_order(session, new)).order.id)
    moments = [order_id.int >> 80 for order_id in ids]
    assert moments == sorted(moments)
    assert moments[0] < moments[-1]
    assert {(order_id.version, order_id.variant) for order_id in ids} == {(7, uuid.RFC_4122)}
    assert len(set(ids)) == len(ids)
