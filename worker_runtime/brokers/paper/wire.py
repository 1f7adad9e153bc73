"""The paper exchange's session protocol: JSON lines over TCP, one connection a broker session.

The client sends a request with a growing `id`; the exchange answers with the same `id`, and sends
events (fills, cancels, forced logouts) without one at any time. Prices are decimal strings,
quantities are lots (of odd-lot orders: shares).
"""

from decimal import Decimal
from typing import Annotated, Self

import msgspec

from worker_runtime.protocol import bounds
from worker_runtime.protocol.instruments import MAX_INSTRUMENTS_PER_PAGE, CodeOrNone, InstrumentPage
from worker_runtime.protocol.messages import Fill, OrderState, PriceType, Side, TimeInForce
from worker_runtime.protocol.order_terms import (
    ODD_LOTS,
    SHARES_PER_LOT,
    OpenClose,
    OrderCondition,
    OrderLot,
)


class Login(msgspec.Struct, frozen=True, kw_only=True, tag_field="op", tag="login"):
    """The first request of a session. `client` (worker id and epoch) is for the exchange's
    ledger."""

    id: int
    account: str
    api_key: str
    secret_key: str
    person_id: str = ""
    client: str = ""
    #: Only checks the keys: opens no session, and counts against no limit.
    check_only: bool = False


class Place(msgspec.Struct, frozen=True, kw_only=True, tag_field="op", tag="place"):
    id: int
    symbol: str
    side: Side
    quantity: int
    price_type: PriceType
    price: Decimal | None
    time_in_force: TimeInForce
    lot: OrderLot = OrderLot.COMMON
    condition: OrderCondition = OrderCondition.CASH
    open_close: OpenClose = OpenClose.AUTO
    #: The client's tag of the order, at most 6 characters; the ledger keeps it.
    tag: str
    #: A note for the ledger only, so that tests can compare it with the database. A real broker has
    #: no such field.
    client_note: str = ""


class Cancel(msgspec.Struct, frozen=True, kw_only=True, tag_field="op", tag="cancel"):
    id: int
    broker_order_id: str


class Replace(msgspec.Struct, frozen=True, kw_only=True, tag_field="op", tag="replace"):
    """Changes a resting order: to a smaller total quantity, which is at least the filled one, or to
    another price."""

    id: int
    broker_order_id: str
    quantity: int | None = None
    price: Decimal | None = None


class ListOrders(msgspec.Struct, frozen=True, kw_only=True, tag_field="op", tag="list_orders"):
    id: int


class ListPositions(
    msgspec.Struct, frozen=True, kw_only=True, tag_field="op", tag="list_positions"
):
    id: int


class GetBalance(msgspec.Struct, frozen=True, kw_only=True, tag_field="op", tag="get_balance"):
    id: int


class ListExchangeInstruments(
    msgspec.Struct, frozen=True, kw_only=True, tag_field="op", tag="list_instruments"
):
    """Asks for a page of today's instruments. The first one (`after` is '') counts as a query."""

    id: int
    after: CodeOrNone = ""
    limit: Annotated[int, msgspec.Meta(ge=1, le=MAX_INSTRUMENTS_PER_PAGE)] = (
        MAX_INSTRUMENTS_PER_PAGE
    )


class ExchangePing(msgspec.Struct, frozen=True, kw_only=True, tag_field="op", tag="ping"):
    id: int


class Logout(msgspec.Struct, frozen=True, kw_only=True, tag_field="op", tag="logout"):
    id: int


ClientRequest = (
    Login
    | Place
    | Cancel
    | Replace
    | ListOrders
    | ListPositions
    | GetBalance
    | ListExchangeInstruments
    | ExchangePing
    | Logout
)


class ExchangeOrder(msgspec.Struct, frozen=True, kw_only=True):
    """An order as the exchange sees it; `fills` are those so far."""

    broker_order_id: bounds.Id
    tag: bounds.Word
    symbol: bounds.Word
    side: Side
    quantity: bounds.Lots
    price_type: PriceType
    price: Decimal | None
    time_in_force: TimeInForce
    state: OrderState
    fills: Annotated[list[Fill], bounds.LIST_BOUNDS] = []
    reason: bounds.Sentence | None = None

    def __post_init__(self) -> None:
        bounds.check_prices(price=self.price)


class ExchangePosition(msgspec.Struct, frozen=True, kw_only=True):
    symbol: bounds.Word
    #: Lots; negative when short.
    quantity: bounds.SignedLots
    average_price: Decimal
    #: Shares beyond the lots, with their sign.
    odd_shares: bounds.SignedLots = 0
    condition: OrderCondition = OrderCondition.CASH

    def __post_init__(self) -> None:
        bounds.check_prices(average_price=self.average_price)

    @classmethod
    def of_shares(
        cls,
        symbol: str,
        shares: int,
        average_price: Decimal,
        condition: OrderCondition = OrderCondition.CASH,
    ) -> Self:
        """Makes a position of this many shares; negative when short."""
        lots, odd = divmod(abs(shares), SHARES_PER_LOT)
        sign = 1 if shares > 0 else -1
        return cls(
            symbol=symbol,
            quantity=sign * lots,
            odd_shares=sign * odd,
            average_price=average_price,
            condition=condition,
        )

    @property
    def shares(self) -> int:
        """Returns the whole position in shares. A contract counts as a lot of shares."""
        return self.quantity * SHARES_PER_LOT + self.odd_shares

    def held(self, lot: OrderLot) -> int:
        """Returns what an order of this lot can close: lots, or the shares beyond them."""
        return self.odd_shares if lot in ODD_LOTS else self.quantity


class ExchangeBalance(msgspec.Struct, frozen=True, kw_only=True):
    """Money of an account, in the account's currency."""

    currency: bounds.Word
    cash: Decimal
    #: Available for new orders.
    available: Decimal

    def __post_init__(self) -> None:
        bounds.check_amounts(cash=self.cash, available=self.available)


class Coverage(msgspec.Struct, frozen=True, kw_only=True):
    """Says which of the account's orders are certainly in a list of orders."""

    #: Orders of all sessions are listed, not only of the one that asks.
    all_sessions: bool
    #: Orders that the exchange took less than this many ms before the answer may be missing.
    behind_ms: bounds.SpanMs
    #: Orders that it took more than this many ms before the answer may be missing.
    reaches_ms: bounds.SpanMs


class ExchangeReply(msgspec.Struct, frozen=True, kw_only=True, tag_field="kind", tag="reply"):
    """Answers the request `id`. `error` is one of the codes of `errors.py`; None: it succeeded."""

    id: int
    error: str | None = None
    detail: str = ""
    session_id: str = ""
    order: ExchangeOrder | None = None
    orders: list[ExchangeOrder] = []
    #: With `orders`; None: the exchange does not say how complete they are.
    coverage: Coverage | None = None
    positions: list[ExchangePosition] = []
    balance: ExchangeBalance | None = None
    instruments: InstrumentPage | None = None


class ExchangeOrderChanged(
    msgspec.Struct, frozen=True, kw_only=True, tag_field="kind", tag="order_changed"
):
    """Sent by the exchange: an order's state changed, with the fill that did it if there is one."""

    event_id: bounds.EventId
    order: ExchangeOrder
    fill: Fill | None = None


class SessionEnded(
    msgspec.Struct, frozen=True, kw_only=True, tag_field="kind", tag="session_ended"
):
    """Sent by the exchange before it closes the connection."""

    reason: str


ServerMessage = ExchangeReply | ExchangeOrderChanged | SessionEnded
