"""The claim, step by step, against real servers."""

from __future__ import annotations

import asyncio
from dataclasses import replace

import pytest
from temporalio.exceptions import ApplicationError

from activities.pool.launch import COLD_PREFIX, worker_id_of
from infra.database.workers import sessions as worker_sessions
from infra.valkey.client import reply_of
from tests.support.activities.harness import SECRET, ActivityHarness
from tests.support.workers.pool_worker import POOL, ScriptedPoolWorker
from worker_runtime.protocol import keys, sealing
from worker_runtime.protocol.messages import Claim, ClaimReply, Failure, encode
from workflows.user_worker.messages import (
    ClaimRequest,
    ClaimResult,
    ClaimStatus,
    ConnectRequest,
    LaunchForClaim,
    StopWorker,
    WorkerRef,
)

UNREACHABLE = Failure(code="BROKER_UNREACHABLE", detail="no route", retryable=True)


async def test_a_claimed_worker_gets_the_credentials_sealed_to_it(harness: ActivityHarness) -> None:
    user, worker = await harness.user(), await harness.worker()
    result, _ = await asyncio.gather(
        harness.run(harness.claiming.claim_worker, harness.claim(user)), worker.serve()
    )
    assert result.status == ClaimStatus.ACTIVE
    assert result.worker is not None
    assert (result.worker.worker_id, result.worker.epoch, result.worker.warm) == (
        worker.worker_id,
        1,
        True,
    )
    assert (result.claimed_at, result.connected_at) == (1.0, 2.0)
    assert worker.opened == [SECRET]
    owner = await reply_of(harness.client.hgetall(keys.owner(user)))
    assert (owner[b"epoch"], owner[b"worker"]) == (b"1", worker.worker_id.encode())
    async with harness.database.session() as session:
        row = await worker_sessions.latest_session(
            session, worker_id=worker.worker_id, ended_at=None
        )
    assert row is not None
    assert (row.user_id, row.claim_id, row.task_id) == (user, "c1", worker.task_id)


async def test_a_repeated_claim_gives_the_same_worker_without_a_second_push(
    harness: ActivityHarness,
) -> None:
    user, worker, other = await harness.user(), await harness.worker(), await harness.worker()
    first, _ = await asyncio.gather(
        harness.run(harness.claiming.claim_worker, harness.claim(user)), worker.serve()
    )
    second = await harness.run(harness.claiming.claim_worker, harness.claim(user))
    assert first == second
    assert not await reply_of(harness.client.llen(keys.pool_inbox(POOL, worker.worker_id)))
    assert await other.announce() == "ready"


async def test_a_lost_claim_reply_returns_the_same_worker(harness: ActivityHarness) -> None:
    """The worker's answer was dropped: the claim goes out again, and the worker answers again."""
    user, worker = await harness.user(), await harness.worker()
    first = await harness.run(harness.claiming.claim_worker, harness.claim(user, reply_wait=0.05))
    assert first.status == ClaimStatus.CONNECTING
    lost = await worker.next()
    assert isinstance(lost, Claim)
    second, _ = await asyncio.gather(
        harness.run(harness.claiming.claim_worker, harness.claim(user)), worker.serve()
    )
    assert second.status == ClaimStatus.ACTIVE
    assert first.worker == second.worker


async def test_a_reply_without_the_workers_launch_token_decides_nothing(
    harness: ActivityHarness,
) -> None:
    """Whoever can write to Valkey says that the login was rejected, or that the worker is
    connected."""
    user, worker = await harness.user(), await harness.worker()
    first = await harness.run(harness.claiming.claim_worker, harness.claim(user, reply_wait=0.05))
    assert first.status == ClaimStatus.CONNECTING
    rejected = Failure(code="LOGIN_REJECTED", detail="wrong key")
    for failure in (rejected, None):
        reply = ClaimReply(
            claim_id="c1",
            worker_id=worker.worker_id,
            epoch=1,
            attempt=1,
            failure=failure,
            connected_at_ms=1,
        )
        for forged in (
            encode(reply),
            sealing.prove_reply(reply, harness.keys.launch_token("another worker")),
        ):
            await reply_of(
                harness.client.rpush(keys.pool_reply(POOL, worker.worker_id, "c1"), forged)
            )
    second = await harness.run(harness.claiming.claim_worker, harness.claim(user, reply_wait=0.05))
    assert second.status == ClaimStatus.CONNECTING
    third, _ = await asyncio.gather(
        harness.run(harness.claiming.claim_worker, harness.claim(user)), worker.serve()
    )
    assert third.status == ClaimStatus.ACTIVE
    assert third.connected_at == 2.0


async def test_a_claim_at_the_same_time_by_two_users_gives_two_workers(
    harness: ActivityHarness,
) -> None:
    alice, bob = await harness.user(), await harness.user()
    workers = [await harness.worker(), await harness.worker()]
    results = await asyncio.gather(
        harness.run(harness.claiming.claim_worker, harness.claim(alice, "c1")),
        harness.run(harness.claiming.claim_worker, harness.claim(bob, "c2")),
        *(worker.serve() for worker in workers),
    )
    taken = {result.worker.worker_id for result in results[:2] if result and result.worker}
    assert taken == {worker.worker_id for worker in workers}


async def test_while_memory_is_short_a_claim_is_refused_and_leaves_no_assignment(
    harness: ActivityHarness,
) -> None:
    user, _ = await harness.user(), await harness.worker()
    before = (await harness.client.config_get("maxmemory"))["maxmemory"] or 0
    used = (await harness.client.info("memory"))["used_memory"]
    await harness.client.config_set("maxmemory", int(used / 0.9))
    try:
        with pytest.raises(ApplicationError, match="Valkey's memory is short") as refused:
            await harness.run(harness.claiming.claim_worker, harness.claim(user))
    finally:
        await harness.client.config_set("maxmemory", before)
    assert (refused.value.type, refused.value.non_retryable) == ("MEMORY_SHORT", True)
    assert await harness.sql("select count(*) from worker_sessions") == [(0,)]


async def test_epochs_grow_with_every_claim_of_a_user(harness: ActivityHarness) -> None:
    user, first, second = await harness.user(), await harness.worker(), await harness.worker()
    a, _ = await asyncio.gather(
        harness.run(harness.claiming.claim_worker, harness.claim(user, "c1")), first.serve()
    )
    assert a.worker is not None
    await _stop(harness, user, "c1")
    b, _ = await asyncio.gather(
        harness.run(harness.claiming.claim_worker, harness.claim(user, "c2")), second.serve()
    )
    assert b.worker is not None
    assert (a.worker.epoch, b.worker.epoch) == (1, 2)


async def test_an_earlier_claim_never_takes_the_user_back(harness: ActivityHarness) -> None:
    user, first, second = await harness.user(), await harness.worker(), await harness.worker()
    await asyncio.gather(
        harness.run(harness.claiming.claim_worker, harness.claim(user, "c1")), first.serve()
    )
    await _stop(harness, user, "c1")
    await asyncio.gather(
        harness.run(harness.claiming.claim_worker, harness.claim(user, "c2")), second.serve()
    )
    late = await harness.run(harness.claiming.claim_worker, harness.claim(user, "c1"))
    assert late.status == ClaimStatus.ADOPTED
    assert late.worker is not None
    assert (late.worker.worker_id, late.worker.epoch) == (second.worker_id, 2)
    assert (
        await reply_of(harness.client.hget(keys.owner(user), "worker")) == second.worker_id.encode()
    )


async def test_a_run_that_was_started_anew_adopts_the_worker_that_the_user_has(
    harness: ActivityHarness,
) -> None:
    """The workflow was terminated: the next run knows nothing of the worker that is logged in."""
    user, first, second = await harness.user(), await harness.worker(), await harness.worker()
    before, _ = await asyncio.gather(
        harness.run(harness.claiming.claim_worker, harness.claim(user, "c1")), first.serve()
    )
    await harness.sql("update worker_sessions set connected_at = now() where claim_id = 'c1'")
    crash = (
        "insert into worker_sessions (claim_id, user_id, epoch, pool, ended_at, crashed) values "
    )
    await harness.sql(f"{crash} ('c0', '{user}', 0, 'default', now(), true)")
    request = replace(harness.claim(user, "c2"), check_crashes=True)
    adopted = await harness.run(harness.claiming.claim_worker, request)
    assert adopted.status == ClaimStatus.ADOPTED
    assert adopted.worker is not None
    assert before.worker is not None
    assert adopted.worker == replace(before.worker, public_key="")
    assert adopted.connected_at > 0
    assert await second.announce() == "ready"
    assert first.task_id in {task.task_id for task in await harness.launcher.list()}


async def test_a_run_that_only_adopts_claims_nothing_for_a_user_without_a_worker(
    harness: ActivityHarness,
) -> None:
    user, free = await harness.user(), await harness.worker()
    request = replace(harness.claim(user, "c1"), adopt_only=True)
    answer = await harness.run(harness.claiming.claim_worker, request)
    assert answer == ClaimResult(status=ClaimStatus.NONE)
    assert await free.announce() == "ready"
    assert await harness.sql("select epoch from users") == [(0,)]


@pytest.mark.parametrize(
    "reason",
    [
        "worker_sessions set fenced_at = now()",
        "users set disabled_at = now()",
        "users set epoch = 5",
    ],
)
async def test_no_worker_is_claimed_while_another_has_to_end(
    harness: ActivityHarness, reason: str
) -> None:
    user, first, second = await harness.user(), await harness.worker(), await harness.worker()
    await asyncio.gather(
        harness.run(harness.claiming.claim_worker, harness.claim(user, "c1")), first.serve()
    )
    await harness.sql(f"update {reason}")
    beside = await harness.run(harness.claiming.claim_worker, harness.claim(user, "c2"))
    assert beside.status == ClaimStatus.GONE
    assert beside.worker is not None
    assert (beside.worker.worker_id, beside.worker.epoch) == (first.worker_id, 1)
    assert await second.announce() == "ready"
    await harness.run(  # what the workflow does with it
        harness.stopping.stop_worker,
        StopWorker(user_id=user, worker=beside.worker, reason="gone", grace=0.0),
    )
    assert first.task_id not in {task.task_id for task in await harness.launcher.list()}
    after, _ = await asyncio.gather(
        harness.run(harness.claiming.claim_worker, harness.claim(user, "c3")), second.serve()
    )
    assert after.status == ClaimStatus.ACTIVE


async def test_a_call_that_comes_after_its_claim_was_ended_claims_nobody(
    harness: ActivityHarness,
) -> None:
    """Its orchestrator stood still, and the workflow has given the claim up meanwhile."""
    user = await harness.user()
    empty = await harness.run(harness.claiming.claim_worker, harness.claim(user, "c1"))
    assert empty.status == ClaimStatus.EMPTY
    await _stop(harness, user, "c1")
    worker = await harness.worker()
    late = await harness.run(harness.claiming.claim_worker, harness.claim(user, "c1"))
    assert late.status == ClaimStatus.GONE
    assert await worker.announce() == "ready"
    assert not await reply_of(harness.client.llen(keys.pool_inbox(POOL, worker.worker_id)))


async def test_an_empty_pool_is_reported_and_costs_no_second_epoch(
    harness: ActivityHarness,
) -> None:
    user = await harness.user()
    result = await harness.run(harness.claiming.claim_worker, harness.claim(user))
    assert result == ClaimResult(status=ClaimStatus.EMPTY)
    worker = await harness.worker()
    claimed, _ = await asyncio.gather(
        harness.run(harness.claiming.claim_worker, harness.claim(user)), worker.serve()
    )
    assert claimed.worker is not None
    assert claimed.worker.epoch == 1


async def test_a_key_that_is_not_proven_gets_no_credentials(harness: ActivityHarness) -> None:
    """Somebody who can write to Valkey put a key of their own in a worker's place."""
    user, worker = await harness.user(), await harness.worker()
    forger = ScriptedPoolWorker(harness.client, harness.keys, worker.worker_id)
    forger.proof = worker.proof
    await forger.announce()
    result = await harness.run(harness.claiming.claim_worker, harness.claim(user))
    assert result == ClaimResult(status=ClaimStatus.EMPTY)
    assert await worker.announce() == "ready"  # with its own key again
    assert not await reply_of(
        harness.client.exists(keys.pool_inbox(POOL, worker.worker_id), keys.owner(user))
    )


async def test_a_user_without_accounts_costs_no_worker(harness: ActivityHarness) -> None:
    user, worker = await harness.user(with_account=False), await harness.worker()
    result = await harness.run(harness.claiming.claim_worker, harness.claim(user))
    assert (result.status, result.failure_code, result.retryable) == (
        ClaimStatus.FAILED,
        "UNKNOWN_ACCOUNT",
        False,
    )
    assert await worker.announce() == "ready"


async def test_an_unknown_user_is_refused(harness: ActivityHarness) -> None:
    result = await harness.run(harness.claiming.claim_worker, harness.claim("nobody"))
    assert (result.failure_code, result.retryable) == ("USER_NOT_FOUND", False)


async def test_a_dead_workers_claim_is_gone(harness: ActivityHarness) -> None:
    user, worker = await harness.user(), await harness.worker()
    await harness.run(harness.claiming.claim_worker, harness.claim(user, reply_wait=0.05))
    await harness.client.delete(keys.pool_worker(POOL, worker.worker_id))
    result = await harness.run(harness.claiming.claim_worker, harness.claim(user))
    assert result.status == ClaimStatus.GONE
    assert result.worker is not None
    assert result.worker.worker_id == worker.worker_id


async def crash(harness: ActivityHarness, user: str, claim_id: str) -> None:
    """The user's worker dies in service, and its workflow has its end confirmed."""
    worker = await harness.worker()
    result, _ = await asyncio.gather(
        harness.run(harness.claiming.claim_worker, harness.claim(user, claim_id)), worker.serve()
    )
    assert result.worker is not None
    harness.launcher.end(worker.task_id)
    request = StopWorker(
        user_id=user, worker=result.worker, reason="killed", grace=0.0, crashed=True
    )
    for _ in range(2):
        await harness.run(harness.stopping.stop_worker, request)


async def test_a_start_after_two_crashes_is_held_back_and_takes_no_worker(
    harness: ActivityHarness,
) -> None:
    user = await harness.user()
    await crash(harness, user, "c1")
    first = await harness.run(harness.claiming.claim_worker, checking_crashes(harness, user, "c2"))
    assert first.status == ClaimStatus.EMPTY
    await crash(harness, user, "c3")
    worker = await harness.worker()
    held = await harness.run(harness.claiming.claim_worker, checking_crashes(harness, user, "c4"))
    assert held.status == ClaimStatus.BACK_OFF
    assert len(held.crashes) == 2
    assert held.worker is None
    assert (
        await harness.run(harness.claiming.claim_worker, checking_crashes(harness, user, "c4"))
        == held
    )
    assert await worker.announce() == "ready"
    result, _ = await asyncio.gather(
        harness.run(harness.claiming.claim_worker, harness.claim(user, "c4")), worker.serve()
    )
    assert result.status == ClaimStatus.ACTIVE
    assert result.worker is not None
    assert result.worker.epoch == 4
    # A repeat with another question gets the worker that was assigned.
    repeated = await harness.run(
        harness.claiming.claim_worker, checking_crashes(harness, user, "c4")
    )
    assert repeated.worker == result.worker


async def test_an_unknown_user_is_reported_also_to_a_claim_that_checks_crashes(
    harness: ActivityHarness,
) -> None:
    result = await harness.run(
        harness.claiming.claim_worker, checking_crashes(harness, "nobody", "c1")
    )
    assert (result.failure_code, result.retryable) == ("USER_NOT_FOUND", False)


def checking_crashes(harness: ActivityHarness, user: str, claim_id: str) -> ClaimRequest:
    return replace(harness.claim(user, claim_id), check_crashes=True)


async def claimed(harness: ActivityHarness, worker: ScriptedPoolWorker) -> tuple[str, WorkerRef]:
    user = await harness.user()
    result = await harness.run(harness.claiming.claim_worker, harness.claim(user, reply_wait=0.05))
    assert result.worker is not None
    return user, result.worker


def connect(user: str, ref: WorkerRef, attempt: int, timeout: float = 30.0) -> ConnectRequest:
    return ConnectRequest(user_id=user, worker=ref, attempt=attempt, timeout=timeout)


async def test_a_late_login_is_heard_by_the_wait(harness: ActivityHarness) -> None:
    worker = await harness.worker()
    user, ref = await claimed(harness, worker)
    result, _ = await asyncio.gather(
        harness.run(harness.claiming.await_connected, connect(user, ref, 1)), worker.serve()
    )
    assert result.status == ClaimStatus.ACTIVE


async def test_a_claim_that_nobody_confirms_is_released(harness: ActivityHarness) -> None:
    worker = await harness.worker()
    user, ref = await claimed(harness, worker)
    result = await harness.run(harness.claiming.await_connected, connect(user, ref, 1, timeout=0.1))
    assert result.status == ClaimStatus.GONE
    message = await worker.next()
    assert isinstance(message, Claim)
    assert await worker.confirm(message) == "released"


async def test_a_confirmed_worker_that_is_slow_may_try_again(harness: ActivityHarness) -> None:
    worker = await harness.worker()
    user, ref = await claimed(harness, worker)
    message = await worker.next()
    assert isinstance(message, Claim)
    assert await worker.confirm(message) == "confirmed"
    result = await harness.run(harness.claiming.await_connected, connect(user, ref, 1, timeout=0.1))
    assert (result.status, result.failure_code, result.retryable) == (
        ClaimStatus.FAILED,
        "BROKER_UNREACHABLE",
        True,
    )


async def test_a_worker_that_dies_unheard_ends_the_wait(harness: ActivityHarness) -> None:
    worker = await harness.worker()
    user, ref = await claimed(harness, worker)
    await harness.client.delete(keys.pool_worker(POOL, worker.worker_id))
    result = await harness.run(
        harness.claiming.await_connected, connect(user, ref, 1, timeout=30.0)
    )
    assert result.status == ClaimStatus.GONE


async def test_further_logins_are_asked_for_by_number(harness: ActivityHarness) -> None:
    worker = await harness.worker()
    worker.failures = [UNREACHABLE, UNREACHABLE]
    user = await harness.user()
    result, _ = await asyncio.gather(
        harness.run(harness.claiming.claim_worker, harness.claim(user)), worker.serve()
    )
    assert (result.status, result.failure_code) == (ClaimStatus.FAILED, "BROKER_UNREACHABLE")
    assert result.worker is not None
    again = harness.claiming.connect_again
    second, _ = await asyncio.gather(
        harness.run(again, connect(user, result.worker, 2)), worker.serve()
    )
    third, _ = await asyncio.gather(
        harness.run(again, connect(user, result.worker, 3)), worker.serve()
    )
    assert (second.status, third.status) == (ClaimStatus.FAILED, ClaimStatus.ACTIVE)
    repeated = await harness.run(again, connect(user, result.worker, 3))
    assert repeated.status == ClaimStatus.ACTIVE
    assert len(worker.received) == 3


async def test_a_worker_launched_for_a_claim_is_found_by_it(harness: ActivityHarness) -> None:
    user = await harness.user()
    request = LaunchForClaim(user_id=user, pool=POOL, claim_id="c1", timeout=5.0)
    launched = await harness.run(harness.launching.launch_for_claim, request)
    assert launched.worker_id == worker_id_of(COLD_PREFIX, "c1")
    assert await harness.run(harness.launching.launch_for_claim, request) == launched
    worker = harness.made[launched.worker_id]
    result, _ = await asyncio.gather(
        harness.run(harness.claiming.claim_worker, harness.claim(user)), worker.serve()
    )
    assert result.status == ClaimStatus.ACTIVE
    assert result.worker is not None
    assert (result.worker.worker_id, result.worker.warm) == (launched.worker_id, False)
    assert len(harness.launcher.launched) == 1


async def test_no_secret_is_in_valkey_after_a_claim(harness: ActivityHarness) -> None:
    user, worker = await harness.user(), await harness.worker()
    await harness.run(harness.claiming.claim_worker, harness.claim(user, reply_wait=0.05))
    everything = b""
    for key in await reply_of(harness.client.keys("*")):
        everything += await reply_of(harness.client.dump(key)) or b""
    assert worker.worker_id.encode() in everything
    assert b"canary" not in everything


async def _stop(harness: ActivityHarness, user: str, claim_id: str) -> None:
    """As the workflow does when it does not know whether the claim got a worker."""
    unknown = WorkerRef(worker_id="", task_id="", epoch=0, claim_id=claim_id, pool=POOL)
    await harness.run(
        harness.stopping.stop_worker,
        StopWorker(user_id=user, worker=unknown, reason="test", grace=0.0),
    )
