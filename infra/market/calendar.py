"""The calendars of markets: when they take orders.

Hours, holidays and time zones come from the brokers' records
(`worker_runtime/protocol/broker_record.py`). An operator's file overrides them: a typhoon can close
an exchange on an hour's notice.

What is not about one account (reports, quotas, the days of lists, windows of a pool) follows the
home markets, which are those of the first of Berth's built-in brokers.
"""

import json
from collections.abc import Mapping
from dataclasses import dataclass, field
from datetime import date, datetime, time, timedelta, tzinfo
from enum import StrEnum
from functools import cache
from pathlib import Path
from typing import Any
from zoneinfo import ZoneInfo, ZoneInfoNotFoundError

from worker_runtime.protocol.broker_record import (
    BrokerRecordRefused,
    HolidayTable,
    MarketRule,
    Plugin,
    after_close,
)
from worker_runtime.protocol.errors import BerthError
from worker_runtime.protocol.installed_brokers import built_in_brokers, installed_brokers
from worker_runtime.protocol.order_terms import OrderLot

#: Most days to search back for a trading day: the longest known holidays are below two weeks.
LOOK_BACK_DAYS = 60


class Market(StrEnum):
    """The home markets, as the `broker_type` of their accounts says."""

    STOCK = "stock"
    FUTURES = "futures"


@dataclass(frozen=True)
class Hours:
    """The hours of a day in which orders are taken."""

    opens: time
    closes: time


@cache
def home_broker() -> Plugin:
    """Return the broker whose markets the installation's own days follow."""
    return next(iter(built_in_brokers().values()))


@cache
def zone_of_market(name: str) -> ZoneInfo:
    """Return a market's time zone. Raises `BrokerRecordRefused`."""
    try:
        return ZoneInfo(name)
    except (ZoneInfoNotFoundError, ValueError, OSError):
        raise BrokerRecordRefused(
            f"A broker's record names the time zone {name!r}, which does not exist."
        ) from None


def _check_zone(broker: str, market: str, rule: MarketRule) -> None:
    """Raise `BrokerRecordRefused` with the name of the broker whose market has no such zone."""
    try:
        zone_of_market(rule.zone)
    except BrokerRecordRefused:
        raise BrokerRecordRefused(
            f"The record of the broker {broker} cannot be used: markets.{market}.zone is "
            f"{rule.zone!r}, and there is no such time zone. Write one such as Europe/Berlin."
        ) from None


def _home_zone_name() -> str:
    return next(iter(home_broker().record.markets.values())).zone


#: The time zone of the home markets, and its name for texts and for PostgreSQL.
HOME_ZONE_NAME = _home_zone_name()
HOME_ZONE: tzinfo = zone_of_market(HOME_ZONE_NAME)


def _home_markets() -> Mapping[str, MarketRule]:
    return home_broker().record.markets


class CalendarUnreadable(BerthError, code="CALENDAR_UNREADABLE"):
    """The file of exchange days cannot be read."""


@dataclass(frozen=True)
class Calendar:
    """Trading days of markets. After the table's last day, every weekday counts as one."""

    #: Weekdays without trading.
    holidays: frozenset[date]
    #: The last day in the table.
    last: date
    #: Days that an operator changed: closed (None), or other day hours for all markets. An open day
    #: keeps its evening.
    changed: Mapping[date, Hours | None] = field(default_factory=dict)
    #: By the `broker_type` of their accounts. All have the same zone.
    markets: Mapping[str, MarketRule] = field(default_factory=_home_markets)
    #: The last known day of each installed market whose table of holidays ends, as `broker/market`.
    ends: Mapping[str, date] = field(default_factory=dict)

    @property
    def first_end(self) -> date:
        """The last day on which the holidays of all installed markets are known."""
        return min((self.known_until, *self.ends.values()))

    @property
    def known_until(self) -> date:
        """The last day of the table, or a later one that an operator's file has."""
        return max((self.last, *self.changed))

    def trades_on(self, day: date) -> bool:
        if day in self.changed:
            return self.changed[day] is not None
        return self._in_table(day)

    def trading_day_before(self, day: date) -> date:
        """Returns the last trading day before this day."""
        for back in range(1, LOOK_BACK_DAYS):
            if self.trades_on(before := day - timedelta(days=back)):
                return before
        return day - timedelta(days=1)  # an operator closed them all

    def is_open(self, market: str, at: datetime, lot: OrderLot = OrderLot.COMMON) -> bool:
        """Returns True if the market takes orders of this lot at this time, which needs a time
        zone."""
        rule = self.markets[market]
        local = at.astimezone(zone := zone_of_market(rule.zone))
        day, now = local.date(), local.time()
        if self.trades_on(day):
            hours = self.changed.get(day) or self.day_hours(market)
            lot_rule = rule.lots.get(lot)
            if lot_rule is not None and (span := after_close(lot_rule)) is not None:
                return span[0] <= local - datetime.combine(day, hours.closes, zone) <= span[1]
            from_bell = lot_rule is not None and lot_rule.from_bell
            opens = max(hours.opens, rule.day.bell) if from_bell else hours.opens
            if opens <= now <= hours.closes:
                return True
        evening = rule.evening
        if evening is None:
            return False
        if not evening.ends_next_day:
            return evening.opens <= now <= evening.closes and self._has_evening(day)
        if now >= evening.opens:
            return self._has_evening(day)
        return now <= evening.closes and self._has_evening(day - timedelta(days=1))

    def day_hours(self, market: str) -> Hours:
        """Return the usual hours of a trading day."""
        day = self.markets[market].day
        return Hours(day.opens, day.closes)

    def bells(self, day: date, *, evening: bool = False) -> dict[str, datetime]:
        """Returns when the markets begin to match on this day, or in its evening; empty if they do
        not.

        A day with other hours has its bells no earlier than it takes orders.
        """
        if not (self._has_evening(day) if evening else self.trades_on(day)):
            return {}
        hours = None if evening else self.changed.get(day)
        bells = {}
        for market, rule in self.markets.items():
            session = rule.evening if evening else rule.day
            if session is not None:
                begins = max(session.bell, hours.opens) if hours else session.bell
                bells[market] = datetime.combine(day, begins, zone_of_market(rule.zone))
        return bells

    def _in_table(self, day: date) -> bool:
        return day.weekday() < 5 and day not in self.holidays

    def _has_evening(self, day: date) -> bool:
        """Returns True if the day has an evening; a day that only an operator opened has none."""
        return self._in_table(day) and self.trades_on(day)


def load_calendar(changes: Path | None = None) -> Calendar:
    """Load the calendar of the home markets, with an operator's changes.

    `changes` is JSON: `{"2026-09-28": "closed", "2026-02-13": "09:00-11:00"}`. Those of another
    broker are in an object under its name, or under broker and market: `{"harbour/spot":
    {"2026-09-28": "closed"}}`.

    Raises `CalendarUnreadable`.
    """
    return MarketCalendars(changes).home


class MarketCalendars:
    """The calendars of all installed brokers' markets. Made once a process; a look-up is in
    memory."""

    def __init__(self, changes: Path | None = None) -> None:
        """Raises `CalendarUnreadable` and `BrokerRecordRefused`."""
        content = _read_file(changes) if changes else {}
        known = {
            key
            for name, plugin in installed_brokers().items()
            for key in (name, *(f"{name}/{market}" for market in plugin.record.markets))
        }
        for key, part in content.items():
            if not isinstance(part, str) and not (isinstance(part, dict) and key in known):
                raise CalendarUnreadable(
                    f"{changes}: {key!r} is neither a day with its hours nor a broker (or "
                    f"broker/market) with days; installed are {', '.join(sorted(known))}"
                )
        home = home_broker()
        self._by_market: dict[tuple[str, str], Calendar] = {}
        for name, plugin in installed_brokers().items():
            for market, rule in plugin.record.markets.items():
                _check_zone(name, market, rule)
                own: dict[str, str] = {}
                for key in (name, f"{name}/{market}"):
                    if isinstance(part := content.get(key), dict):
                        own |= part
                if not plugin.distribution:
                    own = {
                        day: text for day, text in content.items() if isinstance(text, str)
                    } | own
                self._by_market[name, market] = Calendar(
                    **_table(plugin.holidays.get(market)),
                    changed=_parse_changes(changes, own),
                    markets={market: rule},
                )
        first = next(iter(home.record.markets))
        days = {day: text for day, text in content.items() if isinstance(text, str)}
        self.home = Calendar(
            **_table(home.holidays.get(first)),
            changed=_parse_changes(changes, days),
            ends=self._ends(),
        )

    def find(self, broker: str, market: str) -> Calendar | None:
        """Return the calendar of a broker's market; None if the broker or its market is not
        installed."""
        return self._by_market.get((broker, market))

    def _ends(self) -> dict[str, date]:
        return {
            f"{broker}/{market}": calendar.known_until
            for (broker, market), calendar in self._by_market.items()
            if calendar.last < date.max
        }


def _table(table: HolidayTable | None) -> dict[str, Any]:
    """Return the fields of a calendar. A market without a table trades on every weekday, for
    good."""
    if table is None:
        return {"holidays": frozenset(), "last": date.max}
    return {"holidays": table.holidays, "last": table.last}


def _read_file(path: Path) -> dict[str, Any]:
    try:
        content: dict[str, Any] = json.loads(path.read_text(encoding="utf-8"))
        content.items()
    except (OSError, ValueError, AttributeError) as error:
        raise CalendarUnreadable(f"{path}: {error}") from None
    return content


def _parse_changes(path: Path | None, days: Mapping[str, str]) -> dict[date, Hours | None]:
    try:
        return {date.fromisoformat(day): _parse_hours(text) for day, text in days.items()}
    except (ValueError, AttributeError, TypeError) as error:
        raise CalendarUnreadable(f"{path}: {error}") from None


def _parse_hours(text: str) -> Hours | None:
    if text == "closed":
        return None
    opens, closes = (time.fromisoformat(part) for part in text.split("-"))
    return Hours(opens, closes)
