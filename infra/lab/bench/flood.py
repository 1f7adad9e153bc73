"""`berth bench flood`: orders during a flood of bad keys;
their p99 is to stay within twice its quiet value.

One user places orders at a steady rate, each timed from when it was due. Meanwhile another
process sends requests over kept-alive connections: keys of no shape, made-up keys of the right
shape, and such that name a version of the API secret that is yet to come, for which an API process
looks into the file again. Quiet times are measured before and after.
"""

from __future__ import annotations

import json
import secrets
import subprocess
import sys
import threading
import time
from collections import Counter
from typing import Any

from infra.lab import figures
from infra.lab.bench import order
from infra.lab.figures import Say, silent
from infra.lab.rest import RequestFailed, RestConnection
from infra.lab.target import BenchUser, Target, running
from infra.vault.api_tokens import ApiTokens

FLOODS = ("malformed", "made up", "of a later version")
_WARM_UP_ORDERS = 200
#: Seconds until the flood is at its rate.
_RAMP_TIME_S = 1.0


def run(
    seconds: float = 20.0,
    orders: float = 40.0,
    requests: float = 1000.0,
    connections: int = 16,
    say: Say = silent,
) -> dict[str, Any]:
    """Sends `orders` and `requests` a second, for `seconds` of each kind of flood."""
    with running(pool_target=1, exchange_orders_per_10s=order.ORDERS_PER_10S) as target:
        return measure(target, seconds, orders, requests, connections, say=say)


def measure(
    target: Target,
    seconds: float,
    orders: float,
    requests: float,
    connections: int,
    *,
    say: Say = silent,
) -> dict[str, Any]:
    """Measures on a stack that runs, with at least `order.ORDERS_PER_10S` at its exchange."""
    [user] = target.make_users("flooded", 1)
    connection = RestConnection(target.api_url, user.api_key)
    connection.call("POST", f"/v1/users/{user.user_id}/worker/start")
    for _ in range(_WARM_UP_ORDERS):
        order.send_order(connection, user)
    quiet = _paced(connection, user, orders, seconds)
    floods: dict[str, Any] = {}
    for kind in FLOODS:
        say(f"orders during requests with keys that are {kind}")
        numbers = (str(requests), str(connections), str(seconds + _RAMP_TIME_S))
        words = [sys.executable, "-m", __name__, target.api_url, _bad_key(kind, target), *numbers]
        flood = subprocess.Popen(words, stdout=subprocess.PIPE)
        time.sleep(_RAMP_TIME_S)
        taken = _paced(connection, user, orders, seconds)
        answers, _ = flood.communicate(timeout=seconds + 60)
        floods[kind] = {**figures.milliseconds(taken, 50, 99), **json.loads(answers)}
    quiet += _paced(connection, user, orders, seconds)
    connection.close()
    shown = figures.milliseconds(quiet, 50, 99)
    ratio = max(flood["p99_ms"] for flood in floods.values()) / shown["p99_ms"]
    return {
        "orders_per_s": orders,
        **{f"quiet_{name}": value for name, value in shown.items()},
        "floods": floods,
        "worst_ratio": round(ratio, 2),
    }


def _bad_key(kind: str, target: Target) -> str:
    if kind == "malformed":
        return "x" * 85
    signed, version, mac = ApiTokens(target.settings.api_secret_file).make().rsplit(".", 2)
    if kind == "made up":
        return f"{signed}.{version}.{secrets.token_hex(16)}"
    return f"{signed}.{int(version) + 1000}.{mac}"


def _paced(connection: RestConnection, user: BenchUser, rate: float, seconds: float) -> list[float]:
    """Returns the seconds of each order, from when it was due; one that waited for the one before
    counts from there."""
    taken: list[float] = []
    began = time.perf_counter()
    for number in range(round(rate * seconds)):
        due = began + number / rate
        time.sleep(max(0.0, due - time.perf_counter()))
        order.send_order(connection, user)
        taken.append(time.perf_counter() - due)
    return taken


def table(result: dict[str, Any]) -> None:
    quiet = f"p50 {result['quiet_p50_ms']}   p99 {result['quiet_p99_ms']}"
    rows = [(f"{result['orders_per_s']:g} orders/s, quiet", quiet)]
    for kind, flood in result["floods"].items():
        beside = f"{flood['per_s']:g}/s {kind}, {flood['statuses']}"
        rows.append((f"during {beside}", f"p50 {flood['p50_ms']}   p99 {flood['p99_ms']}"))
    rows.append(("worst p99 by the quiet one", f"{result['worst_ratio']}"))
    figures.print_table("flood: orders during requests with bad keys (ms)", rows)


def send_flood(url: str, key: str, rate: float, connections: int, seconds: float) -> dict[str, Any]:
    """Sends `rate` requests a second, or what the API
    answers in that time; counts the answers by status."""
    counts: list[Counter[str]] = [Counter() for _ in range(connections)]
    began = time.perf_counter()

    def send(number: int) -> None:
        connection = RestConnection(url, key)
        step, sent = connections / rate, 0
        while (now := time.perf_counter()) < began + seconds:
            due = began + sent * step + number / rate
            if due > now:
                time.sleep(due - now)
            try:
                connection.call("GET", "/v1/switches")
                counts[number]["let in"] += 1
            except RequestFailed as error:
                counts[number][str(error).partition(": ")[2][:3]] += 1
            sent += 1
        connection.close()

    threads = [threading.Thread(target=send, args=(number,)) for number in range(connections)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    total = sum(counts, Counter[str]())
    return {"per_s": round(total.total() / seconds, 1), "statuses": dict(total)}


if __name__ == "__main__":
    api_url, bad_key, *numbers = sys.argv[1:]
    print(
        json.dumps(
            send_flood(api_url, bad_key, float(numbers[0]), int(numbers[1]), float(numbers[2]))
        )
    )
