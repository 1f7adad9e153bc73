"""Lists the orders and positions of an account at its broker, within the broker's limits."""

import time
from collections.abc import Callable

from worker_runtime.brokers.port import Broker, ConnectionKey
from worker_runtime.process.log import Log
from worker_runtime.process.shared_state import Lease, SharedState
from worker_runtime.protocol.errors import BerthError, RateLimited
from worker_runtime.trading.account_session import AccountSession
from worker_runtime.trading.broker_pauses import BrokerPauses
from worker_runtime.trading.rate_limiter import CallKind, SharedRateLimiter

#: Seconds that one listing of orders and positions may take.
LISTING_TIMEOUT_S = 5.0


class AccountLister:
    """Lists an account once, and notes in its session how that went.

    `reconcile(key, broker, timeout_s)` compares the broker's lists with the worker's own orders. It
    returns False if the positions could not be read.
    """

    def __init__(
        self,
        *,
        lease: Lease,
        shared_state: SharedState,
        rate_limiter: SharedRateLimiter,
        pauses: BrokerPauses,
        reconcile: Callable[[ConnectionKey, Broker, float], bool],
        log: Log,
    ) -> None:
        self._lease = lease
        self._shared_state = shared_state
        self._rate_limiter = rate_limiter
        self._pauses = pauses
        self._reconcile = reconcile
        self._log = log

    def list_account(self, session: AccountSession, timeout: float) -> BerthError | None:
        """Lists the orders once; keeps, logs and returns the error if that fails. Only a ping can
        tell that a session is dead."""
        if session.broker is None or min(timeout, self._lease.usable()) <= 0:
            return None
        until = time.monotonic() + timeout
        try:
            self._pauses.check(session.account)
            self._rate_limiter.spend(
                session.account, CallKind.QUERY, self._lease.wait_limit_of_call(timeout), cost=2
            )
        except BerthError as error:
            self._log.warning("listing_postponed", account=session.name, code=error.code)
            session.listing_failed(error.code, self._pauses.seconds_left(session.account))
            return error
        limit = min(until - time.monotonic(), LISTING_TIMEOUT_S, self._lease.usable())
        if limit <= 0:  # the wait for room took all of it
            return None
        try:
            with self._shared_state.busy(limit):
                positions_known = self._reconcile(session.account.key, session.broker, limit)
        except Exception as error:  # an adapter's fault must not end the session
            code = error.code if isinstance(error, BerthError) else type(error).__name__
            self._log.warning("listing_failed", account=session.name, code=code)
            known = error if isinstance(error, BerthError) else None
            self._pauses.note(session.account, known)
            session.listing_failed(code, self._pauses.seconds_left(session.account))
            session.suspect = not isinstance(error, RateLimited)  # a ping would be one call more
            return known
        session.listing_succeeded(positions_known)
        return None
