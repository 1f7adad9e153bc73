"""A user's worker."""

from __future__ import annotations

import asyncio
from datetime import UTC, datetime
from typing import Annotated

from fastapi import APIRouter, Query, Response, status

from api import problems
from api.auth import Caller, Principal, require_user
from api.errors import (
    BodyTooLarge,
    NotFound,
    NoWorker,
    OrchestratorUnavailable,
    TemporalUnavailable,
    ValkeyUnavailable,
)
from api.routes.services import InServices
from api.schemas.fields import UserIdInPath
from api.schemas.workers import Lifecycle, Mark, Signalled, StartedWorker, StopWorker, Worker
from api.services.container import Services
from infra.database import users
from worker_runtime.protocol import errors, keys
from workflows.messages import ActiveWorker, UserWorkerView

router = APIRouter(prefix="/users/{user_id}/worker", tags=["workers"])

#: Seconds that `start` waits unless the caller says otherwise.
START_WAIT = 30.0
Wait = Annotated[float, Query(ge=0, le=60, allow_inf_nan=False, description="Seconds to wait for it.")]


async def _known(services: Services, caller: Principal, user_id: str) -> None:
    """Raises `NotFound` or `UserNotFound`. A user's own key proves that the user exists."""
    require_user(caller, user_id)
    if caller.user_id != user_id:
        async with services.database.session() as session:
            await users.get(session, user_id)


def _time(seconds: float | None) -> datetime | None:
    return datetime.fromtimestamp(seconds, UTC) if seconds else None


@router.get(
    "",
    summary="Look at the worker",
    responses=problems.responses(NotFound, TemporalUnavailable, ValkeyUnavailable, OrchestratorUnavailable),
)
async def get_worker(user_id: UserIdInPath, caller: Caller, services: InServices) -> Worker:
    """The worker from both sides: its own mark and metadata, and what its workflow says."""
    await _known(services, caller, user_id)
    pipeline = services.valkey.pipeline(transaction=False)
    pipeline.get(keys.mark(user_id))
    pipeline.hgetall(keys.metadata(user_id))
    marked, metadata = await pipeline.execute()
    view = await services.control.view(user_id)
    mark = None
    if marked:
        epoch, _, worker_id = marked.decode().partition(":")
        mark = Mark(worker_id=worker_id, epoch=int(epoch))
    told = {name.decode(): value.decode(errors="replace") for name, value in metadata.items()}
    state = told.get("state") if mark else None
    return Worker(
        user_id=user_id,
        live=mark is not None,
        state=state or (view.state if view else None),
        mark=mark,
        metadata=told,
        lifecycle=_lifecycle(view) if view else None,
    )


def _lifecycle(view: UserWorkerView) -> Lifecycle:
    worker = view.worker
    return Lifecycle(
        state=view.state,
        since=datetime.fromtimestamp(view.since, UTC),
        worker_id=worker.worker_id if worker else None,
        task_id=worker.task_id if worker else None,
        epoch=worker.epoch if worker else None,
        attempts=view.attempts,
        reason=view.reason,
        next_step=view.next_step,
        deadline=_time(view.deadline),
    )


@router.post(
    "/start",
    summary="Start the worker",
    response_model=StartedWorker,
    responses={
        202: {"model": Signalled, "description": "It is starting, and takes longer than `wait` seconds."},
        **problems.responses(
            NotFound,
            errors.Parked,
            errors.UnknownAccount,
            errors.LoginRejected,
            errors.LoginLimited,
            errors.BrokerUnreachable,
            errors.WorkerUnavailable,
            TemporalUnavailable,
            ValkeyUnavailable,
        ),
    },
)
async def start_worker(
    user_id: UserIdInPath, caller: Caller, services: InServices, wait: Wait = START_WAIT
) -> Response:
    """Makes the user's worker Active: one that is already is simply returned. Safe to repeat."""
    await _known(services, caller, user_id)
    marked = await services.valkey.exists(keys.mark(user_id))
    task = services.starter.ensure(user_id, mark_missing=not marked)
    await asyncio.wait({task}, timeout=wait)
    if not task.done() or task.cancelled():
        body = Signalled(user_id=user_id, signal="start").model_dump_json()
        location = {"Location": f"/v1/users/{user_id}/worker"}
        return Response(body, status.HTTP_202_ACCEPTED, location, "application/json")
    return Response(_started(user_id, task.result()).model_dump_json(), media_type="application/json")


def _started(user_id: str, active: ActiveWorker) -> StartedWorker:
    return StartedWorker(
        user_id=user_id,
        state=active.state,
        worker_id=active.worker.worker_id,
        epoch=active.worker.epoch,
        pool=active.worker.pool,
        version=active.worker.version,
        warm=active.worker.warm,
        claimed_at=_time(active.claimed_at),
        connected_at=_time(active.connected_at),
    )


@router.post(
    "/stop",
    status_code=status.HTTP_202_ACCEPTED,
    summary="Stop the worker",
    responses=problems.responses(NotFound, NoWorker, BodyTooLarge, TemporalUnavailable),
)
async def stop_worker(
    user_id: UserIdInPath, caller: Caller, services: InServices, body: StopWorker | None = None
) -> Signalled:
    """Asks the worker to finish the order in hand, close its broker sessions and end."""
    await _known(services, caller, user_id)
    await services.control.stop(user_id, (body or StopWorker()).reason)
    return Signalled(user_id=user_id, signal="shutdown")


@router.post(
    "/reload-credentials",
    status_code=status.HTTP_202_ACCEPTED,
    summary="Reload the credentials",
    responses=problems.responses(NotFound, NoWorker, TemporalUnavailable),
)
async def reload_credentials(user_id: UserIdInPath, caller: Caller, services: InServices) -> Signalled:
    """Has the running worker load what is stored now; only accounts that changed are reconnected."""
    await _known(services, caller, user_id)
    await services.control.reload_credentials(user_id)
    return Signalled(user_id=user_id, signal="reload_credentials")
