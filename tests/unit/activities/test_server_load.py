"""When the quota watcher reads the list of clients: `ServerLoad`."""

from __future__ import annotations

import pytest

from activities.events.quota_watcher import (
    BUSY_SHARE,
    MIN_MEMORY_CHANGE_BYTES,
    MIN_NEW_CONNECTIONS,
    RATE_SPAN_S,
    ServerLoad,
    Totals,
)
from infra.valkey.memory import MemoryUse


def totals(connections: int = 10, used: int = 0) -> Totals:
    return Totals(MemoryUse(used, 0), 0, connections, 0.0, 0.0)


def listed(load: ServerLoad, now: float, seen: Totals) -> None:
    load.note_asked(now)
    load.note_listed(seen)


def test_a_quiet_server_is_not_asked_for_its_clients() -> None:
    load = ServerLoad()
    assert not load.needs_list(0.0, totals(), BUSY_SHARE)


def test_connections_that_come_right_after_a_read_are_looked_at_when_it_may_be_repeated() -> None:
    load = ServerLoad()
    listed(load, 0.0, totals())
    many = totals(connections=10 + MIN_NEW_CONNECTIONS + 1)
    assert not load.needs_list(RATE_SPAN_S / 3, many, BUSY_SHARE), "it was read just before"
    assert load.needs_list(RATE_SPAN_S, many, BUSY_SHARE)
    listed(load, RATE_SPAN_S, many)
    assert not load.needs_list(2 * RATE_SPAN_S, many, BUSY_SHARE), "they were looked at"


def test_connections_are_compared_with_the_fewest_since_the_last_read() -> None:
    load = ServerLoad()
    listed(load, 0.0, totals(connections=MIN_NEW_CONNECTIONS))
    assert not load.needs_list(1.0, totals(connections=0), BUSY_SHARE)
    assert load.needs_list(2.0, totals(connections=MIN_NEW_CONNECTIONS + 1), BUSY_SHARE)


def test_a_read_that_failed_is_repeated() -> None:
    load = ServerLoad()
    full = totals(used=MIN_MEMORY_CHANGE_BYTES + 1)
    assert load.needs_list(1.0, full, BUSY_SHARE)
    load.note_asked(1.0)
    assert not load.needs_list(1.0 + RATE_SPAN_S / 3, full, BUSY_SHARE), "not at once"
    assert load.needs_list(1.0 + RATE_SPAN_S, full, BUSY_SHARE)


@pytest.mark.parametrize(("share", "is_busy"), [(0.51, True), (0.49, False)])
def test_the_server_is_busy_when_its_thread_works_for_half_of_the_time(
    share: float, is_busy: bool
) -> None:
    """By the processor time of the thread, which a machine with other work does not lengthen."""
    load = ServerLoad()
    for tick in range(8):
        at = tick * RATE_SPAN_S
        seen = totals()._replace(worked=100.0 + share * at)
        asked = load.needs_list(at, seen, BUSY_SHARE)
        if tick:  # nothing is known before the first span
            assert (asked, load.is_busy) == (is_busy, is_busy)
        if asked:
            listed(load, at, seen)
