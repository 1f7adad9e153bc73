"""Times in a query: an instant with its zone, or a day of the market."""

import re
from datetime import UTC, date, datetime, time, timedelta
from functools import partial
from typing import Annotated, Any

from pydantic import (
    AwareDatetime,
    Field,
    ValidationError,
    ValidatorFunctionWrapHandler,
    WithJsonSchema,
    WrapValidator,
)

from infra.market.calendar import HOME_ZONE, HOME_ZONE_NAME

#: Times far outside of a market's life are typing errors, and some would overflow on their way.
_MIN_TIME, _MAX_TIME = datetime(2000, 1, 1, tzinfo=UTC), datetime(2200, 1, 1, tzinfo=UTC)
AwareTime = Annotated[AwareDatetime, Field(ge=_MIN_TIME, le=_MAX_TIME)]

_DAY = re.compile(r"\d{4}-\d{2}-\d{2}", re.ASCII)
#: A time whose offset has a space in front of it: a `+` that was not encoded arrives as a space.
_LOST_PLUS = re.compile(
    r"(\d{4}-\d{2}-\d{2}[Tt ]\d{2}:\d{2}(?::\d{2}(?:\.\d+)?)?) (\d{2}:?\d{2})", re.ASCII
)
#: Why a time is refused.
EXPECTED = (
    f"a day ({HOME_ZONE_NAME}) such as 2026-11-27 is needed, or a time with its zone such as "
    "2026-11-27T09:00:00+08:00 (in a URL, + is written %2B)"
)


def read_time(text: str, *, is_end: bool = False) -> datetime | str:
    """Return a day as the midnight in the home zone with which it begins; any other text with its
    `+` restored.

    `is_end`: the midnight with which the day ends, so that all of the day is before it. Raises
    `ValueError` for a day that no calendar has.
    """
    if _DAY.fullmatch(text):
        day = date.fromisoformat(text)
        if is_end and day < date.max:
            day += timedelta(days=1)
        return datetime.combine(day, time(), HOME_ZONE)
    return _LOST_PLUS.sub(r"\1+\2", text)


def _validate(value: Any, parse: ValidatorFunctionWrapHandler, *, is_end: bool) -> datetime:
    try:
        at: datetime = parse(
            read_time(value.strip(), is_end=is_end) if isinstance(value, str) else value
        )
    except (ValidationError, ValueError):
        raise ValueError(EXPECTED) from None
    return at


_SCHEMA = WithJsonSchema(
    {"anyOf": [{"type": "string", "format": "date-time"}, {"type": "string", "format": "date"}]}
)
_BOUNDS = Field(ge=_MIN_TIME, le=_MAX_TIME)
#: The beginning of a span in a query, and its end, which is not in it.
QueryStart = Annotated[
    AwareDatetime, WrapValidator(partial(_validate, is_end=False)), _BOUNDS, _SCHEMA
]
QueryEnd = Annotated[
    AwareDatetime, WrapValidator(partial(_validate, is_end=True)), _BOUNDS, _SCHEMA
]
