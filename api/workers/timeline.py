"""The timeline of a user's worker, as PostgreSQL keeps it."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from sqlalchemy.ext.asyncio import AsyncSession

from api.http.streams import ServerEvent
from api.workers.schemas import PresentState, TransitionView
from infra.database.engine import Database
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
    return [TransitionView.model_validate(row) for row in rows]


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
        known: dict[str, Any] = dict.fromkeys(PresentState.model_fields) | {"id": 0, "user_id": self.key}
        for now in last:
            known |= now.model_dump() | {"state": now.after, "since": now.at}
        return ServerEvent(known["id"], "state", PresentState.model_validate(known).model_dump_json())

    async def events_after(self, last: int) -> Sequence[ServerEvent]:
        async with self._database.session() as session:
            found = await transitions(session, self.key, after=last, limit=PAGE)
        return [ServerEvent(one.id, "transition", one.model_dump_json()) for one in found]
