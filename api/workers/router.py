"""Routes for a user's worker and its timeline."""

import asyncio
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from typing import Annotated, Any

from fastapi import APIRouter, Query, Response
from fastapi.responses import StreamingResponse
from sqlalchemy.ext.asyncio import AsyncSession

from api.container import AuthorizedCall, Call, KnownUserId
from api.http import errors, problems
from api.http.fields import view_response
from api.http.streams import After, ServerEvent, StreamBegin
from api.workers import schemas
from infra.database import accounts
from infra.database.engine import Database
from infra.database.workers import timeline
from infra.valkey.client import read_mark, seconds_of
from worker_runtime.protocol import errors as protocol
from worker_runtime.protocol import keys
from worker_runtime.protocol.worker_reports import VALID_UNTIL, read_metadata
from workflows.user_worker.messages import ShutdownRequest, UserWorkerView

router = APIRouter(prefix="/users/{user_id}/worker", tags=["workers"])

#: Seconds that `start` waits unless the caller says otherwise.
START_TIMEOUT_S = 30.0
Wait = Annotated[
    float, Query(ge=0, le=60, allow_inf_nan=False, description="Seconds to wait for it.")
]


#: Metadata that the orchestrator and the worker need between themselves, and nobody else.
_INTERNAL = frozenset({"public_key", "proof", "claim", VALID_UNTIL})


@router.get(
    "",
    summary="Get a user's worker",
    responses=problems.responses(
        errors.TemporalUnavailable,
        errors.ValkeyUnavailable,
        errors.OrchestratorUnavailable,
        errors.WorkflowPaused,
    ),
)
async def get_worker(user_id: KnownUserId, call: Call) -> schemas.WorkerView:
    """Shows both sides: the worker's own mark and metadata, and what its workflow says.

    A mark counts as missing while the metadata next to it are not the worker's own.
    """
    marked, fields, now_ms = await read_mark(call.services.valkey, user_id)
    shown = read_metadata(
        fields, marked, user_id, now_ms, call.services.message_secrets.assignment_keys
    )
    view = await call.services.control.view(user_id)
    mark = schemas.MarkView(worker_id=shown["worker"], epoch=int(shown["epoch"])) if shown else None
    known = {name: value for name, value in shown.items() if name not in _INTERNAL}
    state = known.get("state") if mark else None
    used = seconds_of(shown.get("last_activity_ms"))
    return schemas.WorkerView(
        user_id=user_id,
        live=mark is not None,
        state=state or (view.state if view else None),
        mark=mark,
        metadata=known,
        lifecycle=_lifecycle_view(view, used) if view else None,
    )


def _lifecycle_view(view: UserWorkerView, used: float) -> schemas.LifecycleView:
    """Returns the lifecycle. `used` is the Unix time at which the worker says it was last used; the
    workflow asks it seldom."""
    worker = (
        asdict(view.worker) if view.worker else dict.fromkeys(("worker_id", "task_id", "epoch"))
    )
    health = "; ".join(filter(None, (view.health, view.note)))
    # A session that continues with replaced credentials is not healthy.
    if view.note and view.health == "well":
        health = f"degraded: {view.note}"
    known = {"last_activity": max(view.last_activity, used), "health": health}
    return schemas.LifecycleView.model_validate(asdict(view) | worker | known)


@router.post(
    "/start",
    summary="Start a user's worker",
    response_model=schemas.StartedWorkerView,
    responses={
        202: problems.answer(
            schemas.SignalledView, "It is starting, and takes longer than `wait` seconds."
        ),
        **problems.responses(*problems.WITHOUT_WORKER, protocol.UnknownAccount),
    },
)
async def start_worker(
    user_id: KnownUserId, call: Call, reason: schemas.GivenReason, wait: Wait = START_TIMEOUT_S
) -> Response:
    """Answers with the running worker if there is one already. Safe to repeat."""
    await call.database.fetch(accounts.require_login, user_id)
    await call.audit("worker.start_requested", f"user:{user_id}", reason=reason)
    marked = await call.services.valkey.exists(keys.mark(user_id))
    task = call.services.starter.ensure(user_id, check_worker=not marked)
    await asyncio.wait({task}, timeout=wait)
    if not task.done() or task.cancelled():
        return _accepted_response(call, user_id, "start")
    active = asdict(task.result())
    return view_response(
        schemas.StartedWorkerView.model_validate({"user_id": user_id} | active | active["worker"])
    )


def _accepted_response(call: AuthorizedCall, user_id: str, signal: str) -> Response:
    body = schemas.SignalledView(user_id=user_id, signal=signal)
    return view_response(body, 202, call.link(f"/v1/users/{user_id}/worker"))


@router.post(
    "/stop",
    status_code=202,
    summary="Stop a user's worker",
    responses=problems.responses(errors.NoWorker, errors.TemporalUnavailable),
)
async def stop_worker(
    user_id: KnownUserId, call: Call, reason: schemas.GivenReason
) -> schemas.SignalledView:
    """Lets the worker finish the order in hand, close its broker sessions and end."""
    await call.services.control.require_worker(user_id)  # what is refused is not noted
    await call.audit("worker.stop_requested", f"user:{user_id}", reason=reason)
    await call.services.control.signal(user_id, "shutdown", ShutdownRequest(reason=reason))
    return schemas.SignalledView(user_id=user_id, signal="shutdown")


@router.post(
    "/resume",
    status_code=202,
    summary="Let a parked user start again",
    responses=problems.responses(errors.NotFound, errors.NoWorker, errors.TemporalUnavailable),
)
async def resume_worker(
    user_id: KnownUserId, call: Call, reason: schemas.GivenReason
) -> schemas.SignalledView:
    """Applies to a user whose worker crashed too often; the next order or start launches a worker
    again.

    For operators and administrators. A user that is not parked stays as it is.
    """
    await call.services.control.require_worker(user_id)  # what is refused is not noted
    await call.audit("worker.resume_requested", f"user:{user_id}", reason=reason)
    await call.services.control.signal(user_id, "resume")
    return schemas.SignalledView(user_id=user_id, signal="resume")


@router.post(
    "/reload-credentials",
    response_model=schemas.ReloadedView,
    summary="Reload a worker's credentials",
    responses={
        202: problems.answer(
            schemas.SignalledView, "The worker is told; it takes longer than `wait` seconds."
        ),
        **problems.responses(
            errors.NoWorker,
            protocol.LoginRejected,
            protocol.LoginLimited,
            protocol.BrokerUnreachable,
            protocol.WorkerUnavailable,
            errors.TemporalUnavailable,
            errors.OrchestratorUnavailable,
        ),
    },
)
async def reload_credentials(
    user_id: KnownUserId, call: Call, reason: schemas.GivenReason, wait: Wait = 0.0
) -> Response:
    """Has the running worker load what is stored now; only accounts that changed are reconnected.

    Without `wait` the worker is only told (202). With it the answer is the worker's: 200, or a
    problem, such as `LOGIN_REJECTED` when the broker refused the new credentials; the old session
    then stays up.
    """
    await call.services.control.require_worker(user_id)  # what is refused is not noted
    await call.audit("worker.reload_requested", f"user:{user_id}", reason=reason)
    if wait > 0:
        detail = await call.services.control.reload_credentials_now(user_id, wait)
        if detail is not None:
            return view_response(schemas.ReloadedView(user_id=user_id, detail=detail))
    else:
        await call.services.control.signal(user_id, "reload_credentials")
    return _accepted_response(call, user_id, "reload_credentials")


TimelineLimit = Annotated[int, Query(ge=1, le=1000, description="Most changes of one answer.")]
#: Rows that a stream reads at once.
PAGE_SIZE = 100


async def transitions(
    session: AsyncSession, user_id: str, *, after: int | None, limit: int
) -> list[schemas.TransitionView]:
    """Returns the next changes behind `after`, or the last ones without it; oldest first, at most
    `limit`."""
    rows = await timeline.transitions_of_user(session, user_id, after=after, limit=limit)
    return [schemas.TransitionView.model_validate(row) for row in rows]


@dataclass(eq=False)
class TimelineFeed:
    """`EventFeed` of one user's timeline; `key` is the user."""

    database: Database
    key: str
    channel: str = timeline.TIMELINE_CHANNEL

    async def current_event(self) -> ServerEvent:
        """Returns the state after the last change: what follows in the stream continues from
        there."""
        async with self.database.session() as session:
            last = await transitions(session, self.key, after=None, limit=1)
        known: dict[str, Any] = dict.fromkeys(schemas.PresentState.model_fields)
        known |= {"id": 0, "user_id": self.key}
        for now in last:
            known |= now.model_dump() | {"state": now.after, "since": now.at}
        return ServerEvent(
            known["id"], "state", schemas.PresentState.model_validate(known).model_dump_json()
        )

    async def events_after(self, last: int) -> Sequence[ServerEvent]:
        async with self.database.session() as session:
            changes = await transitions(session, self.key, after=last, limit=PAGE_SIZE)
        # The client's last id is of another database.
        if not changes and 0 < (now := await self.current_event()).id < last:
            return [now]
        return [
            ServerEvent(change.id, "transition", change.model_dump_json()) for change in changes
        ]


@router.get("/timeline", summary="List a worker's changes of state")
async def get_timeline(
    user_id: KnownUserId, call: Call, after: After = None, limit: TimelineLimit = 100
) -> schemas.TimelineView:
    """Shows the last ones, or with `after` the next ones behind it; oldest first.

    It is written a moment after the change.
    """
    changes = await call.database.fetch(transitions, user_id, after=after, limit=limit)
    return schemas.TimelineView(
        user_id=user_id, transitions=changes, next_after=changes[-1].id if changes else after or 0
    )


@router.get(
    "/events",
    summary="Stream a worker's changes of state",
    response_class=StreamingResponse,
    responses={
        **problems.content(
            "Server-sent events. `event: state` is how things are now (data: `PresentState`), "
            "`event: transition` one change (data: `TransitionView`). Both have an `id` to come "
            "back with.",
            "text/event-stream",
            'event: transition\ndata: {"id":17,"before":"Connecting","after":"Active"}\nid: 17\n\n',
        ),
        **problems.responses(errors.TooManyStreams),
    },
)
async def follow_timeline(
    user_id: KnownUserId, call: Call, begin: StreamBegin
) -> StreamingResponse:
    """Begins behind `Last-Event-ID` or `after`.

    Without either: the present state first, then what comes from now on. A comment every 15 s shows
    that the stream lives. It ends after an hour, and when the server stops: come back with the last
    id.
    """
    return await call.open_stream(TimelineFeed(call.database, user_id), begin)
