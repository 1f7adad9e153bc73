"""The work of each schedule, with real activities, held by a lock in PostgreSQL while half of it is
done.

Each kind of work says what has to be there in the end, once.
"""

from __future__ import annotations

import asyncio
from abc import ABC, abstractmethod
from collections.abc import AsyncIterator, Callable, Sequence
from contextlib import AbstractAsyncContextManager, asynccontextmanager, suppress
from dataclasses import dataclass, field
from datetime import date, datetime, time, timedelta
from decimal import Decimal
from hashlib import sha256
from typing import Any, ClassVar

from sqlalchemy import text
from temporalio.worker import Worker

from activities.claims.morning import MorningActivities
from activities.instruments.loading import InstrumentActivities
from activities.reports.daily import DailyActivities, last_ended
from infra import tasks
from infra.database import users
from infra.database.models import StatementAddress
from infra.database.trading import instrument_loads
from infra.database.workers import sessions as worker_sessions
from infra.exchange.hours import time_half_a_day_away
from infra.jobs.client import JobClient
from infra.jobs.kept import KeptJobs
from infra.market.calendar import HOME_ZONE, Calendar, Hours, MarketCalendars
from infra.valkey.client import reply_of
from tests.support.activities.maintenance import MaintainedFleet
from tests.support.activities.orchestrator import OrchestratorHarness
from tests.support.message_signing import SECRETS
from tests.support.workers.pool_worker import POOL, ScriptedPoolWorker
from tests.support.workflows.fakes import BEAT, patient
from worker_runtime.jobs.protocol import keys as job_keys
from worker_runtime.protocol import keys
from worker_runtime.protocol.instruments import Instrument, InstrumentKind, InstrumentPage
from worker_runtime.protocol.messages import Answer
from worker_runtime.protocol.requests import ListInstruments
from workflows import names
from workflows.instruments.workflow import InstrumentLoadWorkflow, InstrumentsWorkflow
from workflows.maintenance.workflow import MaintenanceBatchWorkflow, MaintenanceWorkflow
from workflows.morning.workflow import MorningWorkflow
from workflows.reports.workflow import DailyReportWorkflow, StatementsWorkflow
from workflows.sandbox import workflow_runner

OPERATORS = ("ops@example.com", "boss@example.com")
CODES = ("1101", "2330")


class EveryDay(Calendar):
    """Trades on all days of the week. The bells ring at midnight: whom a morning connects is due
    at once."""

    def trades_on(self, day: date) -> bool:
        return True

    def bells(self, day: date, *, evening: bool = False) -> dict[str, datetime]:
        return {market: datetime.combine(day, time(), HOME_ZONE) for market in self.markets}


def every_day() -> EveryDay:
    return EveryDay(holidays=frozenset(), last=date.max)


class EveryDayMarkets(MarketCalendars):
    """Markets that take orders on all days, from midnight on."""

    def find(self, broker: str, market: str) -> Calendar | None:
        today = datetime.now(HOME_ZONE).date()
        near = (today + timedelta(days=number) for number in range(-1, 2))
        return EveryDay(
            holidays=frozenset(),
            last=date.max,
            changed={day: Hours(time(), time(23, 59)) for day in near},
        )


def settings_of_schedules() -> dict[str, Any]:
    """Settings with which all schedules exist, and none comes due by itself while a test runs."""
    away = f"{time_half_a_day_away(int(datetime.now().timestamp() * 1000)):%H:%M}"
    return {
        "maintenance_period": 86_400.0,
        "morning_at": away,
        "evening_at": away,
        "report_at": away,
        "statements_at": away,
        "statements_zone": "",
        "statements": "on",
        "statements_rate": 50.0,
        "mail_host": "mail.example.com",
        "morning_rate": 50.0,
        "morning_abreast": 1,  # one after the other: what comes behind a held user is not done
        "report_to": OPERATORS,
        "instruments_lead": 5400.0,
    }


@dataclass
class PagingWorker:
    """Answers `ListInstruments`, an instrument a page. It waits with all pages but the first."""

    goes_on: asyncio.Event = field(default_factory=asyncio.Event)
    waiting: asyncio.Event = field(default_factory=asyncio.Event)

    async def call(
        self, user_id: str, make_request: Callable[[str, str], ListInstruments], timeout: float
    ) -> Answer:
        after = make_request("r", "g").after
        if after:
            self.waiting.set()
            await self.goes_on.wait()
        code = next(code for code in CODES if code > after)
        listed = Instrument(
            code=code,
            market="stock",
            kind=InstrumentKind.STOCK,
            lot_units=1000,
            lot_value=Decimal(1000),
        )
        page = InstrumentPage(
            instruments=(listed,),
            next_after="" if code == CODES[-1] else code,
            taken_at_ms=1_795_410_000_000,
            total=len(CODES),
        )
        return Answer(request_id="r", instruments=page)


@dataclass
class BulkHarness:
    """What serves the bulk queue of an orchestrator: the runs of all schedules."""

    orchestrator: OrchestratorHarness
    fleet: MaintainedFleet
    lister: PagingWorker
    worker: Worker

    @classmethod
    def of(cls, orchestrator: OrchestratorHarness) -> BulkHarness:
        harness, settings = orchestrator.harness, orchestrator.settings
        fleet, lister = MaintainedFleet(harness, orchestrator.temporal), PagingWorker()
        starter = orchestrator.restorer.starter
        morning = MorningActivities(harness.database, every_day(), starter.ensure_active)
        jobs = KeptJobs(harness.database, JobClient(harness.client, SECRETS))
        daily = DailyActivities(harness.database, jobs, every_day(), settings)
        loads = InstrumentActivities(harness.database, EveryDayMarkets(), lister.call)
        worker = Worker(
            orchestrator.temporal,
            task_queue=names.BULK_QUEUE,
            workflows=[
                MaintenanceWorkflow,
                MaintenanceBatchWorkflow,
                MorningWorkflow,
                StatementsWorkflow,
                DailyReportWorkflow,
                InstrumentsWorkflow,
                InstrumentLoadWorkflow,
            ],
            activities=[
                fleet.maintenance.scan_fleet,
                fleet.maintenance.clean_up,
                fleet.maintenance.finish_pass,
                morning.plan_morning,
                morning.recent_users,
                morning.connect_user,
                daily.plan_statements,
                daily.enqueue_statements,
                daily.make_report,
                loads.plan_instruments,
                loads.load_instruments,
            ],
            workflow_runner=workflow_runner(passed=()),
            max_heartbeat_throttle_interval=BEAT,
        )
        return cls(orchestrator, fleet, lister, patient(worker))

    @asynccontextmanager
    async def locked(self, statement: str, **values: object) -> AsyncIterator[None]:
        """Holds what the statement locks, and writes nothing."""
        async with self.orchestrator.harness.database.session() as session:
            await session.execute(text("set local idle_in_transaction_session_timeout = 0"))
            await session.execute(text(statement), values)
            yield
            await session.rollback()

    async def is_held(self) -> bool:
        """Returns True if somebody waits for what is locked."""
        return bool(await self.orchestrator.harness.sql("select 1 from pg_locks where not granted"))


class ScheduledWork(ABC):
    """The work of one schedule."""

    schedule: ClassVar[str]

    def __init__(self, bulk: BulkHarness) -> None:
        self.bulk = bulk
        self.harness = bulk.orchestrator.harness

    @abstractmethod
    async def prepare(self) -> None:
        """Makes what there is to do."""

    @abstractmethod
    def held(self) -> AbstractAsyncContextManager[None]:
        """Lets no run get further than half of the work."""

    @abstractmethod
    async def is_half_done(self) -> bool: ...

    @abstractmethod
    async def is_done(self) -> bool: ...

    @abstractmethod
    async def check(self) -> None:
        """Asserts that the whole work was done, and nothing twice."""

    def day_id(self) -> str:
        """Returns the id of the workflow that does the work of the day."""
        raise NotImplementedError


class Maintenance(ScheduledWork):
    """A mark of nobody, and a claim that got nowhere. The row of the claim is locked."""

    schedule = names.MAINTENANCE_SCHEDULE

    async def prepare(self) -> None:
        self.healthy = {task.task_id for task in await self.harness.launcher.list()}
        await reply_of(self.harness.client.set(keys.GENERATION, "g", nx=True))
        await self.bulk.fleet.quiet()
        self.marked, claimed = await self.harness.user(), await self.harness.user()
        await reply_of(self.harness.client.set(keys.mark(self.marked), "7:p-gone"))
        async with self.harness.database.session() as session:
            await worker_sessions.assign_epoch(
                session, user_id=claimed, claim_id="nowhere", pool=POOL
            )
        await self.bulk.fleet.execute(
            "update worker_sessions set assigned_at = assigned_at - interval '1 h'"
        )
        await self.bulk.fleet.scan()  # the pass that sees them first

    def held(self) -> AbstractAsyncContextManager[None]:
        return self.bulk.locked(
            "select 1 from worker_sessions where claim_id = 'nowhere' for update"
        )

    async def is_half_done(self) -> bool:
        return await self.bulk.is_held() and await self._mark_is_gone()

    async def is_done(self) -> bool:
        unended = await self.harness.sql("select 1 from worker_sessions where ended_at is null")
        return not unended and await self._mark_is_gone()

    async def _mark_is_gone(self) -> bool:
        return not await reply_of(self.harness.client.exists(keys.mark(self.marked)))

    async def check(self) -> None:
        ends = await self.harness.sql("select claim_id, end_reason from worker_sessions")
        assert [(claim, reason.partition(":")[0]) for claim, reason in ends] == [
            ("nowhere", "maintenance")
        ]
        assert {task.task_id for task in await self.harness.launcher.list()} == self.healthy
        assert self.harness.launcher.stops == []


class Morning(ScheduledWork):
    """Three users who traded yesterday. The row of the second one is locked."""

    schedule = names.MORNING_SCHEDULE
    evening: ClassVar[bool] = False

    async def prepare(self) -> None:
        self.users = sorted([await self.harness.user() for _ in range(3)])
        yesterday = datetime.now(HOME_ZONE).date() - timedelta(days=1)
        at = datetime.combine(yesterday, time(23 if self.evening else 10), HOME_ZONE)
        await self.bulk.fleet.execute(
            "insert into orders (id, user_id, account_id, client_order_id, fingerprint, symbol,"
            " side, quantity, price_type, time_in_force, tag, trading_day, state, generation,"
            " deadline_at, created_at)"
            " select gen_random_uuid(), user_id, 'main', user_id, '', '2330', 'buy', 1, 'MKT',"
            " 'IOC', user_id, cast(cast(:at as timestamptz) as date), 'filled', '',"
            " cast(:at as timestamptz), cast(:at as timestamptz) from broker_accounts",
            at=at,
        )
        if self.evening:
            await self.bulk.fleet.execute("update broker_accounts set broker_type = 'futures'")

    @asynccontextmanager
    async def held(self) -> AsyncIterator[None]:
        lock = self.bulk.locked("select 1 from users where id = :id for update", id=self.users[1])
        async with lock:
            yield

    async def is_half_done(self) -> bool:
        return await self.bulk.is_held() and await self._connected() == self.users[:1]

    async def is_done(self) -> bool:
        return await self._connected() == self.users

    async def check(self) -> None:
        rows = await self.harness.sql("select user_id, worker_id from worker_sessions")
        assert sorted(user for user, _ in rows) == self.users
        assert len({worker for _, worker in rows}) == len(self.users)
        assert self.harness.launcher.stops == []

    async def _connected(self) -> list[str]:
        rows = await self.harness.sql(
            "select user_id from worker_sessions where connected_at is not null order by user_id"
        )
        return [user for (user,) in rows]

    def day_id(self) -> str:
        return names.morning_id(f"{datetime.now(HOME_ZONE):%Y-%m-%d}", self.evening)


class Evening(Morning):
    """The same for the evening session."""

    schedule = names.EVENING_SCHEDULE
    evening = True


class Mails(ScheduledWork):
    """Jobs that send mails. The second one's row is there, and not committed."""

    @property
    @abstractmethod
    def job_ids(self) -> Sequence[str]:
        """The ids of the jobs, in their order."""

    def held(self) -> AbstractAsyncContextManager[None]:
        return self.bulk.locked(
            "insert into kept_jobs (user_id, job_id, sealed, digest) values ('', :id, '', '')",
            id=self.job_ids[1],
        )

    async def is_half_done(self) -> bool:
        """The first mail waits in its queue. It is sent at once, and Valkey knows no more of it."""
        if not await self.bulk.is_held():
            return False
        job = job_keys.job(job_keys.FLEET_TAG, self.job_ids[0])
        return bool(await reply_of(self.harness.client.delete(job)))

    async def is_done(self) -> bool:
        return await self._kept() == sorted(self.job_ids)

    async def check(self) -> None:
        assert await self._kept() == sorted(self.job_ids)
        sent = job_keys.job(job_keys.FLEET_TAG, self.job_ids[0])
        assert not await reply_of(self.harness.client.exists(sent)), "it was sent once more"

    async def _kept(self) -> list[str]:
        rows = await self.harness.sql("select job_id from kept_jobs")
        return sorted(job_id for (job_id,) in rows)

    def _last_day(self) -> str:
        end = timedelta(seconds=self.harness.settings.trading_day_end)
        return last_ended(datetime.now(HOME_ZONE), end).isoformat()


class Report(Mails):
    schedule = names.REPORT_SCHEDULE

    async def prepare(self) -> None:
        """The report needs nothing: a day without orders has one, too."""

    @property
    def job_ids(self) -> Sequence[str]:
        day = self._last_day()
        return [
            f"report-mail.{day}.{sha256(address.encode()).hexdigest()[:16]}"
            for address in OPERATORS
        ]

    async def is_done(self) -> bool:
        mailed = await self.harness.sql("select 1 from daily_reports where mailed_at is not null")
        return bool(mailed) and await super().is_done()

    async def check(self) -> None:
        await super().check()
        rows = await self.harness.sql("select cast(day as text) from daily_reports")
        assert rows == [(self._last_day(),)]


class Statements(Mails):
    schedule = names.STATEMENTS_SCHEDULE

    async def prepare(self) -> None:
        self.users = sorted([await self.harness.user() for _ in range(3)])
        async with self.harness.database.session() as session:
            for user in self.users:
                address = StatementAddress(email=f"{user}@example.com")
                await users.put_addresses(session, user, address, actor="key:1")

    @property
    def job_ids(self) -> Sequence[str]:
        return [f"statement-mail.{self._last_day()}.{user}" for user in self.users]

    def day_id(self) -> str:
        return names.statements_id(self._last_day())


class LoadOfInstruments(ScheduledWork):
    """A list of two pages. The worker waits with the second one."""

    schedule = names.INSTRUMENTS_SCHEDULE

    async def prepare(self) -> None:
        user = await self.harness.user()
        async with self.harness.database.session() as session:
            await instrument_loads.set_source(session, "paper", user, "main", actor="op")

    def held(self) -> AbstractAsyncContextManager[None]:
        return self._waiting()

    @asynccontextmanager
    async def _waiting(self) -> AsyncIterator[None]:
        yield
        self.bulk.lister.goes_on.set()

    async def is_half_done(self) -> bool:
        return self.bulk.lister.waiting.is_set()

    async def is_done(self) -> bool:
        loaded = await self.harness.sql("select 1 from instrument_loads where state = 'loaded'")
        return bool(loaded)

    async def check(self) -> None:
        rows = await self.harness.sql("select code from instruments where listed order by code")
        assert [code for (code,) in rows] == list(CODES)
        # A look that came just before the list was in force may have begun another load of it,
        # which changes nothing.
        states = {
            state for (state,) in await self.harness.sql("select state from instrument_loads")
        }
        assert "loaded" in states
        assert "running" not in states
        assert await self.harness.sql("select 1 from instrument_staging") == []

    def day_id(self) -> str:
        return names.instrument_load_id("paper", f"{datetime.now(HOME_ZONE):%Y-%m-%d}", "stock")


class InstrumentLook(LoadOfInstruments):
    """The look that begins the load, which may not read who lists."""

    def held(self) -> AbstractAsyncContextManager[None]:
        self.bulk.lister.goes_on.set()
        return self.bulk.locked("lock table instrument_sources in access exclusive mode")

    async def is_half_done(self) -> bool:
        return await self.bulk.is_held()


async def serve_pool(orchestrator: OrchestratorHarness) -> None:
    """Lets all workers of the pool answer claims, and do what real ones do once they are connected:
    report it, and renew their marks."""

    async def answer(worker: ScriptedPoolWorker) -> None:
        while True:
            with suppress(AssertionError):  # nothing has come
                await worker.serve(patience=5.0)

    harness = orchestrator.harness
    answering: dict[str, asyncio.Task[None]] = {}
    try:
        while True:
            for worker_id, worker in harness.made.items():
                if worker_id not in answering:
                    answering[worker_id] = asyncio.create_task(answer(worker))
            rows = await harness.sql(
                "select user_id, worker_id, epoch from worker_sessions"
                " where claimed_at is not null and ended_at is null and worker_id is not null"
            )
            for user, worker_id, epoch in rows:
                await harness.renew_mark(user, worker_id, epoch, state="Active")
            await harness.sql(
                "update worker_sessions set connected_at = now()"
                " where claimed_at is not null and connected_at is null"
            )
            await asyncio.sleep(0.05)
    finally:
        await tasks.cancel_tasks(*answering.values())
