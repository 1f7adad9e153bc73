"""Jobs that were accepted and have not ended, and the settings of job queues.

`user_id` is empty for the fleet's jobs and settings, and the tag of an application (`app:<name>`)
for the application's; no user's id has a colon.
"""

from collections.abc import Collection, Mapping, Sequence
from datetime import datetime
from typing import Any

from sqlalchemy import Index, String, and_, delete, func, or_, select, text, update
from sqlalchemy.dialects.postgresql import insert
from sqlalchemy.ext.asyncio import AsyncSession
from sqlalchemy.orm import Mapped, mapped_column

from infra.database.locks import lease_due, seconds_from_now
from infra.database.models import Base

#: Seconds between two checks of a job that has not ended, each by one process.
CHECK_INTERVAL_S = 30.0


class KeptJob(Base):
    """A job that was accepted.

    `user_id` holds the owner of the job's queue, which need not be a user: it is empty for the
    fleet's jobs and has the tag `app:<name>` for an application's.
    """

    __tablename__ = "kept_jobs"
    __table_args__ = (
        Index("kept_jobs_to_check", "check_at", postgresql_where=text("check_at is not null")),
        Index("kept_jobs_by_id", "job_id", postgresql_where=text("user_id like 'app:%'")),
    )

    user_id: Mapped[str] = mapped_column(String(64), primary_key=True)
    job_id: Mapped[str] = mapped_column(String(128), primary_key=True)
    #: The job, encrypted; empty once nobody needs it any more.
    sealed: Mapped[bytes]
    #: The digest of the request that chose the id; a repeat has the same.
    digest: Mapped[str] = mapped_column(String(64))
    created_at: Mapped[datetime] = mapped_column(server_default=func.clock_timestamp())
    #: When it is compared with Valkey; null: it has ended.
    check_at: Mapped[datetime | None] = mapped_column(
        server_default=seconds_from_now(CHECK_INTERVAL_S)
    )
    #: Valkey has lost it. The next check enqueues it: by then any earlier run has ended.
    missing: Mapped[bool] = mapped_column(server_default=text("false"))
    #: `done`, `failed` or `cancelled`; null: it has not ended. A failed one may be opened again.
    outcome: Mapped[str | None] = mapped_column(String(16))
    ended_at: Mapped[datetime | None]
    #: The type of an application's job, and the version that validated the arguments.
    type: Mapped[str | None] = mapped_column(String(160))
    type_version: Mapped[int | None]


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


async def load_settings(session: AsyncSession) -> Sequence[JobSettings]:
    return (await session.scalars(select(JobSettings))).all()


async def add_job(
    session: AsyncSession, user_id: str, job_id: str, *, sealed: bytes, digest: str
) -> tuple[bool, KeptJob | None]:
    """Adds a job. Returns whether it is new, and else the job that has this id already.

    A user's job that is done or cancelled is replaced if the same request asks for it again.
    """
    values = {"sealed": sealed, "digest": digest}
    restarted = {
        "outcome": None,
        "created_at": func.clock_timestamp(),
        "check_at": seconds_from_now(CHECK_INTERVAL_S),
    }
    may_run_again = (
        KeptJob.user_id != "",
        KeptJob.digest == digest,
        KeptJob.outcome.in_(("done", "cancelled")),
    )
    added = (
        insert(KeptJob)
        .values(user_id=user_id, job_id=job_id, **values)
        .on_conflict_do_update(
            index_elements=["user_id", "job_id"],
            set_=values | restarted,
            where=and_(*may_run_again),
        )
        .returning(KeptJob.job_id)
    )
    if await session.scalar(added) is not None:
        return True, None
    return False, await session.get(KeptJob, (user_id, job_id))


async def add_jobs(session: AsyncSession, rows: Sequence[Mapping[str, Any]]) -> set[str]:
    """Adds jobs, and returns the ids of those that were not known."""
    added = insert(KeptJob).values(rows).on_conflict_do_nothing().returning(KeptJob.job_id)
    return set(await session.scalars(added))


async def digests_outside_users(
    session: AsyncSession, job_ids: Collection[str]
) -> Sequence[tuple[str, str, str]]:
    """Returns owner, id and digest of the fleet's and the applications' jobs with these ids."""
    known = select(KeptJob.user_id, KeptJob.job_id, KeptJob.digest).where(
        KeptJob.job_id.in_(job_ids), or_(KeptJob.user_id == "", KeptJob.user_id.like("app:%"))
    )
    return [(owner, job_id, digest) for owner, job_id, digest in await session.execute(known)]


async def delete_jobs(session: AsyncSession, user_id: str, job_ids: Collection[str]) -> None:
    await session.execute(
        delete(KeptJob).where(KeptJob.user_id == user_id, KeptJob.job_id.in_(job_ids))
    )


async def count_open_jobs(session: AsyncSession, user_id: str) -> int:
    rows = select(func.count()).where(KeptJob.user_id == user_id, KeptJob.outcome.is_(None))
    return await session.scalar(rows) or 0


async def find_job(session: AsyncSession, user_id: str, job_id: str) -> KeptJob | None:
    return await session.get(KeptJob, (user_id, job_id))


async def find_application_job(session: AsyncSession, job_id: str) -> KeptJob | None:
    row = select(KeptJob).where(KeptJob.job_id == job_id, KeptJob.user_id.like("app:%"))
    return (await session.scalars(row)).first()


async def change_job(
    session: AsyncSession, user_id: str, job_id: str, values: Mapping[str, Any]
) -> bool:
    """Sets columns of a job that has not ended, or has failed. Returns False if there is none."""
    live = or_(KeptJob.outcome.is_(None), KeptJob.outcome == "failed")
    this = KeptJob.user_id == user_id, KeptJob.job_id == job_id, live
    row = update(KeptJob).where(*this).values(values).returning(KeptJob.job_id)
    return await session.scalar(row) is not None


async def end_job(session: AsyncSession, user_id: str, job_id: str, outcome: str) -> bool:
    """Marks a job as ended and empties it. Returns False if there is none."""
    ended = {
        "outcome": outcome,
        "ended_at": func.clock_timestamp(),
        "check_at": None,
        "sealed": b"",
    }
    return await change_job(session, user_id, job_id, ended)


async def check_now(session: AsyncSession, user_id: str, job_ids: Collection[str]) -> None:
    """Makes these jobs due for a check, except those that have ended for good."""
    live = KeptJob.user_id == user_id, KeptJob.sealed != b"", KeptJob.job_id.in_(job_ids)
    await session.execute(update(KeptJob).where(*live).values(check_at=func.clock_timestamp()))


async def lease_due_jobs(session: AsyncSession, limit: int) -> Sequence[KeptJob]:
    """Returns jobs that are due for a check; no other process gets them for `CHECK_INTERVAL_S`."""
    due = lease_due(KeptJob.check_at).returning(KeptJob)
    return (await session.scalars(due, {"most": limit, "lease": CHECK_INTERVAL_S})).all()
