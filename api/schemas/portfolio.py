"""Positions and balance of an account. Quantities are lots, money is in the account's currency."""

from __future__ import annotations

from datetime import UTC, datetime
from typing import Annotated, Literal

from pydantic import ConfigDict, Field, JsonValue

from api.schemas.fields import Price, View
from worker_runtime.protocol import exchange
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


class Position(View):
    """An open position."""

    model_config = ConfigDict(frozen=True, json_schema_extra={"examples": [_POSITION]})

    symbol: str
    direction: Literal["long", "short"]
    quantity: Annotated[int, Field(gt=0, description="Lots, also when short.")]
    average_price: Price

    @classmethod
    def of(cls, told: exchange.Position) -> Position:
        direction: Literal["long", "short"] = "long" if told.quantity > 0 else "short"
        return cls(
            symbol=told.symbol,
            direction=direction,
            quantity=abs(told.quantity),
            average_price=told.average_price,
        )


class Positions(View):
    """The open positions of an account, by symbol."""

    model_config = ConfigDict(
        frozen=True, json_schema_extra={"examples": [{**_HEAD, "positions": [_POSITION]}]}
    )

    user_id: str
    account_id: str
    taken_at: Annotated[datetime, Field(description="When the worker asked the broker, by its clock.")]
    positions: list[Position]


class Balance(View):
    """The money of an account."""

    model_config = ConfigDict(
        frozen=True,
        json_schema_extra={
            "examples": [{**_HEAD, "currency": "TWD", "cash": "1000000", "available": "997997"}]
        },
    )

    user_id: str
    account_id: str
    taken_at: Annotated[datetime, Field(description="When the worker asked the broker, by its clock.")]
    currency: str
    cash: Price
    available: Annotated[Price, Field(description="What is left for new orders.")]


def taken_at(report: AccountReport) -> datetime:
    return datetime.fromtimestamp(report.taken_at_ms / 1000, UTC)
