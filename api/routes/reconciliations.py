"""Differences between our books and the broker's: looked at, and closed."""

from __future__ import annotations

from typing import Annotated

from fastapi import APIRouter, Path, Query

from api import problems
from api.auth import Caller, require_staff
from api.errors import BodyTooLarge, Forbidden, NotFound
from api.routes.services import InServices
from api.routes.workers import known
from api.schemas.fields import UserIdInPath
from api.schemas.reconciliations import Reconciliation, Reconciliations, ResolveReconciliation
from infra.database import reconciliations
from infra.database.reconciliations import ReconciliationNotFound

router = APIRouter(tags=["orders"])


@router.get(
    "/users/{user_id}/reconciliations",
    summary="Differences with the broker",
    responses=problems.responses(NotFound),
)
async def list_reconciliations(
    user_id: UserIdInPath,
    caller: Caller,
    services: InServices,
    limit: Annotated[int, Query(ge=1, le=500, description="Most of them.")] = 100,
) -> Reconciliations:
    """What comparisons of our books with the broker's found after logins; the open ones first.

    A comparison closes what it shows to be in order again. An order that is not ours stays until an operator
    closes it, and what is under way in a symbol leaves its positions as they were.
    """
    await known(services, caller, user_id)
    async with services.database.session() as session:
        rows = await reconciliations.of_user(session, user_id, limit=limit)
    return Reconciliations(reconciliations=[Reconciliation.model_validate(row) for row in rows])


@router.get(
    "/reconciliations", summary="Differences that wait for a person", responses=problems.responses(Forbidden)
)
async def list_waiting(
    caller: Caller,
    services: InServices,
    after: Annotated[int, Query(ge=0, le=2**63 - 1, description="Number of the last one known.")] = 0,
    limit: Annotated[int, Query(ge=1, le=500, description="Most of them.")] = 100,
) -> Reconciliations:
    """The open ones of all users, the oldest first. Operators only."""
    require_staff(caller)
    async with services.database.session() as session:
        rows = await reconciliations.waiting(session, after=after, limit=limit)
    return Reconciliations(reconciliations=[Reconciliation.model_validate(row) for row in rows])


@router.post(
    "/reconciliations/{number}/resolve",
    summary="Close a difference",
    responses=problems.responses(ReconciliationNotFound, Forbidden, BodyTooLarge),
)
async def resolve_reconciliation(
    number: Annotated[int, Path(ge=1, le=2**63 - 1)],
    body: ResolveReconciliation,
    caller: Caller,
    services: InServices,
) -> Reconciliation:
    """Closes an open difference; an account that it blocked takes orders again. Operators only.

    What is closed is known from then on: the same orders and the same lots are no difference again.
    """
    require_staff(caller)
    async with services.database.session() as session:
        row = await reconciliations.resolve(session, number, actor=f"key:{caller.key_id}", reason=body.reason)
    return Reconciliation.model_validate(row)
