"""Short forms of the benchmarks, judged by ratios: a change of complexity fails here on any machine.

Aims in seconds need a quiet machine (`berth bench …`). Here the same work is done for n and for 4 n, and its
cost is counted: calls, tasks, bytes, and CPU seconds, which a busy machine hardly changes. What is linear grows
by 4, what is quadratic by 16.
"""

from __future__ import annotations

import tempfile
from collections.abc import Iterator
from pathlib import Path

import pytest
from redis.asyncio import Redis

from activities.pool import entries
from infra.lab.bench.fleet import maintenance
from tests.integration.local.conftest import wait_nothing_left
from worker_runtime.protocol import keys

pytestmark = pytest.mark.timeout(240)

#: How much more there is to do, and by how much its cost may grow.
TIMES, MOST_TIMES = 4, 6
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
    for kind in ("launcher_requests", "launcher_tasks", "valkey_commands", "valkey_bytes", "cpu_s"):
        ratio = many["work"][kind] / few["work"][kind]
        assert ratio <= MOST_TIMES, (kind, few["work"], many["work"])
    # A scan and the guard list the fleet, whatever there is to clean up; each anomaly costs some questions.
    assert many["work"]["launcher_listings"] <= 3
    assert many["work"]["launcher_requests"] <= 6 * many["anomalies"]
    assert many["work"]["launcher_tasks"] <= 3 * many["workers"]
    ratio = many["quiet_work"]["cpu_s"] / few["quiet_work"]["cpu_s"]
    assert ratio <= MOST_TIMES, (few["quiet_work"], many["quiet_work"])


#: Claims from each pool, and how many times bare ZPOPMIN one may cost Valkey.
CLAIMS, MOST_TIMES_FLOOR = 300, 15


async def test_a_claim_costs_the_same_in_a_small_pool_and_in_a_large_one(valkey_client: Redis) -> None:
    """By Valkey's own CPU time, beside bare ZPOPMIN from a pool of the same size."""
    few, many = [await _cost_of_claims(valkey_client, size) for size in (WORKERS, TIMES * WORKERS)]
    assert many <= 2 * few, (few, many)
    assert many <= MOST_TIMES_FLOOR, (few, many)


async def _cost_of_claims(client: Redis, size: int) -> float:
    """Return what a claim costs, in units of a bare ZPOPMIN."""
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
