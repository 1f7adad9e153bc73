"""Quotas in Valkey: a worker that holds too much is cut off and leaves nothing; what services wrote
stays."""

from __future__ import annotations

import asyncio
import time
from collections.abc import AsyncIterator
from typing import Any, cast
from urllib.parse import urlsplit
from uuid import uuid4

import pytest
from redis.asyncio import Redis
from redis.exceptions import AuthenticationError, ConnectionError

from activities.events.cut_off import Offender
from activities.events.quota_watcher import (
    MAX_BYTES,
    MAX_BYTES_PER_S,
    MAX_CONNECTIONS,
    MAX_NAMES,
    READ_INTERVAL_S,
    ClientCounts,
    NotedCommand,
    QuotaWatcher,
    SlowTime,
)
from infra.local.servers import ValkeyServer
from infra.process_metrics import read_samples
from infra.valkey import client as valkey
from infra.valkey.client import reply_of, text_of
from infra.valkey.memory import read_memory
from infra.valkey.worker_users import WorkerUsers
from tests.support.activities.harness import ActivityHarness
from tests.support.workers.pool_worker import POOL
from worker_runtime.jobs.protocol import keys as job_keys
from worker_runtime.protocol import keys, scripts
from workflows.user_worker.messages import WorkerRef

MEGABYTE = b"x" * 1_000_000


class WatchedFleet:
    """A user with a worker that is Active, and what watches it."""

    def __init__(self, harness: ActivityHarness, server: ValkeyServer) -> None:
        self.harness = harness
        self.client = harness.client
        self.server = server
        self.users = WorkerUsers(harness.client, harness.database, harness.keys)
        self.cutting = harness.cutting(self.users)
        self.watcher = QuotaWatcher(harness.client, "", self.cutting)
        harness.claiming.users = self.users

    async def connected(self) -> tuple[str, WorkerRef]:
        user, worker = await self.harness.user(), await self.harness.worker()
        await self.users.create(worker.worker_id, POOL)
        request = self.harness.claim(user, f"claim-{user}")
        result, _ = await asyncio.gather(
            self.harness.run(self.harness.claiming.claim_worker, request), worker.serve()
        )
        assert result.worker is not None
        await self.harness.renew_mark(
            user, result.worker.worker_id, result.worker.epoch, state="Active"
        )
        return user, result.worker

    def login(self, worker: WorkerRef) -> Redis:
        return valkey.connect_valkey(self.users.url(worker.worker_id, self.server.url))

    async def names_of(self, user: str, worker: WorkerRef) -> set[str]:
        all_names = [name.decode() async for name in self.client.scan_iter(count=1000)]
        return {
            name
            for name in all_names
            if f"{{{user}}}" in name or f":{user}}}" in name or worker.worker_id in name
        }


@pytest.fixture
async def fleet(
    harness: ActivityHarness, valkey_server: ValkeyServer
) -> AsyncIterator[WatchedFleet]:
    fleet = WatchedFleet(harness, valkey_server)
    yield fleet
    await fleet.cutting.close()


async def small_names(client: Redis, user: str) -> None:
    async with client.pipeline(transaction=False) as pipe:
        for number in range(MAX_NAMES + 1):
            pipe.set(keys.seen(user, f"made-up-{number}"), "x")
        await pipe.execute()


async def large_strings(
    client: Redis, user: str, count: int = MAX_BYTES // len(MEGABYTE) + 2
) -> None:
    for number in range(count):
        await client.set(keys.response(user, f"made-up-{number}"), MEGABYTE)


async def a_long_list(client: Redis, user: str) -> None:
    for _ in range(MAX_NAMES // 1000 + 1):
        await reply_of(client.rpush(keys.requests(user), *["x"] * 1000))


async def a_hash_that_samples_as_small(client: Redis, user: str) -> None:
    """A few large values among many tiny ones, which a sample does not meet."""
    name = job_keys.meta(job_keys.user_tag(user))
    await reply_of(client.hset(name, mapping={f"tiny-{number}": "x" for number in range(10_000)}))
    for number in range(MAX_BYTES // len(MEGABYTE) + 2):
        await reply_of(client.hset(name, f"large-{number}", cast("Any", MEGABYTE)))


FLOODS = (small_names, large_strings, a_long_list, a_hash_that_samples_as_small)


@pytest.mark.parametrize("flood", FLOODS, ids=lambda flood: flood.__name__)
async def test_a_worker_beyond_its_quota_is_cut_off_and_leaves_nothing(
    fleet: WatchedFleet, flood: Any
) -> None:
    victim, healthy = await fleet.connected()
    attacker, worker = await fleet.connected()
    await fleet.watcher.look()  # what is there before
    of_victim = await fleet.names_of(victim, healthy)
    async with fleet.login(worker) as hostile:
        await flood(hostile, attacker)
        began = time.monotonic()
        while not fleet.cutting.count:
            await fleet.watcher.look()
        assert time.monotonic() - began < 2.0
        with pytest.raises((AuthenticationError, ConnectionError)):
            await hostile.ping()
    await fleet.cutting.wait()
    assert fleet.cutting.count == 1
    remaining = await fleet.names_of(attacker, worker)
    of_services = {keys.owner(attacker), keys.switch(attacker), keys.cut_off(worker.worker_id)}
    assert remaining - {keys.requests(attacker)} == of_services
    assert not await reply_of(fleet.client.llen(keys.requests(attacker)))
    assert await reply_of(fleet.client.hget(keys.owner(attacker), "worker")) == b"-"
    assert await fleet.names_of(victim, healthy) == of_victim
    assert [task for task, _ in fleet.harness.launcher.stops] == [worker.task_id]


async def test_what_services_wrote_stays_and_what_may_have_been_sent_is_unknown(
    fleet: WatchedFleet,
) -> None:
    user, worker = await fleet.connected()
    queued, taken = str(uuid4()), str(uuid4())
    for order_id in (queued, taken):
        await fleet.harness.sql(_AN_ORDER.format(order=order_id, user=user))
        item = f"4000000000000|{order_id}|1:mac|payload"
        await reply_of(fleet.client.lpush(keys.requests(user), item))
        await fleet.client.set(keys.seen(user, order_id), item, px=3_600_000)
        await fleet.client.set(keys.client_order(user, order_id), f"{order_id}|t", px=3_600_000)
    async with fleet.login(worker) as hostile:
        await reply_of(hostile.lmove(keys.requests(user), keys.processing(user), "RIGHT", "LEFT"))
        await reply_of(hostile.rpush(keys.events_of(worker.worker_id), "an event"))
        await hostile.set(keys.response(user, "made-up"), "x")
    [oldest] = await reply_of(fleet.client.lrange(keys.processing(user), 0, -1))
    first = oldest.decode().split("|")[1]
    other = taken if first == queued else queued
    await fleet.cutting.cut_off(Offender(user_id=user), "a test")
    await fleet.cutting.wait()
    assert await reply_of(fleet.client.llen(keys.requests(user))) == 1
    assert await reply_of(fleet.client.llen(keys.processing(user))) == 1
    assert await fleet.client.exists(keys.journal(user, first))
    assert not await fleet.client.exists(keys.journal(user, other))
    kept = [keys.seen(user, first), keys.seen(user, other), keys.client_order(user, queued)]
    assert await fleet.client.exists(*kept) == 3
    assert not await fleet.client.exists(keys.response(user, "made-up"), keys.mark(user))
    assert [fields[b"e"] for _, fields in cast("Any", await fleet.client.xrange(keys.EVENTS))][
        -1
    ] == b"an event"


#: An accepted order, as far as the cut-off reads it.
_AN_ORDER = """
insert into orders (id, user_id, account_id, client_order_id, fingerprint, symbol, side, quantity,
                    price_type, time_in_force, tag, trading_day, state, generation, deadline_at)
values ('{order}', '{user}', 'main', '{order}', '', '2330', 'buy', 1,
        'MKT', 'IOC', left('{order}', 6), current_date, 'queued', '',
        clock_timestamp() + interval '1 minute')
"""


async def test_a_worker_that_fills_the_counts_of_its_calls_is_cut_off(fleet: WatchedFleet) -> None:
    (_, healthy), (_, worker) = await fleet.connected(), await fleet.connected()
    name = keys.budget("v1-made-up", "orders")
    for worker_ref, counts in (
        (worker, keys.budget("v1-made-up", "*")),
        (healthy, keys.budget("v1-others", "*")),
    ):
        await reply_of(
            fleet.client.execute_command(
                "ACL", "SETUSER", worker_ref.worker_id, f"(+zadd ~{counts})"
            )  # type: ignore[no-untyped-call]
        )
    async with fleet.login(worker) as hostile:
        for start in range(0, MAX_NAMES + 1, 1000):
            await hostile.zadd(name, {f"{number}": number for number in range(start, start + 1000)})
    while not fleet.cutting.count:
        await fleet.watcher.look()
    await fleet.cutting.wait()
    assert not await fleet.client.exists(name)
    assert [task for task, _ in fleet.harness.launcher.stops] == [worker.task_id]


async def test_the_largest_share_and_the_number_of_those_cut_off_are_shown(
    fleet: WatchedFleet,
) -> None:
    user, worker = await fleet.connected()
    before = (await read_samples())[("berth_workers_cut_off_total",) * 2]
    async with fleet.login(worker) as busy:
        await large_strings(busy, user, MAX_BYTES // len(MEGABYTE) // 2)
    await fleet.watcher.look()
    assert 0.4 < (await read_samples())[("berth_worker_quota_used_ratio",) * 2] < 0.6
    await fleet.cutting.cut_off(Offender(user_id=user), "a test")
    await fleet.cutting.wait()
    assert (await read_samples())[("berth_workers_cut_off_total",) * 2] == before + 1


async def test_a_worker_with_many_connections_is_cut_off(fleet: WatchedFleet) -> None:
    _, worker = await fleet.connected()
    clients = [fleet.login(worker) for _ in range(4 * MAX_CONNECTIONS)]
    try:
        for client in clients:
            await client.ping()
        await fleet.watcher.look()
    finally:
        for client in clients:
            await client.aclose()
    await fleet.cutting.wait()
    assert [task for task, _ in fleet.harness.launcher.stops] == [worker.task_id]


async def test_answers_that_a_worker_does_not_read_fill_no_memory(fleet: WatchedFleet) -> None:
    """Also if it asks for another value each time, which stays only for its answer."""
    user, worker = await fleet.connected()
    before = (await read_memory(fleet.client)).used
    login, key = (
        urlsplit(fleet.users.url(worker.worker_id, fleet.server.url)),
        keys.response(user, "large"),
    )
    reader, writer = await asyncio.open_connection("127.0.0.1", fleet.server.port)
    writer.write(f"AUTH {login.username} {login.password}\r\n".encode())
    assert await reader.readline() == b"+OK\r\n"
    length = len(key.encode())
    ask = f"*3\r\n$3\r\nSET\r\n${length}\r\n{key}\r\n$1000000\r\n".encode() + MEGABYTE
    ask += f"\r\n*2\r\n$3\r\nGET\r\n${length}\r\n{key}\r\n".encode()
    largest = 0

    async def ask_on() -> None:
        nonlocal largest
        while True:
            writer.write(ask)
            await writer.drain()
            largest = max(largest, (await read_memory(fleet.client)).used)

    with pytest.raises(OSError, match="onnection"):  # Valkey ends it
        await ask_on()
    writer.transport.abort()
    assert largest < before + 250_000_000


def test_a_client_that_sends_too_much_is_named_and_a_busy_service_is_not() -> None:
    line = "id={} addr=x name= age=1 user={} redir=-1 tot-net-in=9 tot-net-out={} tot-cmds=3"

    def listing(sent: int) -> bytes:
        return "\n".join(
            (line.format(1, "p-1", sent), line.format(2, "p-2", 9), line.format(3, "default", sent))
        ).encode()

    counts = ClientCounts()
    assert counts.look(0.0, listing(9)) == []
    assert [user for user, _ in counts.look(1.0, listing(9 + MAX_BYTES_PER_S + 1))] == ["p-1"]
    assert counts.look(2.0, listing(9 + 2 * MAX_BYTES_PER_S)) == []


def activity(*clients: tuple[str, int]) -> bytes:
    """A list of clients: user and commands of each. The address follows from the user."""
    line = (
        "id={} addr={}:1 name=user=x age=1 user={} redir=-1 tot-net-in=9 tot-net-out=9 tot-cmds={}"
    )
    return "\n".join(
        line.format(number, user, user, commands) for number, (user, commands) in enumerate(clients)
    ).encode()


def test_who_keeps_a_busy_server_busy_is_named_at_the_second_look() -> None:
    def looks(*rounds: tuple[int, bool]) -> list[list[str]]:
        """Commands of p-1 in each second, where p-2 sends 900 and a service 400, and whether it is
        busy."""
        counts, sent, reported = ClientCounts(), 0, []
        for second, (commands, is_busy) in enumerate(rounds):
            sent += commands
            others = ("p-2", 900 * second), ("default", 400 * second)
            listing = activity(("p-1", sent), *others)
            reported.append(
                [user for user, _ in counts.look(float(second), listing, is_busy=is_busy)]
            )
        return reported

    assert looks((9, True), (3000, True), (3000, True)) == [[], [], ["p-1"]]
    assert looks((9, True), (3000, True), (3000, False), (3000, True)) == [[], [], [], []]
    assert looks((9, False), (3000, False), (3000, False)) == [[], [], []], "the server is not busy"
    assert looks((9, True), (1200, True), (1200, True)) == [[], [], []], "others send more"


def test_whose_slow_commands_fill_the_time_is_named_and_a_service_is_not() -> None:
    counts = ClientCounts()
    reported = []
    for second, seconds in enumerate((0.9, 0.9, 0.9, 0.3)):
        slow = {
            b"p-1:1": SlowTime(seconds, 90),
            b"default:1": SlowTime(0.9, 90),
            b"nobody:1": SlowTime(9.0, 90),
        }
        listing = activity(("p-1", 100 * second), ("default", 9000 * second))
        reported.append(
            [user for user, _ in counts.look(float(second), listing, is_busy=True, slow=slow)]
        )
    assert reported == [[], [], ["p-1"], []]


@pytest.mark.parametrize(
    ("commands", "slow", "is_named"),
    [
        # Of 0.95 ms each: none is noted as slow, and they fill half of the time.
        (550, SlowTime(), True),
        (480, SlowTime(), False),
        (320, SlowTime(0.25, 25), True),
        (240, SlowTime(0.25, 25), False),
        (300, SlowTime(0.30, 290), False),
    ],
)
def test_who_can_have_filled_half_of_the_time_of_a_busy_server_is_named(
    commands: int, slow: SlowTime, is_named: bool
) -> None:
    counts, named = ClientCounts(), list[str]()
    for second in range(3):
        listing = activity(("p-1", commands * second), ("default", 100 * second))
        offenders = counts.look(float(second), listing, is_busy=True, slow={b"p-1:1": slow})
        named += [user for user, _ in offenders]
    assert named == (["p-1"] if is_named else [])


def test_a_busy_trader_is_not_named_for_the_time_of_others_slow_commands() -> None:
    counts = ClientCounts()
    others = {b"fleet-jobs:1": SlowTime(0.4, 40), b"default:1": SlowTime(0.2, 20)}
    for second in range(3):
        listing = activity(("p-1", 600 * second), ("default", 100 * second))
        assert counts.look(float(second), listing, is_busy=True, slow=others) == []


def noted(seconds: float, address: str, *words: str) -> NotedCommand:
    """A command as SLOWLOG GET has it."""
    command = [word.encode() for word in words]
    return NotedCommand.of([1, 1_700_000_000, int(seconds * 1e6), command, address.encode(), b""])


@pytest.mark.parametrize(
    ("words", "key"),
    [
        (("LREM", "own", "0", "others"), b"own"),
        (("blpop", "own", "others", "1"), b"own"),
        (("EvalSha", "0" * 40, "1", "own", "others"), b"own"),
        # What no right of the user was compared with could name anybody.
        (("EVALSHA", "0" * 40, "0", "others"), b""),
        (("EVALSHA", "x 1 others", "0"), b""),
        (("EVALSHA", "0" * 40, "-1", "others"), b""),
        (("PING", "others"), b""),
        (("PUBLISH", "others", "x"), b""),
        (("SELECT", "others"), b""),
        (("INFO", "server", "others"), b""),
        (("TIME",), b""),
    ],
)
def test_only_a_key_that_the_server_has_checked_says_whose_a_command_was(
    words: tuple[str, ...], key: bytes
) -> None:
    assert noted(0.1, "x:1", *words).key == key


def test_commands_of_connections_that_have_ended_count_for_whom_the_last_list_showed_there() -> (
    None
):
    counts = ClientCounts()
    counts.look(0.0, activity(("p-1", 9), ("p-2", 9), ("fleet-jobs", 9), ("default", 9)))
    listing = activity(("p-2", 9))
    quick, slow = 0.0005, 0.002
    by_user, unseen = counts.find_ended(
        listing,
        [
            *(noted(seconds, "p-1:1", "GET", "a") for seconds in (quick, slow)),
            *(noted(seconds, "fleet-jobs:1", "GET", "b") for seconds in (quick, slow)),
            noted(slow, "default:1", "GET", "a"),
            noted(slow, "p-2:1", "GET", "c"),
            noted(quick, "", "GET", "d"),
            noted(slow, "p-9:1", "GET", "e"),
        ],
    )
    assert {user: spent.commands for user, spent in by_user.items()} == {
        b"p-1": 2,
        b"fleet-jobs": 1,
        b"default": 1,
    }
    assert [command.key for command in unseen] == [b"d", b"e"]


@pytest.mark.parametrize(("seconds", "is_named"), [(0.6, True), (0.4, False)])
def test_whose_ended_connections_fill_half_of_the_time_is_named(
    seconds: float, is_named: bool
) -> None:
    counts, named = ClientCounts(), list[str]()
    for second in range(3):
        ended = {b"p-1": SlowTime(seconds, 900), b"default": SlowTime(0.9, 900)}
        listing = activity(("p-2", 10 * second), ("default", 100 * second))
        offenders = counts.look(float(second), listing, is_busy=True, ended=ended)
        named += [user for user, _ in offenders]
    assert named == (["p-1"] if is_named else [])


async def test_a_key_names_the_logins_that_reach_it(fleet: WatchedFleet) -> None:
    user, worker = await fleet.connected()
    of_worker = f"worker {worker.worker_id}".encode()
    names = {
        keys.requests(user): of_worker,
        keys.owner(user): of_worker,
        keys.switch(user): of_worker,
        keys.events_of(worker.worker_id): of_worker,
        keys.pool_inbox(POOL, worker.worker_id): of_worker,
        job_keys.job(job_keys.user_tag(user), "x"): of_worker,
        keys.requests("nobody"): b"",
        keys.budget("v1-made-up", "orders"): b"budget v1-made-up",
        job_keys.job(job_keys.FLEET_TAG, "x"): f"fleet {job_keys.FLEET_TAG}".encode(),
        keys.EVENT_BELL: b"",
        keys.GENERATION: b"",
        keys.client_order(user, "x"): b"",
        "x": b"",
    }
    logins = await valkey.run_script(fleet.client, scripts.NAME_USERS, [], list(names))
    assert dict(zip(names, logins, strict=True)) == names


@pytest.mark.timeout(90)
async def test_a_worker_that_keeps_valkey_busy_is_cut_off(fleet: WatchedFleet) -> None:
    """By quick commands that it may call, on what it may hold, with little traffic, but one after
    the other.

    The server carries out all that one read of a connection gave it. How busy its thread is depends
    on what else this machine does, so that the test lowers what counts as busy.
    """
    fleet.watcher.busy_share = 0.01
    user, worker = await fleet.connected()
    victim, healthy = await fleet.connected()
    own = keys.requests(user)
    async with fleet.login(worker) as hostile, fleet.login(healthy) as other:
        await reply_of(hostile.rpush(own, *["an entry"] * 1000))

        async def attack_on() -> None:
            while True:
                pipe = hostile.pipeline(transaction=False)
                for _ in range(1000):
                    pipe.lrem(own, 0, "none")
                await pipe.execute()

        attacking = asyncio.create_task(attack_on())
        while not fleet.cutting.count:
            await fleet.watcher.look()
            await other.get(keys.mark(victim))
            await asyncio.sleep(READ_INTERVAL_S)
        with pytest.raises((AuthenticationError, ConnectionError)):
            await attacking
        assert await other.ping(), "who asks now and then stays"
    await fleet.cutting.wait()
    assert fleet.cutting.count == 1
    reason = await fleet.client.get(keys.cut_off(worker.worker_id))
    assert "commands a second" in text_of(reason)
