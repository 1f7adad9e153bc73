"""The timeline of a user's worker."""

from __future__ import annotations

from typing import Annotated

from fastapi import APIRouter, Header, Query
from fastapi.responses import StreamingResponse

from api import problems
from api.auth import Caller
from api.errors import NotFound, TooManyStreams
from api.routes.services import InServices
from api.routes.workers import known
from api.schemas.fields import UserIdInPath
from api.schemas.timeline import Timeline
from api.services.timeline import TimelineFeed, transitions

router = APIRouter(prefix="/users/{user_id}/worker", tags=["workers"])

#: The largest id that PostgreSQL could give out.
_MOST = 2**63 - 1
After = Annotated[int | None, Query(ge=0, le=_MOST, description="Only changes behind this id.")]
Limit = Annotated[int, Query(ge=1, le=1000, description="Most changes of one answer.")]
LastEventId = Annotated[
    int | None,
    Header(ge=0, le=_MOST, description="Sent by a client that comes back; it goes before `after`."),
]


@router.get(
    "/timeline", summary="Look at the worker's changes of state", responses=problems.responses(NotFound)
)
async def get_timeline(
    user_id: UserIdInPath, caller: Caller, services: InServices, after: After = None, limit: Limit = 100
) -> Timeline:
    """The last changes of state, or with `after` the next ones behind it; oldest first.

    It is written a moment after the change.
    """
    await known(services, caller, user_id)
    async with services.database.session() as session:
        found = await transitions(session, user_id, after=after, limit=limit)
    return Timeline(user_id=user_id, transitions=found, next_after=found[-1].id if found else after or 0)


@router.get(
    "/events",
    summary="Follow the worker's changes of state",
    response_class=StreamingResponse,
    responses={
        200: {
            "description": "Server-sent events. `event: state` is how things are now (data: `PresentState`),"
            " `event: transition` one change (data: `Transition`). Both have an `id` to come back with.",
            "content": {
                "text/event-stream": {
                    "schema": {"type": "string"},
                    "example": 'event: transition\ndata: {"id":17,"before":"Connecting","after":"Active"}\n'
                    "id: 17\n\n",
                }
            },
        },
        **problems.responses(NotFound, TooManyStreams),
    },
)
async def follow_timeline(
    user_id: UserIdInPath,
    caller: Caller,
    services: InServices,
    after: After = None,
    last_event_id: LastEventId = None,
) -> StreamingResponse:
    """Changes as they happen, behind `Last-Event-ID` or `after`.

    Without either: the present state first, then what comes from now on. A comment every 15 s shows that
    the stream lives. It ends after an hour, and when the server stops: come back with the last id.
    """
    await known(services, caller, user_id)
    begin = after if last_event_id is None else last_event_id
    return await services.streams.answer(TimelineFeed(services.database, user_id), caller.key_id, begin)
