"""Bodies and views of positions, balances and intents. Quantities are lots; of odd lots, shares."""

from datetime import UTC, datetime
from enum import StrEnum
from hashlib import sha256
from typing import Annotated, Any, Literal, Self

from pydantic import Field, SerializeAsAny, model_validator

from api.http.fields import Body, Price, View, plain_price
from api.orders import schemas as orders
from worker_runtime.protocol import broker_reports
from worker_runtime.protocol.messages import PriceType, Side, TimeInForce
from worker_runtime.protocol.order_terms import OpenClose, OrderCondition, OrderLot
from worker_runtime.protocol.requests import AccountReport


class PositionView(View):
    """An open position."""

    symbol: str
    direction: Literal["long", "short"]
    quantity: int = Field(ge=0, description="Lots, also when short.")
    odd_shares: int = Field(default=0, ge=0, description="Shares beyond the lots.")
    condition: OrderCondition = OrderCondition.CASH
    average_price: Price

    @classmethod
    def of(cls, position: broker_reports.Position) -> Self:
        direction: Literal["long", "short"] = "long" if position.shares > 0 else "short"
        return cls(
            symbol=position.symbol,
            direction=direction,
            quantity=abs(position.quantity),
            odd_shares=abs(position.odd_shares),
            condition=position.condition,
            average_price=position.average_price,
        )


class _AccountView(View):
    user_id: str
    account_id: str
    taken_at: datetime = Field(description="When the worker asked the broker, by its clock.")


class PositionList(_AccountView):
    """The open positions of an account, by symbol."""

    positions: list[PositionView]


class BalanceView(_AccountView):
    """The money of an account."""

    currency: str
    cash: Price
    available: Price = Field(description="What is left for new orders.")


def account_fields(user_id: str, account_id: str, report: AccountReport) -> dict[str, Any]:
    """Returns the fields that every view of an account has."""
    at = datetime.fromtimestamp(report.taken_at_ms / 1000, UTC)
    return {"user_id": user_id, "account_id": account_id, "taken_at": at}


AnyCondition = Annotated[
    OrderCondition | None,
    Field(
        description="Of stocks. Without it: cash, or of a close that of the only position in "
        "the symbol."
    ),
]
_Quantity = Annotated[int, Field(strict=True, gt=0, le=orders.MAX_QUANTITY)]


class PricedBody(Body):
    """Says how an order is priced: at the market and at once, unless a price is given."""

    price_type: PriceType = PriceType.MARKET
    price: orders.LimitPrice = None
    time_in_force: TimeInForce | None = Field(
        default=None, description="Without it: IOC at the market, ROD with a limit."
    )
    lot: orders.Lot = OrderLot.COMMON
    condition: AnyCondition = None
    open_close: orders.OpenCloseType = OpenClose.AUTO

    @model_validator(mode="after")
    def _price_fits_its_type(self) -> Self:
        orders.require_matching_price(self.price_type, self.price)
        return self

    @property
    def lasts(self) -> TimeInForce:
        limit = self.price_type is PriceType.LIMIT
        return self.time_in_force or (TimeInForce.ROD if limit else TimeInForce.IOC)

    def order(
        self, client_order_id: str, account_id: str, symbol: str, side: Side, quantity: int
    ) -> orders.OrderRequest:
        """An order that is priced like this."""
        return orders.OrderRequest(
            client_order_id=client_order_id,
            account_id=account_id,
            symbol=symbol,
            side=side,
            quantity=quantity,
            price_type=self.price_type,
            price=self.price,
            time_in_force=self.lasts,
            lot=self.lot,
            condition=self.condition or OrderCondition.CASH,
            open_close=self.open_close,
        )

    def _print(self, *parts: str) -> str:
        """The same for two bodies that ask for the same, however the price is written."""
        priced = (self.price_type, plain_price(self.price), self.lasts)
        special = orders.special_terms(self.lot, self.condition, self.open_close)
        return sha256("|".join((*parts, *priced, *special)).encode()).hexdigest()


class ClosePositionRequest(PricedBody):
    """Close a position, or a part of it."""

    client_order_id: orders.ClientOrderId
    quantity: _Quantity | None = Field(
        default=None, description="Lots; without it: all of the position."
    )

    def fingerprint(self, account_id: str, symbol: str) -> str:
        return self._print("close", account_id, symbol, str(self.quantity or ""))


class Intent(StrEnum):
    """The intent of a strategy."""

    LONG_ENTRY = "long_entry"
    LONG_EXIT = "long_exit"
    SHORT_ENTRY = "short_entry"
    SHORT_EXIT = "short_exit"

    @property
    def enters(self) -> bool:
        return self in (Intent.LONG_ENTRY, Intent.SHORT_ENTRY)

    @property
    def long(self) -> bool:
        return self in (Intent.LONG_ENTRY, Intent.LONG_EXIT)


class IntentRequest(PricedBody):
    """Enter or leave the market on one side."""

    client_order_id: str = Field(
        pattern=r"^[A-Za-z0-9._:-]+$",
        max_length=48,
        description="Your own id of this intent, unique for the user. Its orders are `<id>.close` "
        "and `<id>.open`. A repeat continues where the first one stopped.",
    )
    intent: Intent
    symbol: orders.Symbol
    quantity: _Quantity | None = Field(
        default=None, description="Lots. Required for an entry; an exit without it closes all."
    )

    @model_validator(mode="after")
    def _an_entry_has_a_quantity(self) -> Self:
        if self.intent.enters and self.quantity is None:
            raise ValueError("an entry needs a quantity")
        return self

    def fingerprint(self, account_id: str) -> str:
        return self._print(self.intent, account_id, self.symbol, str(self.quantity or ""))


class IntentView(View):
    """Says how far an intent has come."""

    client_order_id: str
    intent: Intent
    legs: list[SerializeAsAny[orders.OrderView]] = Field(
        description="Its orders so far, the closing one first."
    )
    complete: bool = Field(
        description="All orders are made. False: nothing more is, unless this is repeated."
    )
