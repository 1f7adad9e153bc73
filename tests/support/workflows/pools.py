"""Contains the calls of a pool that tests of its workflow make."""

from __future__ import annotations

from datetime import timedelta
from typing import Any

from temporalio.client import WorkflowHandle
from temporalio.service import RPCError, RPCStatusCode
from temporalio.testing import WorkflowEnvironment

from tests.support.workflows.fakes import until
from workflows import names
from workflows.worker_pool.messages import PoolInput, PoolView, SetPolicy
from workflows.worker_pool.policy import PoolPolicy
from workflows.worker_pool.workflow import WorkerPoolWorkflow

Pool = WorkflowHandle[WorkerPoolWorkflow, None]

#: Statuses of queries that are sent again.
RETRIED_STATUSES = (
    RPCStatusCode.CANCELLED,
    RPCStatusCode.DEADLINE_EXCEEDED,
    RPCStatusCode.UNAVAILABLE,
)


async def start_pool(env: WorkflowEnvironment, target: int, **given: Any) -> Pool:
    given.setdefault("policy", PoolPolicy(target=target))
    return await env.client.start_workflow(
        WorkerPoolWorkflow.run,
        PoolInput(**given),
        id=names.worker_pool_id("default"),
        task_queue=names.LIFECYCLE_QUEUE,
    )


async def view_pool(handle: Pool) -> PoolView:
    """Returns the view of the pool.

    The time-skipping server never answers a query that meets the end of a run which continues as
    new, and a server drops a query whose workflow task failed ("buffered query cleared, please
    retry"). This asks again.
    """
    while True:
        try:
            return await handle.query(WorkerPoolWorkflow.view, rpc_timeout=timedelta(seconds=3))
        except RPCError as error:
            if error.status not in RETRIED_STATUSES:
                raise


async def until_pool_ready(handle: Pool, count: int) -> PoolView:
    async def ready() -> bool:
        return (await view_pool(handle)).ready == count

    await until(ready)
    return await view_pool(handle)


async def set_policy(handle: Pool, policy: PoolPolicy, **given: Any) -> PoolView:
    view: PoolView = await handle.execute_update(
        "set_policy", SetPolicy(policy=policy, **given), result_type=PoolView
    )
    return view
