"""The limit of workers: who finds none is refused by name, and served in the order of the line."""

from __future__ import annotations

import pytest
from temporalio.exceptions import ApplicationError

from activities.pool.launch import LaunchActivities
from infra.valkey.client import reply_of
from tests.support.activities.harness import Yard
from tests.support.workers.pool_worker import POOL
from worker_runtime.protocol import keys
from workflows.user_worker.messages import ClaimStatus, LaunchForClaim


def limited(yard: Yard, limit: int) -> LaunchActivities:
    yard.settings = yard.settings.model_copy(update={"pool_limit": limit})
    yard.__post_init__()
    return yard.launching


def launch(user: str) -> LaunchForClaim:
    return LaunchForClaim(user_id=user, pool=POOL, claim_id=f"c-{user}", timeout=5.0)


async def refused(yard: Yard, launching: LaunchActivities, user: str) -> str:
    with pytest.raises(ApplicationError) as failed:
        await yard.run(launching.launch_for_claim, launch(user))
    assert failed.value.type == "POOL_EXHAUSTED"
    return failed.value.message


async def test_a_freed_place_goes_to_the_first_in_the_line(yard: Yard) -> None:
    launching = limited(yard, 1)
    held = await yard.worker()
    assert "place 1 " in await refused(yard, launching, "first") + " "
    for _ in range(5):
        assert (await refused(yard, launching, "eager")).endswith("place 2 in the line")
    yard.launcher.end(held.task_id)
    assert (await refused(yard, launching, "eager")).endswith("place 2 in the line")
    launched = await yard.run(launching.launch_for_claim, launch("first"))
    # A repeat is the same worker, also while the limit is reached by it.
    assert await yard.run(launching.launch_for_claim, launch("first")) == launched
    assert (await refused(yard, launching, "eager")).endswith("place 1 in the line")
    assert len(await yard.launcher.list()) == 1


async def test_a_free_worker_is_not_claimed_past_the_line(yard: Yard) -> None:
    launching = limited(yard, 1)
    first, eager = await yard.user(), await yard.user()
    held = await yard.worker()
    await reply_of(yard.client.zrem(keys.pool_ready(POOL), held.worker_id))
    await refused(yard, launching, first)
    yard.launcher.end(held.task_id)
    await yard.worker()  # the pool was quicker
    late = await yard.run(yard.claiming.claim_worker, yard.claim(eager, "eager", reply_wait=0.05))
    assert late.status == ClaimStatus.EMPTY
    served = await yard.run(yard.claiming.claim_worker, yard.claim(first, "first", reply_wait=0.05))
    assert served.status == ClaimStatus.CONNECTING


async def test_without_a_limit_nobody_waits_in_line(yard: Yard) -> None:
    await yard.run(yard.launching.launch_for_claim, launch("anyone"))
    assert not await reply_of(
        yard.client.exists(keys.pool_wait_queue(POOL), keys.pool_last_asked(POOL))
    )
