"""`berth bench order`: an active worker, from the REST call to the answer with the fill.

The same run measures the floor (`floor.py`): two bare Valkey hops between two processes.
"""

from __future__ import annotations

import threading
import time
from typing import Any
from uuid import uuid4

from infra.lab import figures
from infra.lab.bench import floor, knee
from infra.lab.cpu import CpuMeter, StolenTime
from infra.lab.rest import RequestFailed, RestConnection
from infra.lab.target import BenchUser, Target, running
from worker_runtime.protocol.errors import LoginRejected

_WARM_UP_ORDERS = 100
_REFUSED_ORDERS = 200
#: The real broker bans a person beyond 250; this measures our path, not that limit.
ORDERS_PER_10S = 1_000_000


def order_body(user: BenchUser) -> dict[str, object]:
    """Returns a new market order for one lot."""
    return {
        "client_order_id": uuid4().hex,
        "account_id": user.account_id,
        "symbol": "2330",
        "side": "buy",
        "quantity": 1,
        "price_type": "MKT",
        "time_in_force": "IOC",
        "allow_duplicate": True,
    }


def send_order(connection: RestConnection, user: BenchUser) -> float:
    """Sends an order; returns the seconds until it is filled.
    Raises `RequestFailed` if it is not."""
    body = order_body(user)
    started = time.perf_counter()
    order = connection.call("POST", f"/v1/users/{user.user_id}/orders", body)
    taken = time.perf_counter() - started
    if order["state"] != "filled":
        raise RequestFailed(f"the order is {order['state']}: {order}")
    return taken


def _closed_loop(target: Target, users: list[BenchUser], seconds: float) -> float:
    """Returns orders a second when each user sends the next as soon as the last is answered."""
    until = time.monotonic() + seconds
    counts = [0] * len(users)

    def trade(number: int, user: BenchUser) -> None:
        connection = RestConnection(target.api_url, user.api_key)
        while time.monotonic() < until:
            send_order(connection, user)
            counts[number] += 1
        connection.close()

    threads = [
        threading.Thread(target=trade, args=(number, user)) for number, user in enumerate(users)
    ]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    return sum(counts) / seconds


def _active(target: Target, prefix: str, count: int) -> list[BenchUser]:
    """Makes users with an active worker each."""
    traders = target.make_users(prefix, count)
    for user in traders:
        starter = RestConnection(target.api_url, user.api_key)
        starter.call("POST", f"/v1/users/{user.user_id}/worker/start")
        starter.close()
    return traders


def _refused(target: Target) -> list[float]:
    """Measures the seconds until an order is refused whose login the broker has rejected before."""
    [user] = target.make_users("refused", 1, at_exchange=False)
    connection = RestConnection(target.api_url, user.api_key)
    taken = []
    for _ in range(1 + _REFUSED_ORDERS):
        started = time.perf_counter()
        try:
            send_order(connection, user)
        except RequestFailed as error:
            if LoginRejected.code not in str(error):
                raise
        taken.append(time.perf_counter() - started)
    connection.close()
    return taken[1:]  # without the one that was tried


def run(
    n: int = 2000,
    users: int = 8,
    seconds: float = 10.0,
    knee_users: int = 50,
    knee_first: float = knee.FIRST_ORDERS_PER_S,
) -> dict[str, Any]:
    """Measures `n` orders of one user, one after the other; then `users` users at
    once for `seconds`; then `knee_users` at growing rates from `knee_first` orders
    a second, `seconds` each."""
    with running(pool_target=users, exchange_orders_per_10s=ORDERS_PER_10S) as target:
        return measure(target, n, users, seconds, knee_users, knee_first)


def measure(
    target: Target, n: int, users: int, seconds: float, knee_users: int, knee_first: float
) -> dict[str, Any]:
    """Measures on a stack that runs, with at least `ORDERS_PER_10S` at its exchange."""
    refused = _refused(target)
    target.fill_pool(users)
    target.pool_update("pause")  # launches of new workers would run into the measurement
    traders = _active(target, "trader", users)
    connection = RestConnection(target.api_url, traders[0].api_key)
    for _ in range(_WARM_UP_ORDERS):
        send_order(connection, traders[0])
    meter, stolen = CpuMeter(target), StolenTime()
    taken = [send_order(connection, traders[0]) for _ in range(n)]
    cpu, stolen_percent = meter.milliseconds(n), stolen.percent()
    connection.close()
    bare = floor.measure(target.settings.valkey_url, n)
    together = _closed_loop(target, traders, seconds)
    bend = _knee(target, traders, knee_users, knee_first, seconds)
    return {
        "n": n,
        **figures.milliseconds(taken, 50, 99),
        "floor_p50_ms": figures.milliseconds(bare, 50)["p50_ms"],
        "floor_p99_ms": figures.milliseconds(bare, 99)["p99_ms"],
        "login_rejected": figures.milliseconds(refused, 50, 99),
        "exchange_orders_per_10s": ORDERS_PER_10S,
        "users": users,
        "orders_per_s": round(together, 1),
        "cpu_ms_per_order": cpu,
        "stolen_percent": stolen_percent,
        **bend,
    }


def _knee(
    target: Target, traders: list[BenchUser], users: int, first: float, seconds: float
) -> dict[str, Any]:
    target.pool_update("resume")
    others = _active(target, "more", users - len(traders)) if users > len(traders) else []
    target.wait_ready(len(traders))  # nothing is launched any more
    target.pool_update("pause")
    chosen = [*traders, *others][:users]
    for user in chosen:  # connections are made, and code is loaded
        connection = RestConnection(target.api_url, user.api_key)
        send_order(connection, user)
        connection.close()
    return knee.run(target, chosen, send_order, seconds=seconds, first=first)


def table(result: dict[str, Any]) -> None:
    figures.print_table(
        "order: REST to the answer with the fill (ms)",
        [
            (
                f"one user, one after the other, n={result['n']}",
                f"p50 {result['p50_ms']}   p99 {result['p99_ms']}",
            ),
            (
                "floor: two bare Valkey hops",
                f"p50 {result['floor_p50_ms']}   p99 {result['floor_p99_ms']}",
            ),
            (
                "refused, as the login was rejected before",
                f"p50 {result['login_rejected']['p50_ms']}   p99 "
                f"{result['login_rejected']['p99_ms']}",
            ),
            (f"{result['users']} users at once", f"{result['orders_per_s']} orders/s"),
            (
                "limit of the exchange for this run",
                f"{result['exchange_orders_per_10s']} orders in 10 s",
            ),
            (
                "CPU of one order, ms",
                "   ".join(f"{name} {value}" for name, value in result["cpu_ms_per_order"].items()),
            ),
            ("CPU time that the host gave to others meanwhile", f"{result['stolen_percent']} %"),
            *knee.rows(result),
        ],
    )
