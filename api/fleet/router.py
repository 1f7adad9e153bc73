"""Routes for operators: the fleet, maintenance, metrics. And health, which needs no key."""

import asyncio
from contextlib import suppress
from dataclasses import asdict
from datetime import UTC, date, datetime, timedelta
from typing import Annotated

from fastapi import APIRouter, Query, Response

from api.container import Call, InServices, KnownUserId
from api.fleet import schemas
from api.http import errors, problems
from api.http.fields import Rows, UserPrefix
from infra import metrics
from infra.database import reports, startup
from infra.database.engine import outages_named
from infra.database.reports import FiguresTooSlow, ReportNotFound
from infra.database.users import UserNotFound
from infra.database.workers import passes
from workflows.maintenance.messages import Maintained, Scanned
from workflows.user_worker.messages import WorkerState

router = APIRouter(tags=["workers"])


@router.get("/fleet", summary="Get the fleet's state and its last maintenance")
async def show_fleet(call: Call) -> schemas.FleetView:
    """Counts workers by state, and says when maintenance last scanned them all, what it found and
    did. For operators."""
    states: dict[str, int] | None = None
    with suppress(errors.TemporalUnavailable):
        states = {
            state.value: count
            for state, count in (await call.services.fleet.count_by_state()).items()
        }
    last = await call.database.fetch(passes.pass_summary)
    shown = schemas.MaintenancePassView.model_validate(last) if last else None
    return schemas.FleetView(states=states, maintenance=shown)


@router.get("/fleet/primary", summary="Get the primary among the API processes")
async def show_primary(call: Call) -> schemas.PrimaryView:
    """Names the process that runs one-time tasks, and the tasks so far. For operators."""
    async with call.database.session(autocommit=True) as session:
        holder, tasks = (
            await startup.read_holder(session),
            await startup.list_startup_tasks(session),
        )
    return schemas.PrimaryView.model_validate({**holder._asdict(), "tasks": tasks})


@router.get("/fleet/servers", summary="List the health of every server")
async def list_servers(call: Call) -> schemas.ServerList:
    """Covers PostgreSQL, Valkey, Temporal and the paper exchange, as this process reaches them;
    orchestrators, by their last poll (one that died is `up` for 90 s at most); and the launcher, as
    the last pass of maintenance found it. Also covers the pool's workflow, the schedules, and
    workflows that somebody ended or paused in Temporal: what was ended is rebuilt within a minute.
    For operators."""
    return schemas.ServerList(servers=await call.services.readiness.list_servers())


@router.get("/fleet/maintenance", summary="List passes of maintenance")
async def list_passes(
    call: Call,
    odd: Annotated[
        bool,
        Query(description="Only those that found something, or did nothing for want of trust."),
    ] = False,
    limit: Rows = 100,
) -> schemas.MaintenancePassList:
    """Shows what the passes of the last two weeks found and did, the newest first. For
    operators."""
    rows = await call.database.fetch(passes.list_passes, odd=odd, limit=limit)
    return schemas.MaintenancePassList(
        passes=[schemas.MaintenancePassView.model_validate(row) for row in rows]
    )


PassWait = Annotated[
    float, Query(ge=0, le=120, allow_inf_nan=False, description="Seconds to wait for it.")
]


@router.post(
    "/fleet/maintenance",
    summary="Run maintenance now",
    responses={
        202: problems.answer(
            schemas.MaintenanceRunView, "The pass takes longer than `wait` seconds."
        ),
        **problems.responses(
            errors.NoMaintenance, errors.OrchestratorUnavailable, errors.TemporalUnavailable
        ),
    },
)
async def run_maintenance(
    call: Call,
    response: Response,
    body: schemas.MaintenanceRequest | None = None,
    wait: PassWait = 60.0,
) -> schemas.MaintenanceRunView:
    """Waits for a pass that is already running instead of starting another. All guards apply. The
    pass also cleans up what an earlier scan has found.

    With `override_guard` it acts though so much looks odd at once that it may be an outage.
    """
    asked = body or schemas.MaintenanceRequest()
    action = "maintenance.guard_overridden" if asked.override_guard else "maintenance.run_requested"
    await call.audit(action, "fleet", reason=asked.reason)
    done = await call.services.maintenance.run_pass(wait, override_guard=asked.override_guard)
    if done is None:
        response.status_code = 202
        done = Maintained(scanned=Scanned(number=0), outcomes={})
    about = {"ended": response.status_code is None, "outcomes": done.outcomes}
    return schemas.MaintenanceRunView.model_validate(asdict(done.scanned) | about)


ReportDay = Annotated[date | None, Query(description="Like `2026-11-20`; by default the latest.")]
Days = Annotated[int, Query(ge=1, le=90, description="Days until now.")]


@router.get(
    "/reports/daily", summary="Get a daily report", responses=problems.responses(ReportNotFound)
)
async def show_report(call: Call, day: ReportDay = None) -> schemas.ReportView:
    """Covers one trading day: users, orders by outcome, lots, latencies, claims and failures. For
    operators."""
    return schemas.ReportView.model_validate(await call.database.fetch(reports.get_report, day))


@router.get(
    "/users/{user_id}/statistics",
    summary="Get a user's statistics",
    responses=problems.responses(UserNotFound, FiguresTooSlow),
)
async def show_statistics(user_id: KnownUserId, call: Call, days: Days = 30) -> schemas.ReportView:
    """Has the figures of the daily report for one user and the last days. A process answers one
    such request at a time."""
    until = datetime.now(UTC)
    since = until - timedelta(days=days)
    with outages_named():
        async with call.services.statistics, call.database.session() as session:
            figures = await reports.read_figures(session, since, until, user_id)
    return schemas.ReportView(since=since, until=until, figures=figures)


State = Annotated[WorkerState | None, Query(description="Only workers in this state.")]
Cursor = Annotated[
    str | None, Query(max_length=4096, description="`next_cursor` of the page before.")
]


@router.get(
    "/workers",
    summary="List running workers",
    responses=problems.responses(errors.TemporalUnavailable),
)
async def list_workers(
    call: Call,
    state: State = None,
    user_id: UserPrefix = None,
    limit: Rows = 100,
    cursor: Cursor = None,
) -> schemas.FleetPage:
    """Names each user whose workflow runs, the one started last first. For operators and
    administrators.

    It comes from Temporal's index, which is a moment behind:
    `GET /v1/users/{user_id}/worker` is exact.
    """
    return await call.services.fleet.page(
        state=state, user_prefix=user_id, limit=limit, cursor=cursor
    )


metrics_router = APIRouter(tags=["fleet"])


@metrics_router.get(
    "/metrics",
    summary="Get the metrics of the fleet and its jobs",
    response_class=Response,
    responses={
        **problems.content("Prometheus' text format.", "text/plain"),
        **problems.responses(errors.ValkeyUnavailable, errors.TemporalUnavailable),
    },
)
async def get_metrics(call: Call) -> Response:
    """Combines what PostgreSQL, Valkey and Temporal know of workers, orders and jobs with the
    counts of this API's processes: requests, orders, waits. For operators' keys. Values from a
    server that is down are left out, and a key that this process knows needs no PostgreSQL. A
    process that does not answer within a second is counted as it was last heard, and is missing in
    `berth_api_processes_answered`."""
    page = metrics.MetricsPage()
    async with asyncio.TaskGroup() as group:
        gathering = group.create_task(call.services.counts.gather())
        await call.services.write_metrics(page)
    counts = gathering.result()
    page.add("berth_api_processes", counts.processes)
    page.add("berth_api_processes_answered", counts.answered)
    page.add("berth_api_processes_died_total", counts.died)
    return Response(page.text(counts.counted), media_type=metrics.MEDIA_TYPE)


health_router = APIRouter(tags=["health"])


@health_router.get("/healthz", summary="Check that this process is alive")
async def healthz() -> schemas.AliveView:
    """Asks nobody else: a failing database is no reason to restart the API."""
    return schemas.AliveView()


@health_router.get(
    "/readyz",
    summary="Check that this process can work",
    responses={
        503: problems.answer(
            schemas.ReadinessView, "A server cannot be used; its `reason` says why."
        )
    },
)
async def readyz(services: InServices, response: Response) -> schemas.ReadinessView:
    """Tries PostgreSQL, Valkey and Temporal; answers 503 if one of them is down.

    A Valkey that answers, but refuses to write, is down, too.

    Not ready is not useless: orders of users with a live worker need no Temporal.
    """
    readiness = await services.readiness.check()
    if not readiness.ready:
        response.status_code = 503
    return readiness
