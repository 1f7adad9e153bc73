"""A worker writes into Valkey as fast as it can, with its own user: it is cut off, and others trade
on."""

from __future__ import annotations

import json
import math
import statistics
import subprocess
import sys
import threading
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import NamedTuple
from uuid import uuid4

import httpx
import pytest

from tests.support.systems.attacked import VALKEY_USERS, AttackedSystem, StolenSecrets, read_owner
from tests.support.systems.local import Trader, until
from worker_runtime.protocol import keys
from workflows.user_worker.state import MAX_CRASHES

pytestmark = pytest.mark.skipif(not VALKEY_USERS, reason="workers have the server's password here")

KINDS = (
    "large values",
    "small names",
    "events",
    "one list",
    "rings",
    "published messages",
    "large answers",
)
#: Seconds between two orders of one user.
PAUSE_S = 0.25
#: Seconds that no order may take.
LONGEST_S = 3.0


class PlacedOrder(NamedTuple):
    began: float
    seconds: float
    status: int
    code: str


class TradingCrowd:
    """Users who trade all the time."""

    def __init__(self, system: AttackedSystem, traders: Sequence[Trader]) -> None:
        self._system = system
        self._traders = traders
        self.orders: list[PlacedOrder] = []

    @contextmanager
    def trading(self) -> Iterator[None]:
        over = threading.Event()
        threads = [
            threading.Thread(target=self._trade, args=(trader, over)) for trader in self._traders
        ]
        for thread in threads:
            thread.start()
        try:
            yield
        finally:
            over.set()
            for thread in threads:
                thread.join()

    def _trade(self, trader: Trader, over: threading.Event) -> None:
        with httpx.Client(
            base_url=self._system.stack.api_url, timeout=60.0, trust_env=False
        ) as http:
            while not over.wait(PAUSE_S):
                body = {
                    "client_order_id": uuid4().hex,
                    "account_id": trader.account_id,
                    "symbol": "2330",
                    "side": "buy",
                    "quantity": 1,
                    "price_type": "MKT",
                    "time_in_force": "IOC",
                    "allow_duplicate": True,
                }
                began = time.monotonic()
                answer = http.post(
                    f"/v1/users/{trader.user_id}/orders",
                    headers={"X-API-Key": trader.api_key},
                    json=body,
                )
                code = str(answer.json().get("code") or "")
                seconds = time.monotonic() - began
                self.orders.append(PlacedOrder(began, seconds, answer.status_code, code))

    def between(self, began: float, ended: float = math.inf) -> list[PlacedOrder]:
        return [order for order in self.orders if began <= order.began < ended]


def p99(orders: Sequence[PlacedOrder]) -> float:
    times = sorted(order.seconds for order in orders)
    return times[math.ceil(0.99 * len(times)) - 1]


def flood(stolen: StolenSecrets, kind: str, seconds: float) -> dict[str, float | None]:
    """What the flooder says at its end."""
    return run_flooder(
        stolen.config.valkey_url, kind, stolen.user_id, stolen.config.worker_id, seconds=seconds
    )


def run_flooder(*words: str, seconds: float) -> dict[str, float | None]:
    done = subprocess.run(
        [sys.executable, "-m", "tests.support.valkey_flooder", *words, str(seconds)],
        check=True,
        capture_output=True,
        text=True,
        timeout=seconds + 60,
    )
    told: dict[str, float | None] = json.loads(done.stdout)
    return told


def leavings(system: AttackedSystem, stolen: StolenSecrets) -> list[str]:
    """What is left of what the attacker wrote."""
    with system.valkey() as client:
        names = [name.decode() for name in client.scan_iter(match="*made-up*", count=1000)]
        if client.lpos(keys.requests(stolen.user_id), "made-up") is not None:
            names.append(keys.requests(stolen.user_id))
        return names + [
            key for key in (keys.events_of(stolen.config.worker_id),) if client.exists(key)
        ]


def until_removed(system: AttackedSystem, stolen: StolenSecrets) -> None:
    until(lambda: not leavings(system, stolen), "nothing left of the attacker's")


def until_replaced(system: AttackedSystem, hostile: Trader, stolen: StolenSecrets) -> None:
    """Waits until the user has another worker, or may have none any more."""
    gone = stolen.config.worker_id
    until(
        lambda: system.stolen_by(hostile).config.worker_id != gone or is_parked(system, hostile),
        "another worker, or none any more",
    )


def attack(system: AttackedSystem, kind: str, seconds: float) -> float:
    """Has a worker flood while others trade; returns when it was cut off for good."""
    hostile, stolen = system.hostile()
    began = time.monotonic()
    told = flood(stolen, kind, seconds)
    assert told["refused_after"] is not None, f"{kind}: not cut off, {told}"
    assert told["refused_after"] < 5.0, told
    until_removed(system, stolen)
    until(
        lambda: read_owner(system, hostile)[0] != stolen.config.worker_id,
        "another worker for its user",
    )
    return began + told["refused_after"]


def check_others(
    system: AttackedSystem, crowd: TradingCrowd, traders: Sequence[Trader], owners: Sequence[object]
) -> None:
    """No order took long, none failed but for want of memory, and nobody lost its worker."""
    slow = [order for order in crowd.orders if order.seconds > LONGEST_S]
    assert slow == []
    others = {(order.status, order.code) for order in crowd.orders} - {
        (201, ""),
        (503, "MEMORY_SHORT"),
    }
    assert others == set()
    assert [read_owner(system, trader) for trader in traders] == owners


@pytest.mark.parametrize("kind", KINDS)
def test_a_worker_that_floods_valkey_is_cut_off_and_others_trade_on(
    system: AttackedSystem, kind: str
) -> None:
    traders = [system.victim()[0] for _ in range(2)]
    owners = [read_owner(system, trader) for trader in traders]
    crowd = TradingCrowd(system, traders)
    with crowd.trading():
        attack(system, kind, 4.0)
    check_others(system, crowd, traders, owners)


def is_parked(system: AttackedSystem, trader: Trader) -> bool:
    view = system.call("GET", f"/v1/users/{trader.user_id}/worker", system.stack.admin_key).json()
    return bool((view.get("lifecycle") or {}).get("state") == "Parked")


#: Seconds of the long form: without an attack, and with one.
QUIET_S, ATTACK_S = 30.0, 60.0
#: Seconds of orders of which one p99 is taken. The median of several counts: what else the machine
#: does for a moment is in one of them.
WINDOW_S = 10.0
#: Seconds of a p99 that may come from a machine whose two cores also run the attacker and the
#: users.
MACHINE_S = 0.02


@pytest.mark.drill
@pytest.mark.timeout(400)
def test_after_the_cut_off_orders_are_as_quick_as_without_an_attack(system: AttackedSystem) -> None:
    """One worker writes for a minute, or tries to."""
    traders = [system.victim()[0] for _ in range(3)]
    owners = [read_owner(system, trader) for trader in traders]
    crowd = TradingCrowd(system, traders)
    with crowd.trading():
        time.sleep(QUIET_S)
        attacked = time.monotonic()
        cut_off = attack(system, "large values", ATTACK_S)
    check_others(system, crowd, traders, owners)
    quiet = windows(crowd, attacked - QUIET_S, attacked)
    after = windows(crowd, cut_off, attacked + ATTACK_S)
    figures = {
        "quiet": statistics.median(quiet),
        "attack": p99(crowd.between(attacked, cut_off)),
        "after": statistics.median(after),
    }
    print({name: f"{seconds * 1000:.0f} ms" for name, seconds in figures.items()})  # noqa: T201
    limit_s = max(1.5 * figures["quiet"], figures["quiet"] + MACHINE_S)
    assert figures["after"] < limit_s, (figures, quiet, after)


def windows(crowd: TradingCrowd, began: float, ended: float) -> list[float]:
    """Return the p99 of the orders of each whole window between these times."""
    count = int((ended - began) // WINDOW_S)
    starts = [began + number * WINDOW_S for number in range(count)]
    orders = [crowd.between(start, start + WINDOW_S) for start in starts]
    assert len(orders) >= 3
    assert min(map(len, orders)) > 60
    return [p99(window) for window in orders]


@pytest.mark.drill
@pytest.mark.timeout(400)
def test_an_attacker_who_takes_over_each_next_worker_is_parked(system: AttackedSystem) -> None:
    traders = [system.victim()[0] for _ in range(3)]
    owners = [read_owner(system, trader) for trader in traders]
    crowd, cut_off = TradingCrowd(system, traders), 0
    hostile, stolen = system.hostile()
    until_s = time.monotonic() + ATTACK_S
    with crowd.trading():
        while not is_parked(system, hostile):
            assert time.monotonic() < until_s
            told = flood(stolen, KINDS[cut_off % len(KINDS)], 8.0)
            assert told["refused_after"] is not None, told
            assert told["refused_after"] < 5.0, told
            cut_off += 1
            until_removed(system, stolen)
            until_replaced(system, hostile, stolen)
            stolen = system.stolen_by(hostile)
    assert cut_off == MAX_CRASHES
    check_others(system, crowd, traders, owners)
