"""The fields of what waits for an operator, and of the operator's decisions."""

from datetime import datetime
from decimal import Decimal
from typing import Any, Self

from pydantic import AliasChoices, Field

from api.http.fields import Body, LongReason, View
from api.orders.schemas import MAX_QUANTITY, NextCursor, OrderView
from infra.database import models
from worker_runtime.protocol.messages import OrderState


class AttentionOrderView(OrderView):
    """An order that a person has to look at, `attention` says why; or one that is unknown."""

    attention_at: datetime | None = Field(
        description="Since when it waits for a person; null: it does not yet."
    )
    known_state: OrderState = Field(description="The last state that is known of it.")
    next_step: str = Field(description="What will happen to it, and by whom.")


class AttentionPage(View):
    """Orders that wait for a person, those that wait longest first."""

    orders: list[AttentionOrderView]
    next_cursor: NextCursor


class ResolveOrderRequest(Body):
    """Says how an order ended, as somebody found out at the broker. Nothing changes it any more."""

    state: OrderState = Field(description="`filled`, `cancelled`, `rejected` or `expired`.")
    filled_quantity: int = Field(default=0, strict=True, ge=0, le=MAX_QUANTITY, description="Lots.")
    average_price: Decimal | None = Field(
        default=None, gt=0, max_digits=18, decimal_places=6, description="Of the filled lots."
    )
    reason: LongReason = Field(
        min_length=1, description="How it is known; kept in the audit trail."
    )


class ReconciliationView(View):
    """The findings of a comparison after a login."""

    id: int
    user_id: str
    account_id: str
    at: datetime
    differences: dict[str, Any] = Field(
        description="`foreign_orders`: broker ids of orders that are not ours. `fills`: lots of "
        "our orders that we count and the broker does not. `states`: orders that have ended here "
        "and work at the broker, or were filled though we hold that it never took them. "
        "`positions`: lots by symbol, in both books, and `odd_shares`: shares beyond them; `ours` "
        "is what was held before Berth and what our fills make of it."
    )
    blocks: bool = Field(description="The account takes no orders until it is resolved.")
    resolved_at: datetime | None
    resolved_by: str | None = Field(
        description="`reconciliation`: a later comparison did not find it any more."
    )


class ReconciliationList(View):
    """Differences, in the order that the path says."""

    reconciliations: list[ReconciliationView]


class PersonMatchView(View):
    """Two users whose workers have logged in to a broker as one person. Each worker speaks for its
    own user only, so either of them may only claim to be that person."""

    id: int
    broker: str
    first_user: str
    second_user: str
    found_at: datetime
    shares_budget: bool = Field(description="Their calls are counted together.")
    resolved_at: datetime | None = Field(description="null: it waits for an operator.")
    resolved_by: str | None

    @classmethod
    def of(cls, row: models.PersonMatch) -> Self:
        shown = {name: getattr(row, name) for name in cls.model_fields if name != "shares_budget"}
        return cls(**shown, shares_budget=row.shared_budget is not None)


class PersonMatchList(View):
    """Pairs of users, the oldest first."""

    person_matches: list[PersonMatchView]


class CertificateView(View):
    """The certificate that signs an account's orders."""

    user_id: str
    account_id: str
    broker: str
    expires_at: datetime = Field(
        validation_alias=AliasChoices("expires_at", "certificate_expires_at")
    )
    warned_days: int | None = Field(
        validation_alias=AliasChoices("warned_days", "certificate_warned_days"),
        description="The last warning, in days ahead; 0: that it has expired. null: none was "
        "given.",
    )


class CertificateList(View):
    """Certificates, soonest first."""

    certificates: list[CertificateView]


class ResolvePersonMatchRequest(Body):
    """Says whether both users are the same person at the broker, as somebody has made sure of."""

    share_budget: bool = Field(
        description="true: their calls count together, as at the broker, and each may use up what "
        "the other has. false: each user has limits of their own."
    )
    reason: LongReason = Field(
        min_length=1, description="How it is known; kept in the audit trail."
    )


class ResolveReconciliationRequest(Body):
    """Somebody has looked at it."""

    reason: LongReason = Field(min_length=1)
