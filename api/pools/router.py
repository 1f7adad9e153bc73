"""Routes for operators: pools of free workers, and the rollouts of pools."""

from dataclasses import asdict
from typing import Annotated

from fastapi import APIRouter, Path

from api.container import AuthorizedCall, Call
from api.http import errors, problems
from api.http.fields import ID_PATTERN
from api.pools.schemas import PoolPolicyRequest, PoolStatusView, RolloutRequest, RolloutStatusView
from api.workers.schemas import GivenReason
from infra.database.images import ImageNotAllowed, require_allowed
from infra.market.windows import ZoneUnknown, zone_of
from workflows.worker_pool.messages import SetPolicy
from workflows.worker_pool.policy import PoolPolicyInvalid, check_policy

router = APIRouter(prefix="/pools/{pool}", tags=["pools"])

PoolName = Annotated[str, Path(pattern=ID_PATTERN, max_length=64, examples=["default"])]

_POOL_PROBLEMS = (
    errors.NoPool,
    errors.PoolRebuilding,
    errors.TemporalUnavailable,
    errors.OrchestratorUnavailable,
    errors.WorkflowPaused,
)


@router.get("", summary="Get a pool", responses=problems.responses(*_POOL_PROBLEMS))
async def get_pool(pool: PoolName, call: Call) -> PoolStatusView:
    """Says how many free workers it wants and why, how many it has, and how its launches fare."""
    return PoolStatusView.of(await call.services.pools.view(pool))


@router.put(
    "",
    summary="Set a pool's size policy",
    responses=problems.responses(
        *_POOL_PROBLEMS, PoolPolicyInvalid, ZoneUnknown, errors.PoolChanged
    ),
)
async def put_pool(pool: PoolName, body: PoolPolicyRequest, call: Call) -> PoolStatusView:
    """Replaces the policy, until it is changed again, here or by the settings."""
    policy = body.policy()
    check_policy(policy)
    for window in policy.windows:
        zone_of(window.zone)
    await call.audit(
        "pool.policy_requested", f"pool:{pool}", reason=body.reason, policy=asdict(policy)
    )
    request = SetPolicy(policy=policy, revision=body.revision)
    return PoolStatusView.of(await call.services.pools.update(pool, "set_policy", request))


async def _change_mode(pool: str, call: AuthorizedCall, reason: str, asked: str) -> PoolStatusView:
    await call.audit(f"pool.{asked}_requested", f"pool:{pool}", reason=reason)
    return PoolStatusView.of(await call.services.pools.update(pool, asked))


@router.post("/pause", summary="Pause a pool", responses=problems.responses(*_POOL_PROBLEMS))
async def pause_pool(pool: PoolName, call: Call, reason: GivenReason) -> PoolStatusView:
    """Launches nothing until the pool is resumed; free workers can still be claimed."""
    return await _change_mode(pool, call, reason, "pause")


@router.post("/drain", summary="Drain a pool", responses=problems.responses(*_POOL_PROBLEMS))
async def drain_pool(pool: PoolName, call: Call, reason: GivenReason) -> PoolStatusView:
    """Stops all free workers, and launches none until the pool is resumed. Users keep theirs."""
    return await _change_mode(pool, call, reason, "drain")


@router.post("/resume", summary="Resume a pool", responses=problems.responses(*_POOL_PROBLEMS))
async def resume_pool(pool: PoolName, call: Call, reason: GivenReason) -> PoolStatusView:
    """Ends a pause or a drain; after failed launches, the next one is tried at once."""
    return await _change_mode(pool, call, reason, "resume")


_ROLLOUT_PROBLEMS = (
    errors.TemporalUnavailable,
    errors.OrchestratorUnavailable,
    errors.WorkflowPaused,
)


@router.get(
    "/rollout",
    summary="Get a pool's rollout",
    responses=problems.responses(*_ROLLOUT_PROBLEMS, errors.NoRollout),
)
async def get_rollout(pool: PoolName, call: Call) -> RolloutStatusView:
    """Says how far it is, or how the last one ended."""
    return RolloutStatusView.of(await call.services.rollouts.view(pool))


@router.post(
    "/rollout",
    summary="Start a rollout",
    status_code=202,
    responses=problems.responses(
        *_ROLLOUT_PROBLEMS,
        errors.NoPool,
        errors.RolloutInvalid,
        errors.RolloutUnderWay,
        ImageNotAllowed,
    ),
)
async def start_rollout(pool: PoolName, body: RolloutRequest, call: Call) -> RolloutStatusView:
    """Replaces the pool's workers by ones of another version. A new worker is ready before an old
    one ends, and a rollout that fails goes back by itself.

    An image has to be on the list of `GET /v1/images`, which administrators keep.
    """
    if body.image and not body.version:
        raise errors.RolloutInvalid("an image needs the version that its workers report")
    await call.database.fetch(require_allowed, body.image)
    before = (await call.services.pools.view(pool)).release
    if body.version and body.version == before.version and body.image != before.image:
        raise errors.RolloutInvalid(
            f"the pool's workers are of version {body.version} already: another image needs "
            "another version"
        )
    given = body.given(pool, call.actor)
    target = {"version": body.version, "image": body.image}
    await call.audit("pool.rollout_requested", f"pool:{pool}", reason=body.reason, **target)
    return RolloutStatusView.of(await call.services.rollouts.start(given, before))


@router.post(
    "/rollout/abort",
    summary="Abort a rollout",
    status_code=202,
    responses=problems.responses(*_ROLLOUT_PROBLEMS, errors.NoRollout),
)
async def abort_rollout(pool: PoolName, call: Call, reason: GivenReason) -> RolloutStatusView:
    """Puts the version that the pool had before back in the same way. The answer may not show it
    yet."""
    await call.audit("pool.rollout_abort_requested", f"pool:{pool}", reason=reason)
    return RolloutStatusView.of(await call.services.rollouts.abort(pool, reason))
