"""Enqueues, shows and cancels jobs of applications, by the types that their runners have
announced."""

from __future__ import annotations

import json
from collections.abc import Collection, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, replace
from datetime import UTC, datetime
from hashlib import sha256
from typing import Any
from uuid import uuid4

import msgspec
from redis.asyncio import Redis
from redis.exceptions import RedisError

from api.http.errors import InvalidRequest, JobArgumentsTooLarge
from api.jobs import schemas
from api.jobs.service import view
from infra.berth_jobs.options import JobDefaults, JobOptions, job_fields
from infra.database.engine import DatabaseUnavailable
from infra.database.kept_jobs import KeptJob
from infra.jobs.arguments import MAX_LEVELS, levels_of
from infra.jobs.client import JobState
from infra.jobs.kept import KeptJobs
from infra.jobs.registry import ArgumentsInvalid, TypeRegistry, TypeVersion
from worker_runtime.jobs.protocol import keys as job_keys
from worker_runtime.jobs.protocol import manifest as wire
from worker_runtime.jobs.protocol.calls import reply_number, reply_text
from worker_runtime.jobs.protocol.messages import MAX_ARGUMENTS_BYTES, Job


@dataclass(frozen=True)
class PreparedJob:
    """A job whose arguments fit its type, before it is kept."""

    job: Job
    #: The digest of the request if the caller has chosen the id, else empty.
    digest: str


@dataclass(frozen=True, eq=False)
class ApplicationJobs:
    """Every method raises `DatabaseUnavailable`; reading raises `RedisError` when Valkey is
    down."""

    registry: TypeRegistry
    kept: KeptJobs
    client: Redis
    defaults: JobDefaults

    async def enqueue(self, request: schemas.OwnJobRequest) -> schemas.JobStateView:
        """Enqueues one job. Raises what `enqueue_many` raises."""
        [state] = await self.enqueue_many([request])
        return state

    async def enqueue_many(
        self, requests: Sequence[schemas.OwnJobRequest], *, in_batch: bool = False
    ) -> list[schemas.JobStateView]:
        """Enqueues jobs in their order: all of them, or none.

        Where an earlier job has the unique key of one, the answer shows the earlier job. Raises
        `JobTypeUnknown`, `JobTypeRefused`, `ApplicationNotFound`, `ArgumentsInvalid`,
        `JobArgumentsTooLarge`, `JobIdReused`, `InvalidRequest`.
        """
        prepared = [
            await self._prepare(request, ("jobs", number) if in_batch else ())
            for number, request in enumerate(requests)
        ]
        applications = {wire.application_of(prepared_job.job.name) for prepared_job in prepared}
        if len(applications) > 1:
            raise InvalidRequest(
                "A batch holds jobs of one application. Send one batch for each application."
            )
        [application] = applications
        jobs = [prepared_job.job for prepared_job in prepared]
        replies = await self.kept.enqueue_for_application(
            application, jobs, [prepared_job.digest for prepared_job in prepared]
        )
        by_id = {job.job_id: job for job in jobs}
        accepted = [
            (reply.job_id, by_id.get(reply.job_id, job))
            for reply, job in zip(replies, jobs, strict=True)
        ]
        states = await self._states_after(application, accepted)
        return [
            _view(state, job.name, job.type_version)
            for state, job in zip(states, jobs, strict=True)
        ]

    async def find(
        self, job_id: str, seconds: float = 0.0, within: Collection[str] | None = None
    ) -> schemas.JobStateView | None:
        """Returns an application's job, once it has ended or `seconds` have passed; None if there
        is none. `within`: the applications to look at (None: all)."""
        owner, row = await self._owner_of(job_id)
        if not owner or (within is not None and job_keys.application_of_tag(owner) not in within):
            return None
        state = await self.kept.queue.wait(job_id, seconds, tag=owner)
        if state is None and row is not None:
            state = await self.kept.get(job_id, owner)
        if state is None:
            return None
        name, version = _type_of(state, row)
        shown = _view(state, name, version)
        if state.state == "waiting" and name:
            shown = shown.model_copy(
                update={"waits_for_runner": not await self._has_runner(name, version)}
            )
        return shown

    async def cancel(self, job_id: str) -> schemas.JobStateView | None:
        """Cancels a job and returns it as it stands then; None if no application has it."""
        owner, row = await self._owner_of(job_id)
        if not owner:
            return None
        lost = row is not None and await self.kept.queue.get(job_id, tag=owner) is None
        if lost and await self.kept.end(job_id, owner, "cancelled"):
            return _view(JobState(job_id, "cancelled"), *_type_of(None, row))
        await self.kept.queue.cancel(job_id, tag=owner)
        return await self.find(job_id)

    async def _prepare(
        self, request: schemas.OwnJobRequest, place: tuple[str | int, ...]
    ) -> PreparedJob:
        """Checks a request and makes its job. `place`: path of the job in the request's body, which
        error messages name."""
        options = request.options
        where = "".join(f"{part}." for part in place)[:-1] + ": " if place else ""
        arguments = _encode_arguments(request.args, where)
        try:
            version = await self.registry.validate(request.type, request.args)
        except ArgumentsInvalid as error:
            errors = [{**fault, "loc": [*place, *fault["loc"]]} for fault in error.errors]
            raise ArgumentsInvalid(f"{where}{error.detail}", errors) from None
        fields = job_fields(version.kind, arguments, _call_options(options), self.defaults)
        job = Job(job_id=options.job_id or str(uuid4()), **fields)
        digest = ""
        if options.job_id is not None:
            asked = request.model_dump(mode="json")
            text = json.dumps(asked, sort_keys=True).encode("utf-8", "surrogatepass")
            digest = sha256(text).hexdigest()
        return PreparedJob(job, digest)

    async def _states_after(
        self, application: str, accepted: Sequence[tuple[str, Job]]
    ) -> list[JobState]:
        """Returns the states of jobs that were just accepted. `accepted`: the id of each, and the
        job that was asked for."""
        tag = job_keys.application_tag(application)
        if len(accepted) == 1:  # a repeat may find how it ended
            state = None
            with suppress(RedisError, OSError):  # it is kept
                state = await self.kept.queue.get(accepted[0][0], tag=tag)
            return [state or _state_without_valkey(*accepted[0])]
        replies: list[Any] = [()] * len(accepted)
        with suppress(RedisError, OSError):
            async with self.client.pipeline(transaction=False) as pipe:
                for job_id, _ in accepted:
                    pipe.hmget(job_keys.job(tag, job_id), ["state", "attempt", "queued_at", "due"])
                    pipe.exists(job_keys.result(tag, job_id))
                answers = await pipe.execute()
            replies = list(zip(answers[::2], answers[1::2], strict=True))
        states = []
        for (job_id, job), reply in zip(accepted, replies, strict=True):
            if not reply or (reply[0][0] is None and not reply[1]):
                states.append(_state_without_valkey(job_id, job))
            elif reply[0][0] is None:  # a repeat of one that has ended
                ended = await self.kept.queue.get(job_id, tag=tag)
                states.append(ended or _state_without_valkey(job_id, job))
            else:
                state, attempt, queued_at, due = reply[0]
                delayed = state == b"delayed"
                states.append(
                    JobState(
                        job_id,
                        reply_text(state),
                        job.name,
                        attempt=reply_number(attempt),
                        queued_at_ms=reply_number(queued_at),
                        due_at_ms=reply_number(due) if delayed else None,
                    )
                )
        return states

    async def _owner_of(self, job_id: str) -> tuple[str, KeptJob | None]:
        """Returns the tag of the application that has this job, or '', and the job's row, or None.

        A job that a producer sent straight into Valkey has no row. An application may put any id
        into its queue, so a job of the fleet or a row under this id comes first.
        """
        fleet = job_keys.FLEET_TAG
        if await self.client.exists(job_keys.job(fleet, job_id), job_keys.result(fleet, job_id)):
            return "", None
        row = await self.kept.find_row(job_id)
        applications = await self.registry.applications.load()
        if row is not None:
            return row.user_id, row  # the column has the tag of an application's job
        tags = [job_keys.application_tag(name) for name in applications]
        if not tags:
            return "", None
        async with self.client.pipeline(transaction=False) as pipe:
            for tag in tags:
                pipe.exists(job_keys.job(tag, job_id), job_keys.result(tag, job_id))
            counts = await pipe.execute()
        return next((tag for tag, count in zip(tags, counts, strict=True) if count), ""), None

    async def _has_runner(self, name: str, version: int) -> bool:
        """Returns True if a live runner takes jobs of this version, or if Valkey is away."""
        with suppress(DatabaseUnavailable):
            for known in (await self.registry.types()).get(name, ()):
                if known.kind.version == version:
                    return known.runners is None or known.runners > 0
        return False


def _state_without_valkey(job_id: str, job: Job) -> JobState:
    return JobState(job_id, "delayed" if job.delay else "waiting", job.name)


def _encode_arguments(args: Mapping[str, Any], where: str) -> bytes:
    if levels_of(args) > MAX_LEVELS:
        raise InvalidRequest(f"{where}args: arguments are nested at most {MAX_LEVELS} levels deep.")
    try:
        schemas.check_body(dict(args))
    except ValueError as error:
        raise InvalidRequest(f"{where}args: {error}") from None
    arguments = msgspec.json.encode(args)
    if len(arguments) > MAX_ARGUMENTS_BYTES:
        raise JobArgumentsTooLarge(
            f"{where}the arguments have {len(arguments)} bytes as JSON; at most "
            f"{MAX_ARGUMENTS_BYTES} are allowed. Store large data elsewhere and pass its address."
        )
    return arguments


def _call_options(options: schemas.OwnJobOptions) -> JobOptions:
    delay_s = options.delay_s
    if options.run_at is not None:
        delay_s = max(0.0, (options.run_at - datetime.now(UTC)).total_seconds())
    given = options.model_dump(exclude={"job_id", "delay_s", "run_at"}, exclude_none=True)
    try:
        return msgspec.convert({**given, "delay_s": delay_s}, JobOptions)
    except msgspec.ValidationError as error:
        raise InvalidRequest(f"options: {error}") from None


def _type_of(state: JobState | None, row: KeptJob | None) -> tuple[str, int]:
    """Returns the name and version of a job's type, as far as they are known."""
    if row is not None and row.type:
        return row.type, row.type_version or 0
    name, _, version = (state.name or "" if state else "").partition("@")
    return name, int(version) if version.isdigit() else 0


def _view(state: JobState, name: str, version: int) -> schemas.JobStateView:
    return view(replace(state, name=name or None)).model_copy(
        update={"type_version": version or None}
    )


def type_views(
    types: Mapping[str, Sequence[TypeVersion]],
    waiting: Mapping[str, int] | None,
    *,
    with_schema: bool = False,
) -> list[schemas.JobTypeView]:
    """Returns all types with their versions, also those that jobs wait for and no runner has ever
    announced.

    `waiting`: jobs that wait, by the type as the queue knows it; None: Valkey is away.
    """
    shown = {
        name: [_version_view(version, waiting, with_schema=with_schema) for version in versions]
        for name, versions in types.items()
    }
    for queued, jobs in sorted((waiting or {}).items()):
        name, _, text = queued.partition("@")
        number = int(text) if text.isdigit() else 0
        known = shown.setdefault(name, [])
        if all(version.version != number for version in known):
            known.append(_unknown_version(number, jobs))
    return [
        schemas.JobTypeView(
            type=name,
            application=wire.application_of(name),
            summary=versions[0].summary,
            versions=versions,
        )
        for name, versions in sorted(shown.items())
    ]


def _version_view(
    version: TypeVersion, waiting: Mapping[str, int] | None, *, with_schema: bool
) -> schemas.JobTypeVersionView:
    kind = version.kind
    jobs = None if waiting is None else waiting.get(wire.queued_type(kind.name, kind.version), 0)
    return schemas.JobTypeVersionView(
        version=kind.version,
        package=version.package,
        package_version=version.package_version,
        announced_at=version.announced_at,
        runners=version.runners,
        waiting=jobs,
        waits_for_runner=bool(jobs) and version.runners == 0,
        summary=kind.summary,
        options=msgspec.to_builtins(kind.options),
        arguments_schema=kind.arguments_schema if with_schema else None,
        refusal=version.refusal or None,
    )


def _unknown_version(number: int, jobs: int) -> schemas.JobTypeVersionView:
    return schemas.JobTypeVersionView(
        version=number,
        package=None,
        package_version=None,
        announced_at=None,
        runners=0,
        waiting=jobs,
        waits_for_runner=True,
        summary="",
        options={},
        refusal=None,
    )
