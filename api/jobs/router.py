"""Routes for jobs: a user's own; for operators those of the fleet, and the limits of job types."""

from __future__ import annotations

from dataclasses import asdict
from typing import Annotated
from uuid import uuid4

from fastapi import APIRouter, Path, Query, Response
from redis.asyncio import Redis

from api.container import InServices
from api.http import problems
from api.http.auth import Caller, require_staff
from api.http.errors import Forbidden, NotFound, TooManyJobs, ValkeyUnavailable
from api.http.fields import ID_PATTERN, UserIdInPath
from api.jobs import schemas
from api.jobs.schemas import FleetJobRequest, JobStateView, MailJobRequest, UserJobRequest, WebhookJobRequest
from api.orders import export
from infra.jobs import limits as job_limits
from infra.jobs.client import JobIdReused
from infra.jobs.limits import JobLimits
from worker_runtime.jobs.protocol import catalog
from worker_runtime.jobs.protocol import keys as job_keys
from worker_runtime.jobs.protocol.catalog import TooManyOrders
from worker_runtime.protocol.errors import UnknownAccount

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
    responses=problems.responses(
        NotFound,
        TooManyJobs,
        TooManyOrders,
        UnknownAccount,
        JobIdReused,
        ValkeyUnavailable,
    ),
)
async def put_user_job(
    user_id: UserIdInPath, body: UserJobRequest, caller: Caller, services: InServices
) -> JobStateView:
    """Runs beside the user's session, in a process of its own; the worker is started if there is none.

    Statement and export are made of the orders as they are now: about 700 fit into one job, `orders.csv` has
    no limit. With a `job_id` the same call is done once; another one under that id is refused within a day,
    and as long as the job is there.
    """
    await services.require_known_user(caller, user_id)
    return await services.jobs.enqueue_user_job(user_id, body.job)


@router.get(
    "/users/{user_id}/jobs/{job_id}",
    summary="Look at a user's job",
    responses=problems.responses(NotFound, ValkeyUnavailable),
)
async def get_user_job(
    user_id: UserIdInPath, job_id: JobIdInPath, caller: Caller, services: InServices, seconds: Seconds = 0.0
) -> JobStateView:
    """Its state and its result. With `wait`, as soon as it has ended. Results are kept for 500 s."""
    await services.require_known_user(caller, user_id)
    return await services.jobs.get_job(job_id, job_keys.user_tag(user_id), seconds)


@router.get(
    "/users/{user_id}/jobs/{job_id}/file",
    summary="Fetch an export",
    response_class=Response,
    responses={
        **problems.content("CSV (RFC 4180) with a header, the newest first.", "text/csv"),
        **problems.responses(NotFound, ValkeyUnavailable),
    },
)
async def get_user_file(
    user_id: UserIdInPath, job_id: JobIdInPath, caller: Caller, services: InServices
) -> Response:
    """The file that an `order_export` made."""
    await services.require_known_user(caller, user_id)
    data = await services.jobs.file(job_id, job_keys.user_tag(user_id))
    return Response(data, media_type=export.MEDIA_TYPE, headers=export.headers(user_id))


@router.post(
    "/users/{user_id}/jobs/{job_id}/cancel",
    summary="Cancel a user's job",
    responses=problems.responses(NotFound, ValkeyUnavailable),
)
async def cancel_user_job(
    user_id: UserIdInPath, job_id: JobIdInPath, caller: Caller, services: InServices
) -> JobStateView:
    """Ends a job that waits; has one that runs killed (`cancelling` until then). What has ended stays so."""
    await services.require_known_user(caller, user_id)
    return await services.jobs.cancel(job_id, job_keys.user_tag(user_id))


@router.post(
    "/jobs",
    summary="Enqueue a job of the fleet",
    status_code=202,
    responses=problems.responses(Forbidden, JobIdReused, ValkeyUnavailable),
)
async def put_fleet_job(body: FleetJobRequest, caller: Caller, services: InServices) -> JobStateView:
    """A webhook, a mail or a ping. With a `job_id` the same call is done once."""
    require_staff(caller)
    job = body.job
    job_id = job.job_id or str(uuid4())
    about: dict[str, str] = {"type": job.type}
    if isinstance(job, WebhookJobRequest | MailJobRequest):
        about["recipient"] = job.to if isinstance(job, MailJobRequest) else job.recipient
    await services.audit_request(caller, "job.requested", "fleet", job_id=job_id, **about)
    return await services.jobs.enqueue_fleet_job(body, job_id)


@router.get(
    "/jobs/{job_id}",
    summary="Look at a job of the fleet",
    responses=problems.responses(Forbidden, NotFound, ValkeyUnavailable),
)
async def get_fleet_job(
    job_id: JobIdInPath, caller: Caller, services: InServices, seconds: Seconds = 0.0
) -> JobStateView:
    """Its state and its result. With `wait`, as soon as it has ended. Results are kept for 500 s."""
    require_staff(caller)
    return await services.jobs.get_job(job_id, job_keys.FLEET_TAG, seconds)


@router.post(
    "/jobs/{job_id}/cancel",
    summary="Cancel a job of the fleet",
    responses=problems.responses(Forbidden, NotFound, ValkeyUnavailable),
)
async def cancel_fleet_job(job_id: JobIdInPath, caller: Caller, services: InServices) -> JobStateView:
    """Ends a job that waits; has one that runs killed (`cancelling` until then). What has ended stays so."""
    require_staff(caller)
    await services.audit_request(caller, "job.cancel_requested", "fleet", job_id=job_id)
    return await services.jobs.cancel(job_id, job_keys.FLEET_TAG)


limit_router = APIRouter(prefix="/job-limits", tags=["jobs"])

JobType = Annotated[str, Path(pattern=r"^[a-z0-9][a-z0-9_.-]*$", max_length=64, examples=["webhook"])]
_KNOWN = {kind.name for kind in catalog.JOB_KINDS.values()}


@limit_router.get(
    "",
    summary="Look at limits of job types",
    responses=problems.responses(Forbidden, ValkeyUnavailable),
)
async def get_job_limits(caller: Caller, services: InServices) -> schemas.JobLimitsList:
    """Every type of job, also those without limits."""
    require_staff(caller)
    found = await job_limits.read_limits(services.valkey)
    names = sorted(_KNOWN | found.keys())
    shown = [await _limits_view(services.valkey, name, found.get(name, JobLimits())) for name in names]
    return schemas.JobLimitsList(limits=shown)


@limit_router.put(
    "/{job_type}",
    summary="Set limits of a job type",
    responses=problems.responses(Forbidden, NotFound, ValkeyUnavailable),
)
async def put_job_limits(
    job_type: JobType, body: schemas.JobLimitsRequest, caller: Caller, services: InServices
) -> schemas.JobLimitsView:
    """Sets all of them: they hold from the next claim on. Running jobs go on, and a job that waits for a
    time of its own keeps it. They stand in Valkey, and go with its data."""
    require_staff(caller)
    if job_type not in _KNOWN:
        raise NotFound
    limits = JobLimits(**body.model_dump(exclude={"reason"}))
    subject = f"job-type:{job_type}"
    await services.audit_request(caller, "job_limits.set", subject, reason=body.reason, **asdict(limits))
    await job_limits.put_limits(services.valkey, job_type, limits)
    return await _limits_view(services.valkey, job_type, limits)


async def _limits_view(client: Redis, name: str, limits: JobLimits) -> schemas.JobLimitsView:
    return schemas.JobLimitsView(
        type=name, running_now=await job_limits.count_running(client, name), **asdict(limits)
    )
