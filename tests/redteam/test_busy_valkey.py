"""A worker keeps Valkey's thread busy with what it may call: it is cut off at the rule's own
threshold, half of the time.

How much of the time the thread gets depends on what else this machine does. The kernel counts for
how long the thread worked, and for how long it waited for a processor. So the threshold is half of
the time, times the share that the thread got of what it asked for in the same run: on a quiet
machine that is all of it.
"""

from __future__ import annotations

import asyncio
import socket
import statistics
import struct
import time
from collections.abc import AsyncIterator
from pathlib import Path
from urllib.parse import urlsplit

import pytest
from redis.asyncio import Redis
from redis.exceptions import AuthenticationError, ConnectionError

from activities.events.quota_watcher import BUSY_SHARE, MAX_BYTES, MAX_NAMES, READ_INTERVAL_S
from infra.local.servers import ValkeyServer
from infra.valkey.client import reply_of, text_of
from tests.integration.activities.events.test_quotas import WatchedFleet
from tests.support.activities.harness import ActivityHarness
from tests.support.valkey_wire import encoded
from worker_runtime.protocol import keys
from workflows.user_worker.messages import WorkerRef

pytestmark = pytest.mark.timeout(120)

#: Entries of the list that is searched: the quota of names, less what a worker has anyway.
ENTRIES = MAX_NAMES - 2_000
#: Bytes of an entry: a search takes 0.2 ms, or 2 ms and more, which Valkey notes as slow.
QUICK, SLOW = 7, 1000
#: Pings of the other worker that are timed before the attack.
QUIET_PINGS = 50


class ThreadTimes:
    """For how long Valkey's thread has worked and waited for a processor since this was made."""

    def __init__(self, server: ValkeyServer) -> None:
        self._path = Path(f"/proc/{server.pid}/schedstat")
        self._began, self._at = self._read(), time.monotonic()

    def _read(self) -> tuple[float, float]:
        worked, waited, _ = self._path.read_text().split()
        return int(worked) / 1e9, int(waited) / 1e9

    def shares(self) -> tuple[float, float]:
        """Return the share of the time for which it had work, and the share of that for which it
        had a processor."""
        worked, waited = (now - then for now, then in zip(self._read(), self._began, strict=True))
        asked = worked + waited
        return asked / (time.monotonic() - self._at), worked / asked if asked else 1.0


@pytest.fixture
async def fleet(
    harness: ActivityHarness, valkey_server: ValkeyServer
) -> AsyncIterator[WatchedFleet]:
    fleet = WatchedFleet(harness, valkey_server)
    yield fleet
    await fleet.cutting.close()


async def timed_ping(client: Redis) -> float:
    began = time.monotonic()
    await client.ping()
    return time.monotonic() - began


async def search_on(client: Redis, name: str, entry_bytes: int, rest: float = 0.0) -> None:
    """Searches the list for what is not in it, and rests after a batch for `rest` times as long as
    it took. A batch takes the server 10 ms."""
    while True:
        began = time.monotonic()
        pipe = client.pipeline(transaction=False)
        for _ in range(50 if entry_bytes == QUICK else 5):
            pipe.lrem(name, 0, "y" * entry_bytes)
        await pipe.execute()
        await asyncio.sleep(rest * (time.monotonic() - began))


async def fill(client: Redis, name: str, entry_bytes: int) -> None:
    """Makes the list that is searched, which no other quota forbids."""
    assert ENTRIES < MAX_NAMES
    assert ENTRIES * entry_bytes < MAX_BYTES / 2
    for _ in range(ENTRIES // 500):
        await reply_of(client.rpush(name, *["x" * entry_bytes] * 500))


@pytest.mark.parametrize("entry_bytes", [QUICK, SLOW], ids=["quick", "slow"])
async def test_a_worker_that_keeps_valkey_busy_for_half_of_the_time_is_cut_off(
    fleet: WatchedFleet, valkey_server: ValkeyServer, entry_bytes: int
) -> None:
    user, worker = await fleet.connected()
    _, healthy = await fleet.connected()
    async with fleet.login(worker) as hostile, fleet.login(healthy) as other:
        await fill(hostile, keys.requests(user), entry_bytes)
        quiet = [await timed_ping(other) for _ in range(QUIET_PINGS)]
        thread, began = ThreadTimes(valkey_server), time.monotonic()
        attacking = [
            asyncio.create_task(search_on(hostile, keys.requests(user), entry_bytes))
            for _ in range(3)
        ]
        attacked = []
        while not fleet.cutting.count:
            asked, got = thread.shares()
            fleet.watcher.busy_share = BUSY_SHARE * got
            await fleet.watcher.look()
            attacked.append(await timed_ping(other))
            await asyncio.sleep(READ_INTERVAL_S)
        cut_off_after = time.monotonic() - began
        for attack in attacking:
            with pytest.raises((AuthenticationError, ConnectionError)):
                await attack
        after = [await timed_ping(other) for _ in range(QUIET_PINGS)]
    await fleet.cutting.wait()
    reason = text_of(await fleet.client.get(keys.cut_off(worker.worker_id)))
    print(  # noqa: T201
        f"{reason}; after {cut_off_after:.1f} s; the thread had work for {asked:.0%} of the time, "
        f"and a processor for {got:.0%} of that; a ping of another worker: "
        f"{statistics.median(quiet) * 1e3:.1f} ms, attacked {max(attacked) * 1e3:.0f} ms at most, "
        f"then {statistics.median(after) * 1e3:.1f} ms"
    )
    assert asked > BUSY_SHARE
    assert "keeps Valkey busy" in reason, "cut off for something else"
    assert fleet.cutting.count == 1, "the other worker was cut off, too"


async def search_from_new_connections(
    fleet: WatchedFleet, worker: WorkerRef, name: str, entry_bytes: int, *, is_reset: bool
) -> None:
    """Searches the list like `search_on`, each batch through a connection of its own.

    `is_reset`: the connection is reset before the batch is answered. The server carries it out all
    the same, and has forgotten the connection afterwards.
    """
    login = urlsplit(fleet.users.url(worker.worker_id, fleet.server.url))
    searches = encoded("LREM", name, "0", "y" * entry_bytes) * (50 if entry_bytes == QUICK else 5)
    batch = encoded("AUTH", login.username or "", login.password or "") + searches
    async with fleet.login(worker) as other:
        while True:
            reader, writer = await asyncio.open_connection("127.0.0.1", fleet.server.port)
            try:
                writer.write(batch)
                if is_reset:
                    link = writer.get_extra_info("socket")
                    link.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
                else:
                    if not (await reader.readline()).startswith(b"+OK"):
                        raise AuthenticationError
                    for _ in range(batch.count(b"LREM")):
                        await reader.readline()
            finally:
                writer.transport.abort()
            await other.ping()  # no more of them at once than the server carries out


@pytest.mark.parametrize(
    ("entry_bytes", "is_reset"),
    [(QUICK, True), (SLOW, True), (SLOW, False)],
    ids=["quick-reset", "slow-reset", "slow-answered"],
)
async def test_a_worker_that_keeps_valkey_busy_from_a_new_connection_each_time_is_cut_off(
    fleet: WatchedFleet, valkey_server: ValkeyServer, entry_bytes: int, is_reset: bool
) -> None:
    """No list of clients shows whose such a connection was."""
    user, worker = await fleet.connected()
    _, healthy = await fleet.connected()
    async with fleet.login(worker) as hostile:
        await fill(hostile, keys.requests(user), entry_bytes)
    thread = ThreadTimes(valkey_server)
    attacking = [
        asyncio.create_task(
            search_from_new_connections(
                fleet, worker, keys.requests(user), entry_bytes, is_reset=is_reset
            )
        )
        for _ in range(3)
    ]
    async with fleet.login(healthy) as other:
        while not fleet.cutting.count:
            asked, got = thread.shares()
            fleet.watcher.busy_share = BUSY_SHARE * got
            await fleet.watcher.look()
            await other.ping()
            await asyncio.sleep(READ_INTERVAL_S)
        for attack in attacking:
            with pytest.raises((AuthenticationError, ConnectionError, OSError)):
                await attack
        await fleet.cutting.wait()
        assert await other.ping(), "the other worker was cut off, too"
    reason = text_of(await fleet.client.get(keys.cut_off(worker.worker_id)))
    assert "keeps Valkey busy" in reason, "cut off for something else"
    assert asked > BUSY_SHARE
    assert fleet.cutting.count == 1


async def test_a_worker_that_keeps_valkey_busy_for_a_quarter_of_the_time_stays(
    fleet: WatchedFleet, valkey_server: ValkeyServer
) -> None:
    """A worker with much to do is not cut off; what others wait for is shown."""
    user, worker = await fleet.connected()
    _, healthy = await fleet.connected()
    async with fleet.login(worker) as busy, fleet.login(healthy) as other:
        await fill(busy, keys.requests(user), QUICK)
        thread, pings = ThreadTimes(valkey_server), []
        searching = asyncio.create_task(search_on(busy, keys.requests(user), QUICK, rest=3.0))
        for _ in range(16):
            asked, got = thread.shares()
            fleet.watcher.busy_share = BUSY_SHARE * got
            await fleet.watcher.look()
            pings.append(await timed_ping(other))
            await asyncio.sleep(READ_INTERVAL_S)
        assert not searching.done()
        searching.cancel()
    print(  # noqa: T201
        f"the thread had work for {asked:.0%} of the time, and a processor for {got:.0%} of that; "
        f"a ping of another worker: {statistics.median(pings) * 1e3:.1f} ms, "
        f"{max(pings) * 1e3:.0f} ms at most"
    )
    assert 0.05 < asked < BUSY_SHARE
    assert not fleet.cutting.count
