"""The timeline of users' workers: every change of state, once and in order."""

from collections.abc import Mapping, Sequence
from typing import Any

from sqlalchemy import func, select
from sqlalchemy.dialects.postgresql import insert
from sqlalchemy.ext.asyncio import AsyncSession

from infra.database.models import WorkerTransition
from infra.database.workers.sessions import at_unix

#: PostgreSQL notifies this channel, with the user's id, when a timeline grows.
TIMELINE_CHANNEL = "berth_timeline"
#: The first half of the writers' advisory locks; it cannot collide with a lock of one number.
_TIMELINE_LOCK_CLASS = 0x6274
#: Characters kept of a reason and of other texts.
_MAX_REASON_LENGTH = 1000
_MAX_NAME_LENGTH = 128


async def record_transitions(
    session: AsyncSession, *, user_id: str, chain: str, transitions: Sequence[Mapping[str, Any]]
) -> int:
    """Adds the changes that are new and notifies `TIMELINE_CHANNEL`; returns how many were new.

    `transitions`: the fields of `workflows.user_worker.messages.Transition`.
    """
    if not transitions:
        return 0
    # One writer per user at a time: ids are assigned before the commit, so without the lock a
    # reader that continues after an id could miss a lower one that is committed later.
    await session.execute(
        select(func.pg_advisory_xact_lock(_TIMELINE_LOCK_CLASS, func.hashtext(user_id)))
    )
    rows = [_values(user_id, chain, transition) for transition in transitions]
    row = insert(WorkerTransition).values(rows)
    row = row.on_conflict_do_nothing(constraint="worker_transitions_number")
    new = len((await session.scalars(row.returning(WorkerTransition.id))).all())
    if new:
        await session.execute(select(func.pg_notify(TIMELINE_CHANNEL, user_id)))
    return new


async def transitions_of_user(
    session: AsyncSession, user_id: str, *, after: int | None, limit: int
) -> list[WorkerTransition]:
    """Returns at most `limit` changes, oldest first:
    the next above the id `after`, or, without, the last."""
    query, number = (
        select(WorkerTransition).filter_by(user_id=user_id).limit(limit),
        WorkerTransition.id,
    )
    if after is None:
        return list(await session.scalars(query.order_by(number.desc())))[::-1]
    return list(await session.scalars(query.where(number > after).order_by(number)))


def _values(user_id: str, chain: str, transition: Mapping[str, Any]) -> dict[str, object]:
    deadline = transition["deadline"]
    return {
        **transition,
        "user_id": user_id,
        "chain": chain,
        "at": at_unix(transition["at"]),
        "reason": _clean(transition["reason"], _MAX_REASON_LENGTH),
        "worker_id": _clean(transition["worker_id"], _MAX_NAME_LENGTH),
        "deadline": None if deadline is None else at_unix(deadline),
    }


def _clean(text: str, limit: int) -> str:
    """Replaces NUL, which PostgreSQL refuses: the activity would be retried for ever."""
    return text.replace("\x00", " ")[:limit]
