"""The messages of the morning; the rules are those of `user_worker/messages.py`."""

from dataclasses import dataclass, field
from typing import Any


@dataclass(frozen=True, kw_only=True)
class MorningInput:
    """The input of a morning: users of the recent trading days are connected ahead of their
    market's bell."""

    #: Like `2026-11-23`; empty: today in the home zone. Then the work is done by a child
    #: named by the day.
    day: str = ""
    #: The evening session instead of the day's.
    evening: bool = False
    #: Seconds before a bell over which the logins are spread.
    window: float = 1200.0
    #: Most logins a second; as many more are repeats of failed ones.
    rate: float = 5.0
    #: Users who are connected at the same time.
    abreast: int = 10
    #: Seconds after the first failed login until it is tried again; then twice as many.
    retry: float = 30.0
    #: Trading days before today that count as recent.
    days: int = 5
    #: Users of one run, before it continues as new: 8 events each, and 9 for each repeat.
    page: int = 200
    #: Set by continue-as-new only: `MorningProgress` as a plain dict.
    carried: dict[str, Any] | None = None


@dataclass(frozen=True, kw_only=True)
class PlanMorning:
    #: Empty: today.
    day: str
    days: int
    evening: bool = False
    #: Unix seconds by Temporal's clock: what today is; 0 (before 0.2): our own clock.
    at: float = 0.0


@dataclass(frozen=True, kw_only=True)
class BellGroup:
    """Users who are connected ahead of the same bell."""

    #: Unix seconds.
    bell: float
    users: int
    #: They traded this market, and none whose bell is earlier; empty: whatever they traded.
    market: str = ""


@dataclass(frozen=True, kw_only=True)
class MorningPlan:
    day: str
    #: Why there is nothing to do on this day; empty: there is.
    reason: str = ""
    #: Users with orders since `since` (Unix seconds).
    users: int = 0
    since: float = 0.0
    #: Unix seconds of the last bell.
    bell: float = 0.0
    #: The earliest bell first; empty (before 0.2): one group of all users.
    groups: tuple[BellGroup, ...] = ()


@dataclass(frozen=True, kw_only=True)
class RecentUsers:
    """Activity `recent_users`: the next ones in order of their ids."""

    since: float
    after: str
    limit: int
    #: As in `BellGroup`.
    market: str = ""
    evening: bool = False


@dataclass(frozen=True, kw_only=True)
class ConnectUser:
    """Activity `connect_user`: for a user who is connected already it costs one query."""

    user_id: str
    #: Unix seconds of the last bell, before which the worker does not count as idle.
    stay_until: float = 0.0


@dataclass(frozen=True, kw_only=True)
class Connected:
    ok: bool
    #: Why not.
    code: str = ""
    detail: str = ""
    retryable: bool = False


@dataclass(frozen=True, kw_only=True)
class LaterTry:
    """A user who failed, and may be connected by another try."""

    user_id: str
    #: Tries until now.
    tries: int = 0
    #: Unix seconds of the next one.
    due: float = 0.0


@dataclass(frozen=True, kw_only=True)
class MorningResult:
    day: str
    #: Why nothing was done; empty: it was.
    reason: str = ""
    users: int = 0
    connected: int = 0
    failed: int = 0
    #: Code → users who failed with it.
    codes: dict[str, int] = field(default_factory=dict)
    #: Unix seconds of the end.
    ended_at: float = 0.0
