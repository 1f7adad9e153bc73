"""Compares the jobs that PostgreSQL keeps with Valkey: notes how they ended, enqueues again what is
lost.

A job that may run twice is enqueued as soon as Valkey does not know it. A job that must not run
twice is enqueued after its timeout, when any earlier run has ended and its runner has left the
result (`finish_and_claim.lua`). Settings of queues that Valkey has lost are written back before any
job. When an application's job has failed, its failure handler (`on_failed`), which a runner
enqueues, is kept as a job of its own.
"""

import asyncio
import time
from collections.abc import Mapping
from contextlib import suppress
from datetime import UTC, datetime
from typing import Any

import msgspec
import structlog
from redis.asyncio import Redis
from redis.exceptions import RedisError, ResponseError

from activities.reports.daily import note_failed_statement
from infra.berth_jobs.options import (
    JobDefaults,
    JobFailureReport,
    handler_fields,
    handler_id,
)
from infra.database import kept_jobs
from infra.database.dead_letters import DeadLetter, delete_open, put_letter, reason_of
from infra.database.engine import DatabaseUnavailable
from infra.database.kept_jobs import KeptJob
from infra.database.locks import seconds_from_now
from infra.jobs.applications import ApplicationDirectory, JobApplication
from infra.jobs.client import JobState
from infra.jobs.kept import KeptJobs, queued_form
from infra.jobs.registry import find_newest_type
from infra.temporal.starter import WorkerStarter
from infra.valkey import client as valkey
from infra.valkey.job_users import JobUsers
from worker_runtime.jobs.protocol import calls as job_calls
from worker_runtime.jobs.protocol import keys as job_keys
from worker_runtime.jobs.protocol.messages import (
    FLEET_RESULT_TTL_S,
    MAX_ARGUMENTS_BYTES,
    Job,
    JobFailed,
    JobResult,
    JobStatus,
)
from worker_runtime.protocol import keys
from worker_runtime.protocol.errors import MalformedMessage
from worker_runtime.protocol.messages import Failure

#: How long a round waits for a message about a job.
NEWS_TIMEOUT_MS = 2000
#: Seconds between two rounds.
ROUND_INTERVAL_S = 0.5
#: Jobs of one round, and news that are read at once.
MAX_JOBS_PER_ROUND = 500

#: Seconds for which the sweeper has a worker started for a user's job that waits. Temporal may be
#: away when the job is accepted; a login that the broker refuses must not be tried for ever.
WORKER_START_TIMEOUT_S = 600.0

#: Failure handlers by job id prefix, up to the hyphen. One may be called again. Jobs without one
#: only get an entry in the list of dead letters.
ON_FAILED = {"statement": note_failed_statement}

log = structlog.get_logger()


class KeptJobSweeper:
    """A background loop. Several may run: each job is checked by one of them at a time."""

    def __init__(
        self,
        client: Redis,
        kept: KeptJobs,
        starter: WorkerStarter,
        job_users: JobUsers | None = None,
        defaults: JobDefaults | None = None,
    ) -> None:
        """Takes `job_users`, which makes the applications' logins at Valkey; None if they log in as
        we do. `defaults`: of jobs whose type says nothing else, for failure handlers."""
        self._client = client
        self._job_users = job_users
        self._defaults = defaults or JobDefaults()
        #: Application → generations of its key whose logins this process has seen to.
        self._logins: dict[str, tuple[int, ...]] = {}
        self._kept = kept
        self._starter = starter
        self._directory = ApplicationDirectory(kept.database, kept.queue.secrets)
        #: Tag → the last entry of its events that was read; at first all are.
        self._cursors = {job_keys.FLEET_TAG: b"0-0"}

    async def run(self) -> None:
        while True:
            try:
                await self.load_applications()
                await self.mark_ended_jobs_due()
                await self.restore_settings()
                while await self.sweep() == MAX_JOBS_PER_ROUND:
                    pass
            except Exception as error:  # the boundary of a loop: a server is away
                log.warning(
                    "kept_jobs_not_swept", error=type(error).__name__, reason=str(error)[:200]
                )
                await asyncio.sleep(NEWS_TIMEOUT_MS / 1000)
            await asyncio.sleep(ROUND_INTERVAL_S)

    async def load_applications(self) -> None:
        """Reads which applications there are, and which of their keys count."""
        tags = {job_keys.application_tag(name) for name in await self._directory.load()}
        tags.add(job_keys.FLEET_TAG)
        self._cursors = {tag: self._cursors.get(tag, b"0-0") for tag in sorted(tags)}
        if self._job_users is not None:
            await self._make_logins(self._job_users, await self._directory.load())

    async def _make_logins(
        self, users: JobUsers, applications: Mapping[str, JobApplication]
    ) -> None:
        """Makes the logins of applications' runners and direct producers at Valkey, and revokes
        logins of retired keys."""
        server = await valkey.read_server_id(self._client) if applications else ""
        for name, application in applications.items():
            tag = job_keys.application_tag(name)
            await users.ensure(server, [tag])
            if self._logins.get(name) != application.generations:
                retired = [
                    number
                    for number in range(1, application.generation)
                    if number not in application.generations
                ]
                keys_of_retired = (
                    self._kept.queue.secrets.application_keys(name, retired) if retired else ()
                )
                await users.revoke(tag, keys_of_retired)
                self._logins[name] = application.generations

    async def mark_ended_jobs_due(self, block: int = NEWS_TIMEOUT_MS) -> None:
        """Has jobs of the fleet and of applications checked as soon as they end: until an end is
        noted, a flush of Valkey would have the job run again. Waits `block` ms for news."""
        tags = {job_keys.events(tag): tag for tag in self._cursors}
        cursors: dict[Any, Any] = {stream: self._cursors[tag] for stream, tag in tags.items()}
        reply = await valkey.reply_of(
            self._client.xread(cursors, count=MAX_JOBS_PER_ROUND, block=block)
        )
        for stream, lists in (reply or {}).items():
            entries = [entry for stream_entries in lists for entry in stream_entries]
            if not entries:
                continue
            tag = tags[valkey.text_of(stream)]
            owner = "" if tag == job_keys.FLEET_TAG else tag
            names = {valkey.text_of(fields.get(b"job")).replace("\0", "") for _, fields in entries}
            await self._kept.database.write(kept_jobs.check_now, owner, names)
            self._cursors[tag] = entries[-1][0]

    async def restore_settings(self) -> None:
        """Writes settings that Valkey has lost, or that are not those of PostgreSQL."""
        for row in await self._kept.database.fetch(kept_jobs.load_settings):
            call = job_calls.configure(row.fields, job_keys.tag_of(row.user_id))
            with suppress(ResponseError):  # a user's worker may make another kind of key of it
                there = await valkey.reply_of(self._client.hmget(call.keys[0], list(row.fields)))
                if [valkey.text_of(value) for value in there] != [
                    value or "" for value in row.fields.values()
                ]:
                    await valkey.run_script(self._client, *call)
                    log.warning("job_settings_restored", user_id=row.user_id)

    async def sweep(self) -> int:
        """Checks the jobs that are due; returns how many there were. Raises `RedisError`,
        `DatabaseUnavailable`."""
        rows = await self._kept.database.write(kept_jobs.lease_due_jobs, MAX_JOBS_PER_ROUND)
        for row in sorted(rows, key=lambda kept: kept.created_at):
            try:
                await self._check(row)
            except Exception as error:  # the boundary of one job, which must not hold up the others
                # A user's worker may write any key of it.
                refused = isinstance(error, ResponseError)
                if isinstance(error, RedisError | OSError | DatabaseUnavailable) and not refused:
                    raise
                log.warning("kept_job_not_checked", job_id=row.job_id, reason=reason_of(error))
                # Otherwise the server may be to blame, and the job is tried again later.
                if not refused or "WRONGTYPE" in str(error):
                    failure = Failure(code="NOT_CHECKED", detail=reason_of(error))
                    await self._note_failure(row, failure, time.time(), check_at=None)
        return len(rows)

    async def _check(self, row: KeptJob) -> None:
        state = await self._kept.queue.get(row.job_id, tag=job_keys.tag_of(row.user_id))
        if state is None and row.outcome is None:
            await self._enqueue_again(row)
        elif state is None:  # it has failed, and was lost since: a person may open it again
            await self._kept.change(row.job_id, row.user_id, check_at=None)
        elif state.state == "failed":
            await self._note_failed(row, state)
        else:
            await self._note_progress(row, state)

    async def _note_failed(self, row: KeptJob, state: JobState) -> None:
        failed = await self._client.zscore(
            job_keys.failed(job_keys.tag_of(row.user_id)), row.job_id
        )
        result = state.result or JobResult(job_id=row.job_id, status=JobStatus.FAILED)
        failure = result.failure or Failure(code=JobFailed.code, detail="")
        at = job_calls.reply_number(str(failed or result.finished_at_ms)) / 1000 or time.time()
        at = min(at, time.time())
        if job_keys.application_of_tag(row.user_id) and not _is_known(row, at):
            try:
                await self._keep_handler(row, failure, state.attempt, round(at * 1000))
            except (MalformedMessage, msgspec.ValidationError) as error:
                log.warning("failure_handler_not_kept", job_id=row.job_id, reason=reason_of(error))
        await self._note_failure(row, failure, at)

    async def _keep_handler(
        self, row: KeptJob, failure: Failure, attempt: int, failed_at_ms: int
    ) -> None:
        """Keeps the handler of a failure, under the id that runners give it. Raises
        `MalformedMessage`, `ValidationError`."""
        job = self._kept.unseal(row)
        if not job.on_failed:
            return
        kind = await self._kept.database.fetch(find_newest_type, job.on_failed)
        if kind is None:  # no runner has ever announced it
            return
        if time.time() - failed_at_ms / 1000 > FLEET_RESULT_TTL_S / 2:
            return  # perhaps it has run, and its result has expired
        report = JobFailureReport(
            job_id=job.job_id,
            type=job.name,
            code=failure.code,
            detail=failure.detail,
            attempt=attempt,
            arguments=job.args,
        )
        fields = handler_fields(kind, report, MAX_ARGUMENTS_BYTES, self._defaults)
        handler = Job(job_id=handler_id(job.job_id, failed_at_ms), **fields)
        await self._kept.keep_handler(row.user_id, handler)

    async def _note_progress(self, row: KeptJob, state: JobState) -> None:
        """Notes the end of a job that has not failed; starts the worker of one that waits."""
        if row.outcome == "failed":  # somebody has put it back
            await self._kept.database.write(delete_open, [_letter(row).id])
        if state.ended:
            await self._shorten_result(row)
            await self._kept.end(row.job_id, row.user_id, state.state)
        elif row.outcome or row.missing:
            await self._kept.change(row.job_id, row.user_id, outcome=None, missing=False)
        is_young = time.time() - row.created_at.timestamp() < WORKER_START_TIMEOUT_S
        if state.state == "waiting" and (row.outcome or is_young):
            await self._start_worker(row.user_id)

    async def _shorten_result(self, row: KeptJob) -> None:
        """Lets an application's result expire when its job says, once PostgreSQL knows the end."""
        if job_keys.application_of_tag(row.user_id) and row.sealed:
            seconds = self._kept.unseal(row).result_ttl
            await self._client.expire(job_keys.result(row.user_id, row.job_id), seconds, lt=True)

    async def _start_worker(self, user_id: str) -> None:
        if not user_id or job_keys.application_of_tag(user_id):
            return
        if not await self._client.exists(keys.mark(user_id)):
            self._starter.ensure(user_id, check_worker=True)

    async def _enqueue_again(self, row: KeptJob) -> None:
        job = self._kept.unseal(row)
        if not (job.idempotent or row.missing):
            later = seconds_from_now(job.timeout + 15.0)  # by then its last run's end is known
            await self._kept.change(row.job_id, row.user_id, missing=True, check_at=later)
            return
        # Before the job is enqueued: if it is lost again, its next run has to be waited for, too.
        if row.missing:
            await self._kept.change(row.job_id, row.user_id, missing=False)
        due = row.created_at.timestamp() + job.delay
        again = msgspec.structs.replace(job, delay=max(0.0, due - time.time()))
        tag = job_keys.tag_of(row.user_id)
        [reply] = await self._kept.queue.enqueue_many([queued_form(again, row.user_id)], tag=tag)
        if reply.queued:
            log.warning("job_enqueued_again", job_id=row.job_id, job=job.name, user_id=row.user_id)
        elif reply.status == "duplicate":  # another one has the unique key by now
            await self._kept.end(row.job_id, row.user_id, "cancelled")
            log.warning(
                "job_is_duplicate", job_id=row.job_id, other=reply.job_id, user_id=row.user_id
            )
        await self._start_worker(row.user_id)

    async def _note_failure(
        self, row: KeptJob, failure: Failure, seconds: float, **fields: Any
    ) -> None:
        if _is_known(row, seconds):
            return
        at = datetime.fromtimestamp(seconds, UTC)
        async with self._kept.database.session() as session:
            await put_letter(session, _letter(row, at, f"{failure.code}: {failure.detail}"))
            handle = ON_FAILED.get(row.job_id.partition("-")[0])
            if handle is not None and not row.user_id:
                await handle(session, row.job_id, failure)
        await self._kept.change(row.job_id, row.user_id, outcome="failed", ended_at=at, **fields)


def _is_known(row: KeptJob, failed_at: float) -> bool:
    """Returns True if the failure of this time (Unix seconds) has been noted."""
    at = datetime.fromtimestamp(failed_at, UTC)
    return row.outcome == "failed" and row.ended_at is not None and row.ended_at >= at


def _letter(row: KeptJob, at: datetime | None = None, reason: str = "") -> DeadLetter:
    kind = "alert" if not row.user_id and row.job_id.startswith("alert-") else "job"
    source = row.user_id or "fleet jobs"  # no id of a user has a space, or a colon
    return DeadLetter(
        kind=kind, subject=row.job_id, source=source, user_id=row.user_id, reason=reason, at=at
    )
