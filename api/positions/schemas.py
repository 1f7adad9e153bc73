"""Bodies and views of positions, balances and intents. Quantities are lots."""

from __future__ import annotations

from datetime import UTC, datetime
from enum import StrEnum
from hashlib import sha256
from typing import Annotated, Any, Literal, Self

from pydantic import Field, JsonValue, model_validator

from api.http.fields import Body, Price, View, examples
from api.orders.schemas import (
    MAX_QUANTITY,
    ORDER_VIEW_EXAMPLE,
    ClientOrderId,
    LimitPrice,
    OrderRequest,
    OrderView,
    Symbol,
    check_price,
)
from worker_runtime.protocol import exchange
from worker_runtime.protocol.messages import PriceType, Side, TimeInForce
from worker_runtime.protocol.requests import AccountReport

_POSITION: dict[str, JsonValue] = {
    "symbol": "2330",
    "direction": "long",
    "quantity": 2,
    "average_price": "1001.5",
}
_HEAD: dict[str, JsonValue] = {
    "user_id": "alice",
    "account_id": "9A95-0123456",
    "taken_at": "2026-11-21T01:00:00.034000Z",
}


class PositionView(View):
    """An open position."""

    model_config = examples(_POSITION)

    symbol: str
    direction: Literal["long", "short"]
    quantity: Annotated[int, Field(gt=0, description="Lots, also when short.")]
    average_price: Price

    @classmethod
    def of(cls, position: exchange.Position) -> PositionView:
        direction: Literal["long", "short"] = "long" if position.quantity > 0 else "short"
        return cls(
            symbol=position.symbol,
            direction=direction,
            quantity=abs(position.quantity),
            average_price=position.average_price,
        )


class _AccountView(View):
    user_id: str
    account_id: str
    taken_at: Annotated[datetime, Field(description="When the worker asked the broker, by its clock.")]


class PositionList(_AccountView):
    """The open positions of an account, by symbol."""

    model_config = examples({**_HEAD, "positions": [_POSITION]})

    positions: list[PositionView]


class BalanceView(_AccountView):
    """The money of an account."""

    model_config = examples({**_HEAD, "currency": "TWD", "cash": "1000000", "available": "997997"})

    currency: str
    cash: Price
    available: Annotated[Price, Field(description="What is left for new orders.")]


def taken_at(report: AccountReport) -> datetime:
    return datetime.fromtimestamp(report.taken_at_ms / 1000, UTC)


_CLOSE: dict[str, Any] = {"client_order_id": "close-1"}
_INTENT: dict[str, Any] = {
    "client_order_id": "signal-17",
    "intent": "long_entry",
    "symbol": "MXFA6",
    "quantity": 1,
}
_Quantity = Annotated[int, Field(strict=True, gt=0, le=MAX_QUANTITY)]


class PricedBody(Body):
    """How an order is priced: at the market and at once, unless a price is given."""

    price_type: PriceType = PriceType.MARKET
    price: LimitPrice = None
    time_in_force: Annotated[
        TimeInForce | None, Field(description="Without it: IOC at the market, ROD with a limit.")
    ] = None

    @model_validator(mode="after")
    def _price_fits_its_type(self) -> Self:
        check_price(self.price_type, self.price)
        return self

    @property
    def lasts(self) -> TimeInForce:
        market = self.price_type is PriceType.MARKET
        return self.time_in_force or (TimeInForce.IOC if market else TimeInForce.ROD)

    def order(
        self, client_order_id: str, account_id: str, symbol: str, side: Side, quantity: int
    ) -> OrderRequest:
        """An order that is priced like this."""
        return OrderRequest(
            client_order_id=client_order_id,
            account_id=account_id,
            symbol=symbol,
            side=side,
            quantity=quantity,
            price_type=self.price_type,
            price=self.price,
            time_in_force=self.lasts,
        )

    def _print(self, *parts: str) -> str:
        """The same for two bodies that ask for the same, however the price is written."""
        price = "" if self.price is None else format(self.price.normalize(), "f")
        return sha256("|".join((*parts, self.price_type, price, self.lasts)).encode()).hexdigest()


class ClosePositionRequest(PricedBody):
    """Close a position, or a part of it."""

    model_config = examples(_CLOSE)

    client_order_id: ClientOrderId
    quantity: Annotated[_Quantity | None, Field(description="Lots; without it: all of the position.")] = None

    def fingerprint(self, account_id: str, symbol: str) -> str:
        return self._print("close", account_id, symbol, str(self.quantity or ""))


class Intent(StrEnum):
    """What a strategy wants."""

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

    model_config = examples(_INTENT)

    client_order_id: Annotated[
        str,
        Field(
            pattern=r"^[A-Za-z0-9._:-]+$",
            max_length=48,
            description="Your own id of this intent, unique for the user. Its orders are `<id>.close` and"
            " `<id>.open`. A repeat goes on where the first one stopped.",
        ),
    ]
    intent: Intent
    symbol: Symbol
    quantity: Annotated[
        _Quantity | None, Field(description="Lots. Required for an entry; an exit without it closes all.")
    ] = None

    @model_validator(mode="after")
    def _an_entry_has_a_quantity(self) -> Self:
        if self.intent.enters and self.quantity is None:
            raise ValueError("an entry needs a quantity")
        return self

    def fingerprint(self, account_id: str) -> str:
        return self._print(self.intent, account_id, self.symbol, str(self.quantity or ""))


class IntentView(View):
    """How far an intent has come."""

    model_config = examples(
        {
            "client_order_id": "signal-17",
            "intent": "long_entry",
            "legs": [ORDER_VIEW_EXAMPLE],
            "complete": True,
        }
    )

    client_order_id: str
    intent: Intent
    legs: Annotated[list[OrderView], Field(description="Its orders so far, the closing one first.")]
    complete: Annotated[
        bool, Field(description="All orders are made. False: nothing more is, unless this is repeated.")
    ]
