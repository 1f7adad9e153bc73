"""When the exchanges take orders: holidays, evenings, days that an operator has changed."""

from __future__ import annotations

from dataclasses import replace
from datetime import UTC, date, datetime, time, timedelta
from pathlib import Path
from runpy import run_path

import msgspec
import pytest

from infra.market.calendar import (
    HOME_ZONE,
    CalendarUnreadable,
    Market,
    MarketCalendars,
    load_calendar,
)
from worker_runtime.protocol.broker_record import TradingHours
from worker_runtime.protocol.order_terms import OrderLot

STOCK, FUTURES = Market.STOCK, Market.FUTURES
_script = run_path(str(Path(__file__).resolve().parents[3] / ".ci" / "holiday_table.py"))
holiday_table = _script["holiday_table"]


def at(text: str) -> datetime:
    return datetime.fromisoformat(text).replace(tzinfo=HOME_ZONE)


@pytest.mark.parametrize(
    ("lot", "moment", "expected"),
    [
        (OrderLot.INTRADAY_ODD, "2026-11-20 08:59:59", False),
        (OrderLot.INTRADAY_ODD, "2026-11-20 09:00", True),
        (OrderLot.INTRADAY_ODD, "2026-11-20 13:30", True),
        (OrderLot.INTRADAY_ODD, "2026-11-20 13:40", False),
        (OrderLot.ODD, "2026-11-20 10:00", False),
        (OrderLot.ODD, "2026-11-20 13:39:59", False),
        (OrderLot.ODD, "2026-11-20 13:40", True),
        (OrderLot.ODD, "2026-11-20 14:30", True),
        (OrderLot.FIXING, "2026-11-20 13:59:59", False),
        (OrderLot.FIXING, "2026-11-20 14:00", True),
        (OrderLot.FIXING, "2026-11-20 14:30:01", False),
        (OrderLot.FIXING, "2026-11-21 14:00", False),  # Saturday
        # A day that ends at 11:00: what follows the close comes earlier, too.
        (OrderLot.INTRADAY_ODD, "2026-11-23 08:45", False),
        (OrderLot.INTRADAY_ODD, "2026-11-23 11:01", False),
        (OrderLot.ODD, "2026-11-23 11:10", True),
        (OrderLot.FIXING, "2026-11-23 11:30", True),
        (OrderLot.FIXING, "2026-11-23 14:00", False),
    ],
)
def test_odd_lots_and_the_closing_price_have_hours_of_their_own(
    lot: OrderLot, moment: str, expected: bool, tmp_path: Path
) -> None:
    changes = tmp_path / "days.json"
    changes.write_text('{"2026-11-23": "08:30-11:00"}')
    assert load_calendar(changes).is_open(STOCK, at(moment), lot) is expected


@pytest.mark.parametrize(
    ("market", "moment", "expected"),
    [
        (STOCK, "2026-11-20 08:29:59", False),
        (STOCK, "2026-11-20 08:30", True),
        (STOCK, "2026-11-20 13:30", True),
        (STOCK, "2026-11-20 13:30:01", False),
        (STOCK, "2026-11-21 10:00", False),  # Saturday
        (STOCK, "2026-02-17 10:00", False),  # lunar new year
        (FUTURES, "2026-11-20 13:45", True),
        (FUTURES, "2026-11-20 14:00", False),
        (FUTURES, "2026-11-20 23:59", True),
        (FUTURES, "2026-11-21 04:59", True),  # Friday's evening
        (FUTURES, "2026-11-21 05:01", False),
        (FUTURES, "2026-11-22 23:00", False),
        (FUTURES, "2026-11-23 03:00", False),  # Sunday had no evening
    ],
)
def test_orders_are_taken_in_the_hours_of_a_trading_day(
    market: Market, moment: str, expected: bool
) -> None:
    assert load_calendar().is_open(market, at(moment)) is expected
    assert load_calendar().is_open(market, at(moment).astimezone(UTC)) is expected


@pytest.mark.parametrize(
    ("moment", "expected"),
    [
        ("2026-11-20 00:30", False),
        ("2026-11-20 03:30", False),
        ("2026-11-20 07:30", False),
        ("2026-11-20 10:00", True),
        ("2026-11-20 14:30", False),
        ("2026-11-20 16:59:59", False),
        ("2026-11-20 17:00", True),
        ("2026-11-20 23:00", True),
        ("2026-11-20 23:00:01", False),
        ("2026-11-21 00:30", False),
        ("2026-11-21 18:00", False),  # Saturday
    ],
)
def test_an_evening_that_ends_before_midnight_is_closed_after_it(
    moment: str, expected: bool
) -> None:
    home = load_calendar()
    evening = TradingHours(opens=time(17), bell=time(17), closes=time(23))
    rule = msgspec.structs.replace(home.markets[FUTURES], evening=evening)
    days = replace(home, markets={FUTURES: rule})
    assert days.is_open(FUTURES, at(moment)) is expected


def test_an_operators_file_closes_and_shortens_days(tmp_path: Path) -> None:
    path = tmp_path / "days.json"
    path.write_text(
        '{"2026-11-20": "closed", "2026-11-19": "09:00-11:00", "2026-11-21": "09:00-13:00"}'
    )
    days = load_calendar(path)
    assert not days.is_open(STOCK, at("2026-11-20 10:00"))
    assert days.is_open(STOCK, at("2026-11-19 10:59"))
    assert not days.is_open(STOCK, at("2026-11-19 11:01"))
    assert days.is_open(STOCK, at("2026-11-21 10:00"))


@pytest.mark.parametrize(
    ("day", "evening", "expected"),
    [
        ("2026-11-20", False, {STOCK: "09:00", FUTURES: "08:45"}),
        ("2026-11-20", True, {FUTURES: "15:00"}),
        ("2026-11-18", False, {}),  # a typhoon
        ("2026-11-18", True, {}),
        ("2026-11-19", False, {STOCK: "09:00", FUTURES: "08:45"}),  # it only ends early
        ("2026-11-19", True, {FUTURES: "15:00"}),
        ("2026-11-17", False, {STOCK: "10:00", FUTURES: "10:00"}),
        # A Saturday to make up for another day.
        ("2026-11-21", False, {STOCK: "09:00", FUTURES: "09:00"}),
        ("2026-11-21", True, {}),
        ("2026-02-17", False, {}),  # lunar new year
        ("2026-02-17", True, {}),
    ],
)
def test_each_market_has_a_bell_of_its_own(
    tmp_path: Path, day: str, evening: bool, expected: dict[Market, str]
) -> None:
    path = tmp_path / "days.json"
    path.write_text(
        '{"2026-11-17": "10:00-13:00", "2026-11-18": "closed", "2026-11-19": "08:30-11:00", '
        '"2026-11-21": "09:00-13:00"}'
    )
    bells = load_calendar(path).bells(date.fromisoformat(day), evening=evening)
    assert bells == {market: at(f"{day} {clock}") for market, clock in expected.items()}


def test_a_day_with_other_hours_keeps_its_evening_and_a_closed_one_does_not(tmp_path: Path) -> None:
    path = tmp_path / "days.json"
    path.write_text(
        '{"2026-11-18": "closed", "2026-11-20": "09:00-11:00", "2026-11-21": "09:00-13:00"}'
    )
    days = load_calendar(path)
    assert days.is_open(FUTURES, at("2026-11-18 03:00"))  # Tuesday's evening
    assert not days.is_open(FUTURES, at("2026-11-18 20:00"))
    assert not days.is_open(FUTURES, at("2026-11-20 12:00"))
    assert days.is_open(FUTURES, at("2026-11-20 20:00"))
    assert days.is_open(FUTURES, at("2026-11-21 04:00"))
    # A Saturday to make up for another day.
    assert not days.is_open(FUTURES, at("2026-11-21 20:00"))


@pytest.mark.parametrize(
    "text", ["", "[]", '{"2026-13-01": "closed"}', '{"2026-11-20": "shut"}', '{"x": 1}']
)
def test_a_file_that_makes_no_sense_is_named(tmp_path: Path, text: str) -> None:
    path = tmp_path / "days.json"
    path.write_text(text)
    with pytest.raises(CalendarUnreadable, match=r"days\.json"):
        load_calendar(path)


def test_weekdays_beyond_the_table_count_as_trading_days() -> None:
    days = load_calendar()
    beyond = days.last + timedelta(days=(7 - days.last.weekday()) % 7 + 1)
    assert days.trades_on(beyond)


class _Sessions:
    """Simulates the part of `exchange_calendars` that the table is made of."""

    __version__ = "0"

    def __init__(self, sessions: list[datetime]) -> None:
        self.sessions = sessions

    def get_calendar(self, name: str, *, start: str) -> _Sessions:
        assert (name, start) == ("XTAI", _script["FIRST"].isoformat())
        return self


def test_the_table_names_weekdays_that_are_no_sessions() -> None:
    made = holiday_table(_Sessions([datetime(2026, 1, day, tzinfo=UTC) for day in (2, 5, 7)]))
    assert (made["holidays"], made["last"]) == (["2026-01-01", "2026-01-06"], "2026-01-07")


# The library in its present release reads columns as pandas will not give them any more.
@pytest.mark.filterwarnings("ignore:Series.values")
def test_the_table_is_what_the_library_says() -> None:
    import exchange_calendars as library

    made, ours = holiday_table(library), load_calendar()
    until = min(date.fromisoformat(made["last"]), ours.last)
    theirs = {day for day in map(date.fromisoformat, made["holidays"]) if day <= until}
    assert theirs == {day for day in ours.holidays if day <= until}


def test_a_file_changes_the_days_of_one_market_only(tmp_path: Path) -> None:
    path = tmp_path / "days.json"
    path.write_text('{"paper/stock": {"2026-11-20": "closed"}}')
    calendars = MarketCalendars(path)
    closed, other = calendars.find("paper", "stock"), calendars.find("paper", "futures")
    assert closed is not None
    assert other is not None
    assert not closed.is_open(STOCK, at("2026-11-20 10:00"))
    assert other.is_open(FUTURES, at("2026-11-20 10:00"))
    assert calendars.home.is_open(STOCK, at("2026-11-20 10:00"))


def test_a_broker_that_is_not_installed_is_named(tmp_path: Path) -> None:
    path = tmp_path / "days.json"
    path.write_text('{"atlantis": {"2026-11-20": "closed"}}')
    with pytest.raises(CalendarUnreadable, match=r"'atlantis' is neither a day .* paper/stock"):
        MarketCalendars(path)


def test_the_first_market_whose_holidays_end_counts() -> None:
    home = load_calendar()
    soon = replace(home, ends={**home.ends, "harbour/spot": date(2026, 12, 31)})
    assert soon.first_end == date(2026, 12, 31)
    assert home.first_end == home.last
