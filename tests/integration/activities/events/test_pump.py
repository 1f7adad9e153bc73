"""The pump: what workers report reaches the stream and the pools, and no worker delays another."""

from __future__ import annotations

import asyncio
import os
import signal
import sys
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import Any
from uuid import uuid4

import pytest
from redis.asyncio import Redis
from redis.exceptions import AuthenticationError, ConnectionError

from activities.events.pump import FLOOD_LENGTH, FLOOD_ROUNDS, MAX_EVENTS_PER_WORKER, EventPump
from activities.pool import entries
from activities.pool.launch import launched_for
from infra import tasks
from infra.local.servers import ValkeyServer
from infra.valkey import client as valkey
from infra.valkey.client import reply_of
from infra.valkey.worker_users import WorkerUsers
from tests.support.activities.event_streams import make_order_event, make_worker_event
from tests.support.activities.harness import ActivityHarness
from tests.support.workers.pool_worker import POOL, ScriptedPoolWorker
from worker_runtime.protocol import keys, sealing
from worker_runtime.protocol.messages import OrderState
from worker_runtime.protocol.worker_reports import sign_event
from workflows.worker_pool.messages import CountPool


def pump_of(harness: ActivityHarness, users: WorkerUsers | None = None) -> EventPump:
    return EventPump(harness.client, harness.database, harness.cutting(users), harness.keys)


@asynccontextmanager
async def pumping_of(harness: ActivityHarness, *, count: int = 1) -> AsyncIterator[None]:
    pumps = [pump_of(harness) for _ in range(count)]
    loops = [asyncio.create_task(loop()) for pump in pumps for loop in (pump.run, pump.attend)]
    try:
        async with asyncio.timeout(20):
            yield
    finally:
        await tasks.cancel_tasks(*loops)


async def tell(client: Redis, worker_id: str, *told: str, ring: bool = True) -> None:
    """What a worker does."""
    await reply_of(client.rpush(keys.events_of(worker_id), *told))
    if ring:
        await reply_of(client.rpush(keys.EVENT_BELL, worker_id))


async def in_stream(harness: ActivityHarness) -> list[str]:
    entries_there: Any = await harness.client.xrange(keys.EVENTS)
    return [fields[b"e"].decode() for _, fields in entries_there]


async def state_of(harness: ActivityHarness, worker_id: str) -> bytes | None:
    state: bytes | None = await reply_of(
        harness.client.hget(keys.pool_worker(POOL, worker_id), "state")
    )
    return state


async def is_free(harness: ActivityHarness, worker_id: str) -> bool:
    return await reply_of(harness.client.zscore(keys.pool_ready(POOL), worker_id)) is not None


async def forgotten(harness: ActivityHarness, worker_id: str | None = None) -> ScriptedPoolWorker:
    """A launched worker that the pool does not have: Valkey was flushed."""
    worker = await harness.worker(worker_id)
    await entries.remove_entry(harness.client, POOL, worker.worker_id)
    return worker


async def test_events_of_each_worker_arrive_in_order_and_leave_nothing_behind(
    harness: ActivityHarness,
) -> None:
    for number in range(100):
        await tell(harness.client, f"w{number % 3}", f"{number}")
    async with pumping_of(harness):
        while await reply_of(harness.client.keys("{worker:events}*")):  # noqa: ASYNC110
            await asyncio.sleep(0.01)
    numbers = [int(entry) for entry in await in_stream(harness)]
    for worker in range(3):
        assert [number for number in numbers if number % 3 == worker] == list(range(worker, 100, 3))


async def test_several_pumps_and_killed_ones_lose_nothing_and_double_nothing(
    harness: ActivityHarness, valkey_server: ValkeyServer
) -> None:
    """Pumps are killed with SIGKILL while workers tell."""
    program = (
        "import asyncio, sys\n"
        "from activities.events.pump import EventPump\n"
        "from infra.valkey import client as valkey\n"
        "asyncio.run(EventPump(valkey.connect_valkey(sys.argv[1]), *[None] * 3).run())"
    )

    async def killed_again_and_again() -> None:
        while True:
            process = await asyncio.create_subprocess_exec(
                sys.executable, "-c", program, valkey_server.url
            )
            try:
                await asyncio.sleep(0.6)
            finally:
                os.kill(process.pid, signal.SIGKILL)
                await process.wait()

    told = 3000
    async with tasks.running(killed_again_and_again()), pumping_of(harness, count=2):
        for number in range(told):
            await tell(harness.client, f"w{number % 7}", f"{number}")
        while await reply_of(harness.client.keys("{worker:events}*")):  # noqa: ASYNC110
            await asyncio.sleep(0.01)
    assert sorted(map(int, await in_stream(harness))) == list(range(told))


async def test_a_flood_of_one_worker_delays_no_other(harness: ActivityHarness) -> None:
    await tell(harness.client, "flooder", *["x"] * FLOOD_LENGTH)
    await tell(harness.client, "honest", "mine")
    await pump_of(harness).step()
    told = await in_stream(harness)
    assert told.count("x") == MAX_EVENTS_PER_WORKER
    assert told.count("mine") == 1


async def test_a_round_that_is_full_gives_the_next_turn_to_those_that_waited(
    harness: ActivityHarness,
) -> None:
    flooders = [f"flooder{number}" for number in range(100)]
    for flooder in flooders:
        await tell(harness.client, flooder, *["x"] * 3 * MAX_EVENTS_PER_WORKER)
    await tell(harness.client, "honest", "mine")
    pump = pump_of(harness)
    for _ in range(2):
        await pump.step()
    assert "mine" in await in_stream(harness)


async def test_a_worker_that_floods_is_cut_off_and_ended(
    harness: ActivityHarness, valkey_server: ValkeyServer
) -> None:
    worker, users = (
        await harness.worker("p-flooder"),
        WorkerUsers(harness.client, harness.database, harness.keys),
    )
    await users.create(worker.worker_id, POOL)
    pump = pump_of(harness, users)
    async with valkey.connect_valkey(users.url(worker.worker_id, valkey_server.url)) as hostile:
        await tell(hostile, worker.worker_id, *["x"] * (FLOOD_LENGTH + 1))
        for _ in range(FLOOD_ROUNDS):
            await tell(hostile, worker.worker_id, *["x"] * MAX_EVENTS_PER_WORKER)
            await pump.step()
            assert not pump.cutting.count
        await tell(hostile, worker.worker_id, *["x"] * MAX_EVENTS_PER_WORKER)
        await pump.step()
        assert pump.cutting.count == 1
        await pump.cutting.wait()
        assert not await reply_of(harness.client.exists(keys.events_of(worker.worker_id)))
        with pytest.raises((AuthenticationError, ConnectionError)):
            await tell(hostile, worker.worker_id, "x")
    while not harness.launcher.stops:  # noqa: ASYNC110
        await asyncio.sleep(0.01)
    assert [task for task, _ in harness.launcher.stops] == [worker.task_id]


async def test_a_flood_among_many_busy_lists_is_cut_off(harness: ActivityHarness) -> None:
    """Not all of them have a turn in a round."""
    for number in range(100):
        await tell(harness.client, f"busy{number}", *["x"] * FLOOD_LENGTH)
    await tell(harness.client, "flooder", *["x"] * (2 * FLOOD_LENGTH))
    pump = pump_of(harness)
    for _ in range(3 * FLOOD_ROUNDS):
        await tell(harness.client, "flooder", *["x"] * MAX_EVENTS_PER_WORKER)
        await pump.step()
    assert pump.cutting.count == 1
    await pump.cutting.wait()
    assert not await harness.client.exists(keys.events_of("flooder"))


async def test_a_long_list_after_an_outage_of_ours_is_no_flood(harness: ActivityHarness) -> None:
    await tell(harness.client, "busy", *["x"] * (FLOOD_LENGTH + 60 * MAX_EVENTS_PER_WORKER))
    pump = pump_of(harness)
    for _ in range(3 * FLOOD_ROUNDS):
        await tell(harness.client, "busy", "x", "x")
        await pump.step()
    assert not pump.cutting.count
    assert len(await in_stream(harness)) == 3 * FLOOD_ROUNDS * MAX_EVENTS_PER_WORKER


async def test_the_relay_gets_what_tells_of_workers_and_nothing_of_orders(
    harness: ActivityHarness,
) -> None:
    made = sign_event(
        make_order_event(str(uuid4()), 1, OrderState.FILLED),
        harness.secrets.assignment_keys("u1", 1),
    )
    change = sign_event(make_worker_event(4), harness.secrets.assignment_keys("u1", 1))
    await tell(harness.client, "w1", made.decode(), change.decode(), "garbled")
    await pump_of(harness).step()
    assert await in_stream(harness) == [made.decode(), change.decode(), "garbled"]
    changes: Any = await harness.client.xrange(keys.CHANGES)
    assert [fields[b"e"] for _, fields in changes] == [change]


async def test_dropped_rings_lose_no_events(harness: ActivityHarness) -> None:
    await reply_of(
        harness.client.rpush(keys.EVENT_BELL, *(f"made-up-{number}" for number in range(1000)))
    )
    await tell(harness.client, "honest", "mine")
    pump = EventPump(
        harness.client, harness.database, harness.cutting(), harness.keys, most_rings=100
    )
    async with tasks.running(pump.run()), tasks.running(pump.attend()), asyncio.timeout(20):
        while not await in_stream(harness):  # noqa: ASYNC110
            await asyncio.sleep(0.01)
    assert await in_stream(harness) == ["mine"]


async def test_lists_without_a_ring_are_found(harness: ActivityHarness) -> None:
    await tell(harness.client, "w1", "mine", ring=False)
    pump = pump_of(harness)
    await pump.sweep()
    await pump.step()
    assert await in_stream(harness) == ["mine"]


async def test_absurd_rings_and_lists_stop_nothing(harness: ActivityHarness) -> None:
    await harness.client.set(keys.events_of("no-list"), "x")
    await reply_of(
        harness.client.rpush(keys.EVENT_BELL, "no-list", b"\xff", "", " ", "a b c", f"{POOL} \xff")
    )
    await tell(harness.client, "large", "x" * 300_000, "small")
    await tell(harness.client, "honest", "mine")
    pump = pump_of(harness)
    async with tasks.running(pump.run()), asyncio.timeout(10), tasks.running(pump.attend()):
        while await in_stream(harness) != ["small", "mine"]:  # noqa: ASYNC110
            await asyncio.sleep(0.01)
        worker = await forgotten(harness)
        await worker.renew_entry(harness.client, ring=True)
        while not await is_free(harness, worker.worker_id):  # noqa: ASYNC110
            await asyncio.sleep(0.01)


async def test_the_last_events_of_a_worker_come_before_its_end(harness: ActivityHarness) -> None:
    await tell(harness.client, "w1", *map(str, range(100)), ring=False)
    await entries.remove_entry(harness.client, POOL, "w1")
    assert await in_stream(harness) == list(map(str, range(100)))


async def test_an_announced_worker_is_free_and_comes_back_after_a_flush(
    harness: ActivityHarness,
) -> None:
    worker = await harness.worker()
    async with pumping_of(harness):
        for _ in range(2):
            await harness.client.flushall()
            await worker.renew_entry(harness.client, ring=True)
            while not await is_free(harness, worker.worker_id):  # noqa: ASYNC110
                await asyncio.sleep(0.01)
    assert await state_of(harness, worker.worker_id) == b"ready"


async def test_what_was_announced_while_no_orchestrator_ran_counts_later(
    harness: ActivityHarness,
) -> None:
    worker = await forgotten(harness)
    await worker.renew_entry(harness.client, ring=True)
    async with pumping_of(harness):
        while not await is_free(harness, worker.worker_id):  # noqa: ASYNC110
            await asyncio.sleep(0.01)


async def test_who_is_not_ours_or_had_a_user_is_not_admitted(harness: ActivityHarness) -> None:
    """A made-up worker; one with the key of another; one that has a user; one launched for nobody's
    claim."""
    pump = pump_of(harness)
    stranger = ScriptedPoolWorker(harness.client, harness.keys, "p-stranger")
    copied, used, cold = await forgotten(harness), await harness.worker(), await forgotten(harness)
    user = await harness.user()
    await asyncio.gather(
        harness.run(harness.claiming.claim_worker, harness.claim(user)), used.serve()
    )
    await entries.remove_entry(harness.client, POOL, used.worker_id)
    await stranger.renew_entry(harness.client, ring=True)
    copied.proof = stranger.proof
    await copied.renew_entry(harness.client, ring=True)
    await used.renew_entry(harness.client, ring=True)
    cold.reserved = "another's claim"
    await cold.renew_entry(harness.client, ring=True)
    all_four = [(POOL, worker.worker_id) for worker in (stranger, copied, used, cold)]
    await pump.admit(all_four)
    assert [await state_of(harness, worker_id) for _, worker_id in all_four] == [None] * 4
    assert await reply_of(harness.client.zcard(keys.pool_ready(POOL))) == 0
    assert not await harness.client.exists(keys.pool_claim(POOL, "another's claim"))


async def test_a_worker_launched_for_a_claim_is_admitted_for_it(harness: ActivityHarness) -> None:
    for worker_id in launched_for("c1"):
        worker = await forgotten(harness, worker_id)
        worker.reserved = "c1"
        await worker.renew_entry(harness.client, ring=True)
        await pump_of(harness).admit([(POOL, worker_id)])
        assert await reply_of(harness.client.get(keys.pool_claim(POOL, "c1"))) == worker_id.encode()
        assert await reply_of(harness.client.rpop(keys.pool_born(POOL, "c1"))) == worker_id.encode()
        assert not await is_free(harness, worker_id)


async def test_a_free_worker_that_fell_off_the_list_is_put_back(harness: ActivityHarness) -> None:
    worker = await harness.worker()
    await reply_of(harness.client.zrem(keys.pool_ready(POOL), worker.worker_id))
    counted = await harness.run(
        harness.pool.count_pool, CountPool(pool=POOL, launching=(), launch_timeout=30.0)
    )
    assert counted.ready == 1
    assert await is_free(harness, worker.worker_id)


async def test_nothing_can_be_sealed_to_a_key_of_small_order(harness: ActivityHarness) -> None:
    worker = await forgotten(harness)
    worker.public_key = bytes(32)
    token = harness.keys.launch_token(worker.worker_id)
    worker.proof = sealing.prove_key(token, worker.worker_id, bytes(32))
    await worker.renew_entry(harness.client, ring=True)
    await pump_of(harness).admit([(POOL, worker.worker_id)])
    assert await state_of(harness, worker.worker_id) is None
