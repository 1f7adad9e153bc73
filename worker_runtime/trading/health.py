"""Sends one event at each change of the whole worker's health, which the metadata shows, too.

A user has one worker and perhaps several accounts. The workflow needs the worker's health; the event's detail
names the account.
"""

from __future__ import annotations

from collections.abc import Callable, Collection

from worker_runtime.process.shared_state import ERROR_CODES, NO_ERROR, HealthCondition, SharedState
from worker_runtime.protocol import errors
from worker_runtime.protocol.messages import WorkerEventKind
from worker_runtime.trading.account_session import AccountSession

_EVENTS = {
    HealthCondition.WELL: WorkerEventKind.CONNECTED,
    HealthCondition.RECONNECTING: WorkerEventKind.RECONNECTING,
    HealthCondition.DEGRADED: WorkerEventKind.DEGRADED,
}


class HealthMonitor:
    """Checks all broker sessions after each change of one and reports what it means for the worker."""

    def __init__(self, shared_state: SharedState, add_event: Callable[[WorkerEventKind, str], None]) -> None:
        self._shared_state = shared_state
        self._add_event = add_event
        shared_state.trouble, shared_state.condition = NO_ERROR, HealthCondition.NEW
        shared_state.accounts = shared_state.accounts_connected = 0

    def update(self, sessions: Collection[AccountSession], detail: str = "") -> None:
        """Reports the worker's health if it has changed. `detail` goes with CONNECTED."""
        missing = [session for session in sessions if session.broker is None]
        waiting = [session for session in missing if session.refused is None]
        unlisted = [session for session in sessions if session.broker is not None and not session.listed]
        self._shared_state.accounts = len(sessions)
        self._shared_state.accounts_connected = len(sessions) - len(missing)
        some = len(missing) < len(sessions)
        # While others are connected, one that never was (in this process) is tried again like one away.
        away = [
            session
            for session in waiting
            if session.away or (some and session.error and not session.was_open)
        ]
        if away:
            code = away[0].error.code if away[0].error else ""
            self._report(HealthCondition.DEGRADED, f"{away[0].name}: {code}", code)
        elif waiting:
            if self._condition is HealthCondition.WELL:
                self._report(HealthCondition.RECONNECTING, f"{waiting[0].name}: {waiting[0].lost_because}")
        elif unlisted:
            first = unlisted[0]
            self._report(
                HealthCondition.DEGRADED, f"{first.name}: its orders cannot be listed", first.listing_error
            )
        elif some:
            code = errors.LoginRejected.code if missing else ""
            if missing:
                detail = f"without {', '.join(session.name for session in missing)}: {code}"
            self._report(HealthCondition.WELL, detail, code)

    def parked(self) -> None:
        """Reports that all broker sessions were closed because the lease is about to end."""
        self._shared_state.accounts_connected = 0
        if self._condition is not HealthCondition.NEW:
            self._report(HealthCondition.DEGRADED, "the lease was not renewed in time", errors.LeaseLost.code)

    @property
    def _condition(self) -> HealthCondition:
        return HealthCondition(self._shared_state.condition)

    def _report(self, condition: HealthCondition, detail: str, code: str = "") -> None:
        """Shows the condition; sends its event if it is another one than before."""
        same = self._condition is condition
        self._shared_state.trouble = (
            NO_ERROR if not code else ERROR_CODES.index(code) if code in ERROR_CODES else 0
        )
        self._shared_state.condition = condition
        if not same:
            self._add_event(_EVENTS[condition], detail)
