"""Keeps idle broker sessions alive, and decides when that is hopeless.

- The broker cannot be reached or takes no further login for now: the worker tries again for ever, after five
  minutes by a fresh session process.
- The login fails otherwise, three times: the session process is replaced, too. In a process whose reconnect
  failed Shioaji may never come back, while a fresh one logs in at once (Sinotrade/Shioaji #221).
- A fresh process fails in the same way: the worker ends with the reason.
- A refused login is never tried again.
"""

from __future__ import annotations

import time
from collections.abc import Callable

from worker_runtime.process.log import Log
from worker_runtime.process.replacement import WorkerExit
from worker_runtime.process.shared_state import SharedState, WorkerActivity
from worker_runtime.protocol.errors import BerthError, BrokerError, RateLimited
from worker_runtime.protocol.launch import ExitCode
from worker_runtime.protocol.messages import WorkerEventKind
from worker_runtime.trading.account_session import AccountSession
from worker_runtime.trading.broker_sessions import LISTING_TIMEOUT, PING_TIMEOUT, BrokerSessions

#: Failed logins in a row after which this process is given up.
MAX_LOGIN_FAILURES = 3
#: Seconds of failing logins after which a process that had a session is given up. Its successor is not.
AWAY_LIMIT = 300.0
#: Seconds that one rebuild may take: more than Shioaji needs (1 to 6 s), less than a shutdown allows (10 s).
_REBUILD_TIMEOUT = 8.0


class SessionRecovery:
    def __init__(
        self,
        broker_sessions: BrokerSessions,
        *,
        shared_state: SharedState,
        add_event: Callable[[WorkerEventKind, str], None],
        log: Log,
        away_limit: float = AWAY_LIMIT,
    ) -> None:
        self._broker_sessions = broker_sessions
        self._shared_state = shared_state
        self._add_event = add_event
        self._log = log
        self._away_limit = away_limit

    def run_due(self, period: float) -> None:
        """Pings a session that was idle for `period` seconds, or rebuilds a dead one. Handles one account a
        call, so that an order waits for one ping at most. Raises `WorkerExit` when there is no hope."""
        self.raise_if_hopeless()
        now = time.monotonic()
        # All first, so that sessions that ended together make one event.
        for session in self._broker_sessions.account_sessions():
            self._broker_sessions.drop_if_ended(session)
        for session in self._broker_sessions.account_sessions():
            if session.broker is None:
                if session.refused is None and session.login_backoff.due():
                    self._recover(session)
                    return
            elif (session.suspect or now - session.used_at >= period) and session.ping_backoff.due():
                self._shared_state.state = WorkerActivity.HealthCheck
                self._ping(session)
                if session.broker is None:
                    self._recover(session)
                self._shared_state.state = self._broker_sessions.state()
                return
            elif not session.listed and session.listing_backoff.due():
                self._broker_sessions.relist(session, LISTING_TIMEOUT)
                return

    def left(self, period: float) -> float | None:
        """Seconds until `run_due` has something to do; None if never."""
        now = time.monotonic()
        waits = []
        for session in self._broker_sessions.account_sessions():
            if session.broker is None:
                if session.refused is None:
                    waits.append(session.login_backoff.left())
            elif session.suspect:
                waits.append(session.ping_backoff.left())
            elif not session.listed:
                waits.append(session.listing_backoff.left())
            else:
                waits.append(max(session.ping_backoff.left(), session.used_at + period - now))
        return min(waits, default=None)

    def raise_if_hopeless(self) -> None:
        """Raises `WorkerExit` if this process cannot get its broker sessions back."""
        sessions = self._broker_sessions.account_sessions()
        missing = [session for session in sessions if session.broker is None]
        if not missing:
            return
        spent = [session for session in missing if self._spent(session)]
        for session in spent:
            if session.was_open:
                reason = f"{session.name}: {_reason(session)}"
                raise WorkerExit(ExitCode.SESSION_REPLACE, reason)
        lost = [session for session in missing if session.refused is not None or session in spent]
        if len(lost) == len(sessions):
            reason = _reason(lost[0])
            self._add_event(WorkerEventKind.FAILED, reason)
            raise WorkerExit(ExitCode.BROKER_FAILED, reason)

    def _spent(self, session: AccountSession) -> bool:
        """Whether further tries of this process make no sense. A fresh process, which never had a session,
        either logs in at once or not at all."""
        if session.refused is not None:
            return False
        if not session.was_open:
            return session.failures > 0
        return session.failures >= MAX_LOGIN_FAILURES or session.failing_for() > self._away_limit

    def _ping(self, session: AccountSession) -> None:
        try:
            self._broker_sessions.ping(session, PING_TIMEOUT)
        except RateLimited:
            session.ping_backoff.failed()
        else:
            session.ping_backoff.reset()

    def _recover(self, session: AccountSession) -> None:
        """Rebuilds a session while nobody waits for it. A failure is logged and tried again."""
        self._shared_state.state = WorkerActivity.Reconnecting
        try:
            self._broker_sessions.rebuild(session, _REBUILD_TIMEOUT)
        except BerthError as error:
            self._log.warning("reconnect_failed", code=error.code, account=session.name)
        self._shared_state.state = self._broker_sessions.state()


def _reason(session: AccountSession) -> str:
    error = session.refused or session.error or BrokerError()
    return f"{error.code}: {error.detail}"
