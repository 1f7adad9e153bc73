"""An account's own limits."""

from __future__ import annotations

from decimal import Decimal
from typing import Annotated, Any

from pydantic import ConfigDict, Field

from api.schemas.fields import Body, Price, View
from api.schemas.orders import MAX_QUANTITY

_EXAMPLE: dict[str, Any] = {
    "max_quantity": 10,
    "max_notional": "5000000",
    "max_daily_orders": 200,
    "duplicate_window_s": 5,
}
#: What the columns can hold.
_MOST = 2**31 - 1


class PutLimits(Body):
    """What one account may do, where it differs from the settings; null: as they say."""

    model_config = ConfigDict(extra="forbid", frozen=True, json_schema_extra={"examples": [_EXAMPLE]})

    max_quantity: Annotated[
        int | None, Field(strict=True, ge=0, le=MAX_QUANTITY, description="Lots of one order.")
    ] = None
    max_notional: Annotated[
        Decimal | None,
        Field(ge=0, max_digits=14, decimal_places=2, allow_inf_nan=False, description="TWD of one order."),
    ] = None
    max_daily_orders: Annotated[int | None, Field(strict=True, ge=0, le=_MOST)] = None
    duplicate_window_s: Annotated[
        int | None,
        Field(
            strict=True,
            ge=0,
            le=86_400,
            description="Seconds in which a second order for the same is a mistake; 0: never.",
        ),
    ] = None


class AccountLimits(View):
    """An account's own limits; null: as the settings say."""

    model_config = ConfigDict(frozen=True, json_schema_extra={"examples": [_EXAMPLE]})

    max_quantity: int | None
    max_notional: Price | None
    max_daily_orders: int | None
    duplicate_window_s: int | None
