"""The workers that the orchestrator launched,
and which of them have a user: one each, once and for ever.

What a worker's entry in its pool says is not believed: a worker that somebody took over could name
another worker's task, or announce itself as free again and get the credentials of the next user.
"""

from collections.abc import Collection, Iterable, Sequence
from datetime import timedelta
from importlib.resources import files

from sqlalchemy import ARRAY, Text, any_, bindparam, func, literal, select, text
from sqlalchemy.dialects.postgresql import insert
from sqlalchemy.ext.asyncio import AsyncSession

from infra.database.models import WorkerLaunch, WorkerScript, WorkerSession
from infra.database.workers.sessions import LaunchedWorker
from worker_runtime.protocol.scripts import Script


async def record_launch(
    session: AsyncSession, *, worker_id: str, pool: str, version: str, task_id: str | None = None
) -> None:
    """Writes that a worker is launched, or the task that its launcher gave it.

    A repeat keeps the version, because it finds the worker that was launched first.
    """
    row = insert(WorkerLaunch).values(
        worker_id=worker_id, pool=pool, version=version, task_id=task_id
    )
    known = func.coalesce(row.excluded.task_id, WorkerLaunch.task_id)
    await session.execute(
        row.on_conflict_do_update(index_elements=["worker_id"], set_={"task_id": known})
    )


_FREE = text(
    "select l.worker_id, coalesce(l.task_id, ''), l.version from worker_launches l "
    "where l.worker_id = any(:workers) and l.pool = :pool "
    "and not exists (select from worker_sessions s where s.worker_id = l.worker_id)"
).bindparams(bindparam("workers", type_=ARRAY(Text)))


async def never_assigned(
    session: AsyncSession, pool: str, worker_ids: Collection[str]
) -> dict[str, LaunchedWorker]:
    """Returns those of these workers that were launched for the pool and never had a user."""
    if not worker_ids:
        return {}
    rows = await session.execute(_FREE, {"workers": list(worker_ids), "pool": pool})
    return {worker_id: LaunchedWorker(task_id, version) for worker_id, task_id, version in rows}


_FROM_BEFORE = text("""
select count(*) from worker_launches where launched_at < to_timestamp(:before) and worker_id in (
  select unnest(:ready)
  union select worker_id from worker_launches where launched_at > now() - interval '1 minute'
  union select worker_id from worker_sessions where ended_at is null
  union select worker_id from worker_sessions
         where ended_at > now() - make_interval(secs => :linger))
""").bindparams(bindparam("ready", type_=ARRAY(Text)))


async def count_launched_before(
    session: AsyncSession, before: float, *, ready: Collection[str], linger: float
) -> int:
    """Counts workers launched before this Unix time that are not known to have ended.

    `ready`: those of all pools that wait for a user. `linger`: seconds for which one with a user
    counts after its end.
    """
    asked = {"before": before, "ready": list(ready), "linger": linger}
    return int(await session.scalar(_FROM_BEFORE, asked) or 0)


async def pools_launched_for(session: AsyncSession) -> list[str]:
    """Lists every pool that a worker was ever launched for."""
    return list(await session.scalars(select(WorkerLaunch.pool).distinct()))


_PURGE = text(
    (files("infra.database") / "workers" / "old_assignments.sql").read_text(encoding="utf-8")
)
ROWS_PER_PURGE = 1000  # rows of either table; there is a purge each minute


async def purge_ended(session: AsyncSession, days: int, running: Collection[str]) -> None:
    """Removes workers that ended at least `days` ago, with their assignments, some at a time:
    of a user the oldest, in order, and never the latest. An assignment goes together with the
    launch, without which no worker is assigned, so a worker has one for ever, however long
    its launch token is valid."""
    await session.execute(_PURGE, {"days": days, "running": list(running), "rows": ROWS_PER_PURGE})


async def assigned_workers(session: AsyncSession, worker_ids: Collection[str]) -> set[str]:
    """Returns those of these workers that have an open assignment."""
    asked = WorkerSession.worker_id == any_(literal(list(worker_ids), ARRAY(Text)))
    query = select(WorkerSession.worker_id).where(asked, WorkerSession.ended_at.is_(None))
    return {worker_id for worker_id in await session.scalars(query) if worker_id is not None}


_LONG_UNASSIGNED = text(
    "select l.worker_id, l.pool from worker_launches l where l.worker_id = any(:workers) "
    "and l.launched_at < clock_timestamp() - interval '1 hour' and not exists ("
    "select from worker_sessions s where s.worker_id = l.worker_id and s.ended_at is null)"
).bindparams(bindparam("workers", type_=ARRAY(Text)))


async def long_unassigned(
    session: AsyncSession, worker_ids: Collection[str]
) -> list[tuple[str, str]]:
    """Returns those of these workers that were launched an hour ago and have no open assignment,
    with their pools."""
    rows = await session.execute(_LONG_UNASSIGNED, {"workers": list(worker_ids)})
    return [(worker_id, pool) for worker_id, pool in rows]


async def task_of(session: AsyncSession, worker_id: str) -> str:
    """Returns the task that its launcher gave this worker; empty if none is known."""
    task = select(WorkerLaunch.task_id).where(WorkerLaunch.worker_id == worker_id)
    return await session.scalar(task) or ""


async def keep_scripts(session: AsyncSession, present: Iterable[Script]) -> Sequence[str]:
    """Keeps the scripts of this release; returns the sources of all releases that workers may be
    of: those that an orchestrator had within 90 days."""
    now = func.clock_timestamp()
    row = insert(WorkerScript).values(
        [{"sha": script.sha, "source": script.source} for script in present]
    )
    await session.execute(row.on_conflict_do_update(index_elements=["sha"], set_={"seen_at": now}))
    lately = WorkerScript.seen_at > now - timedelta(days=90)
    return (await session.scalars(select(WorkerScript.source).where(lately))).all()
