"""Cancels and changes of orders."""

from __future__ import annotations

from decimal import Decimal
from typing import Annotated, Any, Self

from pydantic import ConfigDict, Field, model_validator

from api.schemas.fields import Body
from api.schemas.orders import MAX_QUANTITY

RequestId = Annotated[
    str,
    Field(
        pattern=r"^[A-Za-z0-9._:-]+$",
        max_length=64,
        description="Your own id of this request, unique for the order. A repeat does nothing anew, "
        "but for a cancel that came to nothing.",
    ),
]
_CANCEL: dict[str, Any] = {"request_id": "cancel-1"}
_REPLACE: dict[str, Any] = {"request_id": "replace-1", "quantity": 1, "price": "1004.5"}


class CancelOrder(Body):
    """Take an order back."""

    model_config = ConfigDict(extra="forbid", frozen=True, json_schema_extra={"examples": [_CANCEL]})

    request_id: RequestId


class ReplaceOrder(Body):
    """Change a working order: a smaller quantity, another price, or both."""

    model_config = ConfigDict(extra="forbid", frozen=True, json_schema_extra={"examples": [_REPLACE]})

    request_id: RequestId
    quantity: Annotated[
        int | None,
        Field(
            strict=True,
            gt=0,
            le=MAX_QUANTITY,
            description="New total in lots: below the present one, and not below what is filled.",
        ),
    ] = None
    price: Annotated[
        Decimal | None,
        Field(gt=0, max_digits=14, decimal_places=4, allow_inf_nan=False, description="New limit price."),
    ] = None

    @model_validator(mode="after")
    def _something_changes(self) -> Self:
        if self.quantity is None and self.price is None:
            raise ValueError("a change needs a quantity or a price")
        return self
