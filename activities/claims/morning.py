"""The activities of the morning: the trading day, the users who traded recently, one user's connection."""

from __future__ import annotations

from datetime import UTC, date, datetime, timedelta
from typing import Protocol

import structlog
from temporalio import activity
from temporalio.exceptions import ApplicationError

from activities.heartbeat import Heartbeat
from infra.database.engine import Database
from infra.database.orders import listing as recent_users
from infra.market.calendar import DAY, TAIPEI, Calendar, Market
from worker_runtime.protocol.errors import BerthError
from workflows.morning import messages as mo

#: Most days to search back for trading days: the longest holidays of Taiwan are below two weeks.
LOOK_BACK = 60

log = structlog.get_logger()


class StarterPort(Protocol):
    async def ensure_active(self, user_id: str) -> None:
        """Returns when the user's worker is Active; raises `BerthError`."""
        ...


class MorningActivities:
    """Activities `plan_morning`, `recent_users`, `connect_user`. All may be repeated."""

    def __init__(self, database: Database, calendar: Calendar, starter: StarterPort) -> None:
        self._database = database
        self._calendar = calendar
        self._starter = starter

    @activity.defn
    async def plan_morning(self, request: mo.PlanMorning) -> mo.MorningPlan:
        try:
            day = date.fromisoformat(request.day) if request.day else datetime.now(TAIPEI).date()
        except ValueError as error:
            raise ApplicationError(str(error), type="INVALID_DAY", non_retryable=True) from None
        if not self._calendar.trades_on(day):
            return mo.MorningPlan(day=day.isoformat(), reason=f"{day} is no trading day")
        hours = self._calendar.changed.get(day) or DAY[Market.STOCK]
        bell = datetime.combine(day, hours.opens, TAIPEI)
        since = datetime.combine(
            first_recent_day(self._calendar, day, request.days), datetime.min.time(), TAIPEI
        )
        async with self._database.session() as session:
            users = await recent_users.count_recent_users(session, since)
        log.info("morning_planned", day=day.isoformat(), users=users, since=since.date().isoformat())
        return mo.MorningPlan(
            day=day.isoformat(), users=users, since=since.timestamp(), bell=bell.timestamp()
        )

    @activity.defn
    async def recent_users(self, request: mo.RecentUsers) -> list[str]:
        since = datetime.fromtimestamp(request.since, UTC)
        async with self._database.session() as session:
            return await recent_users.recent_users_after(
                session, since, after=request.after, limit=request.limit
            )

    @activity.defn
    async def connect_user(self, request: mo.ConnectUser) -> mo.Connected:
        try:
            async with Heartbeat():
                await self._starter.ensure_active(request.user_id)
        except BerthError as error:
            log.warning("morning_user_failed", user_id=request.user_id, code=error.code)
            return mo.Connected(ok=False, code=error.code, detail=error.detail, retryable=error.retryable)
        return mo.Connected(ok=True)


def first_recent_day(calendar: Calendar, day: date, days: int) -> date:
    """The first of the last `days` trading days before `day`."""
    found = day
    for back in range(1, LOOK_BACK):
        if days <= 0:
            break
        before = day - timedelta(days=back)
        if calendar.trades_on(before):
            found, days = before, days - 1
    return found
