"""The pump: what workers tell reaches the stream and the pools, and none of them delays another."""

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

from activities.events.pump import EACH, LONG, ROUNDS, EventPump
from activities.pool import entries
from activities.pool.launch import launched_for
from infra import tasks
from infra.local.servers import ValkeyServer
from infra.valkey import client as valkey
from infra.valkey.client import reply_of
from infra.valkey.worker_users import WorkerUsers
from tests.integration.activities.events.test_events import moved, worker_event
from tests.support.activities.harness import Yard
from tests.support.workers.pool_worker import POOL, ScriptedPoolWorker
from worker_runtime.protocol import keys, sealing
from worker_runtime.protocol.messages import OrderState
from worker_runtime.protocol.worker_reports import sign_event
from workflows.worker_pool.messages import CountPool


def pump_of(yard: Yard, users: WorkerUsers | None = None) -> EventPump:
    return EventPump(yard.client, yard.database, yard.cutting(users), yard.keys)


@asynccontextmanager
async def pumping_of(yard: Yard, *, count: int = 1) -> AsyncIterator[None]:
    pumps = [pump_of(yard) for _ in range(count)]
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


async def in_stream(yard: Yard) -> list[str]:
    entries_there: Any = await yard.client.xrange(keys.EVENTS)
    return [fields[b"e"].decode() for _, fields in entries_there]


async def state_of(yard: Yard, worker_id: str) -> bytes | None:
    state: bytes | None = await reply_of(
        yard.client.hget(keys.pool_worker(POOL, worker_id), "state")
    )
    return state


async def is_free(yard: Yard, worker_id: str) -> bool:
    return await reply_of(yard.client.zscore(keys.pool_ready(POOL), worker_id)) is not None


async def forgotten(yard: Yard, worker_id: str | None = None) -> ScriptedPoolWorker:
    """A launched worker that the pool does not have: Valkey was flushed."""
    worker = await yard.worker(worker_id)
    await entries.remove_entry(yard.client, POOL, worker.worker_id)
    return worker


async def test_events_of_each_worker_arrive_in_order_and_leave_nothing_behind(yard: Yard) -> None:
    for number in range(100):
        await tell(yard.client, f"w{number % 3}", f"{number}")
    async with pumping_of(yard):
        while await reply_of(yard.client.keys("{worker:events}*")):  # noqa: ASYNC110
            await asyncio.sleep(0.01)
    numbers = [int(one) for one in await in_stream(yard)]
    for worker in range(3):
        assert [one for one in numbers if one % 3 == worker] == list(range(worker, 100, 3))


async def test_several_pumps_and_killed_ones_lose_nothing_and_double_nothing(
    yard: Yard, valkey_server: ValkeyServer
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
    async with tasks.running(killed_again_and_again()), pumping_of(yard, count=2):
        for number in range(told):
            await tell(yard.client, f"w{number % 7}", f"{number}")
        while await reply_of(yard.client.keys("{worker:events}*")):  # noqa: ASYNC110
            await asyncio.sleep(0.01)
    assert sorted(map(int, await in_stream(yard))) == list(range(told))


async def test_a_flood_of_one_worker_delays_no_other(yard: Yard) -> None:
    await tell(yard.client, "flooder", *["x"] * LONG)
    await tell(yard.client, "honest", "mine")
    await pump_of(yard).step()
    told = await in_stream(yard)
    assert told.count("x") == EACH
    assert told.count("mine") == 1


async def test_a_round_that_is_full_gives_the_next_turn_to_those_that_waited(yard: Yard) -> None:
    flooders = [f"flooder{number}" for number in range(100)]
    for flooder in flooders:
        await tell(yard.client, flooder, *["x"] * 3 * EACH)
    await tell(yard.client, "honest", "mine")
    pump = pump_of(yard)
    for _ in range(2):
        await pump.step()
    assert "mine" in await in_stream(yard)


async def test_a_worker_that_floods_is_cut_off_and_ended(
    yard: Yard, valkey_server: ValkeyServer
) -> None:
    worker, users = (
        await yard.worker("p-flooder"),
        WorkerUsers(yard.client, yard.database, yard.keys),
    )
    await users.create(worker.worker_id, POOL)
    pump = pump_of(yard, users)
    async with valkey.connect_valkey(users.url(worker.worker_id, valkey_server.url)) as hostile:
        await tell(hostile, worker.worker_id, *["x"] * (LONG + 1))
        for _ in range(ROUNDS):
            await tell(hostile, worker.worker_id, *["x"] * EACH)
            await pump.step()
            assert not pump.cutting.count
        await tell(hostile, worker.worker_id, *["x"] * EACH)
        await pump.step()
        assert pump.cutting.count == 1
        await pump.cutting.wait()
        assert not await reply_of(yard.client.exists(keys.events_of(worker.worker_id)))
        with pytest.raises((AuthenticationError, ConnectionError)):
            await tell(hostile, worker.worker_id, "x")
    while not yard.launcher.stops:  # noqa: ASYNC110
        await asyncio.sleep(0.01)
    assert [task for task, _ in yard.launcher.stops] == [worker.task_id]


async def test_a_flood_among_many_busy_lists_is_cut_off(yard: Yard) -> None:
    """Not all of them have a turn in a round."""
    for number in range(100):
        await tell(yard.client, f"busy{number}", *["x"] * LONG)
    await tell(yard.client, "flooder", *["x"] * (2 * LONG))
    pump = pump_of(yard)
    for _ in range(3 * ROUNDS):
        await tell(yard.client, "flooder", *["x"] * EACH)
        await pump.step()
    assert pump.cutting.count == 1
    await pump.cutting.wait()
    assert not await yard.client.exists(keys.events_of("flooder"))


async def test_a_long_list_after_an_outage_of_ours_is_no_flood(yard: Yard) -> None:
    await tell(yard.client, "busy", *["x"] * (LONG + 60 * EACH))
    pump = pump_of(yard)
    for _ in range(3 * ROUNDS):
        await tell(yard.client, "busy", "x", "x")
        await pump.step()
    assert not pump.cutting.count
    assert len(await in_stream(yard)) == 3 * ROUNDS * EACH


async def test_the_relay_gets_what_tells_of_workers_and_nothing_of_orders(yard: Yard) -> None:
    made = sign_event(
        moved(str(uuid4()), 1, OrderState.FILLED), yard.secrets.assignment_keys("u1", 1)
    )
    change = sign_event(worker_event(4), yard.secrets.assignment_keys("u1", 1))
    await tell(yard.client, "w1", made.decode(), change.decode(), "garbled")
    await pump_of(yard).step()
    assert await in_stream(yard) == [made.decode(), change.decode(), "garbled"]
    changes: Any = await yard.client.xrange(keys.CHANGES)
    assert [fields[b"e"] for _, fields in changes] == [change]


async def test_dropped_rings_lose_no_events(yard: Yard) -> None:
    await reply_of(
        yard.client.rpush(keys.EVENT_BELL, *(f"made-up-{number}" for number in range(1000)))
    )
    await tell(yard.client, "honest", "mine")
    pump = EventPump(yard.client, yard.database, yard.cutting(), yard.keys, most_rings=100)
    async with tasks.running(pump.run()), tasks.running(pump.attend()), asyncio.timeout(20):
        while not await in_stream(yard):  # noqa: ASYNC110
            await asyncio.sleep(0.01)
    assert await in_stream(yard) == ["mine"]


async def test_lists_without_a_ring_are_found(yard: Yard) -> None:
    await tell(yard.client, "w1", "mine", ring=False)
    pump = pump_of(yard)
    await pump.sweep()
    await pump.step()
    assert await in_stream(yard) == ["mine"]


async def test_absurd_rings_and_lists_stop_nothing(yard: Yard) -> None:
    await yard.client.set(keys.events_of("no-list"), "x")
    await reply_of(
        yard.client.rpush(keys.EVENT_BELL, "no-list", b"\xff", "", " ", "a b c", f"{POOL} \xff")
    )
    await tell(yard.client, "large", "x" * 300_000, "small")
    await tell(yard.client, "honest", "mine")
    pump = pump_of(yard)
    async with tasks.running(pump.run()), asyncio.timeout(10), tasks.running(pump.attend()):
        while await in_stream(yard) != ["small", "mine"]:  # noqa: ASYNC110
            await asyncio.sleep(0.01)
        worker = await forgotten(yard)
        await worker.renew_entry(yard.client, ring=True)
        while not await is_free(yard, worker.worker_id):  # noqa: ASYNC110
            await asyncio.sleep(0.01)


async def test_the_last_events_of_a_worker_come_before_its_end(yard: Yard) -> None:
    await tell(yard.client, "w1", *map(str, range(100)), ring=False)
    await entries.remove_entry(yard.client, POOL, "w1")
    assert await in_stream(yard) == list(map(str, range(100)))


async def test_an_announced_worker_is_free_and_comes_back_after_a_flush(yard: Yard) -> None:
    worker = await yard.worker()
    async with pumping_of(yard):
        for _ in range(2):
            await yard.client.flushall()
            await worker.renew_entry(yard.client, ring=True)
            while not await is_free(yard, worker.worker_id):  # noqa: ASYNC110
                await asyncio.sleep(0.01)
    assert await state_of(yard, worker.worker_id) == b"ready"


async def test_what_was_announced_while_no_orchestrator_ran_counts_later(yard: Yard) -> None:
    worker = await forgotten(yard)
    await worker.renew_entry(yard.client, ring=True)
    async with pumping_of(yard):
        while not await is_free(yard, worker.worker_id):  # noqa: ASYNC110
            await asyncio.sleep(0.01)


async def test_who_is_not_ours_or_had_a_user_is_not_admitted(yard: Yard) -> None:
    """A made-up worker; one with the key of another; one that has a user; one launched for nobody's
    claim."""
    pump = pump_of(yard)
    stranger = ScriptedPoolWorker(yard.client, yard.keys, "p-stranger")
    copied, used, cold = await forgotten(yard), await yard.worker(), await forgotten(yard)
    user = await yard.user()
    await asyncio.gather(yard.run(yard.claiming.claim_worker, yard.claim(user)), used.serve())
    await entries.remove_entry(yard.client, POOL, used.worker_id)
    await stranger.renew_entry(yard.client, ring=True)
    copied.proof = stranger.proof
    await copied.renew_entry(yard.client, ring=True)
    await used.renew_entry(yard.client, ring=True)
    cold.reserved = "another's claim"
    await cold.renew_entry(yard.client, ring=True)
    all_four = [(POOL, worker.worker_id) for worker in (stranger, copied, used, cold)]
    await pump.admit(all_four)
    assert [await state_of(yard, worker_id) for _, worker_id in all_four] == [None] * 4
    assert await reply_of(yard.client.zcard(keys.pool_ready(POOL))) == 0
    assert not await yard.client.exists(keys.pool_claim(POOL, "another's claim"))


async def test_a_worker_launched_for_a_claim_is_admitted_for_it(yard: Yard) -> None:
    for worker_id in launched_for("c1"):
        worker = await forgotten(yard, worker_id)
        worker.reserved = "c1"
        await worker.renew_entry(yard.client, ring=True)
        await pump_of(yard).admit([(POOL, worker_id)])
        assert await reply_of(yard.client.get(keys.pool_claim(POOL, "c1"))) == worker_id.encode()
        assert await reply_of(yard.client.rpop(keys.pool_born(POOL, "c1"))) == worker_id.encode()
        assert not await is_free(yard, worker_id)


async def test_a_free_worker_that_fell_off_the_list_is_put_back(yard: Yard) -> None:
    worker = await yard.worker()
    await reply_of(yard.client.zrem(keys.pool_ready(POOL), worker.worker_id))
    counted = await yard.run(
        yard.pool.count_pool, CountPool(pool=POOL, launching=(), launch_timeout=30.0)
    )
    assert counted.ready == 1
    assert await is_free(yard, worker.worker_id)


async def test_nothing_can_be_sealed_to_a_key_of_small_order(yard: Yard) -> None:
    worker = await forgotten(yard)
    worker.public_key = bytes(32)
    token = yard.keys.launch_token(worker.worker_id)
    worker.proof = sealing.prove_key(token, worker.worker_id, bytes(32))
    await worker.renew_entry(yard.client, ring=True)
    await pump_of(yard).admit([(POOL, worker.worker_id)])
    assert await state_of(yard, worker.worker_id) is None
