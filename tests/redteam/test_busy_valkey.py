"""A worker keeps Valkey's thread busy with what it may call: at the rule's own threshold it is cut
off, and others trade on."""

from __future__ import annotations

import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

from activities.events.quota_watcher import BUSY_SHARE, MAX_BYTES, MAX_NAMES
from tests.redteam.test_memory_flood import (
    TradingCrowd,
    check_others,
    flood,
    p99,
    until_removed,
)
from tests.redteam.test_takeover import owner_of
from tests.support.systems.attacked import VALKEY_USERS, AttackedSystem
from tests.support.systems.local import until
from tests.support.valkey_flooder import commands_of
from worker_runtime.protocol import keys

pytestmark = [
    pytest.mark.skipif(not VALKEY_USERS, reason="workers have the server's password here"),
    pytest.mark.timeout(240),
]

#: Seconds without an attack before it, and of the attack.
QUIET_S, ATTACK_S = 8.0, 20.0
#: Seconds in which the worker is cut off: the watcher sees a busy thread after up to two of its
#: spans of 0.75 s, and looks twice. The rest is for a machine that does much else.
CUT_OFF_WITHIN_S = 10.0


@contextmanager
def measured_thread(system: AttackedSystem) -> Iterator[list[float]]:
    """Yields the shares of the time for which Valkey's thread has worked, one for each half
    second."""
    over, shares = threading.Event(), list[float]()

    def measure() -> None:
        with system.valkey() as client:
            before = None
            while not over.wait(0.5):
                cpu = client.info("cpu")
                worked = cpu["used_cpu_user_main_thread"] + cpu["used_cpu_sys_main_thread"]
                now = time.monotonic()
                if before is not None:
                    shares.append((worked - before[0]) / (now - before[1]))
                before = worked, now

    measuring = threading.Thread(target=measure)
    measuring.start()
    try:
        yield shares
    finally:
        over.set()
        measuring.join()


@pytest.mark.parametrize("kind", ["quick commands", "slow commands"])
def test_a_worker_that_keeps_valkey_busy_for_half_of_the_time_is_cut_off(
    system: AttackedSystem, kind: str
) -> None:
    traders = [system.victim()[0] for _ in range(2)]
    owners = [owner_of(system, trader) for trader in traders]
    hostile, stolen = system.hostile()
    worker_id = stolen.config.worker_id
    crowd = TradingCrowd(system, traders)
    with crowd.trading():
        time.sleep(QUIET_S)
        began = time.monotonic()
        with measured_thread(system) as shares:
            told = flood(stolen, kind, ATTACK_S)
        assert told["refused_after"] is not None, (told, shares)
        cut_off = began + told["refused_after"]
        with system.valkey() as client:
            reason = until(lambda: client.get(keys.cut_off(worker_id)), "a reason").decode()
        until_removed(system, stolen)
        until(lambda: owner_of(system, hostile)[0] != worker_id, "another worker for its user")
    quiet = crowd.between(began - QUIET_S, began)
    attacked = crowd.between(began, cut_off)
    print(  # noqa: T201
        {
            "kind": kind,
            "load": Path("/proc/loadavg").read_text()[:14],
            "cut off after": told["refused_after"],
            "reason": reason,
            "largest shares": [round(share, 2) for share in sorted(shares)[-4:]],
            "p99 quiet, attacked": [round(p99(orders), 3) for orders in (quiet, attacked)],
        }
    )
    assert "keeps Valkey busy" in reason, "cut off for something else"
    assert told["refused_after"] < CUT_OFF_WITHIN_S, (told, shares)
    assert max(shares) > BUSY_SHARE
    check_others(system, crowd, traders, owners)


@pytest.mark.parametrize("kind", ["quick commands", "slow commands"])
def test_the_attack_stays_below_every_other_quota(kind: str) -> None:
    """Or it would be cut off for what it holds or sends."""
    entries = [
        entry
        for number in range(40)
        for command in commands_of(kind, "u", "w")(number)
        if command[0] == "RPUSH"
        for entry in command[2:]
    ]
    assert len(entries) < MAX_NAMES
    assert sum(map(len, entries)) < MAX_BYTES / 2
