"""Jobs: a user's own, and for operators those of the fleet."""

from __future__ import annotations

from typing import Annotated
from uuid import uuid4

from fastapi import APIRouter, Path, Query, Response

from api import problems
from api.auth import Caller, Principal, require_staff
from api.errors import BodyTooLarge, Forbidden, NotFound, TooManyJobs, ValkeyUnavailable
from api.routes.services import InServices
from api.routes.workers import known
from api.schemas.fields import ID_PATTERN, UserIdInPath
from api.schemas.jobs import Job, NewDelivery, NewFleetJob, NewMail, NewUserJob
from api.services.container import Services
from infra.database import audit
from infra.job_desk import JobIdReused
from worker_runtime.protocol import job_keys
from worker_runtime.protocol.errors import UnknownAccount
from worker_runtime.protocol.job_work import TooManyOrders

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
        BodyTooLarge,
        ValkeyUnavailable,
    ),
)
async def put_user_job(user_id: UserIdInPath, body: NewUserJob, caller: Caller, services: InServices) -> Job:
    """Runs beside the user's session, in a process of its own; the worker is started if there is none.

    Statement and export are made of the orders as they are now: about 700 fit into one job, `orders.csv` has
    no limit. With a `job_id` the same call is done once; another one under that id is refused within a day,
    and as long as the job is there.
    """
    await known(services, caller, user_id)
    return await services.jobs.of_user(user_id, body.job)


@router.get(
    "/users/{user_id}/jobs/{job_id}",
    summary="Look at a user's job",
    responses=problems.responses(NotFound, ValkeyUnavailable),
)
async def get_user_job(
    user_id: UserIdInPath, job_id: JobIdInPath, caller: Caller, services: InServices, seconds: Seconds = 0.0
) -> Job:
    """Its state and its result. With `wait`, as soon as it has ended. Results are kept for 500 s."""
    await known(services, caller, user_id)
    return await services.jobs.look(job_id, job_keys.of_user(user_id), seconds)


@router.get(
    "/users/{user_id}/jobs/{job_id}/file",
    summary="Fetch an export",
    response_class=Response,
    responses={
        200: {
            "description": "CSV (RFC 4180) with a header, the newest first.",
            "content": {"text/csv": {"schema": {"type": "string"}}},
        },
        **problems.responses(NotFound, ValkeyUnavailable),
    },
)
async def get_user_file(
    user_id: UserIdInPath, job_id: JobIdInPath, caller: Caller, services: InServices
) -> Response:
    """The file that an `order_export` made."""
    await known(services, caller, user_id)
    data = await services.jobs.file(job_id, job_keys.of_user(user_id))
    headers = {
        "Content-Disposition": f'attachment; filename="orders-{user_id}.csv"',
        "Cache-Control": "no-store",
    }
    return Response(data, media_type="text/csv; charset=utf-8; header=present", headers=headers)


@router.post(
    "/users/{user_id}/jobs/{job_id}/cancel",
    summary="Cancel a user's job",
    responses=problems.responses(NotFound, ValkeyUnavailable),
)
async def cancel_user_job(
    user_id: UserIdInPath, job_id: JobIdInPath, caller: Caller, services: InServices
) -> Job:
    """Ends a job that waits; has one that runs killed (`cancelling` until then). What has ended stays so."""
    await known(services, caller, user_id)
    return await services.jobs.cancel(job_id, job_keys.of_user(user_id))


@router.post(
    "/jobs",
    summary="Enqueue a job of the fleet",
    status_code=202,
    responses=problems.responses(Forbidden, JobIdReused, BodyTooLarge, ValkeyUnavailable),
)
async def put_fleet_job(body: NewFleetJob, caller: Caller, services: InServices) -> Job:
    """A webhook, a mail or a ping. With a `job_id` the same call is done once."""
    require_staff(caller)
    job = body.job
    job_id = job.job_id or str(uuid4())
    about: dict[str, str] = {"type": job.type}
    if isinstance(job, NewDelivery | NewMail):
        about["recipient"] = job.to if isinstance(job, NewMail) else job.recipient
    await _note(services, caller, "job.requested", job_id=job_id, **about)
    return await services.jobs.of_fleet(body, job_id)


@router.get(
    "/jobs/{job_id}",
    summary="Look at a job of the fleet",
    responses=problems.responses(Forbidden, NotFound, ValkeyUnavailable),
)
async def get_fleet_job(
    job_id: JobIdInPath, caller: Caller, services: InServices, seconds: Seconds = 0.0
) -> Job:
    """Its state and its result. With `wait`, as soon as it has ended. Results are kept for 500 s."""
    require_staff(caller)
    return await services.jobs.look(job_id, job_keys.FLEET, seconds)


@router.post(
    "/jobs/{job_id}/cancel",
    summary="Cancel a job of the fleet",
    responses=problems.responses(Forbidden, NotFound, ValkeyUnavailable),
)
async def cancel_fleet_job(job_id: JobIdInPath, caller: Caller, services: InServices) -> Job:
    """Ends a job that waits; has one that runs killed (`cancelling` until then). What has ended stays so."""
    require_staff(caller)
    await _note(services, caller, "job.cancel_requested", job_id=job_id)
    return await services.jobs.cancel(job_id, job_keys.FLEET)


async def _note(services: Services, caller: Principal, action: str, **about: str) -> None:
    """Who asked for what, in the audit trail: before it is done, so that nothing is done unseen."""
    async with services.database.session() as session:
        audit.append(session, actor=f"key:{caller.key_id}", action=action, subject="fleet", **about)
