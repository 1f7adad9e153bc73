"""How the exchange treats one account: one frozen struct, set by an admin call."""

from __future__ import annotations

from enum import StrEnum

from pydantic import BaseModel, ConfigDict, Field

from infra.exchange.faults import FaultPoint

#: How often a fault strikes when it shall strike until it is taken away.
ALWAYS = -1


class FillMode(StrEnum):
    """When an order that can be filled is filled."""

    #: In the same moment; the answer already has the fills.
    IMMEDIATE = "immediate"
    #: `fill_delay_ms` after it was taken.
    DELAYED = "delayed"
    #: Nobody ever takes the other side: orders rest, IOC and FOK are cancelled.
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
    #: Lots that one order finds on the other side at once; None: without limit.
    liquidity: int | None = Field(default=None, ge=0)
    #: An order is in the ledger before this time starts; only what the client sees is late.
    latency_ms: int = Field(default=0, ge=0, description="Between taking an order and every answer to it.")
    login_latency_ms: int = Field(default=0, ge=0)
    reject_next: int = Field(default=0, ge=0, description="The next n orders are rejected.")
    reject_rate: float = Field(default=0.0, ge=0.0, le=1.0, description="Share of orders rejected.")
    reject_reason: str = "rejected by the paper exchange"
    late_ack_ms: int = Field(default=1000, ge=0, description="How late an answer is at `late_ack`.")
    late_event_ms: int = Field(default=200, ge=0, description="How late an event is at `late_event`.")
    event_gap_ms: int = Field(default=2000, ge=0, description="How long events are lost at `event_gap`.")
    #: Order events have an empty tag, as those of Shioaji's futures have.
    events_without_tag: bool = False
    #: Lists of orders, positions and money show what was there so long ago.
    listing_lag_ms: int = Field(default=0, ge=0)
    #: Lists leave out the orders of other sessions, as Shioaji's simulation does (its issue #218).
    lists_own_session_only: bool = False
    #: A list of orders does not say how complete it is.
    listing_untold: bool = False
    #: Of sessions that begin from now on; None: as the exchange's limits say.
    session_life_ms: int | None = Field(default=None, ge=1)
    #: Fault point → how many more times it strikes; -1: until it is taken away.
    faults: dict[FaultPoint, int] = Field(default_factory=dict)

    def without_one_rejection(self) -> Behaviour:
        return self.model_copy(update={"reject_next": self.reject_next - 1})

    def struck(self, point: FaultPoint) -> Behaviour:
        """What is left after the fault has struck once."""
        left = self.faults.get(point, 0)
        if left <= 0:  # ALWAYS never wears off
            return self
        faults = {**self.faults, point: left - 1}
        return self.model_copy(update={"faults": {p: n for p, n in faults.items() if n}})
