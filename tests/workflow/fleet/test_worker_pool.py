"""A pool is refilled at once, to exactly its target."""

from __future__ import annotations

import pytest
from temporalio.client import WorkflowUpdateFailedError
from temporalio.exceptions import ApplicationError
from temporalio.testing import WorkflowEnvironment

from tests.support.workflows.fakes import FakePool, serving, skipped, until
from tests.support.workflows.pools import set_policy, start_pool, until_pool_ready, view_pool
from tests.support.workflows.user_workers import action_times
from workflows import names
from workflows.worker_pool.messages import (
    NEVER_READY,
    PoolMode,
    PoolView,
    SetPolicy,
    SetTarget,
    WindowNow,
    WorkerLeft,
)
from workflows.worker_pool.policy import PoolPolicy, PoolWindow
from workflows.worker_pool.state import FAILURES_UNTIL_OPEN, PROBE_INTERVAL_S
from workflows.worker_pool.workflow import MAX_EVENTS_PER_RUN, WorkerPoolWorkflow


async def test_a_new_pool_is_filled_to_its_target(
    skipping: WorkflowEnvironment, pool: FakePool
) -> None:
    async with serving(skipping.client, pool.activities()):
        view = await until_pool_ready(await start_pool(skipping, 3), 3)
        await skipping.sleep(600)  # ten more checks
    assert view.launches == pool.highest == len(pool.launched) == 3
    assert pool.counts > 8


async def test_workers_that_are_starting_already_are_not_launched_again(
    skipping: WorkflowEnvironment, pool: FakePool
) -> None:
    pool.starting = 2
    async with serving(skipping.client, pool.activities()):
        await until_pool_ready(await start_pool(skipping, 3), 1)
    assert len(pool.launched) == 1


async def test_a_claim_is_refilled_at_once(skipping: WorkflowEnvironment, pool: FakePool) -> None:
    async with serving(skipping.client, pool.activities()):
        handle = await start_pool(skipping, 3)
        await until_pool_ready(handle, 3)
        pool.ready.pop()
        pool.ready.pop()
        for _ in range(2):
            await handle.signal(WorkerPoolWorkflow.claimed, WorkerLeft(worker_id="w"))
        await until(lambda: len(pool.launched) == 5)
        await until_pool_ready(handle, 3)
    assert pool.highest == 3
    assert len(set(pool.launched)) == 5


async def test_signals_that_say_nothing_new_launch_nothing(
    skipping: WorkflowEnvironment, pool: FakePool
) -> None:
    async with serving(skipping.client, pool.activities()):
        handle = await start_pool(skipping, 2)
        await until_pool_ready(handle, 2)
        for _ in range(20):
            await handle.signal(WorkerPoolWorkflow.claimed, WorkerLeft())
        await handle.signal(WorkerPoolWorkflow.worker_gone, WorkerLeft())
        await skipping.sleep(120)
    assert len(pool.launched) == 2


async def test_failing_launches_back_off_and_recover(
    skipping: WorkflowEnvironment, pool: FakePool
) -> None:
    pool.failures = 8
    async with serving(skipping.client, pool.activities()):
        handle = await start_pool(skipping, 2)
        async with skipped(skipping):
            await until(lambda: len(pool.launched) == 2)
        view = await until_pool_ready(handle, 2)
    assert view.failures == 8
    assert "no room" in view.last_failure
    assert pool.highest == 2


async def test_nothing_is_launched_while_nobody_can_count(
    skipping: WorkflowEnvironment, pool: FakePool
) -> None:
    pool.uncounted = 3
    async with serving(skipping.client, pool.activities()):
        handle = await start_pool(skipping, 2)

        async def said() -> bool:
            return "node down" in (await view_pool(handle)).last_failure

        await until(said)
        assert not pool.launched
        await skipping.sleep(10)
        await until_pool_ready(handle, 2)
    assert pool.highest == 2


async def test_a_smaller_target_stops_free_workers_and_a_larger_one_launches(
    skipping: WorkflowEnvironment, pool: FakePool
) -> None:
    async with serving(skipping.client, pool.activities()):
        handle = await start_pool(skipping, 4)
        await until_pool_ready(handle, 4)
        view = await handle.execute_update("set_target", SetTarget(target=1), result_type=PoolView)
        assert view.target == 1
        await until(lambda: len(pool.ready) == 1)
        await handle.execute_update("set_target", SetTarget(target=2), result_type=PoolView)
        await until(lambda: len(pool.ready) == 2)


async def test_a_paused_pool_launches_nothing_until_it_is_resumed(
    skipping: WorkflowEnvironment, pool: FakePool
) -> None:
    async with serving(skipping.client, pool.activities()):
        handle = await start_pool(skipping, 2)
        await until_pool_ready(handle, 2)
        paused = await handle.execute_update("pause", result_type=PoolView)
        assert paused.paused
        pool.ready.pop()
        await handle.signal(WorkerPoolWorkflow.claimed, WorkerLeft())
        await skipping.sleep(300)
        assert len(pool.launched) == 2
        await handle.execute_update("resume", result_type=PoolView)
        await until_pool_ready(handle, 2)
    assert len(pool.launched) == 3


async def test_a_new_run_keeps_target_and_never_repeats_a_token(
    skipping: WorkflowEnvironment, pool: FakePool
) -> None:
    async with serving(skipping.client, pool.activities()):
        handle = await start_pool(skipping, 1)
        await until_pool_ready(handle, 1)
        await handle.execute_update("set_target", SetTarget(target=2), result_type=PoolView)
        await until(lambda: len(pool.ready) == 2)
        latest = skipping.client.get_workflow_handle(names.worker_pool_id("default"))
        run_id = (await latest.describe()).run_id
        await latest.signal(WorkerPoolWorkflow.renew)

        async def renewed() -> bool:
            return (await latest.describe()).run_id != run_id

        await until(renewed)
        pool.ready.pop()
        await latest.signal(WorkerPoolWorkflow.claimed, WorkerLeft())
        await until(lambda: len(pool.launched) == 3)
        view = await until_pool_ready(latest, 2)
    assert (view.target, view.revision) == (2, 1)
    assert view.policy.buffer == "0"
    assert len(set(pool.launched)) == 3


async def test_a_long_history_ends_while_nothing_is_being_launched(
    skipping: WorkflowEnvironment, pool: FakePool
) -> None:
    """The server suggests it at 4,096 events; a process that takes the pool over has to replay them
    all."""
    async with serving(skipping.client, pool.activities()):
        latest = await start_pool(skipping, 1)
        await until_pool_ready(latest, 1)
        run_id = (await latest.describe()).run_id
        first = skipping.client.get_workflow_handle(latest.id, run_id=run_id)

        async def renewed() -> bool:
            counted = pool.counts
            await latest.signal(WorkerPoolWorkflow.claimed, WorkerLeft())
            await until(lambda: pool.counts > counted)
            return (await latest.describe()).run_id != run_id

        await until(renewed)
        events = len((await first.fetch_history()).events)
        view = await until_pool_ready(latest, 1)
    assert MAX_EVENTS_PER_RUN <= events < 2 * MAX_EVENTS_PER_RUN
    assert view.launches == len(pool.launched) == 1


async def test_a_policy_that_makes_no_sense_changes_nothing(
    skipping: WorkflowEnvironment, pool: FakePool
) -> None:
    async with serving(skipping.client, pool.activities()):
        handle = await start_pool(skipping, 2)
        await until_pool_ready(handle, 2)
        for change, code in (
            (SetPolicy(policy=PoolPolicy(target=9, maximum=8)), "POOL_POLICY_INVALID"),
            (SetPolicy(policy=PoolPolicy(target=3), revision=7), "POOL_CHANGED"),
        ):
            with pytest.raises(WorkflowUpdateFailedError) as refused:
                await handle.execute_update("set_policy", change)
            assert isinstance(refused.value.cause, ApplicationError)
            assert refused.value.cause.type == code
        with pytest.raises(WorkflowUpdateFailedError, match="update failed"):
            await handle.execute_update("set_target", SetTarget(target=-1))
        view = await set_policy(handle, PoolPolicy(target=3), revision=0)
        await until_pool_ready(handle, 3)
    assert (view.revision, view.policy) == (1, PoolPolicy(target=3))


async def test_a_window_changes_the_size_when_it_begins_and_when_it_ends(
    skipping: WorkflowEnvironment, pool: FakePool
) -> None:
    now = (await skipping.get_current_time()).timestamp()
    bell = PoolWindow(name="bell", target=5, begins="08:30", ends="09:30")

    async def window() -> WindowNow:
        at = (await skipping.get_current_time()).timestamp()
        return WindowNow(
            name="bell" if now + 100 <= at < now + 400 else "",
            until=now + 100 if at < now + 100 else now + 400 if at < now + 400 else None,
        )

    pool.window = window
    async with serving(skipping.client, pool.activities()):
        handle = await start_pool(
            skipping, 2, policy=PoolPolicy(target=2, windows=(bell,)), check_period=3600.0
        )
        view = await until_pool_ready(handle, 2)
        assert view.changes_at == pytest.approx(now + 100)
        await skipping.sleep(110)
        view = await until_pool_ready(handle, 5)
        assert view.reasons == ("window bell: 5 instead of 2",)
        await skipping.sleep(300)
        view = await until_pool_ready(handle, 2)
    assert (view.wanted, view.changes_at) == (2, None)


async def test_claims_of_the_last_minutes_and_workers_in_use_raise_the_size(
    skipping: WorkflowEnvironment, pool: FakePool
) -> None:
    async with serving(skipping.client, pool.activities()):
        sized = PoolPolicy(target=2, demand_minutes=5, buffer="50%", maximum=9)
        handle = await start_pool(skipping, 2, policy=sized)
        await until_pool_ready(handle, 2)
        pool.claims, pool.in_use = 4, 3
        await handle.signal(WorkerPoolWorkflow.claimed)
        view = await until_pool_ready(handle, 6)
        assert (view.claims, view.in_use, view.wanted) == (4, 3, 6)
        pool.claims = None  # PostgreSQL is away: the last known number counts on
        await skipping.sleep(120)
        assert (await view_pool(handle)).wanted == 6


async def test_a_surplus_is_stopped_after_a_while_and_at_once_when_an_operator_says_so(
    skipping: WorkflowEnvironment, pool: FakePool
) -> None:
    async with serving(skipping.client, pool.activities()):
        demand = PoolPolicy(target=1, demand_minutes=5, shrink_after=300)
        pool.claims = 4
        handle = await start_pool(skipping, 1, policy=demand)
        await until_pool_ready(handle, 4)
        pool.claims = 0
        await skipping.sleep(200)
        assert len(pool.ready) == 4
        await skipping.sleep(200)
        await until_pool_ready(handle, 1)
        await set_policy(handle, PoolPolicy(target=3, shrink_after=300))
        await until_pool_ready(handle, 3)
        await set_policy(handle, PoolPolicy(target=2, shrink_after=300))
        await until(lambda: len(pool.ready) == 2)


async def test_a_drained_pool_is_empty_and_stays_so(
    skipping: WorkflowEnvironment, pool: FakePool
) -> None:
    async with serving(skipping.client, pool.activities()):
        handle = await start_pool(skipping, 60, policy=PoolPolicy(target=60, shrink_after=300))
        await until_pool_ready(handle, 60)
        view = await handle.execute_update("drain", result_type=PoolView)
        assert view.mode == PoolMode.DRAINING
        await until(lambda: not pool.ready)
        await skipping.sleep(300)
    assert len(pool.launched) == 60


async def test_an_image_that_never_becomes_ready_is_not_launched_for_ever(
    skipping: WorkflowEnvironment, pool: FakePool, caplog: pytest.LogCaptureFixture
) -> None:
    pool.failures, pool.failure = 1000, NEVER_READY
    async with serving(skipping.client, pool.activities()):
        handle = await start_pool(skipping, 8)

        async def failures(count: int) -> PoolView:
            async def seen() -> bool:
                return (await view_pool(handle)).failures >= count

            async with skipped(skipping):
                await until(seen)
            return await view_pool(handle)

        view = await failures(8 + FAILURES_UNTIL_OPEN - 1)
        assert view.circuit_open
        # The first round is the whole gap, the others are one launch each.
        assert view.failures == 8 + FAILURES_UNTIL_OPEN - 1
        probed = await failures(view.failures + 1)
        assert (probed.next_launch or 0) - (view.next_launch or 0) >= PROBE_INTERVAL_S
        events = (line.getMessage().split(" ")[0] for line in caplog.records)
        told = [event for event in events if event.startswith("pool_")]
        assert told == ["pool_launches_fail", "pool_refilling_stopped"]
        pool.failures = 0
        async with skipped(skipping):
            view = await until_pool_ready(handle, 8)
    assert not view.circuit_open


async def test_a_launch_of_unknown_outcome_is_settled_under_its_own_token(
    skipping: WorkflowEnvironment, pool: FakePool
) -> None:
    """Its worker may run, and no list may show it yet: a new token would be one worker too many."""
    pool.lost_replies = 3
    async with serving(skipping.client, pool.activities()):
        handle = await start_pool(skipping, 5)
        async with skipped(skipping):
            view = await until_pool_ready(handle, 5)
        await skipping.sleep(120)
    assert view.failures == 3
    assert len(pool.ready) == len(set(pool.launched)) == 5


async def test_a_pool_at_rest_costs_two_actions_a_minute(
    skipping: WorkflowEnvironment, pool: FakePool
) -> None:
    """A timer and an activity a check, whatever the policy."""
    async with serving(skipping.client, pool.activities()):
        handle = await start_pool(
            skipping, 2, policy=PoolPolicy(target=2, demand_minutes=5, buffer="10%")
        )
        await until_pool_ready(handle, 2)
        before = action_times(await handle.fetch_history())
        await skipping.sleep(1800)
        after = action_times(await handle.fetch_history())
    assert len(after) - len(before) <= 2 * 31
