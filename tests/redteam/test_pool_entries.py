"""A worker that somebody took over rewrites entries of the pool: it gets no second user and blocks
nobody."""

from __future__ import annotations

import asyncio
from typing import Any, cast

from infra import tasks
from infra.valkey.client import reply_of
from tests.support.activities.harness import ActivityHarness
from tests.support.workers.pool_worker import POOL, ScriptedPoolWorker
from worker_runtime.protocol import keys, sealing
from worker_runtime.protocol.messages import Claim
from workflows.user_worker.messages import ClaimResult, ClaimStatus, StopWorker
from workflows.worker_pool.messages import CountPool, StopPoolWorkers


async def write_entry(harness: ActivityHarness, worker_id: str, **fields: str | bytes) -> None:
    """What anyone who may write the pool's keys can say of any worker: it waits longest of all."""
    entry = keys.pool_worker(POOL, worker_id)
    await reply_of(harness.client.hset(entry, mapping=cast("Any", {"state": "ready", **fields})))
    await reply_of(harness.client.hdel(entry, "claim"))
    await harness.client.zadd(keys.pool_ready(POOL), {worker_id: 0})


async def served(
    harness: ActivityHarness, user: str, claim_id: str, worker: ScriptedPoolWorker
) -> ClaimResult:
    """The result of the user's claim, which this worker answers."""
    claimed = harness.run(harness.claiming.claim_worker, harness.claim(user, claim_id))
    result, _ = await asyncio.gather(claimed, worker.serve())
    return result


async def test_a_worker_that_announces_itself_again_gets_no_second_user(
    harness: ActivityHarness,
) -> None:
    alice, bob, hostile = await harness.user(), await harness.user(), await harness.worker()
    await served(harness, alice, "c1", hostile)
    honest = await harness.worker()
    await write_entry(harness, hostile.worker_id)
    result = await served(harness, bob, "c2", honest)
    assert result.status == ClaimStatus.ACTIVE
    assert result.worker is not None
    assert result.worker.worker_id == honest.worker_id
    assert not await reply_of(harness.client.llen(keys.pool_inbox(POOL, hostile.worker_id)))
    assert [message.user_id for message in hostile.received if isinstance(message, Claim)] == [
        alice
    ]


async def test_a_worker_that_keeps_announcing_itself_blocks_nobody(
    harness: ActivityHarness,
) -> None:
    alice, hostile = await harness.user(), await harness.worker()
    await served(harness, alice, "c1", hostile)
    async with tasks.running(_write_for_ever(harness, hostile.worker_id)):
        for number in range(3):
            empty = await harness.run(
                harness.claiming.claim_worker, harness.claim(await harness.user(), f"e{number}")
            )
            assert empty.status == ClaimStatus.EMPTY  # so that the workflow launches one
            honest = await harness.worker()
            result = await served(harness, await harness.user(), f"n{number}", honest)
            assert result.status == ClaimStatus.ACTIVE
    assert len(hostile.received) == 1


async def _write_for_ever(harness: ActivityHarness, worker_id: str) -> None:
    while True:
        await write_entry(harness, worker_id)
        await asyncio.sleep(0.01)


async def test_two_claims_at_once_cannot_both_get_the_worker_that_frees_itself_in_between(
    harness: ActivityHarness,
) -> None:
    hostile = await harness.worker()
    users = [await harness.user() for _ in range(4)]
    async with tasks.running(_write_for_ever(harness, hostile.worker_id)):
        results = await asyncio.gather(
            *(
                harness.run(
                    harness.claiming.claim_worker, harness.claim(user, f"c-{user}", reply_wait=0.05)
                )
                for user in users
            )
        )
    sealed = await reply_of(harness.client.llen(keys.pool_inbox(POOL, hostile.worker_id)))
    assert sealed == 1
    assert sum(result.status == ClaimStatus.CONNECTING for result in results) == 1


async def test_a_claims_note_that_names_a_used_worker_does_not_give_it_the_claim(
    harness: ActivityHarness,
) -> None:
    """As if it had been launched for this claim, because the pool was empty."""
    alice, bob, hostile = await harness.user(), await harness.user(), await harness.worker()
    await served(harness, alice, "c1", hostile)
    entry = keys.pool_worker(POOL, hostile.worker_id)
    await reply_of(harness.client.hset(entry, mapping={"state": "claimed", "claim": "c2"}))
    await harness.client.set(keys.pool_claim(POOL, "c2"), hostile.worker_id)
    honest = await harness.worker()
    result = await served(harness, bob, "c2", honest)
    assert result.worker is not None
    assert result.worker.worker_id == honest.worker_id


async def test_workers_that_we_did_not_launch_or_with_keys_of_others_are_passed_over(
    harness: ActivityHarness,
) -> None:
    victim = await harness.worker()
    # A proven key, but no launch.
    stranger = ScriptedPoolWorker(harness.client, harness.keys, "p-stranger")
    await stranger.announce()
    await write_entry(harness, stranger.worker_id)
    await write_entry(harness, victim.worker_id, public_key=stranger.public_key, proof=b"x" * 32)
    honest = await harness.worker()
    result = await served(harness, await harness.user(), "c1", honest)
    assert result.worker is not None
    assert result.worker.worker_id == honest.worker_id
    assert not harness.launcher.stops
    assert await victim.announce() == "ready"


async def test_an_entry_whose_key_cannot_be_sealed_to_is_passed_over(
    harness: ActivityHarness,
) -> None:
    """Without a key, and with one of small order, for which a worker can make the proof itself."""
    for key in (b"", bytes(32)):
        hostile, honest = await harness.worker(), await harness.worker()
        proof = sealing.prove_key(
            harness.keys.launch_token(hostile.worker_id), hostile.worker_id, key
        )
        await write_entry(harness, hostile.worker_id, public_key=key, proof=proof)
        result = await served(harness, await harness.user(), f"c-{len(key)}", honest)
        assert result.worker is not None
        assert result.worker.worker_id == honest.worker_id
        assert not await reply_of(harness.client.llen(keys.pool_inbox(POOL, hostile.worker_id)))


async def test_an_entry_that_names_another_workers_task_ends_only_its_own(
    harness: ActivityHarness,
) -> None:
    alice, victim = await harness.user(), await harness.worker()
    await served(harness, alice, "c1", victim)
    hostile, bob = await harness.worker(), await harness.user()
    await write_entry(harness, hostile.worker_id, task=victim.task_id, version="another")
    result = await served(harness, bob, "c2", hostile)
    assert result.worker is not None
    assert (result.worker.task_id, result.worker.version) == (hostile.task_id, "")
    await harness.run(
        harness.stopping.stop_worker, StopWorker(user_id=bob, worker=result.worker, reason="test")
    )
    assert [task for task, _ in harness.launcher.stops] == [hostile.task_id]


async def test_shrinking_stops_neither_a_used_worker_nor_the_task_that_an_entry_names(
    harness: ActivityHarness,
) -> None:
    victim = await harness.worker()
    await served(harness, await harness.user(), "c1", victim)
    free = await harness.worker()
    await write_entry(harness, victim.worker_id)
    await write_entry(harness, free.worker_id, task=victim.task_id)
    shrink = StopPoolWorkers(pool=POOL, count=2, token="t")
    assert await harness.run(harness.pool.shrink_pool, shrink) == 1
    assert [task for task, _ in harness.launcher.stops] == [free.task_id]


async def test_forged_entries_are_not_counted_as_free_and_are_removed(
    harness: ActivityHarness,
) -> None:
    used, free = await harness.worker(), await harness.worker()
    await served(harness, await harness.user(), "c1", used)
    await write_entry(harness, used.worker_id)
    async with harness.client.pipeline(transaction=False) as pipe:
        for number in range(3000):
            pipe.hset(keys.pool_worker(POOL, f"p-forged-{number}"), "state", "ready")
            pipe.zadd(keys.pool_ready(POOL), {f"p-forged-{number}": 0})
        await pipe.execute()
    request = CountPool(pool=POOL, launching=(), launch_timeout=30.0)
    for _ in range(4):
        counted = await harness.run(harness.pool.count_pool, request)
        assert (counted.ready, counted.starting) == (1, 0)
    ready = await reply_of(harness.client.zrange(keys.pool_ready(POOL), 0, -1))
    assert ready == [free.worker_id.encode()]
