"""Keeps each job in PostgreSQL until it has ended, so that it survives the loss of Valkey's data.

Every producer enqueues here. A job is accepted once its row is committed. If Valkey is away, or was
flushed, the orchestrators enqueue it later (`activities/maintenance/kept_jobs.py`). Its id counts
once, also after a flush. A job may hold addresses and texts, so it is encrypted under a key of the
message secret, which no worker has. The settings of queues are here, too. `user_id` is empty for
the fleet's jobs and settings, and the tag of an application (`app:<name>`) for the application's;
no user's id has a colon.
"""

import asyncio
from base64 import urlsafe_b64encode
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from datetime import datetime
from typing import Any

import msgspec
import structlog
from cryptography.fernet import Fernet, InvalidToken, MultiFernet
from redis.exceptions import RedisError
from sqlalchemy import Index, String, and_, delete, func, or_, select, text, update
from sqlalchemy.dialects.postgresql import insert
from sqlalchemy.ext.asyncio import AsyncSession
from sqlalchemy.orm import Mapped, mapped_column

from infra.database.engine import Database, DatabaseUnavailable
from infra.database.locks import seconds_from_now
from infra.database.models import Base
from infra.jobs.client import JobClient, JobIdReused, JobState
from worker_runtime.jobs.protocol.keys import application_of_tag, application_tag, tag_of
from worker_runtime.jobs.protocol.messages import RESULT_KEPT, Job, encode_job, read_job
from worker_runtime.protocol.errors import MalformedMessage

#: Seconds between two checks of a job that has not ended, each by one process.
CHECK = 30.0

log = structlog.get_logger()


class KeptJob(Base):
    """A job that was accepted."""

    __tablename__ = "kept_jobs"
    __table_args__ = (
        Index("kept_jobs_to_check", "check_at", postgresql_where=text("check_at is not null")),
        Index("kept_jobs_by_id", "job_id", postgresql_where=text("user_id like 'app:%'")),
    )

    user_id: Mapped[str] = mapped_column(String(64), primary_key=True)
    job_id: Mapped[str] = mapped_column(String(128), primary_key=True)
    #: The job, encrypted; empty once nobody needs it any more.
    sealed: Mapped[bytes]
    #: Of the request that chose the id; a repeat has the same.
    digest: Mapped[str] = mapped_column(String(64))
    created_at: Mapped[datetime] = mapped_column(server_default=func.clock_timestamp())
    #: When it is compared with Valkey; null: it has ended.
    check_at: Mapped[datetime | None] = mapped_column(server_default=seconds_from_now(CHECK))
    #: Valkey has lost it. The next check enqueues it: by then any earlier run has ended.
    missing: Mapped[bool] = mapped_column(server_default=text("false"))
    #: `done`, `failed` or `cancelled`; null: it has not ended. A failed one may be opened again.
    outcome: Mapped[str | None] = mapped_column(String(16))
    ended_at: Mapped[datetime | None]
    #: Of an application's job: its type, and the version that validated the arguments.
    type: Mapped[str | None] = mapped_column(String(160))
    type_version: Mapped[int | None]


@dataclass(frozen=True)
class KeptReply:
    """The result of enqueuing one job. `job_id`: that of the earlier job with the same unique key,
    if there is one, else its own."""

    job_id: str
    is_duplicate: bool = False


class JobSettings(Base):
    """Limits, rates, weights and suspensions, as `configure.lua` takes them; a null was removed."""

    __tablename__ = "job_settings"

    user_id: Mapped[str] = mapped_column(String(64), primary_key=True)
    fields: Mapped[dict[str, Any]]


async def keep_settings(
    session: AsyncSession, user_id: str, fields: Mapping[str, str | None]
) -> None:
    """Sets these fields, or removes them (None). Commit it before Valkey gets them."""
    row = insert(JobSettings).values(user_id=user_id, fields=fields)
    merged = {"fields": JobSettings.fields.op("||")(row.excluded.fields)}
    await session.execute(row.on_conflict_do_update(index_elements=["user_id"], set_=merged))


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
        is refused. `without_database`: only queue the job if PostgreSQL does not answer within 2 s.
        Raises `JobIdReused`, `MalformedMessage`, `DatabaseUnavailable`.
        """
        job = queued_form(job, user_id)
        values = {"sealed": self._cipher(user_id).encrypt(encode_job(job)), "digest": digest}
        restarted = {
            "outcome": None,
            "created_at": func.clock_timestamp(),
            "check_at": seconds_from_now(CHECK),
        }
        row = insert(KeptJob).values(user_id=user_id, job_id=job.job_id, **values)
        may_run_again = (
            KeptJob.user_id != "",
            KeptJob.digest == digest,
            KeptJob.outcome.in_(("done", "cancelled")),
        )
        added = row.on_conflict_do_update(
            index_elements=["user_id", "job_id"],
            set_=values | restarted,
            where=and_(*may_run_again),
        ).returning(KeptJob.job_id)
        try:
            async with (
                asyncio.timeout(2.0 if without_database else None),
                self.database.session() as session,
            ):
                new = await session.scalar(added) is not None
                known = None if new else await session.get(KeptJob, (user_id, job.job_id))
        except (DatabaseUnavailable, TimeoutError):
            if not without_database:
                raise
            log.warning("job_not_kept", job_id=job.job_id)
            return await self.queue.enqueue(job)
        if known is not None and known.digest != digest:
            raise JobIdReused(f"another job was asked for as {job.job_id}")
        try:
            return new and await self.queue.enqueue(job, tag=tag_of(user_id))
        except (RedisError, OSError) as error:
            log.warning("job_waits_for_valkey", job_id=job.job_id, error=type(error).__name__)
            return True

    async def enqueue_for_application(
        self, application: str, jobs: Sequence[Job], digests: Sequence[str]
    ) -> list[KeptReply]:
        """Keeps jobs of an application's types and puts them on their queues: all of them, or none.

        `digests` are as for `enqueue`; an empty one stands for a job whose id nobody has chosen.
        While Valkey is away they wait. Raises `JobIdReused`, `MalformedMessage`,
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
        added = insert(KeptJob).values(rows).on_conflict_do_nothing().returning(KeptJob.job_id)
        async with self.database.session() as session:
            new = set(await session.scalars(added))
            await _refuse_reused(
                session, owner, dict(zip((job.job_id for job in jobs), digests, strict=True))
            )
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
            duplicates = KeptJob.user_id == owner, KeptJob.job_id.in_(others)
            async with self.database.session() as session:
                await session.execute(delete(KeptJob).where(*duplicates))
        return [KeptReply(others.get(job.job_id, job.job_id), job.job_id in others) for job in jobs]

    async def count_open(self, user_id: str) -> int:
        """Return how many jobs of a user have not ended, as far as PostgreSQL knows: an end is
        noted within 30 s."""
        rows = select(func.count()).where(KeptJob.user_id == user_id, KeptJob.outcome.is_(None))
        async with self.database.session(autocommit=True) as session:
            return await session.scalar(rows) or 0

    async def find_row(self, job_id: str) -> KeptJob | None:
        """The row of an application's job; None if there is none."""
        row = select(KeptJob).where(KeptJob.job_id == job_id, KeptJob.user_id.like("app:%"))
        async with self.database.session(autocommit=True) as session:
            return (await session.scalars(row)).first()

    async def get(self, job_id: str, user_id: str = "") -> JobState | None:
        """Returns a job that Valkey does not know: it waits to be enqueued again, or ended in the
        last days."""
        async with self.database.session(autocommit=True) as session:
            row = await session.get(KeptJob, (user_id, job_id))
        return None if row is None else JobState(job_id, row.outcome or "waiting", row.type)

    async def end(self, job_id: str, user_id: str, outcome: str) -> bool:
        """Marks a job as ended and empties it. Returns False if there is none."""
        ended = {
            "outcome": outcome,
            "ended_at": func.clock_timestamp(),
            "check_at": None,
            "sealed": b"",
        }
        return await self.change(job_id, user_id, **ended)

    async def change(self, job_id: str, user_id: str, **values: Any) -> bool:
        """Sets columns of a job that has not ended, or has failed. False if there is none."""
        live = or_(KeptJob.outcome.is_(None), KeptJob.outcome == "failed")
        this = KeptJob.user_id == user_id, KeptJob.job_id == job_id, live
        async with self.database.session() as session:
            row = update(KeptJob).where(*this).values(values).returning(KeptJob.job_id)
            return await session.scalar(row) is not None

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
    return msgspec.structs.replace(job, result_ttl=max(job.result_ttl, RESULT_KEPT))


async def _refuse_reused(session: AsyncSession, owner: str, digests: Mapping[str, str]) -> None:
    """Raises `JobIdReused` if another job has one of these ids, in this application or another
    one."""
    known = select(KeptJob.user_id, KeptJob.job_id, KeptJob.digest).where(
        KeptJob.job_id.in_(digests), or_(KeptJob.user_id == "", KeptJob.user_id.like("app:%"))
    )
    for other, job_id, digest in await session.execute(known):
        if other != owner or digest != digests[job_id]:
            raise JobIdReused(f"The id {job_id} belongs to another job. Choose another id.")
