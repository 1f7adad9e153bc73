"""Who traded of late, by the exchange's calendar and the books."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from datetime import date, datetime, time
from pathlib import Path

import pytest
from sqlalchemy import text
from temporalio.exceptions import ApplicationError
from temporalio.testing import ActivityEnvironment

from activities.claims.morning import MorningActivities, first_recent_day
from infra.database.engine import Database
from infra.market import calendar
from infra.market.calendar import HOME_ZONE
from worker_runtime.protocol.errors import BerthError, WorkerUnavailable
from workflows.morning.messages import ConnectUser, PlanMorning, RecentUsers

DAYS = calendar.load_calendar()


class ScriptedStarter:
    """Connects everybody but those for whom it has an error."""

    def __init__(self) -> None:
        self.asked: list[str] = []
        self.errors: dict[str, BerthError] = {}

    async def ensure_active(self, user_id: str, stay_until: float) -> None:
        self.asked.append(user_id)
        await asyncio.sleep(0)
        if user_id in self.errors:
            raise self.errors[user_id]


@pytest.fixture
async def database(migrated_database: str) -> AsyncIterator[Database]:
    made = Database(migrated_database)
    yield made
    await made.close()


async def trade(
    database: Database,
    user_id: str,
    day: date,
    market: str = "stock",
    clock: time = time(10),
    broker: str = "paper",
) -> None:
    """One order of this user on that day."""
    at = datetime.combine(day, clock, HOME_ZONE)
    given = {"user": user_id, "at": at, "day": day, "market": market, "broker": broker}
    async with database.session() as session:
        await session.execute(
            text("insert into users (id) values (:user) on conflict do nothing"), given
        )
        await session.execute(
            text(
                "insert into broker_accounts (user_id, account_id, broker, broker_type, "
                "simulation) "
                "values (:user, :market, :broker, :market, true) on conflict do nothing"
            ),
            given,
        )
        await session.execute(
            text(
                "insert into orders (id, user_id, account_id, client_order_id, fingerprint, "
                "symbol, side, "
                "quantity, price_type, time_in_force, tag, trading_day, state, generation, "
                "deadline_at, "
                "created_at) "
                "select gen_random_uuid(), :user, :market, t, '', '2330', 'buy', 1, 'MKT', 'IOC', "
                "left(t, 6), :day, 'filled', '', cast(:at as timestamptz), cast(:at as "
                "timestamptz) "
                "from (select md5(random()::text) as t) as tag"
            ),
            given,
        )


async def test_recent_are_those_with_an_order_in_the_last_trading_days(database: Database) -> None:
    # Monday 2026-02-23 comes after a week of holidays: the five trading days before begin on
    # 2026-02-05.
    for user_id, day in {
        "long-ago": date(2026, 2, 4),
        "first-day": date(2026, 2, 5),
        "last-day": date(2026, 2, 11),
        "also": date(2026, 2, 11),
    }.items():
        await trade(database, user_id, day)
    await trade(database, "last-day", date(2026, 2, 10))
    morning, run = (
        MorningActivities(database, DAYS, ScriptedStarter().ensure_active),
        ActivityEnvironment().run,
    )
    plan = await run(morning.plan_morning, PlanMorning(day="2026-02-23", days=5))
    assert (plan.reason, plan.users) == ("", 3)
    assert datetime.fromtimestamp(plan.bell, HOME_ZONE) == datetime(
        2026, 2, 23, 9, 0, tzinfo=HOME_ZONE
    )
    first = await run(morning.recent_users, RecentUsers(since=plan.since, after="", limit=2))
    rest = await run(morning.recent_users, RecentUsers(since=plan.since, after=first[-1], limit=2))
    assert first + rest == ["also", "first-day", "last-day"]


async def test_users_are_planned_for_the_first_bell_of_what_they_traded(
    database: Database, tmp_path: Path
) -> None:
    day, before = date(2026, 11, 23), date(2026, 11, 20)
    for user_id, market, clock in (
        ("shares", "stock", time(10)),
        ("both", "stock", time(10)),
        ("both", "futures", time(9)),
        ("index", "futures", time(14, 49)),
        ("evening", "futures", time(14, 50)),
        ("night", "futures", time(4, 59)),
        ("always", "futures", time(5)),
        ("always", "futures", time(23)),
    ):
        await trade(database, user_id, before, market, clock)
    # Another broker's market of a home market's name has neither its bell nor its evening.
    for clock in (time(9), time(23)):
        await trade(database, "abroad", before, "futures", clock, broker="atlantis")
    run = ActivityEnvironment().run
    tried = MorningActivities(database, DAYS, ScriptedStarter().ensure_active)

    async def planned(
        morning: MorningActivities, *, evening: bool = False
    ) -> list[tuple[str, list[str]]]:
        request = PlanMorning(day=day.isoformat(), days=1, evening=evening)
        plan = await run(morning.plan_morning, request)
        assert plan.bell == plan.groups[-1].bell
        users_by_bell = []
        for group in plan.groups:
            query = RecentUsers(
                since=plan.since, after="", limit=9, market=group.market, evening=evening
            )
            users = await run(morning.recent_users, query)
            assert len(users) == group.users
            users_by_bell.append((f"{datetime.fromtimestamp(group.bell, HOME_ZONE):%H:%M}", users))
        return users_by_bell

    by_day = [("08:45", ["always", "both", "index"]), ("09:00", ["abroad", "shares"])]
    assert await planned(tried) == by_day
    assert await planned(tried, evening=True) == [("15:00", ["always", "evening", "night"])]
    late = tmp_path / "days.json"
    late.write_text('{"2026-11-23": "10:00-13:00"}')
    together = MorningActivities(
        database, calendar.load_calendar(late), ScriptedStarter().ensure_active
    )
    assert await planned(together) == [("10:00", ["abroad", "always", "both", "index", "shares"])]


async def test_a_holiday_is_said_and_nobody_is_counted(database: Database) -> None:
    morning = MorningActivities(database, DAYS, ScriptedStarter().ensure_active)
    plan = await ActivityEnvironment().run(
        morning.plan_morning, PlanMorning(day="2026-02-17", days=5)
    )
    assert plan.reason == "2026-02-17 is not a trading day"
    evening = PlanMorning(day="2026-02-17", days=5, evening=True)
    assert (
        await ActivityEnvironment().run(morning.plan_morning, evening)
    ).reason == "2026-02-17 has no evening session"


async def test_an_invalid_day_is_refused_for_good(database: Database) -> None:
    morning = MorningActivities(database, DAYS, ScriptedStarter().ensure_active)
    with pytest.raises(ApplicationError) as refused:
        await ActivityEnvironment().run(morning.plan_morning, PlanMorning(day="tomorrow", days=5))
    assert refused.value.non_retryable


async def test_the_error_of_one_user_is_an_answer_and_not_a_failure(database: Database) -> None:
    starter = ScriptedStarter()
    starter.errors["u2"] = WorkerUnavailable("no room")
    morning, run = (
        MorningActivities(database, DAYS, starter.ensure_active),
        ActivityEnvironment().run,
    )
    assert (await run(morning.connect_user, ConnectUser(user_id="u1"))).ok
    failed = await run(morning.connect_user, ConnectUser(user_id="u2"))
    assert (failed.ok, failed.code, failed.retryable) == (False, "WORKER_UNAVAILABLE", True)
    assert starter.asked == ["u1", "u2"]


def test_trading_days_are_counted_over_holidays() -> None:
    assert first_recent_day(DAYS, date(2026, 11, 23), 5) == date(2026, 11, 16)
    assert first_recent_day(DAYS, date(2026, 2, 23), 1) == date(2026, 2, 11)
    assert first_recent_day(DAYS, date(2026, 11, 23), 0) == date(2026, 11, 23)
