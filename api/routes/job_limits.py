"""Limits of the fleet's job types, for operators."""

from __future__ import annotations

from dataclasses import asdict
from typing import Annotated

from fastapi import APIRouter, Path
from redis.asyncio import Redis

from api import problems
from api.auth import Caller, require_staff
from api.errors import BodyTooLarge, Forbidden, NotFound, ValkeyUnavailable
from api.routes.services import InServices
from api.schemas import job_limits as schemas
from infra import job_limits
from infra.database import audit
from infra.job_limits import JobLimits
from worker_runtime.protocol import job_work

router = APIRouter(prefix="/job-limits", tags=["jobs"])

JobType = Annotated[str, Path(pattern=r"^[a-z0-9][a-z0-9_.-]*$", max_length=64, examples=["webhook"])]
_KNOWN = {kind.name for kind in job_work.KINDS.values()}


@router.get(
    "",
    summary="Look at limits of job types",
    responses=problems.responses(Forbidden, ValkeyUnavailable),
)
async def get_job_limits(caller: Caller, services: InServices) -> schemas.AllJobLimits:
    """Every type of job, also those without limits."""
    require_staff(caller)
    found = await job_limits.read(services.valkey)
    names = sorted(_KNOWN | found.keys())
    shown = [await _view(services.valkey, name, found.get(name, JobLimits())) for name in names]
    return schemas.AllJobLimits(limits=shown)


@router.put(
    "/{job_type}",
    summary="Set limits of a job type",
    responses=problems.responses(Forbidden, NotFound, BodyTooLarge, ValkeyUnavailable),
)
async def put_job_limits(
    job_type: JobType, body: schemas.PutJobLimits, caller: Caller, services: InServices
) -> schemas.JobLimits:
    """Sets all of them: they hold from the next claim on. Running jobs go on, and a job that waits for a
    time of its own keeps it. They stand in Valkey, and go with its data."""
    require_staff(caller)
    if job_type not in _KNOWN:
        raise NotFound
    limits = JobLimits(**{name: getattr(body, name) for name in JobLimits.__dataclass_fields__})
    async with services.database.session() as session:  # before it is done, so that nothing is done unseen
        audit.append(
            session,
            actor=f"key:{caller.key_id}",
            action="job_limits.set",
            subject=f"job-type:{job_type}",
            reason=body.reason,
            **asdict(limits),
        )
    await job_limits.put(services.valkey, job_type, limits)
    return await _view(services.valkey, job_type, limits)


async def _view(client: Redis, name: str, limits: JobLimits) -> schemas.JobLimits:
    return schemas.JobLimits(type=name, running_now=await job_limits.running(client, name), **asdict(limits))
