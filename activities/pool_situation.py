"""What a pool's size depends on besides its workers: the hours that hold now, and how many claims came."""

from __future__ import annotations

import time
from collections.abc import Callable
from datetime import time as clock_time

import structlog

from infra.database import worker_sessions
from infra.database.engine import Database
from infra.market import windows
from infra.market.calendar import Calendar
from worker_runtime.protocol.errors import BerthError
from workflows.pool_messages import WindowNow
from workflows.pool_policy import PoolPolicy, PoolWindow, check, days_of

log = structlog.get_logger()


def window_of(given: PoolWindow) -> windows.Window:
    """Raises `PoolPolicyInvalid`, `ZoneUnknown`, `ValueError`."""
    return windows.Window(
        begins=clock_time.fromisoformat(given.begins),
        ends=clock_time.fromisoformat(given.ends),
        weekdays=days_of(given.days),
        zone=windows.zone_of(given.zone),
        days=windows.Days(given.calendar),
    )


def checked(policy: PoolPolicy) -> PoolPolicy:
    """The same policy, when it makes sense. Raises `PoolPolicyInvalid`, `ZoneUnknown`."""
    check(policy)
    for window in policy.windows:
        windows.zone_of(window.zone)
    return policy


class PoolSituation:
    """Workflows do no I/O: time zones, the calendar and PostgreSQL are read here, for `count_pool`."""

    def __init__(self, database: Database, calendar: Calendar, now: Callable[[], float] = time.time) -> None:
        self._database = database
        self._calendar = calendar
        self._now = now

    async def look(self, pool: str, policy: PoolPolicy | None) -> tuple[int | None, WindowNow]:
        """Claims within the policy's last minutes (None: not asked for, or not known), and the window."""
        if policy is None:
            return None, WindowNow()
        return await self._claims(pool, policy.demand_minutes * 60), self._window(policy)

    async def _claims(self, pool: str, seconds: float) -> int | None:
        if seconds <= 0:
            return None
        try:
            async with self._database.session(autocommit=True) as session:
                return await worker_sessions.claims_within(session, pool, seconds)
        except BerthError as error:  # the pool goes on with the number that it knows
            log.warning("pool_demand_unknown", pool=pool, reason=error.detail)
            return None

    def _window(self, policy: PoolPolicy) -> WindowNow:
        if not policy.windows:
            return WindowNow()
        try:
            hours = [window_of(one) for one in policy.windows]
        except (BerthError, ValueError) as error:  # of a time zone that this host does not know
            log.error("pool_windows_not_understood", reason=str(error)[:200])
            return WindowNow()
        number, until = windows.holding(hours, self._calendar, self._now())
        return WindowNow(name="" if number is None else policy.windows[number].name, until=until)
