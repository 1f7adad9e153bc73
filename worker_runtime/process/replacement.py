"""Defines how a session ends, and when and why the zygote replaces it.

The zygote forks a fresh session for a user whose session died. That has a new key pair and no
credentials, and waits until the orchestrator seals them to its key.
"""

import signal
import time
from enum import IntEnum

from worker_runtime.process.shared_state import SharedState
from worker_runtime.protocol.launch import ExitCode


class WorkerExit(Exception):
    """Ends the session process with this exit code. Not an error by itself."""

    def __init__(self, code: ExitCode, reason: str) -> None:
        super().__init__(reason)
        self.code = code
        self.reason = reason


#: After more replacements of a user's session within
#: `REPLACEMENT_WINDOW_S` seconds another worker takes over.
MAX_REPLACEMENTS = 3
REPLACEMENT_WINDOW_S = 600.0


class KillReason(IntEnum):
    NO_PULSE = 1
    LEASE = 2
    FENCED = 3

    def text(self) -> str:
        late = "open broker sessions at the end of the lease"
        return late if self is KillReason.LEASE else self.name.lower().replace("_", " ")


class CrashCounter:
    """Counts crashes within the last `window` seconds."""

    def __init__(self, limit: int, window: float) -> None:
        self._limit = limit
        self._window = window
        self._at: list[float] = []

    def add_and_check(self) -> bool:
        """Adds one; returns whether there are more than `limit`."""
        now = time.monotonic()
        self._at = [*(at for at in self._at if now - at < self._window), now]
        return len(self._at) > self._limit


def record_kill(shared_state: SharedState, reason: KillReason) -> None:
    """Records why the supervisor kills the present session. Call it right before."""
    shared_state.killed_for = shared_state.session_number * 16 + reason


def replacement_reason(shared_state: SharedState) -> str:
    """Returns why the present session replaced another one."""
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
