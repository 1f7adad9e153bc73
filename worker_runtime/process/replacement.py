"""The end of a worker, raised where it is decided.

A session process replaced in place: when that is allowed, and why it was done.

The zygote forks a fresh session for a user's worker whose session died. The fresh one has a key pair of its
own and no credentials: it waits for the orchestrator to seal them anew.
"""

from __future__ import annotations

import signal
import time
from enum import IntEnum

from worker_runtime.process.shared_state import SharedState
from worker_runtime.protocol.launch import ExitCode


class WorkerExit(Exception):
    """Raised inside the session when its process has to end; not an error by itself."""

    def __init__(self, code: ExitCode, reason: str) -> None:
        super().__init__(reason)
        self.code = code
        self.reason = reason


#: More replacements of a user's session than this within `REPLACEMENT_WINDOW` seconds: another worker
#: takes over.
MAX_REPLACEMENTS = 3
REPLACEMENT_WINDOW = 600.0


class KillReason(IntEnum):
    """Why the supervisor killed a session."""

    NO_PULSE = 1
    LEASE = 2
    FENCED = 3

    def text(self) -> str:
        return _KILL_TEXTS[self]


_KILL_TEXTS = {
    KillReason.NO_PULSE: "no pulse",
    KillReason.LEASE: "open broker sessions at the end of the lease",
    KillReason.FENCED: "fenced",
}


class CrashCounter:
    """Counts what happened within the last `window` seconds."""

    def __init__(self, limit: int, window: float) -> None:
        self._limit = limit
        self._window = window
        self._at: list[float] = []

    def add_and_check(self) -> bool:
        """Notes one more; true if that makes more than `limit`."""
        now = time.monotonic()
        self._at = [*(at for at in self._at if now - at < self._window), now]
        return len(self._at) > self._limit


def record_kill(shared_state: SharedState, reason: KillReason) -> None:
    """The supervisor's note, right before it kills the present session."""
    shared_state.killed_for = shared_state.session_number * 16 + reason


def replacement_reason(shared_state: SharedState) -> str:
    """Why the present session stands in another one's place."""
    killed_session, reason = divmod(shared_state.killed_for, 16)
    if killed_session == shared_state.session_number - 1:
        return KillReason(reason).text()
    status = shared_state.session_end
    if status < 0:
        known = -status in set(signal.Signals)
        return f"ended by {signal.Signals(-status).name if known else f'signal {-status}'}"
    if status == ExitCode.SESSION_REPLACE:
        return "the broker's SDK did not come back"
    return f"ended with code {status}"
