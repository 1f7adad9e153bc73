"""Keeps idle broker sessions alive, and decides when that is hopeless.

- The broker cannot be reached or takes no further login for now: the worker tries again for ever,
  after five minutes by a fresh session process.
- The login fails otherwise, three times: the session process is replaced, too. In a process whose
  reconnect failed Shioaji may never come back, while a fresh one logs in at once (Sinotrade/Shioaji
  #221).
- A fresh process fails in the same way: the worker ends with the reason.
- A refused login is never tried again.
"""

import time
from dataclasses import KW_ONLY, dataclass

from worker_runtime.process.clock import wall_ms
from worker_runtime.process.log import Log
from worker_runtime.process.replacement import WorkerExit
from worker_runtime.process.shared_state import SharedState, WorkerActivity
from worker_runtime.protocol.errors import BerthError, BrokerError, BrokerMaintenance, RateLimited
from worker_runtime.protocol.launch import ExitCode
from worker_runtime.protocol.messages import WorkerEventKind
from worker_runtime.trading.account_lister import LISTING_TIMEOUT_S
from worker_runtime.trading.account_session import AccountSession
from worker_runtime.trading.broker_sessions import PING_TIMEOUT_S, BrokerSessions
from worker_runtime.trading.health import AddWorkerEvent, logins_of

#: Failed logins in a row after which this process is given up.
MAX_LOGIN_FAILURES = 3
#: Seconds of failing logins after which a process that had a session is given up. Its successor,
#: which has had none, is not.
MAX_AWAY_S = 300.0
#: Seconds without a request after which sessions of other accounts may be closed for one that needs
#: a fresh process.
MIN_QUIET_S = 60.0
#: Seconds that one rebuild may take: more than Shioaji needs (1 to 6 s), less than a shutdown
#: allows (10 s).
_REBUILD_TIMEOUT_S = 8.0


@dataclass(eq=False, repr=False)
class SessionRecovery:
    broker_sessions: BrokerSessions
    _: KW_ONLY
    shared_state: SharedState
    add_event: AddWorkerEvent
    log: Log
    away_limit: float = MAX_AWAY_S

    def run_due(self, period: float) -> None:
        """Pings a session that was idle for `period` seconds, renews one whose life ends soon, or
        rebuilds a dead one. Handles one account a call, so that an order waits for one of these at
        most. Raises `WorkerExit` when there is no hope."""
        self.raise_if_hopeless()
        now = time.monotonic()
        quiet_s = (wall_ms() - self.shared_state.last_activity_ms) / 1000
        self.broker_sessions.drop_if_ended(*self.broker_sessions.account_sessions())
        for session in self.broker_sessions.account_sessions():
            if session.broker is None:
                if (
                    session.attempt is None
                    and session.refused is None
                    and session.login_backoff.due()
                ):
                    self._recover(session)
                    return
            elif session.renewal_due(quiet_s):
                self._renew(session)
                return
            elif (
                session.suspect or now - session.used_at >= period
            ) and session.ping_backoff.due():
                self.shared_state.state = WorkerActivity.HealthCheck
                self._ping(session)
                if session.broker is None:
                    self._recover(session)
                self.shared_state.state = self.broker_sessions.state()
                return
            elif session.seconds_until_relisting() <= 0:
                self.broker_sessions.relist(session, LISTING_TIMEOUT_S)
                return

    def seconds_until_due(self, period: float) -> float | None:
        """Returns the seconds until `run_due` has something to do; None if never."""
        now = time.monotonic()
        waits = []
        for session in self.broker_sessions.account_sessions():
            if session.broker is None:
                if session.attempt is None and session.refused is None:
                    waits.append(session.login_backoff.seconds_until_due())
            elif session.suspect:
                waits.append(session.ping_backoff.seconds_until_due())
            else:
                ping = max(session.ping_backoff.seconds_until_due(), session.used_at + period - now)
                waits += [session.seconds_until_relisting(), ping, session.seconds_until_renewal()]
        return min(waits, default=None)

    def raise_if_hopeless(self) -> None:
        """Raises `WorkerExit` if this process cannot get its broker sessions back."""
        sessions = self.broker_sessions.account_sessions()
        missing = [session for session in sessions if session.broker is None]
        if not missing:
            return
        spent = [session for session in missing if self._spent(session)]
        quiet = wall_ms() - self.shared_state.last_activity_ms >= MIN_QUIET_S * 1000
        for session in spent:
            if session.was_open and (
                quiet or not self.broker_sessions.has_other_session(session.name)
            ):
                reason = f"{session.name}: {_reason(session)}"
                raise WorkerExit(ExitCode.SESSION_REPLACE, reason)
        given_up = [
            session for session in missing if session.refused is not None or session in spent
        ]
        if len(given_up) == len(sessions):
            reason = _reason(given_up[0])
            self.add_event(WorkerEventKind.FAILED, reason, logins_of(sessions))
            raise WorkerExit(ExitCode.BROKER_FAILED, reason)

    def _spent(self, session: AccountSession) -> bool:
        """Returns True if further tries of this process make no sense. A fresh process, which never
        had a session, either logs in at once or not at all."""
        if session.refused is not None:
            return False
        if not session.was_open:
            return session.failures > 0
        return session.failures >= MAX_LOGIN_FAILURES or session.failing_for() > self.away_limit

    def _ping(self, session: AccountSession) -> None:
        try:
            self.broker_sessions.ping(session, PING_TIMEOUT_S)
        except (RateLimited, BrokerMaintenance) as error:
            session.ping_backoff.failed(error.retry_after or 0.0)
        else:
            session.ping_backoff.reset()

    def _renew(self, session: AccountSession) -> None:
        """Renews a session ahead of its end. A failure is logged and tried again."""
        self.shared_state.state = WorkerActivity.HealthCheck
        try:
            self.broker_sessions.renew(session, _REBUILD_TIMEOUT_S)
        except BerthError as error:
            self.log.warning("renewal_failed", code=error.code, account=session.name)
            if session.broker is None:
                session.failed(error)
            else:
                session.renewal_failed(error)
        sessions = self.broker_sessions.account_sessions()
        self.broker_sessions.health.update(sessions, session.name)
        self.shared_state.state = self.broker_sessions.state()

    def _recover(self, session: AccountSession) -> None:
        """Rebuilds a session while nobody waits for it. A failure is logged and tried again."""
        self.shared_state.state = WorkerActivity.Reconnecting
        try:
            self.broker_sessions.retry(session, _REBUILD_TIMEOUT_S)
        except BerthError as error:
            self.log.warning("reconnect_failed", code=error.code, account=session.name)
        self.shared_state.state = self.broker_sessions.state()


def _reason(session: AccountSession) -> str:
    error = session.refused or session.error or BrokerError()
    return f"{error.code}: {error.detail}"
