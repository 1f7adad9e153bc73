"""The lease: how long this worker may still act as its user's only owner (invariant *one-owner*).

It runs from the instant *before* the renewal was sent, because the server counts the mark's time from a
later moment; and it is checked in the thread that calls the broker.

Watches the pulse of the session from the supervisor's process.

The session pulses in the shared state at least once a second. Around a broker call it says until when it may
be busy instead. Whatever else keeps it from pulsing (a call past its limit, SIGSTOP, a loop that spins,
native code that holds the interpreter's lock) looks the same from here: the session is frozen.
"""

from __future__ import annotations

import math
import time
from collections.abc import Callable

from worker_runtime.process.clock import SECOND, boot_ns
from worker_runtime.process.shared_state import SharedState

#: Seconds before the end of the lease at which the session takes nothing more and closes its broker
#: sessions: longer than a logout (1 s), so that the broker sees the end before a new owner connects.
LEASE_MARGIN = 5.0
#: Seconds before the end of the lease at which the supervisor kills a session that has not closed.
KILL_MARGIN = 2.0
#: Seconds that a reply may take even when the lease is used up, for what is still to be sent.
_SHORTEST_WAIT = 0.1


def lease_end_of(sent_ns: int, ttl: float) -> int:
    """The end of a lease (CLOCK_BOOTTIME ns) that was renewed for `ttl` seconds, sent at `sent_ns`."""
    return sent_ns + int(ttl * SECOND)


class Lease:
    """Reads the lease from the shared state. Both the supervisor's and the session's own renewals count."""

    def __init__(self, shared_state: SharedState) -> None:
        self._shared_state = shared_state

    def left(self) -> float:
        """Seconds until the lease ends; negative when it has."""
        end = max(self._shared_state.lease_supervisor, self._shared_state.lease_session)
        return (end - boot_ns()) / SECOND

    def wait_limit(self) -> float:
        """Seconds that the session may wait for Valkey. While a broker session is open that is at most the
        usable lease, so that a frozen Valkey does not keep the session from closing it in time."""
        return max(_SHORTEST_WAIT, self.usable()) if self._shared_state.broker_open else math.inf

    def usable(self) -> float:
        """Seconds that a broker call may take from now. If zero or less, no call may be made."""
        return (self._shared_state.lease_end() - boot_ns()) / SECOND - LEASE_MARGIN


#: Longest time between two checks, in seconds.
PULSE_TICK = 1.0


class PulseWatch:
    """Counts the seconds without a sign of life, in this process's own time.

    When the whole container was paused, both processes stood still, and nobody is to blame. So one check
    counts for at most two ticks, however long ago the last one was.
    """

    def __init__(
        self, shared_state: SharedState, timeout: float, clock: Callable[[], int] = time.monotonic_ns
    ) -> None:
        self._shared_state = shared_state
        self._timeout = timeout
        self._clock = clock
        self._seen = (0, 0, 0)
        self._looked_at = clock()
        self._still = 0.0

    def is_frozen(self) -> bool:
        """Checks once. True once for each time that `timeout` seconds have passed without a sign of life."""
        shared_state, now = self._shared_state, self._clock()
        passed, self._looked_at = min((now - self._looked_at) / SECOND, 2 * PULSE_TICK), now
        seen = (shared_state.session_number, shared_state.pulse, shared_state.busy_until)
        if seen != self._seen:
            self._seen, self._still = seen, 0.0
        # Counted from the pulse itself, not from the check that found it.
        self._still = max(0.0, min(self._still + passed, (now - self._expected()) / SECOND))
        if self._still < self._timeout:
            return False
        self._still = 0.0
        return True

    def left(self) -> float:
        """Seconds until the session could count as frozen."""
        busy = max(0.0, (self._expected() - self._clock()) / SECOND)
        return busy + self._timeout - self._still

    def _expected(self) -> int:
        """The time of the last sign of life, or until which none is expected (CLOCK_MONOTONIC ns)."""
        return max(self._shared_state.pulse, self._shared_state.busy_until)
