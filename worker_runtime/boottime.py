"""The clocks of a worker.

A lease runs on CLOCK_BOOTTIME: it goes on while the host is suspended, so a host that wakes up finds its
leases as old as they are (invariant *one-owner*). Everything else runs on CLOCK_MONOTONIC.
"""

from __future__ import annotations

import time

SECOND = 1_000_000_000


def boot_ns() -> int:
    """Nanoseconds since boot, suspension included."""
    return time.clock_gettime_ns(time.CLOCK_BOOTTIME)


def wall_ms() -> int:
    """Unix milliseconds."""
    return time.time_ns() // 1_000_000
