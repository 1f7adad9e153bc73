"""The daily report: once for each trading day, whatever dies, with figures that can be counted by
hand."""

from __future__ import annotations

import asyncio
import json
import signal
import sys
from collections.abc import AsyncIterator
from datetime import UTC, date, datetime, timedelta
from typing import Any

import pytest
from redis.asyncio import Redis
from sqlalchemy import text
from temporalio.client import Client
from temporalio.exceptions import ApplicationError
from temporalio.testing import ActivityEnvironment, WorkflowEnvironment
from temporalio.worker import Worker

from activities.reports.daily import DailyActivities
from infra.database import reports
from infra.database.engine import Database
from infra.database.trading.models import Reconciliation
from infra.database.trading.reconciliations import FIRST_COMPARISON
from infra.jobs.client import JobClient
from infra.jobs.kept import KeptJobs
from infra.local.servers import TemporalServer, ValkeyServer
from infra.market import calendar
from infra.market.calendar import HOME_ZONE
from infra.settings import Settings
from tests.support.message_signing import SECRETS
from worker_runtime.jobs.protocol import keys as job_keys
from worker_runtime.jobs.protocol.messages import read_job
from worker_runtime.protocol.worker_reports import payload_of
from workflows import names
from workflows.reports.messages import DailyReportInput, MakeReport, ReportResult
from workflows.reports.workflow import DailyReportWorkflow
from workflows.sandbox import workflow_runner

DAYS = calendar.load_calendar()
END = timedelta(seconds=Settings().trading_day_end)
TO = ("ops@example.com", "boss@example.com")
#: A Thursday before a long weekend, from Friday's holiday to Monday's; its report is made on
#: Tuesday.
DAY, NEXT = date(2026, 9, 24), date(2026, 9, 29)


@pytest.fixture
async def database(migrated_database: str) -> AsyncIterator[Database]:
    made = Database(migrated_database)
    yield made
    await made.close()


def activity_of(database: Database, client: Redis, to: tuple[str, ...] = TO) -> DailyActivities:
    jobs = KeptJobs(database, JobClient(client, SECRETS))
    return DailyActivities(database, jobs, DAYS, Settings(report_to=to))


def taipei(day: date, hour: int = 8, minute: int = 0) -> datetime:
    return datetime(day.year, day.month, day.day, hour, minute, tzinfo=HOME_ZONE)


async def make(made: DailyActivities, at: datetime, day: str = "") -> ReportResult:
    return await ActivityEnvironment().run(made.make_report, MakeReport(day=day, at=at.timestamp()))


async def mails(client: Redis) -> dict[str, str]:
    """Job id → address of all mails on the queue."""
    waiting = await client.zrange(job_keys.subqueue(job_keys.FLEET_TAG, "email", "email"), 0, -1)
    recipients = {}
    for raw in waiting:
        job_id = raw.decode() if isinstance(raw, bytes) else str(raw)
        job_id = job_id.rpartition(":")[2]
        body = await client.hget(job_keys.job(job_keys.FLEET_TAG, job_id), "body")
        assert isinstance(body, bytes), job_id
        recipients[job_id] = json.loads(bytes(read_job(payload_of(body)).args))["to"]
    return recipients


async def days_reported(database: Database) -> list[date]:
    async with database.session() as session:
        return list(await session.scalars(text("select day from daily_reports order by day")))


_ORDER = text(
    "insert into orders (id, user_id, account_id, client_order_id, fingerprint, symbol, side, "
    "quantity, "
    "price_type, time_in_force, tag, trading_day, state, reason_code, generation, deadline_at, "
    "created_at, "
    "filled_quantity, attention, lot) select cast(:id as uuid), :user, 'main', t, '', '2330', "
    ":side, "
    ":quantity, 'MKT', 'IOC', left(t, 6), cast(:at as timestamptz)::date, :state, :code, '', "
    "cast(:at as timestamptz), cast(:at as timestamptz), :filled, :attention, :lot "
    "from (select md5(random()::text) as t) as tag".replace("::", "\\:\\:")
)


class DayOfOrders:
    """Rows of a day's orders, as the API and the recorder write them."""

    def __init__(self, database: Database) -> None:
        self._database = database
        self._numbers = 0

    async def order(
        self, user: str, at: datetime, state: str, *steps: tuple[float, str], **columns: Any
    ) -> None:
        """`steps`: seconds after the acceptance, and the state of the event."""
        self._numbers += 1
        order_id = f"00000000-0000-0000-0000-{self._numbers:012}"
        row = {
            "side": "buy",
            "quantity": 2,
            "filled": 0,
            "code": None,
            "attention": None,
            "lot": "common",
        } | columns
        async with self._database.session() as session:
            for statement in (
                "insert into users (id) values (:user) on conflict do nothing",
                "insert into broker_accounts (user_id, account_id, broker, broker_type, "
                "simulation) "
                "values (:user, 'main', 'paper', 'stock', true) on conflict do nothing",
            ):
                await session.execute(text(statement), {"user": user})
            await session.execute(
                _ORDER, row | {"id": order_id, "user": user, "at": at, "state": state}
            )
            for number, (seconds, event) in enumerate(steps):
                await session.execute(
                    text(
                        "insert into order_events (event_id, order_id, state, at, data) "
                        "values (:e, :o, :s, :at, '{}')"
                    ),
                    {
                        "e": f"{order_id}:{number}",
                        "o": order_id,
                        "s": event,
                        "at": at + timedelta(seconds=seconds),
                    },
                )

    async def claim(
        self,
        user: str,
        at: datetime,
        *,
        warm: bool | None,
        took: float = 0.0,
        crashed: bool = False,
    ) -> None:
        """`warm` None: it got no worker."""
        self._numbers += 1
        async with self._database.session() as session:
            await session.execute(
                text(
                    "insert into worker_sessions (claim_id, user_id, epoch, pool, worker_id, warm, "
                    "assigned_at, claimed_at, ended_at, crashed) "
                    "values (:claim, :user, :epoch, 'default', :worker, :warm, "
                    "cast(:at as timestamptz), :claimed, :ended, :crashed)"
                ),
                {
                    "claim": f"c{self._numbers}",
                    "user": user,
                    "epoch": self._numbers,
                    "at": at,
                    "warm": warm,
                    "crashed": crashed,
                    "ended": at + timedelta(minutes=1),
                    "worker": None if warm is None else f"w{self._numbers}",
                    "claimed": None if warm is None else at + timedelta(seconds=took),
                },
            )


async def test_figures_are_what_can_be_counted_by_hand(database: Database) -> None:
    books, noon = DayOfOrders(database), taipei(DAY, 12)
    filled = ((0.5, "submitted"), (2.5, "filled"))
    await books.order("ann", noon, "filled", *filled, filled=2)
    await books.order(
        "ann",
        noon,
        "filled",
        (1.5, "submitted"),
        (1.6, "part_filled"),
        (5.5, "filled"),
        side="sell",
        filled=1,
    )
    await books.order(
        "bob", noon, "rejected", (0.2, "rejected"), code="BROKER_REJECTED", quantity=5
    )
    await books.order("bob", noon, "unknown", (9.0, "needs_attention"), attention="look")
    # Shares of an odd lot are no lots.
    await books.order("ann", noon, "cancelled", quantity=900, filled=900, lot="intraday_odd")
    since, until = reports.report_period(DAYS, DAY, END)
    assert (since, until) == (taipei(DAY, 5, 30), taipei(date(2026, 9, 25), 5, 30))
    second = timedelta(seconds=1)
    await books.order("eve", since - second, "filled", *filled, filled=2)
    await books.order("eve", until, "filled", *filled, filled=2)
    await books.order("ann", until - second, "cancelled", (60.0, "cancelled"))
    await books.claim("ann", noon, warm=True, took=0.02)
    await books.claim("bob", noon, warm=False, took=1.5, crashed=True)
    await books.claim("eve", noon, warm=None)
    async with database.session() as session:
        for number, resolved_by in enumerate((None, "key:1", FIRST_COMPARISON)):
            about = {"user_id": "ann", "account_id": "main", "epoch": number, "differences": {}}
            session.add(Reconciliation(**about, at=noon, blocks=False, resolved_by=resolved_by))
    async with database.session() as session:
        figures = await reports.read_figures(session, since, until)
        of_bob = await reports.read_figures(session, since, until, "bob")
    seconds = figures.pop("seconds")
    # What happens on the days without trading is in the report of the next day with it.
    assert reports.report_period(DAYS, NEXT, END)[0] == until
    assert figures == {
        "users": 2,
        "users_with_worker": 2,
        "orders": 6,
        "by_state": {"filled": 2, "rejected": 1, "needs_attention": 1, "cancelled": 2},
        "by_code": {"BROKER_REJECTED": 1},
        "lots_ordered": 13,
        "lots_bought": 2,
        "lots_sold": 1,
        "claims_failed": 1,
        "restarts": 1,
        "attention_raised": 1,
        "differences": 2,
        "dead_letters": {},
    }
    submitted, final = seconds["accepted_to_submitted"], seconds["submitted_to_final"]
    assert (submitted["count"], submitted["p50"], submitted["max"]) == (2, 1.0, 1.5)
    assert (final["count"], final["p50"], final["max"]) == (2, 3.0, 4.0)
    assert (seconds["claim_warm"]["p99"], seconds["claim_cold"]["max"]) == (0.02, 1.5)
    assert (of_bob["orders"], of_bob["lots_ordered"], of_bob["restarts"]) == (2, 7, 1)
    assert of_bob["by_state"] == {"rejected": 1, "needs_attention": 1}
    assert set(of_bob["seconds"]) == {"claim_cold"}
    lines = dict(reports.report_lines(figures | {"seconds": seconds}))
    assert (lines["orders"], lines["by code"]) == ("6", "BROKER_REJECTED 1")
    assert list(lines)[:3] == ["users", "users with worker", "orders"]


async def test_a_day_without_anything_has_figures_too(
    database: Database, valkey_client: Redis
) -> None:
    made = activity_of(database, valkey_client)
    assert await make(made, taipei(NEXT)) == ReportResult(day="2026-09-24", mails=2)
    async with database.session() as session:
        report = await reports.get_report(session)
    assert (report.figures["orders"], report.figures["by_state"], report.figures["seconds"]) == (
        0,
        {},
        {},
    )
    assert sorted((await mails(valkey_client)).values()) == sorted(TO)


async def test_a_report_is_stored_and_mailed_once_also_when_it_is_asked_for_again_years_later(
    database: Database, valkey_client: Redis
) -> None:
    books, made = DayOfOrders(database), activity_of(database, valkey_client)
    await books.order("ann", taipei(DAY, 12), "filled")
    both = await asyncio.gather(*(make(made, taipei(NEXT), "2026-09-24") for _ in range(4)))
    assert sum(report.mails for report in both) == 2
    await valkey_client.flushdb()  # the ids of jobs are known for three days only
    await books.order("ann", taipei(DAY, 13), "filled")
    assert (await make(made, taipei(date(2030, 1, 1)), "2026-09-24")).mails == 0
    async with database.session() as session:
        assert (await reports.get_report(session, DAY)).figures["orders"] == 1


async def test_days_without_trading_and_days_to_come_are_refused(
    database: Database, valkey_client: Redis
) -> None:
    made = activity_of(database, valkey_client)
    # Saturday; Monday, a holiday; a Sunday that was asked for.
    for at, day in ((date(2026, 9, 26), ""), (date(2026, 9, 28), ""), (NEXT, "2026-09-27")):
        result = await make(made, taipei(at), day)
        assert result.reason.endswith("is not a trading day")
    for day, code in (("2026-09-29", "DAY_NOT_OVER"), ("yesterday", "INVALID_DAY")):
        with pytest.raises(ApplicationError) as refused:
            await make(made, taipei(NEXT), day)
        assert (refused.value.type, refused.value.non_retryable) == (code, True)
    assert await days_reported(database) == []


async def test_one_bad_address_stops_no_other(database: Database, valkey_client: Redis) -> None:
    made = activity_of(database, valkey_client, ("a,b@example.com", *TO))
    assert (await make(made, taipei(NEXT))).mails == 2


async def test_with_the_clock_skipped_each_trading_day_of_two_weeks_has_one_report(
    skipping: WorkflowEnvironment, database: Database, valkey_client: Redis
) -> None:
    made = activity_of(database, valkey_client)
    async with Worker(
        skipping.client,
        task_queue=names.BULK_QUEUE,
        workflows=[DailyReportWorkflow],
        workflow_runner=workflow_runner(passed=()),
        activities=[made.make_report],
    ):
        began = await skipping.get_current_time()
        # This server has no Schedules; 08:00 in Taiwan is midnight by UTC.
        handle = await skipping.client.start_workflow(
            DailyReportWorkflow.run,
            DailyReportInput(),
            id="report-by-the-clock",
            task_queue=names.BULK_QUEUE,
            cron_schedule="0 0 * * *",
        )
        await skipping.sleep(timedelta(days=14))
        ended = await skipping.get_current_time()
        await handle.terminate()
    starts = [began.astimezone(UTC).date() + timedelta(days=number) for number in range(1, 16)]
    starts = [day for day in starts if datetime.combine(day, datetime.min.time(), UTC) <= ended]
    expected_days = [DAYS.trading_day_before(day) for day in starts if DAYS.trades_on(day)]
    assert len(expected_days) >= 6
    assert await days_reported(database) == expected_days
    mail_by_job = await mails(valkey_client)
    assert len(mail_by_job) == 2 * len(expected_days)
    assert {job_id[: len("report-mail.2026-09-24")] for job_id in mail_by_job} == {
        f"report-mail.{day}" for day in expected_days
    }


#: Serves the report's workflow; dies when it has put a number of mails on their queue.
_MORTAL = """
import asyncio, os, signal, sys
from temporalio.client import Client
from temporalio.worker import Worker
from activities.reports.daily import DailyActivities
from infra.database.engine import Database
from infra.jobs.client import JobClient
from infra.jobs.kept import KeptJobs
from infra.log import configure_log
from infra.market.calendar import load_calendar
from infra.settings import Settings
from infra.valkey.client import connect_valkey
from tests.support.message_signing import SECRETS
from workflows import names
from workflows.reports.workflow import DailyReportWorkflow
from workflows.sandbox import workflow_runner

class MortalKeptJobs(KeptJobs):
    left = int(sys.argv[1])
    async def enqueue(self, job, **more):
        if self.left == 0:
            os.kill(os.getpid(), signal.SIGKILL)
        self.left -= 1
        return await super().enqueue(job, **more)

async def main():
    settings = Settings()
    client = await Client.connect(settings.temporal_address)
    queue = JobClient(connect_valkey(settings.valkey_url), SECRETS)
    database = Database(settings.database_url)
    made = DailyActivities(database, MortalKeptJobs(database, queue), load_calendar(), settings)
    async with Worker(client, task_queue=names.BULK_QUEUE, workflows=[DailyReportWorkflow],
                      workflow_runner=workflow_runner(passed=()), activities=[made.make_report]):
        await asyncio.Event().wait()

configure_log("INFO")
asyncio.run(main())
"""


@pytest.mark.slow
@pytest.mark.timeout(150)
async def test_two_kills_between_the_report_and_its_mails_make_neither_twice(
    temporal_server: TemporalServer,
    valkey_server: ValkeyServer,
    valkey_client: Redis,
    database: Database,
    migrated_database: str,
) -> None:
    environment = {
        "BERTH_DATABASE_URL": migrated_database,
        "BERTH_VALKEY_URL": valkey_server.url,
        "BERTH_TEMPORAL_ADDRESS": temporal_server.address,
        "BERTH_REPORT_TO": json.dumps(TO),
    }

    async def serve(mails: int) -> asyncio.subprocess.Process:
        words = (sys.executable, "-c", _MORTAL, str(mails))
        return await asyncio.create_subprocess_exec(*words, env=environment)

    client = await Client.connect(temporal_server.address)
    handle = await client.start_workflow(
        DailyReportWorkflow.run,
        DailyReportInput(day=DAY.isoformat()),
        id="report-with-kills",
        task_queue=names.BULK_QUEUE,
    )
    for number in (0, 1):  # the report is there and no mail; one mail is there
        process = await serve(number)
        assert await asyncio.wait_for(process.wait(), 60) == -signal.SIGKILL
        assert await days_reported(database) == [DAY]
        assert len(await mails(valkey_client)) == number
    process = await serve(99)
    try:
        result = await asyncio.wait_for(handle.result(), 60)
    finally:
        process.kill()
        await process.wait()
    assert (result.day, result.mails) == ("2026-09-24", 1)
    assert sorted((await mails(valkey_client)).values()) == sorted(TO)
    assert await days_reported(database) == [DAY]
