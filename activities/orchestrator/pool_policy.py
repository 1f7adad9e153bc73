"""Starts the pool's workflow, and gives it the policy of the settings."""

from __future__ import annotations

from dataclasses import asdict
from datetime import timedelta
from typing import Any

import msgspec
import structlog
from temporalio.client import Client
from temporalio.common import WorkflowIDConflictPolicy

from activities.pool.sizing import checked_policy
from infra.settings import Settings
from workflows import names
from workflows.worker_pool import messages as pm
from workflows.worker_pool.policy import PoolPolicy, PoolPolicyInvalid, PoolWindow
from workflows.worker_pool.workflow import WorkerPoolWorkflow

#: Time limits of a call to the pool's workflow: the first one, and the longest. When no orchestrator serves
#: its version any more, it answers only after the mover has handed it over, in about 5 s. On a host that has
#: to replay many workflows, an answer may take some seconds.
ANSWERS = timedelta(seconds=2)
LONGEST = timedelta(seconds=16)

log = structlog.get_logger()


def policy_of(settings: Settings) -> PoolPolicy:
    """Raises `PoolPolicyInvalid`, `ZoneUnknown`."""
    return checked_policy(
        PoolPolicy(
            target=settings.pool_target,
            minimum=settings.pool_minimum,
            maximum=settings.pool_maximum or None,
            buffer=settings.pool_buffer,
            demand_minutes=settings.pool_demand_minutes,
            limit=settings.pool_limit or None,
            shrink_after=settings.pool_shrink_after,
            windows=tuple(_window(given) for given in settings.pool_windows),
        )
    )


def _window(given: dict[str, Any]) -> PoolWindow:
    try:
        return msgspec.convert(asdict(PoolWindow(**given)), PoolWindow)  # the second checks the types
    except (TypeError, msgspec.ValidationError) as error:
        raise PoolPolicyInvalid(f"BERTH_POOL_WINDOWS: {given}: {error}") from None


async def ensure_pool(temporal: Client, settings: Settings, patience: timedelta = ANSWERS) -> int:
    """Starts the pool's workflow, or gives the running one the policy of the settings, if that is new.

    What an operator has set since stays, until the settings change. Each call may take `patience`. Returns
    how many free workers there will be at least, at any hour. Raises `RPCError`, and
    `WorkflowUpdateFailedError` while the workflow is still on a version that knows no policy.
    """
    policy = policy_of(settings)
    handle = await temporal.start_workflow(
        WorkerPoolWorkflow.run,
        pm.PoolInput(
            pool=settings.pool, launch_timeout=settings.pool_launch_timeout, policy=policy, configured=policy
        ),
        id=names.worker_pool_id(settings.pool),
        task_queue=names.LIFECYCLE_QUEUE,
        id_conflict_policy=WorkflowIDConflictPolicy.USE_EXISTING,
        static_summary="keeps workers ready",
        rpc_timeout=patience,
    )
    view = await handle.query(WorkerPoolWorkflow.view, rpc_timeout=patience)
    if view.configured != policy:
        view = await handle.execute_update(
            WorkerPoolWorkflow.set_policy,
            pm.SetPolicy(policy=policy, from_settings=True),
            rpc_timeout=patience,
        )
        log.info("pool_policy_of_settings", pool=settings.pool, target=policy.target)
    kept = view.policy
    least = min([kept.target, *(window.target for window in kept.windows)])
    if kept.limit is not None:
        least = min(least, kept.limit)
    return least if view.mode == pm.PoolMode.RUNNING else 0
