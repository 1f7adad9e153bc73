"""The daily report, stored once for each trading day, and the figures of it: of all users, or of
one.

A report covers the time since the end of the trading day before, so that what happens on days
without trading is in the next one.
"""

from datetime import date, datetime, timedelta
from importlib.resources import files
from typing import Any

import asyncpg
from sqlalchemy import Date, func, select, text, update
from sqlalchemy.dialects.postgresql import insert
from sqlalchemy.ext.asyncio import AsyncSession
from sqlalchemy.orm import Mapped, mapped_column

from infra.database.engine import SingleStatement
from infra.database.models import Base
from infra.database.orders.states import OPEN_STATES
from infra.database.trading.reconciliations import FIRST_COMPARISON
from infra.market.calendar import HOME_ZONE, Calendar
from worker_runtime.protocol.errors import BerthError
from worker_runtime.protocol.messages import FINAL_ORDER_STATES

#: Trading days for which the first primary makes reports.
BACKFILLED_DAYS = 20
#: Seconds that PostgreSQL may take for figures: for a report; for one of a startup task, whose step
#: it ends after 30 s (`locks.MAX_SILENCE_S`); for a user, who waits.
REPORT_TIMEOUT_S, BACKFILL_TIMEOUT_S, USER_TIMEOUT_S = 60.0, 20.0, 8.0
#: Figures in the order in which people read them; JSON of PostgreSQL has one of its own.
_SHOWN = (
    "users",
    "users_with_worker",
    "orders",
    "by_state",
    "by_code",
    "lots_ordered",
    "lots_bought",
    "lots_sold",
    "claims_failed",
    "restarts",
    "attention_raised",
    "differences",
    "dead_letters",
)


class ReportNotFound(BerthError, code="REPORT_NOT_FOUND", status=404):
    """There is no report of this day: it was no trading day, or its report is not due yet."""


class FiguresTooSlow(BerthError, code="FIGURES_TOO_SLOW", retryable=True):
    """PostgreSQL takes too long for the figures: there are too many orders, or it is busy."""


class DailyReport(Base):
    __tablename__ = "daily_reports"

    day: Mapped[date] = mapped_column(Date, primary_key=True)
    since: Mapped[datetime]
    until: Mapped[datetime]
    #: As `read_figures` returns them.
    figures: Mapped[dict[str, Any]]
    made_at: Mapped[datetime] = mapped_column(server_default=func.clock_timestamp())
    #: When its mails were put on their queue; null: not yet.
    mailed_at: Mapped[datetime | None]


_FIGURES = (files("infra.database") / "figures.sql").read_text(encoding="utf-8")
_OF_ALL = SingleStatement(text(_FIGURES))
_OF_USER = SingleStatement(text(_FIGURES.replace("/* of whom */", "and user_id = :user_id")))


async def read_figures(
    session: AsyncSession,
    since: datetime,
    until: datetime,
    user_id: str | None = None,
    *,
    limit: float = USER_TIMEOUT_S,
) -> dict[str, Any]:
    """Returns the figures of what began at or after `since` and before `until`: counts, lots,
    seconds.

    Raises `FiguresTooSlow` after `limit` seconds; the transaction can only be rolled back then.
    """
    given: dict[str, Any] = {"since": since, "until": until, "user_id": user_id}
    given |= {"open": list(OPEN_STATES), "final": list(FINAL_ORDER_STATES)}
    given["first_comparison"] = FIRST_COMPARISON
    statement = _OF_USER if user_id else _OF_ALL
    await session.execute(text(f"set local statement_timeout = {limit * 1000:.0f}"))
    # SQLAlchemy passes no limit on to asyncpg, whose own one for all statements is 10 s.
    raw: Any = (await (await session.connection()).get_raw_connection()).driver_connection
    try:
        figures = await raw.fetchval(
            statement.text, *statement.arguments(given), timeout=limit + 5.0
        )
    except asyncpg.QueryCanceledError:
        raise FiguresTooSlow(f"the figures take more than {limit:g} s") from None
    return {"by_state": {}, "by_code": {}, "dead_letters": {}, **figures}


def report_period(calendar: Calendar, day: date, end: timedelta) -> tuple[datetime, datetime]:
    """Returns the period from the end of the trading day before to the end of `day`, which is `end`
    after its midnight."""
    before = calendar.trading_day_before(day)
    since, until = (
        datetime.combine(end_day, datetime.min.time(), HOME_ZONE) + end for end_day in (before, day)
    )
    return since, until


async def make_report(
    session: AsyncSession,
    calendar: Calendar,
    day: date,
    end: timedelta,
    *,
    limit: float = REPORT_TIMEOUT_S,
) -> DailyReport:
    """Makes the report of a trading day that has ended. The first call stores it, and what it
    stored stays.

    Raises `FiguresTooSlow` after `limit` seconds.
    """
    if await session.get(DailyReport, day) is None:
        since, until = report_period(calendar, day, end)
        figures = await read_figures(session, since, until, limit=limit)
        stored = insert(DailyReport).values(day=day, since=since, until=until, figures=figures)
        await session.execute(stored.on_conflict_do_nothing())
    return await get_report(session, day)


async def get_report(session: AsyncSession, day: date | None = None) -> DailyReport:
    """Returns the report of a day, or the latest one. Raises `ReportNotFound`."""
    query = select(DailyReport).order_by(DailyReport.day.desc()).limit(1)
    report = await session.scalar(query if day is None else query.where(DailyReport.day == day))
    if report is None:
        raise ReportNotFound(f"there is no report of {day}" if day else "there is no report yet")
    return report


async def set_mailed(session: AsyncSession, day: date) -> None:
    now = func.clock_timestamp()
    await session.execute(update(DailyReport).where(DailyReport.day == day).values(mailed_at=now))


async def backfill_reports(
    session: AsyncSession,
    progress: dict[str, Any],
    *,
    calendar: Calendar,
    before: date,
    end: timedelta,
) -> dict[str, Any] | None:
    """Does one step of a startup task: makes the report of one trading day, if it had orders.

    The first step is about the trading day before `before`, each further one about the day before.
    None: it was the last one.
    """
    day = calendar.trading_day_before(date.fromisoformat(progress.get("day") or before.isoformat()))
    since, until = report_period(calendar, day, end)
    in_it = text(
        "select exists (select from orders where created_at >= :since and created_at < :until)"
    )
    if await session.scalar(in_it, {"since": since, "until": until}):
        await make_report(session, calendar, day, end, limit=BACKFILL_TIMEOUT_S)
    days = progress.get("days", 0) + 1
    return {"day": day.isoformat(), "days": days} if days < BACKFILLED_DAYS else None


def report_lines(figures: dict[str, Any]) -> list[tuple[str, str]]:
    """Returns the figures for people: names and values."""
    spread = "{count} times, p50 {p50:.3f}, p95 {p95:.3f}, p99 {p99:.3f}, max {max:.3f}"
    shown = {}
    for name in _SHOWN:
        value = figures[name]
        if isinstance(value, dict):
            value = ", ".join(f"{key} {count:,}" for key, count in sorted(value.items())) or "-"
        shown[name] = str(value)
    shown |= {
        f"{kind} (s)": spread.format(**quantiles)
        for kind, quantiles in sorted(figures["seconds"].items())
    }
    return [(name.replace("_", " "), value) for name, value in shown.items()]
