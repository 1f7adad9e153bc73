"""Assignments of workers to users: the source of every epoch.

Which users have which workers, and what they trade: for those who plan a move.
"""

from __future__ import annotations

from collections.abc import Collection
from dataclasses import dataclass
from datetime import UTC, datetime, timedelta
from typing import Any, NamedTuple

from sqlalchemy import (
    ColumnElement,
    Interval,
    ScalarSelect,
    Select,
    Text,
    and_,
    any_,
    bindparam,
    func,
    literal,
    null,
    or_,
    select,
    update,
)
from sqlalchemy.dialects.postgresql import ARRAY, aggregate_order_by
from sqlalchemy.ext.asyncio import AsyncConnection, AsyncSession
from sqlalchemy.orm import aliased

from infra.database.models import BrokerAccount, User, WorkerSession
from infra.database.users import UserNotFound


def at_unix(seconds: float) -> datetime:
    return datetime.fromtimestamp(seconds, UTC)


@dataclass(frozen=True, kw_only=True)
class AssignmentResult:
    #: 0: nothing was assigned, because of `crashes`.
    epoch: int
    #: Unix seconds of the crashes that were looked at.
    crashes: tuple[float, ...] = ()
    #: What an earlier call of this claim got.
    worker_id: str = ""
    task_id: str = ""
    #: The assignment of this claim is over: nothing may be claimed for it any more.
    ended: bool = False
    #: Another assignment of the user whose worker has not been confirmed to have ended: then nothing was
    #: assigned (one-owner).
    unended: WorkerSession | None = None


async def assign_epoch(
    session: AsyncSession,
    *,
    user_id: str,
    claim_id: str,
    pool: str,
    crash_limit: int = 0,
    crash_window: float = 0.0,
) -> AssignmentResult:
    """The epoch of this claim: one more than the user's last one; the same again for the same claim.

    With `crash_limit`, that many crashes within `crash_window` seconds keep a new claim from being assigned
    (see `_recent_crashes`). So does a worker of another claim whose end was never confirmed: its workflow was
    terminated, or a call of a claim long over comes late, from an orchestrator that stood still. Raises
    `UserNotFound`.
    """
    # The row lock on the user puts concurrent claims of one user in order.
    locked = _WITH_CRASHES if crash_limit else _WITHOUT_CRASHES
    found = (
        await session.execute(locked, {"user": user_id, "window": timedelta(seconds=crash_window)})
    ).one_or_none()
    if found is None:
        raise UserNotFound(f"there is no user {user_id}")
    user, times = found[0], tuple(float(at) for at in found[1] or ())
    # A statement of its own: only one that begins after the lock was got sees what its holder wrote.
    rows = (await session.scalars(_own_and_open(user_id, claim_id))).all()
    before = next((row for row in rows if row.claim_id == claim_id), None)
    if before is None and crash_limit and len(times) >= crash_limit:
        return AssignmentResult(epoch=0, crashes=times)
    unended = next((row for row in rows if row.claim_id != claim_id), None)
    if before is not None:
        return AssignmentResult(
            epoch=before.epoch,
            crashes=times,
            worker_id=before.worker_id or "",
            task_id=before.task_id or "",
            ended=before.ended_at is not None,
            unended=unended,
        )
    if unended is not None:
        return AssignmentResult(epoch=0, crashes=times, unended=unended)
    user.epoch += 1
    session.add(WorkerSession(claim_id=claim_id, user_id=user_id, epoch=user.epoch, pool=pool))
    await session.flush()
    return AssignmentResult(epoch=user.epoch, crashes=times)


def _own_and_open(user_id: str, claim_id: str) -> Select[WorkerSession]:
    """The claim's own row, and those of the user whose workers may still run; the latest first."""
    return (
        select(WorkerSession)
        .where(
            or_(
                WorkerSession.claim_id == claim_id,
                and_(
                    WorkerSession.user_id == user_id,
                    WorkerSession.ended_at.is_(None),
                    WorkerSession.worker_id.is_not(None),
                ),
            )
        )
        .order_by(WorkerSession.epoch.desc())
    )


def _recent_crashes() -> ScalarSelect[list[float]]:
    """Unix seconds of the user's crashes of late, since a worker last served and ended in order.

    An orderly end shows that the cause is gone, also to an operator who let a parked user start again. A
    crash counts whether or not the connect was written down: that is told by an event, which a flushed
    Valkey loses. Whether the worker was in service is known to the workflow, which says so to `end_session`.
    """
    earlier = aliased(WorkerSession)
    served = (
        select(func.coalesce(func.max(earlier.epoch), 0))
        .where(
            earlier.user_id == bindparam("user"),
            earlier.crashed.is_(False),
            earlier.connected_at.is_not(None),
            earlier.ended_at.is_not(None),
        )
        .scalar_subquery()
    )
    at = func.extract("epoch", WorkerSession.ended_at)
    return (
        select(func.array_agg(aggregate_order_by(at, WorkerSession.ended_at)))
        .where(
            WorkerSession.user_id == bindparam("user"),
            WorkerSession.crashed,
            WorkerSession.ended_at > func.clock_timestamp() - bindparam("window", type_=Interval),
            WorkerSession.epoch > served,
        )
        .scalar_subquery()
    )


def _locked(crashes: ColumnElement[Any]) -> Select[tuple[User, Any]]:
    return select(User, crashes).where(User.id == bindparam("user")).with_for_update(of=User)


# Built once: a person waits for the claim, and building the larger one took 1 ms of it.
_WITHOUT_CRASHES = _locked(null())
_WITH_CRASHES = _locked(_recent_crashes())


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


async def session_of_claim(session: AsyncSession, claim_id: str) -> WorkerSession | None:
    return await session.scalar(select(WorkerSession).where(WorkerSession.claim_id == claim_id))


async def set_connected(session: AsyncSession, *, claim_id: str, at: float) -> None:
    """`at` in Unix seconds; the first call counts."""
    await session.execute(
        update(WorkerSession)
        .where(WorkerSession.claim_id == claim_id, WorkerSession.connected_at.is_(None))
        .values(connected_at=at_unix(at))
    )


async def end_session(session: AsyncSession, *, claim_id: str, reason: str, crashed: bool = False) -> str:
    """Closes an assignment; the first reason and time count, and a crash stays one.

    A worker that crashed may have said before that it closes: then the crash is noted afterwards. Returns the
    worker of an assignment that this call closed or changed; '' if it had none, or nothing changed.
    """
    changed: ColumnElement[bool] = WorkerSession.ended_at.is_(None)
    if crashed:
        changed = changed | WorkerSession.crashed.is_(False)
    worker_id = await session.scalar(
        update(WorkerSession)
        .where(WorkerSession.claim_id == claim_id, changed)
        .values(
            ended_at=func.coalesce(WorkerSession.ended_at, func.clock_timestamp()),
            end_reason=func.coalesce(WorkerSession.end_reason, reason),
            crashed=or_(WorkerSession.crashed, literal(crashed)),
        )
        .returning(WorkerSession.worker_id)
    )
    return worker_id or ""


async def latest_session(session: AsyncSession, user_id: str) -> WorkerSession | None:
    return await session.scalar(
        select(WorkerSession)
        .where(WorkerSession.user_id == user_id)
        .order_by(WorkerSession.epoch.desc())
        .limit(1)
    )


async def open_session_of_worker(session: AsyncSession, worker_id: str) -> WorkerSession | None:
    """The open assignment of a worker."""
    return await session.scalar(
        select(WorkerSession)
        .where(WorkerSession.worker_id == worker_id, WorkerSession.ended_at.is_(None))
        .order_by(WorkerSession.epoch.desc())
        .limit(1)
    )


async def assigned_workers(session: AsyncSession, worker_ids: Collection[str]) -> set[str]:
    """Those of these workers that have an open assignment: one query, however many there are."""
    asked = literal(list(worker_ids), ARRAY(Text))
    found = await session.scalars(
        select(WorkerSession.worker_id).where(
            WorkerSession.worker_id == any_(asked), WorkerSession.ended_at.is_(None)
        )
    )
    return {worker_id for worker_id in found if worker_id is not None}


async def count_claims(session: AsyncSession, pool: str, seconds: float) -> int:
    """How many workers of this pool, warm or cold, were given to users within the last `seconds`."""
    found = await session.scalar(
        select(func.count()).where(
            WorkerSession.pool == pool,
            WorkerSession.claimed_at > func.clock_timestamp() - timedelta(seconds=seconds),
        )
    )
    return found or 0


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


async def session_at(session: AsyncSession, user_id: str, at: datetime) -> WorkerSession | None:
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


class WorkerInService(NamedTuple):
    """The present assignment of a user whose worker has had its mark."""

    claim_id: str
    user_id: str
    worker_id: str
    epoch: int

    @property
    def mark(self) -> bytes:
        """What the mark says while this worker lives."""
        return f"{self.epoch}:{self.worker_id}".encode()


#: The connect is told by an event, which can be lost: after so long, a claimed worker counts all the same.
#: Three logins of 20 s with their pauses take less.
_LONG_CLAIMED = timedelta(minutes=2)

_IN_SERVICE = (
    select(
        WorkerSession.claim_id,
        WorkerSession.user_id,
        func.coalesce(WorkerSession.worker_id, "").label("worker_id"),
        WorkerSession.epoch,
    )
    # An older assignment that nobody closed is none any more.
    .join(User, (User.id == WorkerSession.user_id) & (User.epoch == WorkerSession.epoch))
    .where(
        WorkerSession.ended_at.is_(None),
        WorkerSession.worker_id.is_not(None),
        or_(
            WorkerSession.connected_at.is_not(None),
            WorkerSession.claimed_at < func.clock_timestamp() - _LONG_CLAIMED,
        ),
    )
)


async def workers_in_service(connection: AsyncConnection) -> list[WorkerInService]:
    """All workers whose mark should be there, for the watcher."""
    return [WorkerInService(*row) for row in await connection.execute(_IN_SERVICE)]


async def last_session_of_worker(session: AsyncSession, worker_id: str) -> WorkerSession | None:
    """The assignment of a worker, open or ended: a worker belongs to one user in its life."""
    return await session.scalar(
        select(WorkerSession)
        .where(WorkerSession.worker_id == worker_id)
        .order_by(WorkerSession.epoch.desc())
        .limit(1)
    )


class WorkerInUse(NamedTuple):
    user_id: str
    worker_id: str
    #: Of the user's accounts: `stock`, `futures`.
    markets: list[str]


async def workers_in_use(session: AsyncSession, worker_ids: Collection[str]) -> list[WorkerInUse]:
    """The users of these workers, as far as their assignments are open, in order of their ids."""
    if not worker_ids:
        return []
    kind = BrokerAccount.broker_type
    rows = await session.execute(
        select(
            WorkerSession.user_id,
            WorkerSession.worker_id,
            func.array_agg(aggregate_order_by(kind.distinct(), kind)),
        )
        .join(BrokerAccount, BrokerAccount.user_id == WorkerSession.user_id)
        .where(WorkerSession.ended_at.is_(None), WorkerSession.worker_id.in_(worker_ids))
        .group_by(WorkerSession.user_id, WorkerSession.worker_id)
        .order_by(WorkerSession.user_id)
    )
    return [WorkerInUse(user_id, worker_id or "", list(markets)) for user_id, worker_id, markets in rows]
