"""A worker was cut off and still runs, because its launcher does not answer. Then Valkey loses what
it has. The worker does not come back by that."""

from __future__ import annotations

import time
from collections.abc import AsyncIterator
from dataclasses import replace
from typing import Any

import pytest
from redis.exceptions import AuthenticationError, ConnectionError

from activities.claims.handshake import AssignmentSealer
from activities.events.cut_off import Offender
from activities.events.quota_watcher import MAX_NAMES
from infra.database.workers import sessions as worker_sessions
from infra.local.servers import ValkeyServer
from infra.valkey import client as valkey
from infra.valkey.client import reply_of, text_of
from infra.valkey.job_login import user_of_jobs
from infra.valkey.job_users import JobUsers
from tests.integration.activities.events.test_quotas import WatchedFleet
from tests.support.activities.harness import ActivityHarness
from tests.support.message_signing import SECRETS
from tests.support.workers.pool_worker import POOL
from tests.support.workflows.fakes import until
from worker_runtime.jobs.protocol import keys as job_keys
from worker_runtime.protocol import keys
from worker_runtime.protocol.messages import SealedAccount
from workflows.user_worker.messages import CheckWorker, ClaimStatus, ReloadRequest, WorkerRef


@pytest.fixture
async def fleet(
    harness: ActivityHarness, valkey_server: ValkeyServer
) -> AsyncIterator[WatchedFleet]:
    fleet = WatchedFleet(harness, valkey_server)
    yield fleet
    harness.launcher.unreachable = False
    await fleet.cutting.close()


async def cut_off(fleet: WatchedFleet, worker_id: str) -> None:
    """Cuts off a worker that goes on running, because its launcher does not answer."""
    fleet.harness.launcher.unreachable = True
    await fleet.cutting.cut_off(Offender(worker_id=worker_id), "a test")

    async def is_noted() -> bool:
        return bool(await fleet.client.exists(keys.cut_off(worker_id)))

    await until(is_noted)


async def cut_off_and_lose_everything(fleet: WatchedFleet) -> tuple[str, WorkerRef]:
    user, worker = await fleet.connected()
    await cut_off(fleet, worker.worker_id)
    await fleet.client.flushall()
    return user, worker


async def restore(fleet: WatchedFleet, worker: WorkerRef, *, listed: bool) -> set[str]:
    """Makes the users again, as `MarkWatcher` does it; returns those that are there then."""
    async with fleet.harness.database.engine.connect() as connection:
        assigned = await worker_sessions.assigned_now(connection)
    free = [(worker.worker_id, POOL)] if listed else []
    await fleet.users.restore(free, assigned)
    return {text_of(name) for name in await fleet.client.acl_users()}


@pytest.mark.parametrize("listed", [False, True], ids=["no launcher answers", "a launcher answers"])
async def test_a_worker_that_was_cut_off_gets_no_login_after_valkey_lost_that(
    fleet: WatchedFleet, listed: bool
) -> None:
    _, healthy = await fleet.connected()
    _, worker = await cut_off_and_lose_everything(fleet)
    users = await restore(fleet, worker, listed=listed)
    assert worker.worker_id not in users
    assert healthy.worker_id in users
    async with fleet.login(worker) as hostile:
        with pytest.raises(AuthenticationError):
            await hostile.ping()


async def test_a_check_gives_no_user_back_to_a_worker_that_was_cut_off(
    fleet: WatchedFleet,
) -> None:
    """Its workflow still checks it: nobody has confirmed its end."""
    user, worker = await cut_off_and_lose_everything(fleet)
    check = CheckWorker(user_id=user, worker=worker)
    await fleet.harness.run(fleet.harness.checking.check_worker, check)
    owner = await reply_of(fleet.client.hget(keys.owner(user), "worker"))
    assert text_of(owner) != worker.worker_id


async def test_a_reload_lets_no_worker_log_in_again_that_was_cut_off(fleet: WatchedFleet) -> None:
    """Valkey has lost nothing. The worker asks for the reload itself: an event that it sent before
    the cut-off says that its session is new."""
    user, worker = await fleet.connected()
    await cut_off(fleet, worker.worker_id)
    reloading = replace(fleet.harness.reloading, users=fleet.users)
    request = ReloadRequest(user_id=user, worker=worker, reload_id="r-1", timeout=5.0)
    result = await fleet.harness.run(reloading.reload_credentials, request)
    assert not result.ok
    assert worker.worker_id.encode() not in await fleet.client.acl_users()
    assert not await reply_of(fleet.client.llen(keys.control(user))), "credentials were sent"


async def test_a_worker_that_is_cut_off_while_logins_are_made_again_keeps_none(
    fleet: WatchedFleet,
) -> None:
    """Whose worker has which user was read before the cut-off, and Valkey has no word of it yet."""
    _, healthy = await fleet.connected()
    _, worker = await fleet.connected()
    async with fleet.harness.database.engine.connect() as connection:
        assigned = await worker_sessions.assigned_now(connection)
    await cut_off(fleet, worker.worker_id)
    await fleet.client.delete(keys.cut_off(worker.worker_id))
    await fleet.users.restore([], assigned)
    users = {text_of(name) for name in await fleet.client.acl_users()}
    assert worker.worker_id not in users
    assert healthy.worker_id in users


class InterruptedSealer(AssignmentSealer):
    """Seals slowly, as with a key service far away: its worker is cut off meanwhile."""

    fleet: WatchedFleet

    async def seal(self, *args: Any, **named: Any) -> tuple[list[SealedAccount], bytes]:
        worker: WorkerRef = args[3]
        await cut_off(self.fleet, worker.worker_id)
        return await super().seal(*args, **named)


async def test_a_worker_that_is_cut_off_while_it_is_claimed_gets_neither_login_nor_claim(
    fleet: WatchedFleet,
) -> None:
    user, spare = await fleet.harness.user(), await fleet.harness.worker()
    await fleet.users.create(spare.worker_id, POOL)
    sealer = fleet.harness.claiming.sealer
    interrupted = InterruptedSealer(sealer.unwrapper, sealer.keys, sealer.secrets, sealer.budgets)
    interrupted.fleet = fleet
    claiming = replace(fleet.harness.claiming, sealer=interrupted)
    claim = fleet.harness.claim(user, f"claim-{user}", reply_wait=1.0)
    result = await fleet.harness.run(claiming.claim_worker, claim)
    assert result.status == ClaimStatus.GONE
    assert spare.worker_id.encode() not in await fleet.client.acl_users()
    assert not await fleet.client.exists(keys.pool_inbox(POOL, spare.worker_id))


async def test_a_worker_without_a_user_comes_back_by_that_and_is_cut_off_again(
    fleet: WatchedFleet,
) -> None:
    """Only Valkey knows of its cut-off, because it never had an assignment; and the orchestrator
    that cut it off is gone."""
    spare = await fleet.harness.worker()
    await fleet.users.create(spare.worker_id, POOL)
    await cut_off(fleet, spare.worker_id)
    await fleet.cutting.close()
    await fleet.client.flushall()
    fleet.cutting = fleet.watcher.cutting = fleet.harness.cutting(fleet.users)
    await fleet.users.restore([(spare.worker_id, POOL)], [])
    fleet.harness.launcher.unreachable = False
    url = fleet.users.url(spare.worker_id, fleet.server.url)
    async with valkey.connect_valkey(url) as hostile:
        inbox = keys.pool_inbox(POOL, spare.worker_id)
        for _ in range(MAX_NAMES // 1000 + 1):
            await reply_of(hostile.rpush(inbox, *["x"] * 1000))
        began = time.monotonic()
        while not fleet.cutting.count:
            await fleet.watcher.look()
        assert time.monotonic() - began < 2.0
        with pytest.raises((AuthenticationError, ConnectionError)):
            await hostile.ping()
    await fleet.cutting.wait()
    assert not await fleet.client.exists(inbox)


async def test_a_fleet_of_job_runners_comes_back_when_valkey_has_lost_its_cut_off(
    fleet: WatchedFleet,
) -> None:
    """Only Valkey knows of it. Then the fleet is watched as before."""
    server, tag = await valkey.read_server_id(fleet.client), job_keys.application_tag("evil")
    await JobUsers(fleet.client, SECRETS).ensure(server, [tag])
    await JobUsers(fleet.client, SECRETS).cut_off(tag, "a test")
    await JobUsers(fleet.client, SECRETS).ensure(server, [tag])
    assert user_of_jobs(tag).encode() not in await fleet.client.acl_users()
    await fleet.client.flushall()
    await JobUsers(fleet.client, SECRETS).ensure(server, [tag])
    assert user_of_jobs(tag).encode() in await fleet.client.acl_users()
    await JobUsers(fleet.client, SECRETS).delete(tag)
