"""Orders that nobody can settle but a person: the list, another try, the end."""

from __future__ import annotations

from typing import Annotated
from uuid import UUID

from fastapi import APIRouter, Query

from api import problems
from api.auth import Caller, require_staff
from api.errors import BodyTooLarge, Forbidden
from api.routes.services import InServices
from api.schemas.attention import AttentionPage, ResolveOrder, WaitingOrder
from api.schemas.order_list import cursor_of, position_of
from api.schemas.orders import Order
from api.services.orders import view_of
from infra.database import attention, models, orders
from infra.database.attention import OrderSettled, Resolution, ResolutionInvalid
from infra.database.orders import OrderNotFound

router = APIRouter(tags=["orders"])


@router.get("/attention", summary="Orders that wait for a person", responses=problems.responses(Forbidden))
async def list_attention(
    caller: Caller,
    services: InServices,
    cursor: Annotated[
        str | None,
        Query(pattern=r"^[A-Za-z0-9_-]+$", max_length=64, description="`next_cursor` of the page before."),
    ] = None,
    limit: Annotated[int, Query(ge=1, le=500, description="Most orders of one page.")] = 100,
) -> AttentionPage:
    """Orders of all users whose outcome nobody but a person can find out, with the whole story.

    An order leaves the list when it is final: by `resolve`, by a recheck, or when the broker tells of it
    after all. Operators only.
    """
    require_staff(caller)
    behind = position_of(cursor) if cursor is not None else None
    async with services.database.session() as session:
        rows = await attention.waiting(session, after=behind, limit=limit + 1)
    more, rows = len(rows) > limit, rows[:limit]
    found = [_waiting(row) for row in rows]
    end = cursor_of((found[-1].attention_at, rows[-1].id)) if more else None
    return AttentionPage(orders=found, next_cursor=end)


@router.post(
    "/orders/{order_id}/recheck",
    status_code=202,
    summary="Ask the broker again",
    responses=problems.responses(OrderNotFound, OrderSettled),
)
async def recheck_order(order_id: UUID, caller: Caller, services: InServices) -> Order:
    """Has an order that is not final looked at again, at once: at the broker, through the user's worker.

    It stays on the list for a person until it is settled. Another user's order is not found.
    """
    async with services.database.session() as session:
        row = await orders.get(session, order_id)
        if not caller.may_see(row.user_id):
            raise OrderNotFound(f"there is no order {order_id}")
        row = await attention.recheck(session, order_id, actor=f"key:{caller.key_id}")
    return view_of(row)


@router.post(
    "/orders/{order_id}/resolve",
    summary="End an order by hand",
    responses=problems.responses(OrderNotFound, Forbidden, OrderSettled, ResolutionInvalid, BodyTooLarge),
)
async def resolve_order(order_id: UUID, body: ResolveOrder, caller: Caller, services: InServices) -> Order:
    """Writes down how an order ended that is not final. It is final then, whatever is told of it later.

    Nothing is changed at the broker: find out there first. Operators only; it stands in the audit trail.
    """
    require_staff(caller)
    found = Resolution(
        state=body.state,
        filled_quantity=body.filled_quantity,
        average_price=body.average_price,
        reason=body.reason,
    )
    async with services.database.session() as session:
        row = await attention.resolve(session, order_id, found, actor=f"key:{caller.key_id}")
    return view_of(row)


def _waiting(row: models.Order) -> WaitingOrder:
    shown = view_of(row).model_dump()
    return WaitingOrder.model_validate({**shown, "attention_at": row.attention_at, "known_state": row.state})
