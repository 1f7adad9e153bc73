"""The calendar of Taiwan's exchanges: when they take orders.

Holidays come from a table made from the library `exchange_calendars` (`.ci/holiday_table.py`), since
importing it would cost each process pandas, 60 MB and a second. An operator's file overrides the table: a
typhoon can close the exchange on an hour's notice.
"""

import json
from collections.abc import Mapping
from dataclasses import dataclass, field
from datetime import date, datetime, time, timedelta, timezone
from enum import StrEnum
from importlib.resources import files
from pathlib import Path
from typing import Any

from worker_runtime.protocol.errors import BerthError
from worker_runtime.protocol.order_terms import OrderLot

#: Taiwan has had no daylight saving time since 1979.
TAIPEI = timezone(timedelta(hours=8))
#: Most days to search back for a trading day: the longest holidays of Taiwan are below two weeks.
LOOK_BACK = 60


class Market(StrEnum):
    """What an account trades, as its `broker_type` says."""

    #: TWSE and TPEx.
    STOCK = "stock"
    #: TAIFEX.
    FUTURES = "futures"


@dataclass(frozen=True)
class Hours:
    """The hours in which orders are taken; those of an evening end on the next morning."""

    opens: time
    closes: time


#: TWSE takes orders from 08:30 and matches from 09:00 to 13:30; TAIFEX trades from 08:45 to 13:45 and in the
#: evening from 15:00 to 05:00; it takes orders 15 and 10 minutes earlier (the exchanges' trading hours).
DAY = {Market.STOCK: Hours(time(8, 30), time(13, 30)), Market.FUTURES: Hours(time(8, 30), time(13, 45))}
EVENING = {Market.FUTURES: Hours(time(14, 50), time(5, 0))}
#: The bells: when each market begins to match orders.
_DAY_BELLS = {Market.STOCK: time(9), Market.FUTURES: time(8, 45)}
_EVENING_BELLS = {Market.FUTURES: time(15)}
#: Lots that trade apart after TWSE's close: from this long after it until an hour after it (article 3 of the
#: Regulations Governing Odd-lot Trading, article 3 of those Governing After-Hours Fixed-Price Trading). Odd
#: lots during the day are taken from the bell.
_AFTER_CLOSE = {OrderLot.ODD: timedelta(minutes=10), OrderLot.FIXING: timedelta(minutes=30)}


class CalendarUnreadable(BerthError, code="CALENDAR_UNREADABLE"):
    """The file of exchange days cannot be read."""


@dataclass(frozen=True)
class Calendar:
    """Trading days of the exchanges. After the table's last day, every weekday counts as one."""

    #: Weekdays without trading.
    holidays: frozenset[date]
    #: The last day in the table.
    last: date
    #: Days that an operator changed: closed (None), or other day hours for all markets. An open day keeps its
    #: evening.
    changed: Mapping[date, Hours | None] = field(default_factory=dict)

    @property
    def known_until(self) -> date:
        """The last day of the table, or a later one that an operator's file has."""
        return max((self.last, *self.changed))

    def trades_on(self, day: date) -> bool:
        if day in self.changed:
            return self.changed[day] is not None
        return self._in_table(day)

    def trading_day_before(self, day: date) -> date:
        """The last trading day before this day."""
        for back in range(1, LOOK_BACK):
            if self.trades_on(before := day - timedelta(days=back)):
                return before
        return day - timedelta(days=1)  # an operator closed them all

    def is_open(self, market: Market, at: datetime, lot: OrderLot = OrderLot.COMMON) -> bool:
        """Whether the market takes orders of this lot at this time, which needs a time zone."""
        local = at.astimezone(TAIPEI)
        day, now = local.date(), local.time()
        if self.trades_on(day):
            hours = self.changed.get(day) or DAY[market]
            if (after := _AFTER_CLOSE.get(lot)) is not None:
                return after <= local - datetime.combine(day, hours.closes, TAIPEI) <= timedelta(hours=1)
            opens = max(hours.opens, _DAY_BELLS[market]) if lot is OrderLot.INTRADAY_ODD else hours.opens
            if opens <= now <= hours.closes:
                return True
        evening = EVENING.get(market)
        if evening is None:
            return False
        if now >= evening.opens:
            return self._has_evening(day)
        return now <= evening.closes and self._has_evening(day - timedelta(days=1))

    def bells(self, day: date, *, evening: bool = False) -> dict[Market, datetime]:
        """When the markets begin to match on this day, or in its evening; empty if they do not.

        A day with other hours has its bells no earlier than it takes orders.
        """
        if not (self._has_evening(day) if evening else self.trades_on(day)):
            return {}
        hours = None if evening else self.changed.get(day)
        bells = _EVENING_BELLS if evening else _DAY_BELLS
        return {
            market: datetime.combine(day, max(bell, hours.opens) if hours else bell, TAIPEI)
            for market, bell in bells.items()
        }

    def _in_table(self, day: date) -> bool:
        return day.weekday() < 5 and day not in self.holidays

    def _has_evening(self, day: date) -> bool:
        """Whether the day has an evening; a day that only an operator opened has none."""
        return self._in_table(day) and self.trades_on(day)


def load_calendar(changes: Path | None = None) -> Calendar:
    """Loads the table with an operator's changes: `{"2026-09-28": "closed", "2026-02-13": "09:00-11:00"}`.

    Raises `CalendarUnreadable`.
    """
    table = json.loads((files("infra.market") / "xtai.json").read_text(encoding="utf-8"))
    return Calendar(
        holidays=frozenset(map(date.fromisoformat, table["holidays"])),
        last=date.fromisoformat(table["last"]),
        changed=_read_changes(changes) if changes else {},
    )


def _read_changes(path: Path) -> dict[date, Hours | None]:
    try:
        found: dict[str, Any] = json.loads(path.read_text(encoding="utf-8"))
        return {date.fromisoformat(day): _parse_hours(text) for day, text in found.items()}
    except (OSError, ValueError, AttributeError) as error:
        raise CalendarUnreadable(f"{path}: {error}") from None


def _parse_hours(text: str) -> Hours | None:
    if text == "closed":
        return None
    opens, closes = (time.fromisoformat(part) for part in text.split("-"))
    return Hours(opens, closes)
