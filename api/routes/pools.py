"""Pools of free workers, for operators: look, resize, pause, drain, resume."""

from __future__ import annotations

from dataclasses import asdict
from typing import Annotated, Any

from fastapi import APIRouter, Path

from api import problems
from api.auth import Caller, Principal, require_staff
from api.errors import (
    BodyTooLarge,
    Forbidden,
    NoPool,
    OrchestratorUnavailable,
    PoolChanged,
    TemporalUnavailable,
)
from api.routes.services import InServices
from api.schemas.fields import ID_PATTERN
from api.schemas.pools import Pool, PutPool
from api.schemas.workers import Why
from api.services.container import Services
from infra.database import audit
from infra.market.windows import ZoneUnknown, zone_of
from workflows.pool_messages import SetPolicy
from workflows.pool_policy import PoolPolicyInvalid, check

router = APIRouter(prefix="/pools/{pool}", tags=["pools"])

PoolName = Annotated[str, Path(pattern=ID_PATTERN, max_length=64, examples=["default"])]

_REFUSED = (Forbidden, NoPool, TemporalUnavailable, OrchestratorUnavailable)


async def note(
    services: Services, caller: Principal, pool: str, asked: str, reason: str, **data: Any
) -> None:
    """Before it is done, so that nothing is done unseen."""
    async with services.database.session() as session:
        audit.append(
            session,
            actor=f"key:{caller.key_id}",
            action=f"pool.{asked}_requested",
            subject=f"pool:{pool}",
            reason=reason,
            **data,
        )


@router.get("", summary="Look at a pool", responses=problems.responses(*_REFUSED))
async def get_pool(pool: PoolName, caller: Caller, services: InServices) -> Pool:
    """How many free workers it wants and why, what it has, and how its launches fare."""
    require_staff(caller)
    return Pool.of(await services.pools.view(pool))


@router.put(
    "",
    summary="Resize a pool",
    responses=problems.responses(*_REFUSED, BodyTooLarge, PoolPolicyInvalid, ZoneUnknown, PoolChanged),
)
async def put_pool(pool: PoolName, body: PutPool, caller: Caller, services: InServices) -> Pool:
    """Gives the pool a new policy. It stays until it is changed again, here or by the settings."""
    require_staff(caller)
    policy = body.policy()
    check(policy)
    for window in policy.windows:
        zone_of(window.zone)
    await note(services, caller, pool, "policy", body.reason, policy=asdict(policy))
    return Pool.of(await services.pools.set_policy(pool, SetPolicy(policy=policy, revision=body.revision)))


async def _steer(pool: str, caller: Principal, services: Services, body: Why | None, asked: str) -> Pool:
    require_staff(caller)
    await note(services, caller, pool, asked, (body or Why()).reason)
    return Pool.of(await services.pools.steer(pool, asked))


@router.post("/pause", summary="Pause a pool", responses=problems.responses(*_REFUSED, BodyTooLarge))
async def pause_pool(pool: PoolName, caller: Caller, services: InServices, body: Why | None = None) -> Pool:
    """Nothing is launched for the pool until it is resumed; free workers can still be claimed."""
    return await _steer(pool, caller, services, body, "pause")


@router.post("/drain", summary="Drain a pool", responses=problems.responses(*_REFUSED, BodyTooLarge))
async def drain_pool(pool: PoolName, caller: Caller, services: InServices, body: Why | None = None) -> Pool:
    """Stops all free workers, and launches none until it is resumed. Users keep theirs."""
    return await _steer(pool, caller, services, body, "drain")


@router.post("/resume", summary="Resume a pool", responses=problems.responses(*_REFUSED, BodyTooLarge))
async def resume_pool(pool: PoolName, caller: Caller, services: InServices, body: Why | None = None) -> Pool:
    """Ends a pause or a drain; after failed launches, the next one is tried at once."""
    return await _steer(pool, caller, services, body, "resume")
