"""The trading days of a broker, and how many of them a list of its instruments is old."""

from collections.abc import Iterator
from datetime import date, datetime, timedelta

from infra.market.calendar import LOOK_BACK_DAYS, Calendar, MarketCalendars, zone_of_market
from worker_runtime.protocol.installed_brokers import installed_brokers

#: Trading days without a new list after which operators are alerted.
MAX_MISSED_DAYS = 2


def latest_trading_day(calendars: MarketCalendars, broker: str, at: float) -> date | None:
    """Return the broker's trading day at a time (Unix seconds), or the last one before it; None if
    the broker is not installed."""
    days = []
    for today, calendar in _markets(calendars, broker, at):
        days.append(today if calendar.trades_on(today) else calendar.trading_day_before(today))
    return max(days, default=None)


def missed_trading_days(calendars: MarketCalendars, broker: str, loaded_on: date, at: float) -> int:
    """Return how many trading days of the broker have begun
    since the list of `loaded_on`, at most `LOOK_BACK_DAYS`."""
    missed: set[date] = set()
    for today, calendar in _markets(calendars, broker, at):
        for back in range(LOOK_BACK_DAYS):
            if (day := today - timedelta(days=back)) <= loaded_on:
                break
            if calendar.trades_on(day):
                missed.add(day)
    return len(missed)


def _markets(calendars: MarketCalendars, broker: str, at: float) -> Iterator[tuple[date, Calendar]]:
    """Yields the day and the calendar of each market of a broker."""
    plugin = installed_brokers().get(broker)
    if plugin is None:
        return
    for market, rule in plugin.record.markets.items():
        if (calendar := calendars.find(broker, market)) is not None:
            yield datetime.fromtimestamp(at, zone_of_market(rule.zone)).date(), calendar
