"""`berth bench waits`: how long API and orchestrator
wait for a connection while many requests come at once.

Users trade as fast as they are answered, readers list orders in between, and further users get a
worker, all at once: many more requests than there are connections to PostgreSQL. The waits are the
histograms that Prometheus is told; next to them, what the callers saw.
"""

from __future__ import annotations

import threading
import time
from collections import defaultdict
from collections.abc import Callable, Mapping
from typing import Any
from urllib.request import ProxyHandler, Request, build_opener

from prometheus_client.parser import text_string_to_metric_families

from infra.lab import figures
from infra.lab.bench.order import ORDERS_PER_10S, send_order
from infra.lab.rest import RestConnection
from infra.lab.target import BenchUser, Target, running
from infra.local.process import free_ports

#: Metric → its name in the figures.
_WAITS = {
    "berth_database_pool_wait_seconds": "database",
    "berth_valkey_pool_wait_seconds": "valkey",
}
#: Upper bound of a bucket in seconds → waits up to it.
Buckets = Mapping[float, float]
_open = build_opener(ProxyHandler({})).open


def run(
    users: int = 8, readers: int = 32, starts: int = 8, seconds: float = 20.0
) -> dict[str, Any]:
    """Lets `users` trade and `readers` list orders for `seconds`, while `starts` others get a
    worker."""
    port, _ = free_ports(2)  # the second is for the metrics of Temporal's SDK
    with running(
        pool_target=users,
        metrics_address=f"127.0.0.1:{port}",
        exchange_orders_per_10s=ORDERS_PER_10S,
    ) as target:
        return measure(target, users, readers, starts, seconds)


def measure(
    target: Target, users: int, readers: int, starts: int, seconds: float
) -> dict[str, Any]:
    """Measures on a stack whose orchestrator shows its metrics."""
    traders, late = target.make_users("waits-", users), target.make_users("late-", starts)
    for user in traders:
        connection = RestConnection(target.api_url, user.api_key)
        send_order(connection, user)
        connection.close()
    places = {
        "api": Request(  # noqa: S310
            f"{target.api_url}/v1/metrics", headers={"X-API-Key": target.stack.admin_key}
        ),
        "orchestrator": Request(f"http://{target.settings.metrics_address}/metrics"),
    }
    before = {name: _scrape(place) for name, place in places.items()}
    orders, reads = _load(target, traders, readers, late, seconds)
    result: dict[str, Any] = {
        "users": users,
        "readers": readers,
        "starts": starts,
        "seconds": seconds,
        "database_pool": target.settings.database_pool,
        "api_processes": target.settings.api_processes,
        "orders_per_s": round(len(orders) / seconds, 1),
        "reads_per_s": round(len(reads) / seconds, 1),
        "orders": figures.milliseconds(orders, 50, 99),
        "reads": figures.milliseconds(reads, 50, 99),
    }
    for name, place in places.items():
        result[name] = {}
        for metric, buckets in _scrape(place).items():
            grown = {bound: count - before[name][metric][bound] for bound, count in buckets.items()}
            result[name][f"{_WAITS[metric]}_waits"] = round(max(grown.values()))
            for share in (50, 99):
                ms = quantile(grown, share / 100) * 1000
                result[name][f"{_WAITS[metric]}_p{share}_ms"] = round(ms, 2)
    return result


def _load(
    target: Target, traders: list[BenchUser], readers: int, late: list[BenchUser], seconds: float
) -> tuple[list[float], list[float]]:
    """Returns the seconds that each order and each list took."""
    orders: list[float] = []
    reads: list[float] = []
    failed: list[BaseException] = []
    until = time.monotonic() + seconds

    def repeat(
        user: BenchUser, work: Callable[[RestConnection, BenchUser], float], taken: list[float]
    ) -> None:
        connection = RestConnection(target.api_url, user.api_key)
        try:
            while time.monotonic() < until:
                taken.append(work(connection, user))
        except BaseException as error:
            failed.append(error)
        finally:
            connection.close()

    def list_orders(connection: RestConnection, user: BenchUser) -> float:
        began = time.perf_counter()
        connection.call("GET", f"/v1/users/{user.user_id}/orders")
        return time.perf_counter() - began

    work = [
        *((user, send_order, orders) for user in traders),
        *((traders[number % len(traders)], list_orders, reads) for number in range(readers)),
    ]
    threads = [threading.Thread(target=repeat, args=arguments) for arguments in work]
    for thread in threads:
        thread.start()
    for user in late:
        starter = RestConnection(target.api_url, user.api_key)
        starter.call("POST", f"/v1/users/{user.user_id}/worker/start")
        starter.close()
    for thread in threads:
        thread.join()
    if failed:
        raise failed[0]
    return orders, reads


def _scrape(place: Request) -> dict[str, Buckets]:
    with _open(place, timeout=30) as answer:
        text = answer.read().decode()
    buckets: dict[str, dict[float, float]] = {name: defaultdict(float) for name in _WAITS}
    for family in text_string_to_metric_families(text):
        for sample in family.samples:
            if family.name in buckets and sample.name.endswith("_bucket"):
                buckets[family.name][float(sample.labels["le"])] += sample.value
    return dict(buckets)


def quantile(buckets: Buckets, share: float) -> float:
    """Returns a quantile as Prometheus' `histogram_quantile` does: as if the waits of a bucket were
    spread evenly.

    The last finite bound for a wait beyond it; 0 without waits.
    """
    bounds = sorted(buckets)
    rank = share * max(buckets.values(), default=0.0)
    lower = below = 0.0
    for bound in bounds:
        if buckets[bound] >= rank and buckets[bound] > below:
            if bound == float("inf"):
                return lower
            return lower + (bound - lower) * (rank - below) / (buckets[bound] - below)
        lower, below = bound, buckets[bound]
    return 0.0


def table(result: dict[str, Any]) -> None:
    rows = [
        (
            f"{result[many]} {actors}",
            f"{result[f'{act}_per_s']}/s   p50 {result[act]['p50_ms']}   p99 "
            f"{result[act]['p99_ms']}",
        )
        for many, actors, act in (
            ("users", "users that trade", "orders"),
            ("readers", "connections that list orders", "reads"),
        )
    ]
    rows += [
        (
            f"{name}: waits for {server}, {result[name][f'{kind}_waits']} of them",
            f"p50 {result[name][f'{kind}_p50_ms']}   p99 {result[name][f'{kind}_p99_ms']}",
        )
        for name in ("api", "orchestrator")
        for kind, server in (("database", "PostgreSQL"), ("valkey", "Valkey"))
    ]
    figures.print_table(
        f"waits: for a connection (ms), {result['api_processes']} API processes with "
        f"{result['database_pool']} to PostgreSQL each",
        rows,
    )
