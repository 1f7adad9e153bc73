"""When a worker counts as ended where its launcher cannot be asked, or shows an old list."""

from __future__ import annotations

import asyncio
import time
from dataclasses import replace

import pytest

from activities.claims.stop import CONFIRM_TIMEOUT_S
from infra.database.workers import sessions as worker_sessions
from infra.valkey import client as valkey
from infra.valkey.client import reply_of
from infra.worker_task import LauncherUnreachable, StopFailed, Task
from tests.support.activities.harness import FENCED_FOR, ActivityHarness
from tests.support.activities.serving_users import (
    check_request,
    renew_active_mark,
    start_serving_user,
    stop_request,
)
from tests.support.launchers.fake import FakeLauncher
from worker_runtime.protocol import keys
from workflows.user_worker.messages import ClaimStatus


async def test_without_a_confirmed_end_the_worker_is_fenced_and_ends_later(
    harness: ActivityHarness,
) -> None:
    user, worker, ref = await start_serving_user(harness)
    harness.launcher.unreachable = True
    with pytest.raises(StopFailed, match="counts as ended in 1 s"):
        await harness.run(harness.stopping.stop_worker, stop_request(user, ref))
    # It is nobody's owner any more, and cannot become it again: not by a repeat, nor from
    # PostgreSQL.
    assert await renew_active_mark(harness, user, worker, ref.epoch) == "fenced"
    async with harness.database.session() as session:
        assert await worker_sessions.latest_session(session, worker_id=ref.worker_id, ended_at=None)
        assert await worker_sessions.workers_in_service(await session.connection()) == []
    # Before it counts as ended no other worker is claimed for anyone.
    early = await harness.run(harness.claiming.claim_worker, harness.claim(user, "early"))
    assert early.status == ClaimStatus.GONE
    await asyncio.sleep(FENCED_FOR)
    await harness.run(harness.stopping.stop_worker, stop_request(user, ref))
    harness.launcher.unreachable = False
    new = await harness.worker()
    later, _ = await asyncio.gather(
        harness.run(harness.claiming.claim_worker, harness.claim(user, "later")), new.serve()
    )
    assert later.worker is not None
    assert later.worker.epoch == ref.epoch + 2
    assert await renew_active_mark(harness, user, new, later.worker.epoch) == "ok"


async def test_a_worker_that_the_list_does_not_show_yet_is_found_by_its_task(
    harness: ActivityHarness,
) -> None:
    """Another orchestrator launched it a moment ago."""
    user, worker, ref = await start_serving_user(harness)
    late = replace(ref, task_id="")  # known to PostgreSQL, not to the claim

    async def nothing() -> list[Task]:
        return []

    harness.launcher.list = nothing  # type: ignore[method-assign]
    health = await harness.run(harness.checking.check_worker, check_request(user, late))
    assert health.running
    await harness.run(harness.stopping.stop_worker, stop_request(user, late))
    assert harness.launcher.stops == [(worker.task_id, "idle")]


async def test_a_task_is_stopped_though_the_list_cannot_be_read(harness: ActivityHarness) -> None:
    user, worker, ref = await start_serving_user(harness)

    async def throttled() -> list[Task]:
        raise LauncherUnreachable("too many calls")

    harness.launcher.list = throttled  # type: ignore[method-assign]
    await harness.run(harness.stopping.stop_worker, stop_request(user, ref))
    assert harness.launcher.stops == [(worker.task_id, "idle")]
    async with harness.database.session() as session:
        assert (
            await worker_sessions.latest_session(session, worker_id=ref.worker_id, ended_at=None)
            is None
        )


class FrozenLauncher(FakeLauncher):
    """Its node stands still: it takes every call and answers none."""

    async def stop(self, task_id: str, reason: str, *, grace: float | None = None) -> bool:
        await asyncio.Event().wait()
        raise AssertionError

    async def is_running(self, task_id: str) -> bool | None:
        await asyncio.Event().wait()
        raise AssertionError


@pytest.mark.parametrize("frozen", [True, False], ids=["frozen", "unreachable"])
async def test_of_a_lost_host_the_mark_that_ran_out_is_enough_and_the_launcher_holds_nobody_up(
    harness: ActivityHarness, frozen: bool
) -> None:
    user, worker, ref = await start_serving_user(harness)
    harness.launcher = FrozenLauncher() if frozen else harness.launcher
    harness.launcher.unreachable = not frozen
    harness.__post_init__()
    await known_for(harness, 2 * FENCED_FOR)
    await reply_of(harness.client.pexpire(keys.mark(user), 1))
    while await reply_of(harness.client.exists(keys.mark(user))):  # noqa: ASYNC110 — Valkey has no event
        await asyncio.sleep(0.005)
    await reply_of(harness.client.lpush(keys.processing(user), b"order"))
    async with asyncio.timeout(8.0):  # the activity's own limit
        health = await harness.run(harness.checking.check_worker, check_request(user, ref))
    assert (health.marked, health.running, health.in_flight) == (False, None, False)
    began = time.monotonic()
    await harness.run(harness.stopping.stop_worker, stop_request(user, ref))
    assert FENCED_FOR <= time.monotonic() - began < CONFIRM_TIMEOUT_S + FENCED_FOR + 5.0
    assert await renew_active_mark(harness, user, worker, ref.epoch) == "fenced"
    async with harness.database.session() as session:
        assert (
            await worker_sessions.latest_session(session, worker_id=ref.worker_id, ended_at=None)
            is None
        )


@pytest.mark.parametrize(
    "scenario", ["flush", "another server", "a mark that lives", "an old record"]
)
async def test_a_mark_that_may_have_been_lost_proves_nothing(
    harness: ActivityHarness, scenario: str
) -> None:
    """A worker whose mark Valkey lost still has its lease."""
    user, _, ref = await start_serving_user(harness)
    harness.launcher.unreachable = True
    await known_for(harness, 2 * FENCED_FOR)
    await reply_of(harness.client.lpush(keys.processing(user), b"order"))
    if scenario != "a mark that lives":
        await reply_of(harness.client.delete(keys.mark(user)))
    if scenario == "flush":
        await harness.client.flushall()
        await valkey.ensure_generation(harness.client, "other")
    elif scenario == "another server":
        await reply_of(harness.client.hset(keys.SERVER_SINCE, "server", "the one before"))
    elif scenario == "an old record":
        await reply_of(harness.client.hdel(keys.SERVER_SINCE, "noted_ms"))
    health = await harness.run(harness.checking.check_worker, check_request(user, ref))
    # A flush lost the list, too.
    assert health.in_flight == (scenario in ("another server", "an old record"))
    with pytest.raises(StopFailed, match="counts as ended in 1 s"):
        await harness.run(harness.stopping.stop_worker, stop_request(user, ref))


async def known_for(harness: ActivityHarness, seconds: float) -> None:
    """As if Valkey had been watched for this long."""
    server = await valkey.read_server_id(harness.client)
    noted = await valkey.read_clock(harness.client) - int(seconds * 1000)
    words: list[str | int] = ["server", server, "at_ms", 0, "noted_ms", noted]
    await reply_of(harness.client.hset(keys.SERVER_SINCE, items=words))
