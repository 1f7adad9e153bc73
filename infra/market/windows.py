"""Windows: hours of the day by weekday, time zone and the exchange's calendar."""

from collections.abc import Sequence
from dataclasses import dataclass
from datetime import UTC, date, datetime, time, timedelta, tzinfo
from enum import StrEnum
from zoneinfo import ZoneInfo, ZoneInfoNotFoundError

from infra.market.calendar import HOME_ZONE_NAME, Calendar, Market
from worker_runtime.protocol.errors import BerthError

#: Days searched for the next change; the longest closure of a home market (lunar new year) is 11
#: days.
LOOK_AHEAD_DAYS = 14


class ZoneUnknown(BerthError, code="ZONE_UNKNOWN", status=422):
    """There is no such time zone."""


class Days(StrEnum):
    """The days of the exchange's calendar on which a window holds."""

    ANY = "any"
    TRADING = "trading"
    CLOSED = "closed"


def zone_of(name: str) -> tzinfo:
    """Raises `ZoneUnknown`."""
    try:
        return ZoneInfo(name)
    except (ZoneInfoNotFoundError, ValueError, OSError):
        raise ZoneUnknown(
            f"There is no time zone {name!r}. Use a name like {HOME_ZONE_NAME}."
        ) from None


@dataclass(frozen=True, kw_only=True)
class Window:
    """Hours of some days. If it does not end after it begins, it ends on the next day."""

    begins: time
    ends: time
    #: Weekdays on which it begins; Monday is 0.
    weekdays: frozenset[int]
    zone: tzinfo
    days: Days = Days.ANY

    def span(self, day: date, calendar: Calendar) -> tuple[float, float] | None:
        """Returns begin and end (exclusive) of the window on this day in Unix seconds, or None.

        On a day with changed hours, a window of trading days that begins before the exchange moves
        with the opening. One that spans the usual close ends earlier by as much as the exchange
        closes early. One that begins after the usual close does not hold then.
        """
        if day.weekday() not in self.weekdays:
            return None
        if self.days is not Days.ANY and calendar.trades_on(day) is not (self.days is Days.TRADING):
            return None
        begins = datetime.combine(day, self.begins)
        ends = datetime.combine(day, self.ends)
        if ends <= begins:
            ends += timedelta(days=1)
        hours = calendar.changed.get(day) if self.days is Days.TRADING else None
        if hours is not None:
            usual = calendar.day_hours(Market.STOCK)
            if self.begins >= usual.closes:
                return None
            late = timedelta()
            if self.begins < hours.opens:
                late = max(late, _between(usual.opens, hours.opens))
            begins += late
            if ends < datetime.combine(day, usual.closes):
                ends = min(ends + late, datetime.combine(day, hours.closes))
            else:
                ends -= max(timedelta(), _between(hours.closes, usual.closes))
        first, last = (at.replace(tzinfo=self.zone).timestamp() for at in (begins, ends))
        return (first, last) if first < last else None


def _between(first: time, second: time) -> timedelta:
    day = date(2000, 1, 1)
    return datetime.combine(day, second) - datetime.combine(day, first)


def current_window(
    windows: Sequence[Window], calendar: Calendar, at: float
) -> tuple[int | None, float | None]:
    """Returns the number of the first window that holds at `at` (Unix seconds), and when that
    changes.

    Either is None: no window holds, or nothing changes within `LOOK_AHEAD_DAYS` days.
    """
    spans: list[tuple[int, float, float]] = []
    for number, window in enumerate(windows):
        today = datetime.fromtimestamp(at, UTC).astimezone(window.zone).date()
        for step in range(-1, LOOK_AHEAD_DAYS):
            span = window.span(today + timedelta(days=step), calendar)
            if span is not None:
                spans.append((number, *span))

    def window_at(moment: float) -> int | None:
        return min(
            (number for number, first, last in spans if first <= moment < last), default=None
        )

    now = window_at(at)
    edges = sorted({edge for _, *both in spans for edge in both if edge > at})
    return now, next((edge for edge in edges if window_at(edge) != now), None)
