"""The policy of a pool's size, which an operator sets, and its checks.

All counts are of free workers, those that wait for a claim; only `limit` counts those in use, too.
`state.py` says how many workers the numbers make together.
"""

import re
from collections.abc import Iterator
from dataclasses import dataclass

from worker_runtime.protocol.errors import BerthError

#: More workers than this in one pool must be a typing error.
MAX_POOL_SIZE = 100_000
#: Longest demand window in minutes, and longest wait before a surplus is stopped, in seconds.
MINUTES_PER_DAY, SECONDS_PER_DAY = 1440, 86_400
MAX_WINDOWS = 50
CALENDARS = ("any", "trading", "closed")
DAYS = ("mon", "tue", "wed", "thu", "fri", "sat", "sun")

_BUFFER = re.compile(r"(\d{1,6})(%?)")
_CLOCK = re.compile(r"([01]\d|2[0-3]):[0-5]\d")


class PoolPolicyInvalid(BerthError, code="POOL_POLICY_INVALID", status=422):
    """The pool cannot be sized like this."""


@dataclass(frozen=True, kw_only=True)
class PoolWindow:
    """Hours with a target of their own."""

    name: str
    target: int
    #: `HH:MM` on the clock of `zone`. A window that does not end after it begins ends on the next
    #: day.
    begins: str
    ends: str
    #: `mon-fri`, `mon,wed,sat`; of the day on which the window begins.
    days: str = "mon-sun"
    #: A name of the time zone database; empty: the home markets' zone.
    zone: str = ""
    #: `any` day, only days on which the exchange is `trading`, or only those on which it is
    #: `closed`.
    calendar: str = "any"


@dataclass(frozen=True, kw_only=True)
class PoolPolicy:
    """With the defaults, the pool keeps the target."""

    target: int = 4
    minimum: int = 0
    maximum: int | None = None
    #: Added to all else: `3`, or `20%` of the workers in use.
    buffer: str = "0"
    #: Keep at least as many as were claimed within this many minutes; 0: demand does not count.
    demand_minutes: float = 0.0
    #: Workers of the pool in all, free and in use.
    limit: int | None = None
    #: Seconds that a surplus must last before a worker is stopped.
    shrink_after: float = 0.0
    #: The first that applies counts.
    windows: tuple[PoolWindow, ...] = ()

    def buffer_of(self, in_use: int) -> int:
        """Returns the buffer as a number of workers, rounded up."""
        number, percent = _buffer(self.buffer)
        return -(-number * in_use // 100) if percent else number


def _buffer(text: str) -> tuple[int, bool]:
    match = _BUFFER.fullmatch(text)
    if match is None:
        raise PoolPolicyInvalid(
            f"buffer {text!r} is neither a number like 3 nor a percentage like 20%"
        )
    return int(match[1]), bool(match[2])


def days_of(text: str) -> frozenset[int]:
    """Returns the weekdays as numbers, Monday is 0. Raises `PoolPolicyInvalid`."""
    days: set[int] = set()
    for part in text.split(","):
        first, dash, last = part.strip().partition("-")
        if first not in DAYS or (dash and last not in DAYS):
            raise PoolPolicyInvalid(f"days {text!r} are not like mon-fri or mon,wed,sat")
        begin, end = DAYS.index(first), DAYS.index(last if dash else first)
        days.update((begin + step) % 7 for step in range((end - begin) % 7 + 1))
    return frozenset(days)


def check_policy(policy: PoolPolicy) -> None:
    """Raises `PoolPolicyInvalid` with all that is wrong. Does not check whether a zone exists."""
    problems = list(_problems(policy))
    if problems:
        raise PoolPolicyInvalid("; ".join(problems))


def _problems(policy: PoolPolicy) -> Iterator[str]:
    maximum = MAX_POOL_SIZE if policy.maximum is None else policy.maximum
    for name, number in (
        ("minimum", policy.minimum),
        ("maximum", maximum),
        ("limit", policy.limit or 0),
    ):
        if not 0 <= number <= MAX_POOL_SIZE:
            yield f"{name} {number} is not between 0 and {MAX_POOL_SIZE}"
    if policy.minimum > maximum:
        yield f"minimum {policy.minimum} is above maximum {maximum}"
    elif policy.limit is not None and policy.limit < policy.minimum:
        yield f"limit {policy.limit} is below minimum {policy.minimum}"
    yield from _out_of_bounds("target", policy.target, policy.minimum, maximum)
    try:
        _buffer(policy.buffer)
    except PoolPolicyInvalid as error:
        yield error.detail
    if not 0 <= policy.demand_minutes <= MINUTES_PER_DAY:
        yield f"demand_minutes {policy.demand_minutes:g} is not between 0 and {MINUTES_PER_DAY}"
    if not 0 <= policy.shrink_after <= SECONDS_PER_DAY:
        yield f"shrink_after {policy.shrink_after:g} is not between 0 and {SECONDS_PER_DAY} seconds"
    if len(policy.windows) > MAX_WINDOWS:
        yield f"{len(policy.windows)} windows are more than {MAX_WINDOWS}"
    names = [window.name for window in policy.windows]
    if len(set(names)) < len(names):
        yield "two windows have the same name"
    for window in policy.windows:
        for problem in _window_problems(window, policy.minimum, maximum):
            yield f"window {window.name!r}: {problem}"


def _window_problems(window: PoolWindow, minimum: int, maximum: int) -> Iterator[str]:
    if not window.name or len(window.name) > 64 or not window.name.isprintable():
        yield "its name is not 1 to 64 printable signs"
    yield from _out_of_bounds("target", window.target, minimum, maximum)
    for name, clock in (("begins", window.begins), ("ends", window.ends)):
        if _CLOCK.fullmatch(clock) is None:
            yield f"{name} {clock!r} is not a time like 08:30"
    try:
        days_of(window.days)
    except PoolPolicyInvalid as error:
        yield error.detail
    if window.calendar not in CALENDARS:
        yield f"calendar {window.calendar!r} is none of {', '.join(CALENDARS)}"


def _out_of_bounds(name: str, number: int, minimum: int, maximum: int) -> Iterator[str]:
    if number < minimum:
        yield f"{name} {number} is below minimum {minimum}"
    elif number > maximum:
        yield f"{name} {number} is above maximum {maximum}"
