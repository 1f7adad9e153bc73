"""Quotas of job runners in Valkey: a fleet that fills memory or keeps the server busy is cut off,
and one that has much to do is not."""

from __future__ import annotations

import asyncio
import json
import os
import sys
from collections.abc import AsyncIterator, Awaitable, Callable
from pathlib import Path
from typing import Any

import pytest
from redis.asyncio import Redis
from redis.exceptions import AuthenticationError, ConnectionError
from structlog.testing import capture_logs

from activities.events.quota_watcher import (
    BYTES_PER_SENT_BYTE,
    MAX_FLEET_BYTES_PER_S,
    READ_INTERVAL_S,
    ClientCounts,
    QuotaWatcher,
)
from infra.local.servers import ValkeyServer
from infra.valkey import client as valkey
from infra.valkey.client import reply_of
from infra.valkey.job_login import job_fleet_url, user_of_jobs
from infra.valkey.job_users import JobUsers
from infra.valkey.memory import REFUSED_ABOVE_PERMILLE, read_memory
from infra.vault.message_secret import MessageSecretFile
from infra.vault.secret_versions import add_version, create_versions
from tests.support.activities.harness import ActivityHarness
from worker_runtime.jobs.protocol import keys as job_keys
from worker_runtime.protocol import keys

TAG = job_keys.FLEET_TAG
MAXMEMORY = 64 * 1024 * 1024
#: The share of the memory from which new orders and claims of everybody are refused.
REFUSED_SHARE = REFUSED_ABOVE_PERMILLE / 1000
ENDED = (AuthenticationError, ConnectionError)
pytestmark = pytest.mark.timeout(90)


class WatchedRunners:
    """A fleet's login at a server with little memory, and what watches it."""

    def __init__(self, harness: ActivityHarness, url: str, secrets: MessageSecretFile) -> None:
        self.client = harness.client
        self.secrets = secrets
        self.users = JobUsers(harness.client, secrets)
        self.cutting = harness.cutting()
        self.watcher = QuotaWatcher(harness.client, "", self.cutting, self.users)
        self.url = url

    def login(self) -> Redis:
        return valkey.connect_valkey(job_fleet_url(self.url, TAG, self.secrets.job_keys(TAG)))

    async def ensure(self, users: JobUsers | None = None) -> None:
        await (users or self.users).ensure(await valkey.read_server_id(self.client))

    async def has_login(self) -> bool:
        return user_of_jobs(TAG).encode() in await self.client.acl_users()

    async def watch_until_cut_off(self) -> None:
        while await self.has_login():
            await self.watcher.look()
            await asyncio.sleep(READ_INTERVAL_S)


@pytest.fixture
async def runners(
    harness: ActivityHarness, valkey_server: ValkeyServer, tmp_path: Path
) -> AsyncIterator[WatchedRunners]:
    create_versions(tmp_path / "jobs-message.key")
    secrets = MessageSecretFile(tmp_path / "jobs-message.key", check_period=0.0)
    runners = WatchedRunners(harness, valkey_server.url, secrets)
    before = str((await harness.client.config_get("maxmemory"))["maxmemory"])
    used = (await read_memory(harness.client)).used
    await harness.client.config_set("maxmemory", used + MAXMEMORY)
    await runners.ensure()
    await runners.watcher.look()
    yield runners
    await harness.client.config_set("maxmemory", before or 0)
    await runners.users.delete(TAG)
    await harness.client.flushdb()
    await runners.cutting.close()


async def small_results(client: Redis, number: int) -> None:
    async with client.pipeline(transaction=False) as pipe:
        for place in range(1000):
            pipe.set(job_keys.result(TAG, f"made-up-{number}-{place}"), "x" * 100)
        await pipe.execute()


async def one_stream_of_long_entries(client: Redis, number: int) -> None:
    async with client.pipeline(transaction=False) as pipe:
        for _ in range(20):
            pipe.xadd(job_keys.events(TAG), {"made-up": os.urandom(10_000)})
        await pipe.execute()


async def long_values_in_jobs(client: Redis, number: int) -> None:
    await reply_of(
        client.hset(job_keys.job(TAG, f"made-up-{number}"), "text", os.urandom(400_000).hex())
    )


@pytest.mark.parametrize(
    "flood",
    [small_results, one_stream_of_long_entries, long_values_in_jobs],
    ids=lambda flood: flood.__name__,
)
async def test_a_fleet_that_fills_memory_slowly_is_cut_off_before_orders_are_refused(
    runners: WatchedRunners, flood: Callable[[Redis, int], Awaitable[None]]
) -> None:
    async with runners.login() as hostile:

        async def attack_on() -> None:
            number = 0
            while True:
                number += 1
                await flood(hostile, number)
                await asyncio.sleep(0.01)

        attacking = asyncio.create_task(attack_on())
        await runners.watch_until_cut_off()
        with pytest.raises(ENDED):
            await attacking
    assert (await read_memory(runners.client)).share < REFUSED_SHARE
    async with runners.login() as again:
        with pytest.raises(AuthenticationError):
            await again.ping()


async def test_errors_that_a_fleet_reports_without_end_fill_no_memory(
    runners: WatchedRunners,
) -> None:
    """They stand under a name of nobody's. That they were too many is an error itself."""
    largest = 0.0
    async with runners.login() as hostile:
        with capture_logs() as logs:
            for number in range(2 * MAXMEMORY // 1_000_000):
                fields = {"key": f"jobs|{number}", "text": "x" * 1_000_000, "count": 1}
                await hostile.xadd(keys.ERRORS, fields)  # type: ignore[arg-type]
                if number % 4 == 0:  # 16 MB a second
                    await runners.watcher.look()
                    largest = max(largest, (await read_memory(runners.client)).share)
                    await asyncio.sleep(READ_INTERVAL_S)
    assert largest < REFUSED_SHARE
    assert next(line["log_level"] for line in logs if line["event"] == "error_reports_deleted") == (
        "error"
    )


async def test_a_fleet_that_sends_as_fast_as_it_can_is_cut_off(runners: WatchedRunners) -> None:
    used = (await read_memory(runners.client)).used
    await runners.client.config_set("maxmemory", used + 24 * MAXMEMORY)
    url = job_fleet_url(runners.url, TAG, runners.secrets.job_keys(TAG))
    words = ("-m", "tests.support.valkey_flooder", url, "large job results", "", TAG, "20")
    flooder = await asyncio.create_subprocess_exec(
        sys.executable, *words, stdout=asyncio.subprocess.PIPE
    )
    try:
        await runners.watch_until_cut_off()
        assert (await read_memory(runners.client)).share < REFUSED_SHARE
    finally:
        said, _ = await flooder.communicate()
    assert json.loads(said)["refused_after"] is not None


async def test_a_fleet_that_was_cut_off_gets_no_login_until_its_keys_are_rotated(
    runners: WatchedRunners, tmp_path: Path
) -> None:
    await runners.users.cut_off(TAG, "a test")
    other = JobUsers(runners.client, runners.secrets)  # of another orchestrator, or a later one
    for users in (runners.users, other):
        await runners.ensure(users)
        assert not await runners.has_login()
    assert await reply_of(runners.client.scard(keys.cut_off_logins(TAG))) == 1
    add_version(tmp_path / "jobs-message.key", keep=2)
    await runners.ensure(other)
    async with runners.login() as rotated:
        assert await rotated.ping()
    old = job_fleet_url(runners.url, TAG, runners.secrets.job_keys(TAG)[1:])
    async with valkey.connect_valkey(old) as former:
        with pytest.raises(AuthenticationError):
            await former.ping()


async def test_a_fleet_that_has_filled_memory_gets_no_login_on_a_later_server(
    runners: WatchedRunners,
) -> None:
    used = (await read_memory(runners.client)).used
    await runners.client.config_set("maxmemory", used // 2)
    await runners.users.cut_off(TAG, "a test")
    await runners.ensure(JobUsers(runners.client, runners.secrets))
    assert not await runners.has_login()


async def test_a_fleet_that_could_not_be_cut_off_is_cut_off_at_a_later_look(
    runners: WatchedRunners,
) -> None:
    number = 0
    async with (
        valkey.connect_valkey("redis://127.0.0.1:1/0") as away,
        runners.login() as hostile,
    ):
        runners.watcher.job_users = JobUsers(away, runners.secrets)
        failure = None
        while failure is None:
            number += 1
            await long_values_in_jobs(hostile, number)
            try:
                await runners.watcher.look()
            except ConnectionError as error:
                failure = error
            await asyncio.sleep(0.05)
        runners.watcher.job_users = runners.users
        for _ in range(12):  # far less than what makes a fleet an offender
            number += 1
            await long_values_in_jobs(hostile, number)
        for _ in range(8):
            await runners.watcher.look()
            await asyncio.sleep(READ_INTERVAL_S)
    assert not await runners.has_login()


async def test_slow_commands_of_a_fleet_end_its_login(runners: WatchedRunners) -> None:
    """How busy the server's thread is depends on what else this machine does, so that the test
    lowers what counts as busy."""
    runners.watcher.busy_share = 0.01
    name = job_keys.mailbox(TAG, "made-up")
    async with runners.login() as hostile:
        for _ in range(100):
            await reply_of(hostile.rpush(name, *["x" * 20] * 10_000))

        async def attack_on() -> None:
            while True:
                await reply_of(hostile.lrem(name, 0, "none"))

        attacking = [asyncio.create_task(attack_on()) for _ in range(3)]
        await runners.watch_until_cut_off()
        for attack in attacking:
            with pytest.raises(ENDED):
                await attack


async def test_a_fleet_with_a_large_backlog_and_much_to_do_stays(runners: WatchedRunners) -> None:
    """What services queue fills half of the memory, while runners send results that replace
    others."""
    async with runners.login() as fleet:
        for number in range(32):
            long = b"x" * 1_000_000
            await reply_of(runners.client.hset(job_keys.job(TAG, str(number)), "body", long))
            await fleet.set(job_keys.result(TAG, str(number % 4)), "x" * 200_000)
            if number % 8 == 0:
                await runners.watcher.look()
                await asyncio.sleep(READ_INTERVAL_S)
        for _ in range(8):
            await runners.watcher.look()
            await asyncio.sleep(READ_INTERVAL_S)
        assert await fleet.ping()


def listing(*clients: tuple[int, str, int]) -> bytes:
    line = "id={} addr=x name= age=1 user={} redir=-1 tot-net-in={} tot-net-out=9 tot-cmds=3"
    return "\n".join(line.format(*client) for client in clients).encode()


def test_growth_counts_as_a_fleets_as_far_as_it_has_sent_as_much() -> None:
    counts = ClientCounts()
    looks: tuple[tuple[int, int, int], ...] = (
        # bytes that the fleet has sent in all, that the server uses, and what counts as the fleet's
        (10**9, 100, 0),  # it may have been connected for weeks
        (10**9 + 10, 200, 10 * BYTES_PER_SENT_BYTE),
        (10**9 + 910, 300, 10 * BYTES_PER_SENT_BYTE + 100),
        (10**9 + 1910, 250, 10 * BYTES_PER_SENT_BYTE + 50),
        (10**9 + 1910, 900, 10 * BYTES_PER_SENT_BYTE + 50),
        (10**9 + 1910, 100, 0),
    )
    for second, (sent, used, expected) in enumerate(looks):
        own = (1, "fleet-jobs", sent), (2, "default", 10**9 * second)
        assert counts.look(float(second), listing(*own), used=used) == []
        assert counts.grown.get("fleet-jobs", 0) == expected, second
    assert set(counts.grown) == {"fleet-jobs"}


def test_a_fleet_that_sends_far_more_than_results_is_named() -> None:
    counts = ClientCounts()
    assert counts.look(0.0, listing((1, "fleet-jobs", 9))) == []
    sent = [9 + (MAX_FLEET_BYTES_PER_S + 1) * second for second in range(3)]
    assert counts.look(1.0, listing((1, "fleet-jobs", sent[1]))) == []  # a burst
    reported: Any = counts.look(2.0, listing((1, "fleet-jobs", sent[2])))
    assert [user for user, _ in reported] == ["fleet-jobs"]
    # Many quick commands of a busy server are its work.
    busy = listing((1, "fleet-jobs", sent[2] + 1)).replace(b"cmds=3", b"cmds=90000")
    assert [counts.look(3.0 + at, busy, is_busy=True) for at in range(2)] == [[], []]
