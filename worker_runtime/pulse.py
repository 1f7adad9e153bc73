"""Watches the pulse of the session from the supervisor's process.

The session pulses on the board at least once a second. Around a broker call it says until when it may be
busy instead. Whatever else keeps it from pulsing (a call past its limit, SIGSTOP, a loop that spins, native
code that holds the interpreter's lock) looks the same from here: the session is frozen.
"""

from __future__ import annotations

import time
from collections.abc import Callable

from worker_runtime.board import Board
from worker_runtime.boottime import SECOND

#: Seconds between two looks, at the most.
TICK = 1.0


class PulseWatch:
    """Counts the seconds without a sign of life, in this process's own time.

    Own time: when the whole container was paused, both stood still, and that is nobody's fault. So one
    look counts for two ticks at the most, however long ago the last one was.
    """

    def __init__(self, board: Board, timeout: float, clock: Callable[[], int] = time.monotonic_ns) -> None:
        self._board = board
        self._timeout = timeout
        self._clock = clock
        self._seen = (0, 0, 0)
        self._looked_at = clock()
        self._still = 0.0

    def frozen(self) -> bool:
        """One look. True once for each time that `timeout` seconds have passed without a sign of life."""
        board, now = self._board, self._clock()
        passed, self._looked_at = min((now - self._looked_at) / SECOND, 2 * TICK), now
        seen = (board.session_number, board.pulse, board.busy_until)
        if seen != self._seen:
            self._seen, self._still = seen, 0.0
        # Counted from the pulse itself and not from the look that found it.
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
        """When the next sign of life was due, but for the patience (monotonic ns)."""
        return max(self._board.pulse, self._board.busy_until)
