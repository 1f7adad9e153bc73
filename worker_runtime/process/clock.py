"""The clocks of a worker, and growing waits between attempts.

A lease runs on CLOCK_BOOTTIME, which counts while the host is suspended, so that a lease is never
younger than it seems (invariant *one-owner*). Everything else runs on CLOCK_MONOTONIC.
"""

import random
import time

#: adjtimex(2): the clock is not synchronised.
_TIME_ERROR = 5

NS_PER_S = 1_000_000_000
NS_PER_MS = 1_000_000


def boot_ns() -> int:
    """Returns the nanoseconds since boot, suspension included."""
    return time.clock_gettime_ns(time.CLOCK_BOOTTIME)


def wall_ms() -> int:
    """Returns the time in Unix milliseconds."""
    return time.time_ns() // NS_PER_MS


def seconds_until(deadline_ns: int) -> float:
    """Returns the seconds until a time on CLOCK_MONOTONIC (ns); negative when it has passed."""
    return (deadline_ns - time.monotonic_ns()) / NS_PER_S


def clock_is_synchronised() -> bool | None:
    """Returns False if the kernel says that nothing
    keeps this clock right; None if it does not say."""
    import ctypes  # asked for once in a long while

    words = ctypes.create_string_buffer(256)  # `struct timex`, 208 bytes; zeros only read it
    state = ctypes.CDLL(None, use_errno=True).adjtimex(words)
    return None if state < 0 else state != _TIME_ERROR


class Backoff:
    """Waits of `first` seconds, doubled each time up to `longest`. Jitter shortens each by up to a
    half, so that many workers do not come back at one instant."""

    def __init__(self, first: float, longest: float) -> None:
        self._first = first
        self._longest = longest
        self._wait = first
        self._next = 0.0

    def due(self) -> bool:
        return time.monotonic() >= self._next

    def seconds_until_due(self) -> float:
        """Returns the seconds until the next attempt."""
        return max(0.0, self._next - time.monotonic())

    def failed(self, at_least: float = 0.0) -> None:
        """Counts a failed attempt. The next one is at least `at_least` seconds away, for which the
        other side has asked."""
        # Jitter needs no cryptographic randomness.
        # It only lengthens a pause that somebody asked for.
        wait = max(self._wait * random.uniform(0.5, 1.0), at_least * random.uniform(1.0, 1.2))  # noqa: S311
        self._next = time.monotonic() + wait
        self._wait = min(self._wait * 2, self._longest)

    def reset(self) -> None:
        self._wait = self._first
        self._next = 0.0
