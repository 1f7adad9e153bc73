"""Statements without a session, as orders are accepted, and connections that end meanwhile."""

from __future__ import annotations

import asyncio
import uuid
from collections.abc import AsyncIterator
from dataclasses import replace
from decimal import Decimal

import asyncpg
import pytest
from sqlalchemy import Float, String, bindparam, text

from infra.database import users
from infra.database.engine import Database, DatabaseUnavailable, SingleStatement
from infra.database.models import Order
from infra.database.orders import acceptance, recording
from tests.support.orders.stored import make_new_order, put_account
from worker_runtime.protocol.errors import UnknownAccount

_ECHO = SingleStatement(text("select :said as said").bindparams(bindparam("said", type_=String)))
_SLEEP = SingleStatement(
    text("select pg_sleep(:seconds)").bindparams(bindparam("seconds", type_=Float))
)


@pytest.fixture
async def database(migrated_database: str) -> AsyncIterator[Database]:
    database = Database(migrated_database)
    async with database.session() as session:
        await users.create_user(session, "42")
        await put_account(database, session_user="42", session=session)
    yield database
    await database.close()


async def said(database: Database, word: str) -> str:
    row = await database.row(_ECHO, {"said": word})
    assert row is not None
    return str(row["said"])


async def end_connections(url: str) -> int:
    """Those of everybody else, as a restart of PostgreSQL does; returns how many."""
    other = Database(url)
    async with other.session() as session:
        ended = await session.scalar(
            text(
                "select count(pg_terminate_backend(pid)) from pg_stat_activity where pid <> "
                "pg_backend_pid()"
                " and datname = current_database() and backend_type = 'client backend'"
            )
        )
    await other.close()
    return int(ended or 0)


async def test_an_order_is_the_same_as_one_that_is_accepted_in_a_session(
    database: Database,
) -> None:
    async with database.session() as session:
        in_session = (await acceptance.accept_order(session, make_new_order("one"))).order
    other = (await acceptance.accept_order_alone(database, make_new_order("other"))).order
    differ = {
        "id",
        "client_order_id",
        "tag",
        "created_at",
        "updated_at",
        "deadline_at",
        "verify_at",
        "changed",
    }
    names = [column.name for column in Order.__table__.columns]
    for name in set(names) - differ:
        assert getattr(in_session, name) == getattr(other, name), name
    for name in names:
        assert type(getattr(in_session, name)) is type(getattr(other, name)), name
    async with database.session() as session:
        stored = await recording.get_order(session, other.id)
        assert {name: getattr(stored, name) for name in names} == {
            name: getattr(other, name) for name in names
        }
        assert [event.state for event in await recording.events_of_order(session, other.id)] == [
            "accepted"
        ]


async def test_a_limit_price_and_a_deadline_are_written_exactly(database: Database) -> None:
    new = replace(make_new_order("one"), price_type="LMT", price=Decimal("580.25"), lifetime_s=7.25)
    order = (await acceptance.accept_order_alone(database, new)).order
    lasts = (order.deadline_at - order.created_at).total_seconds()
    assert (order.price, lasts) == (Decimal("580.25"), pytest.approx(7.25, abs=0.01))
    again = await acceptance.accept_order_alone(database, new)
    assert (again.new, again.order.deadline_at) == (False, order.deadline_at)
    assert 0 < again.seconds_left < 7.25


async def test_twenty_simultaneous_repeats_make_one_order(database: Database) -> None:
    async def accept() -> tuple[uuid.UUID, bool]:
        accepted = await acceptance.accept_order_alone(database, make_new_order())
        return accepted.order.id, accepted.new

    results = await asyncio.gather(*(accept() for _ in range(20)))
    assert len({order_id for order_id, _ in results}) == 1
    assert sum(new for _, new in results) == 1


async def test_a_repeat_with_another_body_is_seen_and_an_unknown_account_refused(
    database: Database,
) -> None:
    await acceptance.accept_order_alone(database, make_new_order(fingerprint="one"))
    repeated = await acceptance.accept_order_alone(database, make_new_order(fingerprint="two"))
    assert (repeated.new, repeated.same_request) == (False, False)
    with pytest.raises(UnknownAccount):
        await acceptance.accept_order_alone(database, make_new_order("c-2", account_id="other"))


async def test_idle_connections_that_ended_are_replaced(
    database: Database, migrated_database: str
) -> None:
    await asyncio.gather(*(said(database, str(number)) for number in range(4)))
    assert await end_connections(migrated_database) > 0
    await asyncio.sleep(0.2)  # their ends are heard of
    assert await asyncio.gather(*(said(database, str(number)) for number in range(8))) == list(
        "01234567"
    )
    async with database.session() as session:
        assert await session.scalar(text("select 1")) == 1


async def test_a_connection_that_ends_under_a_statement_is_an_outage_and_is_replaced(
    database: Database, migrated_database: str
) -> None:
    sleeping = asyncio.create_task(database.row(_SLEEP, {"seconds": 50.0}))
    while True:
        async with database.session() as session:
            if await session.scalar(
                text(
                    "select count(*) from pg_stat_activity where query like 'select pg_sleep%'"
                    " and datname = current_database() and state = 'active'"
                )
            ):
                break
    await end_connections(migrated_database)
    with pytest.raises(DatabaseUnavailable):
        await sleeping
    await asyncio.sleep(0.2)
    assert await said(database, "again") == "again"


async def test_a_statement_that_finds_no_connection_in_time_is_an_outage_and_gives_its_place_back(
    migrated_database: str,
) -> None:
    database = Database(migrated_database, pool_size=1, pool_wait=0.1)
    sleeping = asyncio.create_task(database.row(_SLEEP, {"seconds": 1.0}))
    await asyncio.sleep(0.3)
    with pytest.raises(DatabaseUnavailable):
        await said(database, "too early")
    await sleeping
    assert await said(database, "later") == "later"
    await database.close()


async def test_what_is_wrong_with_a_value_is_no_outage_and_costs_no_connection(
    migrated_database: str,
) -> None:
    database = Database(migrated_database, pool_size=1)
    backend = SingleStatement(text("select pg_backend_pid() as pid"))
    before = await database.row(backend, {})
    # By asyncpg, which cannot encode it.
    with pytest.raises(asyncpg.DataError, match="expected str"):
        await database.row(_ECHO, {"said": 1})
    with pytest.raises(asyncpg.CharacterNotInRepertoireError):  # by PostgreSQL
        await database.row(_ECHO, {"said": "\x00"})
    assert await database.row(backend, {}) == before
    await database.close()


async def test_the_options_of_the_url_hold_for_single_statements_too(
    migrated_database: str,
) -> None:
    options = "prepared_statement_cache_size=0&command_timeout=3&timeout=4"
    database = Database(f"{migrated_database}?{options}", pool_size=1)
    assert await said(database, "word") == "word"
    prepared = SingleStatement(text("select count(*) as kept from pg_prepared_statements"))
    row = await database.row(prepared, {})
    assert row is not None
    assert row["kept"] == 0
    await database.close()


async def test_no_other_call_reads_the_answer_to_a_cancelled_call(database: Database) -> None:
    cut = 0
    for number in range(30):
        given_up = asyncio.create_task(database.row(_SLEEP, {"seconds": 0.02}))
        await asyncio.sleep(number * 0.0005)
        given_up.cancel()
        word = f"word {number}"
        assert await said(database, word) == word
        await asyncio.wait({given_up})
        cut += given_up.cancelled()
    assert cut > 0
