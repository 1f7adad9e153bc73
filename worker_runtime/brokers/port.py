"""The one interface between the session and a broker."""

from __future__ import annotations

from collections.abc import Callable
from typing import NamedTuple, Protocol

from worker_runtime.protocol.exchange import ExchangeOrder, OrderChanged, Position
from worker_runtime.protocol.messages import Credentials, PlaceOrder


class ConnectionKey(NamedTuple):
    """What a broker connection is kept under (requirement C1)."""

    broker: str
    broker_type: str
    simulation: bool
    account_id: str


#: Called from any thread, with each change of an order that the broker reports.
OnOrderChanged = Callable[[OrderChanged], None]


class Broker(Protocol):
    """One logged-in session with a broker. Calls block; each takes its timeout in seconds.

    Errors: `LoginRejected` (never try again), `LoginLimited`, `BrokerUnreachable`, `SessionDown` (nothing
    was sent), `OrderRejected`, and `OutcomeUnknown` for everything after an order may have left this
    process without a clear answer.
    """

    def login(self, credentials: Credentials, timeout: float) -> None: ...

    def place(self, order: PlaceOrder, timeout: float) -> ExchangeOrder:
        """Submits once. Never retries."""
        ...

    def orders(self, timeout: float) -> list[ExchangeOrder]:
        """Today's orders of this account."""
        ...

    def positions(self, timeout: float) -> list[Position]: ...

    def ping(self, timeout: float) -> None:
        """Raises if the session is no longer alive."""
        ...

    def close(self) -> None:
        """Logs out, within a second; never raises, may be called twice."""
        ...


class BrokerFactory(Protocol):
    """Makes an unconnected `Broker`; the one place that knows all adapters is `brokers/registry.py`."""

    def __call__(self, key: ConnectionKey, client: str, on_order: OnOrderChanged) -> Broker: ...
