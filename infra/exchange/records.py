"""What the exchange keeps, as its admin API shows it. Times are Unix milliseconds, quantities are lots."""

from __future__ import annotations

from decimal import Decimal
from enum import StrEnum

from pydantic import BaseModel, ConfigDict, Field

from worker_runtime.protocol.exchange import ExchangeOrder
from worker_runtime.protocol.messages import (
    FINAL_ORDER_STATES,
    Fill,
    OrderState,
    PriceType,
    Side,
    TimeInForce,
)


class Record(BaseModel):
    model_config = ConfigDict(frozen=True)


class AccountRegistration(Record):
    """An account and the keys that open it. Registering it again replaces its keys."""

    account: str = Field(min_length=1, max_length=64)
    api_key: str = Field(min_length=1, max_length=512, repr=False)
    secret_key: str = Field(min_length=1, max_length=512, repr=False)
    #: Connections are counted per person; empty: the account is a person of its own.
    person_id: str = Field(default="", max_length=64)


class LedgerFill(Record):
    fill_id: str
    quantity: int
    price: Decimal
    at_ms: int

    def as_sent(self) -> Fill:
        return Fill(fill_id=self.fill_id, quantity=self.quantity, price=self.price, at_ms=self.at_ms)


class LedgerOrder(Record):
    """One order that the exchange took, exactly once for each `place` that reached it."""

    broker_order_id: str
    account: str
    #: Who sent it: the session, and the name its client gave at login.
    session_id: str
    client: str
    tag: str
    client_note: str
    symbol: str
    side: Side
    quantity: int
    price_type: PriceType
    price: Decimal | None
    time_in_force: TimeInForce
    state: OrderState
    reason: str | None
    received_ms: int
    updated_ms: int
    fills: tuple[LedgerFill, ...] = ()

    @property
    def filled(self) -> int:
        return sum(fill.quantity for fill in self.fills)

    @property
    def remaining(self) -> int:
        return self.quantity - self.filled

    @property
    def final(self) -> bool:
        return self.state in FINAL_ORDER_STATES

    def as_sent(self) -> ExchangeOrder:
        """The order as the session protocol shows it to its owner."""
        return ExchangeOrder(
            broker_order_id=self.broker_order_id,
            tag=self.tag,
            symbol=self.symbol,
            side=self.side,
            quantity=self.quantity,
            price_type=self.price_type,
            price=self.price,
            time_in_force=self.time_in_force,
            state=self.state,
            fills=[fill.as_sent() for fill in self.fills],
            reason=self.reason,
        )


class LedgerSession(Record):
    session_id: str
    account: str
    person_id: str
    client: str
    opened_ms: int
    closed_ms: int | None
    close_reason: str | None
    #: Where the connection came from.
    address: str = ""


class OwnerKind(StrEnum):
    """Whose calls are counted together."""

    PERSON = "person"
    ADDRESS = "address"


class IncidentKind(StrEnum):
    #: A call was not executed: a limit, a ban, a suspension.
    REFUSED = "refused"
    #: A limit was exceeded; until `until_ms` nothing is executed.
    BANNED = "banned"
    #: Nothing is executed until someone lifts it.
    SUSPENDED = "suspended"
    LIFTED = "lifted"


class Incident(Record):
    """Something that a good client never causes; `cause` is what was counted, such as `orders`."""

    at_ms: int
    kind: IncidentKind
    owner_kind: OwnerKind
    owner: str
    #: Whose call it was.
    account: str
    cause: str
    detail: str
    until_ms: int | None = None


class Health(Record):
    """`connections` counts logged-in sessions."""

    status: str
    connections: int
    orders: int
