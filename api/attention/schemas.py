"""Orders and differences that wait for a person, and how a person closes them."""

from __future__ import annotations

from datetime import datetime
from decimal import Decimal
from typing import Annotated, Any

from pydantic import Field

from api.http.fields import Body, View, examples
from api.orders.schemas import MAX_QUANTITY, ORDER_VIEW_EXAMPLE, NextCursor, OrderView
from worker_runtime.protocol.messages import OrderState

_ATTENTION_EXAMPLE = {
    **ORDER_VIEW_EXAMPLE,
    "state": "needs_attention",
    "final": False,
    "filled_quantity": 0,
    "average_price": None,
    "attention": "the broker does not list it, which does not prove here that it was never there;"
    " check 1: missing, unknown",
    "attention_at": "2026-11-21T01:02:00.000000Z",
    "known_state": "unknown",
}


class AttentionOrderView(OrderView):
    """An order that a person has to look at; `attention` says why."""

    model_config = examples(_ATTENTION_EXAMPLE)

    attention_at: datetime
    known_state: Annotated[OrderState, Field(description="The last state that is known of it.")]


class AttentionPage(View):
    """Orders that wait for a person, those that wait longest first."""

    model_config = examples({"orders": [_ATTENTION_EXAMPLE], "next_cursor": None})

    orders: list[AttentionOrderView]
    next_cursor: NextCursor


class ResolveOrderRequest(Body):
    """How an order ended, as somebody found out at the broker. Nothing changes it any more."""

    model_config = examples(
        {"state": "cancelled", "reason": "the broker's support: never arrived"},
        {
            "state": "filled",
            "filled_quantity": 1,
            "average_price": "1005",
            "reason": "seen in the app",
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


_RECONCILIATION_EXAMPLE: dict[str, Any] = {
    "id": 7,
    "user_id": "alice",
    "account_id": "9A95-0123456",
    "at": "2026-11-21T01:00:00.000000Z",
    "differences": {"positions": [{"symbol": "2330", "ours": 2, "broker": 3}]},
    "blocks": False,
    "resolved_at": None,
    "resolved_by": None,
}


class ReconciliationView(View):
    """What one comparison after a login found."""

    model_config = examples(_RECONCILIATION_EXAMPLE)

    id: int
    user_id: str
    account_id: str
    at: datetime
    differences: Annotated[
        dict[str, Any],
        Field(
            description="`foreign_orders`: broker ids of orders that are not ours. `fills`: lots of our"
            " orders that we count and the broker does not. `states`: orders that have ended here and work"
            " at the broker, or were filled though we hold that it never took them. `positions`: lots"
            " by symbol, in both books; `ours` is what was held before Berth and what our fills make of it."
        ),
    ]
    blocks: Annotated[bool, Field(description="The account takes no orders until it is resolved.")]
    resolved_at: datetime | None
    resolved_by: Annotated[
        str | None, Field(description="`reconciliation`: a later comparison did not find it any more.")
    ]


class ReconciliationList(View):
    """Differences, in the order that the path says."""

    model_config = examples({"reconciliations": [_RECONCILIATION_EXAMPLE]})

    reconciliations: list[ReconciliationView]


class ResolveReconciliationRequest(Body):
    """Somebody has looked at it."""

    model_config = examples({"reason": "one lot was bought by hand"})

    reason: Annotated[
        str, Field(min_length=1, max_length=500, description="Why; it stands in the audit trail.")
    ]
