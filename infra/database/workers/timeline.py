"""The timeline of users' workers: every change of state, once and in order."""

from collections.abc import Sequence
from dataclasses import asdict, dataclass

from sqlalchemy import func, select
from sqlalchemy.dialects.postgresql import insert
from sqlalchemy.ext.asyncio import AsyncSession

from infra.database.models import WorkerTransition
from infra.database.workers.sessions import at_unix

#: PostgreSQL notifies this channel, with the user's id, when a timeline grows.
TIMELINE_CHANNEL = "berth_timeline"
#: The first half of the writers' advisory locks; it cannot collide with a lock of one number.
_TIMELINE_LOCKS = 0x6274
#: Characters kept of a reason and of other texts.
_REASON = 1000
_NAME = 128


@dataclass(frozen=True, kw_only=True)
class NewTransition:
    """One change of state. Times are Unix seconds."""

    #: Grows by one within a chain of runs.
    number: int
    at: float
    before: str
    after: str
    reason: str = ""
    worker_id: str = ""
    epoch: int = 0
    deadline: float | None = None


async def record_transitions(
    session: AsyncSession, *, user_id: str, chain: str, transitions: Sequence[NewTransition]
) -> int:
    """Adds the changes that are new and notifies `TIMELINE_CHANNEL`; returns how many were new."""
    if not transitions:
        return 0
    # One writer per user at a time: ids are assigned before the commit, so without the lock a reader that
    # continues after an id could miss a lower one that is committed later.
    await session.execute(select(func.pg_advisory_xact_lock(_TIMELINE_LOCKS, func.hashtext(user_id))))
    rows = [_values(user_id, chain, transition) for transition in transitions]
    added = await session.scalars(
        insert(WorkerTransition)
        .values(rows)
        .on_conflict_do_nothing(constraint="worker_transitions_number")
        .returning(WorkerTransition.id)
    )
    new = len(added.all())
    if new:
        await session.execute(select(func.pg_notify(TIMELINE_CHANNEL, user_id)))
    return new


async def transitions_of_user(
    session: AsyncSession, user_id: str, *, after: int = 0, limit: int = 100
) -> list[WorkerTransition]:
    """Returns at most `limit` changes with an id above `after`, oldest first."""
    found = await session.scalars(
        select(WorkerTransition)
        .where(WorkerTransition.user_id == user_id, WorkerTransition.id > after)
        .order_by(WorkerTransition.id)
        .limit(limit)
    )
    return list(found)


async def latest_transitions(session: AsyncSession, user_id: str, limit: int = 1) -> list[WorkerTransition]:
    """Returns the last `limit` changes, oldest first."""
    found = await session.scalars(
        select(WorkerTransition)
        .where(WorkerTransition.user_id == user_id)
        .order_by(WorkerTransition.id.desc())
        .limit(limit)
    )
    return list(found)[::-1]


def _values(user_id: str, chain: str, transition: NewTransition) -> dict[str, object]:
    return {
        **asdict(transition),
        "user_id": user_id,
        "chain": chain,
        "at": at_unix(transition.at),
        "reason": _clean(transition.reason, _REASON),
        "worker_id": _clean(transition.worker_id, _NAME),
        "deadline": None if transition.deadline is None else at_unix(transition.deadline),
    }


def _clean(text: str, limit: int) -> str:
    """Replaces NUL, which PostgreSQL refuses: the activity would be retried for ever."""
    return text.replace("\x00", " ")[:limit]
