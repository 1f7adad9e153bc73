"""Times in a query: days of the market, and offsets whose + was not encoded."""

from __future__ import annotations

from datetime import UTC, datetime, timedelta
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from pydantic import TypeAdapter, ValidationError

from api.http.times import EXPECTED, QueryEnd, QueryStart
from infra.market.calendar import HOME_ZONE

START: TypeAdapter[Any] = TypeAdapter(QueryStart)
END: TypeAdapter[Any] = TypeAdapter(QueryEnd)
NINE = datetime(2026, 11, 27, 9, tzinfo=HOME_ZONE)


def test_a_day_begins_and_ends_at_midnight_in_taipei() -> None:
    assert START.validate_python("2026-11-27") == datetime(2026, 11, 26, 16, tzinfo=UTC)
    assert END.validate_python("2026-11-27") == datetime(2026, 11, 27, 16, tzinfo=UTC)
    assert END.validate_python("2026-12-31") == datetime(2026, 12, 31, 16, tzinfo=UTC)


@pytest.mark.parametrize(
    "text",
    [
        "2026-11-27T09:00:00+08:00",
        "2026-11-27T09:00:00 08:00",  # `+` that was not encoded
        "2026-11-27T09:00:00.000 08:00",
        "2026-11-27T09:00 0800",
        "2026-11-27 09:00:00 08:00",
        "2026-11-27 09:00:00+08:00",
        " 2026-11-27T01:00:00Z ",
        "2026-11-26T20:00:00-05:00",
    ],
)
def test_an_instant_is_the_same_at_both_ends(text: str) -> None:
    assert START.validate_python(text) == END.validate_python(text) == NINE


@pytest.mark.parametrize(
    "text",
    [
        "2026-11-27T09:00:00",
        "2026-11-27 09:00",  # no date with an offset: nobody knows which zone this is of
        "2026-02-30",
        "2026-11-27 08:00:00  08:00",
        "2026-11-27T09:00:00 8",
        "yesterday",
        "",
        "27.11.2026",
        "2026-11-27T25:00:00Z",
    ],
)
def test_what_names_no_instant_is_refused_with_what_to_write(text: str) -> None:
    for kind in (START, END):
        with pytest.raises(ValidationError) as refusal:
            kind.validate_python(text)
        (error,) = refusal.value.errors()
        assert error["msg"] == f"Value error, {EXPECTED}"
    assert "%2B" in EXPECTED


@pytest.mark.parametrize(
    "text", ["1999-12-31", "2200-01-02", "9999-12-31", "0001-01-01T00:00:00+23:59"]
)
def test_a_time_far_outside_of_a_markets_life_is_refused(text: str) -> None:
    for kind in (START, END):
        with pytest.raises(ValidationError):
            kind.validate_python(text)


@given(
    st.datetimes(datetime(2001, 1, 1), datetime(2199, 1, 1)), st.integers(-23, 23), st.booleans()
)
def test_every_time_with_its_zone_is_read_as_it_was_written(
    at: datetime, hours: int, spaced: bool
) -> None:
    zoned = (at.replace(tzinfo=UTC)).astimezone(HOME_ZONE) + timedelta(hours=hours)
    written = zoned.isoformat()
    assert START.validate_python(written.replace("+", " ") if spaced else written) == zoned
