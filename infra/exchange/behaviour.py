"""Defines how the exchange treats an account: its behaviour, its ordered faults and its plan of
random faults.

A fault is one `FaultPoint` and one `fault_hits(…)` at the place in `exchange.py`, `sessions.py` or
`connection.py` where it happens. Faults combine: with `lost_ack` and `lost_event` a client hears
nothing of an order that was taken.

Random faults are repeatable: whether one hits depends on the plan's seed, the account, the fault
point and how often the account reached that point since the plan was set, not on time or other
accounts. A restart of the exchange begins another repeatable part of the same plan.
"""

from __future__ import annotations

from enum import StrEnum
from hashlib import blake2b
from typing import Annotated

from pydantic import BaseModel, ConfigDict, Field

from infra.exchange.ledger import ExchangeLedger


class FaultPoint(StrEnum):
    """The points at which the exchange can misbehave."""

    #: The connection breaks when an order arrives; the order is not taken.
    LOST_REQUEST = "lost_request"
    #: The order is taken; its answer is never sent.
    LOST_ACK = "lost_ack"
    #: The order is taken; its answer comes `late_ack_ms` later, after its fills.
    LATE_ACK = "late_ack"
    #: The order is taken; then the connection breaks, before the answer.
    DROP_BEFORE_ACK = "drop_before_ack"
    #: A cancel or replacement does not arrive: nothing happens, and it is never answered.
    LOST_CHANGE = "lost_change"
    #: A cancel or replacement is done; its answer is never sent.
    LOST_CHANGE_ACK = "lost_change_ack"
    #: A cancel or replacement is done; then the connection breaks, before the answer.
    DROP_IN_CHANGE = "drop_in_change"
    #: A query for orders, positions or the balance is never answered.
    LOST_QUERY = "lost_query"
    #: The connection breaks at a query for orders, positions or the balance.
    DROP_IN_QUERY = "drop_in_query"
    #: Each fill is reported twice: another event, the same fill id.
    DUPLICATE_FILL = "duplicate_fill"
    #: Events about an order are never sent.
    LOST_EVENT = "lost_event"
    #: An event comes `late_event_ms` later: others overtake it.
    LATE_EVENT = "late_event"
    #: All events of the account are lost for `event_gap_ms`; then they continue.
    EVENT_GAP = "event_gap"
    #: Pings are not answered: the session looks alive and is not.
    LOST_PONG = "lost_pong"
    #: A login is neither answered nor refused.
    LOST_LOGIN = "lost_login"


#: The count of a fault that hits until it is removed.
ALWAYS = -1


class FillMode(StrEnum):
    """When an order that can be filled is filled."""

    #: At once; the answer already has the fills.
    IMMEDIATE = "immediate"
    #: `fill_delay_ms` after it was taken.
    DELAYED = "delayed"
    #: Never: orders rest, IOC and FOK orders are cancelled.
    NEVER = "never"
    #: `lots_per_fill` lots every `fill_delay_ms`, until all are filled; market orders, too.
    GRADUAL = "gradual"
    #: Only by the admin call `POST /orders/{id}/fill`, whatever the time in force.
    MANUAL = "manual"


class Behaviour(BaseModel):
    """Everything that can be set per account. Times are milliseconds."""

    model_config = ConfigDict(frozen=True, extra="forbid")

    fill: FillMode = FillMode.IMMEDIATE
    fill_delay_ms: int = Field(default=100, ge=0, description="For `delayed` and `gradual`.")
    lots_per_fill: int = Field(default=1, ge=1, description="For `gradual`.")
    #: Lots that one order can fill at once; None: without limit.
    liquidity: int | None = Field(default=None, ge=0)
    #: An order is in the ledger before this time begins; only its answer is late.
    latency_ms: int = Field(
        default=0, ge=0, description="Between taking an order and every answer to it."
    )
    login_latency_ms: int = Field(default=0, ge=0)
    #: A cancel or replacement is answered with the order as it is,
    #: and done this long later, as at Shioaji.
    change_delay_ms: int = Field(default=0, ge=0)
    reject_next: int = Field(default=0, ge=0, description="The next n orders are rejected.")
    reject_rate: float = Field(default=0.0, ge=0.0, le=1.0, description="Share of orders rejected.")
    reject_reason: str = "rejected by the paper exchange"
    late_ack_ms: int = Field(default=1000, ge=0, description="How late an answer is at `late_ack`.")
    late_event_ms: int = Field(
        default=200, ge=0, description="How late an event is at `late_event`."
    )
    event_gap_ms: int = Field(
        default=2000, ge=0, description="How long events are lost at `event_gap`."
    )
    #: Order events have an empty tag, as those of Shioaji's futures have.
    events_without_tag: bool = False
    #: Lists of orders, positions and the balance show the state of this long ago.
    listing_lag_ms: int = Field(default=0, ge=0)
    #: Lists leave out the orders of other sessions, as Shioaji's simulation does (its issue #218).
    lists_own_session_only: bool = False
    #: A list of orders does not say how complete it is.
    listing_untold: bool = False
    #: Lots of one symbol that may be bought on margin, and sold short; None: any number.
    margin_quota: int | None = Field(default=None, ge=0)
    short_quota: int | None = Field(default=None, ge=0)
    #: True if cash sales of more than is held are refused, as they are without an agreement on day
    #: trading.
    sells_held_only: bool = False
    #: True if orders are refused outside of the hours of their market and lot.
    keeps_hours: bool = False
    #: True if orders in symbols that are not listed today, off the tick or beyond the day's limits
    #: are refused, as TWSE and TAIFEX do.
    keeps_price_rules: bool = False
    #: Life of new sessions; None: as the exchange's limits say.
    session_life_ms: int | None = Field(default=None, ge=1)
    #: The number of times that each fault still hits; -1: until it is removed.
    faults: dict[FaultPoint, int] = Field(default_factory=dict)

    def without_one_rejection(self) -> Behaviour:
        return self.model_copy(update={"reject_next": self.reject_next - 1})

    def after_fault(self, point: FaultPoint) -> Behaviour:
        """Returns the behaviour after the fault has hit once."""
        remaining = self.faults.get(point, 0)
        if remaining <= 0:  # ALWAYS is never used up
            return self
        faults = {**self.faults, point: remaining - 1}
        return self.model_copy(update={"faults": {p: n for p, n in faults.items() if n}})


#: The scope of the plan for all accounts that have none of their own.
ALL_ACCOUNTS = ""
_FAULT_PLAN_SETTING = "fault plan "
_DRAW_SPACE = 2**64


class FaultPlan(BaseModel):
    """Random faults: `rates` is the share of calls at which each fault point hits, 0 to 1."""

    model_config = ConfigDict(frozen=True, extra="forbid")

    seed: int = 1
    rates: dict[FaultPoint, Annotated[float, Field(ge=0.0, le=1.0)]] = Field(default_factory=dict)


class _StoredFaultPlan(BaseModel):
    plan: FaultPlan
    #: The number of the exchange's start in which it was set.
    start: int


def seeded_draw(*seed: object) -> float:
    """Returns a pseudo-random number from 0 up to 1, always the same for the same arguments."""
    text = "\x1f".join(map(str, seed)).encode()
    return int.from_bytes(blake2b(text, digest_size=8).digest()) / _DRAW_SPACE


class FaultSchedule:
    """The plans of random faults; they survive a restart."""

    def __init__(self, ledger: ExchangeLedger) -> None:
        self._ledger = ledger
        kept = ledger.settings_like(_FAULT_PLAN_SETTING)
        self._plans = {
            name: _StoredFaultPlan.model_validate_json(value) for name, value in kept.items()
        }
        self._visits: dict[tuple[str, FaultPoint], int] = {}
        #: True if any plan has rates.
        self.active = any(kept.plan.rates for kept in self._plans.values())

    def set(self, scope: str, plan: FaultPlan) -> None:
        """Sets the plan of one account, or of `ALL_ACCOUNTS`; its counts start at 0."""
        kept = _StoredFaultPlan(plan=plan, start=self._ledger.start)
        self._ledger.save_setting(_FAULT_PLAN_SETTING + scope, kept.model_dump_json())
        self._plans[scope] = kept
        self.active = any(kept.plan.rates for kept in self._plans.values())
        for key in [key for key in self._visits if scope in (ALL_ACCOUNTS, key[0])]:
            del self._visits[key]

    def get(self, scope: str) -> FaultPlan:
        kept = self._plans.get(scope)
        return kept.plan if kept else FaultPlan()

    def fault_hits(self, account: str, point: FaultPoint) -> bool:
        """Returns True if the plan's fault hits at this visit of the account to this point."""
        kept = self._plans.get(account) or self._plans.get(ALL_ACCOUNTS)
        if kept is None or not (rate := kept.plan.rates.get(point, 0.0)):
            return False
        visit = self._visits.get((account, point), 0)
        self._visits[account, point] = visit + 1
        starts = self._ledger.start - kept.start
        return seeded_draw(kept.plan.seed, starts, account, point.value, visit) < rate
