"""All workers at a glance, for operators."""

from __future__ import annotations

from typing import Annotated

from fastapi import APIRouter, Query, Response, status

from api import problems
from api.auth import Caller, require_staff
from api.errors import (
    BodyTooLarge,
    Forbidden,
    NoMaintenance,
    OrchestratorUnavailable,
    TemporalUnavailable,
)
from api.routes.services import InServices
from api.schemas.fields import ID_PATTERN
from api.schemas.fleet import Fleet, FleetView, MaintenancePass, MaintenanceRun
from api.schemas.workers import Why
from infra.database import audit, maintenance
from infra.database.engine import DatabaseUnavailable
from workflows.maintenance_messages import Maintained, Scanned
from workflows.messages import WorkerState

router = APIRouter(tags=["workers"])


@router.get(
    "/fleet",
    summary="Show the fleet's last maintenance",
    responses=problems.responses(Forbidden, DatabaseUnavailable),
)
async def show_fleet(caller: Caller, services: InServices) -> FleetView:
    """When maintenance last looked at all workers, what it found, and what it did. For operators."""
    require_staff(caller)
    async with services.database.session(autocommit=True) as session:
        last = await maintenance.shown(session)
    if last is None:
        return FleetView(maintenance=None)
    shown = MaintenancePass(
        began_at=last.began_at,
        workers=last.scanned,
        found=last.found,
        outcomes=last.outcomes,
        guarded=last.guarded or None,
        scan_seconds=round(last.scan_seconds, 3),
        total_seconds=None if last.total_seconds is None else round(last.total_seconds, 3),
    )
    return FleetView(maintenance=shown)


PassWait = Annotated[float, Query(ge=0, le=120, allow_inf_nan=False, description="Seconds to wait for it.")]


@router.post(
    "/fleet/maintenance",
    summary="Run maintenance now",
    responses={
        202: {"model": MaintenanceRun, "description": "The pass takes longer than `wait` seconds."},
        **problems.responses(
            Forbidden, BodyTooLarge, NoMaintenance, OrchestratorUnavailable, TemporalUnavailable
        ),
    },
)
async def run_maintenance(
    caller: Caller,
    services: InServices,
    response: Response,
    body: Why | None = None,
    wait: PassWait = 60.0,
) -> MaintenanceRun:
    """One pass, or the one under way, guards and all: what an earlier look has seen, too, is cleaned up."""
    require_staff(caller)
    async with services.database.session() as session:
        audit.append(
            session,
            actor=f"key:{caller.key_id}",
            action="maintenance.run_requested",
            subject="fleet",
            reason=(body or Why()).reason,
        )
    done = await services.upkeep.run(wait)
    if done is None:
        response.status_code = status.HTTP_202_ACCEPTED
        done = Maintained(scanned=Scanned(number=0), outcomes={})
    seen = done.scanned
    return MaintenanceRun(
        ended=response.status_code is None,
        workers=seen.workers,
        found=seen.found,
        confirmed=seen.confirmed,
        outcomes=done.outcomes,
        guarded=seen.guarded or None,
    )


State = Annotated[WorkerState | None, Query(description="Only workers in this state.")]
UserPrefix = Annotated[
    str | None, Query(pattern=ID_PATTERN, max_length=64, description="Only users whose id begins like that.")
]
Limit = Annotated[int, Query(ge=1, le=1000, description="Most rows of a page.")]
Cursor = Annotated[str | None, Query(max_length=4096, description="`next_cursor` of the page before.")]


@router.get(
    "/workers",
    summary="List running workers",
    responses=problems.responses(Forbidden, TemporalUnavailable),
)
async def list_workers(
    caller: Caller,
    services: InServices,
    state: State = None,
    user_id: UserPrefix = None,
    limit: Limit = 100,
    cursor: Cursor = None,
) -> Fleet:
    """Users whose workflow runs, the one started last first. For operators and administrators.

    It comes from Temporal's index, which is a moment behind: `GET /v1/users/{user_id}/worker` is exact.
    """
    require_staff(caller)
    return await services.fleet.page(state=state, user_prefix=user_id, limit=limit, cursor=cursor)
