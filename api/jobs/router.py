"""Routes for jobs: a user's own; for operators those of the fleet, and the limits of job types."""

from dataclasses import asdict
from typing import Annotated
from uuid import uuid4

from fastapi import APIRouter, Path, Query, Response
from redis.asyncio import Redis

from api.container import Call, KnownUserId
from api.http import problems
from api.http.errors import Forbidden, NotFound, TooManyJobs, ValkeyUnavailable
from api.http.fields import ID_PATTERN
from api.http.rights import Role
from api.jobs import schemas
from api.jobs.schemas import FleetJobRequest, JobStateView, UserJobRequest
from api.orders import export
from api.orders.schemas import Bom
from infra.database.accounts import AccountNotFound
from infra.jobs import limits as job_limits
from infra.jobs.client import JobIdReused
from infra.jobs.limits import JobLimits
from worker_runtime.jobs.protocol import catalog
from worker_runtime.jobs.protocol.catalog import TooManyOrders

router = APIRouter(tags=["jobs"])

JobIdInPath = Annotated[str, Path(pattern=ID_PATTERN, max_length=64, examples=["statement-2026-11-20"])]
Seconds = Annotated[
    float,
    Query(alias="wait", ge=0, le=60, allow_inf_nan=False, description="Seconds to wait for the job to end."),
]


@router.post(
    "/users/{user_id}/jobs",
    summary="Enqueue a user's job",
    status_code=202,
    responses=problems.responses(TooManyJobs, TooManyOrders, AccountNotFound, JobIdReused, ValkeyUnavailable),
)
async def put_user_job(user_id: KnownUserId, body: UserJobRequest, call: Call) -> JobStateView:
    """Runs beside the user's session, in a process of its own; the worker is started if there is none.

    Statement and export are made of the orders as they are now: about 700 fit into one job, `orders.csv` has
    no limit. With a `job_id` the same call is done once; another one under that id is refused within a day,
    and as long as the job is there.
    """
    about = {"job_id": body.job.job_id, "type": body.job.type}

    async def note() -> None:
        await call.audit("job.requested", f"user:{user_id}", **about)

    return await call.services.jobs.enqueue_user_job(user_id, body.job, note)


@router.get(
    "/users/{user_id}/jobs/{job_id}",
    summary="Look at a user's job",
    responses=problems.responses(ValkeyUnavailable),
)
async def get_user_job(
    user_id: KnownUserId, job_id: JobIdInPath, call: Call, seconds: Seconds = 0.0
) -> JobStateView:
    """Its state and its result. With `wait`, as soon as it has ended. Results are kept for 500 s."""
    return await call.services.jobs.get_job(job_id, user_id, seconds)


@router.get(
    "/users/{user_id}/jobs/{job_id}/file",
    summary="Fetch an export",
    response_class=Response,
    responses={
        **problems.content(
            "CSV (RFC 4180) with a header, the newest first. Times are those of Taipei.", "text/csv"
        ),
        **problems.responses(ValkeyUnavailable),
    },
)
async def get_user_file(
    user_id: KnownUserId, job_id: JobIdInPath, call: Call, bom: Annotated[Bom, Query()] = False
) -> Response:
    """The file that an `order_export` made."""
    data = await call.services.jobs.file(job_id, user_id)
    if bom:
        data = export.for_spreadsheet(data, header=True)
    return Response(data, media_type=export.MEDIA_TYPE, headers=export.headers(user_id))


@router.post(
    "/users/{user_id}/jobs/{job_id}/cancel",
    summary="Cancel a user's job",
    responses=problems.responses(ValkeyUnavailable),
)
async def cancel_user_job(user_id: KnownUserId, job_id: JobIdInPath, call: Call) -> JobStateView:
    """Cancels a waiting job, or kills a running one (`cancelling` until then); an ended job stays as is."""
    await call.services.jobs.get_job(job_id, user_id)
    await call.audit("job.cancel_requested", f"user:{user_id}", job_id=job_id)
    return await call.services.jobs.cancel(job_id, user_id)


@router.post(
    "/jobs",
    summary="Enqueue a job of the fleet",
    status_code=202,
    responses=problems.responses(JobIdReused, ValkeyUnavailable),
)
async def put_fleet_job(body: FleetJobRequest, call: Call) -> JobStateView:
    """A ping, or for administrators a webhook, mail or message, which go out in our name. With a `job_id` the
    same call is done once."""
    job = body.job
    if job.type != "ping" and call.caller.role is not Role.ADMIN:
        raise Forbidden("only an administrator sends mails, messages and webhooks")
    job_id = job.job_id or str(uuid4())
    about: dict[str, str] = {"type": job.type}
    for recipient in job.model_dump(include={"to", "recipient", "token"}).values():
        about["recipient"] = recipient[:254]
    await call.audit("job.requested", "fleet", job_id=job_id, **about)
    return await call.services.jobs.enqueue_fleet_job(body, job_id)


@router.get(
    "/jobs/{job_id}",
    summary="Look at a job of the fleet",
    responses=problems.responses(NotFound, ValkeyUnavailable),
)
async def get_fleet_job(job_id: JobIdInPath, call: Call, seconds: Seconds = 0.0) -> JobStateView:
    """Its state and its result. With `wait`, as soon as it has ended. Results are kept for a day."""
    return await call.services.jobs.get_job(job_id, "", seconds)


@router.post(
    "/jobs/{job_id}/cancel",
    summary="Cancel a job of the fleet",
    responses=problems.responses(NotFound, ValkeyUnavailable),
)
async def cancel_fleet_job(job_id: JobIdInPath, call: Call) -> JobStateView:
    """Cancels a waiting job, or kills a running one (`cancelling` until then); an ended job stays as is."""
    await call.services.jobs.get_job(job_id)
    await call.audit("job.cancel_requested", "fleet", job_id=job_id)
    return await call.services.jobs.cancel(job_id)


JobType = Annotated[str, Path(pattern=r"^[a-z0-9][a-z0-9_.-]*$", max_length=64, examples=["webhook"])]
_KNOWN = {kind.name for kind in catalog.JOB_KINDS.values()}


@router.get(
    "/job-limits", summary="Look at limits of job types", responses=problems.responses(ValkeyUnavailable)
)
async def get_job_limits(call: Call) -> schemas.JobLimitsList:
    """Every type of job, also those without limits."""
    found = await job_limits.read_limits(call.services.valkey)
    names = sorted(_KNOWN | found.keys())
    shown = [await _limits_view(call.services.valkey, name, found.get(name, JobLimits())) for name in names]
    return schemas.JobLimitsList(limits=shown)


@router.put(
    "/job-limits/{job_type}",
    summary="Set limits of a job type",
    responses=problems.responses(NotFound, ValkeyUnavailable),
)
async def put_job_limits(
    job_type: JobType, body: schemas.JobLimitsRequest, call: Call
) -> schemas.JobLimitsView:
    """Sets all of them: they hold from the next claim on. Running jobs go on, and a job that waits for a
    time of its own keeps it."""
    if job_type not in _KNOWN:
        raise NotFound(f"there is no job type {job_type}; known: {', '.join(sorted(_KNOWN))}")
    limits = JobLimits(**body.model_dump(exclude={"reason"}))
    await call.audit("job_limits.set", f"job-type:{job_type}", reason=body.reason, **asdict(limits))
    await job_limits.put_limits(call.database, call.services.valkey, job_type, limits)
    return await _limits_view(call.services.valkey, job_type, limits)


async def _limits_view(client: Redis, name: str, limits: JobLimits) -> schemas.JobLimitsView:
    return schemas.JobLimitsView(
        type=name, running_now=await job_limits.count_running(client, name), **asdict(limits)
    )
