"""Routes for operators: the fleet, maintenance, metrics. And health, which needs no key."""

from __future__ import annotations

from dataclasses import asdict
from typing import Annotated

from fastapi import APIRouter, Query, Response, status

from api.container import InServices
from api.fleet import schemas
from api.http import errors, problems
from api.http.auth import Caller, require_staff
from api.http.fields import ID_PATTERN
from api.workers.schemas import ReasonBody
from infra import metrics
from infra.database.engine import DatabaseUnavailable
from infra.database.workers import passes
from infra.jobs import metrics as job_metrics
from workflows.maintenance.messages import Maintained, Scanned
from workflows.user_worker.messages import WorkerState

router = APIRouter(tags=["workers"])


@router.get(
    "/fleet",
    summary="Show the fleet's last maintenance",
    responses=problems.responses(errors.Forbidden, DatabaseUnavailable),
)
async def show_fleet(caller: Caller, services: InServices) -> schemas.FleetView:
    """When maintenance last scanned all workers, what it found, and what it did. For operators."""
    require_staff(caller)
    async with services.database.session(autocommit=True) as session:
        last = await passes.pass_summary(session)
    if last is None:
        return schemas.FleetView(maintenance=None)
    shown = schemas.MaintenancePassView(
        began_at=last.began_at,
        workers=last.scanned,
        found=last.found,
        outcomes=last.outcomes,
        guarded=last.guarded,
        scan_seconds=round(last.scan_seconds, 3),
        total_seconds=None if last.total_seconds is None else round(last.total_seconds, 3),
    )
    return schemas.FleetView(maintenance=shown)


PassWait = Annotated[float, Query(ge=0, le=120, allow_inf_nan=False, description="Seconds to wait for it.")]


@router.post(
    "/fleet/maintenance",
    summary="Run maintenance now",
    responses={
        202: {
            "model": schemas.MaintenanceRunView,
            "description": "The pass takes longer than `wait` seconds.",
        },
        **problems.responses(
            errors.Forbidden, errors.NoMaintenance, errors.OrchestratorUnavailable, errors.TemporalUnavailable
        ),
    },
)
async def run_maintenance(
    caller: Caller,
    services: InServices,
    response: Response,
    body: ReasonBody | None = None,
    wait: PassWait = 60.0,
) -> schemas.MaintenanceRunView:
    """One pass, or the one under way, guards and all: what an earlier scan has found, too, is cleaned up."""
    require_staff(caller)
    reason = (body or ReasonBody()).reason
    await services.audit_request(caller, "maintenance.run_requested", "fleet", reason=reason)
    done = await services.maintenance.run_pass(wait)
    if done is None:
        response.status_code = status.HTTP_202_ACCEPTED
        done = Maintained(scanned=Scanned(number=0), outcomes={})
    about = {"ended": response.status_code is None, "outcomes": done.outcomes}
    return schemas.MaintenanceRunView.model_validate(asdict(done.scanned) | about)


State = Annotated[WorkerState | None, Query(description="Only workers in this state.")]
UserPrefix = Annotated[
    str | None, Query(pattern=ID_PATTERN, max_length=64, description="Only users whose id begins like that.")
]
Limit = Annotated[int, Query(ge=1, le=1000, description="Most rows of a page.")]
Cursor = Annotated[str | None, Query(max_length=4096, description="`next_cursor` of the page before.")]


@router.get(
    "/workers",
    summary="List running workers",
    responses=problems.responses(errors.Forbidden, errors.TemporalUnavailable),
)
async def list_workers(
    caller: Caller,
    services: InServices,
    state: State = None,
    user_id: UserPrefix = None,
    limit: Limit = 100,
    cursor: Cursor = None,
) -> schemas.FleetPage:
    """Users whose workflow runs, the one started last first. For operators and administrators.

    It comes from Temporal's index, which is a moment behind: `GET /v1/users/{user_id}/worker` is exact.
    """
    require_staff(caller)
    return await services.fleet.page(state=state, user_prefix=user_id, limit=limit, cursor=cursor)


metrics_router = APIRouter(tags=["fleet"])


@metrics_router.get(
    "/metrics",
    summary="Metrics of the fleet and its jobs",
    response_class=Response,
    responses={
        **problems.content("Prometheus' text format.", "text/plain"),
        **problems.responses(errors.Forbidden, DatabaseUnavailable, errors.ValkeyUnavailable),
    },
)
async def get_metrics(caller: Caller, services: InServices) -> Response:
    """Free workers and workers in use, claims, unsettled orders, the last maintenance; jobs: what waits,
    waits and run times, ends, late renewals. For operators' keys.
    """
    require_staff(caller)
    page = metrics.MetricsPage()
    async with services.database.session(autocommit=True) as session:
        await metrics.write_fleet_metrics(page, services.valkey, session, services.settings.pool)
    await job_metrics.write_job_metrics(page, services.valkey)
    return Response(page.text(), media_type=metrics.MEDIA_TYPE)


health_router = APIRouter(tags=["health"])


@health_router.get("/healthz", summary="Is this process alive?")
async def healthz() -> schemas.AliveView:
    """Asks nobody else: a failing database is no reason to restart the API."""
    return schemas.AliveView()


@health_router.get(
    "/readyz",
    summary="Can it do its work?",
    responses={
        503: {"model": schemas.ReadinessView, "description": "At least one server cannot be reached."}
    },
)
async def readyz(services: InServices, response: Response) -> schemas.ReadinessView:
    """The state of PostgreSQL, Valkey and Temporal; 503 when one of them is down.

    Not ready is not useless: orders of users with a live worker need no Temporal.
    """
    found = await services.readiness.check()
    if not found.ready:
        response.status_code = 503
    return found
