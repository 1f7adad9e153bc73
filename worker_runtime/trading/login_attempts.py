"""Logs in to brokers: in the session's main thread, or for several accounts at once, each in its
own thread.

Room within the broker's limits is taken before, in the main thread, which alone may use the client
of Valkey. The lease is checked in the thread that calls the SDK (invariant *one-owner*), and no
login may outlast it.
"""

import time
from collections.abc import Callable
from dataclasses import KW_ONLY, dataclass, field
from functools import partial
from queue import Empty, SimpleQueue
from threading import Thread

from worker_runtime.brokers.port import Broker, BrokerFactory, ConnectionKey
from worker_runtime.process.log import Log
from worker_runtime.process.shared_state import Lease
from worker_runtime.protocol.broker_reports import OrderChanged
from worker_runtime.protocol.errors import BerthError, BrokerError, LeaseLost
from worker_runtime.trading.account_session import AccountSession, OpenedAccount, apply_min_pause


@dataclass(eq=False, repr=False)
class LoginAttempts:
    load_factory: Callable[[], BrokerFactory]
    _: KW_ONLY
    #: Names this worker in the exchange's ledger.
    client: str
    lease: Lease
    on_order: Callable[[ConnectionKey, OrderChanged], None]
    wake: Callable[[], None]
    log: Log
    _ended: SimpleQueue[tuple[AccountSession, object, Broker | BerthError]] = field(
        default_factory=SimpleQueue, init=False
    )
    #: Threads whose result was not collected yet.
    under_way: int = field(default=0, init=False)

    def open(self, account: OpenedAccount, limit: float) -> Broker:
        """Logs in, within `limit` seconds, in any thread. Raises the login's error."""
        broker: Broker | None = None
        try:
            if self.lease.usable() <= 0:
                raise LeaseLost
            broker = self.load_factory()(
                account.key, self.client, partial(self.on_order, account.key)
            )
            broker.login(account.credentials, limit)
        except Exception as error:  # an adapter's fault must not end the session
            self.close(broker)
            if isinstance(error, BerthError):
                apply_min_pause(account.key, error)
                raise
            self.log.crash("login_crashed", error)
            raise BrokerError(f"the adapter failed with {type(error).__name__}") from None
        return broker

    def begin(self, session: AccountSession, limit: float) -> None:
        """Begins a login in its own thread, for which room was taken."""
        session.attempt, session.changed_at = (attempt := object()), time.monotonic()
        self.under_way += 1
        Thread(target=self._run, args=(session, attempt, limit), daemon=True).start()

    def _run(self, session: AccountSession, attempt: object, limit: float) -> None:
        try:
            self._ended.put((session, attempt, self.open(session.account, limit)))
        except BerthError as error:
            self._ended.put((session, attempt, error))
        self.wake()

    def collect(self, wait: float = 0.0) -> AccountSession | None:
        """Returns the account of the next login that has ended, with its session or its error;
        waits up to `wait` seconds for one. Closes a session that nobody wants any more."""
        try:
            session, attempt, result = self._ended.get(block=wait > 0, timeout=max(wait, 0.0))
        except Empty:
            return None
        self.under_way -= 1
        if isinstance(result, BerthError):
            if session.attempt is attempt:
                session.failed(result)
        elif session.attempt is attempt:
            session.opened(result)
        else:
            self.close(result)
        return session

    def close(self, *brokers: Broker | None) -> None:
        """Closes broker sessions, all at once: a broker that does not answer costs a second, and
        the lease's margin does not grow with the number of accounts. Never raises."""
        closing = [
            Thread(target=self._close, args=(broker,), daemon=True)
            for broker in brokers
            if broker is not None
        ]
        for thread in closing:
            thread.start()
        for thread in closing:
            thread.join()

    def _close(self, broker: Broker) -> None:
        try:
            broker.close()
        except Exception as error:
            # The port forbids it, but the other sessions must be closed anyway.
            self.log.crash("close_crashed", error)
