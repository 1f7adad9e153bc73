"""The data that goes to the API and comes from it. Quantities are lots (of odd lots: shares);
prices are in the instrument's currency.

Each class mirrors a schema of the API's OpenAPI document; a test compares them. Fields that this
release does not know are passed over, so that an older client reads the answers of a newer API.
Times are aware, in UTC.
"""

from __future__ import annotations

import uuid
from datetime import date, datetime
from decimal import Decimal
from typing import Annotated, Literal

from msgspec import Meta, Struct, field

AwareTime = Annotated[datetime, Meta(tz=True)]
Side = Literal["buy", "sell"]
PriceType = Literal["LMT", "MKT", "MKP"]
TimeInForce = Literal["ROD", "IOC", "FOK"]
OrderLot = Literal["common", "odd", "intraday_odd", "fixing"]
OrderCondition = Literal["cash", "margin", "short_selling"]
OpenClose = Literal["auto", "new", "cover", "day_trade"]
PriceRounding = Literal["refuse", "passive"]
InstrumentKind = Literal["stock", "fund", "warrant", "future", "option", "other"]
KeyRole = Literal["user", "operator", "admin"]
OrderState = Literal[
    "accepted",
    "queued",
    "submitting",
    "submitted",
    "part_filled",
    "filled",
    "cancelled",
    "rejected",
    "expired",
    "unknown",
    "needs_attention",
]


def make_id() -> str:
    """Returns an id that nobody else makes."""
    return uuid.uuid4().hex


class OrderTicket(Struct, frozen=True, kw_only=True, omit_defaults=True):
    """A new order. Keep the ticket until its outcome is known: the same id again is the same order.

    Usual values are not sent, so that an older API, which refuses fields that it does not know,
    takes it.
    """

    account_id: str
    symbol: str
    side: Side
    quantity: int
    price_type: PriceType = "LMT"
    #: Given exactly with `LMT`.
    price: Decimal | None = None
    time_in_force: TimeInForce = "ROD"
    #: The lot of a stock order; `odd` and `intraday_odd` count shares.
    lot: OrderLot = "common"
    condition: OrderCondition = "cash"
    #: Says whether a futures order opens a position or closes one.
    open_close: OpenClose = "auto"
    #: Says what becomes of a price between two steps: `passive` takes the next one that is no
    #: worse.
    price_rounding: PriceRounding = "refuse"
    #: Place the order even if an identical one was placed within the duplicate window.
    allow_duplicate: bool = False
    #: Unique for the user. Letters, digits and `._:-`, at most 64.
    client_order_id: str = field(default_factory=make_id)


class CancelTicket(Struct, frozen=True, kw_only=True):
    """Takes an order back."""

    request_id: str = field(default_factory=make_id)


class ReplaceTicket(Struct, frozen=True, kw_only=True):
    """Changes a working order: a smaller quantity, another price, or both."""

    #: New total, in lots (shares of an odd lot).
    quantity: int | None = None
    price: Decimal | None = None
    request_id: str = field(default_factory=make_id)


class OrderSnapshot(Struct, frozen=True, kw_only=True):
    """An order as it stood when the API answered."""

    id: str
    client_order_id: str
    user_id: str
    account_id: str
    symbol: str
    side: Side
    quantity: int
    price_type: PriceType
    price: Decimal | None
    time_in_force: TimeInForce
    lot: OrderLot = "common"
    condition: OrderCondition = "cash"
    open_close: OpenClose = "auto"
    state: OrderState
    #: The state will not change any more.
    final: bool
    broker_order_id: str | None
    filled_quantity: int
    average_price: Decimal | None
    #: Why it was not executed: a stable code.
    code: str | None
    reason: str | None
    #: It can only make a position smaller.
    reduce_only: bool = False
    #: The request that created this order, if it was not a plain order.
    origin: str | None = None
    #: Why it needs attention.
    attention: str | None = None
    accepted_at: AwareTime


class OrderHistoryStep(Struct, frozen=True, kw_only=True):
    """A step in the life of an order."""

    step: str
    at: AwareTime
    #: Milliseconds since the order was accepted.
    elapsed_ms: float
    detail: str | None = None


class OrderHistory(OrderSnapshot, frozen=True, kw_only=True):
    """An order with the steps of its life so far, in order of time."""

    timeline: list[OrderHistoryStep]


class OrderListPage(Struct, frozen=True, kw_only=True):
    """Orders, the newest first."""

    orders: list[OrderSnapshot]
    #: `cursor` of the next page; None on the last page.
    next_cursor: str | None


class OpenOrders(Struct, frozen=True, kw_only=True):
    """The open orders with which an event stream begins, the newest first."""

    user_id: str
    orders: list[OrderSnapshot]
    #: False: there are more than these.
    complete: bool


class CreatedUser(Struct, frozen=True, kw_only=True):
    """A new user with an API key of its own, which is shown this once."""

    user_id: str
    created_at: AwareTime
    api_key: str
    #: When the key ends. Rotate it before.
    expires_at: AwareTime | None = None

    def __repr__(self) -> str:
        return f"CreatedUser(user_id={self.user_id!r})"


class KeySnapshot(Struct, frozen=True, kw_only=True):
    """An API key without its token."""

    id: uuid.UUID
    prefix: str
    label: str | None
    role: KeyRole
    user_id: str | None
    #: The scopes of the key; None: it may do all that its role may do.
    scopes: tuple[str, ...] | None
    #: Addresses or networks that may use it; empty: all.
    sources: tuple[str, ...]
    created_at: AwareTime
    made_by: uuid.UUID | None
    last_used_at: AwareTime | None
    expires_at: AwareTime | None
    revoked_at: AwareTime | None
    #: It was made before there were scopes.
    unrestricted: bool


class KeyPage(Struct, frozen=True, kw_only=True):
    """A page of API keys, the latest first."""

    api_keys: tuple[KeySnapshot, ...]
    #: `cursor` of the next page; None: there is none.
    next_cursor: uuid.UUID | None = None


class CreatedKey(Struct, frozen=True, kw_only=True):
    """A new API key. Its token is shown this once."""

    id: uuid.UUID
    role: KeyRole
    api_key: str
    scopes: tuple[str, ...] | None
    sources: tuple[str, ...]
    expires_at: AwareTime | None

    def __repr__(self) -> str:
        return f"CreatedKey(id={self.id!r})"


class BrokerCredentials(Struct, frozen=True, kw_only=True, omit_defaults=True):
    """The data that the broker's login needs. The API stores it encrypted and never shows it
    again."""

    #: The name of an installed broker.
    broker: str
    #: The broker's record says which of these its login needs (`berth broker list`).
    api_key: str = ""
    secret_key: str = ""
    #: The market that the account trades; '': the broker's first one.
    broker_type: str = ""
    simulation: bool = True
    person_id: str = ""
    #: The broker's own id of the account, if it is not `account_id`.
    broker_account: str | None = None
    #: PKCS#12.
    ca_certificate: bytes = b""
    ca_password: str = ""

    def __repr__(self) -> str:
        return f"BrokerCredentials(broker={self.broker!r}, simulation={self.simulation})"


class CredentialsReceipt(Struct, frozen=True, kw_only=True):
    """Describes stored credentials: all but the credentials themselves."""

    user_id: str
    account_id: str
    broker: str
    broker_type: str
    simulation: bool
    #: Grows with every change.
    version: int
    #: The broker's answer to them now; a real one is not asked before a worker logs in.
    login: Literal["verified", "rejected", "not_tried"]
    #: Why they were rejected or not tried.
    login_detail: str
    #: The user's running worker was told to load them now.
    reload_signalled: bool
    #: When the certificate expires; None: there is none, or it is not known.
    certificate_expires_at: AwareTime | None = None


class InstrumentPriceStep(Struct, frozen=True, kw_only=True):
    """The smallest step of prices below `below`; the last step of a table has no end."""

    below: Decimal | None
    tick: Decimal


class ListedInstrument(Struct, frozen=True, kw_only=True):
    """An instrument, as its broker listed it last. Prices are in the currency of its market."""

    broker: str
    #: The name by which orders call it.
    code: str
    name: str
    #: As `broker_type` of the accounts that trade it.
    market: str
    kind: InstrumentKind
    #: Units (shares, contracts) in a common lot.
    lot_units: int
    #: Value of one common lot at a price of 1.
    lot_value: Decimal
    #: By rising price; empty: the broker's record decides.
    ticks: list[InstrumentPriceStep]
    reference: Decimal | None
    limit_up: Decimal | None
    limit_down: Decimal | None
    #: The last day on which it trades.
    expires_on: date | None
    #: It may be bought and sold on one day; None: the broker does not say.
    day_trade: bool | None
    underlying: str
    #: The trading day of this list: reference price and limits are of this day.
    loaded_on: date
    #: False: the broker no longer lists it.
    listed: bool


class InstrumentListPage(Struct, frozen=True, kw_only=True):
    """Instruments, by broker and code."""

    instruments: list[ListedInstrument]
    #: `after` of the next page; None on the last page.
    next_cursor: str | None


class HeldPosition(Struct, frozen=True, kw_only=True):
    """An open position; `quantity` is positive also when it is short."""

    symbol: str
    direction: Literal["long", "short"]
    quantity: int
    #: Shares beyond the lots.
    odd_shares: int = 0
    condition: OrderCondition = "cash"
    average_price: Decimal


class AccountPositions(Struct, frozen=True, kw_only=True):
    """The open positions of an account, by symbol."""

    user_id: str
    account_id: str
    #: When the worker asked the broker, by its clock.
    taken_at: AwareTime
    positions: list[HeldPosition]


class AccountBalance(Struct, frozen=True, kw_only=True):
    """The money of an account."""

    user_id: str
    account_id: str
    #: When the worker asked the broker, by its clock.
    taken_at: AwareTime
    currency: str
    cash: Decimal
    #: The money that is left for new orders.
    available: Decimal


class MarkSnapshot(Struct, frozen=True, kw_only=True):
    """The key that a live worker refreshes."""

    worker_id: str
    epoch: int


class LifecycleSnapshot(Struct, frozen=True, kw_only=True):
    """The answer of the user's workflow."""

    state: str
    since: AwareTime
    worker_id: str | None
    task_id: str | None
    epoch: int | None
    attempts: int
    reason: str
    next_step: str
    deadline: AwareTime | None
    #: The last known state of the broker connections: `well`, or `degraded: …`.
    health: str
    health_at: AwareTime | None
    #: Within the window that backoff and parking count.
    crashes: int
    #: Last known order or control message.
    last_activity: AwareTime | None


class WorkerSnapshot(Struct, frozen=True, kw_only=True):
    """A user's worker from both sides: its own mark, and its workflow."""

    user_id: str
    #: The worker's mark is there.
    live: bool
    #: The worker's own word if it is live, else its workflow's.
    state: str | None
    mark: MarkSnapshot | None
    metadata: dict[str, str]
    lifecycle: LifecycleSnapshot | None


class StartedWorker(Struct, frozen=True, kw_only=True):
    """The worker is Active: connected with one account at least."""

    user_id: str
    state: str
    worker_id: str
    epoch: int
    pool: str
    version: str
    #: Taken from the pool, not launched for this user.
    warm: bool
    claimed_at: AwareTime | None
    connected_at: AwareTime | None


class StateTransition(Struct, frozen=True, kw_only=True):
    """Describes a change of a worker's state."""

    #: Grows with each change of this user's worker.
    id: int
    at: AwareTime
    before: str
    after: str
    reason: str
    worker_id: str | None
    epoch: int | None
    #: Until when the new state may last.
    deadline: AwareTime | None


class PresentWorkerState(Struct, frozen=True, kw_only=True):
    """The state in which an event stream begins; None for a user who never had a worker."""

    user_id: str
    state: str | None
    since: AwareTime | None
    reason: str | None
    worker_id: str | None
    epoch: int | None
    deadline: AwareTime | None
