"""`berth bench claim`: from a REST call of a user without a worker to Active with credentials.

Open loop: requests start at their scheduled times whatever the earlier ones do, and each latency
counts from its scheduled time, so that a slow answer cannot hide the queue behind it.
"""

from __future__ import annotations

import asyncio
import time
from concurrent.futures import ThreadPoolExecutor
from typing import Any

from sqlalchemy import text

from infra.database.engine import Database
from infra.exchange.client import ExchangeAdmin
from infra.lab import figures
from infra.lab.rest import RestConnection
from infra.lab.target import BenchUser, Target, running

#: Seconds that the system rests after it was prepared, before the clock runs.
_SETTLE_TIME_S = 2.0
#: Warm workers kept while the refill is on.
_POOL_SIZE = 10


def open_loop(
    target: Target, users: list[BenchUser], rate: float
) -> tuple[list[float], list[bool]]:
    """Starts one user's worker every 1/`rate` seconds;
    returns latencies in seconds, and which were warm."""

    def one(user: BenchUser, connection: RestConnection, due: float) -> tuple[float, bool]:
        time.sleep(max(0.0, due - time.monotonic()))
        started = connection.call("POST", f"/v1/users/{user.user_id}/worker/start")
        return time.monotonic() - due, bool(started["warm"])

    connections = [RestConnection(target.api_url, user.api_key) for user in users]
    for user, connection in zip(users, connections, strict=True):
        # Connected, and the key is known.
        connection.call("GET", f"/v1/users/{user.user_id}/worker")
    begin = time.monotonic() + _SETTLE_TIME_S
    with ThreadPoolExecutor(max_workers=len(users)) as threads:
        waiting = [
            threads.submit(one, user, connection, begin + number / rate)
            for number, (user, connection) in enumerate(zip(users, connections, strict=True))
        ]
        results = [future.result() for future in waiting]
    for connection in connections:
        connection.close()
    return [latency for latency, _ in results], [warm for _, warm in results]


async def double_claims(target: Target) -> int:
    """Counts workers that two claims got, and accounts with two sessions at the exchange: must be
    0."""
    database = Database(target.settings.database_url, pool_size=1)
    try:
        async with database.session() as session:
            doubled = await session.scalar(
                text(
                    "select count(*) from (select worker_id from worker_sessions "
                    "where worker_id is not null group by worker_id having count(*) > 1) as twice"
                )
            )
    finally:
        await database.close()
    async with ExchangeAdmin(target.settings.exchange_admin_url) as exchange:
        accounts = [session.account for session in await exchange.sessions(open=True)]
    return int(doubled or 0) + len(accounts) - len(set(accounts))


def run(
    rate: float = 5.0, n: int = 30, refill_rate: float = 2.0, refill_n: int = 40
) -> dict[str, Any]:
    """Measures `n` claims at `rate` a second from a full pool,
    then `refill_n` while it is refilled."""
    with running(pool_target=n) as target:
        return measure(target, rate, n, refill_rate, refill_n)


def measure(
    target: Target, rate: float, n: int, refill_rate: float, refill_n: int, pool: int = _POOL_SIZE
) -> dict[str, Any]:
    """Measures on a stack that runs; `pool` workers are kept warm while the refill is on."""
    full = target.make_users("full", n)
    refilled = target.make_users("refill", refill_n)
    target.fill_pool(n)
    others = len(target.workers()) - n  # users' from a measurement before this one
    target.pool_update("pause")
    latencies, warm = open_loop(target, full, rate)
    for user in full:
        admin = target.admin()
        admin.call("POST", f"/v1/users/{user.user_id}/worker/stop", {})
        admin.close()
    target.fill_pool(pool)
    target.wait_workers(others + pool)  # those that were stopped have ended
    with_refill, warm_refill = open_loop(target, refilled, refill_rate)
    doubled = asyncio.run(double_claims(target))
    return {
        "rate": rate,
        "n": n,
        **figures.milliseconds(latencies, 50, 90, 99),
        "warm_share": round(sum(warm) / len(warm), 3),
        "double_claims": doubled,
        "refill": {
            "rate": refill_rate,
            "n": refill_n,
            "pool": pool,
            **figures.milliseconds(with_refill, 50, 90, 99),
            "warm_share": round(sum(warm_refill) / len(warm_refill), 3),
        },
    }


def table(result: dict[str, Any]) -> None:
    refill = result["refill"]
    figures.print_table(
        "claim: REST to Active with credentials (ms, from the scheduled time)",
        [
            (
                f"{result['rate']:g}/s, full pool, n={result['n']}",
                f"p50 {result['p50_ms']}   p90 {result['p90_ms']}   p99 {result['p99_ms']}   "
                f"warm {result['warm_share']:.0%}",
            ),
            (
                f"{refill['rate']:g}/s, refill on, n={refill['n']}",
                f"p50 {refill['p50_ms']}   p90 {refill['p90_ms']}   p99 {refill['p99_ms']}   "
                f"warm {refill['warm_share']:.0%}",
            ),
            ("double claims", str(result["double_claims"])),
        ],
    )
