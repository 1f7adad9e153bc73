"""The one interface between the session and a broker."""

from __future__ import annotations

from collections.abc import Callable
from decimal import Decimal
from typing import NamedTuple, Protocol

from worker_runtime.protocol.exchange import Balance, ExchangeOrder, OrderChanged, Position
from worker_runtime.protocol.messages import Credentials, PlaceOrder


class ConnectionKey(NamedTuple):
    """What a broker connection is kept under (requirement C1)."""

    broker: str
    broker_type: str
    simulation: bool
    account_id: str


class Listing(NamedTuple):
    """An account's orders as the broker showed them, and what it proves that others are not among them."""

    orders: list[ExchangeOrder]
    #: Every order that the broker took so many seconds before the answer, or earlier, is listed. None: orders
    #: may be missing at any time, as where sessions do not see those of others: absence proves nothing.
    behind: float | None = None
    #: Older orders, taken more than so many seconds before the answer, may be missing.
    reaches: float = 0.0
    #: Positions asked for after this list show at least its fills. False: they come from other books, which
    #: may learn of a fill later.
    positions_agree: bool = False


#: Called from any thread, with each change of an order that the broker reports.
OnOrderChanged = Callable[[OrderChanged], None]


class Broker(Protocol):
    """One logged-in session with a broker. Calls block; each takes its timeout in seconds.

    Errors: `LoginRejected` (never try again), `LoginLimited`, `BrokerUnreachable`, `SessionDown` (nothing was
    sent), `OrderRejected`, `RateLimited` and `BrokerMaintenance` (nothing was done), and `OutcomeUnknown` for
    everything after an order, a cancel or a change may have left this process without a clear answer.
    """

    def login(self, credentials: Credentials, timeout: float) -> None: ...

    def place(self, order: PlaceOrder, timeout: float) -> ExchangeOrder:
        """Submits once. Never retries."""
        ...

    def queries_before_change(self, broker_order_id: str) -> bool:
        """Whether a cancel or a change of this order asks the broker for its state before: one query more,
        which Shioaji counts among the orders, too. No I/O."""
        ...

    def cancel(self, broker_order_id: str, timeout: float) -> ExchangeOrder:
        """Takes a working order back, once; returns the order as far as the broker has told. Raises
        `OrderRejected` if there is no such working order."""
        ...

    def replace(
        self, broker_order_id: str, quantity: int | None, price: Decimal | None, timeout: float
    ) -> ExchangeOrder:
        """Changes a working order, once: a smaller total quantity (lots), or another price; None: unchanged.

        Returns the order as it stands after it. Raises `OrderRejected` if it cannot be changed so.
        """
        ...

    def orders(self, timeout: float) -> Listing:
        """Today's orders of this account, with what the broker itself says of how complete that is."""
        ...

    def positions(self, timeout: float) -> list[Position]: ...

    def balance(self, timeout: float) -> Balance: ...

    def ping(self, timeout: float) -> None:
        """Raises if the session is no longer alive."""
        ...

    def alive(self) -> bool:
        """False as soon as this adapter knows that its session has ended; True says nothing for certain.

        Asked before each order and once a second: no I/O, never raises.
        """
        ...

    def close(self) -> None:
        """Logs out, within a second; never raises, may be called twice."""
        ...


class BrokerFactory(Protocol):
    """Makes an unconnected `Broker`; the one place that knows all adapters is `brokers/registry.py`."""

    def __call__(self, key: ConnectionKey, client: str, on_order: OnOrderChanged) -> Broker: ...
