"""What a rollout tries: whom a worker of it failed gets none of it again, and the rollout hears of
it."""

from __future__ import annotations

from dataclasses import replace

from activities.rollout.canary import CanaryRegistry, CanaryRelease
from infra.database import images
from infra.database.workers import launches
from infra.database.workers import sessions as worker_sessions
from infra.valkey.client import reply_of
from tests.support.activities.harness import ActivityHarness
from tests.support.workers.pool_worker import POOL, ScriptedPoolWorker
from worker_runtime.protocol import keys
from worker_runtime.protocol.messages import Claim
from workflows.rollout.messages import Release
from workflows.user_worker.messages import ClaimRequest, ClaimStatus, ConnectRequest, LaunchForClaim

CANARY = CanaryRelease(version="2", before=Release(version="1", image="w:1"), since=5.0)


async def free(harness: ActivityHarness, worker_id: str, version: str) -> ScriptedPoolWorker:
    """A worker of this version, in the pool."""
    async with harness.database.session() as session:
        await launches.record_launch(session, worker_id=worker_id, pool=POOL, version=version)
    worker = ScriptedPoolWorker(harness.client, harness.keys, worker_id, version=version)
    await worker.announce()
    return worker


def claim(user: str, claim_id: str, *failed: str) -> ClaimRequest:
    return ClaimRequest(
        user_id=user,
        pool=POOL,
        claim_id=claim_id,
        connect_timeout=5.0,
        reply_wait=0.05,
        failed=failed,
    )


async def counts(harness: ActivityHarness, canary: CanaryRelease = CANARY) -> tuple[int, int]:
    return await CanaryRegistry(harness.client).begin(POOL, canary)


async def test_a_user_counts_once_and_one_who_is_served_ends_the_row(
    harness: ActivityHarness,
) -> None:
    assert await counts(harness) == (0, 0)
    canaries = CanaryRegistry(harness.client)
    for user, version in [("u1", "2"), ("u1", "2"), ("u2", "2"), ("u3", "1")]:
        await canaries.count_failed(POOL, version, user)
    assert await counts(harness) == (0, 2)
    await canaries.count_served(POOL, "1")
    assert await counts(harness) == (0, 2)
    await canaries.count_served(POOL, "2")
    assert await counts(harness) == (1, 0)


async def test_another_rollout_of_the_same_version_is_counted_afresh(
    harness: ActivityHarness,
) -> None:
    await counts(harness, replace(CANARY, condemned=True))
    canaries = CanaryRegistry(harness.client)
    await canaries.count_served(POOL, "2")
    await canaries.count_failed(POOL, "2", "u1")
    assert await counts(harness, replace(CANARY, condemned=True)) == (1, 1)
    assert await counts(harness, replace(CANARY, since=6.0)) == (0, 0)
    assert await CanaryRegistry(harness.client).find(POOL) == replace(CANARY, since=6.0)


async def test_after_a_flush_nothing_is_left_of_a_canary(harness: ActivityHarness) -> None:
    await counts(harness)
    canaries = CanaryRegistry(harness.client)
    assert await canaries.find(POOL) == CANARY
    await reply_of(harness.client.flushall())
    await canaries.count_served(POOL, "2")  # by what this process still knows
    assert await CanaryRegistry(harness.client).find(POOL) is None
    assert await counts(harness) == (0, 0)
    assert await CanaryRegistry(harness.client).find(POOL) == CANARY


async def test_a_start_that_a_new_version_failed_gets_a_worker_of_another_one(
    harness: ActivityHarness,
) -> None:
    await counts(harness)
    user = await harness.user()
    await free(harness, "p-new-1", "2")
    await free(harness, "p-old", "1")
    await free(harness, "p-new-2", "2")
    first = await harness.run(harness.claiming.claim_worker, claim(user, "c1"))
    assert first.worker is not None
    assert (first.worker.worker_id, first.worker.version) == ("p-new-1", "2")
    async with harness.database.session() as session:
        await worker_sessions.end_session(session, claim_id="c1", reason="it froze")
    second = await harness.run(harness.claiming.claim_worker, claim(user, "c2", "2"))
    assert second.worker is not None
    assert second.worker.worker_id == "p-old"
    assert await counts(harness) == (0, 1)
    # Those of the version that failed are still there for others.
    assert await reply_of(harness.client.zrange(keys.pool_ready(POOL), 0, -1)) == [b"p-new-2"]


async def test_without_a_worker_of_another_version_one_of_the_version_before_is_launched(
    harness: ActivityHarness,
) -> None:
    await counts(harness)
    user = await harness.user()
    await free(harness, "p-new", "2")
    empty = await harness.run(harness.claiming.claim_worker, claim(user, "c1", "2"))
    assert empty.status == ClaimStatus.EMPTY
    cold = LaunchForClaim(user_id=user, pool=POOL, claim_id="c1", timeout=10.0, failed=("2",))
    async with harness.database.session() as session:
        await images.allow_image(session, "w:1", actor="a test", reason="it was in use")
    await harness.run(harness.launching.launch_for_claim, cold)
    (spec,) = harness.launcher.launched
    assert (spec.config.version, spec.image, spec.config.reserved_claim) == ("1", "w:1", "c1")


async def test_nobody_gets_a_worker_of_a_condemned_version(harness: ActivityHarness) -> None:
    await counts(harness, replace(CANARY, condemned=True))
    user = await harness.user()
    await free(harness, "p-new", "2")
    empty = await harness.run(harness.claiming.claim_worker, claim(user, "c1"))
    assert empty.status == ClaimStatus.EMPTY
    await free(harness, "p-old", "1")
    result = await harness.run(harness.claiming.claim_worker, claim(user, "c2"))
    assert result.worker is not None
    assert result.worker.worker_id == "p-old"


async def test_without_a_rollout_who_was_failed_gets_the_next_free_worker(
    harness: ActivityHarness,
) -> None:
    user = await harness.user()
    await free(harness, "p-1", "2")
    result = await harness.run(harness.claiming.claim_worker, claim(user, "c1", "2"))
    assert result.worker is not None
    assert result.worker.worker_id == "p-1"


async def test_a_login_that_came_late_counts_as_served(harness: ActivityHarness) -> None:
    await counts(harness)
    user = await harness.user()
    worker = await free(harness, "p-new", "2")
    begun = await harness.run(harness.claiming.claim_worker, claim(user, "c1"))
    assert begun.status == ClaimStatus.CONNECTING
    assert begun.worker is not None
    await worker.serve()
    assert isinstance(worker.received[0], Claim)
    request = ConnectRequest(user_id=user, worker=begun.worker, attempt=1, timeout=30.0)
    connected = await harness.run(harness.claiming.await_connected, request)
    assert connected.status == ClaimStatus.ACTIVE
    assert await counts(harness) == (1, 0)
