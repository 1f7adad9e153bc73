"""A pool that an operator makes smaller stops its surplus at once, whatever is under way."""

from __future__ import annotations

from temporalio.testing import WorkflowEnvironment

from tests.support.workflows.fakes import FakePool, serving, until
from tests.support.workflows.pools import set_policy, start_pool, until_pool_ready, view_pool
from workflows.worker_pool.messages import PoolView, SetTarget
from workflows.worker_pool.policy import PoolPolicy
from workflows.worker_pool.workflow import WorkerPoolWorkflow


async def test_a_smaller_target_is_not_forgotten_by_a_new_run(
    skipping: WorkflowEnvironment, pool: FakePool
) -> None:
    async with serving(skipping.client, pool.activities()):
        handle = await start_pool(skipping, 4, policy=PoolPolicy(target=4, shrink_after=300.0))
        await until_pool_ready(handle, 4)
        pool.may_count.clear()
        counted = pool.counts
        await handle.signal(WorkerPoolWorkflow.renew)
        await until(lambda: pool.counts > counted)
        await handle.execute_update("set_target", SetTarget(target=1), result_type=PoolView)
        pool.may_count.set()
        await until(lambda: pool.counts >= counted + 2)  # by the new run
        await until(lambda: len(pool.ready) == 1)  # at once, and not after 300 s


async def test_a_smaller_target_is_met_at_once_though_the_outcome_of_a_launch_is_unknown(
    skipping: WorkflowEnvironment, pool: FakePool
) -> None:
    pool.lost_replies = 3
    async with serving(skipping.client, pool.activities()):
        handle = await start_pool(skipping, 3)

        async def is_unsettled() -> bool:
            return (await view_pool(handle)).failures == 3

        await until(is_unsettled)
        await set_policy(handle, PoolPolicy(target=1, shrink_after=300))
        await until(lambda: len(pool.ready) == 1)


async def test_a_smaller_target_is_met_at_once_though_launches_are_under_way(
    skipping: WorkflowEnvironment, pool: FakePool
) -> None:
    pool.may_launch.clear()
    async with serving(skipping.client, pool.activities()):
        handle = await start_pool(skipping, 3)

        async def are_launched() -> bool:
            return (await view_pool(handle)).starting == 3

        await until(are_launched)
        counted = pool.counts
        await set_policy(handle, PoolPolicy(target=1, shrink_after=300))
        await until(lambda: pool.counts > counted)
        pool.may_launch.set()
        await until(lambda: len(pool.launched) == 3)
        await until(lambda: len(pool.ready) == 1)
