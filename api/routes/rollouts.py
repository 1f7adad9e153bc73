"""Rollouts of pools, for operators: begin one, look at it, take it back."""

from __future__ import annotations

from fastapi import APIRouter, status

from api import problems
from api.auth import Caller, require_staff
from api.errors import (
    BodyTooLarge,
    Forbidden,
    NoPool,
    NoRollout,
    OrchestratorUnavailable,
    RolloutInvalid,
    RolloutUnderWay,
    TemporalUnavailable,
)
from api.routes.pools import PoolName, note
from api.routes.services import InServices
from api.schemas.rollouts import Rollout, StartRollout
from api.schemas.workers import Why

router = APIRouter(prefix="/pools/{pool}/rollout", tags=["pools"])

_REFUSED = (Forbidden, TemporalUnavailable, OrchestratorUnavailable)


@router.get("", summary="Look at a rollout", responses=problems.responses(*_REFUSED, NoRollout))
async def get_rollout(pool: PoolName, caller: Caller, services: InServices) -> Rollout:
    """How far the pool's rollout is, or how the last one ended."""
    require_staff(caller)
    return Rollout.of(await services.rollouts.view(pool))


@router.post(
    "",
    summary="Begin a rollout",
    status_code=status.HTTP_202_ACCEPTED,
    responses=problems.responses(*_REFUSED, BodyTooLarge, NoPool, RolloutInvalid, RolloutUnderWay),
)
async def start_rollout(pool: PoolName, body: StartRollout, caller: Caller, services: InServices) -> Rollout:
    """Brings the pool to another version of the worker: make before break, and back by itself."""
    require_staff(caller)
    if body.image and not body.version:
        raise RolloutInvalid("an image needs the version that its workers report")
    before = (await services.pools.view(pool)).release
    if body.version and body.version == before.version and body.image != before.image:
        raise RolloutInvalid(
            f"the pool's workers are of version {body.version} already: another image needs another version"
        )
    given = body.given(pool, f"key:{caller.key_id}")
    await note(services, caller, pool, "rollout", body.reason, version=body.version, image=body.image)
    return Rollout.of(await services.rollouts.start(given, before))


@router.post(
    "/abort",
    summary="Take a rollout back",
    status_code=status.HTTP_202_ACCEPTED,
    responses=problems.responses(*_REFUSED, BodyTooLarge, NoRollout),
)
async def abort_rollout(
    pool: PoolName, caller: Caller, services: InServices, body: Why | None = None
) -> Rollout:
    """What the pool had before is put back in the same way. The answer may not show it yet."""
    require_staff(caller)
    reason = (body or Why()).reason
    await note(services, caller, pool, "rollout_abort", reason)
    return Rollout.of(await services.rollouts.abort(pool, reason))
