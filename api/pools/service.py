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
from temporalio.service import RPCError, RPCStatusCode

from api.http.errors import NoPool, OrchestratorUnavailable, PoolChanged, TemporalUnavailable
from infra.temporal.client import error_of_rpc
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
        try:
            view: PoolView = await handle.query(
                "view", result_type=PoolView, rpc_timeout=timedelta(seconds=TIMEOUT)
            )
        except RPCError as error:
            raise _pool_error(error, pool) from None
        except RuntimeError:  # what a lazy client raises when its first connect fails
            raise TemporalUnavailable from None
        return view

    async def set_policy(self, pool: str, wanted: SetPolicy) -> PoolView:
        """Also raises `PoolPolicyInvalid`, `PoolChanged`."""
        return await self._update(pool, "set_policy", wanted)

    async def steer(self, pool: str, name: str) -> PoolView:
        """`name`: `pause`, `resume` or `drain`."""
        return await self._update(pool, name)

    async def _update(self, pool: str, name: str, *args: object) -> PoolView:
        handle = self._client.get_workflow_handle(worker_pool_id(pool))
        try:
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
        except RPCError as error:
            raise _pool_error(error, pool) from None
        except RuntimeError:
            raise TemporalUnavailable from None
        return view


def _pool_error(error: RPCError, pool: str) -> Exception:
    if error.status == RPCStatusCode.NOT_FOUND:
        return NoPool(f"there is no pool {pool}")
    return error_of_rpc(error)
