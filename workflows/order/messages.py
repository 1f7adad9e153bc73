"""What goes into and out of an order's workflow and its activities: one frozen dataclass each.

As in `messages.py`: new fields get defaults, durations are seconds, times are Unix seconds.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from enum import StrEnum
from typing import Any


@dataclass(frozen=True, kw_only=True)
class FollowSettings:
    """How an order is followed. The defaults are those of the settings."""

    #: The pause after the first look at the broker; it doubles.
    first_pause: float = 2.0
    longest_pause: float = 60.0
    #: How long nobody may have been able to submit an order before it counts as absent, when the process
    #: that may have submitted it is dead, and when it lives on.
    absent_after: float = 60.0
    absent_after_alive: float = 120.0
    #: How long the broker may be out of reach before a person is told.
    patience: float = 900.0


@dataclass(frozen=True, kw_only=True)
class FollowOrder:
    """Input of `OrderWorkflow`."""

    order_id: str
    user_id: str
    #: When the order's trading day has ended and no broker works on it any more.
    day_end: float
    settings: FollowSettings = field(default_factory=FollowSettings)
    #: Set by continue-as-new only: `workflows.order.state.Following` as a plain dict.
    carried: dict[str, Any] | None = None


class VerificationFinding(StrEnum):
    """What one look at an order found."""

    FINAL = "final"  # nothing is left to do
    LISTED = "listed"  # the broker has it, and it is not final
    MISSING = "missing"  # the broker answered, and does not list it
    UNASKED = "unasked"  # the broker could not be asked
    GONE = "gone"  # there is no such order


@dataclass(frozen=True, kw_only=True)
class VerifyOrder:
    """Activity `verify_order`: PostgreSQL first, then what a worker has answered, then the broker.

    Safe to run twice: it asks, and writes what it learned forward only.
    """

    order_id: str
    user_id: str
    #: Number of the look; with the attempt it makes the id of the question.
    look: int
    timeout: float = 20.0


@dataclass(frozen=True, kw_only=True)
class Verified:
    finding: str
    #: The order's state after the look.
    state: str = ""
    #: Why the broker could not be asked.
    code: str = ""
    detail: str = ""
    #: The listing was answered in full, and what it leaves out is certainly not at the broker.
    complete: bool = False
    certain: bool = False
    #: The worker that may have submitted the order has ended.
    dead: bool = False
    #: Since when nobody could have begun to submit the order.
    quiet_since: float = 0.0
    #: Seconds before the end of the look until which the listing shows everything.
    behind: float = 0.0


@dataclass(frozen=True, kw_only=True)
class SettleAbsent:
    """Activity `settle_absent`: the order never reached the broker. False if it is known there by now."""

    order_id: str
    reason: str


@dataclass(frozen=True, kw_only=True)
class DemandAttention:
    """Activity `demand_attention`: puts the order on the list for a person. False if it is final by now."""

    order_id: str
    reason: str


@dataclass(frozen=True, kw_only=True)
class FollowView:
    """Answer of the query `view`."""

    order_id: str
    state: str
    finding: str
    looks: int
    attention: str
    story: tuple[str, ...]
