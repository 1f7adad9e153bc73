"""The messages of the morning; the rules are those of `user_worker/messages.py`."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any


@dataclass(frozen=True, kw_only=True)
class MorningInput:
    """One morning: users of the recent trading days are connected ahead of the bell."""

    #: Like `2026-11-23`; empty: today in Taiwan. Then the work is done by a child named by the day.
    day: str = ""
    #: Seconds before the bell over which the logins are spread.
    window: float = 1200.0
    #: Most logins a second.
    rate: float = 5.0
    #: Users who are connected at the same time.
    abreast: int = 10
    #: Trading days before today that count as recent.
    days: int = 5
    #: Users of one run, before it continues as new: 8 events each.
    page: int = 200
    #: Set by continue-as-new only: `MorningProgress` as a plain dict.
    carried: dict[str, Any] | None = None


@dataclass(frozen=True, kw_only=True)
class PlanMorning:
    """Activity `plan_morning`."""

    #: Empty: today.
    day: str
    days: int


@dataclass(frozen=True, kw_only=True)
class MorningPlan:
    day: str
    #: Why there is nothing to do on this day; empty: there is.
    reason: str = ""
    #: Users with orders since `since` (Unix seconds).
    users: int = 0
    since: float = 0.0
    #: Unix seconds from which orders are taken on this day.
    bell: float = 0.0


@dataclass(frozen=True, kw_only=True)
class RecentUsers:
    """Activity `recent_users`: the next ones in order of their ids."""

    since: float
    after: str
    limit: int


@dataclass(frozen=True, kw_only=True)
class ConnectUser:
    """Activity `connect_user`: for a user who is connected already it costs one query."""

    user_id: str


@dataclass(frozen=True, kw_only=True)
class Connected:
    ok: bool
    #: Why not.
    code: str = ""
    detail: str = ""
    retryable: bool = False


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
