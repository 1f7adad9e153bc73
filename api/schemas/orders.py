"""Orders in and out. Quantities are lots, prices are in the instrument's currency."""

from __future__ import annotations

from datetime import datetime
from decimal import Decimal
from typing import Annotated, Any, Self

from pydantic import ConfigDict, Field, model_validator

from api.schemas.fields import AccountId, Body, Price, View
from worker_runtime.protocol.messages import OrderState, PriceType, Side, TimeInForce

#: Lots. Far above what an exchange takes in one order (499 for stocks on the TWSE): a typing error's limit,
#: not a rule of trading.
MAX_QUANTITY = 10_000

ORDER_EXAMPLE: dict[str, Any] = {
    "client_order_id": "2026-11-21-0001",
    "account_id": "9A95-0123456",
    "symbol": "2330",
    "side": "buy",
    "quantity": 1,
    "price_type": "LMT",
    "price": "1005.5",
    "time_in_force": "ROD",
}

ORDER_VIEW_EXAMPLE: dict[str, Any] = {
    **ORDER_EXAMPLE,
    "id": "0199f1c2a5b87c3e9d4f6a1b2c3d4e5f",
    "user_id": "alice",
    "state": "filled",
    "final": True,
    "broker_order_id": "P0000017",
    "filled_quantity": 1,
    "average_price": "1005",
    "code": None,
    "reason": None,
    "reduce_only": False,
    "origin": None,
    "attention": None,
    "accepted_at": "2026-11-21T01:00:00.000000Z",
}


ClientOrderId = Annotated[
    str,
    Field(
        pattern=r"^[A-Za-z0-9._:-]+$",
        max_length=64,
        description="Your own id of this order, unique for the user. A repeat returns the first outcome.",
    ),
]
Symbol = Annotated[str, Field(pattern=r"^[A-Za-z0-9./_-]+$", max_length=32)]


class PlaceOrder(Body):
    """A new order."""

    model_config = ConfigDict(
        extra="forbid",
        frozen=True,
        json_schema_extra={
            "examples": [
                ORDER_EXAMPLE,
                {**ORDER_EXAMPLE, "price_type": "MKT", "price": None, "time_in_force": "IOC"},
            ]
        },
    )

    client_order_id: ClientOrderId
    account_id: AccountId
    symbol: Symbol
    side: Side
    quantity: Annotated[int, Field(strict=True, gt=0, le=MAX_QUANTITY, description="Lots.")]
    price_type: PriceType = PriceType.LIMIT
    price: Annotated[
        Decimal | None,
        Field(
            gt=0,
            max_digits=14,
            decimal_places=4,
            allow_inf_nan=False,
            description="Required with LMT, refused with MKT.",
        ),
    ] = None
    time_in_force: TimeInForce = TimeInForce.ROD

    @model_validator(mode="after")
    def _price_fits_its_type(self) -> Self:
        if self.price_type is PriceType.LIMIT and self.price is None:
            raise ValueError("a limit order needs a price")
        if self.price_type is PriceType.MARKET and self.price is not None:
            raise ValueError("a market order has no price")
        return self


class Step(View):
    """One step in the life of an order."""

    step: Annotated[str, Field(examples=["submitted"])]
    at: datetime
    elapsed_ms: Annotated[float, Field(description="Milliseconds since the order was accepted.")]
    detail: str | None = None


class Order(View):
    """An order as it stands."""

    model_config = ConfigDict(frozen=True, json_schema_extra={"examples": [ORDER_VIEW_EXAMPLE]})

    id: str
    client_order_id: str
    user_id: str
    account_id: str
    symbol: str
    side: Side
    quantity: int
    price_type: PriceType
    price: Price | None
    time_in_force: TimeInForce
    state: OrderState
    final: Annotated[bool, Field(description="The state will not change any more.")]
    broker_order_id: str | None
    filled_quantity: int
    average_price: Price | None
    code: Annotated[str | None, Field(description="Why it was not executed: a stable code.")]
    reason: str | None
    reduce_only: Annotated[bool, Field(description="It can only make a position smaller.")] = False
    origin: Annotated[
        str | None, Field(description="What was asked for, when that was more than this order.")
    ] = None
    attention: Annotated[str | None, Field(description="Why a person has to look at it.")] = None
    accepted_at: datetime


class OrderWithTimeline(Order):
    """An order with the steps of its life so far, in order of time."""

    model_config = ConfigDict(
        frozen=True,
        json_schema_extra={
            "examples": [
                {
                    **ORDER_VIEW_EXAMPLE,
                    "timeline": [
                        {"step": "accepted", "at": "2026-11-21T01:00:00.000000Z", "elapsed_ms": 0},
                        {"step": "claimed", "at": "2026-11-21T01:00:00.021000Z", "elapsed_ms": 21},
                        {"step": "connected", "at": "2026-11-21T01:00:00.034000Z", "elapsed_ms": 34},
                        {"step": "submitted", "at": "2026-11-21T01:00:00.036000Z", "elapsed_ms": 36},
                        {"step": "filled", "at": "2026-11-21T01:00:00.037000Z", "elapsed_ms": 37},
                    ],
                }
            ]
        },
    )

    timeline: list[Step]
