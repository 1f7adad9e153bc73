"""A statement for each user with an address: once, spread, of the day's orders."""

from __future__ import annotations

from collections.abc import AsyncIterator
from datetime import UTC, date, datetime, timedelta
from typing import Any

import msgspec
import pytest
from redis.asyncio import Redis
from sqlalchemy import text
from temporalio.client import Client
from temporalio.exceptions import ApplicationError
from temporalio.testing import ActivityEnvironment
from temporalio.worker import Worker

from activities.reports.daily import DailyActivities, last_ended
from infra.database import users
from infra.database import users as user_table
from infra.database.engine import Database
from infra.database.models import StatementAddress
from infra.jobs.client import JobClient
from infra.jobs.kept import KeptJobs
from infra.local.servers import TemporalServer
from infra.market import calendar
from infra.market.calendar import HOME_ZONE
from infra.settings import Settings
from tests.support.message_signing import SECRETS
from worker_runtime.jobs.protocol import catalog
from worker_runtime.jobs.protocol import keys as job_keys
from worker_runtime.jobs.protocol.messages import Job, read_signed_job
from workflows import names
from workflows.reports.messages import (
    EnqueueStatements,
    PlanStatements,
    StatementsInput,
    StatementsPage,
    StatementsPlan,
)
from workflows.reports.workflow import StatementsWorkflow
from workflows.sandbox import workflow_runner

DAYS = calendar.load_calendar()
#: A Friday, whose evening's trading ends on Saturday.
DAY = date(2025, 10, 3)
BOTH = Settings(mail_host="mail.example.com", webhook_key_file="key")


@pytest.fixture
async def database(migrated_database: str) -> AsyncIterator[Database]:
    made = Database(migrated_database)
    yield made
    await made.close()


async def with_addresses(database: Database, **addresses: StatementAddress) -> None:
    async with database.session() as session:
        for user_id, address in addresses.items():
            await users.create_user(session, user_id)
            await user_table.put_addresses(session, user_id, address, actor="key:1")


async def trade(database: Database, user_id: str, *times: datetime, symbol: str = "2330") -> None:
    """A filled order of this user, who exists, at each of the times."""
    async with database.session() as session:
        await session.execute(
            text(
                "insert into broker_accounts (user_id, account_id, broker, broker_type, "
                "simulation) "
                "values (:user, 'main', 'paper', 'stock', true) on conflict do nothing"
            ),
            {"user": user_id},
        )
        for at in times:
            await session.execute(
                text(
                    "insert into orders (id, user_id, account_id, client_order_id, "
                    "fingerprint, symbol, "
                    "side, quantity, price_type, time_in_force, tag, trading_day, state, "
                    "generation, "
                    "deadline_at, created_at, filled_quantity, average_price) "
                    "select gen_random_uuid(), :user, 'main', t, '', :symbol, 'buy', 1, 'MKT', "
                    "'IOC', "
                    "left(t, 6), :day, 'filled', '', cast(:at as timestamptz), cast(:at as "
                    "timestamptz), "
                    "1, 100 from (select md5(random()::text) as t) as tag"
                ),
                {
                    "user": user_id,
                    "at": at,
                    "day": at.astimezone(HOME_ZONE).date(),
                    "symbol": symbol,
                },
            )


def statements(
    database: Database, client: Redis, settings: Settings = BOTH, **options: Any
) -> DailyActivities:
    return DailyActivities(
        database,
        KeptJobs(database, JobClient(client, SECRETS)),
        DAYS,
        settings,
        **options,
    )


async def enqueue(
    made: DailyActivities, *, after: str = "", limit: int = 100, rate: float = 5.0
) -> StatementsPage:
    request = EnqueueStatements(day=DAY.isoformat(), after=after, limit=limit, rate=rate)
    return await ActivityEnvironment().run(made.enqueue_statements, request)


async def job(client: Redis, job_id: str) -> Job:
    body = await client.hget(job_keys.job(job_keys.FLEET_TAG, job_id), "body")
    assert isinstance(body, bytes), f"there is no job {job_id}"
    return read_signed_job(body, job_id, SECRETS.job_keys(job_keys.FLEET_TAG))[0]


async def test_each_user_with_an_address_gets_one_by_each_way_and_a_repeat_sends_nothing(
    database: Database, valkey_client: Redis
) -> None:
    await with_addresses(
        database,
        ann=StatementAddress(email="ann@example.com"),
        bob=StatementAddress(email="bob@example.com", webhook_url="https://bob.example.com/hook"),
        eve=StatementAddress(),
    )
    begin = datetime.combine(DAY, datetime.min.time(), HOME_ZONE) + timedelta(hours=5, minutes=30)
    second = timedelta(seconds=1)
    # From 05:30 to 05:30: the evening's trading belongs to the day before.
    await trade(database, "bob", begin, begin + timedelta(hours=24) - second)
    await trade(database, "bob", begin - second, begin + timedelta(hours=24), symbol="9999")
    made = statements(database, valkey_client)
    assert await enqueue(made) == StatementsPage(users=2, after="bob", enqueued=3)
    assert await enqueue(made) == StatementsPage(users=2, after="bob", known=3)
    assert await enqueue(made, after="bob") == StatementsPage()

    mail = msgspec.json.decode(
        (await job(valkey_client, "statement-mail.2025-10-03.ann")).args, type=catalog.MailStatement
    )
    assert (mail.to, catalog.unpack_orders(mail.orders)) == ("ann@example.com", [])
    posted = await job(valkey_client, "statement-post.2025-10-03.bob")
    assert (posted.queue, posted.unique, posted.rate_key) == (
        "webhook",
        posted.job_id,
        "bob.example.com",
    )
    post = msgspec.json.decode(posted.args, type=catalog.PostStatement)
    rows = catalog.unpack_orders(post.orders)
    assert [(row.symbol, row.state, row.filled_quantity) for row in rows] == [
        ("2330", "filled", 1)
    ] * 2


async def test_the_users_of_a_page_are_spread_by_the_rate(
    database: Database, valkey_client: Redis
) -> None:
    addresses = {
        f"u{number}": StatementAddress(email=f"u{number}@example.com") for number in range(5)
    }
    await with_addresses(database, **addresses)
    made = statements(database, valkey_client)
    page = await enqueue(made, limit=3, rate=0.1)
    assert page == StatementsPage(users=3, after="u2", enqueued=3)
    assert await enqueue(made, after=page.after, limit=3) == StatementsPage(
        users=2, after="u4", enqueued=2
    )
    delays = [
        (await job(valkey_client, f"statement-mail.{DAY}.u{number}")).delay for number in range(5)
    ]
    assert delays == [0.0, 10.0, 20.0, 0.0, 0.2]


async def test_a_user_with_too_many_orders_hears_so_and_one_with_a_bad_address_stops_nobody(
    database: Database, valkey_client: Redis
) -> None:
    await with_addresses(
        database,
        ann=StatementAddress(webhook_url="https://{ann}/"),
        bob=StatementAddress(email="bob@example.com", webhook_url="https://bob.example.com/hook"),
    )
    noon = datetime.combine(DAY, datetime.min.time(), HOME_ZONE) + timedelta(hours=12)
    await trade(database, "bob", *(noon + timedelta(seconds=number) for number in range(3)))
    made = statements(database, valkey_client, most_orders=2)
    assert await enqueue(made) == StatementsPage(
        users=2, after="bob", enqueued=2, too_many=1, refused=1
    )
    mail = await job(valkey_client, "statement-mail.2025-10-03.bob")
    assert (mail.name, "orders.csv" in msgspec.json.decode(mail.args)["text"]) == ("email", True)
    post = await job(valkey_client, "statement-post.2025-10-03.bob")
    told = msgspec.json.decode(post.args, type=catalog.DeliverWebhook)
    assert (told.event, msgspec.json.decode(told.body)["code"]) == (
        "statement.too_large",
        "TOO_MANY_ORDERS",
    )


async def test_who_has_an_address_counts_by_the_ways_that_there_are(
    database: Database, valkey_client: Redis
) -> None:
    await with_addresses(
        database,
        ann=StatementAddress(email="ann@example.com"),
        bob=StatementAddress(webhook_url="https://bob.example.com/hook"),
    )
    plan = PlanStatements(day=DAY.isoformat())
    for settings, expected_users in (
        (BOTH, 2),
        (Settings(mail_host="mail.example.com"), 1),
        (Settings(), 0),
        (Settings(statements="on"), 2),
    ):
        planned = await ActivityEnvironment().run(
            statements(database, valkey_client, settings).plan_statements, plan
        )
        assert planned == StatementsPlan(day="2025-10-03", users=expected_users)


async def test_days_without_trading_are_left_out_and_days_to_come_refused(
    database: Database, valkey_client: Redis
) -> None:
    made, run = statements(database, valkey_client), ActivityEnvironment().run
    holiday = await run(made.plan_statements, PlanStatements(day="2025-10-05"))
    assert holiday.reason == "2025-10-05 was no trading day"
    for day, code in (("2199-01-01", "DAY_NOT_OVER"), ("yesterday", "INVALID_DAY")):
        with pytest.raises(ApplicationError) as refused:
            await run(made.plan_statements, PlanStatements(day=day))
        assert (refused.value.type, refused.value.non_retryable) == (code, True)


def test_a_day_has_ended_when_its_evening_has() -> None:
    end = timedelta(seconds=Settings().trading_day_end)
    at = datetime(2025, 10, 4, 5, 29, 59, tzinfo=HOME_ZONE)
    assert last_ended(at, end) == date(2025, 10, 2)
    assert last_ended((at + timedelta(seconds=1)).astimezone(UTC), end) == DAY


async def test_the_workflow_finds_its_activities_and_enqueues_a_days_statements(
    database: Database, valkey_client: Redis, temporal_server: TemporalServer
) -> None:
    await with_addresses(database, ann=StatementAddress(email="ann@example.com"))
    made = statements(database, valkey_client)
    client = await Client.connect(temporal_server.address)
    async with Worker(
        client,
        task_queue=names.BULK_QUEUE,
        workflows=[StatementsWorkflow],
        workflow_runner=workflow_runner(passed=()),
        activities=[made.plan_statements, made.enqueue_statements],
    ):
        result = await client.execute_workflow(
            StatementsWorkflow.run,
            StatementsInput(day=DAY.isoformat()),
            id="statements-of-a-test",
            task_queue=names.BULK_QUEUE,
        )
    assert (result.users, result.enqueued) == (1, 1)
    assert (await job(valkey_client, "statement-mail.2025-10-03.ann")).name == "statement_email"
