"""A pool's workflow: its view, and what operators ask of it."""

from __future__ import annotations

import asyncio
from datetime import timedelta

from temporalio.client import (
    Client,
    WorkflowUpdateFailedError,
    WorkflowUpdateRPCTimeoutOrCancelledError,
)
from temporalio.exceptions import ApplicationError

from api.http.errors import NoPool, OrchestratorUnavailable, PoolChanged
from infra.temporal.client import temporal_errors
from workflows.names import worker_pool_id
from workflows.worker_pool.messages import POOL_CHANGED, PoolView, SetPolicy
from workflows.worker_pool.policy import PoolPolicyInvalid

#: Seconds for one answer. A count that is under way may hold the workflow's task up.
TIMEOUT = 10.0


class PoolControl:
    """Every method raises `NoPool`, `TemporalUnavailable`, `OrchestratorUnavailable`."""

    def __init__(self, client: Client) -> None:
        self._client = client

    async def view(self, pool: str) -> PoolView:
        handle = self._client.get_workflow_handle(worker_pool_id(pool))
        with temporal_errors(missing=_no_pool(pool)):
            view: PoolView = await handle.query(
                "view", result_type=PoolView, rpc_timeout=timedelta(seconds=TIMEOUT)
            )
        return view

    async def set_policy(self, pool: str, wanted: SetPolicy) -> PoolView:
        """Also raises `PoolPolicyInvalid`, `PoolChanged`."""
        return await self._update(pool, "set_policy", wanted)

    async def change_mode(self, pool: str, name: str) -> PoolView:
        """`name`: `pause`, `resume` or `drain`."""
        return await self._update(pool, name)

    async def _update(self, pool: str, name: str, *args: object) -> PoolView:
        handle = self._client.get_workflow_handle(worker_pool_id(pool))
        try:
            with temporal_errors(missing=_no_pool(pool)):
                async with asyncio.timeout(TIMEOUT):
                    view: PoolView = await handle.execute_update(name, args=args, result_type=PoolView)
        except (TimeoutError, WorkflowUpdateRPCTimeoutOrCancelledError):
            raise OrchestratorUnavailable from None
        except WorkflowUpdateFailedError as failed:
            cause = failed.cause
            kind = cause.type if isinstance(cause, ApplicationError) else ""
            if kind == PoolPolicyInvalid.code:
                raise PoolPolicyInvalid(str(cause)) from None
            if kind == POOL_CHANGED:
                raise PoolChanged(str(cause)) from None
            # It closed under the update, or is still on a release without it: a moment later it is not.
            raise OrchestratorUnavailable(f"the pool did not take it: {cause}") from None
        return view


def _no_pool(pool: str) -> NoPool:
    return NoPool(f"there is no pool {pool}")
