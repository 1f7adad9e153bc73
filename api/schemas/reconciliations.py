"""Differences between our books and the broker's."""

from __future__ import annotations

from datetime import datetime
from typing import Annotated, Any

from pydantic import ConfigDict, Field

from api.schemas.fields import Body, View

_EXAMPLE: dict[str, Any] = {
    "id": 7,
    "user_id": "alice",
    "account_id": "9A95-0123456",
    "at": "2026-11-21T01:00:00.000000Z",
    "differences": {"positions": [{"symbol": "2330", "ours": 2, "broker": 3}]},
    "blocks": False,
    "resolved_at": None,
    "resolved_by": None,
}


class Reconciliation(View):
    """What one comparison after a login found."""

    model_config = ConfigDict(frozen=True, from_attributes=True, json_schema_extra={"examples": [_EXAMPLE]})

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


class Reconciliations(View):
    """Differences, in the order that the path says."""

    model_config = ConfigDict(frozen=True, json_schema_extra={"examples": [{"reconciliations": [_EXAMPLE]}]})

    reconciliations: list[Reconciliation]


class ResolveReconciliation(Body):
    """Somebody has looked at it."""

    model_config = ConfigDict(
        extra="forbid",
        frozen=True,
        json_schema_extra={"examples": [{"reason": "one lot was bought by hand"}]},
    )

    reason: Annotated[
        str, Field(min_length=1, max_length=500, description="Why; it stands in the audit trail.")
    ]
