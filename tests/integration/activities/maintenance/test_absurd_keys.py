"""What a user or a worker may put into Valkey and PostgreSQL, the loops for all users live
through."""

from __future__ import annotations

import asyncio
import time
import tracemalloc
from typing import Any

import pytest
from sqlalchemy import text
from temporalio.client import Client

from activities.events.mark_watcher import MarkWatcher
from activities.events.missing_marks import MissingMarkTracker
from activities.events.pump import EventPump
from activities.events.valkey_restorer import ValkeyRestorer
from activities.maintenance.scan import FleetScanner
from activities.pool import entries
from infra.database.trading import switches
from infra.database.trading.switches import TradingScope
from infra.jobs.client import JobClient
from infra.valkey import client as valkey
from infra.valkey.client import number_of, reply_of, seconds_of
from infra.valkey.request_queue import RequestQueue
from infra.valkey.switch_fanout import SwitchSigner
from tests.support.activities.harness import ActivityHarness
from tests.support.activities.listener import listening, signals
from tests.support.activities.maintenance import MaintainedFleet
from tests.support.activities.watched_users import run_mark_watcher, start_watched_user
from tests.support.message_signing import SECRETS
from tests.support.workers.pool_worker import POOL
from worker_runtime.jobs.protocol import keys as job_keys
from worker_runtime.protocol import keys, scripts
from worker_runtime.protocol.errors import MalformedMessage
from worker_runtime.protocol.requests import EVERY_ACCOUNT, QueryAccount, SwitchState
from workflows import names
from workflows.user_worker.messages import CheckWorker

#: More words than Lua's `unpack` takes.
MANY = 5_000
HUGE, LARGE = 100_000_000, 20_000_000


async def swell(harness: ActivityHarness, key: str, size: int) -> None:
    """As a server lets a client do that takes strings of that size."""
    grow = (
        "redis.call('SET', KEYS[1], (redis.call('GET', KEYS[1]) or '') .. string.rep('x', ARGV[1]))"
    )
    await reply_of(harness.client.eval(grow, 1, key, size))


async def plant_switches(harness: ActivityHarness, user: str) -> None:
    """As if the user had made as many accounts, each with a switch."""
    async with harness.database.session() as session:
        await session.execute(
            text(
                "insert into switches (scope, state, version, actor, reason) "
                "select 'self:' || cast(:user as text) || '\\:a' || n, 'halted', n, 'u', '' "
                "from generate_series(1, :many) as n"
            ),
            {"user": user, "many": MANY},
        )


async def test_a_user_with_thousands_of_switches_blinds_nobody(
    harness: ActivityHarness, temporal: Client
) -> None:
    many, dead = await start_watched_user(harness), await start_watched_user(harness)
    await plant_switches(harness, many.user)
    async with (
        listening(temporal, names.user_worker_id(dead.user)) as handle,
        run_mark_watcher(harness, temporal),
    ):
        await dead.die()
        await signals(handle, 1)
    assert await reply_of(harness.client.hlen(keys.switch(many.user))) >= MANY
    # A claim writes them, too.
    async with harness.database.session() as session:
        switch = await switches.switch_of_user(session, many.user)
    generation, server = await valkey.read_generation_and_server(harness.client, "g")
    words = SwitchSigner(SECRETS).words(many.user, switch, server)
    assert await entries.write_owner(harness.client, many.user, many.ref, generation, words)


@pytest.mark.parametrize("value", ["a string", "no number"])
async def test_a_switch_that_a_worker_ruined_is_written_again(
    harness: ActivityHarness, temporal: Client, value: str
) -> None:
    hostile, other = await start_watched_user(harness), await start_watched_user(harness)
    watcher = MarkWatcher(
        harness.client, temporal, harness.settings, ValkeyRestorer(harness.client, SECRETS)
    )
    absences = MissingMarkTracker(confirm=0, settle=0)
    key = keys.switch(hostile.user)
    async with harness.database.engine.connect() as connection:
        await watcher.check_marks(connection, absences)
        if value == "a string":
            await harness.client.set(key, value)
        else:
            await reply_of(harness.client.hset(key, "*version", "9" * 5_000))
        async with harness.database.session() as session:
            await switches.put_switch(
                session, TradingScope(other.user), SwitchState.HALTED, actor="t", reason=""
            )
        await connection.rollback()
        await watcher.check_marks(connection, absences)
    for user, state in ((hostile.user, b"open"), (other.user, b"halted")):
        assert await reply_of(harness.client.hget(keys.switch(user), EVERY_ACCOUNT)) == state


async def test_keys_of_the_wrong_kind_hide_no_other_worker_from_maintenance(
    harness: ActivityHarness,
) -> None:
    hostile, other = await start_watched_user(harness), await start_watched_user(harness)
    free = await harness.worker()
    await harness.client.delete(keys.metadata(hostile.user))
    await harness.client.set(keys.metadata(hostile.user), "x")
    broken = await harness.worker()
    await asyncio.gather(
        harness.client.set(keys.pool_worker(POOL, broken.worker_id), "x"),
        reply_of(harness.client.zadd(keys.pool_ready(POOL), {b"\xff\xfe": 1})),
    )
    scanner = FleetScanner(
        harness.client, harness.database, harness.launcher, harness.secrets, pool=POOL
    )
    scan = await scanner.scan_all()
    assert scan.marks.keys() == {hostile.user, other.user}
    assert scan.entries[free.worker_id].state == "ready"
    assert broken.worker_id not in scan.entries


@pytest.mark.parametrize("absurd", ["x\0", "x" * 1_000_000], ids=["NUL", "huge"])
async def test_no_id_that_a_worker_forges_stops_maintenance(
    harness: ActivityHarness, temporal: Client, absurd: str
) -> None:
    fleet = MaintainedFleet(harness, temporal)
    await fleet.fill(serving=1, free=2)
    await fleet.quiet()
    claimed, stateless = [
        worker for name, worker in harness.made.items() if name != fleet.serving[0].ref.worker_id
    ]
    hostile, orphan = fleet.serving[0].user, await fleet.launched("p-silent")

    async def forge() -> None:
        for worker, state in ((claimed, "claimed"), (stateless, absurd)):
            entry = keys.pool_worker(POOL, worker.worker_id)
            await reply_of(harness.client.hset(entry, mapping={"state": state, "claim": absurd}))
        await harness.client.set(keys.mark(hostile), f"1:{absurd}")
        await harness.client.set(keys.mark(absurd), "1:w")
        await reply_of(harness.client.zadd(keys.pool_ready(POOL), {absurd: 1}))

    for _ in range(2):
        await forge()
        scanned, outcomes = await fleet.run()
        assert (scanned.found, scanned.guarded) == (3, "")
    assert outcomes == {"stopped": 3}
    assert orphan.task_id not in await fleet.running()
    assert not await harness.client.exists(keys.mark(hostile))


async def test_values_of_100_megabytes_are_not_read(
    harness: ActivityHarness, temporal: Client
) -> None:
    fleet = MaintainedFleet(harness, temporal)
    await fleet.fill(serving=3, free=1)
    await fleet.quiet()
    marked, reporting, healthy = fleet.serving
    free = next(
        name
        for name in harness.made
        if name not in {worker.ref.worker_id for worker in fleet.serving}
    )
    watcher = MarkWatcher(
        harness.client, temporal, harness.settings, ValkeyRestorer(harness.client, SECRETS)
    )
    await swell(harness, keys.mark(marked.user), HUGE)
    await reply_of(harness.client.delete(keys.metadata(reporting.user)))
    for key, field in (
        (keys.metadata(reporting.user), "state"),
        (keys.metadata(healthy.user), "another"),
        (keys.pool_worker(POOL, free), "state"),
    ):
        fill = f"redis.call('HSET', KEYS[1], '{field}', string.rep('x', {HUGE}))"
        await reply_of(harness.client.eval(fill, 1, key))
    async with harness.database.engine.connect() as connection:
        tracemalloc.start()
        try:
            scanned, _ = await fleet.run()
            await watcher.check_marks(connection, MissingMarkTracker(confirm=0, settle=0))
            for worker in fleet.serving:
                request = CheckWorker(user_id=worker.user, worker=worker.ref)
                seen = await harness.run(harness.checking.check_worker, request)
                assert seen.marked == (worker is not marked)
            _, peak = tracemalloc.get_traced_memory()
        finally:
            tracemalloc.stop()
    assert peak < HUGE / 10
    assert scanned.found > 0


async def test_what_an_order_a_job_and_a_claim_read_has_bounds(harness: ActivityHarness) -> None:
    """A user's own worker makes it as large as it likes, and so its user's request costs all
    others."""
    user, worker, claimed = (
        await start_watched_user(harness),
        await harness.worker(),
        await harness.worker(),
    )
    name, tag = user.user, job_keys.user_tag(user.user)
    queue, jobs = RequestQueue(harness.client, SECRETS), JobClient(harness.client, SECRETS)
    fields: dict[str, Any] = {
        "user_id": name,
        "account_id": "main",
        "reply_to": "",
        "generation": "g",
    }
    await queue.enqueue(QueryAccount(request_id="seen", **fields), time.monotonic() + 9)
    ours = (
        keys.mark(name),
        keys.seen(name, "seen"),
        keys.response(name, "r"),
        job_keys.result(tag, "r"),
    )
    for key in ours:
        await swell(harness, key, LARGE)
    entries_of = [keys.pool_worker(POOL, ref.worker_id) for ref in (worker, claimed)]
    for key, field in (
        *((entry, "public_key") for entry in entries_of),
        (job_keys.job(tag, "j"), "state"),
    ):
        fill = f"redis.call('HSET', KEYS[1], '{field}', string.rep('x', {LARGE}))"
        await reply_of(harness.client.eval(fill, 1, key))
    ring = f"redis.call('RPUSH', KEYS[1], string.rep('x', {LARGE}) .. ' w')"
    await reply_of(harness.client.eval(ring, 1, keys.EVENT_BELL))
    pump = EventPump(harness.client, harness.database, harness.cutting(), harness.keys)
    overdue = [
        keys.seen(name, "r"),
        keys.requests(name),
        keys.processing(name),
        keys.journal(name, "r"),
    ]
    tracemalloc.start()
    try:
        assert (
            await queue.enqueue(QueryAccount(request_id="new", **fields), time.monotonic() + 9)
        ).has_live_worker
        assert not (
            await queue.enqueue(QueryAccount(request_id="seen", **fields), time.monotonic() + 9)
        ).new
        assert await queue.answer(name, "r", "", 1) is None
        names = [*overdue, keys.response(name, "r")]
        fate, _ = await valkey.run_script(
            harness.client, scripts.RESOLVE_OVERDUE, names, ["r", "a", 60, 1000]
        )
        assert fate == b"answered"
        state = await jobs.get("r", tag=tag)
        assert state is None or state.result is not None
        with pytest.raises(MalformedMessage):
            await jobs.get("j", tag=tag)
        await pump.step()
        await pump.admit({(POOL, worker.worker_id)})
        for claim in ("c1", "c2"):
            assert not (await entries.claim_entry(harness.client, POOL, claim)).proven(harness.keys)
        _, peak = tracemalloc.get_traced_memory()
    finally:
        tracemalloc.stop()
    assert peak < LARGE / 10


@pytest.mark.parametrize(
    "value", [b"", b"x", b"-1", b"1e400", b"\xff", b"\xef\xbc\x91", b"9" * 5_000, None]
)
def test_what_is_no_number_is_zero(value: bytes | None) -> None:
    assert number_of(value) == 0
    assert seconds_of(value) == 0.0
