"""Routes for what waits for a person:
orders of unknown outcome, and differences with the broker."""

from datetime import datetime
from decimal import Decimal
from typing import Annotated, Any, Self
from uuid import UUID

from fastapi import APIRouter, Path, Query
from pydantic import AliasChoices, Field

from api.container import Call, KnownUserId
from api.http import problems
from api.http.fields import Body, LongReason, View
from api.orders.outcomes import view_of
from api.orders.router import own_order
from api.orders.schemas import (
    MAX_QUANTITY,
    NextCursor,
    OrderView,
    PageCursor,
    PageLimit,
    cursor_of,
    position_of,
)
from infra.database import budgets, certificates, models
from infra.database.orders import attention
from infra.database.orders.states import OrderNotFound
from infra.database.trading import reconciliations
from infra.database.trading.reconciliations import ReconciliationNotFound
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
    """How an order ended, as somebody found out at the broker. Nothing changes it any more."""

    state: OrderState = Field(description="`filled`, `cancelled`, `rejected` or `expired`.")
    filled_quantity: int = Field(default=0, strict=True, ge=0, le=MAX_QUANTITY, description="Lots.")
    average_price: Decimal | None = Field(
        default=None, gt=0, max_digits=18, decimal_places=6, description="Of the filled lots."
    )
    reason: LongReason = Field(
        min_length=1, description="How it is known; kept in the audit trail."
    )


class ReconciliationView(View):
    """What one comparison after a login found."""

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
    """Whether both users are one person at the broker, as somebody has made sure of."""

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


router = APIRouter(tags=["orders"])

Most = Annotated[int, Query(ge=1, le=500, description="Most of them.")]


@router.get("/attention", summary="Orders that wait for a person")
async def list_attention(
    call: Call,
    cursor: PageCursor = None,
    limit: PageLimit = 100,
    unknown: Annotated[
        bool,
        Query(
            description="Also orders of unknown outcome about which Berth still asks the broker."
        ),
    ] = False,
) -> AttentionPage:
    """Orders of all users whose outcome nobody but a person can find out, with the whole story.

    An order leaves the list when it is final: by `resolve`, by a recheck, or when the broker tells
    of it after all. Operators only.
    """
    behind = position_of(cursor) if cursor is not None else None
    rows = await call.database.fetch(
        attention.orders_for_a_person, after=behind, limit=limit + 1, unknown=unknown
    )
    has_more, rows = len(rows) > limit, rows[:limit]
    orders = [_attention_view(row) for row in rows]
    end = (
        cursor_of((rows[-1].attention_at or rows[-1].created_at, rows[-1].id)) if has_more else None
    )
    return AttentionPage(orders=orders, next_cursor=end)


@router.post(
    "/orders/{order_id}/recheck",
    status_code=202,
    summary="Ask the broker again",
    responses=problems.responses(OrderNotFound, attention.OrderSettled),
)
async def recheck_order(order_id: UUID, call: Call) -> OrderView:
    """Has an order that is not final looked at again, at once:
    at the broker, through the user's worker.

    It stays on the list for a person until it is settled. Another user's order is not found.
    """
    await own_order(call, order_id)
    row = await call.database.write(attention.recheck_order, order_id, actor=call.actor)
    return view_of(row)


@router.post(
    "/orders/{order_id}/resolve",
    summary="End an order by hand",
    responses=problems.responses(
        OrderNotFound, attention.OrderSettled, attention.ResolutionInvalid
    ),
)
async def resolve_order(order_id: UUID, body: ResolveOrderRequest, call: Call) -> OrderView:
    """Writes down how an order ended that is not final.
    It is final then, whatever is reported later.

    Nothing is changed at the broker: find out there first. Operators only; kept in the audit trail.
    """
    resolution = attention.Resolution(**body.model_dump())
    row = await call.database.write(attention.resolve_order, order_id, resolution, actor=call.actor)
    return view_of(row)


def _attention_view(row: models.Order) -> AttentionOrderView:
    step = attention.next_step(row)
    details = {"attention_at": row.attention_at, "known_state": row.state, "next_step": step}
    return AttentionOrderView.model_validate(view_of(row).model_dump() | details)


@router.get("/users/{user_id}/reconciliations", summary="Differences with the broker")
async def list_reconciliations(
    user_id: KnownUserId, call: Call, limit: Most = 100
) -> ReconciliationList:
    """What comparisons of our books with the broker's found after logins; the open ones first.

    A comparison closes what it shows to be in order again. An order that is not ours stays until an
    operator closes it, and what is under way in a symbol leaves its positions as they were.
    """
    rows = await call.database.fetch(reconciliations.reconciliations_of_user, user_id, limit=limit)
    return ReconciliationList(
        reconciliations=[ReconciliationView.model_validate(row) for row in rows]
    )


@router.get("/reconciliations", summary="Differences that wait for a person")
async def list_open_reconciliations(
    call: Call,
    after: Annotated[
        int, Query(ge=0, le=2**63 - 1, description="Number of the last one known.")
    ] = 0,
    limit: Most = 100,
) -> ReconciliationList:
    """The open ones of all users, the oldest first. Operators only."""
    rows = await call.database.fetch(reconciliations.open_reconciliations, after=after, limit=limit)
    return ReconciliationList(
        reconciliations=[ReconciliationView.model_validate(row) for row in rows]
    )


@router.post(
    "/reconciliations/{number}/resolve",
    summary="Close a difference",
    responses=problems.responses(ReconciliationNotFound),
)
async def resolve_reconciliation(
    number: Annotated[int, Path(ge=1, le=2**63 - 1)], body: ResolveReconciliationRequest, call: Call
) -> ReconciliationView:
    """Closes an open difference; an account that it blocked takes orders again. Operators only.

    What is closed is known from then on: the same orders and the same lots are no difference again.
    """
    row = await call.database.write(
        reconciliations.resolve_reconciliation, number, actor=call.actor, reason=body.reason
    )
    return ReconciliationView.model_validate(row)


@router.get("/person-matches", summary="Users who log in as one person")
async def list_person_matches(
    call: Call,
    resolved: Annotated[bool, Query(description="Also those that were decided.")] = False,
    after: Annotated[
        int, Query(ge=0, le=2**63 - 1, description="Number of the last one known.")
    ] = 0,
    limit: Most = 100,
) -> PersonMatchList:
    """Pairs of users whose logins name the same person at one broker, which counts both together.
    Berth counts each user apart until an operator decides. Operators only."""
    rows = await call.database.fetch(
        budgets.list_matches, resolved=resolved, after=after, limit=limit
    )
    return PersonMatchList(person_matches=[PersonMatchView.of(row) for row in rows])


@router.get("/certificates", summary="Certificates that expire")
async def list_certificates(
    call: Call,
    within_days: Annotated[
        int, Query(ge=0, le=3650, description="0: those that have expired.")
    ] = 30,
    limit: Most = 100,
) -> CertificateList:
    """Certificates of live accounts that have expired or expire soon, soonest first.
    Their users are warned 30, 7 and 1 days ahead, and orders are refused once one has
    expired. Operators only."""
    rows = await call.database.fetch(
        certificates.list_certificates, within_days=within_days, limit=limit
    )
    return CertificateList(certificates=[CertificateView.model_validate(row) for row in rows])


@router.post(
    "/person-matches/{number}/resolve",
    summary="Link two users, or keep them apart",
    responses=problems.responses(budgets.PersonMatchNotFound),
)
async def resolve_person_match(
    number: Annotated[int, Path(ge=1, le=2**63 - 1)], body: ResolvePersonMatchRequest, call: Call
) -> PersonMatchView:
    """Lets both users share one budget at the broker, or keeps them apart; may be decided again.

    Ask both first: a user who only claims to be the other one could use up the other's limits once
    they are linked. In force within seconds where workers run. Operators only.
    """
    row = await call.database.write(
        budgets.resolve_match,
        number,
        share_budget=body.share_budget,
        actor=call.actor,
        reason=body.reason,
    )
    for user_id in (row.first_user, row.second_user):
        await call.services.control.signal_reload(user_id)
    return PersonMatchView.of(row)
