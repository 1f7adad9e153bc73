"""The lease: how long this worker may still act as its user's only owner (invariant *one-owner*).

It runs from the instant *before* the renewal was sent, because the server counts the mark's time from a
later moment; and it is checked in the thread that calls the broker.
"""

from __future__ import annotations

import math
from time import CLOCK_BOOTTIME, clock_gettime_ns

from worker_runtime.board import Board
from worker_runtime.boottime import SECOND, boot_ns

#: Seconds before the end of the lease at which the session takes nothing more and closes its broker
#: sessions: longer than a logout (1 s), so that the broker sees the end before a new owner connects.
MARGIN = 5.0
#: Seconds before the end of the lease at which the supervisor kills a session that has not closed.
KILL_MARGIN = 2.0
#: Seconds that a reply may take even when the lease is used up: there may be something left to tell.
_SHORTEST_WAIT = 0.1


def end_of(sent_ns: int, ttl: float) -> int:
    """The end of a lease (CLOCK_BOOTTIME ns) that was renewed for `ttl` seconds, sent at `sent_ns`."""
    return sent_ns + int(ttl * SECOND)


class Lease:
    """Reads the lease from the board. Both the supervisor's and the session's own renewals count."""

    def __init__(self, board: Board) -> None:
        self._board = board

    def left(self) -> float:
        """Seconds until the lease ends; negative when it has."""
        end = max(self._board.lease_supervisor, self._board.lease_session)
        return (end - boot_ns()) / SECOND

    def wait_limit(self) -> float:
        """Seconds that the session may wait for Valkey. While a broker session is open that is no longer
        than the lease is usable: a frozen Valkey must not keep the session from closing it in time."""
        return max(_SHORTEST_WAIT, self.usable()) if self._board.broker_open else math.inf

    def usable(self) -> float:
        """Seconds that a broker call may take from now; zero or less: call nothing."""
        return (self._board.lease_end() - clock_gettime_ns(CLOCK_BOOTTIME)) / SECOND - MARGIN
