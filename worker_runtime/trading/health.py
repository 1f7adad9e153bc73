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


class HealthMonitor:
    """Checks all broker sessions after each change of one and reports what it means for the worker."""

    def __init__(self, shared_state: SharedState, add_event: Callable[[WorkerEventKind, str], None]) -> None:
        self._shared_state = shared_state
        self._add_event = add_event
        self._show(HealthCondition.NEW)
        shared_state.accounts = shared_state.accounts_connected = 0

    def update(self, sessions: Collection[AccountSession], detail: str = "") -> None:
        """Reports the worker's health if it has changed. `detail` goes with CONNECTED."""
        missing = [session for session in sessions if session.broker is None]
        waiting = [session for session in missing if session.refused is None]
        unlisted = [session for session in sessions if session.broker is not None and not session.listed]
        self._shared_state.accounts = len(sessions)
        self._shared_state.accounts_connected = len(sessions) - len(missing)
        some = len(missing) < len(sessions)
        # While others are connected, an account that never was (in this process) is tried again like one
        # away.
        away = [
            session
            for session in waiting
            if session.away or (some and session.error and not session.was_open)
        ]
        if away:
            code = away[0].error.code if away[0].error else ""
            self._degraded(f"{away[0].name}: {code}", code)
        elif waiting:
            self._reconnecting(f"{waiting[0].name}: {waiting[0].lost_because}")
        elif unlisted:
            self._degraded(f"{unlisted[0].name}: its orders cannot be listed", unlisted[0].listing_error)
        elif some:
            refused = ", ".join(session.name for session in missing)
            detail = f"without {refused}: {errors.LoginRejected.code}" if refused else detail
            self._well(detail, refused=bool(refused))

    def parked(self) -> None:
        """Reports that all broker sessions were closed because the lease is about to end."""
        self._shared_state.accounts_connected = 0
        code = errors.LeaseLost.code
        if self._condition is HealthCondition.NEW:
            return
        self._degraded("the lease was not renewed in time", code)

    @property
    def _condition(self) -> HealthCondition:
        return HealthCondition(self._shared_state.condition)

    def _well(self, detail: str, *, refused: bool) -> None:
        same = self._condition is HealthCondition.WELL
        self._show(HealthCondition.WELL, errors.LoginRejected.code if refused else "")
        if not same:
            self._add_event(WorkerEventKind.CONNECTED, detail)

    def _reconnecting(self, detail: str) -> None:
        if self._condition is HealthCondition.WELL:
            self._show(HealthCondition.RECONNECTING)
            self._add_event(WorkerEventKind.RECONNECTING, detail)

    def _degraded(self, detail: str, code: str) -> None:
        same = self._condition is HealthCondition.DEGRADED
        self._show(HealthCondition.DEGRADED, code)
        if not same:
            self._add_event(WorkerEventKind.DEGRADED, detail)

    def _show(self, condition: HealthCondition, code: str = "") -> None:
        self._shared_state.trouble = (
            NO_ERROR if not code else ERROR_CODES.index(code) if code in ERROR_CODES else 0
        )
        self._shared_state.condition = condition
