"""Routes for what waits for a person: orders of unknown outcome, and differences with the broker."""

from __future__ import annotations

from typing import Annotated
from uuid import UUID

from fastapi import APIRouter, Path, Query

from api.attention import schemas
from api.container import InServices
from api.http import problems
from api.http.auth import Caller, require_staff
from api.http.errors import Forbidden, NotFound
from api.http.fields import UserIdInPath
from api.orders.outcomes import view_of
from api.orders.router import own_order
from api.orders.schemas import OrderView, PageCursor, PageLimit, cursor_of, position_of
from infra.database import models
from infra.database.orders import attention
from infra.database.orders.attention import OrderSettled, Resolution, ResolutionInvalid
from infra.database.orders.states import OrderNotFound
from infra.database.trading import reconciliations
from infra.database.trading.reconciliations import ReconciliationNotFound

router = APIRouter(tags=["orders"])

Most = Annotated[int, Query(ge=1, le=500, description="Most of them.")]


@router.get("/attention", summary="Orders that wait for a person", responses=problems.responses(Forbidden))
async def list_attention(
    caller: Caller, services: InServices, cursor: PageCursor = None, limit: PageLimit = 100
) -> schemas.AttentionPage:
    """Orders of all users whose outcome nobody but a person can find out, with the whole story.

    An order leaves the list when it is final: by `resolve`, by a recheck, or when the broker tells of it
    after all. Operators only.
    """
    require_staff(caller)
    behind = position_of(cursor) if cursor is not None else None
    async with services.database.session() as session:
        rows = await attention.orders_for_a_person(session, after=behind, limit=limit + 1)
    more, rows = len(rows) > limit, rows[:limit]
    found = [_attention_view(row) for row in rows]
    end = cursor_of((found[-1].attention_at, rows[-1].id)) if more else None
    return schemas.AttentionPage(orders=found, next_cursor=end)


@router.post(
    "/orders/{order_id}/recheck",
    status_code=202,
    summary="Ask the broker again",
    responses=problems.responses(OrderNotFound, OrderSettled),
)
async def recheck_order(order_id: UUID, caller: Caller, services: InServices) -> OrderView:
    """Has an order that is not final looked at again, at once: at the broker, through the user's worker.

    It stays on the list for a person until it is settled. Another user's order is not found.
    """
    await own_order(services, caller, order_id)
    async with services.database.session() as session:
        row = await attention.recheck_order(session, order_id, actor=caller.actor)
    return view_of(row)


@router.post(
    "/orders/{order_id}/resolve",
    summary="End an order by hand",
    responses=problems.responses(OrderNotFound, Forbidden, OrderSettled, ResolutionInvalid),
)
async def resolve_order(
    order_id: UUID, body: schemas.ResolveOrderRequest, caller: Caller, services: InServices
) -> OrderView:
    """Writes down how an order ended that is not final. It is final then, whatever is reported later.

    Nothing is changed at the broker: find out there first. Operators only; it stands in the audit trail.
    """
    require_staff(caller)
    found = Resolution(**body.model_dump())
    async with services.database.session() as session:
        row = await attention.resolve_order(session, order_id, found, actor=caller.actor)
    return view_of(row)


def _attention_view(row: models.Order) -> schemas.AttentionOrderView:
    more = {"attention_at": row.attention_at, "known_state": row.state}
    return schemas.AttentionOrderView.model_validate(view_of(row).model_dump() | more)


@router.get(
    "/users/{user_id}/reconciliations",
    summary="Differences with the broker",
    responses=problems.responses(NotFound),
)
async def list_reconciliations(
    user_id: UserIdInPath,
    caller: Caller,
    services: InServices,
    limit: Most = 100,
) -> schemas.ReconciliationList:
    """What comparisons of our books with the broker's found after logins; the open ones first.

    A comparison closes what it shows to be in order again. An order that is not ours stays until an operator
    closes it, and what is under way in a symbol leaves its positions as they were.
    """
    await services.require_known_user(caller, user_id)
    async with services.database.session() as session:
        rows = await reconciliations.reconciliations_of_user(session, user_id, limit=limit)
    return schemas.ReconciliationList(
        reconciliations=[schemas.ReconciliationView.model_validate(row) for row in rows]
    )


@router.get(
    "/reconciliations", summary="Differences that wait for a person", responses=problems.responses(Forbidden)
)
async def list_open_reconciliations(
    caller: Caller,
    services: InServices,
    after: Annotated[int, Query(ge=0, le=2**63 - 1, description="Number of the last one known.")] = 0,
    limit: Most = 100,
) -> schemas.ReconciliationList:
    """The open ones of all users, the oldest first. Operators only."""
    require_staff(caller)
    async with services.database.session() as session:
        rows = await reconciliations.open_reconciliations(session, after=after, limit=limit)
    return schemas.ReconciliationList(
        reconciliations=[schemas.ReconciliationView.model_validate(row) for row in rows]
    )


@router.post(
    "/reconciliations/{number}/resolve",
    summary="Close a difference",
    responses=problems.responses(ReconciliationNotFound, Forbidden),
)
async def resolve_reconciliation(
    number: Annotated[int, Path(ge=1, le=2**63 - 1)],
    body: schemas.ResolveReconciliationRequest,
    caller: Caller,
    services: InServices,
) -> schemas.ReconciliationView:
    """Closes an open difference; an account that it blocked takes orders again. Operators only.

    What is closed is known from then on: the same orders and the same lots are no difference again.
    """
    require_staff(caller)
    async with services.database.session() as session:
        row = await reconciliations.resolve_reconciliation(
            session, number, actor=caller.actor, reason=body.reason
        )
    return schemas.ReconciliationView.model_validate(row)
