"""Stopping, checking and reloading a worker that serves a user."""

from __future__ import annotations

import asyncio
from typing import Any

import msgspec
import pytest
from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PublicKey
from sqlalchemy import select
from temporalio.testing import ActivityEnvironment

from activities.claims.stop import StopActivity
from infra.database.models import AuditEntry
from infra.database.workers import sessions as worker_sessions
from infra.jobs.client import JobClient
from infra.valkey.client import reply_of
from infra.valkey.worker_users import WorkerUsers
from tests.support.activities.harness import SECRET, ActivityHarness
from tests.support.activities.serving_users import (
    check_request,
    renew_active_mark,
    start_serving_user,
    stop_request,
)
from tests.support.workers.pool_worker import POOL, ScriptedPoolWorker, popped
from worker_runtime.jobs.protocol import catalog
from worker_runtime.jobs.protocol import keys as job_keys
from worker_runtime.protocol import keys, sealing
from worker_runtime.protocol.messages import (
    Credentials,
    Failure,
    ReleaseClaim,
    ReloadCredentials,
    Shutdown,
    decode,
)
from worker_runtime.protocol.requests import ControlMessage
from workflows.user_worker.messages import (
    ClaimStatus,
    ReloadRequest,
    WorkerHealth,
    WorkerRef,
)


async def control(harness: ActivityHarness, user: str) -> ControlMessage:
    item = await popped(harness.client, keys.control(user), 30.0)
    assert item is not None, "no control message"
    payload = sealing.verify(
        item, *map(Ed25519PublicKey.from_public_bytes, harness.keys.public_keys)
    )
    message: ControlMessage = decode(payload, ControlMessage)
    return message


async def test_a_stopped_worker_can_no_longer_log_in_to_valkey(harness: ActivityHarness) -> None:
    user, worker, ref = await start_serving_user(harness)
    users = WorkerUsers(harness.client, harness.database, harness.keys)
    await users.admit(worker.worker_id, POOL, user)
    stopping = StopActivity(harness.client, harness.database, harness.ends, harness.keys, users)
    await harness.run(stopping.stop_worker, stop_request(user, ref))
    assert worker.worker_id.encode() not in await harness.client.acl_users()


async def test_a_marked_worker_is_asked_before_it_is_stopped(harness: ActivityHarness) -> None:
    user, worker, ref = await start_serving_user(harness)

    async def ends_by_itself() -> None:
        message = await control(harness, user)
        assert isinstance(message, Shutdown)
        assert (message.user_id, message.epoch, message.reason) == (user, ref.epoch, "idle")
        harness.launcher.end(worker.task_id, 0, "exited")

    await asyncio.gather(
        harness.run(harness.stopping.stop_worker, stop_request(user, ref, 30.0)), ends_by_itself()
    )
    assert not harness.launcher.stops
    assert not await reply_of(harness.client.exists(keys.mark(user), keys.metadata(user)))
    async with harness.database.session() as session:
        row = await worker_sessions.latest_session(session, worker_id=worker.worker_id)
    assert row is not None
    assert row.end_reason == "idle"


async def test_a_worker_that_does_not_listen_is_stopped_by_its_launcher(
    harness: ActivityHarness,
) -> None:
    user, worker, ref = await start_serving_user(harness)
    await harness.run(harness.stopping.stop_worker, stop_request(user, ref, 0.2))
    assert harness.launcher.stops == [(worker.task_id, "idle")]
    assert not await harness.launcher.list()


async def test_stopping_twice_changes_nothing(harness: ActivityHarness) -> None:
    user, _, ref = await start_serving_user(harness)
    for _ in range(2):
        await harness.run(harness.stopping.stop_worker, stop_request(user, ref))
    assert len(harness.launcher.stops) == 1


async def test_a_claimed_worker_without_mark_hears_on_its_inbox(harness: ActivityHarness) -> None:
    user, worker = await harness.user(), await harness.worker()
    result = await harness.run(harness.claiming.claim_worker, harness.claim(user, reply_wait=0.05))
    assert result.worker is not None
    await worker.next()

    async def released() -> None:
        assert isinstance(await worker.next(), ReleaseClaim)
        harness.launcher.end(worker.task_id, 0, "exited")

    await asyncio.gather(
        harness.run(harness.stopping.stop_worker, stop_request(user, result.worker, 30.0)),
        released(),
    )
    assert not harness.launcher.stops


async def test_an_unconfirmed_claim_can_be_stopped_by_its_claim_id_alone(
    harness: ActivityHarness,
) -> None:
    user, worker = await harness.user(), await harness.worker()
    await harness.run(harness.claiming.claim_worker, harness.claim(user, reply_wait=0.05))
    unknown = WorkerRef(worker_id="", task_id="", epoch=0, claim_id="c1", pool=POOL)
    await harness.run(harness.stopping.stop_worker, stop_request(user, unknown))
    assert harness.launcher.stops == [(worker.task_id, "idle")]
    gone = await harness.run(harness.claiming.claim_worker, harness.claim(user))
    assert gone.status == ClaimStatus.GONE


async def test_a_stop_leaves_the_mark_of_a_later_worker(harness: ActivityHarness) -> None:
    user, _, old = await start_serving_user(harness)
    new = await harness.worker()
    await harness.run(harness.stopping.stop_worker, stop_request(user, old))
    result, _ = await asyncio.gather(
        harness.run(harness.claiming.claim_worker, harness.claim(user, "later")), new.serve()
    )
    assert result.worker is not None
    await renew_active_mark(harness, user, new, result.worker.epoch)
    await harness.run(
        harness.stopping.stop_worker, stop_request(user, old)
    )  # a repeat that comes late
    assert await reply_of(harness.client.get(keys.mark(user))) == f"2:{new.worker_id}".encode()


async def test_a_worker_that_slept_through_its_claim_gets_no_other_user_and_is_stopped(
    harness: ActivityHarness,
) -> None:
    """It slept through the end of its entry and came back as a free one, with the claim in its
    inbox."""
    user, worker = await harness.user(), await harness.worker()
    lost = await harness.run(
        harness.claiming.claim_worker, harness.claim(user, "old", reply_wait=0.05)
    )
    assert lost.worker is not None
    await worker.next()
    await harness.client.delete(keys.pool_worker(POOL, worker.worker_id))
    assert await worker.announce() == "ready"
    other = await harness.run(
        harness.claiming.claim_worker, harness.claim(await harness.user(), "new")
    )
    assert other.status == ClaimStatus.EMPTY
    await harness.run(harness.stopping.stop_worker, stop_request(user, lost.worker))
    assert harness.launcher.stops == [(worker.task_id, "idle")]


async def test_a_claims_note_that_names_another_claims_worker_stops_nobody(
    harness: ActivityHarness,
) -> None:
    await start_serving_user(harness)
    free = await harness.worker()
    user = await harness.user()
    for victim in (harness.made[next(iter(harness.made))], free):
        await harness.client.set(keys.pool_claim(POOL, "forged"), victim.worker_id)
        unknown = WorkerRef(worker_id="", task_id="", epoch=0, claim_id="forged", pool=POOL)
        await harness.run(harness.stopping.stop_worker, stop_request(user, unknown))
    assert not harness.launcher.stops


async def test_orders_that_wait_or_were_in_hand_are_counted_when_a_worker_has_stopped(
    harness: ActivityHarness,
) -> None:
    user, _, ref = await start_serving_user(harness)
    await reply_of(harness.client.lpush(keys.requests(user), "1|r1|x"))
    await reply_of(harness.client.lpush(keys.processing(user), "1|r0|x"))
    stopped = await harness.run(harness.stopping.stop_worker, stop_request(user, ref))
    assert stopped.waiting == 2


@pytest.mark.parametrize("delay", [0.0, 60.0])
async def test_a_job_that_came_while_a_worker_ended_needs_another_one(
    harness: ActivityHarness, delay: float
) -> None:
    user, _, ref = await start_serving_user(harness)
    job = catalog.make_job("j", catalog.PingRunner(), delay=delay)
    await JobClient(harness.client, harness.secrets).enqueue(job, tag=job_keys.user_tag(user))
    assert (await harness.run(harness.stopping.stop_worker, stop_request(user, ref))).waiting == 1
    await JobClient(harness.client, harness.secrets).cancel("j", tag=job_keys.user_tag(user))
    assert (await harness.run(harness.stopping.stop_worker, stop_request(user, ref))).waiting == 0


async def test_jobs_of_a_runner_that_did_not_sign_off_need_another_worker(
    harness: ActivityHarness,
) -> None:
    user, _, ref = await start_serving_user(harness)
    await reply_of(harness.client.hset(job_keys.beats(job_keys.user_tag(user)), "dead", "7"))
    assert (await harness.run(harness.stopping.stop_worker, stop_request(user, ref))).waiting == 1


async def test_a_check_tells_mark_task_and_last_use(harness: ActivityHarness) -> None:
    user, worker, ref = await start_serving_user(harness)
    health = await harness.run(harness.checking.check_worker, check_request(user, ref))
    generation = await reply_of(harness.client.get(keys.GENERATION))
    assert health == WorkerHealth(
        marked=True,
        running=True,
        last_activity=123.0,
        generation=generation.decode(),
        worker_state="Active",
    )
    harness.launcher.end(worker.task_id)
    await harness.client.delete(keys.mark(user))
    gone = await harness.run(harness.checking.check_worker, check_request(user, ref))
    assert gone == WorkerHealth(
        marked=False, running=False, generation=generation.decode(), unreported=True
    )


async def test_a_check_without_a_launcher_does_not_know(harness: ActivityHarness) -> None:
    user, _, ref = await start_serving_user(harness)
    harness.launcher.unreachable = True
    assert (
        await harness.run(harness.checking.check_worker, check_request(user, ref))
    ).running is None


async def test_a_check_after_a_flush_puts_the_owner_key_back(harness: ActivityHarness) -> None:
    user, worker, ref = await start_serving_user(harness)
    before = await reply_of(harness.client.hget(keys.owner(user), "generation"))
    await harness.client.flushall()
    assert await renew_active_mark(harness, user, worker, ref.epoch) == "no_owner"
    await harness.run(harness.checking.check_worker, check_request(user, ref))
    assert await renew_active_mark(harness, user, worker, ref.epoch) == "ok"
    assert await reply_of(harness.client.hget(keys.owner(user), "generation")) != before


async def test_a_check_gives_no_user_to_a_worker_that_ended(harness: ActivityHarness) -> None:
    user, worker, ref = await start_serving_user(harness)
    harness.launcher.end(worker.task_id)
    await harness.client.flushall()
    await harness.run(harness.checking.check_worker, check_request(user, ref))
    assert not await reply_of(harness.client.exists(keys.owner(user)))


async def audited(harness: ActivityHarness, user: str) -> list[tuple[str, dict[str, Any]]]:
    async with harness.database.session() as session:
        rows = await session.scalars(select(AuditEntry).where(AuditEntry.subject == f"user:{user}"))
        return [(row.action, row.data) for row in rows]


async def reloads(
    harness: ActivityHarness,
    user: str,
    worker: ScriptedPoolWorker,
    ref: WorkerRef,
    *failures: Failure,
) -> Credentials:
    """The worker's part of a reload: opens what it gets, and answers."""
    message = await control(harness, user)
    assert isinstance(message, ReloadCredentials)
    plain = sealing.unseal(
        message.accounts[0].sealed,
        worker.private_key,
        user_id=user,
        account_id="main",
        epoch=ref.epoch,
        claim_id=message.reload_id,
        worker_id=worker.worker_id,
    )
    worker.failures = list(failures)
    await worker.reply(message.reload_id, ref.epoch, 1)
    return msgspec.json.decode(plain, type=Credentials)


def reload(
    user: str, ref: WorkerRef, cause: str = "signal", timeout: float = 20.0
) -> ReloadRequest:
    return ReloadRequest(user_id=user, worker=ref, reload_id="r1", timeout=timeout, cause=cause)


async def test_a_reload_is_sealed_to_the_worker_answered_and_audited_once(
    harness: ActivityHarness,
) -> None:
    user, worker, ref = await start_serving_user(harness)
    result, opened = await asyncio.gather(
        harness.run(harness.reloading.reload_credentials, reload(user, ref)),
        reloads(harness, user, worker, ref),
    )
    assert result.ok
    assert opened == SECRET
    again = await harness.run(harness.reloading.reload_credentials, reload(user, ref))
    assert again.ok
    assert not await reply_of(harness.client.llen(keys.control(user)))
    expected = {
        "id": "r1",
        "cause": "signal",
        "result": "OK",
        "worker": worker.worker_id,
        "epoch": 1,
        "versions": {"main": 1},
    }
    assert await audited(harness, user) == [("credentials.reloaded", expected)]


async def test_wrong_new_credentials_are_reported_by_their_code_and_audited_without_a_secret(
    harness: ActivityHarness,
) -> None:
    user, worker, ref = await start_serving_user(harness)
    refused = Failure(code="LOGIN_REJECTED", detail="the key key-canary is wrong")
    result, _ = await asyncio.gather(
        harness.run(harness.reloading.reload_credentials, reload(user, ref, "update")),
        reloads(harness, user, worker, ref, refused),
    )
    assert (result.ok, result.failure_code) == (False, "LOGIN_REJECTED")
    [(action, data)] = await audited(harness, user)
    assert (action, data["result"], data["cause"]) == (
        "credentials.reload_failed",
        "LOGIN_REJECTED",
        "update",
    )
    assert "canary" not in str(data)


async def test_a_replaced_session_gets_the_credentials_sealed_to_its_new_key(
    harness: ActivityHarness,
) -> None:
    """Valkey may show the old key for a moment: nothing is sealed to that."""
    user, worker, ref = await start_serving_user(harness)
    fresh = ScriptedPoolWorker(harness.client, harness.keys, worker.worker_id)

    looked = asyncio.Event()  # at the old key: then the activity says that it lives, and waits
    environment = ActivityEnvironment()
    environment.on_heartbeat = lambda *_: looked.set()

    async def comes_up() -> Credentials:
        await looked.wait()
        assert await renew_active_mark(harness, user, fresh, ref.epoch) == "ok"
        return await reloads(harness, user, fresh, ref)

    result, opened = await asyncio.gather(
        environment.run(
            harness.reloading.reload_credentials, reload(user, ref, "session replaced")
        ),
        comes_up(),
    )
    assert result.ok
    assert opened == SECRET


async def test_a_replaced_session_that_shows_no_new_key_is_sent_nothing(
    harness: ActivityHarness,
) -> None:
    user, _, ref = await start_serving_user(harness)
    result = await harness.run(
        harness.reloading.reload_credentials, reload(user, ref, "session replaced", timeout=0.3)
    )
    assert (result.ok, result.failure_code) == (False, "WORKER_UNAVAILABLE")
    assert not await reply_of(harness.client.llen(keys.control(user)))


async def test_a_forged_key_in_the_metadata_gets_no_reload(harness: ActivityHarness) -> None:
    """The credentials stay sealed to the key that was proven at the claim."""
    user, worker, ref = await start_serving_user(harness)
    forger = ScriptedPoolWorker(harness.client, harness.keys, worker.worker_id)
    await reply_of(
        harness.client.hset(
            keys.metadata(user),
            mapping={"public_key": forger.public_key.hex(), "proof": worker.proof.hex()},
        )
    )
    request = ReloadRequest(user_id=user, worker=ref, reload_id="r1", timeout=0.1)
    result = await harness.run(harness.reloading.reload_credentials, request)
    assert (result.ok, result.failure_code) == (False, "WORKER_UNAVAILABLE")
    message = await control(harness, user)
    assert isinstance(message, ReloadCredentials)
    opened = sealing.unseal(
        message.accounts[0].sealed,
        worker.private_key,
        user_id=user,
        account_id="main",
        epoch=ref.epoch,
        claim_id="r1",
        worker_id=worker.worker_id,
    )
    assert opened
