"""Windows hold by weekday, zone, holidays and days on which the exchange closes early."""

from __future__ import annotations

from datetime import UTC, date, datetime, time, timedelta

import pytest
from hypothesis import given
from hypothesis import strategies as st

from infra.market.calendar import Calendar, Hours
from infra.market.windows import LOOK_AHEAD_DAYS, Days, Window, ZoneUnknown, current_window, zone_of

HOME_ZONE = zone_of("Asia/Taipei")
WEEK = frozenset(range(7))
WORKDAYS = frozenset(range(5))
#: Friday is a holiday, Thursday a day that ends early, Wednesday one that begins late.
CALENDAR = Calendar(
    holidays=frozenset({date(2026, 11, 20)}),
    last=date(2027, 12, 31),
    changed={
        date(2026, 11, 19): Hours(time(8, 30), time(11, 0)),
        date(2026, 11, 18): Hours(time(10, 0), time(13, 30)),
    },
)
DAY = Window(begins=time(8), ends=time(14), weekdays=WORKDAYS, zone=HOME_ZONE, days=Days.TRADING)


def at(text: str) -> float:
    """Returns a time such as `2026-11-16 08:00` on the clocks of Taipei."""
    return datetime.fromisoformat(text).replace(tzinfo=HOME_ZONE).timestamp()


def test_a_window_holds_from_its_first_second_to_the_one_before_its_end() -> None:
    assert current_window([DAY], CALENDAR, at("2026-11-16 07:59:59")) == (
        None,
        at("2026-11-16 08:00"),
    )
    assert current_window([DAY], CALENDAR, at("2026-11-16 08:00")) == (0, at("2026-11-16 14:00"))
    assert current_window([DAY], CALENDAR, at("2026-11-16 14:00")) == (None, at("2026-11-17 08:00"))


def test_a_window_of_trading_days_follows_the_exchange_on_short_days() -> None:
    assert current_window([DAY], CALENDAR, at("2026-11-18 08:00")) == (None, at("2026-11-18 09:30"))
    assert current_window([DAY], CALENDAR, at("2026-11-19 09:00")) == (0, at("2026-11-19 11:30"))


def test_holidays_and_weekends_are_passed_over() -> None:
    assert current_window([DAY], CALENDAR, at("2026-11-19 12:00")) == (None, at("2026-11-23 08:00"))


def test_a_window_of_closed_days_holds_on_holidays_only() -> None:
    rest = Window(begins=time(0), ends=time(0), weekdays=WEEK, zone=HOME_ZONE, days=Days.CLOSED)
    assert current_window([rest], CALENDAR, at("2026-11-19 12:00")) == (
        None,
        at("2026-11-20 00:00"),
    )
    # Friday, Saturday and Sunday follow each other without a change.
    assert current_window([rest], CALENDAR, at("2026-11-20 12:00")) == (0, at("2026-11-23 00:00"))


def test_an_evening_ends_on_the_next_day_and_a_short_day_has_none() -> None:
    night = Window(
        begins=time(14, 50), ends=time(5), weekdays=WORKDAYS, zone=HOME_ZONE, days=Days.TRADING
    )
    assert current_window([night], CALENDAR, at("2026-11-17 04:59")) == (0, at("2026-11-17 05:00"))
    assert current_window([night], CALENDAR, at("2026-11-18 05:00")) == (
        None,
        at("2026-11-23 14:50"),
    )


def test_the_first_window_counts_and_the_next_change_is_found() -> None:
    bell = Window(begins=time(9), ends=time(10), weekdays=WORKDAYS, zone=HOME_ZONE)
    assert current_window([bell, DAY], CALENDAR, at("2026-11-16 08:30")) == (
        1,
        at("2026-11-16 09:00"),
    )
    assert current_window([bell, DAY], CALENDAR, at("2026-11-16 09:30")) == (
        0,
        at("2026-11-16 10:00"),
    )
    assert current_window([DAY, bell], CALENDAR, at("2026-11-16 09:30")) == (
        0,
        at("2026-11-16 14:00"),
    )


def test_other_zones_change_their_clocks() -> None:
    new_york = Window(
        begins=time(9, 30), ends=time(16), weekdays=WORKDAYS, zone=zone_of("America/New_York")
    )
    for day, opens in ((date(2026, 3, 6), 14.5), (date(2026, 3, 9), 13.5)):
        midnight = datetime.combine(day, time(), UTC).timestamp()
        assert current_window([new_york], CALENDAR, midnight) == (None, midnight + opens * 3600)


def test_without_windows_nothing_ever_changes() -> None:
    assert current_window([], CALENDAR, at("2026-11-16 08:00")) == (None, None)
    never = Window(begins=time(8), ends=time(9), weekdays=frozenset(), zone=HOME_ZONE)
    assert current_window([never], CALENDAR, at("2026-11-16 08:00")) == (None, None)


def test_a_zone_that_does_not_exist_is_refused() -> None:
    for wrong in ("Asia/Tapei", "../../etc/passwd", ""):
        with pytest.raises(ZoneUnknown, match="no time zone"):
            zone_of(wrong)


windows = st.builds(
    Window,
    begins=st.times().map(lambda moment: moment.replace(microsecond=0)),
    ends=st.times().map(lambda moment: moment.replace(microsecond=0)),
    weekdays=st.frozensets(st.integers(0, 6)),
    zone=st.sampled_from([HOME_ZONE, zone_of("Europe/Berlin")]),
    days=st.sampled_from(Days),
)


@given(
    hours=st.lists(windows, max_size=3),
    moment=st.integers(int(at("2026-01-01 00:00")), int(at("2026-12-01 00:00"))),
    between=st.floats(0, 1, exclude_max=True),
)
def test_nothing_changes_before_the_returned_time(
    hours: list[Window], moment: int, between: float
) -> None:
    """And something does at that time, but for a window that begins again when it ends."""
    now, until = current_window(hours, CALENDAR, moment)
    horizon = (LOOK_AHEAD_DAYS - 2) * timedelta(days=1).total_seconds()
    if until is None:
        assert current_window(hours, CALENDAR, moment + between * horizon)[0] == now
        return
    assert until > moment
    assert current_window(hours, CALENDAR, moment + int(between * (until - moment)))[0] == now
    endless = any(window.begins == window.ends for window in hours)
    assert endless or current_window(hours, CALENDAR, until)[0] != now
