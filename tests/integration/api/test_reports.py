"""The daily report and a user's statistics, over REST and from the command line."""

from __future__ import annotations

import asyncio
import itertools
import json
from datetime import date, timedelta
from pathlib import Path
from typing import Any

import pytest
from sqlalchemy import text
from temporalio.client import Client, ScheduleActionStartWorkflow
from temporalio.service import RPCError

from infra.database import reports
from infra.database.engine import Database
from infra.local.servers import TemporalServer
from infra.market import calendar
from infra.settings import Settings
from infra.temporal import schedules
from tests.support.api.pages import logged_in_browser
from tests.support.commands import CommandForker
from tests.support.systems.api import ServedApi, StartWorker, an_order, operator
from workflows import names

DAYS = calendar.load_calendar()
DAY = date(2026, 9, 24)


async def store_report(api: ServedApi, day: date = DAY) -> None:
    async with api.services.database.session() as session:
        await reports.make_report(session, DAYS, day, timedelta(hours=29.5))


async def make(database: Database) -> dict[str, Any]:
    async with database.session() as session:
        return (await reports.make_report(session, DAYS, DAY, timedelta(hours=29.5))).figures


async def test_operators_read_the_latest_report_or_that_of_a_day(api: ServedApi) -> None:
    async with api.client(api.admin_key) as admin:
        none = await admin.get("/reports/daily")
        assert (none.status_code, none.json()["code"]) == (404, "REPORT_NOT_FOUND")
        await store_report(api, date(2026, 9, 23))
        await store_report(api)
        latest = (await admin.get("/reports/daily")).json()
        assert (latest["day"], latest["since"]) == ("2026-09-24", "2026-09-23T21:30:00Z")
        assert (latest["figures"]["orders"], latest["mailed_at"]) == (0, None)
        assert (await admin.get("/reports/daily", params={"day": "2026-09-23"})).json()[
            "day"
        ] == "2026-09-23"
        for day, status in (("2026-09-22", 404), ("yesterday", 422)):
            assert (await admin.get("/reports/daily", params={"day": day})).status_code == status
    async with api.client(api.key) as user:
        assert (await user.get("/reports/daily")).status_code == 403


async def test_operators_see_a_report_as_a_page(api: ServedApi) -> None:
    async with (
        logged_in_browser(api, api.admin_key) as client,
        logged_in_browser(api, api.key) as user,
    ):
        assert "no report yet" in (await client.get("/page/report")).text
        await store_report(api, date(2026, 9, 23))
        await store_report(api)
        latest = (await client.get("/page/report")).text
        assert 'value="2026-09-24"' in latest
        assert "<dt>Claims failed</dt><dd>0</dd>" in latest
        assert 'value="2026-09-23"' in (await client.get("/page/report?day=2026-09-23")).text
        assert "no report of 2026-09-22" in (await client.get("/page/report?day=2026-09-22")).text
        assert (await client.get("/page/report?day=yesterday")).status_code == 422
        assert (await user.get("/page/report")).status_code == 403


async def test_users_see_only_their_own_statistics(
    api: ServedApi, start_worker: StartWorker
) -> None:
    await start_worker(api.user)
    async with api.client(api.admin_key) as admin:
        other = (await admin.post("/users", json={"user_id": f"{api.user}-2"})).json()["api_key"]
        assert (await admin.get("/users/nobody/statistics")).status_code == 404
    async with api.client(api.key) as user:
        placed = await user.post(f"/users/{api.user}/orders", json=an_order(1))
        assert placed.json()["state"] == "filled"
        async with asyncio.timeout(20):
            while True:  # the outcome is written after the answer
                statistics = (
                    await user.get(f"/users/{api.user}/statistics", params={"days": 1})
                ).json()
                if statistics["figures"]["by_state"] == {"filled": 1}:
                    break
                await asyncio.sleep(0.05)
        assert (statistics["figures"]["orders"], statistics["day"]) == (1, None)
        assert (
            await user.get(f"/users/{api.user}/statistics", params={"days": 91})
        ).status_code == 422
    async with api.client(other) as stranger:
        assert (await stranger.get(f"/users/{api.user}/statistics")).status_code == 404
        own = (await stranger.get(f"/users/{api.user}-2/statistics")).json()
    assert (own["figures"]["orders"], own["figures"]["seconds"]) == (0, {})


async def test_slow_statistics_take_one_connection_of_a_process(api: ServedApi) -> None:
    path = f"/users/{api.user}/statistics"
    async with api.client(api.key) as user:
        async with api.services.database.engine.begin() as busy:
            await busy.execute(text("lock table reconciliations in access exclusive mode"))
            asked = [asyncio.create_task(user.get(path)) for _ in range(10)]
            answers = [await task for task in itertools.islice(asyncio.as_completed(asked), 9)]
            assert {
                (answer.status_code, answer.headers.get("Retry-After")) for answer in answers
            } == {(503, "1")}
            assert (await user.get(f"/users/{api.user}")).status_code == 200
            [reads] = (task for task in asked if not task.done())
        assert (await reads).status_code == 200


async def test_figures_have_a_limit_of_their_own_and_a_slow_one_is_no_outage(
    migrated_database: str,
) -> None:
    database, (since, until) = (
        Database(migrated_database),
        reports.report_period(DAYS, DAY, timedelta()),
    )
    async with database.engine.begin() as busy:
        await busy.execute(text("lock table orders in access exclusive mode"))
        with pytest.raises(reports.FiguresTooSlow, match=r"more than 0\.2 s"):
            async with database.session() as session:
                await reports.read_figures(session, since, until, limit=0.2)
    async with database.session() as session:
        assert (await reports.read_figures(session, since, until))["orders"] == 0
    async with database.session() as session:
        assert await session.scalar(text("show statement_timeout")) == "0"
    await database.close()


@pytest.mark.slow
async def test_a_report_may_take_longer_than_other_statements(migrated_database: str) -> None:
    database = Database(migrated_database)
    async with database.engine.begin() as busy:
        await busy.execute(text("lock table reconciliations in access exclusive mode"))
        async with asyncio.TaskGroup() as group:
            made = group.create_task(make(database))
            await asyncio.sleep(10.5)  # asyncpg gives other statements 10 s
            assert not made.done()
            await busy.rollback()
    assert made.result()["orders"] == 0
    await database.close()


async def test_the_command_shows_a_report(
    api: ServedApi, commands: CommandForker, tmp_path: Path
) -> None:
    await store_report(api)
    async with operator(api, commands, tmp_path) as berth:
        shown = await berth("report", "show")
        assert (shown.code, shown.err) == (0, "")
        assert "report of 2026-09-24" in shown.out
        as_json = await berth("report", "show", "2026-09-24", "--json")
        assert json.loads(as_json.out)["figures"]["orders"] == 0
        missing = await berth("report", "show", "2026-09-25")
    assert (missing.code, "there is no report of 2026-09-25" in missing.err) == (1, True)


async def test_the_schedule_follows_the_settings(temporal_server: TemporalServer) -> None:
    temporal = await Client.connect(temporal_server.address)
    handle = temporal.get_schedule_handle(names.REPORT_SCHEDULE)
    try:
        await schedules.ensure_schedules(
            temporal, Settings(report_at="07:45"), names.REPORT_SCHEDULE
        )
        schedule = (await handle.describe()).schedule
        [daily] = schedule.spec.calendars
        assert ([hour.start for hour in daily.hour], [minute.start for minute in daily.minute]) == (
            [7],
            [45],
        )
        assert schedule.spec.time_zone_name == "Asia/Taipei"
        assert isinstance(schedule.action, ScheduleActionStartWorkflow)
        assert (schedule.action.workflow, schedule.policy.catchup_window) == (
            names.DAILY_REPORT,
            timedelta(hours=15),
        )
    finally:
        await schedules.ensure_schedules(temporal, Settings(report_at=""), names.REPORT_SCHEDULE)
    with pytest.raises(RPCError):
        await handle.describe()
