"""Keeps the broker sessions alive while nobody waits for them, and decides when that is hopeless.

- The broker cannot be reached, or takes no further login for now: tried again for ever, the worker stays.
- The login fails otherwise, three times: this process's SDK does not come back, so a fresh process is
  asked for. The same if the broker seems away for five minutes: Shioaji is known to fail so in a process
  whose reconnect has failed, while a fresh one logs in at once (Sinotrade/Shioaji #221).
- A fresh process fails in the same way: the worker ends, and says why.
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
#: Seconds of failing logins after which a process that had a session is given up; its successor is not.
AWAY_LIMIT = 300.0
#: Seconds one rebuild may take: more than Shioaji needs (1 to 6 s), less than a shutdown allows (10 s).
_REBUILD_TIMEOUT = 8.0


class SessionRecovery:
    """Health checks and rebuilds of one user's connections."""

    def __init__(
        self,
        connections: BrokerSessions,
        *,
        board: SharedState,
        tell: Callable[[WorkerEventKind, str], None],
        log: Log,
        away_limit: float = AWAY_LIMIT,
    ) -> None:
        self._connections = connections
        self._shared_state = board
        self._tell = tell
        self._log = log
        self._away_limit = away_limit

    def run_due(self, period: float) -> None:
        """Pings sessions that were idle for `period` seconds, rebuilds dead ones. One account a call, so
        that an order waits for one ping at the most. Raises `WorkerExit` when all of it is in vain."""
        self.judge()
        now = time.monotonic()
        for place in self._connections.places():
            self._connections.notice(place)  # all first: what ended together is told as one change
        for place in self._connections.places():
            if place.broker is None:
                if place.refused is None and place.wait() <= 0:
                    self._recover(place)
                    return
            elif (place.suspect or now - place.used_at >= period) and place.ping_wait() <= 0:
                self._shared_state.state = WorkerActivity.HealthCheck
                self._ping(place)
                if place.broker is None:
                    self._recover(place)
                self._shared_state.state = self._connections.state()
                return
            elif not place.listed and place.listing_wait() <= 0:
                self._connections.relist(place, LISTING_TIMEOUT)
                return

    def left(self, period: float) -> float | None:
        """Seconds until `run_due` has something to do; None if never."""
        now = time.monotonic()
        waits = []
        for place in self._connections.places():
            if place.broker is None:
                if place.refused is None:
                    waits.append(place.wait())
            elif place.suspect:
                waits.append(place.ping_wait())
            elif not place.listed:
                waits.append(place.listing_wait())
            else:
                waits.append(max(place.ping_wait(), place.used_at + period - now))
        return min(waits, default=None)

    def judge(self) -> None:
        """Raises `WorkerExit` if this process will have no broker session any more."""
        places = self._connections.places()
        missing = [place for place in places if place.broker is None]
        if not missing:
            return
        spent = [place for place in missing if self._spent(place)]
        for place in spent:
            if place.was_open:
                reason = f"{place.name}: {_reason(place)}"
                raise WorkerExit(ExitCode.SESSION_REPLACE, reason)
        lost = [place for place in missing if place.refused is not None or place in spent]
        if len(lost) == len(places):
            self._fail(_reason(lost[0]))

    def _spent(self, place: AccountSession) -> bool:
        """Whether further tries of this process make no sense. One that never had a session is fresh: it
        either logs in at once or not at all."""
        if place.refused is not None:
            return False
        if not place.was_open:
            return place.failures > 0
        return place.failures >= MAX_LOGIN_FAILURES or place.failing_for() > self._away_limit

    def _fail(self, reason: str) -> None:
        self._tell(WorkerEventKind.FAILED, reason)
        raise WorkerExit(ExitCode.BROKER_FAILED, reason)

    def _ping(self, place: AccountSession) -> None:
        try:
            self._connections.ping(place, PING_TIMEOUT)
        except RateLimited:
            place.ping_postponed()
        else:
            place.pinged()

    def _recover(self, place: AccountSession) -> None:
        """Rebuilds without anyone waiting for it: an unreachable broker is logged and tried again (W6)."""
        self._shared_state.state = WorkerActivity.Reconnecting
        try:
            self._connections.rebuild(place, _REBUILD_TIMEOUT)
        except BerthError as error:
            self._log.warning("reconnect_failed", code=error.code, account=place.name)
        self._shared_state.state = self._connections.state()


def _reason(place: AccountSession) -> str:
    error = place.refused or place.error or BrokerError()
    return f"{error.code}: {error.detail}"
