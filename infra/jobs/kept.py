"""Keeps each job in PostgreSQL until it has ended, so that it survives the loss of Valkey's data.

Jobs that come through the API are enqueued here; a direct producer writes to Valkey alone, and its
jobs are lost with Valkey's data. A job is accepted once its row is committed. If Valkey is away, or
was flushed, the orchestrators enqueue it later (`activities/maintenance/kept_jobs.py`). Its id
counts once, also after a flush. A job may hold addresses and texts, so it is encrypted under a key
of the message secret, which no worker has. The table and its statements are in
`infra/database/kept_jobs.py`.
"""

import asyncio
from base64 import urlsafe_b64encode
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import msgspec
import structlog
from cryptography.fernet import Fernet, InvalidToken, MultiFernet
from redis.exceptions import RedisError
from sqlalchemy.ext.asyncio import AsyncSession

from infra.database import kept_jobs
from infra.database.engine import Database, DatabaseUnavailable
from infra.database.kept_jobs import KeptJob
from infra.jobs.client import JobClient, JobIdReused, JobState
from worker_runtime.jobs.protocol.keys import application_of_tag, application_tag, tag_of
from worker_runtime.jobs.protocol.messages import FLEET_RESULT_TTL_S, Job, encode_job, read_job
from worker_runtime.protocol.errors import MalformedMessage

log = structlog.get_logger()


@dataclass(frozen=True)
class KeptReply:
    """The result of enqueuing one job. `job_id`: that of the earlier job with the same unique key,
    if there is one, else its own."""

    job_id: str
    is_duplicate: bool = False


class KeptJobs:
    def __init__(self, database: Database, jobs: JobClient) -> None:
        self.database = database
        self.queue = jobs

    async def enqueue(
        self, job: Job, *, user_id: str = "", digest: str = "", without_database: bool = False
    ) -> bool:
        """Keeps a job and puts it on its queue; returns False if its id is known.

        A job of the fleet runs once for each id, as long as its row is kept. A user's job can run
        again under the same id once its result has expired.

        `digest`: of the request, if the caller chose the id, so that another request under this id
        is refused.
        `without_database`: if PostgreSQL does not answer within 2 s, queue the job without keeping
        it.
        Raises `JobIdReused`, `MalformedMessage`, `DatabaseUnavailable`, and `RedisError` for a job
        that is not kept.
        """
        job = queued_form(job, user_id)
        sealed = self._cipher(user_id).encrypt(encode_job(job))
        try:
            async with (
                asyncio.timeout(2.0 if without_database else None),
                self.database.session() as session,
            ):
                is_new, known = await kept_jobs.add_job(
                    session, user_id, job.job_id, sealed=sealed, digest=digest
                )
        except (DatabaseUnavailable, TimeoutError):
            if not without_database:
                raise
            log.warning("job_not_kept", job_id=job.job_id)
            return await self.queue.enqueue(job)
        if known is not None and known.digest != digest:
            raise JobIdReused(f"The id {job.job_id} belongs to another job. Choose another id.")
        if not is_new:
            return False
        try:
            return await self.queue.enqueue(job, tag=tag_of(user_id))
        except (RedisError, OSError) as error:
            log.warning("job_waits_for_valkey", job_id=job.job_id, error=type(error).__name__)
            return True

    async def enqueue_for_application(
        self, application: str, jobs: Sequence[Job], digests: Sequence[str]
    ) -> list[KeptReply]:
        """Keeps jobs of an application's types and puts them on their queues: all of them, or none.

        `digests` are as for `enqueue`; an empty one stands for a job whose id nobody has chosen.
        While Valkey is away they wait. An id that a direct producer has given to another job is
        refused, or that job would be shown as this one. Raises `JobIdReused`, `MalformedMessage`,
        `DatabaseUnavailable`.
        """
        owner = application_tag(application)
        cipher = self._cipher(owner)
        rows = [
            {
                "user_id": owner,
                "job_id": job.job_id,
                "sealed": cipher.encrypt(encode_job(job)),
                "digest": digest,
                "type": job.name,
                "type_version": job.type_version,
            }
            for job, digest in zip(jobs, digests, strict=True)
        ]
        async with self.database.session() as session:
            new = await kept_jobs.add_jobs(session, rows)
            digest_of = dict(zip((job.job_id for job in jobs), digests, strict=True))
            await _refuse_reused(session, owner, digest_of)
            chosen = [job for job in jobs if job.job_id in new and digest_of[job.job_id]]
            await self._refuse_direct(chosen, owner)
        fresh = [queued_form(job, owner) for job in jobs if job.job_id in new]
        try:
            replies = await self.queue.enqueue_many(fresh, tag=owner) if fresh else []
        except (RedisError, OSError) as error:
            log.warning("jobs_wait_for_valkey", jobs=len(fresh), error=type(error).__name__)
            replies = []
        others = {
            job.job_id: reply.job_id
            for job, reply in zip(fresh, replies, strict=False)
            if reply.status == "duplicate"
        }
        if others:  # the callers get the earlier jobs
            await self.database.write(kept_jobs.delete_jobs, owner, others)
        return [KeptReply(others.get(job.job_id, job.job_id), job.job_id in others) for job in jobs]

    async def _refuse_direct(self, jobs: Sequence[Job], owner: str) -> None:
        """Raises `JobIdReused` if Valkey has another job under an id that PostgreSQL has not
        known."""
        if not jobs:
            return
        try:
            others = await self.queue.ids_of_others(jobs, tag=owner)
        except (RedisError, OSError):  # the jobs wait for Valkey
            return
        if others:
            raise _reused(min(others))

    async def keep_handler(self, owner: str, handler: Job) -> None:
        """Keeps the handler of a failure, which a runner enqueues; if Valkey loses it, it is
        enqueued again. Safe to repeat. Raises `DatabaseUnavailable`."""
        row = {
            "user_id": owner,
            "job_id": handler.job_id,
            "sealed": self._cipher(owner).encrypt(encode_job(handler)),
            "digest": "",
            "type": handler.name,
            "type_version": handler.type_version,
        }
        await self.database.write(kept_jobs.add_jobs, [row])

    async def count_open(self, user_id: str) -> int:
        """Return how many jobs of a user have not ended, as far as PostgreSQL knows: an end is
        noted within 30 s."""
        return await self.database.fetch(kept_jobs.count_open_jobs, user_id)

    async def find_row(self, job_id: str) -> KeptJob | None:
        """Returns the row of an application's job; None if there is none."""
        return await self.database.fetch(kept_jobs.find_application_job, job_id)

    async def get(self, job_id: str, user_id: str = "") -> JobState | None:
        """Returns a job that Valkey does not know: it waits to be enqueued again, or ended in the
        last days."""
        row = await self.database.fetch(kept_jobs.find_job, user_id, job_id)
        return None if row is None else JobState(job_id, row.outcome or "waiting", row.type)

    async def end(self, job_id: str, user_id: str, outcome: str) -> bool:
        """Marks a job as ended and empties it. Returns False if there is none."""
        return await self.database.write(kept_jobs.end_job, user_id, job_id, outcome)

    async def change(self, job_id: str, user_id: str, **values: Any) -> bool:
        """Sets columns of a job that has not ended, or has failed. Returns False if there is
        none."""
        return await self.database.write(kept_jobs.change_job, user_id, job_id, values)

    def unseal(self, row: KeptJob) -> Job:
        """Raises `MalformedMessage`."""
        try:
            return read_job(self._cipher(row.user_id).decrypt(row.sealed))
        except InvalidToken:
            raise MalformedMessage("it was altered, or its message secret was retired") from None

    def _cipher(self, user_id: str) -> MultiFernet:
        keys = self.queue.secrets.kept_keys(user_id)
        return MultiFernet([Fernet(urlsafe_b64encode(key.key)) for key in keys])


def queued_form(job: Job, owner: str) -> Job:
    """Returns a kept job as it is in the queue. The fleet's and an application's results are kept
    until their end is noted in PostgreSQL, which may be away for as long (`KeptJobSweeper`)."""
    if owner and not application_of_tag(owner):
        return job
    return msgspec.structs.replace(job, result_ttl=max(job.result_ttl, FLEET_RESULT_TTL_S))


async def _refuse_reused(session: AsyncSession, owner: str, digests: Mapping[str, str]) -> None:
    """Raises `JobIdReused` if another job has one of these ids, in this application or another
    one."""
    for other, job_id, digest in await kept_jobs.digests_outside_users(session, digests):
        if other != owner or digest != digests[job_id]:
            raise _reused(job_id)


def _reused(job_id: str) -> JobIdReused:
    return JobIdReused(f"The id {job_id} belongs to another job. Choose another id.")
