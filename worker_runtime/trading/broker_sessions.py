"""Opens, checks, rebuilds and closes the user's broker sessions.

Everything here runs in the session's main thread, so that the lease is checked in the thread that
calls. No call may outlast the lease less its margin, and the shared state says how long each may
take. Timeouts are seconds.
"""

import math
import time
from collections.abc import Collection, Iterable
from dataclasses import KW_ONLY, dataclass, field, replace

from worker_runtime.brokers.port import Broker, KeepsToken
from worker_runtime.process.log import Log
from worker_runtime.process.shared_state import Lease, SharedState, WorkerActivity
from worker_runtime.protocol.errors import (
    BerthError,
    BrokerMaintenance,
    BrokerUnreachable,
    LeaseLost,
    LoginLimited,
    LoginRejected,
    RateLimited,
    UnknownAccount,
    from_code,
)
from worker_runtime.trading.account_lister import AccountLister
from worker_runtime.trading.account_session import AccountSession, OpenedAccount
from worker_runtime.trading.broker_pauses import BrokerPauses
from worker_runtime.trading.health import HealthMonitor
from worker_runtime.trading.login_attempts import LoginAttempts
from worker_runtime.trading.rate_limiter import CallKind, SharedRateLimiter

#: Seconds that a health ping may take.
PING_TIMEOUT_S = 5.0
#: Seconds that a connect waits for other accounts after one that connected: most are as quick.
_NEXT_LOGIN_TIMEOUT_S = 0.2
#: Seconds after its begin that a login of another account is waited for: more than most need (1 to
#: 6 s).
_OTHER_LOGIN_TIMEOUT_S = 5.0
#: Seconds that the end waits for logins under way in other threads.
_LOGIN_END_TIMEOUT_S = 1.0


@dataclass(eq=False, repr=False)
class BrokerSessions:
    """Holds the sessions of the user's accounts: logs in, checks, rebuilds, replaces and closes."""

    attempts: LoginAttempts
    _: KW_ONLY
    lease: Lease
    shared_state: SharedState
    health: HealthMonitor
    rate_limiter: SharedRateLimiter
    pauses: BrokerPauses
    lister: AccountLister
    login_pause: float
    log: Log
    _account_sessions: dict[str, AccountSession] = field(default_factory=dict, init=False)

    @property
    def loaded(self) -> bool:
        """Returns True if there are credentials.

        A fresh session has none until the orchestrator sends them.
        """
        return bool(self._account_sessions)

    def find(self, account_id: str) -> AccountSession | None:
        """Returns the user's account of this name."""
        return self._account_sessions.get(account_id)

    def has_other_session(self, account_id: str) -> bool:
        """Returns True if another account has a session."""
        return any(
            session.broker for session in self.account_sessions() if session.name != account_id
        )

    def account_sessions(self) -> Collection[AccountSession]:
        """Returns one session for each account, connected or not."""
        return self._account_sessions.values()

    def load(self, accounts: Iterable[OpenedAccount]) -> None:
        """Sets the accounts of a claim, unconnected."""
        self._account_sessions = {
            account.key.account_id: AccountSession(account, self.login_pause)
            for account in accounts
        }

    def versions(self) -> dict[str, int]:
        """Returns the version of the credentials in use, by account."""
        return {name: session.account.version for name, session in self._account_sessions.items()}

    def connect_all(self, timeout: float) -> None:
        """Logs in to every account without a session, to several at once. Returns when one has a
        session: the others continue. Raises an error if none gets one, preferably a retryable
        one."""
        until = time.monotonic() + timeout
        missing = [
            session
            for session in self.account_sessions()
            if session.broker is None and session.refused is None and not session.limited
        ]
        for session in missing:
            self._begin(session, until - time.monotonic(), here=len(missing) == 1)
        last = until
        while self.attempts.under_way and (seconds_left := last - time.monotonic()) > 0:
            self.collect_logins(seconds_left)
            if self._connected():
                last = min(last, time.monotonic() + _NEXT_LOGIN_TIMEOUT_S)
        for session in missing:
            self.lister.list_account(session, until - time.monotonic())
        if not self._connected():
            errors = [
                session.error or session.refused or BrokerUnreachable()
                for session in self.account_sessions()
            ]
            raise min(errors, key=lambda error: not error.retryable)

    def collect_logins(self, wait: float = 0.0) -> bool:
        """Takes up logins that have ended in their threads; waits up to `wait` seconds for the
        first one."""
        any_login = False
        while self.attempts.under_way:
            with self.shared_state.busy(wait):
                session = self.attempts.collect(0.0 if any_login else wait)
            if session is None:
                break
            any_login = True
            if session.broker is None:
                self.rate_limiter.release_connections([session.account])
                self.pauses.note(session.account, session.error)
            self._show_open()
        return any_login

    def _show_open(self) -> None:
        """Shows whether a session is open or may open. A login under way may succeed: the
        supervisor ends it with the lease."""
        self.shared_state.broker_open = int(self._connected() or self.attempts.under_way > 0)

    def retry(self, session: AccountSession, timeout: float, at_most: float = math.inf) -> None:
        """Tries a login again, in at most `at_most` seconds after the wait for room within the
        limits; in its own thread while other accounts have a session. Raises its error, or the last
        one at once where another try would do harm."""
        if session.refused is not None:
            raise session.refused
        if session.limited and session.error is not None:
            raise from_code(
                session.error.code,
                session.error.detail,
                retry_after=session.login_backoff.seconds_until_due(),
            )
        until = time.monotonic() + timeout
        try:
            if self.has_other_session(session.name):
                return self._begin(session, timeout)
            session.opened(self._login(session.account, timeout, at_most))
            self.lister.list_account(session, min(until - time.monotonic(), at_most))
        except BerthError as error:
            session.failed(error)
            raise
        finally:
            self.health.update(self.account_sessions(), session.name)

    def _connected(self) -> bool:
        return any(session.broker for session in self.account_sessions())

    def _begin(self, session: AccountSession, timeout: float, *, here: bool = False) -> None:
        """Begins a login in its own thread, or makes it `here`.

        Waits for room only if nobody else would.
        """
        wait = 0.0 if self._connected() or self.attempts.under_way else timeout
        try:
            if here:
                session.opened(self._login(session.account, timeout))
            else:
                self.attempts.begin(session, self._reserve(session.account, timeout, wait))
        except BerthError as error:
            session.failed(error)

    def ensure_session(
        self, account_id: str, timeout: float, *, at_most: float = math.inf, listed: bool = True
    ) -> Broker:
        """Returns a live session of this account, rebuilt if necessary, with its orders listed if
        `listed`.

        Waits up to `timeout` for room within the broker's limits, and then up to `at_most` for a
        login. If another account has a session, waits only for a login that has just begun, and
        fails at once if the last login failed. Raises `UnknownAccount`, `LeaseLost`, `RateLimited`,
        `BrokerMaintenance` in a pause that the broker has asked for, or the login's error; no order
        has been sent then.
        """
        session = self._account_sessions.get(account_id)
        if session is None:
            raise UnknownAccount
        until = time.monotonic() + timeout
        self.drop_if_ended(session)
        if session.broker is not None:
            self.pauses.check(session.account)
        if session.suspect:
            self.ping(session, until - time.monotonic())
        self._await_login(session, until, at_most)
        if listed:
            self._await_listing(session, until, at_most)
        if session.broker is None:
            raise session.error or BrokerUnreachable()
        session.used_at = time.monotonic()
        return session.broker

    def _await_login(self, session: AccountSession, until: float, at_most: float) -> None:
        """Begins the login that the account lacks, and waits for one under way, at most `at_most`
        seconds: see `ensure_session`. Raises if no session can be had in time."""
        others = [
            other.changed_at
            for other in self.account_sessions()
            if other.broker and other is not session
        ]
        if session.broker is None and session.attempt is None:
            if others and session.error is not None and max(others) < session.changed_at:
                raise session.error
            self.retry(session, until - time.monotonic(), at_most)
        begun_lately = session.changed_at + _OTHER_LOGIN_TIMEOUT_S if others else math.inf
        last_try = min(until, time.monotonic() + at_most, begun_lately)
        while session.attempt is not None:
            if not self.collect_logins(last_try - time.monotonic()):
                raise BrokerUnreachable("the login of this account is under way")
            self.health.update(self.account_sessions(), session.name)

    def relist(self, session: AccountSession, timeout: float) -> BerthError | None:
        """Tries again to list the orders and positions of a live session; returns the error."""
        error = self.lister.list_account(session, timeout)
        self.health.update(self.account_sessions(), session.name)
        return error

    def session(self, account_id: str) -> AccountSession:
        """Returns the session object of an account that was loaded (`load`), connected or not."""
        return self._account_sessions[account_id]

    def renew_leases(self) -> None:
        """Renews the leases of the person's broker connections when due."""
        self.rate_limiter.renew_connections(
            [session.account for session in self.account_sessions() if session.broker is not None]
        )

    def drop_if_ended(self, *sessions: AccountSession) -> None:
        """Drops sessions that have ended, as their adapters know, or as the broker's record says:
        a session beyond its life is not tried with an order.

        All that ended together make one event.
        """
        ended = [
            session
            for session in sessions
            if session.broker is not None and (session.has_outlived or not session.broker.alive())
        ]
        for session in ended:
            if session.has_outlived:
                _forget_token(session.broker)
            self.drop(session, "the broker ended the session", tell=session is ended[-1])

    def renew(self, session: AccountSession, timeout: float) -> None:
        """Logs in anew while the session still lives, then closes it: its end is near.

        The new session is opened next to the old one, on a second connection. If the person has
        none that is free, the old session is closed first, but only once there is room for the
        login. Raises the login's error: on a second connection the old session is kept. Call it
        while no call of the account is under way.
        """
        old, account = session.broker, session.account
        if old is None:
            return
        self.pauses.check(account)
        second = replace(account, on_second_connection=not account.on_second_connection)
        until = time.monotonic() + timeout
        try:
            limit = self._reserve(second, timeout, 0.0)
        except LoginLimited:
            self._renew_in_place(session, old, until - time.monotonic())
        else:
            _forget_token(old)
            session.opened_anew(second, self._open_reserved(second, limit))
            self._end(old, account)
        self.log.info("broker_session_renewed", account=session.name)
        self.lister.list_account(session, until - time.monotonic())

    def _renew_in_place(self, session: AccountSession, old: Broker, timeout: float) -> None:
        account = session.account
        until = time.monotonic() + timeout
        self.rate_limiter.spend(account, CallKind.LOGIN, self.lease.wait_limit_of_call(0.0))
        limit = min(until - time.monotonic(), self.lease.usable())
        if limit <= 0:
            raise LeaseLost
        _forget_token(old)
        session.lost("its end is near")
        self.attempts.close(old)
        session.opened(self._open_reserved(account, limit))

    def ping(self, session: AccountSession, timeout: float) -> None:
        """Checks a session; closes it if it is dead. Raises `RateLimited` if no query may be made
        in time, and `BrokerMaintenance` while the broker wants a pause: the session is kept."""
        if session.broker is None or min(timeout, self.lease.usable()) <= 0:
            return
        until = time.monotonic() + timeout
        self.pauses.check(session.account)
        self.rate_limiter.spend(
            session.account, CallKind.QUERY, self.lease.wait_limit_of_call(timeout)
        )
        limit = min(until - time.monotonic(), PING_TIMEOUT_S, self.lease.usable())
        if limit <= 0:
            return
        try:
            with self.shared_state.busy(limit):
                session.broker.ping(limit)
        except Exception as error:  # whatever it is, the session cannot be trusted
            if isinstance(error, BrokerMaintenance) and error.retry_after:
                # Another login would be one call more, and each may extend the pause.
                self.pauses.note(session.account, error)
                raise
            self.drop(session, type(error).__name__)
            return
        session.suspect = False
        session.used_at = time.monotonic()

    def state(self) -> WorkerActivity:
        """Returns `Active` if an account has a session."""
        return WorkerActivity.Active if self._connected() else WorkerActivity.Reconnecting

    def replace(self, accounts: Collection[OpenedAccount], timeout: float) -> None:
        """Takes new credentials: each logs in before the old session is closed.

        Tries accounts whose version changed and those without a session. An account whose login
        fails keeps its old session; the first error is raised when all have been tried, but not
        that of an account whose credentials are the same while others have a session. To a fresh
        session all accounts are new.
        """
        until = time.monotonic() + timeout
        errors: list[BerthError] = []
        tried = {account.key.account_id for account in accounts}
        if not self._account_sessions:  # these are its accounts, even if the logins fail
            self.load(accounts)
            accounts = ()
            try:
                self.connect_all(timeout)
            except BerthError as error:
                errors.append(error)
        for account in accounts:
            try:
                self._renew(account, until - time.monotonic())
            except BerthError as error:
                errors.append(error)
        for session in self.account_sessions():
            if session.broker is None and session.refused is None and session.name not in tried:
                try:
                    self.retry(session, until - time.monotonic())
                except BerthError as error:
                    errors += [] if self.has_other_session(session.name) else [error]
        self.health.update(self.account_sessions(), "new credentials")
        if errors:
            raise errors[0]

    def close_all(self) -> None:
        """Closes every session; the shared state says so when none is left open."""
        held = [
            session
            for session in self.account_sessions()
            if session.broker is not None or session.attempt is not None
        ]
        self.attempts.close(*[session.lost("closed") for session in self.account_sessions()])
        until = time.monotonic() + _LOGIN_END_TIMEOUT_S
        while self.attempts.under_way and until > time.monotonic():
            self.collect_logins(until - time.monotonic())
        self._show_open()
        self.rate_limiter.release_connections([session.account for session in held])

    def _renew(self, account: OpenedAccount, timeout: float) -> None:
        name = account.key.account_id
        old = self._account_sessions.get(name)
        if old is not None and old.account.version == account.version:
            # It may be counted under other names now.
            second = old.account.on_second_connection
            old.account = replace(account, on_second_connection=second)
            return
        if old is not None:
            old.attempt = None  # whatever comes of it is closed
        new = AccountSession(account, self.login_pause)
        until = time.monotonic() + timeout
        try:
            new.opened(self._login(account, timeout))
        except BerthError as error:
            # There is no session to keep: the new credentials are tried again.
            if old is None or old.broker is None:
                new.failed(error)
                self._account_sessions[name] = new
            elif isinstance(error, LoginRejected):
                old.rejected = account.version, error
            raise
        if old is not None and old.broker is not None:
            self._end(old.broker, old.account)
        self._account_sessions[name] = new
        self.lister.list_account(new, until - time.monotonic())

    def _login(self, account: OpenedAccount, timeout: float, at_most: float = math.inf) -> Broker:
        return self._open_reserved(account, min(self._reserve(account, timeout, timeout), at_most))

    def _open_reserved(self, account: OpenedAccount, limit: float) -> Broker:
        """Logs in with the room that was taken; gives the connection back if that fails."""
        try:
            with self.shared_state.busy(limit):
                return self.attempts.open(account, limit)
        except BerthError as error:
            self.rate_limiter.release_connections([account])
            self.pauses.note(account, error)
            raise

    def _reserve(self, account: OpenedAccount, timeout: float, wait: float) -> float:
        """Takes the room for one login, after at most `wait`; returns the seconds it may take."""
        until = time.monotonic() + timeout
        if self.lease.usable() <= 0:
            raise LeaseLost
        if timeout <= 0:
            raise BrokerUnreachable("no time was left to connect")
        if (pause := self.pauses.seconds_left(account)) > 0:
            raise LoginLimited("the broker has asked for a pause", retry_after=pause)
        self.rate_limiter.connect(account, self.lease.wait_limit_of_call(wait))
        limit = min(until - time.monotonic(), self.lease.usable())
        if limit <= 0:
            self.rate_limiter.release_connections([account])
            raise LoginLimited("no time was left to connect after the wait for the budget")
        self.shared_state.broker_open = (
            1  # before the attempt, which may succeed at the broker alone
        )
        return limit

    def _await_listing(self, session: AccountSession, until: float, at_most: float) -> None:
        """Tries for `at_most` seconds, besides the wait for room, until the orders are listed.
        Raises `BrokerUnreachable` after that, and at once `RateLimited` if there is no room in
        time, and `BrokerMaintenance` if the broker wants a pause."""
        last_try = min(until, time.monotonic() + at_most)
        while session.broker is not None and not session.listed:
            seconds_left = last_try - time.monotonic()
            if seconds_left <= 0:
                raise BrokerUnreachable(
                    f"the orders at the broker are not known yet: {session.listing_error}"
                )
            wait = min(seconds_left, session.listing_backoff.seconds_until_due())
            if wait > 0:
                with self.shared_state.busy(wait):
                    time.sleep(wait)
            if session.suspect:
                self.ping(session, until - time.monotonic())
            error = self.relist(session, until - time.monotonic())
            if isinstance(error, RateLimited) or (
                error and self.pauses.seconds_left(session.account)
            ):
                raise error

    def drop(self, session: AccountSession, reason: str, *, tell: bool = True) -> None:
        """Closes a session that has ended. The next call that needs it rebuilds it."""
        broker = session.lost(reason)
        if broker is not None:
            self._end(broker, session.account)
            self.log.warning("broker_session_lost", account=session.name, reason=reason)
            if tell:
                self.health.update(self.account_sessions())

    def _end(self, broker: Broker | None, account: OpenedAccount) -> None:
        self.attempts.close(broker)
        self.rate_limiter.release_connections([account])


def _forget_token(broker: Broker | None) -> None:
    """Has the connection's next login ask for a new token: one of the session that ends would end
    with it."""
    if isinstance(broker, KeepsToken):
        broker.forget_token()
