"""The next 365 days by a clock that jumps: each thing happens on its days, at its hour, and on no
other.

Real are Temporal's test server, Valkey, PostgreSQL, the workflows and all activities. That server
has no Schedules: what they start is started by cron lines made of the same settings. Maintenance,
which runs every minute, runs twice on one day a week: the first pass in a while does nothing.
PostgreSQL's clock is not moved: its rows age by a day each day instead.
"""

import json
from collections import defaultdict
from collections.abc import AsyncIterator, Iterator
from datetime import UTC, date, datetime, time, timedelta
from itertools import pairwise
from pathlib import Path
from zoneinfo import ZoneInfo

import pytest
from redis.asyncio import Redis
from sqlalchemy import text
from temporalio.client import Client, Schedule, ScheduleActionStartWorkflow
from temporalio.testing import WorkflowEnvironment

from infra.database import retention, users
from infra.database.models import StatementAddress
from infra.local.servers import ValkeyServer
from infra.market import calendar, windows
from infra.market.calendar import HOME_ZONE, Hours
from infra.settings import Settings
from infra.temporal.schedules import SCHEDULES
from infra.temporal.starter import WorkerStarter
from infra.valkey.client import text_of
from tests.support.systems.moved_clock import MovedSystem, moved_system, settings_of
from worker_runtime.jobs.protocol import keys as job_keys
from worker_runtime.protocol import keys
from workflows import names

DAY = timedelta(days=1)
#: The zone of the pool's windows in this test: one with summer time.
NEW_YORK = ZoneInfo("America/New_York")
KEPT = 90


class RecordingStarter(WorkerStarter):
    """Connects nobody, and notes who was to be connected, when, and until when he was to stay."""

    def __init__(self, env: WorkflowEnvironment, settings: Settings) -> None:
        super().__init__(env.client, settings)
        self._env = env
        self.asked: list[tuple[str, datetime, datetime]] = []

    async def ensure_active(self, user_id: str, stay_until: float = 0.0) -> None:
        now = (await self._env.get_current_time()).astimezone(HOME_ZONE)
        self.asked.append((user_id, now, datetime.fromtimestamp(stay_until, HOME_ZONE)))


class Year:
    """What is to happen, told without our calendar's code but for its table."""

    def __init__(self, first: date, changes: Path) -> None:
        self.days = [first + DAY * number for number in range(365)]
        table = calendar.load_calendar()
        usual = [day for day in self.days if day.weekday() < 5 and day not in table.holidays]
        ahead = iter(usual[20:])
        saturday = next(day for day in self.days[40:] if day.weekday() == 5)
        #: Two days of a typhoon, one that ends early, one that begins late, a Saturday with
        #: trading.
        self.closed = {next(ahead), next(ahead)}
        self.short, self.late, self.saturday = next(ahead), next(ahead), saturday
        hours = {self.short: "08:30-11:00", self.late: "10:00-13:30", saturday: "09:00-13:30"}
        written = {day: "closed" for day in self.closed} | hours
        changes.write_text(
            json.dumps({day.isoformat(): hours_of_day for day, hours_of_day in written.items()})
        )
        self.trading = sorted({*usual, saturday} - self.closed)
        self.evenings = [day for day in self.trading if day != saturday]

    def bells(self, day: date) -> tuple[time, time]:
        """TAIFEX's and TWSE's."""
        if day == self.late:
            return time(10), time(10)
        return (time(9) if day == self.saturday else time(8, 45)), time(9)


def cron_of(schedule: Schedule) -> str:
    """A line in UTC. Taiwan has no summer time; the day of the week is always any."""
    (days,) = schedule.spec.calendars
    assert (days.day_of_week[0].start, days.day_of_week[0].end) == (0, 6)
    local = datetime(2026, 1, 1, days.hour[0].start, days.minute[0].start, tzinfo=HOME_ZONE)
    assert schedule.spec.time_zone_name == "Asia/Taipei"
    at = local.astimezone(UTC)
    return f"{at.minute} {at.hour} * * *"


#: Of schedules with an interval: seldom enough for a year.
SELDOM = {
    names.MAINTENANCE_SCHEDULE: "0,1 18 * * 1",
    names.INSTRUMENTS_SCHEDULE: "45 23 * * *",
}


async def start_schedules(client: Client, settings: Settings) -> None:
    for schedule_id, make_schedule in SCHEDULES.items():
        schedule = make_schedule(settings)
        assert schedule is not None, schedule_id
        action = schedule.action
        assert isinstance(action, ScheduleActionStartWorkflow)
        await client.start_workflow(
            action.workflow,
            args=action.args,
            id=schedule_id,
            task_queue=action.task_queue,
            cron_schedule=SELDOM.get(schedule_id) or cron_of(schedule),
        )


@pytest.fixture
async def played(
    skipping: WorkflowEnvironment,
    valkey_server: ValkeyServer,
    valkey_client: Redis,
    migrated_database: str,
    tmp_path: Path,
    short_directory: Path,
) -> AsyncIterator[tuple[MovedSystem, RecordingStarter, Year]]:
    address = skipping.client.service_client.config.target_host
    first = (await skipping.get_current_time()).astimezone(HOME_ZONE).date() + DAY
    year = Year(first, tmp_path / "days.json")
    settings = settings_of(
        tmp_path, short_directory / "node.sock", valkey_server.url, migrated_database, address
    ).model_copy(
        update={
            "calendar_file": str(tmp_path / "days.json"),
            "morning_at": "08:00",
            "evening_at": "14:30",
            "maintenance_period": 60.0,
            "report_at": "08:00",
            "report_to": ("ops@example.com",),
            "statements": "on",
            "worker_history_days": KEPT,
        }
    )
    starter = RecordingStarter(skipping, settings)
    await valkey_client.set(keys.GENERATION, "g1")
    async with moved_system(skipping, settings, starter, maintenance_confirm=0.0) as system:
        yield system, starter, year


async def played_through(system: MovedSystem, year: Year) -> None:
    """Day by day: PostgreSQL's rows age, and a worker of the day before has ended."""
    statements = [
        "update worker_sessions set ended_at = ended_at - interval '1 day'",
        "update worker_launches set launched_at = launched_at - interval '1 day'",
        "update maintenance_passes set began_at = began_at - interval '1 day'",
        "insert into worker_launches (worker_id, pool, version) values (:worker, 'default', '1')",
        "insert into worker_sessions (claim_id, user_id, epoch, pool, worker_id, ended_at) "
        "values (:worker, 'always', :number, 'default', :worker, clock_timestamp())",
    ]
    for number, day in enumerate(year.days):
        await system.until(datetime.combine(day, time(), HOME_ZONE), step=DAY.total_seconds())
        async with system.parts.database.session() as session:
            for statement in statements:
                given = {"worker": f"w{number}", "number": number + 1}
                await session.execute(text(statement), given if ":worker" in statement else {})


async def job_days(client: Redis, kind: str) -> list[date]:
    """The days of the jobs that wait on a queue of mails."""
    job_keys_of_mails = map(
        text_of, await client.keys(job_keys.job(job_keys.FLEET_TAG, f"{kind}.*"))
    )
    return sorted(date.fromisoformat(name.split(f"{kind}.")[1][:10]) for name in job_keys_of_mails)


@pytest.mark.drill
@pytest.mark.timeout(550)
async def test_in_a_year_each_thing_happens_on_its_days_and_no_other(
    played: tuple[MovedSystem, RecordingStarter, Year], valkey_client: Redis
) -> None:
    system, starter, year = played
    for day in [year.days[0] - 7 * DAY, *year.trading]:  # he trades everything on every day
        await system.traded("always", day, stock=time(10), futures=time(10))
        if day in year.evenings:
            await system.traded("always", day, futures=time(21))
    async with system.parts.database.session() as session:
        await users.put_addresses(
            session, "always", StatementAddress(email="always@example.com"), actor="key:1"
        )
    await system.until(datetime.combine(year.days[0], time(), HOME_ZONE), step=DAY.total_seconds())
    await start_schedules(system.env.client, system.parts.settings)
    await played_through(system, year)

    mornings: dict[date, list[tuple[datetime, datetime]]] = defaultdict(list)
    evenings: dict[date, list[tuple[datetime, datetime]]] = defaultdict(list)
    for _, at, stay in starter.asked:
        (evenings if at.hour >= 14 else mornings)[at.date()].append((at, stay))
    done = year.days[:-1]  # the last one has only begun
    assert sorted(mornings) == [day for day in year.trading if day in done]
    assert sorted(evenings) == [day for day in year.evenings if day in done]
    for day, [(at, stay)] in mornings.items():
        first, last = (datetime.combine(day, bell, HOME_ZONE) for bell in year.bells(day))
        assert first - timedelta(seconds=1201) < at < first, day
        assert stay == last, day
    for day, [(at, stay)] in evenings.items():
        bell = datetime.combine(day, time(15), HOME_ZONE)
        assert bell - timedelta(seconds=1201) < at < bell, day
        assert stay == bell, day

    # The report of a trading day is made on the next one, its statements on the next morning.
    reported = [before for before, day in pairwise(year.trading) if day in done]
    sent = [day for day in year.trading if day < done[-1]]
    await retention.purge(system.parts.database, system.parts.settings)
    async with system.parts.database.session() as session:
        made = list(await session.scalars(text("select day from daily_reports order by day")))
        kept = list(await session.scalars(text("select epoch from worker_sessions order by epoch")))
        launched = await session.scalar(text("select count(*) from worker_launches"))
        passes = await session.scalar(text("select count(*) from maintenance_passes"))
    assert [day for day in made if day >= year.days[0]] == reported
    for kind, expected_days in (("report-mail", reported), ("statement-mail", sent)):
        days = await job_days(valkey_client, kind)
        assert [day for day in days if day >= year.days[0]] == expected_days, kind
    assert len(kept) == launched
    assert kept == list(range(len(year.days) - len(kept) + 1, len(year.days) + 1))
    assert KEPT <= len(kept) <= KEPT + 9, "workers are forgotten after N days, within a week"
    # Two of one day in each week are played.
    assert 2 <= passes <= 6, "passes are forgotten after two weeks"


def spans(year: Year) -> Iterator[tuple[datetime, datetime, int]]:
    """When a pool's windows should hold: on trading days around the opening, moved with it, and
    around the close; on every other day in New York's morning."""
    late = {year.late: timedelta(minutes=90), year.saturday: timedelta(minutes=30)}
    for day in year.days:
        if day in year.trading:
            moved = late.get(day, timedelta())
            opening = datetime.combine(day, time(8), HOME_ZONE) + moved
            yield opening, opening + timedelta(minutes=90), 0
            close = datetime.combine(
                day, time(11) if day == year.short else time(13, 30), HOME_ZONE
            )
            if day != year.short:
                yield datetime.combine(day, time(13), HOME_ZONE), close + timedelta(minutes=15), 2
        else:
            yield (
                datetime.combine(day, time(6), NEW_YORK),
                datetime.combine(day, time(7), NEW_YORK),
                1,
            )


def test_the_pools_windows_hold_on_their_days_of_the_year(tmp_path: Path) -> None:
    year = Year(datetime.now(HOME_ZONE).date() + DAY, tmp_path / "days.json")
    days = calendar.load_calendar(tmp_path / "days.json")
    week = frozenset(range(7))
    given = [
        windows.Window(
            begins=time(8),
            ends=time(9, 30),
            weekdays=week,
            zone=HOME_ZONE,
            days=windows.Days.TRADING,
        ),
        windows.Window(
            begins=time(6), ends=time(7), weekdays=week, zone=NEW_YORK, days=windows.Days.CLOSED
        ),
        windows.Window(
            begins=time(13),
            ends=time(13, 45),
            weekdays=week,
            zone=HOME_ZONE,
            days=windows.Days.TRADING,
        ),
    ]
    expected = [
        (first.timestamp(), last.timestamp(), number) for first, last, number in spans(year)
    ]
    switches = []
    at = datetime.combine(year.days[0], time(), HOME_ZONE).timestamp()
    end = datetime.combine(year.days[-1], time(23, 59), HOME_ZONE).timestamp()
    while at < end:
        number, until = windows.current_window(given, days, at)
        assert until is not None
        if number is not None:
            switches.append((at, until, number))
        at = until
    assert switches == [switch for switch in expected if switch[0] < end]


def test_hours_of_the_file_are_those_of_the_days(tmp_path: Path) -> None:
    year = Year(datetime.now(HOME_ZONE).date() + DAY, tmp_path / "days.json")
    days = calendar.load_calendar(tmp_path / "days.json")
    assert [day for day in year.days if days.trades_on(day)] == year.trading
    assert days.changed[year.late] == Hours(time(10), time(13, 30))
