"""Short forms of the benchmarks, judged by ratios: a change of complexity fails here on any
machine.

Aims in seconds need a quiet machine (`berth bench …`). Here the same work is done for n and for 4
n, and its cost is counted: calls, tasks, bytes, and CPU seconds, which a busy machine hardly
changes. What is linear grows by 4, what is quadratic by 16.
"""

from __future__ import annotations

import statistics
import tempfile
import time
from collections.abc import AsyncIterator, Iterator
from dataclasses import replace
from decimal import Decimal
from pathlib import Path

import pytest
from redis.asyncio import Redis
from sqlalchemy import text
from sqlalchemy.ext.asyncio import AsyncSession

from activities.pool import entries
from infra.database import users
from infra.database.engine import Database
from infra.database.orders import acceptance
from infra.lab.bench.fleet import maintenance
from infra.local.servers import ValkeyServer
from infra.valkey import client as valkey
from infra.valkey.request_queue import RequestQueue
from tests.support.jobs.queue import QueueHarness, claim, end
from tests.support.message_signing import SECRETS
from tests.support.orders.stored import make_new_order, put_account
from tests.support.systems.processes import wait_nothing_left
from worker_runtime.protocol import keys
from worker_runtime.protocol.messages import PlaceOrder, PriceType, Side, TimeInForce

pytestmark = pytest.mark.timeout(240)

#: How much more there is to do, and by how much its cost may grow.
TIMES, MOST_TIMES = 4, 6
#: Also of what others ask Valkey meanwhile, each by a clock of its own: the longer pass has more of
#: it.
MOST_TIMES_WITH_CLOCKS = 10
#: Workers, of which a tenth has an anomaly.
WORKERS = 400


@pytest.fixture
def bench_folder() -> Iterator[Path]:
    """The folder in which the benchmarks make theirs. They must remove them."""
    folder = Path(tempfile.mkdtemp(prefix="berth-"))
    folder.chmod(0o755)  # PostgreSQL may run as another user
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(tempfile, "tempdir", str(folder))
        patch.setenv("BERTH_API_PROCESSES", "1")
        yield folder
    wait_nothing_left(folder)
    folder.rmdir()  # fails if something is left


def test_a_pass_of_maintenance_grows_with_the_fleet_and_not_faster(bench_folder: Path) -> None:
    sizes = maintenance.run(workers=[WORKERS, TIMES * WORKERS])["sizes"]
    few, many = sizes[str(WORKERS)], sizes[str(TIMES * WORKERS)]
    assert few["left"] == many["left"] == 0
    for kind in ("launcher_requests", "launcher_tasks", "cpu_s"):
        ratio = many["work"][kind] / few["work"][kind]
        assert ratio <= MOST_TIMES, (kind, few["work"], many["work"])
    for kind in ("valkey_commands", "valkey_bytes"):
        ratio = many["work"][kind] / few["work"][kind]
        assert ratio <= MOST_TIMES_WITH_CLOCKS, (kind, few["work"], many["work"])
    # A scan and the guard list the fleet, whatever there is to clean up; each anomaly costs some
    # questions.
    assert many["work"]["launcher_listings"] <= 3
    assert many["work"]["launcher_requests"] <= 6 * many["anomalies"]
    assert many["work"]["launcher_tasks"] <= 3 * many["workers"]
    ratio = many["quiet_work"]["cpu_s"] / few["quiet_work"]["cpu_s"]
    assert ratio <= MOST_TIMES, (few["quiet_work"], many["quiet_work"])


#: Measurements of which the median counts: on a busy machine, the CPU times of two of them differ
#: threefold.
TRIES = 3
#: Claims from each pool, and how many times bare ZPOPMIN one may cost Valkey.
CLAIMS, MOST_TIMES_FLOOR = 300, 15


async def test_a_claim_costs_the_same_in_a_small_pool_and_in_a_large_one(
    valkey_client: Redis,
) -> None:
    """By Valkey's own CPU time, compared with bare ZPOPMIN from a pool of the same size."""
    few, many = [
        statistics.median([await _cost_of_claims(valkey_client, size) for _ in range(TRIES)])
        for size in (WORKERS, TIMES * WORKERS)
    ]
    assert many <= 2 * few, (few, many)
    assert many <= MOST_TIMES_FLOOR, (few, many)


async def _cost_of_claims(client: Redis, size: int) -> float:
    """Return what a claim costs, in units of a bare ZPOPMIN."""
    await client.flushall()
    pool = f"pool-{size}"
    workers = {f"p-{number}": number for number in range(size)}
    async with client.pipeline(transaction=False) as pipe:
        for worker in workers:
            pipe.hset(keys.pool_worker(pool, worker), mapping={"state": "ready", "public_key": "k"})
        pipe.zadd(keys.pool_ready(pool), workers)
        pipe.delete("floor")
        pipe.zadd("floor", workers)
        await pipe.execute()
    before = await _cpu_seconds(client)
    for number in range(CLAIMS):
        claimed = await entries.claim_entry(client, pool, f"claim-{number}")
        assert claimed.worker_id == f"p-{number}"
    between = await _cpu_seconds(client)
    for _ in range(CLAIMS):
        await client.zpopmin("floor")
    return (between - before) / (await _cpu_seconds(client) - between)


async def _cpu_seconds(client: Redis) -> float:
    used = await client.info("cpu")
    return float(used["used_cpu_user"] + used["used_cpu_sys"])


#: How many times bare RPUSH and LPOP a job may cost Valkey.
MOST_TIMES_FLOOR_OF_JOBS = 60
#: Jobs that wait in the short and in the long queue, and jobs that are then run from each.
FEW_JOBS, MANY_JOBS, RUN_JOBS = 400, 6400, 300


def test_a_job_costs_the_same_in_a_short_queue_and_in_a_long_one(
    valkey_server: ValkeyServer,
) -> None:
    """By Valkey's own CPU time, next to bare RPUSH and LPOP of one list."""
    harness = QueueHarness(valkey_server.url)
    try:
        few, many = [
            statistics.median([_cost_of_jobs(harness, waiting) for _ in range(TRIES)])
            for waiting in (FEW_JOBS, MANY_JOBS)
        ]
    finally:
        harness.client.execute("FLUSHALL")
        harness.close()
    assert many <= 2 * few, (few, many)
    assert many <= MOST_TIMES_FLOOR_OF_JOBS, (few, many)


def _cost_of_jobs(harness: QueueHarness, waiting: int) -> float:
    """Return what it costs to enqueue, claim and end a job, in units of a bare RPUSH and LPOP."""
    harness.client.execute("FLUSHALL")
    runner = harness.runner()
    for number in range(waiting):
        harness.enqueue(f"waits-{number}", priority=number % 10)
    before = _cpu_seconds_of(harness)
    for number in range(RUN_JOBS):
        harness.enqueue(f"runs-{number}", priority=number % 10)
        (job,) = claim(runner)
        end(runner, job)
    between = _cpu_seconds_of(harness)
    for _ in range(RUN_JOBS):
        harness.client.execute("RPUSH", "floor", "job")
        harness.client.execute("LPOP", "floor")
    return (between - before) / (_cpu_seconds_of(harness) - between)


def _cpu_seconds_of(harness: QueueHarness) -> float:
    lines = harness.client.execute("INFO", "cpu").decode().splitlines()
    used = dict(line.split(":") for line in lines if ":" in line)
    return float(used["used_cpu_user"]) + float(used["used_cpu_sys"])


#: Orders that wait in the queue of a user, and orders that the user has placed before.
FEW_ORDERS, MANY_ORDERS = 100, 1600
#: Orders that are then queued: enough for the server's clock of CPU time. And orders that are then
#: accepted.
QUEUED_ORDERS, NEXT_ORDERS = 1000, 200


async def test_an_order_is_queued_for_the_same_behind_few_and_behind_many_orders(
    valkey_client: Redis,
) -> None:
    """By Valkey's own CPU time, next to a bare RPUSH."""
    few, many = [
        statistics.median([await _cost_of_queueing(valkey_client, waiting) for _ in range(TRIES)])
        for waiting in (FEW_ORDERS, MANY_ORDERS)
    ]
    assert many <= 2 * few, (few, many)
    assert many <= MOST_TIMES_FLOOR, (few, many)


async def _cost_of_queueing(client: Redis, waiting: int) -> float:
    """Return what it costs to queue an order, in units of a bare RPUSH."""
    await client.flushall()
    queue = RequestQueue(client, SECRETS)
    for number in range(waiting):
        await queue.enqueue(_place("user", f"waits-{number}"), time.monotonic() + 60.0)
    before = await _cpu_seconds(client)
    for number in range(QUEUED_ORDERS):
        await queue.enqueue(_place("user", f"next-{number}"), time.monotonic() + 60.0)
    between = await _cpu_seconds(client)
    for _ in range(QUEUED_ORDERS):
        await valkey.reply_of(client.rpush("floor", "order"))
    return (between - before) / (await _cpu_seconds(client) - between)


async def test_an_order_is_accepted_for_the_same_after_few_and_after_many_orders(
    database: Database,
) -> None:
    """By the pages that PostgreSQL reads for it, which no busy machine changes."""
    reads = []
    for placed in (FEW_ORDERS, MANY_ORDERS):
        user = f"user-{placed}"
        async with database.session() as session:
            await users.create_user(session, user)
            await put_account(database, session_user=user, session=session)
            await _accept(session, user, "before", placed)
            await session.execute(text("analyze orders"))
        # One connection: each counts for itself.
        async with database.engine.connect() as connection, AsyncSession(connection) as session:
            before = await _pages_read(session)
            await _accept(session, user, "next", NEXT_ORDERS)
            reads.append((await _pages_read(session) - before) / NEXT_ORDERS)
    few, many = reads
    assert many <= 1.5 * few, (few, many)


@pytest.fixture
async def database(migrated_database: str) -> AsyncIterator[Database]:
    database = Database(migrated_database)
    yield database
    await database.close()


async def _accept(session: AsyncSession, user: str, name: str, count: int) -> None:
    for number in range(count):
        await acceptance.accept_order(
            session, replace(make_new_order(f"{name}-{number}"), user_id=user)
        )


async def _pages_read(session: AsyncSession) -> int:
    """Return the pages of tables and indexes that this connection has read, from memory or not."""
    await session.commit()
    await session.execute(text("select pg_stat_force_next_flush()"))
    await session.commit()
    read = await session.scalar(
        text(
            "select sum(heap_blks_read + heap_blks_hit + coalesce(idx_blks_read + idx_blks_hit, 0))"
            " from pg_statio_user_tables"
        )
    )
    return int(read)


def _place(user: str, name: str) -> PlaceOrder:
    return PlaceOrder(
        request_id=name,
        order_id=name,
        user_id=user,
        account_id="main",
        symbol="2330",
        side=Side.BUY,
        quantity=1,
        price_type=PriceType.LIMIT,
        price=Decimal("612.5"),
        time_in_force=TimeInForce.ROD,
        tag="00000A",
        reply_to="",
        generation="g",
    )
