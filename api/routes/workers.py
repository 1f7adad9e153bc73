"""A user's worker."""

from __future__ import annotations

import asyncio
from datetime import UTC, datetime
from typing import Annotated

from fastapi import APIRouter, Query, Response, status

from api import problems
from api.auth import Caller, Principal, require_staff, require_user
from api.errors import (
    BodyTooLarge,
    Forbidden,
    NotFound,
    NoWorker,
    OrchestratorUnavailable,
    TemporalUnavailable,
    ValkeyUnavailable,
)
from api.routes.services import InServices
from api.schemas.fields import UserIdInPath
from api.schemas.workers import Lifecycle, Mark, Reloaded, Signalled, StartedWorker, Why, Worker
from api.services.container import Services
from infra.database import audit, users
from worker_runtime.protocol import errors, keys
from workflows.messages import ActiveWorker, UserWorkerView

router = APIRouter(prefix="/users/{user_id}/worker", tags=["workers"])

#: Seconds that `start` waits unless the caller says otherwise.
START_WAIT = 30.0
Wait = Annotated[float, Query(ge=0, le=60, allow_inf_nan=False, description="Seconds to wait for it.")]


async def known(services: Services, caller: Principal, user_id: str) -> None:
    """Raises `NotFound` or `UserNotFound`. A user's own key proves that the user exists."""
    require_user(caller, user_id)
    if caller.user_id != user_id:
        async with services.database.session() as session:
            await users.get(session, user_id)


async def _note(services: Services, caller: Principal, user_id: str, asked: str, why: Why | None) -> None:
    """Who asked for what and why, in the audit trail: before it is done, so that nothing is done unseen."""
    async with services.database.session() as session:
        audit.append(
            session,
            actor=f"key:{caller.key_id}",
            action=f"worker.{asked}_requested",
            subject=f"user:{user_id}",
            reason=(why or Why()).reason,
        )


def _time(seconds: float | None) -> datetime | None:
    return datetime.fromtimestamp(seconds, UTC) if seconds else None


#: Metadata that the orchestrator and the worker need between themselves, and nobody else.
_INTERNAL = frozenset({"public_key", "proof", "claim"})


@router.get(
    "",
    summary="Look at the worker",
    responses=problems.responses(NotFound, TemporalUnavailable, ValkeyUnavailable, OrchestratorUnavailable),
)
async def get_worker(user_id: UserIdInPath, caller: Caller, services: InServices) -> Worker:
    """The worker from both sides: its own mark and metadata, and what its workflow says."""
    await known(services, caller, user_id)
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
    told = {name: value for name, value in told.items() if name not in _INTERNAL}
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
        health=view.health,
        health_at=_time(view.health_at),
        crashes=view.crashes,
        last_activity=_time(view.last_activity),
    )


@router.post(
    "/start",
    summary="Start the worker",
    response_model=StartedWorker,
    responses={
        202: {"model": Signalled, "description": "It is starting, and takes longer than `wait` seconds."},
        **problems.responses(
            NotFound,
            BodyTooLarge,
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
    user_id: UserIdInPath,
    caller: Caller,
    services: InServices,
    body: Why | None = None,
    wait: Wait = START_WAIT,
) -> Response:
    """Makes the user's worker Active: one that is already is simply returned. Safe to repeat."""
    await known(services, caller, user_id)
    marked = await services.valkey.exists(keys.mark(user_id))
    task = services.starter.ensure(user_id, mark_missing=not marked)
    await _note(services, caller, user_id, "start", body)  # beside the start, which it would slow down
    await asyncio.wait({task}, timeout=wait)
    if not task.done() or task.cancelled():
        return _under_way(user_id, "start")
    return Response(_started(user_id, task.result()).model_dump_json(), media_type="application/json")


def _under_way(user_id: str, signal: str) -> Response:
    body = Signalled(user_id=user_id, signal=signal).model_dump_json()
    location = {"Location": f"/v1/users/{user_id}/worker"}
    return Response(body, status.HTTP_202_ACCEPTED, location, "application/json")


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
    user_id: UserIdInPath, caller: Caller, services: InServices, body: Why | None = None
) -> Signalled:
    """Asks the worker to finish the order in hand, close its broker sessions and end."""
    await known(services, caller, user_id)
    await _note(services, caller, user_id, "stop", body)
    await services.control.stop(user_id, (body or Why()).reason)
    return Signalled(user_id=user_id, signal="shutdown")


@router.post(
    "/resume",
    status_code=status.HTTP_202_ACCEPTED,
    summary="Let a parked user start again",
    responses=problems.responses(NotFound, NoWorker, Forbidden, BodyTooLarge, TemporalUnavailable),
)
async def resume_worker(
    user_id: UserIdInPath, caller: Caller, services: InServices, body: Why | None = None
) -> Signalled:
    """Ends the parking of a user whose worker crashed too often; the next order or start begins anew.

    For operators and administrators. A user that is not parked stays as it is.
    """
    require_staff(caller)
    await known(services, caller, user_id)
    await _note(services, caller, user_id, "resume", body)
    await services.control.resume(user_id)
    return Signalled(user_id=user_id, signal="resume")


@router.post(
    "/reload-credentials",
    response_model=Reloaded,
    summary="Reload the credentials",
    responses={
        202: {"model": Signalled, "description": "The worker is told; it takes longer than `wait` seconds."},
        **problems.responses(
            NotFound,
            NoWorker,
            BodyTooLarge,
            errors.LoginRejected,
            errors.LoginLimited,
            errors.BrokerUnreachable,
            errors.WorkerUnavailable,
            TemporalUnavailable,
            OrchestratorUnavailable,
        ),
    },
)
async def reload_credentials(
    user_id: UserIdInPath,
    caller: Caller,
    services: InServices,
    body: Why | None = None,
    wait: Wait = 0.0,
) -> Response:
    """Has the running worker load what is stored now; only accounts that changed are reconnected.

    Without `wait` the worker is only told (202). With it the answer is the worker's: 200, or a problem, such
    as `LOGIN_REJECTED` when the broker refused the new credentials; the old session then stays up.
    """
    await known(services, caller, user_id)
    await _note(services, caller, user_id, "reload", body)
    if wait > 0:
        detail = await services.control.reload_credentials_now(user_id, wait)
        if detail is not None:
            return Response(
                Reloaded(user_id=user_id, detail=detail).model_dump_json(), media_type="application/json"
            )
    else:
        await services.control.reload_credentials(user_id)
    return _under_way(user_id, "reload_credentials")
