"""A market behind the SDK's client, which behaves as reports and recordings say that Shioaji does.

`ShioajiMarket` is the other side of all its sessions: persons, a book and prices. `MarketClient`
stands in for one `Shioaji`. Calls are checked against the installed SDK's signatures
(`BoundToSdk`); accounts, contracts, orders, enums and errors are the SDK's own. Of what cannot be
made without a connection (`Trade` and what is in it, positions, balances) only fields of the SDK's
classes are used, as a test checks.
"""

from __future__ import annotations

import threading
import time
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass, field, replace
from datetime import UTC, datetime, timedelta, timezone
from decimal import Decimal
from types import SimpleNamespace
from typing import Any

from infra.berth_testing.harness import BookedOrder
from tests.support.brokers.harnesses import taiwan_facts
from tests.support.brokers.shioaji_client import REAL, BoundToSdk, contracts_of, health
from worker_runtime.brokers.port import ConnectionKey, OnOrderChanged
from worker_runtime.brokers.shioaji import broker as adapter
from worker_runtime.brokers.shioaji import mapping, sdk
from worker_runtime.brokers.shioaji.broker import ShioajiBroker
from worker_runtime.protocol.messages import OrderState, TimeInForce
from worker_runtime.protocol.order_terms import OrderLot
from worker_runtime.protocol.requests import ConfirmedQuantityChange, QuantityMeaning

#: Connections of a person; the next login gets 451.
_CONNECTIONS = 5
_FIRST_PRICE = Decimal(100)
_FINAL = ("Filled", "Cancelled", "Failed")


@dataclass
class MarketBehaviour:
    """What differs between versions of the SDK, kinds of orders, and good and bad days."""

    #: Seconds after which the exchange confirms a cancel or a change: 0.3 to 1.4 were reported.
    confirms_after: float = 0.05
    #: Seconds after the answer at which deals are reported. None: before the answer.
    deals_after: float | None = 0.01
    #: What `qty` of a change means, by lot; "futures" for contracts.
    quantity_means: dict[str, QuantityMeaning] = field(default_factory=dict)
    #: Rows of reduced orders show an `order_quantity` of 0 (1.7.6).
    hides_reduced_quantity: bool = True
    #: Each event comes twice.
    repeats_events: bool = False
    #: Deals are not reported by events (Sinotrade/Shioaji #130).
    loses_deals: bool = False
    #: A cancel is never confirmed.
    ignores_cancels: bool = False
    #: A change of a price is never confirmed, or ends the order.
    ignores_price_changes: bool = False
    ends_at_price_change: bool = False
    #: A changed price is not reported by an event.
    hides_price_changes: bool = False
    #: An order that was reduced and then cancelled is still `Submitted` (Sinotrade/Shioaji #234).
    forgets_final_status: bool = False
    #: A session that logged out still counts as a connection (Sinotrade/Shioaji #81).
    keeps_connections: bool = False
    #: A new token ends the sessions that have the former one
    #: (Sinotrade/shioaji-pro-app #57), or is refused with this error.
    new_token_ends_others: bool = False
    refuses_renewal: Exception | None = None
    #: Raised by queries of positions and balances: the keys lack the right.
    refuses_positions: Exception | None = None
    #: The session looks alive, and nothing is answered (Sinotrade/Shioaji #215).
    is_dead: bool = False
    #: Raised by each login.
    login_error: Exception | None = None
    #: Answered with another contract (Sinotrade/Shioaji #176).
    other_contract: dict[str, str] = field(default_factory=dict)
    #: Contracts that are not there, as before they are loaded (Sinotrade/Shioaji #19).
    missing: set[str] = field(default_factory=set)
    #: A session sees no orders of others (simulation, Sinotrade/Shioaji #218).
    own_orders_only: bool = False
    #: Trades name no account (Sinotrade/Shioaji #22).
    names_no_account: bool = False
    #: Filled orders come back without number and deals, as `PendingSubmit`, as those of the day
    #: before do (Sinotrade/Shioaji #216).
    restores_as_pending: bool = False
    #: State and reasons of the cache of trades.
    cache: tuple[str, ...] = ("Healthy",)
    #: The login's account is not signed for orders by API.
    unsigned: bool = False
    #: Days until the certificate expires.
    certificate_days: float = 300.0
    #: By code, the best offer below the market's price: its price, and the lots that are there.
    offered: dict[str, tuple[Decimal, int]] = field(default_factory=dict)
    #: Open connections that the broker counts besides ours.
    other_connections: int = 0
    #: Reference price of today of every contract; None: the contracts' info does not say it.
    reference: float | None = None


@dataclass
class Row:
    """An order in the market's book."""

    number: int
    owner: str
    session: MarketClient
    contract: Any
    native: Any
    price: float
    status: str = "Submitted"
    cancelled: int = 0
    message: str = ""
    deals: list[tuple[str, int, float, float]] = field(default_factory=list)

    @property
    def id(self) -> str:
        return f"s{self.number:07x}"

    @property
    def filled(self) -> int:
        return sum(quantity for _, quantity, _, _ in self.deals)

    @property
    def working(self) -> int:
        return int(self.native.quantity) - self.cancelled - self.filled


class ShioajiMarket:
    """What all sessions of a test trade with."""

    def __init__(self, behaviour: MarketBehaviour | None = None) -> None:
        self.behaviour = behaviour or MarketBehaviour()
        self.lock = threading.RLock()
        self.sessions: list[MarketClient] = []
        self.rows: list[Row] = []
        self.reject_next: dict[str, str] = {}
        self.drop_next: set[str] = set()
        #: Of each login, whether it asked for a new token.
        self.logins: list[bool] = []
        #: Connections that still count though their session has logged out, by account.
        self.kept_connections: Counter[str] = Counter()
        #: Accounts whose next order is taken and not answered before its call's timeout.
        self.silence_next: set[str] = set()
        #: The same of cancels and changes.
        self.drop_next_change: set[str] = set()
        self.silence_next_change: set[str] = set()
        #: Cancels and changes that arrived, by account.
        self.changes: Counter[str] = Counter()
        self._keys: dict[str, tuple[str, str]] = {}
        self._prices: dict[str, Decimal] = {}
        self._events = 0

    def register(self, account: str, api_key: str, secret_key: str) -> None:
        self._keys[account] = (api_key, secret_key)

    def client(self, account: str, kind: str) -> Callable[[bool], MarketClient]:
        return lambda simulation: MarketClient(self, account, kind, simulation)

    def admits(self, account: str, api_key: str, secret_key: str) -> bool:
        return self._keys.get(account) == (api_key, secret_key)

    def price(self, code: str) -> Decimal:
        return self._prices.get(code, _FIRST_PRICE)

    def set_price(self, code: str, price: Decimal) -> None:
        with self.lock:
            self._prices[code] = price
            for row in self.rows:
                if row.contract.code == code and row.status not in _FINAL:
                    self.match(row)

    def match(self, row: Row, quantity: int | None = None) -> None:
        """Fills what crosses the market, or `quantity` of it, and reports the deal."""
        market = float(self.price(row.contract.code))
        best, lots = self.behaviour.offered.get(row.contract.code, (None, 0))
        if quantity is None and lots and row.price == best and row.status not in _FINAL:
            market, quantity = row.price, min(lots, row.working)
        crosses = row.native.price_type.value != "LMT" or (
            row.price >= market if row.native.action.value == "Buy" else row.price <= market
        )
        if quantity is None and not crosses:
            if row.native.time_in_force.value != "ROD":
                row.cancelled = row.native.quantity - row.filled
                row.status = "Cancelled"
                self.report(row, "Cancel", after=self.behaviour.deals_after)
            return
        self._events += 1
        deal = (f"{self._events:06d}", quantity or row.working, market, time.time())
        row.deals.append(deal)
        row.status = "PartFilled" if row.working else "Filled"
        if not self.behaviour.loses_deals:
            state = REAL.OrderState("FDEAL" if is_future(row) else "SDEAL")
            self.send(row, state, deal_event(row, deal), self.behaviour.deals_after)

    def report(self, row: Row, kind: str, code: str = "00", after: float | None = None) -> None:
        state = REAL.OrderState("FORDER" if is_future(row) else "SORDER")
        self.send(row, state, order_event(row, kind, code), after)

    def send(self, row: Row, state: Any, event: dict[str, Any], after: float | None) -> None:
        """Calls the callbacks of all sessions of the order's account; `after` None: before this
        returns."""
        self._events += 1
        event["event_id"] = f"e{self._events}"

        def tell() -> None:
            for client in list(self.sessions):
                if client.account == row.owner and client.callback is not None:
                    for _ in range(2 if self.behaviour.repeats_events else 1):
                        client.callback(state, event)

        if after is None:
            tell()
        else:
            self.later(after, tell)

    def later(self, seconds: float, work: Callable[[], None]) -> None:
        timer = threading.Timer(seconds, work)
        timer.daemon = True
        timer.start()


def is_future(row: Row) -> bool:
    return row.contract.security_type in ("FUT", "OPT")


def lot_name(row: Row) -> str:
    return "futures" if is_future(row) else row.native.order_lot.value


def deal_event(row: Row, deal: tuple[str, int, float, float]) -> dict[str, Any]:
    sequence, quantity, price, ts = deal
    return {
        "trade_id": row.id,
        "exchange_seq": sequence,
        "account_id": row.owner,
        "action": row.native.action.value,
        "code": row.contract.code,
        "price": price,
        "quantity": quantity,
        "ts": ts,
    }


def order_event(row: Row, kind: str, code: str) -> dict[str, Any]:
    order = {
        "id": row.id,
        "account": {"account_id": row.owner},
        "action": row.native.action.value,
        "price": row.price,
        "quantity": row.native.quantity,
        "time_in_force": row.native.time_in_force.value,
        "price_type": row.native.price_type.value,
    }
    if not is_future(row):  # events of contracts lack it
        order["custom_field"] = row.native.custom_field or ""
    return {
        "operation": {
            "op_type": kind,
            "op_code": code,
            "op_msg": row.message if code != "00" else "",
        },
        "order": order,
        "status": {
            "id": row.id,
            "exchange_ts": time.time(),
            "modified_price": row.price,
            "cancel_quantity": row.cancelled,
            "order_quantity": 0 if kind == "Cancel" else row.native.quantity - row.cancelled,
        },
        "contract": {"code": row.contract.code},
    }


def trade_of(row: Row, behaviour: MarketBehaviour, account: Any) -> SimpleNamespace:
    """A `Trade` as the SDK shows the row now."""
    hidden = behaviour.hides_reduced_quantity and (row.cancelled or row.status == "Filled")
    is_pending = behaviour.restores_as_pending and row.status == "Filled"
    return SimpleNamespace(
        contract=row.contract,
        order=SimpleNamespace(
            id=row.id,
            seqno=f"{row.number:06d}",
            ordno="" if is_pending else f"X{row.number:04d}",
            action=row.native.action,
            price=float(row.native.price),
            quantity=int(row.native.quantity),
            price_type=REAL.PriceType(row.native.price_type.value),
            time_in_force=row.native.time_in_force,
            custom_field=row.native.custom_field,
            account=None if behaviour.names_no_account else account,
            order_lot=None if is_future(row) else row.native.order_lot,
        ),
        status=SimpleNamespace(
            id=row.id,
            status=REAL.OrderStatus("PendingSubmit" if is_pending else row.status),
            status_code="" if is_pending else "00",
            msg=row.message,
            modified_price=row.price if row.price != row.native.price else 0.0,
            order_quantity=0 if hidden else row.native.quantity - row.cancelled,
            deal_quantity=0 if is_pending else row.filled,
            cancel_quantity=row.cancelled,
            deals=[
                SimpleNamespace(seq=seq, quantity=quantity, price=price, ts=ts)
                for seq, quantity, price, ts in ([] if is_pending else row.deals)
            ],
        ),
    )


class MarketClient(BoundToSdk):
    """One `Shioaji` of the account `account`."""

    def __init__(self, market: ShioajiMarket, account: str, kind: str, simulation: bool) -> None:
        self.account, self.kind, self.simulation = account, kind, simulation
        self.callback: Callable[[Any, Any], None] | None = None
        self.down: Callable[[], None] | None = None
        self.forces_refresh = False
        #: The broker takes its token no longer; the connection stays.
        self.has_old_token = False
        self.contracts = contracts_of(lambda kinds, timeout: None, self._get, self._info)
        self._market = market

    @property
    def _own(self) -> Any:
        kind = REAL.AccountType.Future if self.kind == "futures" else REAL.AccountType.Stock
        signed = not self._market.behaviour.unsigned
        return REAL.Account(kind, "A123456789", "9A95", self.account, signed, "user")

    def login(self, api_key: str, secret_key: str, force_refresh: bool = False) -> list[Any]:
        market, self.forces_refresh = self._market, force_refresh
        market.logins.append(force_refresh)
        if market.behaviour.login_error is not None:
            raise market.behaviour.login_error
        if force_refresh and market.behaviour.refuses_renewal is not None:
            raise market.behaviour.refuses_renewal
        with market.lock:
            if not market.admits(self.account, api_key, secret_key):
                raise REAL.AuthError("StatusCode: 401, Detail: unknown key")
            if self._connections() >= _CONNECTIONS:
                raise REAL.ServerError("StatusCode: 451, Detail: Too Many Connections.")
            if force_refresh and market.behaviour.new_token_ends_others:
                for other in market.sessions:
                    other.has_old_token |= other.account == self.account
            market.sessions.append(self)
        return [self._own]

    def logout(self) -> None:
        with self._market.lock:
            if self in self._market.sessions:
                self._market.sessions.remove(self)
                if self._market.behaviour.keeps_connections:
                    self._market.kept_connections[self.account] += 1

    def activate_ca(self, ca_path: str, ca_passwd: str, person_id: str | None = None) -> bool:
        return True

    def get_ca_expiretime(self, person_id: str) -> datetime:
        return datetime.now(UTC) + timedelta(days=self._market.behaviour.certificate_days)

    def usage(self, timeout: int) -> SimpleNamespace:
        self._check()
        other_connections = self._market.behaviour.other_connections
        return SimpleNamespace(connections=self._connections() + other_connections)

    def _connections(self) -> int:
        with self._market.lock:
            open_ones = sum(other.account == self.account for other in self._market.sessions)
            return open_ones + self._market.kept_connections[self.account]

    def trade_cache_health(self, account: Any) -> SimpleNamespace:
        return health(*self._market.behaviour.cache)

    def place_order(self, contract: Any, order: Any, timeout: int) -> Any:
        self._check()
        market, silent = self._market, False
        with market.lock:
            row = Row(len(market.rows) + 1, self.account, self, contract, order, float(order.price))
            market.rows.append(row)
            if (reason := market.reject_next.pop(self.account, None)) is not None:
                row.status, row.message = "Failed", reason
                market.report(row, "New", "88", after=0.0)
                return trade_of(row, market.behaviour, self._own)
            first = trade_of(row, market.behaviour, self._own)
            first.status.status = REAL.OrderStatus("PendingSubmit")
            market.report(row, "New", after=0.0)
            market.match(row)
            if self.account in market.drop_next:
                market.drop_next.discard(self.account)
                self.end()
                raise REAL.ShioajiConnectionError("place_order: connection reset")
            if self.account in market.silence_next:
                market.silence_next.discard(self.account)
                silent = True
        if silent:
            time.sleep(timeout / 1000)
            raise REAL.ShioajiConnectionError("place_order: no answer")
        return first

    def update_status(self, account: Any = None, *, timeout: int) -> None:
        self._check()

    def list_trades(self) -> list[Any]:
        own_only = self._market.behaviour.own_orders_only
        with self._market.lock:
            return [
                trade_of(row, self._market.behaviour, self._own)
                for row in self._market.rows
                if row.owner == self.account and (row.session is self or not own_only)
            ]

    def cancel_order(self, trade: Any, timeout: int) -> Any:
        """Answers `Submitted`; the exchange confirms later."""
        self._check()
        market, row = self._market, self._row(trade)
        shown = trade_of(row, market.behaviour, self._own)

        def confirm() -> None:
            with market.lock:
                if row.status in _FINAL:
                    return
                keeps_status = bool(row.cancelled) and market.behaviour.forgets_final_status
                row.cancelled = row.native.quantity - row.filled
                row.status = row.status if keeps_status else "Cancelled"
                market.report(row, "Cancel")

        if not market.behaviour.ignores_cancels:
            market.later(market.behaviour.confirms_after, confirm)
        self._answer_change(timeout)
        return shown

    def update_order(
        self, trade: Any, price: float | None = None, qty: int | None = None, *, timeout: int
    ) -> Any:
        self._check()
        market, row = self._market, self._row(trade)
        shown = trade_of(row, market.behaviour, self._own)
        means = market.behaviour.quantity_means.get(lot_name(row), QuantityMeaning.REDUCE_BY)

        def confirm() -> None:
            with market.lock:
                if row.status in _FINAL:
                    return
                if qty is not None:
                    total = row.native.quantity - row.cancelled
                    off = qty if means is QuantityMeaning.REDUCE_BY else total - qty
                    row.cancelled += max(0, min(off, row.working))
                    if row.working <= 0:
                        row.status = "Filled" if row.filled else "Cancelled"
                    market.report(row, "UpdateQty")
                if price is not None and market.behaviour.ends_at_price_change:
                    row.cancelled, row.status = row.native.quantity - row.filled, "Cancelled"
                elif price is not None and not market.behaviour.ignores_price_changes:
                    row.price = price
                    if not market.behaviour.hides_price_changes:
                        market.report(row, "UpdatePrice")
                    market.match(row)

        market.later(market.behaviour.confirms_after, confirm)
        self._answer_change(timeout)
        return shown

    def _answer_change(self, timeout: int) -> None:
        """Counts a cancel or change that was taken, and raises if its answer is to be lost."""
        market = self._market
        with market.lock:
            market.changes[self.account] += 1
            if self.account in market.drop_next_change:
                market.drop_next_change.discard(self.account)
                self.end()
                raise REAL.ShioajiConnectionError("change: connection reset")
            silent = self.account in market.silence_next_change
            market.silence_next_change.discard(self.account)
        if silent:
            time.sleep(timeout / 1000)
            raise REAL.ShioajiConnectionError("change: no answer")

    def list_positions(self, account: Any, unit: str, timeout: int) -> list[Any]:
        self._check()
        if self._market.behaviour.refuses_positions is not None:
            raise self._market.behaviour.refuses_positions
        held: dict[str, tuple[int, float]] = {}
        for row in self._own_rows():
            for _, quantity, price, _ in row.deals:
                before, _ = held.get(row.contract.code, (0, 0.0))
                sign = 1 if row.native.action.value == "Buy" else -1
                held[row.contract.code] = before + sign * quantity * self._shares(row, unit), price
        return [
            SimpleNamespace(
                code=code,
                direction=REAL.Action.Buy if quantity > 0 else REAL.Action.Sell,
                quantity=abs(quantity),
                price=price,
                cond=REAL.StockOrderCond.Cash,
            )
            for code, (quantity, price) in held.items()
            if quantity
        ]

    def account_balance(self, account: Any, timeout: int) -> SimpleNamespace:
        return SimpleNamespace(acc_balance=self._money())

    def margin(self, account: Any, timeout: int) -> SimpleNamespace:
        return SimpleNamespace(today_balance=self._money(), available_margin=self._money())

    def set_order_callback(self, callback: Callable[[Any, Any], None]) -> None:
        self.callback = callback

    def clear_order_callback(self) -> None:
        self.callback = None

    def set_event_callback(self, callback: Callable[[int, int, str, str], None]) -> None: ...

    def clear_event_callback(self) -> None: ...

    def set_session_down_callback(self, callback: Callable[[], None]) -> None:
        self.down = callback

    def clear_session_down_callback(self) -> None:
        self.down = None

    def end(self) -> None:
        """The broker ends the session."""
        self.logout()
        if self.down is not None:
            self.down()

    def _money(self) -> float:
        self._check()
        money = 1_000_000.0
        for row in self._own_rows():
            sign = -1 if row.native.action.value == "Buy" else 1
            money += sum(sign * quantity * price for _, quantity, price, _ in row.deals)
        return money

    def _own_rows(self) -> list[Row]:
        with self._market.lock:
            return [row for row in self._market.rows if row.owner == self.account]

    def _shares(self, row: Row, unit: str) -> int:
        odd = not is_future(row) and row.native.order_lot.value in ("Odd", "IntradayOdd")
        return 1000 if unit == "Share" and not odd else 1

    def _row(self, trade: Any) -> Row:
        return next(row for row in self._market.rows if row.id == trade.order.id)

    def _check(self) -> None:
        if self._market.behaviour.is_dead:
            raise REAL.ShioajiTimeoutError("timeout")
        if self not in self._market.sessions or self.has_old_token:
            raise REAL.TokenError("StatusCode: 401, Detail: Token is expired")

    def _get(self, code: str, security_type: str) -> Any:
        behaviour = self._market.behaviour
        future = code.startswith(("TXF", "MXF", "TMF"))
        if code in behaviour.missing or (security_type == "FUT") is not future:
            return None
        if security_type not in ("STK", "FUT") or not code.isalnum() or len(code) > 6:
            return None
        shown = behaviour.other_contract.get(code, code)
        return REAL.BaseContract(security_type, "TAIFEX" if future else "TSE", shown)

    def _info(self, base: Any) -> Any:
        reference = self._market.behaviour.reference
        today = datetime.now(timezone(timedelta(hours=8))).date().isoformat()
        return SimpleNamespace(
            code=base.code, reference=reference, update_date=None if reference is None else today
        )


class ShioajiMarketStage:
    """The Shioaji adapter on a `ShioajiMarket`, in production unless a test says otherwise."""

    def __init__(
        self,
        behaviour: MarketBehaviour | None = None,
        *,
        kind: str = "stock",
        simulation: bool = False,
    ) -> None:
        self.market = ShioajiMarket(behaviour)
        self.facts = taiwan_facts(adapter, mapping, sdk)
        if kind == "futures":  # whose market orders may not rest
            self.facts = replace(
                self.facts,
                symbols=("TXFA6", "TXFB6", "TXFC6", "MXFA6", "MXFB6"),
                market_time_in_force=TimeInForce.IOC,
            )
        self.kind, self.simulation = kind, simulation
        #: What the suite's quantity changes are known to mean.
        self.confirmed = tuple(
            ConfirmedQuantityChange(
                sdk_version=REAL.__version__,
                lot=OrderLot.COMMON if name == "futures" else lot,
                futures=name == "futures",
                meaning=self.market.behaviour.quantity_means.get(name, QuantityMeaning.REDUCE_BY),
            )
            for lot, name in [*mapping.LOTS.items(), (OrderLot.COMMON, "futures")]
        )

    def register(self, account: str, api_key: str, secret_key: str) -> None:
        self.market.register(account, api_key, secret_key)

    def broker(self, account: str, on_order: OnOrderChanged) -> ShioajiBroker:
        return self._broker(account, on_order, simulation=self.simulation)

    def other_system(self, account: str, on_order: OnOrderChanged) -> ShioajiBroker:
        """A system without accounts."""
        return self._broker(account, on_order, simulation=not self.simulation)

    def _broker(self, account: str, on_order: OnOrderChanged, *, simulation: bool) -> ShioajiBroker:
        def make(simulation: bool) -> MarketClient:
            market = self.market if simulation is self.simulation else ShioajiMarket()
            return market.client(account, self.kind)(simulation)

        sdk = SimpleNamespace(
            Shioaji=make,
            StockOrder=REAL.StockOrder,
            FuturesOrder=REAL.FuturesOrder,
            __version__=REAL.__version__,
        )
        key = ConnectionKey("shioaji", self.kind, simulation, account, account)
        return ShioajiBroker(key, on_order, lambda: sdk)

    def set_price(self, symbol: str, price: Decimal) -> None:
        self.market.set_price(symbol, price)

    def reject_next(self, account: str, reason: str) -> None:
        self.market.reject_next[account] = reason

    def drop_next(self, account: str) -> None:
        self.market.drop_next.add(account)

    def silence_next(self, account: str) -> None:
        self.market.silence_next.add(account)

    def drop_next_change(self, account: str) -> None:
        self.market.drop_next_change.add(account)

    def silence_next_change(self, account: str) -> None:
        self.market.silence_next_change.add(account)

    def count_changes(self, account: str) -> int:
        return self.market.changes[account]

    def taken(self, account: str) -> list[BookedOrder]:
        """Without our order ids: the real broker keeps the tag only."""
        words = {
            "Filled": OrderState.FILLED,
            "Cancelled": OrderState.CANCELLED,
            "Failed": OrderState.REJECTED,
        }
        return [
            BookedOrder("", row.native.custom_field, words.get(row.status, OrderState.SUBMITTED))
            for row in self.market.rows
            if row.owner == account
        ]
