"""The reports of a broker, in Berth's own words: orders, changes of orders, positions, money.

Adapters make these from what their broker sends (`worker_runtime/brokers/port.py`). They also cross
Valkey, within the answers of `requests.py`. Prices are decimal strings, quantities are lots (of
odd-lot orders: shares).
"""

from decimal import Decimal
from typing import Annotated, Self

import msgspec

from worker_runtime.protocol import bounds
from worker_runtime.protocol.messages import Fill, OrderState, PriceType, Side, TimeInForce
from worker_runtime.protocol.order_terms import ODD_LOTS, SHARES_PER_LOT, OrderCondition, OrderLot


class BrokerOrder(msgspec.Struct, frozen=True, kw_only=True):
    """An order as the broker sees it; `fills` are those so far."""

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


class OrderChanged(msgspec.Struct, frozen=True, kw_only=True):
    """A change of an order that the broker reports, with the fill that made it if there is one."""

    event_id: bounds.EventId
    order: BrokerOrder
    fill: Fill | None = None


class Position(msgspec.Struct, frozen=True, kw_only=True):
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
        """Returns a position of this many shares; negative when short."""
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
        """All of it; a contract counts as a lot of shares."""
        return self.quantity * SHARES_PER_LOT + self.odd_shares

    def held(self, lot: OrderLot) -> int:
        """Returns what an order of this lot can close: lots, or shares beyond them."""
        return self.odd_shares if lot in ODD_LOTS else self.quantity


class Balance(msgspec.Struct, frozen=True, kw_only=True):
    """Money of an account, in the account's currency."""

    currency: bounds.Word
    cash: Decimal
    #: Available for new orders.
    available: Decimal

    def __post_init__(self) -> None:
        bounds.check_amounts(cash=self.cash, available=self.available)
