"""Defines what the suite needs of the other side of a broker, and helpers of its tests."""

from __future__ import annotations

import itertools
import threading
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from decimal import Decimal
from pathlib import Path
from typing import Any, Protocol

from worker_runtime.brokers.port import (
    Broker,
    BrokerOrder,
    ConfirmedQuantityChange,
    Credentials,
    OnOrderChanged,
    OrderChanged,
    OrderState,
    PriceType,
    Side,
    TimeInForce,
)
from worker_runtime.protocol.broker_record import QuantityChange
from worker_runtime.protocol.messages import PlaceOrder

_numbers = itertools.count(1)
API_KEY, SECRET_KEY = "anApiKey1234", "aSecretKey1234"
#: Seconds that a machine may stand still.
MAX_STANDSTILL_S = 3.5
CREDENTIALS = Credentials(
    api_key=API_KEY, secret_key=SECRET_KEY, ca_certificate=b"certificate", ca_password="password"
)


@dataclass(frozen=True)
class BookedOrder:
    """Describes an order as the other side has it in its ledger. `note`: Berth's order id, if it
    keeps that."""

    note: str
    tag: str
    state: OrderState


@dataclass(frozen=True)
class StageFacts:
    """Says what orders of the suite look like."""

    #: At least five symbols that nobody else trades on the stage.
    symbols: Sequence[str]
    #: A step of prices that all symbols take up to 200 steps.
    tick: Decimal
    currency: str
    #: Connections that an account may have.
    connections: int
    #: Folders or files of the adapter's source.
    sources: Sequence[Path]
    #: Value of one lot at a price of 1, as the stage counts it.
    lot_value: Decimal = Decimal(1)
    #: The values that the broker takes for limit orders, as its record says; those that may not
    #: rest are tried.
    times_in_force: Sequence[TimeInForce] = tuple(TimeInForce)
    #: The value that the suite's market orders have.
    market_time_in_force: TimeInForce = TimeInForce.ROD
    #: False: a session lists its own orders only, as the record says of the stage's system
    #: (`lists.all_sessions`, or `all_sessions_in_simulation`).
    all_sessions: bool = True
    #: As in the record. With `UNSUPPORTED` the suite changes prices only.
    quantity_change: QuantityChange = QuantityChange.NEW_TOTAL

    @property
    def changes_quantities(self) -> bool:
        return self.quantity_change is not QuantityChange.UNSUPPORTED

    def price(self, steps: int) -> Decimal:
        """Return a price of N steps."""
        return self.tick * steps

    def market_order(self, symbol_number: int, **terms: Any) -> PlaceOrder:
        """Return a market order for one of the symbols, as this broker takes it."""
        return order(
            symbol=self.symbols[symbol_number],
            time_in_force=self.market_time_in_force,
            **terms,
        )


class BrokerStage(Protocol):
    """The adapter under test, and its broker's other side:
    a stand-in, or a test system of the broker.

    A test that needs a method which your stage does not have fails, and names it.
    """

    @property
    def facts(self) -> StageFacts: ...

    @property
    def confirmed(self) -> Sequence[ConfirmedQuantityChange]:
        """Returns what quantity changes are known to mean, for a broker that wants to know."""
        ...

    def register(self, account: str, api_key: str, secret_key: str) -> None:
        """Open an account with these keys at the broker."""
        ...

    def broker(self, account: str, on_order: OnOrderChanged) -> Broker:
        """Make an unconnected session, as the adapter's factory does."""
        ...

    def other_system(self, account: str, on_order: OnOrderChanged) -> Broker | None:
        """Make an unconnected session of the broker's other system, which has none of the stage's
        accounts: by a key whose `simulation` is the other one, with the same options. None if the
        broker has one system only."""
        ...

    def set_price(self, symbol: str, price: Decimal) -> None:
        """Move the market; orders that it crosses are filled."""
        ...

    def reject_next(self, account: str, reason: str) -> None:
        """Reject the account's next order with these words."""
        ...

    def drop_next(self, account: str) -> None:
        """Take the next order, and lose the connection before its answer."""
        ...

    def silence_next(self, account: str) -> None:
        """Take the next order, and never answer it."""
        ...

    def drop_next_change(self, account: str) -> None:
        """Do the account's next cancel or replacement, and lose the connection before its
        answer."""
        ...

    def silence_next_change(self, account: str) -> None:
        """Do the account's next cancel or replacement, and never answer it."""
        ...

    def count_changes(self, account: str) -> int:
        """Return how many cancels and replacements of the account have arrived at the broker's
        side, refused ones, too."""
        ...

    def taken(self, account: str) -> list[BookedOrder]:
        """Return all orders of the account that the broker's side has taken."""
        ...


class HeardOrders:
    """Collects order changes from any thread; `wait` until they are what they should be."""

    def __init__(self) -> None:
        self.changes: list[OrderChanged] = []
        self._arrived = threading.Condition()

    def __call__(self, change: OrderChanged) -> None:
        with self._arrived:
            self.changes.append(change)
            self._arrived.notify_all()

    def outcome(self, order: BrokerOrder, state: OrderState) -> BrokerOrder:
        """Returns the order in this state: as the call answered, or as an event says later."""
        if order.state is state:
            return order
        same = order.broker_order_id, state

        def reached(changes: list[OrderChanged]) -> bool:
            return any(
                (change.order.broker_order_id, change.order.state) == same for change in changes
            )

        changes = self.wait(reached)
        return [change.order for change in changes if change.order.broker_order_id == same[0]][-1]

    def wait(
        self, enough: Callable[[list[OrderChanged]], bool], timeout: float = 20.0
    ) -> list[OrderChanged]:
        with self._arrived:
            assert self._arrived.wait_for(lambda: enough(self.changes), timeout), self.changes
            return list(self.changes)


def order(
    *,
    symbol: str = "2330",
    side: Side = Side.BUY,
    quantity: int = 2,
    price: Decimal | None = None,
    time_in_force: TimeInForce = TimeInForce.ROD,
    **terms: Any,
) -> PlaceOrder:
    """Returns a new order; without a price a market order."""
    number = next(_numbers)
    return PlaceOrder(
        request_id=f"request-{number}",
        order_id=f"order-{number}",
        user_id="user",
        account_id="account",
        symbol=symbol,
        side=side,
        quantity=quantity,
        price_type=terms.pop("price_type", PriceType.MARKET if price is None else PriceType.LIMIT),
        price=price,
        time_in_force=time_in_force,
        tag=f"t{number}",
        reply_to="channel",
        generation="generation",
        **terms,
    )


def until(condition: Callable[[], bool], timeout: float = 20.0) -> None:
    """Waits for a condition that nothing announces."""
    end = time.monotonic() + timeout
    while not condition():
        assert time.monotonic() < end, "the condition did not come true"
        time.sleep(0.01)
