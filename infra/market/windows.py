"""Which hours of the day hold now, and until when: by weekday, time zone and the exchange's calendar."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from datetime import UTC, date, datetime, time, timedelta, tzinfo
from enum import StrEnum
from zoneinfo import ZoneInfo, ZoneInfoNotFoundError

from infra.market.calendar import DAY, Calendar, Market
from worker_runtime.protocol.errors import BerthError

#: Days that are looked ahead for the next change; the longest closure of the exchange (lunar new year) is 11.
AHEAD = 14
#: The exchange's usual hours, with which a day of its own hours is compared.
_USUAL = DAY[Market.STOCK]


class ZoneUnknown(BerthError):
    """There is no such time zone."""

    code = "ZONE_UNKNOWN"


class Days(StrEnum):
    """Which days of the exchange's calendar count."""

    ANY = "any"
    TRADING = "trading"
    CLOSED = "closed"


def zone_of(name: str) -> tzinfo:
    """Raises `ZoneUnknown`."""
    try:
        return ZoneInfo(name)
    except (ZoneInfoNotFoundError, ValueError, OSError):
        raise ZoneUnknown(f"there is no time zone {name!r}; one looks like Asia/Taipei") from None


@dataclass(frozen=True, kw_only=True)
class Window:
    """Hours of some days. One that does not end after it begins ends on the next day."""

    begins: time
    ends: time
    #: Weekdays on which it begins; Monday is 0.
    weekdays: frozenset[int]
    zone: tzinfo
    days: Days = Days.ANY

    def span(self, day: date, calendar: Calendar) -> tuple[float, float] | None:
        """From when to when it holds if it begins on this day, in Unix seconds; the end is not in it.

        On a trading day with hours of its own a window of trading days begins later, or ends earlier, by as
        much as the exchange does; one that begins after the usual close does not hold, as such a day has no
        evening.
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
            if self.begins >= _USUAL.closes:
                return None
            begins += max(timedelta(), _between(_USUAL.opens, hours.opens))
            ends -= max(timedelta(), _between(hours.closes, _USUAL.closes))
        first, last = (at.replace(tzinfo=self.zone).timestamp() for at in (begins, ends))
        return (first, last) if first < last else None


def _between(first: time, second: time) -> timedelta:
    day = date(2000, 1, 1)
    return datetime.combine(day, second) - datetime.combine(day, first)


def current_window(
    windows: Sequence[Window], calendar: Calendar, at: float
) -> tuple[int | None, float | None]:
    """Number of the first window that holds at `at` (Unix seconds), and when this changes next.

    None for no window; None for no change within `AHEAD` days.
    """
    spans: list[tuple[int, float, float]] = []
    for number, window in enumerate(windows):
        today = datetime.fromtimestamp(at, UTC).astimezone(window.zone).date()
        for step in range(-1, AHEAD):
            span = window.span(today + timedelta(days=step), calendar)
            if span is not None:
                spans.append((number, *span))

    def held(moment: float) -> int | None:
        return min((number for number, first, last in spans if first <= moment < last), default=None)

    now = held(at)
    edges = sorted({edge for _, *both in spans for edge in both if edge > at})
    return now, next((edge for edge in edges if held(edge) != now), None)
