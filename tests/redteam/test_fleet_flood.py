"""A job runner of an application floods Valkey while users trade: its login ends, and users trade
on."""

from __future__ import annotations

import json
import statistics
import subprocess
import sys
import threading
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
from redis import Redis

from infra.valkey.client import text_of
from infra.valkey.job_login import job_fleet_url, user_of_jobs
from infra.valkey.memory import REFUSED_ABOVE_PERMILLE, MemoryUse
from infra.vault.message_secret import load_fleet_keys
from tests.redteam.test_memory_flood import (
    LONGEST_S,
    PlacedOrder,
    TradingCrowd,
    run_flooder,
)
from tests.support.systems.attacked import VALKEY_USERS, AttackedSystem, read_owner
from tests.support.systems.local import Trader, until
from worker_runtime.jobs.protocol import keys as job_keys
from worker_runtime.protocol import keys

pytestmark = [
    pytest.mark.drill,
    pytest.mark.skipif(not VALKEY_USERS, reason="runners have the server's password here"),
    pytest.mark.timeout(240),
]

APPLICATION = "flooding"
TAG = job_keys.application_tag(APPLICATION)
#: Seconds without an attack before it and after it, and of the attack. The watcher needs two looks,
#: 0.75 s apart.
QUIET_S, ATTACK_S = 10.0, 10.0
#: What the median of an order may be after the attack, against the one before it in the same run; a
#: difference below the floor, in seconds, is the machine's.
MAX_RATIO, MACHINE_S = 2.0, 0.1


@pytest.fixture
def hostile_url(system: AttackedSystem) -> Iterator[str]:
    """The login that an application's runner has: it follows from the application's key file."""
    berth = Path(sys.executable).with_name("berth")
    command = [str(berth), "jobs", "application", "add", APPLICATION, "--json"]
    made = subprocess.run(
        [*command, "--data", str(system.stack.folder.path)],
        check=True,
        capture_output=True,
        text=True,
        timeout=60,
    )
    own_keys = load_fleet_keys(Path(json.loads(made.stdout)["key_file"]))
    try:
        with system.valkey() as client:
            until(lambda: user_of_jobs(TAG) in logins(client), "a login")
        yield job_fleet_url(system.stack.settings.valkey_url, TAG, own_keys)
    finally:
        remove_names(system)


def logins(client: Redis) -> set[str]:
    return {text_of(name) for name in client.acl_users()}


def names_of_fleet(system: AttackedSystem) -> list[bytes]:
    with system.valkey() as client:
        return list(client.scan_iter(match=job_keys.every_key(TAG), count=1000))


def remove_names(system: AttackedSystem) -> None:
    """Deletes what the fleet wrote, as an operator does it after a cut-off."""
    with system.valkey() as client:
        for name in names_of_fleet(system):
            client.unlink(name)


@contextmanager
def measured_memory(system: AttackedSystem) -> Iterator[list[float]]:
    """Yields the shares of the maximum that the server has used since, twenty times a second."""
    over, shares = threading.Event(), list[float]()

    def measure() -> None:
        with system.valkey() as client:
            while not over.wait(0.05):
                shares.append(MemoryUse.of(client.info("memory")).share)

    measuring = threading.Thread(target=measure)
    measuring.start()
    try:
        yield shares
    finally:
        over.set()
        measuring.join()


def leases(system: AttackedSystem, traders: Sequence[Trader]) -> list[Any]:
    """Who owns each user, and the sessions that each has ever had at the exchange."""
    return [
        (read_owner(system, trader), [session.session_id for session in system.sessions(trader)])
        for trader in traders
    ]


def median(orders: Sequence[PlacedOrder]) -> float:
    assert len(orders) >= 20, "too few orders to tell"
    return statistics.median(order.seconds for order in orders)


def test_a_fleet_that_floods_valkey_is_cut_off_and_users_trade_on(
    system: AttackedSystem, hostile_url: str
) -> None:
    traders = [system.victim()[0] for _ in range(3)]
    before = leases(system, traders)
    crowd = TradingCrowd(system, traders)
    with crowd.trading(), measured_memory(system) as shares:
        time.sleep(QUIET_S)
        began = time.monotonic()
        told = run_flooder(hostile_url, "large job results", "", TAG, seconds=ATTACK_S)
        assert told["refused_after"] is not None, told
        cut_off = began + told["refused_after"]
        time.sleep(max(0.0, cut_off + QUIET_S - time.monotonic()))
    quiet_s, after_s = median(crowd.between(began - QUIET_S, began)), median(crowd.between(cut_off))
    figures = {
        "load": Path("/proc/loadavg").read_text()[:14],
        "cut off after": told["refused_after"],
        "MB sent": (told["sent"] or 0) / 1e6,
        "memory": max(shares),
        "quiet": quiet_s,
        "longest in the attack": max(order.seconds for order in crowd.between(began, cut_off + 1)),
        "after": after_s,
    }
    print(figures)  # noqa: T201
    # Others: no order was refused or took long, and each user has the worker and session of before.
    assert {(order.status, order.code) for order in crowd.orders} == {(201, "")}, figures
    assert max(shares) < REFUSED_ABOVE_PERMILLE / 1000, figures
    assert max(order.seconds for order in crowd.orders) < LONGEST_S, figures
    assert after_s < max(MAX_RATIO * quiet_s, quiet_s + MACHINE_S), figures
    assert leases(system, traders) == before
    # The fleet: no login, no connection, and it stays so.
    with system.valkey() as client:
        assert user_of_jobs(TAG) not in logins(client)
        assert user_of_jobs(job_keys.FLEET_TAG) in logins(client), "another fleet was cut off, too"
        assert client.scard(keys.cut_off_logins(TAG)) == 1
        assert user_of_jobs(TAG) not in {each["user"] for each in client.client_list()}
    # What it wrote stays until an operator removes it; then nothing is left, and memory is free.
    assert names_of_fleet(system)
    remove_names(system)
    until(
        lambda: not names_of_fleet(system) and read_share(system) < shares[0] + 0.05,
        "nothing left of the fleet's",
    )


def read_share(system: AttackedSystem) -> float:
    with system.valkey() as client:
        return MemoryUse.of(client.info("memory")).share
