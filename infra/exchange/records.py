"""The ledger's records as the admin API shows them,
and what is computed from them: positions and balance.

Times are Unix milliseconds, quantities are lots (of odd-lot orders: shares).
"""

from __future__ import annotations

from collections.abc import Iterable
from decimal import Decimal
from enum import StrEnum

from pydantic import BaseModel, ConfigDict, Field

from worker_runtime.brokers.paper.wire import ExchangeBalance, ExchangeOrder, ExchangePosition
from worker_runtime.protocol.messages import (
    FINAL_ORDER_STATES,
    Fill,
    OrderState,
    PriceType,
    Side,
    TimeInForce,
)
from worker_runtime.protocol.order_terms import (
    ODD_LOTS,
    SHARES_PER_LOT,
    OpenClose,
    OrderCondition,
    OrderLot,
)


class LedgerRecord(BaseModel):
    """Base of all records."""

    model_config = ConfigDict(frozen=True)


class AccountRegistration(LedgerRecord):
    """An account and its keys. Registering it again replaces the keys."""

    account: str = Field(min_length=1, max_length=64)
    api_key: str = Field(min_length=1, max_length=512, repr=False)
    secret_key: str = Field(min_length=1, max_length=512, repr=False)
    #: Connections are counted per person; empty: the account is a person of its own.
    person_id: str = Field(default="", max_length=64)


class LedgerFill(LedgerRecord):
    fill_id: str
    quantity: int
    price: Decimal
    at_ms: int

    def as_sent(self) -> Fill:
        return Fill(
            fill_id=self.fill_id, quantity=self.quantity, price=self.price, at_ms=self.at_ms
        )


class LedgerOrder(LedgerRecord):
    """An order that the exchange took: exactly one for each `place` that reached it."""

    broker_order_id: str
    account: str
    #: The sender: its session, and the name that the client gave at login.
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
    lot: OrderLot = OrderLot.COMMON
    condition: OrderCondition = OrderCondition.CASH
    open_close: OpenClose = OpenClose.AUTO
    fills: tuple[LedgerFill, ...] = ()

    @property
    def filled(self) -> int:
        return sum(fill.quantity for fill in self.fills)

    @property
    def remaining(self) -> int:
        return self.quantity - self.filled

    @property
    def unit(self) -> int:
        """Shares that one of its quantity stands for; a contract counts as a lot of shares."""
        return 1 if self.lot in ODD_LOTS else SHARES_PER_LOT

    @property
    def final(self) -> bool:
        return self.state in FINAL_ORDER_STATES

    def as_sent(self) -> ExchangeOrder:
        """Returns the order as the session protocol shows it to its owner."""
        return ExchangeOrder(
            broker_order_id=self.broker_order_id,
            tag=self.tag,
            symbol=self.symbol,
            side=self.side,
            quantity=self.quantity,
            # As Shioaji's lists have it: neither has a price of its own.
            price_type=PriceType.LIMIT if self.price_type is PriceType.LIMIT else PriceType.MARKET,
            price=self.price,
            time_in_force=self.time_in_force,
            state=self.state,
            fills=[fill.as_sent() for fill in self.fills],
            reason=self.reason,
        )


class LedgerSession(LedgerRecord):
    session_id: str
    account: str
    person_id: str
    client: str
    opened_ms: int
    closed_ms: int | None
    close_reason: str | None
    #: Where the connection came from.
    address: str = ""


class LimitOwnerKind(StrEnum):
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


class Incident(LedgerRecord):
    """A refusal, ban or suspension, or its end; `cause` is what was counted, such as `orders`."""

    at_ms: int
    kind: IncidentKind
    owner_kind: LimitOwnerKind
    owner: str
    #: The account of the call.
    account: str
    cause: str
    detail: str
    until_ms: int | None = None


class ExchangeHealth(LedgerRecord):
    """`connections` counts logged-in sessions."""

    status: str
    connections: int
    orders: int


def order_as_of(order: LedgerOrder, at_ms: int) -> LedgerOrder | None:
    """Returns the order as it was at a time, for listings that lag; None if it did not exist yet.

    A changed price or quantity is shown at once: the ledger keeps no history of them.
    """
    if order.received_ms > at_ms:
        return None
    if order.updated_ms <= at_ms:
        return order
    fills = tuple(fill for fill in order.fills if fill.at_ms <= at_ms)
    done = sum(fill.quantity for fill in fills)
    state = OrderState.PART_FILLED if done else OrderState.SUBMITTED
    return order.model_copy(update={"state": state, "reason": None, "fills": fills})


_PRICE_STEP = Decimal("0.0001")
#: The first cash of every account.
INITIAL_CASH = Decimal(100_000_000)


def net_positions(orders: Iterable[LedgerOrder]) -> list[ExchangePosition]:
    """Returns the open positions of the orders' fills, by symbol and condition, without flat ones.

    What opens and closes is netted, whatever a futures order says of it. The average price is that
    of the fills which opened or enlarged the position; reducing keeps it.
    """
    held: dict[tuple[str, OrderCondition], tuple[int, Decimal]] = {}
    fills = [(fill, order) for order in orders for fill in order.fills]
    for fill, order in sorted(fills, key=lambda pair: (pair[0].at_ms, pair[0].fill_id)):
        key = order.symbol, order.condition
        quantity, average = held.get(key, (0, Decimal(0)))
        change = fill.quantity * order.unit * (1 if order.side is Side.BUY else -1)
        after = quantity + change
        if quantity * change >= 0:  # opens or enlarges
            average = (average * abs(quantity) + fill.price * abs(change)) / abs(after)
        elif quantity * after < 0:  # turned: this fill opened the rest
            average = fill.price
        held[key] = (after, average)
    return [
        ExchangePosition.of_shares(symbol, shares, average.quantize(_PRICE_STEP), condition)
        for (symbol, condition), (shares, average) in sorted(held.items())
        if shares
    ]


def account_balance(orders: Iterable[LedgerOrder]) -> ExchangeBalance:
    """Returns the balance after the orders' fills.
    A lot is worth its price: there are no contract sizes.

    Margin purchases and short sales cost what others do: no interest, no fees, no collateral.
    """
    cash, bound = INITIAL_CASH, Decimal(0)
    for order in orders:
        sign = -1 if order.side is Side.BUY else 1
        size = Decimal(order.unit) / SHARES_PER_LOT
        cash += sum((sign * fill.quantity * size * fill.price for fill in order.fills), Decimal(0))
        if order.side is Side.BUY and not order.final and order.price is not None:
            bound += order.remaining * size * order.price
    return ExchangeBalance(currency="TWD", cash=cash, available=cash - bound)
