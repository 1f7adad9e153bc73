"""The user's broker connections, kept under their `ConnectionKey` (requirement C1).

Everything here runs in the session's main thread, so that the lease is checked in the thread that calls.
No call may outlast the lease less its margin.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field
from threading import Thread

from worker_runtime.backoff import Backoff
from worker_runtime.board import Board, State
from worker_runtime.brokers.port import Broker, BrokerFactory, ConnectionKey
from worker_runtime.lease import Lease
from worker_runtime.log import Log
from worker_runtime.protocol.errors import (
    BerthError,
    BrokerError,
    BrokerUnreachable,
    LeaseLost,
    LoginRejected,
    UnknownAccount,
)
from worker_runtime.protocol.exchange import OrderChanged
from worker_runtime.protocol.messages import Credentials, SealedAccount, WorkerEventKind

#: Seconds that a health ping may take.
PING_TIMEOUT = 5.0


@dataclass(frozen=True, slots=True)
class Account:
    """One account with its credentials in clear."""

    key: ConnectionKey
    version: int
    credentials: Credentials = field(repr=False)

    @classmethod
    def of(cls, sealed: SealedAccount, credentials: Credentials) -> Account:
        key = ConnectionKey(sealed.broker, sealed.broker_type, sealed.simulation, sealed.account_id)
        return cls(key, sealed.version, credentials)


class _Connection:
    """One account's place: with a live broker session, or without."""

    def __init__(self, account: Account) -> None:
        self.account = account
        self.broker: Broker | None = None
        self.used_at = time.monotonic()
        #: A call ended without a clear answer: ping before the next use.
        self.suspect = False
        #: The broker refused these credentials: trying again could get the person banned.
        self.refused: LoginRejected | None = None
        self.backoff = Backoff(2.0, 60.0)


class Connections:
    """Opens, checks, rebuilds and closes the broker sessions of one user. Timeouts in seconds."""

    def __init__(
        self,
        load_factory: Callable[[], BrokerFactory],
        *,
        client: str,
        lease: Lease,
        board: Board,
        on_order: Callable[[ConnectionKey, OrderChanged], None],
        tell: Callable[[WorkerEventKind, str], None],
        log: Log,
    ) -> None:
        self._load_factory = load_factory
        self._client = client
        self._lease = lease
        self._board = board
        self._on_order = on_order
        self._tell = tell
        self._log = log
        self._connections: dict[str, _Connection] = {}

    def load(self, accounts: Iterable[Account]) -> None:
        """Takes over the accounts of a claim, unconnected."""
        self._connections = {account.key.account_id: _Connection(account) for account in accounts}

    def versions(self) -> dict[str, int]:
        """Version of the credentials in use, by account."""
        return {name: place.account.version for name, place in self._connections.items()}

    def connect_all(self, timeout: float) -> None:
        """Logs in wherever there is no session yet; the first error ends the attempt."""
        until = time.monotonic() + timeout
        for place in self._connections.values():
            if place.broker is None:
                place.broker = self._login(place.account, until - time.monotonic())
                place.used_at = time.monotonic()

    def ready(self, account_id: str, timeout: float) -> Broker:
        """A live session of this account, rebuilt first if need be.

        Raises `UnknownAccount`, `LeaseLost`, or the login's error: nothing has been sent then.
        """
        place = self._connections.get(account_id)
        if place is None:
            raise UnknownAccount
        until = time.monotonic() + timeout
        if place.suspect and place.broker is not None:
            self._ping(place, until - time.monotonic())
        if place.broker is None:
            self._rebuild(place, until - time.monotonic())
        if place.broker is None:
            raise BrokerUnreachable
        place.used_at = time.monotonic()
        return place.broker

    def suspect(self, account_id: str) -> None:
        """Marks a session whose last call had no clear answer: it is pinged before it is used again."""
        self._connections[account_id].suspect = True

    def invalidate(self, account_id: str, reason: str) -> None:
        """Closes a session that the broker has ended: the next need rebuilds it (requirement C2)."""
        self._drop(self._connections[account_id], reason)

    def tend(self, period: float) -> None:
        """Pings sessions that were idle for `period`, rebuilds dead ones. One account a call, so that an
        order waits for one ping at the most."""
        now = time.monotonic()
        for place in self._connections.values():
            if place.broker is None:
                if place.refused is None and place.backoff.due():
                    self._recover(place)
                    return
            elif place.suspect or now - place.used_at >= period:
                self._board.state = State.HealthCheck
                self._ping(place, PING_TIMEOUT)
                if place.broker is None:
                    self._recover(place)
                self._board.state = self.state()
                return

    def left(self, period: float) -> float | None:
        """Seconds until `tend` has something to do; None if never."""
        now = time.monotonic()
        waits = []
        for place in self._connections.values():
            if place.broker is None:
                if place.refused is None:
                    waits.append(place.backoff.left())
            elif place.suspect:
                waits.append(0.0)
            else:
                waits.append(max(0.0, place.used_at + period - now))
        return min(waits, default=None)

    def state(self) -> State:
        """`Active` if every account has a session, else `Reconnecting`."""
        whole = all(place.broker is not None for place in self._connections.values())
        return State.Active if whole else State.Reconnecting

    def replace(self, accounts: Iterable[Account], timeout: float) -> None:
        """New credentials: each is proven by a login before the old session is closed.

        Only accounts whose version changed are touched. After an error the old session of that account
        stays as it was; the first error is raised when all have been tried.
        """
        until = time.monotonic() + timeout
        first: BerthError | None = None
        for account in accounts:
            old = self._connections.get(account.key.account_id)
            if old is not None and old.account.version == account.version:
                continue
            try:
                broker = self._login(account, until - time.monotonic())
            except BerthError as error:
                first = first or error
                continue
            self._close(old.broker if old else None)
            new = _Connection(account)
            new.broker = broker
            self._connections[account.key.account_id] = new
        if first is not None:
            raise first

    def close_all(self) -> None:
        """Closes every session; the board says so when none is left open.

        All at once: a broker that does not answer costs a second, and the lease's margin is the same for
        one account and for ten.
        """
        closing: list[Thread] = []
        for place in self._connections.values():
            broker, place.broker = place.broker, None
            place.suspect = False
            if broker is not None:
                closing.append(Thread(target=self._close, args=(broker,), daemon=True))
                closing[-1].start()
        for thread in closing:
            thread.join()
        self._board.broker_open = 0

    def _login(self, account: Account, timeout: float) -> Broker:
        limit = min(timeout, self._lease.usable())
        if self._lease.usable() <= 0:
            raise LeaseLost
        if limit <= 0:
            raise BrokerUnreachable("no time was left to connect")
        key = account.key
        broker: Broker | None = None
        self._board.broker_open = 1  # before the attempt: it may succeed on the broker's side alone
        try:
            broker = self._load_factory()(key, self._client, lambda change: self._on_order(key, change))
            broker.login(account.credentials, limit)
        except BerthError:
            self._close(broker)
            raise
        except Exception as error:  # an adapter's surprise must not end the session
            self._close(broker)
            self._log.crash("login_crashed", error)
            raise BrokerError(f"the adapter failed with {type(error).__name__}") from None
        return broker

    def _ping(self, place: _Connection, timeout: float) -> None:
        """Checks a session; closes it if it is dead."""
        limit = min(timeout, PING_TIMEOUT, self._lease.usable())
        if place.broker is None or limit <= 0:
            return
        try:
            place.broker.ping(limit)
        except Exception as error:  # whatever it is: the session is not to be trusted
            self._drop(place, type(error).__name__)
            return
        place.suspect = False
        place.used_at = time.monotonic()

    def _drop(self, place: _Connection, reason: str) -> None:
        broker, place.broker = place.broker, None
        place.suspect = False
        if broker is None:
            return
        self._close(broker)
        self._tell(WorkerEventKind.DEGRADED, f"{place.account.key.account_id}: {reason}")

    def _rebuild(self, place: _Connection, timeout: float) -> None:
        if place.refused is not None:
            raise place.refused
        name = place.account.key.account_id
        self._tell(WorkerEventKind.RECONNECTING, name)
        try:
            place.broker = self._login(place.account, timeout)
        except LoginRejected as error:
            place.refused = error
            raise
        except BerthError:
            place.backoff.failed()
            raise
        place.backoff.reset()
        place.used_at = time.monotonic()
        self._tell(WorkerEventKind.CONNECTED, name)

    def _recover(self, place: _Connection) -> None:
        """Rebuilds without anyone waiting for it: an unreachable broker is logged and tried again (W6)."""
        self._board.state = State.Reconnecting
        try:
            self._rebuild(place, PING_TIMEOUT)
        except BerthError as error:
            self._log.warning("reconnect_failed", code=error.code, account=place.account.key.account_id)
            if not isinstance(error, LoginRejected):
                place.backoff.failed()
        self._board.state = self.state()

    def _close(self, broker: Broker | None) -> None:
        if broker is None:
            return
        try:
            broker.close()
        except Exception as error:  # the port forbids it; the other sessions must be closed all the same
            self._log.crash("close_crashed", error)
