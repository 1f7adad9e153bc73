"""A host is lost with all its workers: who is signalled, how soon, and at which rate. With real
servers."""

import asyncio
import itertools
import time

import pytest
import structlog
from sqlalchemy import text
from temporalio.client import Client

from activities.events.mark_watcher import MAX_QUIET_USERS_PER_CHECK, MarkWatcher
from activities.events.missing_marks import MissingMarkTracker
from activities.events.valkey_restorer import ValkeyRestorer
from infra.valkey.client import reply_of
from tests.support.activities import listener
from tests.support.activities.harness import ActivityHarness
from tests.support.message_signing import SECRETS
from worker_runtime.jobs.protocol import keys as job_keys
from worker_runtime.protocol import keys
from workflows import names

CONFIRM, SETTLE = 0.1, 0.6
_numbers = itertools.count()


async def served(harness: ActivityHarness, temporal: Client, count: int) -> list[str]:
    """Users in service, with their workflows and marks."""
    prefix = f"h{next(_numbers)}x{time.monotonic_ns()}x"
    users = [f"{prefix}{number:03}" for number in range(count)]
    async with harness.database.session() as session:
        await session.execute(
            text("insert into users (id, epoch) select unnest(cast(:ids as text[])), 1"),
            {"ids": users},
        )
        await session.execute(
            text(
                "insert into worker_sessions (claim_id, user_id, epoch, pool, worker_id, "
                "claimed_at, "
                "connected_at) select 'c-' || id, id, 1, 'p', 'w-' || id, now(), now() "
                "from unnest(cast(:ids as text[])) id"
            ),
            {"ids": users},
        )
    await asyncio.gather(*(listener.start(temporal, names.user_worker_id(user)) for user in users))
    for user in users:
        await reply_of(harness.client.hset(keys.owner(user), "epoch", "1"))
        await renew(harness, user)
    return users


async def renew(harness: ActivityHarness, user: str) -> None:
    await reply_of(harness.client.set(keys.mark(user), f"1:w-{user}"))


class Watch:
    """A watcher that a test has check, and whom it signals."""

    def __init__(self, harness: ActivityHarness, temporal: Client) -> None:
        self._harness = harness
        self._watcher = MarkWatcher(
            harness.client, temporal, harness.settings, ValkeyRestorer(harness.client, SECRETS)
        )
        self._absences = MissingMarkTracker(confirm=CONFIRM, settle=SETTLE)

    async def check(self) -> list[str]:
        """The users whose workflows are signalled, in order."""
        with structlog.testing.capture_logs() as logs:
            async with self._harness.database.engine.connect() as connection:
                await self._watcher.check_marks(connection, self._absences)
        return [line["user_id"] for line in logs if line["event"] == "worker_unmarked"]

    async def settle(self) -> None:
        began = time.monotonic()
        while time.monotonic() < began + SETTLE + 0.1:
            assert await self.check() == []
            await asyncio.sleep(0.05)

    async def until_signalled(self) -> list[str]:
        while not (signalled := await self.check()):  # noqa: ASYNC110 — it is the watcher that polls
            await asyncio.sleep(0.02)
        return signalled


@pytest.mark.parametrize("count", [5, 30, 300])
async def test_a_lost_host_costs_nobody_more_than_a_turn_and_who_asks_comes_first(
    harness: ActivityHarness, temporal: Client, count: int
) -> None:
    users, watch = await served(harness, temporal, count), Watch(harness, temporal)
    await watch.settle()
    asking = {
        users[-1]: keys.requests(users[-1]),
        users[-3]: job_keys.ready(job_keys.user_tag(users[-3])),
    }
    await reply_of(harness.client.lpush(asking[users[-1]], b"order"))
    await reply_of(harness.client.zadd(asking[users[-3]], {"job": 1}))
    began = time.monotonic()
    # They run out at one time.
    await reply_of(harness.client.delete(*(keys.mark(user) for user in users)))
    signalled = await watch.until_signalled()
    assert time.monotonic() - began >= SETTLE / 3
    assert set(signalled[:2]) == set(asking)
    assert len(signalled) == min(count, 2 + MAX_QUIET_USERS_PER_CHECK)
    # Whoever asks later does not wait for the others.
    late = next((user for user in reversed(users) if user not in signalled), "")
    if late:
        await reply_of(harness.client.lpush(keys.requests(late), b"order"))
        following = await watch.check()
        assert following[0] == late
        signalled += following
    while len(signalled) < count:
        following = await watch.check()
        assert 1 <= len(following) <= MAX_QUIET_USERS_PER_CHECK
        signalled += following
    assert sorted(signalled) == sorted(users)


async def test_marks_that_come_back_in_time_end_no_worker(
    harness: ActivityHarness, temporal: Client
) -> None:
    """As after Valkey stood still for longer than marks live: nobody could renew, and all do at
    once."""
    users, watch = await served(harness, temporal, 30), Watch(harness, temporal)
    await watch.settle()
    await reply_of(harness.client.delete(*(keys.mark(user) for user in users)))
    assert await watch.check() == []
    for user in users[1:]:
        await renew(harness, user)
    assert await watch.check() == []  # the last one gets time to come back, too
    await renew(harness, users[0])
    await asyncio.sleep(SETTLE / 3)
    assert await watch.check() == []


async def test_after_a_flush_many_missing_marks_have_nobody_signalled_before_all_could_renew(
    harness: ActivityHarness, temporal: Client
) -> None:
    users, watch = await served(harness, temporal, 30), Watch(harness, temporal)
    await watch.settle()
    await harness.client.flushall()
    began = time.monotonic()
    while time.monotonic() < began + SETTLE - 0.1:
        assert await watch.check() == []
        await asyncio.sleep(0.05)
    for user in users:
        await renew(harness, user)
    await asyncio.sleep(0.2)
    assert await watch.check() == []
