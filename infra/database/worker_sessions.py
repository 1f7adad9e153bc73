"""Assignments of workers to users: the source of every epoch."""

from __future__ import annotations

from collections.abc import Collection
from datetime import UTC, datetime

from sqlalchemy import func, select, update
from sqlalchemy.ext.asyncio import AsyncSession

from infra.database.models import User, WorkerSession
from infra.database.users import UserNotFound


def at_unix(seconds: float) -> datetime:
    return datetime.fromtimestamp(seconds, UTC)


async def assign(session: AsyncSession, *, user_id: str, claim_id: str, pool: str) -> int:
    """The epoch of this claim: one more than the user's last one; the same again for the same claim.

    Raises `UserNotFound`.
    """
    # The row lock on the user puts concurrent claims of one user in order.
    user = await session.scalar(select(User).where(User.id == user_id).with_for_update())
    if user is None:
        raise UserNotFound(f"there is no user {user_id}")
    before = await session.scalar(select(WorkerSession.epoch).where(WorkerSession.claim_id == claim_id))
    if before is not None:
        return before
    user.epoch += 1
    session.add(WorkerSession(claim_id=claim_id, user_id=user_id, epoch=user.epoch, pool=pool))
    await session.flush()
    return user.epoch


async def set_worker(
    session: AsyncSession, *, claim_id: str, worker_id: str, task_id: str, warm: bool
) -> None:
    """Notes which worker the claim got; the worker and the time stay those of the first call."""
    await session.execute(
        update(WorkerSession)
        .where(WorkerSession.claim_id == claim_id)
        .where(WorkerSession.worker_id.is_(None) | (WorkerSession.worker_id == worker_id))
        .values(
            worker_id=worker_id,
            task_id=task_id,
            warm=warm,
            claimed_at=func.coalesce(WorkerSession.claimed_at, func.clock_timestamp()),
        )
    )


async def of_claim(session: AsyncSession, claim_id: str) -> WorkerSession | None:
    return await session.scalar(select(WorkerSession).where(WorkerSession.claim_id == claim_id))


async def set_connected(session: AsyncSession, *, claim_id: str, at: float) -> None:
    """`at` in Unix seconds; the first call counts."""
    await session.execute(
        update(WorkerSession)
        .where(WorkerSession.claim_id == claim_id, WorkerSession.connected_at.is_(None))
        .values(connected_at=at_unix(at))
    )


async def end(session: AsyncSession, *, claim_id: str, reason: str) -> None:
    """Closes an assignment; the first reason counts."""
    await session.execute(
        update(WorkerSession)
        .where(WorkerSession.claim_id == claim_id, WorkerSession.ended_at.is_(None))
        .values(ended_at=func.clock_timestamp(), end_reason=reason)
    )


async def latest(session: AsyncSession, user_id: str) -> WorkerSession | None:
    return await session.scalar(
        select(WorkerSession)
        .where(WorkerSession.user_id == user_id)
        .order_by(WorkerSession.epoch.desc())
        .limit(1)
    )


async def of_worker(session: AsyncSession, worker_id: str) -> WorkerSession | None:
    """The open assignment of a worker."""
    return await session.scalar(
        select(WorkerSession)
        .where(WorkerSession.worker_id == worker_id, WorkerSession.ended_at.is_(None))
        .order_by(WorkerSession.epoch.desc())
        .limit(1)
    )


async def serves_another(session: AsyncSession, worker_id: str, claim_id: str) -> bool:
    """Whether this worker has an open assignment other than `claim_id`."""
    found = await session.scalar(
        select(WorkerSession.claim_id)
        .where(
            WorkerSession.worker_id == worker_id,
            WorkerSession.claim_id != claim_id,
            WorkerSession.ended_at.is_(None),
        )
        .limit(1)
    )
    return found is not None


async def serving_at(session: AsyncSession, user_id: str, at: datetime) -> WorkerSession | None:
    """The assignment under which the user was served at a time (for an order's timeline)."""
    return await session.scalar(
        select(WorkerSession)
        .where(
            WorkerSession.user_id == user_id,
            (WorkerSession.ended_at.is_(None)) | (WorkerSession.ended_at > at),
            WorkerSession.worker_id.is_not(None),
        )
        .order_by(WorkerSession.epoch)
        .limit(1)
    )


async def last_of_worker(session: AsyncSession, worker_id: str) -> WorkerSession | None:
    """The assignment of a worker, open or ended: a worker belongs to one user in its life."""
    return await session.scalar(
        select(WorkerSession)
        .where(WorkerSession.worker_id == worker_id)
        .order_by(WorkerSession.epoch.desc())
        .limit(1)
    )


async def with_open_assignment(session: AsyncSession, worker_ids: Collection[str]) -> set[str]:
    """Those of these workers that belong to a user now."""
    found = await session.scalars(
        select(WorkerSession.worker_id).where(
            WorkerSession.worker_id.in_(worker_ids), WorkerSession.ended_at.is_(None)
        )
    )
    return {worker_id for worker_id in found if worker_id}
