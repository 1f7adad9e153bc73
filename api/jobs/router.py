"""Routes for jobs: a user's own; for operators those of the fleet, and the limits of job types."""

from collections import Counter
from dataclasses import asdict
from datetime import UTC, datetime
from typing import Annotated, Any
from uuid import uuid4

from fastapi import APIRouter, Path, Query, Response
from pydantic import Discriminator, Tag
from redis.asyncio import Redis
from redis.exceptions import RedisError

from api.container import AuthorizedCall, Call, KnownUserId
from api.http import problems
from api.http.errors import (
    Forbidden,
    InvalidRequest,
    JobArgumentsTooLarge,
    NotFound,
    TooManyJobs,
    ValkeyUnavailable,
)
from api.http.fields import ID_PATTERN
from api.http.rights import Role
from api.jobs import own, schemas
from api.jobs.schemas import FleetJobRequest, JobStateView, OwnJobRequest, UserJobRequest
from api.orders import export
from api.orders.schemas import Bom
from infra.database.accounts import AccountNotFound
from infra.jobs import limits as job_limits
from infra.jobs import queues as job_queues
from infra.jobs.applications import ApplicationNotFound
from infra.jobs.client import JobIdReused
from infra.jobs.limits import JobLimits
from infra.jobs.registry import ArgumentsInvalid, JobTypeRefused, JobTypeUnknown, count_waiting
from infra.market.calendar import HOME_ZONE_NAME
from worker_runtime.jobs.protocol import catalog
from worker_runtime.jobs.protocol import keys as job_keys
from worker_runtime.jobs.protocol.catalog import TooManyOrders
from worker_runtime.jobs.protocol.manifest import application_of

router = APIRouter(tags=["jobs"])

JobIdInPath = Annotated[
    str, Path(pattern=ID_PATTERN, max_length=64, examples=["statement-2026-11-20"])
]
Seconds = Annotated[
    float,
    Query(
        alias="wait",
        ge=0,
        le=60,
        allow_inf_nan=False,
        description="Seconds to wait for the job to end.",
    ),
]


@router.post(
    "/users/{user_id}/jobs",
    summary="Enqueue a job of a user",
    status_code=202,
    responses=problems.responses(
        TooManyJobs, TooManyOrders, AccountNotFound, JobIdReused, ValkeyUnavailable
    ),
)
async def put_user_job(user_id: KnownUserId, body: UserJobRequest, call: Call) -> JobStateView:
    """Runs it next to the user's session, in a process of its own; the worker is started if there
    is none.

    Statements and exports use the orders at the time of the request, at most about 700. For more,
    use `orders.csv`. Repeating a `job_id` has no effect while the result is kept; a different job
    under it is refused.
    """
    about = {"job_id": body.job.job_id, "type": body.job.type}

    async def note() -> None:
        await call.audit("job.requested", f"user:{user_id}", **about)

    return await call.services.jobs.enqueue_user_job(
        user_id, body.job, note, priority=body.priority, group=body.group
    )


@router.get(
    "/users/{user_id}/jobs/{job_id}",
    summary="Get a user's job",
    responses=problems.responses(ValkeyUnavailable),
)
async def get_user_job(
    user_id: KnownUserId, job_id: JobIdInPath, call: Call, seconds: Seconds = 0.0
) -> JobStateView:
    """Includes its state and result. With `wait`, answers as soon as the job has ended. Results are
    kept for 500 s."""
    return await call.services.jobs.get_job(job_id, user_id, seconds)


@router.get(
    "/users/{user_id}/jobs/{job_id}/file",
    summary="Download an export",
    response_class=Response,
    responses={
        **problems.content(
            f"CSV (RFC 4180) with a header, the newest first. Times are in {HOME_ZONE_NAME}.",
            "text/csv",
        ),
        **problems.responses(ValkeyUnavailable),
    },
)
async def get_user_file(
    user_id: KnownUserId, job_id: JobIdInPath, call: Call, bom: Annotated[Bom, Query()] = False
) -> Response:
    """Sends the file that an `order_export` job made."""
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
    """Removes a waiting job, or kills a running one (`cancelling` until then). A job that has ended
    stays as it is."""
    await call.services.jobs.get_job(job_id, user_id)
    await call.audit("job.cancel_requested", f"user:{user_id}", job_id=job_id)
    return await call.services.jobs.cancel(job_id, user_id)


def _form_of(body: Any) -> str:
    """Returns which of its two forms a body has: today's has a `type`, that of 0.1.0 a `job`."""
    if isinstance(body, FleetJobRequest) or (isinstance(body, dict) and "job" in body):
        return "job"
    return "type"


AnyJobRequest = Annotated[
    Annotated[OwnJobRequest, Tag("type")] | Annotated[FleetJobRequest, Tag("job")],
    Discriminator(_form_of),
]
_ENQUEUE_ERRORS = (
    JobTypeUnknown,
    JobTypeRefused,
    ApplicationNotFound,
    ArgumentsInvalid,
    JobArgumentsTooLarge,
    JobIdReused,
)


@router.post(
    "/jobs",
    summary="Enqueue a job",
    status_code=202,
    responses=problems.responses(*_ENQUEUE_ERRORS, ValkeyUnavailable),
)
async def put_job(body: AnyJobRequest, call: Call) -> JobStateView:
    """Takes an application's type (`shop/jobs.resize_image`), or one of Berth's built-in types.

    Arguments are checked against the JSON Schema that the type's runners have announced. The job is
    kept in PostgreSQL until it has ended, so it survives the loss of Valkey's data. With a `job_id`
    the same call is done once. If another job has its unique key, the answer shows that one.

    Of Berth's built-in types operators enqueue `ping`; administrators also webhooks, mails and
    messages, which go out in our name. The body with `job` is that of 0.1.0 and will be
    removed in the next release.
    """
    if isinstance(body, OwnJobRequest):
        if body.is_of_application:
            call.caller.require_application(application_of(body.type))
            return await call.services.own_jobs.enqueue(body)
        body = _built_in(body)
    call.caller.require_application("")
    job = body.job
    if job.type != "ping" and call.caller.role is not Role.ADMIN:
        raise Forbidden("only an administrator sends mails, messages and webhooks")
    job_id = job.job_id or str(uuid4())
    about: dict[str, str] = {"type": job.type}
    for recipient in job.model_dump(include={"to", "recipient", "token"}).values():
        about["recipient"] = recipient[:254]
    await call.audit("job.requested", "fleet", job_id=job_id, **about)
    return await call.services.jobs.enqueue_fleet_job(body, job_id)


def _built_in(body: OwnJobRequest) -> FleetJobRequest:
    """Returns the request for one of Berth's built-in types. Raises `InvalidRequest`."""
    options = body.options.model_dump(exclude_unset=True, exclude={"run_at"})
    if body.options.run_at is not None:
        options["delay_s"] = max(0.0, (body.options.run_at - datetime.now(UTC)).total_seconds())
    if unknown := options.keys() - {"job_id", "priority", "delay_s"}:
        names = ", ".join(sorted(unknown))
        raise InvalidRequest(f"Jobs of Berth's built-in types take no option {names}.")
    job = {**body.args, "type": body.type, "job_id": options.get("job_id")}
    request = {"job": job, "delay": options.get("delay_s", 0.0)}
    if options.get("priority") is not None:
        request["priority"] = options["priority"]
    with problems.refusing_invalid():
        return FleetJobRequest.model_validate(request)


@router.post(
    "/jobs/batch",
    summary="Enqueue jobs of an application",
    status_code=202,
    responses=problems.responses(*_ENQUEUE_ERRORS, ValkeyUnavailable),
)
async def put_jobs(body: schemas.JobBatchRequest, call: Call) -> schemas.JobBatchView:
    """Takes up to 500 jobs of one application, keeps their order, and enqueues all of them or none.

    Each as by `POST /v1/jobs`. A refusal names the first job that does not fit by its place, from
    0.
    """
    for application in {application_of(job.type) for job in body.jobs}:
        call.caller.require_application(application)
    return schemas.JobBatchView(
        jobs=await call.services.own_jobs.enqueue_many(body.jobs, in_batch=True)
    )


@router.get(
    "/jobs/{job_id}",
    summary="Get a job",
    responses=problems.responses(NotFound, ValkeyUnavailable),
)
async def get_job(job_id: JobIdInPath, call: Call, seconds: Seconds = 0.0) -> JobStateView:
    """Includes the state, progress and result of a job of an application or of the fleet. With
    `wait`, answers as soon as the job has ended."""
    reach = call.caller.applications_in_reach(to_look=True)
    state = await call.services.own_jobs.find(job_id, seconds, reach)
    if state is None and reach is not None:
        raise NotFound
    return state or await call.services.jobs.get_job(job_id, "", seconds)


@router.post(
    "/jobs/{job_id}/cancel",
    summary="Cancel a job",
    responses=problems.responses(NotFound, ValkeyUnavailable),
)
async def cancel_job(job_id: JobIdInPath, call: Call) -> JobStateView:
    """Removes a waiting job, or kills a running one (`cancelling` until then). A job that has ended
    stays as it is."""
    reach = call.caller.applications_in_reach()
    state = await call.services.own_jobs.find(job_id, within=reach)
    if state is None and reach is not None:
        raise NotFound
    if state is None:
        await call.services.jobs.get_job(job_id)
    await call.audit(
        "job.cancel_requested", "fleet" if state is None else "application", job_id=job_id
    )
    cancelled = None if state is None else await call.services.own_jobs.cancel(job_id)
    return cancelled or await call.services.jobs.cancel(job_id)


@router.get("/job-types", summary="List job types of applications")
async def get_job_types(call: Call) -> schemas.JobTypeList:
    """Includes the versions of each type that a runner has announced, and how many jobs wait for
    it; also types that jobs wait for and no runner has ever announced. Ask for a single type to see
    its schema."""
    registry = call.services.job_types
    reach = call.caller.applications_in_reach(to_look=True)
    types = {
        name: versions
        for name, versions in (await registry.types()).items()
        if reach is None or application_of(name) in reach
    }
    counts: dict[str, int] = {}
    waiting: dict[str, int] | None = counts
    try:
        for application in await registry.applications.load():
            if reach is not None and application not in reach:
                continue
            counts |= await count_waiting(call.services.valkey, application)
    except (RedisError, OSError):
        waiting = None
    return schemas.JobTypeList(types=own.type_views(types, waiting))


ApplicationName = Annotated[
    str, Path(pattern=r"^[a-z][a-z0-9-]{0,31}$", max_length=32, examples=["shop"])
]
OwnTypeName = Annotated[
    str,
    Path(pattern=r"^[A-Za-z0-9_][A-Za-z0-9_.-]*$", max_length=100, examples=["jobs.resize_image"]),
]


@router.get(
    "/job-types/{application}/{name}",
    summary="Get a job type",
    responses=problems.responses(JobTypeUnknown, ApplicationNotFound),
)
async def get_job_type(
    application: ApplicationName, name: OwnTypeName, call: Call
) -> schemas.JobTypeView:
    """Includes, for each version, the options, the JSON Schema of its arguments, and how many
    runners it has."""
    call.caller.require_application(application, to_look=True)
    kind = f"{application}/{name}"
    versions = await call.services.job_types.versions(kind)
    try:
        waiting = await count_waiting(call.services.valkey, application)
        waiting = {
            queued: jobs for queued, jobs in waiting.items() if queued.partition("@")[0] == kind
        }
    except (RedisError, OSError):
        waiting = None
    [shown] = own.type_views({kind: versions}, waiting, with_schema=True)
    return shown


@router.get("/job-applications", summary="List applications")
async def get_job_applications(call: Call) -> schemas.ApplicationList:
    """Names those whose runners run job types of their own. `berth jobs application
    add` makes one."""
    registry = call.services.job_types
    types = await registry.types()
    counts = Counter(application_of(name) for name in types)
    shown = [
        schemas.ApplicationView(
            name=row.name,
            created_at=row.created_at,
            created_by=row.created_by,
            generation=row.generation,
            former_generation=row.former_generation,
            types=counts[row.name],
        )
        for row in (await registry.applications.load()).values()
    ]
    return schemas.ApplicationList(applications=shown)


JobType = Annotated[
    str, Path(pattern=r"^[a-z0-9][a-z0-9_.-]*$", max_length=64, examples=["webhook"])
]
_KNOWN = {kind.name for kind in catalog.JOB_KINDS.values()}


QueueName = Annotated[str, Path(pattern=r"^[a-z0-9][a-z0-9_.-]{0,63}$", examples=["email"])]
OfApplication = Annotated[
    str | None,
    Query(
        alias="application",
        pattern=r"^[a-z][a-z0-9-]{0,31}$",
        description="Of this application, instead of the fleet's.",
    ),
]
_QUEUES = {kind.queue for kind in catalog.JOB_KINDS.values()}


async def _tag_of(call: AuthorizedCall, application: str | None) -> str:
    """Raises `ApplicationNotFound`."""
    if application is None:
        return job_keys.FLEET_TAG
    await call.services.job_types.applications.require(application)
    return job_keys.application_tag(application)


@router.get(
    "/job-queues",
    summary="List job queues",
    responses=problems.responses(ApplicationNotFound, ValkeyUnavailable),
)
async def get_job_queues(call: Call, application: OfApplication = None) -> schemas.QueueList:
    """Shows the fleet's queues, or an application's, with weight, suspension, and the number of
    jobs that could run now."""
    tag = await _tag_of(call, application)
    known = () if application else _QUEUES
    queues = await job_queues.read_queues(call.services.valkey, tag, known)
    return schemas.QueueList(queues=[schemas.QueueView.model_validate(queue) for queue in queues])


@router.put(
    "/job-queues/{queue}",
    summary="Set the weight of a job queue",
    responses=problems.responses(ApplicationNotFound, ValkeyUnavailable),
)
async def put_job_queue(
    queue: QueueName, body: schemas.QueueWeightRequest, call: Call
) -> schemas.QueueView:
    """Gives queues with work turns in proportion to their weights, from the next claim on."""
    tag = await _tag_of(call, body.application)
    subject = f"job-queue:{body.application or 'fleet'}:{queue}"
    await call.audit("job_queue.set", subject, reason=body.reason, weight=body.weight)
    await job_queues.put_weight(call.database, call.services.valkey, queue, body.weight, tag)
    queues = await job_queues.read_queues(call.services.valkey, tag, (queue,))
    [changed] = [summary for summary in queues if summary.queue == queue]
    return schemas.QueueView.model_validate(changed)


@router.get(
    "/job-limits",
    summary="List limits of job types",
    responses=problems.responses(ValkeyUnavailable),
)
async def get_job_limits(call: Call) -> schemas.JobLimitsList:
    """Includes types without limits: first Berth's built-in types, then those of applications."""
    client, registry = call.services.valkey, call.services.job_types
    names = {job_keys.FLEET_TAG: set(_KNOWN)}
    names |= {job_keys.application_tag(name): set() for name in await registry.applications.load()}
    for name in await registry.types():
        names.setdefault(job_keys.application_tag(application_of(name)), set()).add(name)
    shown = []
    for tag, known in names.items():
        limits = await job_limits.read_limits(client, tag)
        shown += [
            await _limits_view(client, tag, name, limits.get(name, JobLimits()))
            for name in sorted(known | limits.keys())
        ]
    return schemas.JobLimitsList(limits=shown)


@router.put(
    "/job-limits/{job_type}",
    summary="Set limits of a built-in job type",
    responses=problems.responses(NotFound, ValkeyUnavailable),
)
async def put_job_limits(
    job_type: JobType, body: schemas.JobLimitsRequest, call: Call
) -> schemas.JobLimitsView:
    """Replaces all of them, from the next claim on. Running jobs continue, and a job with a
    `run_at` or a delay keeps it."""
    if job_type not in _KNOWN:
        raise NotFound(f"there is no job type {job_type}; known: {', '.join(sorted(_KNOWN))}")
    return await _put_limits(call, job_keys.FLEET_TAG, job_type, body)


@router.put(
    "/job-limits/{application}/{name}",
    summary="Set limits of an application's job type",
    responses=problems.responses(JobTypeUnknown, ApplicationNotFound, ValkeyUnavailable),
)
async def put_own_job_limits(
    application: ApplicationName, name: OwnTypeName, body: schemas.JobLimitsRequest, call: Call
) -> schemas.JobLimitsView:
    """Replaces all of them, for all versions of the type. They stay, whatever later versions
    declare."""
    kind = f"{application}/{name}"
    await call.services.job_types.versions(kind)
    return await _put_limits(call, job_keys.application_tag(application), kind, body)


async def _put_limits(
    call: AuthorizedCall, tag: str, name: str, body: schemas.JobLimitsRequest
) -> schemas.JobLimitsView:
    limits = JobLimits(**body.model_dump(exclude={"reason"}))
    await call.audit("job_limits.set", f"job-type:{name}", reason=body.reason, **asdict(limits))
    await job_limits.put_limits(call.database, call.services.valkey, name, limits, tag)
    return await _limits_view(call.services.valkey, tag, name, limits)


async def _limits_view(
    client: Redis, tag: str, name: str, limits: JobLimits
) -> schemas.JobLimitsView:
    return schemas.JobLimitsView(
        type=name, running_now=await job_limits.count_running(client, name, tag), **asdict(limits)
    )
