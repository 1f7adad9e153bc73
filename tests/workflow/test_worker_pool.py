"""A pool is refilled at once, to exactly its target."""

from __future__ import annotations

from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from temporalio.client import WorkflowHandle
from temporalio.testing import WorkflowEnvironment

from tests.workflow.fakes import FakePool, serving, skipped, until
from workflows import messages as m
from workflows import names
from workflows.worker_pool import BACKOFF_MAX, PoolState, WorkerPoolWorkflow

Pool = WorkflowHandle[WorkerPoolWorkflow, None]


async def start(env: WorkflowEnvironment, target: int, **given: Any) -> Pool:
    return await env.client.start_workflow(
        WorkerPoolWorkflow.run,
        m.PoolInput(target=target, **given),
        id=names.worker_pool_id("default"),
        task_queue=names.LIFECYCLE_QUEUE,
    )


async def until_ready(handle: Pool, count: int) -> m.PoolView:
    async def ready() -> bool:
        return (await handle.query(WorkerPoolWorkflow.view)).ready == count

    await until(ready)
    return await handle.query(WorkerPoolWorkflow.view)


async def test_a_new_pool_is_filled_to_its_target(skipping: WorkflowEnvironment, pool: FakePool) -> None:
    async with serving(skipping.client, pool.activities()):
        view = await until_ready(await start(skipping, 3), 3)
        await skipping.sleep(600)  # ten more looks
    assert view.launches == pool.highest == len(pool.launched) == 3
    assert pool.counts > 8


async def test_workers_that_are_starting_already_are_not_launched_again(
    skipping: WorkflowEnvironment, pool: FakePool
) -> None:
    pool.starting = 2
    async with serving(skipping.client, pool.activities()):
        await until_ready(await start(skipping, 3), 1)
    assert len(pool.launched) == 1


async def test_a_claim_is_refilled_at_once(skipping: WorkflowEnvironment, pool: FakePool) -> None:
    async with serving(skipping.client, pool.activities()):
        handle = await start(skipping, 3)
        await until_ready(handle, 3)
        pool.ready.pop()
        pool.ready.pop()
        for _ in range(2):
            await handle.signal(WorkerPoolWorkflow.claimed, m.Claimed(worker_id="w"))
        await until(lambda: len(pool.launched) == 5)
        await until_ready(handle, 3)
    assert pool.highest == 3
    assert len(set(pool.launched)) == 5


async def test_signals_that_say_nothing_new_launch_nothing(
    skipping: WorkflowEnvironment, pool: FakePool
) -> None:
    async with serving(skipping.client, pool.activities()):
        handle = await start(skipping, 2)
        await until_ready(handle, 2)
        for _ in range(20):
            await handle.signal(WorkerPoolWorkflow.claimed, m.Claimed())
        await handle.signal(WorkerPoolWorkflow.worker_gone, m.WorkerGone())
        await skipping.sleep(120)
    assert len(pool.launched) == 2


async def test_failing_launches_back_off_and_recover(skipping: WorkflowEnvironment, pool: FakePool) -> None:
    pool.failures = 8
    async with serving(skipping.client, pool.activities()):
        handle = await start(skipping, 2)
        async with skipped(skipping):
            await until(lambda: len(pool.launched) == 2)
        view = await until_ready(handle, 2)
    assert view.failures == 8
    assert "no room" in view.last_failure
    assert pool.highest == 2


async def test_nothing_is_launched_while_nobody_can_count(
    skipping: WorkflowEnvironment, pool: FakePool
) -> None:
    pool.uncounted = 3
    async with serving(skipping.client, pool.activities()):
        handle = await start(skipping, 2)

        async def said() -> bool:
            return "node down" in (await handle.query(WorkerPoolWorkflow.view)).last_failure

        await until(said)
        assert not pool.launched
        await skipping.sleep(10)
        await until_ready(handle, 2)
    assert pool.highest == 2


async def test_a_smaller_target_stops_free_workers_and_a_larger_one_launches(
    skipping: WorkflowEnvironment, pool: FakePool
) -> None:
    async with serving(skipping.client, pool.activities()):
        handle = await start(skipping, 4)
        await until_ready(handle, 4)
        view = await handle.execute_update("set_target", m.SetTarget(target=1), result_type=m.PoolView)
        assert view.target == 1
        await until(lambda: len(pool.ready) == 1)
        await handle.execute_update("set_target", m.SetTarget(target=2), result_type=m.PoolView)
        await until(lambda: len(pool.ready) == 2)


async def test_a_paused_pool_launches_nothing_until_it_is_resumed(
    skipping: WorkflowEnvironment, pool: FakePool
) -> None:
    async with serving(skipping.client, pool.activities()):
        handle = await start(skipping, 2)
        await until_ready(handle, 2)
        paused = await handle.execute_update("pause", result_type=m.PoolView)
        assert paused.paused
        pool.ready.pop()
        await handle.signal(WorkerPoolWorkflow.claimed, m.Claimed())
        await skipping.sleep(300)
        assert len(pool.launched) == 2
        await handle.execute_update("resume", result_type=m.PoolView)
        await until_ready(handle, 2)
    assert len(pool.launched) == 3


async def test_a_new_run_keeps_target_and_never_repeats_a_token(
    skipping: WorkflowEnvironment, pool: FakePool
) -> None:
    async with serving(skipping.client, pool.activities()):
        handle = await start(skipping, 1)
        await until_ready(handle, 1)
        await handle.execute_update("set_target", m.SetTarget(target=2), result_type=m.PoolView)
        await until(lambda: len(pool.ready) == 2)
        latest = skipping.client.get_workflow_handle(names.worker_pool_id("default"))
        run_id = (await latest.describe()).run_id
        await latest.signal(WorkerPoolWorkflow.renew)

        async def renewed() -> bool:
            return (await latest.describe()).run_id != run_id

        await until(renewed)
        pool.ready.pop()
        await latest.signal(WorkerPoolWorkflow.claimed, m.Claimed())
        await until(lambda: len(pool.launched) == 3)
        view = await until_ready(latest, 2)
    assert view.target == 2
    assert len(set(pool.launched)) == 3


@pytest.mark.parametrize("in_flight", [0, 1, 5])
def test_failing_launches_are_tried_one_at_a_time(in_flight: int) -> None:
    state = PoolState(target=9).failed("no room", 100.0)
    assert state.allowance(in_flight, 100.5) == 0
    assert state.allowance(in_flight, 101.5) == (1 if in_flight == 0 else 0)


def test_the_backoff_doubles_up_to_its_cap_and_a_success_ends_it() -> None:
    state, pauses = PoolState(target=1), []
    for _ in range(9):
        state = state.failed("no room", 0.0)
        pauses.append(state.not_before)
    assert pauses == [1, 2, 4, 8, 16, 32, BACKOFF_MAX, BACKOFF_MAX, BACKOFF_MAX]
    assert state.launched().allowance(3, 0.0) > 1


@given(
    target=st.integers(0, 50),
    ready=st.integers(0, 50),
    starting=st.integers(0, 50),
    flying=st.integers(0, 50),
)
def test_what_is_launched_never_exceeds_the_target(
    target: int, ready: int, starting: int, flying: int
) -> None:
    gap = PoolState(target=target).gap(m.PoolCount(ready=ready, starting=starting), flying)
    if gap > 0:
        assert ready + starting + flying + gap == target
