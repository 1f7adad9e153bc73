"""When the exchanges of Taiwan take orders.

Holidays come from a table that was made of the library `exchange_calendars` (`python -m infra.market.table`):
importing the library costs each process pandas, 60 MB and a second. An operator's file goes before the
table: a typhoon closes the exchange on an hour's notice, and no library knows of it.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass, field
from datetime import date, datetime, time, timedelta, timezone
from enum import StrEnum
from importlib.resources import files
from pathlib import Path
from typing import Any

from worker_runtime.protocol.errors import BerthError

#: Taiwan has had no daylight saving time since 1979.
TAIPEI = timezone(timedelta(hours=8))


class Market(StrEnum):
    """What an account trades, as its `broker_type` says."""

    #: TWSE and TPEx.
    STOCK = "stock"
    #: TAIFEX.
    FUTURES = "futures"


@dataclass(frozen=True)
class Hours:
    """From when to when orders are taken; an evening's hours end on the morning after."""

    opens: time
    closes: time


#: TWSE takes orders from 08:30 and matches from 09:00 to 13:30; TAIFEX trades from 08:45 to 13:45 and in the
#: evening from 15:00 to 05:00, and takes orders 15 and 10 minutes before (the exchanges' trading hours).
DAY = {Market.STOCK: Hours(time(8, 30), time(13, 30)), Market.FUTURES: Hours(time(8, 30), time(13, 45))}
EVENING = {Market.FUTURES: Hours(time(14, 50), time(5, 0))}


class CalendarUnreadable(BerthError):
    """The file of exchange days cannot be read."""

    code = "CALENDAR_UNREADABLE"


@dataclass(frozen=True)
class Calendar:
    """Trading days of the exchanges. Beyond the table's last day, weekdays count as such."""

    #: Weekdays without trading.
    holidays: frozenset[date]
    #: Last day of which the table knows.
    last: date
    #: Days that an operator has changed: closed (None), or with other hours, which then hold for all markets.
    #: They say nothing of the evening: a day that has one keeps it, unless it is closed.
    changed: Mapping[date, Hours | None] = field(default_factory=dict)

    def trades_on(self, day: date) -> bool:
        if day in self.changed:
            return self.changed[day] is not None
        return self._regular(day)

    def is_open(self, market: Market, at: datetime) -> bool:
        """Whether the market takes orders at this time, which has a zone."""
        local = at.astimezone(TAIPEI)
        day, now = local.date(), local.time()
        if self.trades_on(day):
            hours = self.changed.get(day) or DAY[market]
            if hours.opens <= now <= hours.closes:
                return True
        evening = EVENING.get(market)
        if evening is None:
            return False
        if now >= evening.opens:
            return self._has_evening(day)
        return now <= evening.closes and self._has_evening(day - timedelta(days=1))

    def _regular(self, day: date) -> bool:
        """By the table, whatever an operator says."""
        return day.weekday() < 5 and day not in self.holidays

    def _has_evening(self, day: date) -> bool:
        """A day that is only opened by an operator (a Saturday to make up for another) has none."""
        return self._regular(day) and self.trades_on(day)


def load_calendar(changes: Path | None = None) -> Calendar:
    """The table, with an operator's changes: `{"2026-09-28": "closed", "2026-02-13": "09:00-11:00"}`.

    Raises `CalendarUnreadable`.
    """
    table = json.loads((files("infra.market") / "xtai.json").read_text(encoding="utf-8"))
    return Calendar(
        holidays=frozenset(map(date.fromisoformat, table["holidays"])),
        last=date.fromisoformat(table["last"]),
        changed=_changes(changes) if changes else {},
    )


def _changes(path: Path) -> dict[date, Hours | None]:
    try:
        found: dict[str, Any] = json.loads(path.read_text(encoding="utf-8"))
        return {date.fromisoformat(day): _hours(text) for day, text in found.items()}
    except (OSError, ValueError, AttributeError) as error:
        raise CalendarUnreadable(f"{path}: {error}") from None


def _hours(text: str) -> Hours | None:
    if text == "closed":
        return None
    opens, closes = (time.fromisoformat(part) for part in text.split("-"))
    return Hours(opens, closes)
