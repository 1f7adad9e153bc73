"""Orders that wait for a person, and how a person ends one."""

from __future__ import annotations

from datetime import datetime
from decimal import Decimal
from typing import Annotated

from pydantic import ConfigDict, Field

from api.schemas.fields import Body, View
from api.schemas.orders import MAX_QUANTITY, ORDER_VIEW_EXAMPLE, Order
from worker_runtime.protocol.messages import OrderState

_WAITING = {
    **ORDER_VIEW_EXAMPLE,
    "state": "needs_attention",
    "final": False,
    "filled_quantity": 0,
    "average_price": None,
    "attention": "the broker does not list it, which does not prove here that it was never there;"
    " look 1: missing, unknown",
    "attention_at": "2026-11-21T01:02:00.000000Z",
    "known_state": "unknown",
}


class WaitingOrder(Order):
    """An order that a person has to look at; `attention` says why."""

    model_config = ConfigDict(frozen=True, json_schema_extra={"examples": [_WAITING]})

    attention_at: datetime
    known_state: Annotated[OrderState, Field(description="The last state that is known of it.")]


class AttentionPage(View):
    """Orders that wait for a person, those that wait longest first."""

    model_config = ConfigDict(
        frozen=True, json_schema_extra={"examples": [{"orders": [_WAITING], "next_cursor": None}]}
    )

    orders: list[WaitingOrder]
    next_cursor: Annotated[
        str | None,
        Field(description="`cursor` of the next page; null when there is nothing behind this one."),
    ]


class ResolveOrder(Body):
    """How an order ended, as somebody found out at the broker. Nothing changes it any more."""

    model_config = ConfigDict(
        extra="forbid",
        frozen=True,
        json_schema_extra={
            "examples": [
                {"state": "cancelled", "reason": "the broker's desk: never arrived"},
                {
                    "state": "filled",
                    "filled_quantity": 1,
                    "average_price": "1005",
                    "reason": "seen in the app",
                },
            ]
        },
    )

    state: Annotated[OrderState, Field(description="`filled`, `cancelled`, `rejected` or `expired`.")]
    filled_quantity: Annotated[int, Field(strict=True, ge=0, le=MAX_QUANTITY, description="Lots.")] = 0
    average_price: Annotated[
        Decimal | None,
        Field(gt=0, max_digits=18, decimal_places=6, allow_inf_nan=False, description="Of the filled lots."),
    ] = None
    reason: Annotated[
        str, Field(min_length=1, max_length=500, description="How it is known; it stands in the audit trail.")
    ]
