"""A broker without sockets, for tests: it keeps the port's contract, as the contract suite checks.

`FakeMarket` is the other side of all its sessions: accounts, prices, and a ledger of what was
taken.
"""

import threading
import time
from collections import Counter
from collections.abc import Sequence
from decimal import Decimal

from msgspec.structs import replace

from worker_runtime.brokers.port import BrokerOrderTerms, Listing, OnOrderChanged
from worker_runtime.protocol.broker_reports import Balance, BrokerOrder, OrderChanged, Position
from worker_runtime.protocol.errors import (
    LoginLimited,
    LoginRejected,
    OrderRejected,
    OutcomeUnknown,
    SessionDown,
)
from worker_runtime.protocol.messages import (
    FINAL_ORDER_STATES,
    Credentials,
    Fill,
    OrderState,
    PriceType,
    Side,
    TimeInForce,
)
from worker_runtime.protocol.requests import ConfirmedQuantityChange

#: Seconds: the market's ledger begins with the test.
_FOR_EVER = 1e9
#: Connections that an account may have.
_CONNECTIONS = 5
#: Price of a symbol before anyone sets it.
_FIRST_PRICE = Decimal(100)


class FakeMarket:
    """What all sessions of a test trade with."""

    def __init__(self) -> None:
        self.sessions: list[FakeBroker] = []
        #: Every order taken: account, our order id, and how it stands.
        self.taken: list[tuple[str, str, BrokerOrder]] = []
        #: Reason by account: its next order is rejected.
        self.reject_next: dict[str, str] = {}
        #: Accounts whose session breaks right after their next order was taken.
        self.drop_next: set[str] = set()
        #: Accounts whose next order is taken and never answered.
        self.silence_next: set[str] = set()
        #: The same of their next cancel or change.
        self.drop_next_change: set[str] = set()
        self.silence_next_change: set[str] = set()
        #: Cancels and changes that arrived, by account.
        self.changes: Counter[str] = Counter()
        self._accounts: dict[str, Credentials] = {}
        self._prices: dict[str, Decimal] = {}
        self._lock = threading.RLock()
        self._numbers = 0

    def register(self, account: str, api_key: str, secret_key: str) -> None:
        self._accounts[account] = Credentials(api_key=api_key, secret_key=secret_key)

    def set_price(self, symbol: str, price: Decimal) -> None:
        """Moves the market; resting orders that it crosses are filled and reported."""
        with self._lock:
            self._prices[symbol] = price
            for index, (account, note, order) in enumerate(self.taken):
                if order.symbol == symbol and order.state not in FINAL_ORDER_STATES:
                    settled = self._match(order)
                    if settled is not order:
                        self.taken[index] = (account, note, settled)
                        self._report(account, settled)

    def orders(self, account: str) -> list[BrokerOrder]:
        return [order for owner, _, order in self.taken if owner == account]

    def check(self, account: str, credentials: Credentials) -> None:
        known = self._accounts.get(account)
        keys = credentials.api_key, credentials.secret_key
        if known is None or (known.api_key, known.secret_key) != keys:
            raise LoginRejected("unknown account or wrong key")
        if sum(session.account == account for session in self.sessions) >= _CONNECTIONS:
            raise LoginLimited(f"{_CONNECTIONS} connections are open")

    def take(self, account: str, order: BrokerOrderTerms) -> BrokerOrder:
        with self._lock:
            new = BrokerOrder(
                broker_order_id=f"K{len(self.taken) + 1}",
                tag=order.tag,
                symbol=order.symbol,
                side=order.side,
                quantity=order.quantity,
                price_type=order.price_type,
                price=order.price,
                time_in_force=order.time_in_force,
                state=OrderState.SUBMITTED,
            )
            if (reason := self.reject_next.pop(account, None)) is not None:
                new = replace(new, state=OrderState.REJECTED, reason=reason)
            else:
                new = self._match(new)
            self.taken.append((account, order.order_id, new))
            if new.fills:
                self._report(account, new)
            return new

    def change(
        self,
        account: str,
        broker_order_id: str,
        quantity: int | None,
        price: Decimal | None,
        cancel: bool,
    ) -> BrokerOrder:
        with self._lock:
            self.changes[account] += 1
            own = [
                index
                for index, (owner, _, order) in enumerate(self.taken)
                if (owner, order.broker_order_id) == (account, broker_order_id)
                and order.state not in FINAL_ORDER_STATES
            ]
            if not own:
                raise OrderRejected(f"no open order {broker_order_id}")
            _, note, order = self.taken[own[0]]
            if cancel:
                settled = replace(order, state=OrderState.CANCELLED)
            else:
                settled = self._match(_changed(order, quantity, price))
            self.taken[own[0]] = (account, note, settled)
            self._report(account, settled)
            return settled

    def _match(self, order: BrokerOrder) -> BrokerOrder:
        market = self._prices.get(order.symbol, _FIRST_PRICE)
        crosses = order.price_type is PriceType.MARKET or order.price is None
        if order.price is not None and not crosses:
            crosses = order.price >= market if order.side is Side.BUY else order.price <= market
        if crosses:
            self._numbers += 1
            done = Fill(
                fill_id=f"D{self._numbers}",
                quantity=order.quantity,
                price=market,
                at_ms=time.time_ns() // 1_000_000,
            )
            return replace(order, state=OrderState.FILLED, fills=[done])
        if order.time_in_force is not TimeInForce.ROD:
            return replace(order, state=OrderState.CANCELLED, reason="nobody on the other side")
        return order

    def _report(self, account: str, order: BrokerOrder) -> None:
        self._numbers += 1
        fill = order.fills[-1] if order.fills else None
        change = OrderChanged(event_id=f"E{self._numbers}", order=order, fill=fill)
        for session in list(self.sessions):
            if session.account == account:
                session.on_order(change)


def _changed(order: BrokerOrder, quantity: int | None, price: Decimal | None) -> BrokerOrder:
    filled = sum(done.quantity for done in order.fills)
    new_quantity = order.quantity if quantity is None else quantity
    if not max(filled, 1) <= new_quantity <= order.quantity:
        raise OrderRejected("the quantity can only fall")
    if price is not None and (order.price is None or not price.is_finite() or price <= 0):
        raise OrderRejected("only a limit order has a price, above zero")
    return replace(order, quantity=new_quantity, price=order.price if price is None else price)


class FakeBroker:
    """One session with a `FakeMarket`."""

    def __init__(
        self, market: FakeMarket, account: str, client: str, on_order: OnOrderChanged
    ) -> None:
        self.account = account
        self.client = client
        self.on_order = on_order
        self._market = market
        self._closed = False

    def login(self, credentials: Credentials, timeout: float) -> None:
        if self._closed:
            raise SessionDown("this broker session was closed")
        self._market.check(self.account, credentials)
        self._market.sessions.append(self)

    def place(self, order: BrokerOrderTerms, timeout: float) -> BrokerOrder:
        self._check()
        if timeout <= 0:
            raise OrderRejected("no time was left to send the order; it was not sent")
        taken = self._market.take(self.account, order)
        self._lose_answer(self._market.drop_next, self._market.silence_next, timeout)
        if taken.state is OrderState.REJECTED:
            raise OrderRejected(taken.reason or "")
        return taken

    def queries_before_change(self, broker_order_id: str, *, quantity: bool = False) -> bool:
        return False

    def cancel(self, broker_order_id: str, timeout: float) -> BrokerOrder:
        self._check()
        cancelled = self._market.change(self.account, broker_order_id, None, None, cancel=True)
        self._lose_answer(self._market.drop_next_change, self._market.silence_next_change, timeout)
        return cancelled

    def replace(
        self,
        broker_order_id: str,
        quantity: int | None,
        price: Decimal | None,
        timeout: float,
        confirmed: Sequence[ConfirmedQuantityChange] = (),
    ) -> BrokerOrder:
        self._check()
        changed = self._market.change(self.account, broker_order_id, quantity, price, cancel=False)
        self._lose_answer(self._market.drop_next_change, self._market.silence_next_change, timeout)
        return changed

    def orders(self, timeout: float) -> Listing:
        self._check()
        orders = self._market.orders(self.account)
        return Listing(orders, behind=0.0, reaches=_FOR_EVER, positions_agree=True)

    def positions(self, timeout: float) -> list[Position]:
        self._check()
        held: dict[str, int] = {}
        prices: dict[str, Decimal] = {}
        for order in self._market.orders(self.account):
            for done in order.fills:
                change = done.quantity if order.side is Side.BUY else -done.quantity
                held[order.symbol] = held.get(order.symbol, 0) + change
                prices[order.symbol] = done.price
        return [
            Position(symbol=symbol, quantity=quantity, average_price=prices[symbol])
            for symbol, quantity in held.items()
            if quantity
        ]

    def balance(self, timeout: float) -> Balance:
        self._check()
        money = Decimal(1_000_000)
        for order in self._market.orders(self.account):
            sign = -1 if order.side is Side.BUY else 1
            money += sum((sign * done.quantity * done.price for done in order.fills), Decimal(0))
        return Balance(currency="TWD", cash=money, available=money)

    def ping(self, timeout: float) -> None:
        self._check()

    def reference_price(self, symbol: str) -> Decimal | None:
        return None

    def alive(self) -> bool:
        return self in self._market.sessions

    def close(self) -> None:
        self._closed = True
        if self in self._market.sessions:
            self._market.sessions.remove(self)

    def _lose_answer(self, dropped: set[str], silenced: set[str], timeout: float) -> None:
        """Raises `OutcomeUnknown` if the answer of this account's call is to be lost."""
        if self.account in dropped:
            dropped.discard(self.account)
            self._market.sessions.remove(self)
            raise OutcomeUnknown("the connection was lost")
        if self.account in silenced:
            silenced.discard(self.account)
            time.sleep(timeout)
            raise OutcomeUnknown("no answer in time")

    def _check(self) -> None:
        if self not in self._market.sessions:
            raise SessionDown("not logged in, or the connection was lost")
