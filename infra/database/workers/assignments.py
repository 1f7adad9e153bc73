"""Reads what maintenance needs of the assignments of workers, and closes those that are over."""

import math
from collections.abc import Collection, Mapping
from typing import NamedTuple

from sqlalchemy import ARRAY, String, bindparam, func, text, update
from sqlalchemy.ext.asyncio import AsyncSession

from infra.database.models import WorkerSession


class AssignmentRow(NamedTuple):
    """A row of `worker_sessions`, as far as maintenance needs it."""

    claim_id: str
    user_id: str
    #: Empty: the claim never got a worker.
    worker_id: str
    task_id: str
    epoch: int
    pool: str
    #: The user has no later assignment.
    present: bool
    connected: bool
    ended: bool
    #: Seconds since the claim, or since the end of an ended assignment, by PostgreSQL's clock.
    age: float


_COLUMNS = """
select s.claim_id, s.user_id, coalesce(s.worker_id, ''), coalesce(s.task_id, ''), s.epoch, s.pool,
       s.epoch = u.epoch, s.connected_at is not null, s.ended_at is not null,
       extract(epoch from clock_timestamp()
                          - coalesce(s.ended_at, s.claimed_at, s.assigned_at))::float8
  from worker_sessions s join users u on u.id = s.user_id
"""
_STRINGS = ARRAY(String)
_OPEN = text(_COLUMNS + " where s.ended_at is null")
_OPEN_OF = text(
    _COLUMNS + " where s.ended_at is null and "
    "(s.user_id = any(:users) or s.worker_id = any(:workers) or s.claim_id = any(:claims))"
).bindparams(*(bindparam(name, type_=_STRINGS) for name in ("users", "workers", "claims")))
_OF_WORKERS = text(_COLUMNS + " where s.worker_id = any(:workers)").bindparams(
    bindparam("workers", type_=_STRINGS)
)
_UNANSWERED_ORDERS = text(
    "select user_id, cast(id as text) from orders "
    "where user_id = any(:users) and state in ('accepted', 'queued', 'submitting') "
    "and created_at > clock_timestamp() - interval '2 days'"
).bindparams(bindparam("users", type_=_STRINGS))
_CLOSE = text(
    "update worker_sessions s "
    "set ended_at = clock_timestamp(), end_reason = coalesce(s.end_reason, given.reason) "
    "from unnest(cast(:claims as text[]), cast(:reasons as text[])) as given(claim_id, reason) "
    "where s.claim_id = given.claim_id and s.ended_at is null"
).bindparams(bindparam("claims", type_=_STRINGS), bindparam("reasons", type_=_STRINGS))


async def open_assignments(session: AsyncSession) -> list[AssignmentRow]:
    """Returns all open assignments with one query over a partial index."""
    return [AssignmentRow(*row) for row in await session.execute(_OPEN)]


async def open_assignments_of(
    session: AsyncSession, users: Collection[str], workers: Collection[str], claims: Collection[str]
) -> list[AssignmentRow]:
    arguments = {"users": list(users), "workers": list(workers), "claims": list(claims)}
    return [AssignmentRow(*row) for row in await session.execute(_OPEN_OF, arguments)]


async def assignments_of_workers(
    session: AsyncSession, workers: Collection[str]
) -> dict[str, AssignmentRow]:
    """Maps each worker that ever had one to its only assignment, open or ended."""
    if not workers:
        return {}
    rows = await session.execute(_OF_WORKERS, {"workers": list(workers)})
    return {row[2]: AssignmentRow(*row) for row in rows}


async def unanswered_orders(session: AsyncSession, users: Collection[str]) -> list[tuple[str, str]]:
    """Returns `(user, order)` of orders that a worker
    may be handling; their journal entries tell."""
    return [
        (row[0], row[1])
        for row in await session.execute(_UNANSWERED_ORDERS, {"users": list(users)})
    ]


async def close_assignments(session: AsyncSession, reasons: Mapping[str, str]) -> None:
    """Ends assignments; maps claim to reason.
    One that has ended already keeps its time and reason."""
    await session.execute(_CLOSE, {"claims": list(reasons), "reasons": list(reasons.values())})


_LEAVE_EPOCH = text(
    "with one as (select s.*, exists (select from worker_sessions l where l.user_id = s.user_id "
    "and l.epoch > s.epoch) as later from worker_sessions s where s.claim_id = :claim_id), "
    "left_behind as (update users u set epoch = one.epoch + 1 from one "
    "where u.id = one.user_id and u.epoch = one.epoch) "
    "select case when later then 0 else epoch + 1 end, "
    "extract(epoch from clock_timestamp() - fenced_at)::float8 from one"
)


async def leave_epoch(session: AsyncSession, claim_id: str) -> tuple[int, float | None]:
    """Makes this assignment a former one,
    though its end is not confirmed: no other is made until it is.

    Returns the epoch that follows it (0: a later assignment has it), and the seconds since
    `set_fenced`; for a claim without an assignment, these are endless.
    """
    row = (await session.execute(_LEAVE_EPOCH, {"claim_id": claim_id})).one_or_none()
    return (int(row[0]), row[1]) if row else (0, math.inf)


async def set_fenced(session: AsyncSession, claim_id: str) -> None:
    """Notes that the owner key names this assignment no longer; the first time counts."""
    mine = update(WorkerSession).filter_by(claim_id=claim_id, fenced_at=None)
    await session.execute(mine.values(fenced_at=func.clock_timestamp()))
