"""Makes the broker calls of a request: how long they may take, and what their failures mean.

Lease and deadline are checked in this thread right before each call (invariant *one-owner*).
"""

import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import KW_ONLY, dataclass, field
from typing import TypeVar

from msgspec.structs import replace

from worker_runtime.brokers.port import Broker
from worker_runtime.process.log import Log
from worker_runtime.process.shared_state import Lease, SharedState
from worker_runtime.protocol.errors import (
    BerthError,
    BrokerMaintenance,
    BrokerUnreachable,
    DeadlineExceeded,
    Fenced,
    LeaseLost,
    LoginLimited,
    LoginRejected,
    OrderRejected,
    OutcomeUnknown,
    RateLimited,
    SessionDown,
)
from worker_runtime.protocol.messages import Answer
from worker_runtime.trading.account_session import AccountSession
from worker_runtime.trading.broker_sessions import BrokerSessions
from worker_runtime.trading.queue_item import QueueItem
from worker_runtime.trading.rate_limiter import CallKind, SharedRateLimiter

#: Errors which say that a call changed nothing at the broker (see `brokers/port.py`).
_NO_EFFECT_ERRORS = (
    OrderRejected,
    SessionDown,
    LoginRejected,
    LoginLimited,
    RateLimited,
    BrokerMaintenance,
)
#: Errors after which the session is still good; another login would only use up the login limit.
#: After `BrokerMaintenance` a ping has to show whether it is.
_SESSION_KEEPING_ERRORS = (OrderRejected, RateLimited)

#: Seconds between two checks of the switch.
_SWITCH_CHECK_INTERVAL_S = 0.1

T = TypeVar("T")


@dataclass(eq=False, repr=False)
class BrokerCalls:
    broker_sessions: BrokerSessions
    rate_limiter: SharedRateLimiter
    _: KW_ONLY
    lease: Lease
    shared_state: SharedState
    broker_timeout: float
    log: Log
    #: Nanoseconds that the present request has spent at the broker.
    _spent_ns: int = field(default=0, init=False)

    def ensure_session(self, account_id: str, item: QueueItem, *, listed: bool = True) -> Broker:
        """Returns a live session of the account. Raises if there is none by the request's deadline
        or within the broker timeout; no order was sent then."""
        self.call_timeout(item)
        return self.broker_sessions.ensure_session(
            account_id, item.seconds_left(), at_most=self.broker_timeout, listed=listed
        )

    def has_other_session(self, account_id: str) -> bool:
        """Returns True if another account of the user has a session."""
        return self.broker_sessions.has_other_session(account_id)

    def session(self, account_id: str) -> AccountSession:
        """Returns the session object of an account that was loaded (`load`), connected or not."""
        return self.broker_sessions.session(account_id)

    def note_pause(self, account_id: str, error: BerthError) -> None:
        """Takes the pause for which the broker may ask with this error of a call."""
        self.broker_sessions.pauses.note(self.session(account_id).account, error)

    def call_timeout(self, item: QueueItem) -> float:
        """Returns the seconds that a broker call may take now.

        Raises `Fenced`, `LeaseLost` or `DeadlineExceeded`.
        """
        if self.shared_state.fenced:
            raise Fenced
        lease = self.lease.usable()
        if lease <= 0:
            raise LeaseLost
        remaining = item.seconds_left()
        if remaining <= 0:
            raise DeadlineExceeded
        return min(remaining, lease, self.broker_timeout)

    @property
    def grant_is_fresh(self) -> bool:
        """Returns True if what `spend_budget` granted last may still be sent."""
        return self.rate_limiter.grant_is_fresh()

    def add_measures(self, answer: Answer) -> Answer:
        """Adds to the answer to the present request the time that the broker took."""
        spent_us, self._spent_ns = self._spent_ns // 1000, 0
        if not spent_us:
            return answer
        return replace(answer, broker_us=spent_us, limit_used=self.rate_limiter.limit_used)

    def await_next_check(self, item: QueueItem) -> None:
        """Sleeps a moment before another check of the switch. Raises as `call_timeout` does."""
        wait = min(_SWITCH_CHECK_INTERVAL_S, self.call_timeout(item))
        with self.shared_state.busy(wait):
            time.sleep(wait)

    def spend_budget(self, account_id: str, kind: CallKind, item: QueueItem) -> None:
        """Waits for room within the broker's limits. Raises `RateLimited` if there is none in time,
        `CountUnavailable` if Valkey cannot count, and whatever forbids the call meanwhile."""

        def wait_limit() -> float:
            self.call_timeout(item)
            return item.seconds_left()

        self.rate_limiter.spend(self.session(account_id).account, kind, wait_limit)

    def spend_budget_now(self, account_id: str, kind: CallKind) -> None:
        """Takes room within the broker's limits only if it is free now, so that queued orders do
        not wait. Raises as `spend_budget` does."""
        self.rate_limiter.spend(self.session(account_id).account, kind, lambda: 0.0)

    def call_once(self, account_id: str, item: QueueItem, call: Callable[[float], T]) -> T:
        """Makes a call that changes something at the broker, once; `call` takes its timeout in
        seconds.

        Raises `OutcomeUnknown` if it may have had its effect; any other `BerthError` means that it
        had none.
        """
        timeout = self.call_timeout(item)
        session = self.session(account_id)
        try:
            with self.shared_state.busy(timeout), self._timed():
                return call(timeout)
        except _NO_EFFECT_ERRORS as error:
            self.note_pause(account_id, error)
            if isinstance(error, BrokerMaintenance):
                session.suspect = True
            elif not isinstance(error, _SESSION_KEEPING_ERRORS):
                self.broker_sessions.drop(session, error.code)
            raise
        except Exception as error:  # a timeout, a lost connection, a fault in the adapter
            session.suspect = True
            if isinstance(error, OutcomeUnknown):
                self.note_pause(account_id, error)
                error.retry_after = None  # after the pause, too, nobody may send it again
                raise
            if not isinstance(error, BerthError):
                self.log.crash("broker_call_crashed", error)
            raise OutcomeUnknown(f"the call ended with {type(error).__name__}") from None

    @contextmanager
    def _timed(self) -> Iterator[None]:
        began = time.monotonic_ns()
        try:
            yield
        finally:
            self._spent_ns += time.monotonic_ns() - began

    def query(self, account_id: str, item: QueueItem, call: Callable[[float], T]) -> T:
        """Waits for room within the limits, then makes a read-only call.

        Raises the broker's error.
        """
        self.spend_budget(account_id, CallKind.QUERY, item)
        timeout = self.call_timeout(item)
        session = self.session(account_id)
        try:
            with self.shared_state.busy(timeout), self._timed():
                return call(timeout)
        except BerthError as error:
            self.note_pause(account_id, error)
            if not isinstance(error, RateLimited):  # a ping would be one call more
                session.suspect = True
            raise
        except Exception as error:  # a fault in the adapter
            session.suspect = True
            self.log.crash("broker_call_crashed", error)
            raise BrokerUnreachable(f"the call ended with {type(error).__name__}") from None
