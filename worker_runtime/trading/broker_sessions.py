"""Opens, checks, rebuilds and closes the user's broker sessions.

Everything here runs in the session's main thread, so that the lease is checked in the thread that calls. No
call may outlast the lease less its margin, and the shared state says how long each may take. Timeouts are
seconds.
"""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Collection, Iterable
from threading import Thread

from worker_runtime.brokers.port import Broker, BrokerFactory, ConnectionKey
from worker_runtime.process.log import Log
from worker_runtime.process.shared_state import Lease, SharedState, WorkerActivity
from worker_runtime.protocol.errors import (
    BerthError,
    BrokerError,
    BrokerUnreachable,
    LeaseLost,
    LoginLimited,
    LoginRejected,
    RateLimited,
    UnknownAccount,
)
from worker_runtime.protocol.exchange import OrderChanged
from worker_runtime.trading.account_session import AccountSession, OpenedAccount
from worker_runtime.trading.health import HealthMonitor
from worker_runtime.trading.rate_limiter import CallKind, RateLimiter, WaitLimit

#: Seconds that a health ping may take.
PING_TIMEOUT = 5.0
#: Seconds that one listing of orders and positions may take.
LISTING_TIMEOUT = 5.0


class BrokerSessions:
    def __init__(
        self,
        load_factory: Callable[[], BrokerFactory],
        *,
        client: str,
        lease: Lease,
        shared_state: SharedState,
        health: HealthMonitor,
        rate_limiter: RateLimiter,
        on_order: Callable[[ConnectionKey, OrderChanged], None],
        reconcile: Callable[[ConnectionKey, Broker, float], None],
        login_pause: float,
        log: Log,
    ) -> None:
        self._load_factory = load_factory
        self._client = client
        self._lease = lease
        self._shared_state = shared_state
        self._health = health
        self._rate_limiter = rate_limiter
        self._on_order = on_order
        self._reconcile = reconcile
        self._login_pause = login_pause
        self._log = log
        self._account_sessions: dict[str, AccountSession] = {}

    @property
    def loaded(self) -> bool:
        """Whether there are credentials. A fresh session has none until the orchestrator sends them."""
        return bool(self._account_sessions)

    def is_settled(self, account_id: str) -> bool:
        """Whether this account has a session with its orders listed, or its login was refused, for good."""
        session = self._account_sessions.get(account_id)
        if session is None:
            return False
        return session.refused is not None or (session.broker is not None and session.listed)

    def has_other_session(self, account_id: str) -> bool:
        """Whether another account has a session."""
        return any(
            session.broker is not None for session in self.account_sessions() if session.name != account_id
        )

    def account_sessions(self) -> Collection[AccountSession]:
        """One for each account, connected or not."""
        return self._account_sessions.values()

    def load(self, accounts: Iterable[OpenedAccount]) -> None:
        """Sets the accounts of a claim, unconnected."""
        self._account_sessions = {
            account.key.account_id: AccountSession(account, self._login_pause) for account in accounts
        }

    def versions(self) -> dict[str, int]:
        """Version of the credentials in use, by account."""
        return {name: session.account.version for name, session in self._account_sessions.items()}

    def connect_all(self, timeout: float) -> None:
        """Logs in to every account without a session; raises the first error. A failed listing is tried again
        before the first request."""
        until = time.monotonic() + timeout
        for session in self._account_sessions.values():
            if session.broker is None:
                session.opened(self._login(session.account, until - time.monotonic()))
                self._list(session, until - time.monotonic())

    def ensure_session(
        self, account_id: str, timeout: float, *, at_most: float = math.inf, listed: bool = True
    ) -> Broker:
        """A live session of this account, rebuilt if necessary, with its orders listed if `listed`.

        Waits up to `timeout` for room within the broker's limits, and then up to `at_most` for a login.
        Raises `UnknownAccount`, `LeaseLost`, `RateLimited` or the login's error; no order has been sent then.
        """
        session = self._account_sessions.get(account_id)
        if session is None:
            raise UnknownAccount
        until = time.monotonic() + timeout
        self.drop_if_ended(session)
        if session.suspect:
            self.ping(session, until - time.monotonic())
        if session.broker is None:
            self.rebuild(session, until - time.monotonic(), at_most)
        if listed:
            self._await_listing(session, until, at_most)
        if session.broker is None:
            raise BrokerUnreachable
        session.used_at = time.monotonic()
        return session.broker

    def relist(self, session: AccountSession, timeout: float) -> BerthError | None:
        """Tries again to list the orders of a live session; returns the error, if it failed."""
        error = self._list(session, timeout)
        self._health.update(self.account_sessions(), session.name)
        return error

    def session(self, account_id: str) -> AccountSession:
        """Call it only for an account that has had a session."""
        return self._account_sessions[account_id]

    def renew_leases(self) -> None:
        """Renews the leases of the person's broker connections when due."""
        self._rate_limiter.renew_connections(
            [session.account for session in self.account_sessions() if session.broker is not None]
        )

    def drop_if_ended(self, session: AccountSession) -> None:
        """Drops a session that has ended, as its adapter knows."""
        if session.broker is not None and not session.broker.alive():
            self.drop(session, "the broker ended the session")

    def ping(self, session: AccountSession, timeout: float) -> None:
        """Checks a session; closes it if it is dead. Raises `RateLimited` if no query may be made in time."""
        if session.broker is None or min(timeout, self._lease.usable()) <= 0:
            return
        until = time.monotonic() + timeout
        self._rate_limiter.spend(session.account, CallKind.QUERY, self._patience(timeout))
        limit = min(until - time.monotonic(), PING_TIMEOUT, self._lease.usable())
        if limit <= 0:
            return
        try:
            with self._shared_state.busy(limit):
                session.broker.ping(limit)
        except Exception as error:  # whatever it is, the session cannot be trusted
            self.drop(session, type(error).__name__)
            return
        session.suspect = False
        session.used_at = time.monotonic()

    def rebuild(self, session: AccountSession, timeout: float, at_most: float = math.inf) -> None:
        """Logs in once, in at most `at_most` seconds after the wait for room within the limits. Raises the
        login's error, or the last one at once where another try would do harm."""
        if session.refused is not None:
            raise session.refused
        if session.limited and session.error is not None:
            raise LoginLimited(session.error.detail, retry_after=session.login_backoff.left())
        until = time.monotonic() + timeout
        try:
            session.opened(self._login(session.account, timeout, at_most))
            self._list(session, min(until - time.monotonic(), at_most))
        except BerthError as error:
            session.failed(error)
            raise
        finally:
            self._health.update(self.account_sessions(), session.name)

    def state(self) -> WorkerActivity:
        """`Active` unless an account that could have a session is without one."""
        missing = [session for session in self.account_sessions() if session.broker is None]
        whole = all(session.refused for session in missing) and len(missing) < len(self._account_sessions)
        return WorkerActivity.Active if whole else WorkerActivity.Reconnecting

    def replace(self, accounts: Collection[OpenedAccount], timeout: float) -> None:
        """Takes new credentials: each logs in before the old session is closed.

        Tries accounts whose version changed and those without a session. An account whose login fails keeps
        its old session; the first error is raised when all have been tried.

        To a fresh session all accounts are new, and the worker goes on with those that connect. Then it
        raises an error only if that is retryable or if no account connected.
        """
        until = time.monotonic() + timeout
        errors: list[BerthError] = []
        tried: set[str] = set()
        fresh = not self._account_sessions
        if fresh:  # these are its accounts, even if the logins fail
            self.load(accounts)
            accounts = ()
        for account in accounts:
            tried.add(account.key.account_id)
            try:
                self._renew(account, until - time.monotonic())
            except BerthError as error:
                errors.append(error)
        for session in self.account_sessions():
            if session.broker is None and session.name not in tried:
                try:
                    self.rebuild(session, until - time.monotonic())
                except BerthError as error:
                    errors.append(error)
        self._health.update(self.account_sessions(), "new credentials")
        if fresh:
            retryable = [error for error in errors if error.retryable]
            some = any(session.broker for session in self.account_sessions())
            errors = retryable or ([] if some else errors)
        if errors:
            raise errors[0]

    def close_all(self) -> None:
        """Closes every session; the shared state says so when none is left open.

        Closes all at once: a broker that does not answer costs a second, and the lease's margin does not grow
        with the number of accounts.
        """
        closing: list[Thread] = []
        closed: list[OpenedAccount] = []
        for session in self._account_sessions.values():
            if (broker := session.lost("closed")) is not None:
                closed.append(session.account)
                closing.append(Thread(target=self._close, args=(broker,), daemon=True))
                closing[-1].start()
        for thread in closing:
            thread.join()
        self._shared_state.broker_open = 0
        self._rate_limiter.release_connections(closed)

    def _renew(self, account: OpenedAccount, timeout: float) -> None:
        name = account.key.account_id
        old = self._account_sessions.get(name)
        if old is not None and old.account.version == account.version:
            return
        new = AccountSession(account, self._login_pause)
        until = time.monotonic() + timeout
        try:
            new.opened(self._login(account, timeout))
        except LoginRejected:
            raise
        except BerthError as error:
            if old is not None and old.broker is None:  # nothing to keep: the new credentials are tried again
                new.failed(error)
                self._account_sessions[name] = new
            raise
        if old is not None and old.broker is not None:
            self._end(old.broker, old.account)
        self._account_sessions[name] = new
        self._list(new, until - time.monotonic())

    def _login(self, account: OpenedAccount, timeout: float, at_most: float = math.inf) -> Broker:
        if self._lease.usable() <= 0:
            raise LeaseLost
        if timeout <= 0:
            raise BrokerUnreachable("no time was left to connect")
        until = time.monotonic() + timeout
        self._rate_limiter.connect(account, self._patience(timeout))
        limit = min(until - time.monotonic(), self._lease.usable(), at_most)
        if limit <= 0:
            self._rate_limiter.release_connections([account])
            raise LoginLimited("no time was left to connect after the wait for the budget")
        key = account.key
        broker: Broker | None = None
        self._shared_state.broker_open = 1  # before the attempt, which may succeed at the broker alone
        try:
            with self._shared_state.busy(limit):
                broker = self._load_factory()(key, self._client, lambda change: self._on_order(key, change))
                broker.login(account.credentials, limit)
        except BerthError:
            self._end(broker, account)
            raise
        except Exception as error:  # an adapter's fault must not end the session
            self._end(broker, account)
            self._log.crash("login_crashed", error)
            raise BrokerError(f"the adapter failed with {type(error).__name__}") from None
        return broker

    def _await_listing(self, session: AccountSession, until: float, at_most: float) -> None:
        """Tries for `at_most` seconds, besides the wait for room, until the orders are listed. Raises
        `BrokerUnreachable` after that, and `RateLimited` at once if there is no room in time."""
        last_try = min(until, time.monotonic() + at_most)
        while session.broker is not None and not session.listed:
            left = last_try - time.monotonic()
            if left <= 0:
                raise BrokerUnreachable(
                    f"the orders at the broker are not known yet: {session.listing_error}"
                )
            wait = min(left, session.listing_backoff.left())
            if wait > 0:
                with self._shared_state.busy(wait):
                    time.sleep(wait)
            if session.suspect:
                self.ping(session, until - time.monotonic())
            error = self.relist(session, until - time.monotonic())
            if isinstance(error, RateLimited):
                raise error

    def _list(self, session: AccountSession, timeout: float) -> BerthError | None:
        """Lists the orders once; keeps, logs and returns the error if that fails. Only a ping can tell that a
        session is dead."""
        if session.broker is None or min(timeout, self._lease.usable()) <= 0:
            return None
        until = time.monotonic() + timeout
        try:
            self._rate_limiter.spend(session.account, CallKind.QUERY, self._patience(timeout), cost=2)
        except BerthError as error:
            self._log.warning("listing_postponed", account=session.name, code=error.code)
            session.listing_failed(error.code)
            return error
        limit = min(until - time.monotonic(), LISTING_TIMEOUT, self._lease.usable())
        if limit <= 0:  # the wait for room took all of it
            return None
        try:
            with self._shared_state.busy(limit):
                self._reconcile(session.account.key, session.broker, limit)
        except Exception as error:  # an adapter's fault must not end the session
            code = error.code if isinstance(error, BerthError) else type(error).__name__
            self._log.warning("listing_failed", account=session.name, code=code)
            session.listing_failed(code)
            session.suspect = not isinstance(error, RateLimited)  # a ping would be one call more
            return error if isinstance(error, BerthError) else None
        session.listed = True
        session.listing_backoff.reset()
        return None

    def drop(self, session: AccountSession, reason: str) -> None:
        """Closes a session that has ended. The next call that needs it rebuilds it."""
        broker = session.lost(reason)
        if broker is not None:
            self._end(broker, session.account)
            self._log.warning("broker_session_lost", account=session.name, reason=reason)
            self._health.update(self.account_sessions())

    def _patience(self, seconds: float) -> WaitLimit:
        """Seconds that a call may wait for room, out of `seconds` from now; 0 when the lease is not
        renewed."""
        until = time.monotonic() + seconds
        return lambda: until - time.monotonic() if self._lease.usable() > 0 else 0.0

    def _end(self, broker: Broker | None, account: OpenedAccount) -> None:
        self._close(broker)
        self._rate_limiter.release_connections([account])

    def _close(self, broker: Broker | None) -> None:
        if broker is None:
            return
        try:
            broker.close()
        except Exception as error:  # the port forbids it, but the other sessions must be closed anyway
            self._log.crash("close_crashed", error)
