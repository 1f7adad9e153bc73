"""Routes for what waits for a person:
orders of unknown outcome, and differences with the broker."""

from typing import Annotated
from uuid import UUID

from fastapi import APIRouter, Path, Query

from api.attention.schemas import (
    AttentionOrderView,
    AttentionPage,
    CertificateList,
    CertificateView,
    PersonMatchList,
    PersonMatchView,
    ReconciliationList,
    ReconciliationView,
    ResolveOrderRequest,
    ResolvePersonMatchRequest,
    ResolveReconciliationRequest,
)
from api.container import Call, KnownUserId
from api.http import problems
from api.orders.outcomes import view_of
from api.orders.router import own_order
from api.orders.schemas import (
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

router = APIRouter(tags=["orders"])

Most = Annotated[int, Query(ge=1, le=500, description="Most of them.")]


@router.get("/attention", summary="List orders that wait for an operator")
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
    """Shows orders whose outcome only an operator can find out, of all users, with every step.

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
    summary="Check an order at the broker again",
    responses=problems.responses(OrderNotFound, attention.OrderSettled),
)
async def recheck_order(order_id: UUID, call: Call) -> OrderView:
    """Asks at once, through the user's worker, about an order that is not final.

    It stays on the list for a person until it is settled. Another user's order is not found.
    """
    await own_order(call, order_id)
    row = await call.database.write(attention.recheck_order, order_id, actor=call.actor)
    return view_of(row)


@router.post(
    "/orders/{order_id}/resolve",
    summary="Settle an order by hand",
    responses=problems.responses(
        OrderNotFound, attention.OrderSettled, attention.ResolutionInvalid
    ),
)
async def resolve_order(order_id: UUID, body: ResolveOrderRequest, call: Call) -> OrderView:
    """Records how an order ended that is not final. The order is final then, whatever is reported
    later.

    Nothing is changed at the broker: find out there first. Operators only; kept in the audit trail.
    """
    resolution = attention.Resolution(**body.model_dump())
    row = await call.database.write(attention.resolve_order, order_id, resolution, actor=call.actor)
    return view_of(row)


def _attention_view(row: models.Order) -> AttentionOrderView:
    step = attention.next_step(row)
    details = {"attention_at": row.attention_at, "known_state": row.state, "next_step": step}
    return AttentionOrderView.model_validate(view_of(row).model_dump() | details)


@router.get("/users/{user_id}/reconciliations", summary="List a user's differences from the broker")
async def list_reconciliations(
    user_id: KnownUserId, call: Call, limit: Most = 100
) -> ReconciliationList:
    """Shows what comparisons after logins found between our books and the broker's, the open ones
    first.

    A comparison closes what it shows to be in order again. An order that is not ours stays until an
    operator closes it, and what is under way in a symbol leaves its positions as they were.
    """
    rows = await call.database.fetch(reconciliations.reconciliations_of_user, user_id, limit=limit)
    return ReconciliationList(
        reconciliations=[ReconciliationView.model_validate(row) for row in rows]
    )


@router.get("/reconciliations", summary="List open differences of all users")
async def list_open_reconciliations(
    call: Call,
    after: Annotated[
        int, Query(ge=0, le=2**63 - 1, description="Number of the last one known.")
    ] = 0,
    limit: Most = 100,
) -> ReconciliationList:
    """Sorts them from the oldest to the newest. Operators only."""
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
    """Lets an account that it blocked take orders again. Operators only.

    What is closed is known from then on: the same orders and the same lots are no difference again.
    """
    row = await call.database.write(
        reconciliations.resolve_reconciliation, number, actor=call.actor, reason=body.reason
    )
    return ReconciliationView.model_validate(row)


@router.get("/person-matches", summary="List users who log in as one person")
async def list_person_matches(
    call: Call,
    resolved: Annotated[bool, Query(description="Also those that were decided.")] = False,
    after: Annotated[
        int, Query(ge=0, le=2**63 - 1, description="Number of the last one known.")
    ] = 0,
    limit: Most = 100,
) -> PersonMatchList:
    """Shows pairs of users whose logins name the same person at one broker, which counts both
    together. Berth counts each user apart until an operator decides. Operators only."""
    rows = await call.database.fetch(
        budgets.list_matches, resolved=resolved, after=after, limit=limit
    )
    return PersonMatchList(person_matches=[PersonMatchView.of(row) for row in rows])


@router.get("/certificates", summary="List certificates that expire")
async def list_certificates(
    call: Call,
    within_days: Annotated[
        int, Query(ge=0, le=3650, description="0: those that have expired.")
    ] = 30,
    limit: Most = 100,
) -> CertificateList:
    """Shows certificates of live accounts that have expired or expire soon, the soonest first.
    Their users are warned 30, 7 and 1 days ahead, and orders are refused once one has expired.
    Operators only."""
    rows = await call.database.fetch(
        certificates.list_certificates, within_days=within_days, limit=limit
    )
    return CertificateList(certificates=[CertificateView.model_validate(row) for row in rows])


@router.post(
    "/person-matches/{number}/resolve",
    summary="Decide whether two users are one person",
    responses=problems.responses(budgets.PersonMatchNotFound),
)
async def resolve_person_match(
    number: Annotated[int, Path(ge=1, le=2**63 - 1)], body: ResolvePersonMatchRequest, call: Call
) -> PersonMatchView:
    """Lets both users share one budget at the broker, or counts them apart. The decision can be
    changed.

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
