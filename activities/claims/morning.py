"""The activities of the morning: the trading day, recent traders, one user's connection."""

from collections.abc import Awaitable, Callable
from datetime import UTC, date, datetime, time

import structlog
from temporalio import activity
from temporalio.exceptions import ApplicationError

from activities.heartbeat import beating
from infra.database.engine import Database
from infra.database.orders import listing as recent_users
from infra.market.calendar import HOME_ZONE, Calendar
from worker_runtime.protocol.errors import BerthError
from workflows.morning.messages import (
    BellGroup,
    Connected,
    ConnectUser,
    MorningPlan,
    PlanMorning,
    RecentUsers,
)

log = structlog.get_logger()


#: Returns when the user's worker is Active and will
#: stay until then (Unix seconds); raises `BerthError`.
StartUser = Callable[[str, float], Awaitable[None]]


class MorningActivities:
    """Activities `plan_morning`, `recent_users`, `connect_user`. All may be repeated."""

    def __init__(self, database: Database, calendar: Calendar, ensure_active: StartUser) -> None:
        self._database = database
        self._calendar = calendar
        self._ensure_active = ensure_active

    @activity.defn
    async def plan_morning(self, request: PlanMorning) -> MorningPlan:
        try:
            now = (
                datetime.fromtimestamp(request.at, HOME_ZONE)
                if request.at
                else datetime.now(HOME_ZONE)
            )
            day = date.fromisoformat(request.day) if request.day else now.date()
        except ValueError as error:
            raise ApplicationError(str(error), type="INVALID_DAY", non_retryable=True) from None
        bells = self._calendar.bells(day, evening=request.evening)
        if not bells:
            why = "has no evening session" if request.evening else "is not a trading day"
            return MorningPlan(day=day.isoformat(), reason=f"{day} {why}")
        first = first_recent_day(self._calendar, day, request.days)
        since = datetime.combine(first, time(), HOME_ZONE)
        async with self._database.session() as session:
            counted = await recent_users.count_recent_users(session, since, evening=request.evening)
        groups = _groups(bells, counted)
        users = sum(group.users for group in groups)
        log.info(
            "morning_planned", day=day.isoformat(), users=users, since=since.date().isoformat()
        )
        bell = groups[-1].bell
        return MorningPlan(
            day=day.isoformat(), users=users, since=since.timestamp(), bell=bell, groups=groups
        )

    @activity.defn
    async def recent_users(self, request: RecentUsers) -> list[str]:
        since = datetime.fromtimestamp(request.since, UTC)
        return await self._database.write(
            recent_users.recent_users_after,
            since,
            evening=request.evening,
            market=request.market,
            after=request.after,
            limit=request.limit,
        )

    @activity.defn
    async def connect_user(self, request: ConnectUser) -> Connected:
        try:
            async with beating():
                await self._ensure_active(request.user_id, request.stay_until)
        except BerthError as error:
            log.warning("morning_user_failed", user_id=request.user_id, code=error.code)
            return Connected(
                ok=False, code=error.code, detail=error.detail, retryable=error.retryable
            )
        return Connected(ok=True)


def _groups(bells: dict[str, datetime], counted: dict[str, int]) -> tuple[BellGroup, ...]:
    """Groups the users by their first bell.

    Markets that begin together are one group: its logins share a window.
    """
    at = {market: bell.timestamp() for market, bell in bells.items()}
    if len(set(at.values())) == 1:
        return (BellGroup(bell=min(at.values()), users=sum(counted.values())),)
    groups = [
        BellGroup(bell=at[market], users=counted.get(market, 0), market=market) for market in at
    ]
    return tuple(sorted(groups, key=lambda group: group.bell))


def first_recent_day(calendar: Calendar, day: date, days: int) -> date:
    """Returns the first of the last `days` trading days before `day`."""
    for _ in range(days):
        day = calendar.trading_day_before(day)
    return day
