"""A pool at its limit: users are refused with POOL_EXHAUSTED and served in the order in which they
came."""

from __future__ import annotations

import pytest
from temporalio.exceptions import ApplicationError

from activities.pool.launch import LaunchActivities
from infra.valkey.client import reply_of
from tests.support.activities.harness import ActivityHarness
from tests.support.workers.pool_worker import POOL
from worker_runtime.protocol import keys
from workflows.user_worker.messages import ClaimStatus, LaunchForClaim


def limited(harness: ActivityHarness, limit: int) -> LaunchActivities:
    harness.settings = harness.settings.model_copy(update={"pool_limit": limit})
    harness.__post_init__()
    return harness.launching


def launch(user: str) -> LaunchForClaim:
    return LaunchForClaim(user_id=user, pool=POOL, claim_id=f"c-{user}", timeout=5.0)


async def refused(harness: ActivityHarness, launching: LaunchActivities, user: str) -> str:
    with pytest.raises(ApplicationError) as failed:
        await harness.run(launching.launch_for_claim, launch(user))
    assert failed.value.type == "POOL_EXHAUSTED"
    return failed.value.message


async def test_a_freed_worker_goes_to_the_first_in_the_wait_queue(harness: ActivityHarness) -> None:
    launching = limited(harness, 1)
    held = await harness.worker()
    assert "position 1 " in await refused(harness, launching, "first") + " "
    for _ in range(5):
        assert (await refused(harness, launching, "eager")).endswith("position 2 in the wait queue")
    harness.launcher.end(held.task_id)
    assert (await refused(harness, launching, "eager")).endswith("position 2 in the wait queue")
    launched = await harness.run(launching.launch_for_claim, launch("first"))
    # A repeat is the same worker, also while the limit is reached by it.
    assert await harness.run(launching.launch_for_claim, launch("first")) == launched
    assert (await refused(harness, launching, "eager")).endswith("position 1 in the wait queue")
    assert len(await harness.launcher.list()) == 1


async def test_a_free_worker_is_not_claimed_past_the_wait_queue(harness: ActivityHarness) -> None:
    launching = limited(harness, 1)
    first, eager = await harness.user(), await harness.user()
    held = await harness.worker()
    await reply_of(harness.client.zrem(keys.pool_ready(POOL), held.worker_id))
    await refused(harness, launching, first)
    harness.launcher.end(held.task_id)
    await harness.worker()  # the pool was quicker
    late = await harness.run(
        harness.claiming.claim_worker, harness.claim(eager, "eager", reply_wait=0.05)
    )
    assert late.status == ClaimStatus.EMPTY
    served = await harness.run(
        harness.claiming.claim_worker, harness.claim(first, "first", reply_wait=0.05)
    )
    assert served.status == ClaimStatus.CONNECTING


async def test_without_a_limit_nobody_waits_in_the_queue(harness: ActivityHarness) -> None:
    await harness.run(harness.launching.launch_for_claim, launch("anyone"))
    assert not await reply_of(
        harness.client.exists(keys.pool_wait_queue(POOL), keys.pool_last_asked(POOL))
    )
