"""The timeline of a user's worker, as PostgreSQL keeps it."""

from __future__ import annotations

from collections.abc import Sequence

from sqlalchemy.ext.asyncio import AsyncSession

from api.http.streams import ServerEvent
from api.workers.schemas import PresentState, TransitionView
from infra.database.engine import Database
from infra.database.models import WorkerTransition
from infra.database.workers import timeline

#: Rows that a stream reads at once.
PAGE = 100


async def transitions(
    session: AsyncSession, user_id: str, *, after: int | None, limit: int
) -> list[TransitionView]:
    """The next changes behind `after`, or the last ones without it; oldest first, at most `limit`."""
    if after is None:
        rows = await timeline.latest_transitions(session, user_id, limit)
    else:
        rows = await timeline.transitions_of_user(session, user_id, after=after, limit=limit)
    return [_view(row) for row in rows]


def _view(row: WorkerTransition) -> TransitionView:
    return TransitionView(
        id=row.id,
        at=row.at,
        before=row.before,
        after=row.after,
        reason=row.reason,
        worker_id=row.worker_id or None,
        epoch=row.epoch or None,
        deadline=row.deadline,
    )


class TimelineFeed:
    """`EventFeed` of one user's timeline."""

    channel = timeline.TIMELINE_CHANNEL

    def __init__(self, database: Database, user_id: str) -> None:
        self._database = database
        self.key = user_id

    async def current_event(self) -> ServerEvent:
        """The state after the last change: what follows in the stream goes on from there."""
        async with self._database.session() as session:
            last = await transitions(session, self.key, after=None, limit=1)
        now = last[0] if last else None
        state = PresentState(
            user_id=self.key,
            state=now.after if now else None,
            since=now.at if now else None,
            reason=now.reason if now else None,
            worker_id=now.worker_id if now else None,
            epoch=now.epoch if now else None,
            deadline=now.deadline if now else None,
        )
        return ServerEvent(now.id if now else 0, "state", state.model_dump_json())

    async def events_after(self, last: int) -> Sequence[ServerEvent]:
        async with self._database.session() as session:
            found = await transitions(session, self.key, after=last, limit=PAGE)
        return [ServerEvent(one.id, "transition", one.model_dump_json()) for one in found]
