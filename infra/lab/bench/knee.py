"""The knee of the order path: the rate at which the 99th
percentile passes its limit, with many users active.

Open loop: every order has its time, and its latency counts from then, so an order that had to wait
behind another is not left out. The rate grows in steps until two in a row are beyond the limit.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Sequence
from typing import Any

from infra.lab import figures
from infra.lab.cpu import CpuMeter
from infra.lab.rest import RestConnection
from infra.lab.target import BenchUser, Target

#: Milliseconds that the 99th percentile may take.
MAX_P99_MS = 50.0
#: Orders per second of the first step.
FIRST_ORDERS_PER_S = 20.0
#: Factor by which each step is faster than the last.
RATE_GROWTH = 1.2
#: Share of a step's rate that must be done. A step below it is beyond the knee, whatever its
#: percentiles.
_MIN_DONE_SHARE = 0.9

#: Places one order over a connection; raises when it is not filled.
OrderSender = Callable[[RestConnection, BenchUser], object]


def run(
    target: Target,
    users: Sequence[BenchUser],
    place: OrderSender,
    *,
    seconds: float,
    first: float = FIRST_ORDERS_PER_S,
) -> dict[str, Any]:
    """Measures steps of `seconds` each until two in a row are beyond the limit.

    The knee lies between two steps, where the line through their percentiles passes the limit; it
    is 0 if the first step is beyond it.
    """
    steps: list[dict[str, Any]] = []
    rate = first
    while len(steps) < 2 or any(_good(step) for step in steps[-2:]):
        steps.append(_step(target, users, place, rate, seconds))
        rate *= RATE_GROWTH
    good = [number for number, step in enumerate(steps) if _good(step)]
    if not good:
        return {
            "knee_per_s": 0.0,
            "knee_users": len(users),
            "knee_steps": steps,
            "knee_cpu_percent": {},
        }
    below, above = steps[good[-1]], steps[good[-1] + 1]
    return {
        "knee_per_s": _between(below, above),
        "knee_users": len(users),
        "knee_steps": steps,
        "knee_cpu_percent": below["cpu_percent"],
    }


def _good(step: dict[str, Any]) -> bool:
    return bool(
        step["p99_ms"] <= MAX_P99_MS and step["done_per_s"] >= _MIN_DONE_SHARE * step["rate_per_s"]
    )


def _between(below: dict[str, Any], above: dict[str, Any]) -> float:
    """Returns the rate at which the percentile is the limit; the lower one if the upper fell behind
    with it met."""
    rise = above["p99_ms"] - below["p99_ms"]
    share = 0.0 if above["p99_ms"] <= MAX_P99_MS else (MAX_P99_MS - below["p99_ms"]) / rise
    return round(
        float(below["rate_per_s"] + share * (above["rate_per_s"] - below["rate_per_s"])), 1
    )


def _step(
    target: Target, users: Sequence[BenchUser], place: OrderSender, rate: float, seconds: float
) -> dict[str, Any]:
    """Sends `rate` orders a second for `seconds`, evenly; the users take turns."""
    count = max(len(users), int(rate * seconds))
    taken: list[float] = []
    failed: list[BaseException] = []
    # The servers are its children: they count above.
    meter, own = (CpuMeter(target), time.process_time())
    begin = time.monotonic() + 0.2

    def trade(number: int, user: BenchUser) -> None:
        connection = RestConnection(target.api_url, user.api_key)
        try:
            for turn in range(number, count, len(users)):
                due = begin + turn / rate
                time.sleep(max(0.0, due - time.monotonic()))
                place(connection, user)
                taken.append(time.monotonic() - due)
        except BaseException as error:
            failed.append(error)
        finally:
            connection.close()

    threads = [
        threading.Thread(target=trade, args=(number, user)) for number, user in enumerate(users)
    ]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    if failed:
        raise failed[0]
    lasted = time.monotonic() - begin
    used = meter.milliseconds(1) | {"this client": (time.process_time() - own) * 1000}
    return {
        "rate_per_s": round(rate, 1),
        "done_per_s": round(count / lasted, 1),
        **figures.milliseconds(taken, 50, 99),
        "cpu_percent": {name: round(ms / lasted / 10, 1) for name, ms in used.items()},
    }


def rows(result: dict[str, Any]) -> list[tuple[str, str]]:
    """Returns the rows of the table."""
    cpu = result["knee_cpu_percent"]
    shown = sorted(cpu.items(), key=lambda entry: -entry[1])
    shares = [
        (
            f"{step['rate_per_s']} orders/s of {result['knee_users']} users, open loop",
            f"p50 {step['p50_ms']}   p99 {step['p99_ms']}   done {step['done_per_s']}/s",
        )
        for step in result["knee_steps"]
    ]
    return [
        *shares,
        (f"knee: p99 passes {MAX_P99_MS:g} ms at", f"{result['knee_per_s']} orders/s"),
        (
            "CPU before the knee, % of a core",
            "   ".join(f"{name} {share}" for name, share in shown)
            + f"   in all {sum(cpu.values()):.0f}",
        ),
    ]
