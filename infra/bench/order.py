"""`berth bench order`: an active worker, from the REST call to the answer with the fill.

Beside it in the same run the floor (`floor.py`): two bare Valkey hops between two processes.
"""

from __future__ import annotations

import threading
import time
from typing import Any
from uuid import uuid4

from infra.bench import figures, floor
from infra.bench.cpu import CpuMeter
from infra.bench.rest import RequestFailed, Rest
from infra.bench.target import BenchUser, Target, running

_WARM_UP = 100


def place(connection: Rest, user: BenchUser) -> float:
    """Seconds from the call to the answer; raises `RequestFailed` if it is not filled in the answer."""
    body = {
        "client_order_id": uuid4().hex,
        "account_id": user.account_id,
        "symbol": "2330",
        "side": "buy",
        "quantity": 1,
        "price_type": "MKT",
        "time_in_force": "IOC",
    }
    started = time.perf_counter()
    order = connection.call("POST", f"/v1/users/{user.user_id}/orders", body)
    taken = time.perf_counter() - started
    if order["state"] != "filled":
        raise RequestFailed(f"the order is {order['state']}: {order}")
    return taken


def _closed_loop(target: Target, users: list[BenchUser], seconds: float) -> float:
    """Orders a second when each user sends the next one as soon as the last is answered."""
    until = time.monotonic() + seconds
    counts = [0] * len(users)

    def trade(number: int, user: BenchUser) -> None:
        connection = Rest(target.api_url, user.api_key)
        while time.monotonic() < until:
            place(connection, user)
            counts[number] += 1
        connection.close()

    threads = [threading.Thread(target=trade, args=(number, user)) for number, user in enumerate(users)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    return sum(counts) / seconds


def run(n: int = 2000, users: int = 8, seconds: float = 10.0) -> dict[str, Any]:
    """`n` orders of one user, one after the other; then `users` users at once for `seconds`."""
    with running(pool_target=users) as target:
        traders = target.make_users("trader", users)
        target.wait_ready(users)
        target.pool_update("pause")  # launches of new workers would run into the measurement
        for user in traders:
            starter = Rest(target.api_url, user.api_key)
            starter.call("POST", f"/v1/users/{user.user_id}/worker/start")
            starter.close()
        connection = Rest(target.api_url, traders[0].api_key)
        for _ in range(_WARM_UP):
            place(connection, traders[0])
        meter = CpuMeter(target)
        taken = [place(connection, traders[0]) for _ in range(n)]
        cpu = meter.milliseconds(n)
        connection.close()
        bare = floor.measure(target.settings.valkey_url, n)
        together = _closed_loop(target, traders, seconds)
    return {
        "n": n,
        **figures.milliseconds(taken, 50, 99),
        "floor_p50_ms": figures.milliseconds(bare, 50)["p50_ms"],
        "floor_p99_ms": figures.milliseconds(bare, 99)["p99_ms"],
        "users": users,
        "orders_per_s": round(together, 1),
        "cpu_ms_per_order": cpu,
    }


def table(result: dict[str, Any]) -> None:
    figures.show(
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
            (f"{result['users']} users at once", f"{result['orders_per_s']} orders/s"),
            (
                "CPU of one order, ms",
                "   ".join(f"{name} {value}" for name, value in result["cpu_ms_per_order"].items()),
            ),
        ],
    )
