"""A worker makes Valkey keep what is in no name, and hardly in its account of a client: channels,
names that it waits for, and names that were refused."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Callable, Coroutine
from urllib.parse import urlsplit

import pytest

from activities.events.quota_watcher import MAX_BYTES, MAX_CONNECTIONS, READ_INTERVAL_S
from infra.local.servers import ValkeyServer
from infra.valkey.client import text_of
from infra.valkey.memory import REFUSED_ABOVE_PERMILLE, read_memory
from tests.integration.activities.events.test_quotas import WatchedFleet
from tests.support.activities.harness import ActivityHarness
from tests.support.valkey_wire import encoded
from worker_runtime.protocol import keys
from workflows.user_worker.messages import WorkerRef

pytestmark = pytest.mark.timeout(120)


@pytest.fixture
async def fleet(
    harness: ActivityHarness, valkey_server: ValkeyServer
) -> AsyncIterator[WatchedFleet]:
    fleet = WatchedFleet(harness, valkey_server)
    yield fleet
    await fleet.cutting.close()


class RawLogin:
    """Opens connections of a worker that send what no client library would."""

    def __init__(self, fleet: WatchedFleet, worker: WorkerRef) -> None:
        login = urlsplit(fleet.users.url(worker.worker_id, fleet.server.url))
        self._auth = encoded("AUTH", login.username or "", login.password or "")
        self._port = fleet.server.port
        self.writers: list[asyncio.StreamWriter] = []
        self._reading: list[asyncio.Task[None]] = []

    async def open(self) -> asyncio.StreamWriter:
        """Opens a connection whose answers are read and dropped."""
        reader, writer = await asyncio.open_connection("127.0.0.1", self._port)
        self.writers.append(writer)
        writer.write(self._auth)
        assert (await reader.readline()).startswith(b"+OK")
        self._reading.append(asyncio.create_task(_drop(reader)))
        return writer

    async def finished(self) -> None:
        """Returns when the server has ended all connections."""
        await asyncio.wait(self._reading)

    async def close(self) -> None:
        for writer in self.writers:
            writer.transport.abort()
        if self._reading:
            await asyncio.wait(self._reading)


async def _drop(reader: asyncio.StreamReader) -> None:
    try:
        while await reader.read(65536):
            pass
    except OSError:  # Valkey ended it
        pass


async def many_channels(login: RawLogin, user: str) -> None:
    writer = await login.open()
    for start in range(0, 10_000_000, 1000):
        names = [keys.own_answers(user, f"{start + number}") for number in range(1000)]
        writer.write(encoded("SUBSCRIBE", *names))
        await writer.drain()


async def many_names_to_wait_for(login: RawLogin, user: str) -> None:
    for connection in range(MAX_CONNECTIONS // 2):
        writer = await login.open()
        names = [keys.response(user, f"{connection}-{number}") for number in range(50_000)]
        writer.write(encoded("BLPOP", *names, "0"))
        await writer.drain()


@pytest.mark.parametrize(
    ("attack", "reason"),
    [
        (many_channels, "channels"),
        (many_names_to_wait_for, "bytes of names"),
    ],
    ids=lambda value: getattr(value, "__name__", None),
)
async def test_what_the_server_accounts_to_nobody_fills_no_memory(
    fleet: WatchedFleet, attack: Callable[[RawLogin, str], Coroutine[None, None, None]], reason: str
) -> None:
    user, worker = await fleet.connected()
    _, healthy = await fleet.connected()
    await fleet.watcher.look()
    before = (await read_memory(fleet.client)).used
    login = RawLogin(fleet, worker)
    attacking = asyncio.create_task(attack(login, user))
    largest = 0.0
    try:
        async with fleet.login(healthy) as other:
            while not fleet.cutting.count:
                await fleet.watcher.look()
                largest = max(largest, (await read_memory(fleet.client)).share)
                await asyncio.sleep(READ_INTERVAL_S)
            with pytest.raises(
                (OSError, AssertionError)
            ):  # its connections, or its login, are gone
                await attacking
            await fleet.cutting.wait()
            assert await other.ping(), "the other worker was cut off, too"
    finally:
        attacking.cancel()
        await login.close()
    assert reason in text_of(await fleet.client.get(keys.cut_off(worker.worker_id)))
    assert fleet.cutting.count == 1
    assert largest < REFUSED_ABOVE_PERMILLE / 1000, "orders of others were refused"
    while (await read_memory(fleet.client)).used > before + MAX_BYTES / 8:  # noqa: ASYNC110
        await asyncio.sleep(READ_INTERVAL_S)  # Valkey frees large values in the background


async def test_names_that_were_refused_fill_no_memory(fleet: WatchedFleet) -> None:
    """The server keeps what it refused for `ACL LOG`, also after the worker's end."""
    _, worker = await fleet.connected()
    before = (await read_memory(fleet.client)).used
    login = RawLogin(fleet, worker)
    writer = await login.open()
    for number in range(200):
        writer.write(encoded("GET", f"{number}".ljust(1_000_000, "x")))
        await writer.drain()
    writer.write(encoded("QUIT"))
    await writer.drain()
    await login.finished()
    assert (await read_memory(fleet.client)).used - before < MAX_BYTES / 2
    await login.close()
