"""The messages of an order's workflow; the rules are those of `user_worker/messages.py`."""

from dataclasses import dataclass, field
from enum import StrEnum
from typing import Any


@dataclass(frozen=True, kw_only=True)
class FollowSettings:
    """Says how an order is followed. The last three come from the settings."""

    #: Seconds after the first verification; it doubles.
    first_pause: float = 2.0
    #: Seconds. An unknown order that the broker does not list is verified sooner: as soon as
    #: `absent_after` can be over.
    longest_pause: float = 60.0
    #: Seconds for which it must be impossible to submit an order before it counts as absent, when
    #: the process that may have submitted it is dead, and when it is alive.
    absent_after: float = 60.0
    absent_after_alive: float = 120.0
    #: Seconds that the broker may be out of reach before a person has to look.
    patience: float = 900.0


@dataclass(frozen=True, kw_only=True)
class FollowOrder:
    """Input of `OrderWorkflow`."""

    order_id: str
    user_id: str
    #: When the order's trading day has ended and no broker works on it any more.
    day_end: float
    settings: FollowSettings = field(default_factory=FollowSettings)
    #: Set by continue-as-new only: `workflows.order.state.FollowedOrder` as a plain dict.
    carried: dict[str, Any] | None = None


class VerificationFinding(StrEnum):
    """Says what a verification of an order found."""

    FINAL = "final"  # nothing is left to do
    LISTED = "listed"  # the broker has it, and it is not final
    MISSING = "missing"  # the broker answered, and does not list it
    UNASKED = "unasked"  # the broker could not be asked
    GONE = "gone"  # there is no such order


@dataclass(frozen=True, kw_only=True)
class VerifyOrder:
    """Activity `verify_order`: reads PostgreSQL, the worker's answer and the broker's list.
    Repeatable."""

    order_id: str
    user_id: str
    #: Number of the verification.
    check: int
    timeout: float = 20.0


@dataclass(frozen=True, kw_only=True)
class Verified:
    finding: str
    #: The order's state after the verification.
    state: str = ""
    #: Why the broker could not be asked.
    code: str = ""
    detail: str = ""
    #: The listing was answered in full, and what it leaves out is certainly not at the broker.
    complete: bool = False
    certain: bool = False
    #: The worker that may have submitted the order has ended.
    dead: bool = False
    #: Since when nobody could begin to submit the order.
    quiet_since: float = 0.0
    #: Seconds by which the listing may lag.
    behind: float = 0.0


@dataclass(frozen=True, kw_only=True)
class UnresolvedOrder:
    """Activities `settle_absent` (it never reached the broker; False if it is known there by now)
    and `demand_attention` (it is put on the list for a person; False if it is final by now)."""

    order_id: str
    reason: str


@dataclass(frozen=True, kw_only=True)
class FollowView:
    """Answer of the query `view`."""

    order_id: str
    state: str
    finding: str
    checks: int
    attention: str
    story: tuple[str, ...]
