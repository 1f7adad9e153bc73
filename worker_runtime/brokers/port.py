"""The interface between the session and a broker, in types of its own.

An adapter imports from here and from `worker_runtime/protocol/errors.py`, and nothing else of
Berth. What its broker sends stays in the adapter.
"""

from collections.abc import Callable, Iterable, Mapping, Sequence
from decimal import Decimal
from typing import NamedTuple, Protocol, runtime_checkable

from worker_runtime.protocol.broker_reports import Balance, BrokerOrder, OrderChanged, Position
from worker_runtime.protocol.instruments import Instrument, InstrumentKind, PriceStep
from worker_runtime.protocol.messages import FINAL_ORDER_STATES, Credentials, Fill, OrderState
from worker_runtime.protocol.order_terms import (
    OpenClose,
    OrderCondition,
    OrderLot,
    PriceType,
    Side,
    TimeInForce,
)
from worker_runtime.protocol.requests import ConfirmedQuantityChange, QuantityMeaning

__all__ = [
    "FINAL_ORDER_STATES",
    "AdapterFactory",
    "Balance",
    "Broker",
    "BrokerFactory",
    "BrokerOrder",
    "BrokerOrderTerms",
    "ConfirmedQuantityChange",
    "ConnectionKey",
    "Credentials",
    "Fill",
    "Instrument",
    "InstrumentKind",
    "KeepsToken",
    "Listing",
    "ListsInstruments",
    "OnOrderChanged",
    "OpenClose",
    "OrderChanged",
    "OrderCondition",
    "OrderLot",
    "OrderState",
    "Position",
    "PriceStep",
    "PriceType",
    "QuantityMeaning",
    "Side",
    "TimeInForce",
    "UsesCertificate",
]


class ConnectionKey(NamedTuple):
    broker: str
    broker_type: str
    simulation: bool
    #: Ours.
    account_id: str
    #: The broker's own id of the account, if that is another one.
    number: str = ""

    @property
    def at_broker(self) -> str:
        """Returns the account's id as the broker knows it."""
        return self.number or self.account_id


class BrokerOrderTerms(Protocol):
    """A new order as an adapter gets it.
    It has more fields, which are none of the broker's business."""

    @property
    def order_id(self) -> str:
        """Returns Berth's id of the order, for an adapter's own log. A broker that keeps a tag gets
        `tag`."""

    @property
    def symbol(self) -> str: ...

    @property
    def side(self) -> Side: ...

    @property
    def quantity(self) -> int:
        """Lots; of an odd lot shares."""

    @property
    def price_type(self) -> PriceType: ...

    @property
    def price(self) -> Decimal | None:
        """Returns the limit price; None unless `price_type` is `LIMIT`."""

    @property
    def time_in_force(self) -> TimeInForce: ...

    @property
    def lot(self) -> OrderLot: ...

    @property
    def condition(self) -> OrderCondition: ...

    @property
    def open_close(self) -> OpenClose: ...

    @property
    def tag(self) -> str:
        """Returns Berth's short id of the order at the broker, which its lists and events should
        bring back."""


class Listing(NamedTuple):
    """An account's orders as the broker showed them, and what their absence proves."""

    orders: list[BrokerOrder]
    #: Orders that the broker took this many seconds before the answer, or earlier, are listed.
    #: None: absence proves nothing, as where a session does not see the orders of others.
    behind: float | None = None
    #: Orders taken more than this many seconds before the answer may be missing.
    reaches: float = 0.0
    #: Whether positions asked for after this list include its fills.
    #: False where they come from other books.
    positions_agree: bool = False


#: Called from any thread, with each change of an order that the broker reports.
OnOrderChanged = Callable[[OrderChanged], None]


class Broker(Protocol):
    """One logged-in session with a broker. Calls block; each takes its timeout in seconds.

    Errors: `LoginRejected` (never try again), `LoginLimited`, `BrokerUnreachable`, `SessionDown`
    (nothing was sent), `OrderRejected`, `RateLimited` and `BrokerMaintenance` (nothing was done),
    and `OutcomeUnknown` for everything after an order, a cancel or a change may have left this
    process without a clear answer.

    A broker that wants no call for a while asks for a pause: raise `LoginLimited`,
    `BrokerMaintenance` or, where the call may have had its effect, `OutcomeUnknown` with its
    seconds as `retry_after`. The record's `cool_down_s` is the shortest pause.
    """

    def login(self, credentials: Credentials, timeout: float) -> None: ...

    def place(self, order: BrokerOrderTerms, timeout: float) -> BrokerOrder:
        """Submits once. Never retries."""

    def queries_before_change(self, broker_order_id: str, *, quantity: bool = False) -> bool:
        """Returns True if a cancel or change of this order, or of its `quantity`, first queries its
        state, which Shioaji counts as an order, too. No I/O."""

    def reference_price(self, symbol: str) -> Decimal | None:
        """Returns the price from which today's limits count; None if it is not known within half a
        second. Never raises."""

    def cancel(self, broker_order_id: str, timeout: float) -> BrokerOrder:
        """Cancels a working order, once; returns it as the broker reports it. Raises
        `OrderRejected` if there is no such working order."""

    def replace(
        self,
        broker_order_id: str,
        quantity: int | None,
        price: Decimal | None,
        timeout: float,
        confirmed: Sequence[ConfirmedQuantityChange] = (),
    ) -> BrokerOrder:
        """Changes a working order, once, to a smaller total quantity (lots) or another price; None:
        unchanged. Returns the changed order. Raises `OrderRejected` if it cannot be changed so.

        `confirmed`: what quantity changes are known to mean. A broker that needs it, and finds
        nothing for this order, raises `QuantityChangeUnconfirmed`."""

    def orders(self, timeout: float) -> Listing:
        """Returns today's orders of this account, and how complete the list is."""

    def positions(self, timeout: float) -> list[Position]: ...

    def balance(self, timeout: float) -> Balance: ...

    def ping(self, timeout: float) -> None:
        """Raises if the session is no longer alive."""

    def alive(self) -> bool:
        """Returns False as soon as this adapter knows that its session has ended; True proves
        nothing. Called before each order and once a second: does no I/O and never raises."""

    def close(self) -> None:
        """Logs out, within a second; never raises, may be called twice."""


@runtime_checkable
class UsesCertificate(Protocol):
    """A broker whose orders are signed with a certificate of the user."""

    def certificate_ends_ms(self) -> int:
        """Returns the Unix ms at which the session's certificate expires; 0 if there is none, or if
        that is not known."""


@runtime_checkable
class KeepsToken(Protocol):
    """A broker whose next login may reuse the token of an earlier one of the same connection."""

    def forget_token(self) -> None:
        """Has the next login of this connection ask for a new token, since the session's life ends
        (`[session]` in the record). This session stays as it is. No I/O; never raises."""


@runtime_checkable
class ListsInstruments(Protocol):
    """A broker that tells which instruments can be traded, and how. Without it the broker's record
    says what symbols mean."""

    def instruments(self, timeout: float) -> Iterable[Instrument]:
        """Yields all instruments that an account of this connection can trade today, each code
        once, in any order. Changes nothing at the broker.

        The session calls this in a thread of its own, a few times a day at most, while orders are
        placed from another one. A generator is better than a list: the session pauses between
        instruments, so that Python runs the orders' thread. `timeout`: seconds that one wait for
        the broker may take.

        An instrument that breaks the bounds of `Instrument` is left out and counted. Raises
        `InstrumentsUnavailable` if the broker lists none yet, or only a part, as in the early
        morning: nobody may take that for a list from which the others have vanished. Otherwise
        `SessionDown`, `BrokerUnreachable`, `RateLimited` or `BrokerMaintenance`."""


class AdapterFactory(Protocol):
    """Makes a broker session. A record's `adapter` names it. Called in a session process, in any
    thread; does no I/O."""

    def __call__(
        self,
        key: ConnectionKey,
        client: str,
        on_order: OnOrderChanged,
        options: Mapping[str, str],
    ) -> Broker:
        """Returns an unconnected session. `client` names the worker, for a broker's
        own log; `options` are the operator's for this broker
        (`BERTH_BROKER_OPTIONS`). Raises `BrokerError`."""


#: Makes an unconnected `Broker` for a connection and a client (see `create_broker`).
BrokerFactory = Callable[[ConnectionKey, str, OnOrderChanged], Broker]
