"""Stands in for the SDK's `Shioaji`, inside of a worker: its calls go to the paper exchange.

The exchange's ledger is the broker's own book, and the exchange's faults are the broker's. What
differs from the paper broker is what Shioaji does (docs/reference/brokers.md): an order is answered
as `PendingSubmit` without its deals, a cancel as `Submitted`; a change's `qty` is the number to
take off; reduced and filled rows show an `order_quantity` of 0; events come twice or never; and
half of the sessions that break say nothing of it. Orders, contracts, accounts, enums and errors are
the SDK's own.

Where an earlier session reduced an order, the row shows the reduced quantity as the ordered one:
the exchange does not keep the ordered one.
"""

from __future__ import annotations

import socket
import sys
import threading
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from datetime import UTC, datetime, timedelta, timezone
from decimal import Decimal
from importlib import import_module
from types import SimpleNamespace
from typing import Any

from infra.lab.shioaji.keys import account_of
from worker_runtime.brokers.paper import wire
from worker_runtime.brokers.paper.broker import (
    ConnectionLost,
    MakeRequest,
    NoReply,
    NothingSent,
    PaperConnection,
    read_order,
)
from worker_runtime.process.log import Log
from worker_runtime.protocol import errors
from worker_runtime.protocol.broker_reports import BrokerOrder, OrderChanged
from worker_runtime.protocol.instruments import Instrument, InstrumentKind, InstrumentPage
from worker_runtime.protocol.messages import Fill, OrderState, PriceType, Side, TimeInForce
from worker_runtime.protocol.order_terms import OrderCondition, OrderLot

#: Seconds of calls of the SDK that take no time limit.
_CALL_TIMEOUT_S = 30.0
#: Seconds after the answer at which an order's acceptance is reported.
_ACCEPTED_AFTER_S = 0.05
#: The zone of the day on which terms were updated.
_TAIPEI_ZONE = timezone(timedelta(hours=8))
_STATUS = {
    OrderState.SUBMITTED: "Submitted",
    OrderState.PART_FILLED: "PartFilled",
    OrderState.FILLED: "Filled",
    OrderState.CANCELLED: "Cancelled",
    # The end of the day. The SDK has no word of its own for it.
    OrderState.EXPIRED: "Cancelled",
    OrderState.REJECTED: "Failed",
}
#: Kinds of contracts, as the SDK names them.
_SECURITY = {
    InstrumentKind.STOCK: "STK",
    InstrumentKind.FUND: "STK",
    InstrumentKind.WARRANT: "WRT",
    InstrumentKind.FUTURE: "FUT",
    InstrumentKind.OPTION: "OPT",
}
_CANCELLED = frozenset({OrderState.CANCELLED, OrderState.EXPIRED})
_LOTS = {
    "Common": OrderLot.COMMON,
    "Odd": OrderLot.ODD,
    "IntradayOdd": OrderLot.INTRADAY_ODD,
    "Fixing": OrderLot.FIXING,
}
_CONDITIONS = {
    "Cash": OrderCondition.CASH,
    "MarginTrading": OrderCondition.MARGIN,
    "ShortSelling": OrderCondition.SHORT_SELLING,
}

OrderCallback = Callable[[Any, Mapping[str, Any]], None]


def stand_in_for_sdk(name: str, address: str, hidden: str) -> None:
    """Imports the installed SDK under `name`, and puts the stand-in in the place of its client.

    `hidden` is the entry of `sys.path` whose package called this;
    `address` is the exchange's `host:port`.
    """
    sys.path[:] = [entry for entry in sys.path if entry != hidden]
    sys.modules.pop(name, None)
    sdk = import_module(name)

    def make_client(simulation: bool = False) -> StandInClient:
        return StandInClient(sdk, address, client=sys.argv[1] if len(sys.argv) > 1 else "")

    sdk.Shioaji = make_client  # type: ignore[attr-defined]


class ExchangeLink(PaperConnection):
    """A connection that passes on everything: repeated events, too, as the SDK does."""

    def wait_closed(self) -> None:
        self._reader.join()

    def _report(self, change: OrderChanged) -> None:
        try:
            self._on_order(change)
        except Exception as error:
            # The boundary to the adapter's callback; the reader must live on.
            self._log.crash("stand_in.callback_failed", error)


class StandInClient:
    """A session of the stand-in.
    Its methods have the names and parameters of the SDK's `Shioaji`."""

    def __init__(
        self,
        sdk: Any,
        address: str,
        *,
        client: str = "",
        account_of: Callable[[str], str] = account_of,
    ) -> None:
        """Takes `client`, which names the session in the exchange's ledger; `account_of` finds the
        account of an API key, which is all that the SDK's login gets."""
        self._sdk = sdk
        self._address = address
        self._client = client
        self._account_of = account_of
        self._log = Log(broker="stand-in")
        self._lock = threading.RLock()
        self._link: ExchangeLink | None = None
        self._account = ""
        self._session_id = ""
        #: The cache that `list_trades` shows, and the quantity with which each order came here.
        self._orders: dict[str, BrokerOrder] = {}
        self._ordered: dict[str, int] = {}
        self._natives: dict[str, Any] = {}
        self._events = 0
        self._on_order: OrderCallback | None = None
        self._on_down: Callable[[], None] | None = None
        self.contracts = StandInContracts(sdk, self._instruments)

    # --- the session ------------------------------------------------------------------------------

    def login(
        self,
        api_key: str,
        secret_key: str,
        subscribe_trade: bool = True,
        receive_window: int = 30_000,
        force_refresh: bool = False,
    ) -> list[Any]:
        self._account = self._account_of(api_key)
        host, _, port = self._address.rpartition(":")
        try:
            link = socket.create_connection((host, int(port)), timeout=3.0)
        except OSError:
            raise self._sdk.ShioajiConnectionError("login: no connection") from None
        self._link = ExchangeLink(link, self._changed, self._log)

        def login(id: int) -> wire.Login:
            return wire.Login(
                id=id,
                account=self._account,
                api_key=api_key,
                secret_key=secret_key,
                client=self._client,
            )

        reply = self._call(login, _CALL_TIMEOUT_S)
        self._session_id = reply.session_id
        threading.Thread(target=self._await_end, args=(self._link,), daemon=True).start()
        derivatives = self._account_with(self._sdk.AccountType.Future, "F002000")
        return [self._own_account(), derivatives]

    def logout(self) -> None:
        link, self._link = self._link, None
        if link is not None:
            try:
                link.call(lambda id: wire.Logout(id=id), time.monotonic() + 1.0)
            except (NothingSent, ConnectionLost, NoReply):
                self._log.debug("stand_in.logout_unanswered")
            link.drop("logged out")

    def activate_ca(self, ca_path: str, ca_passwd: str, person_id: str | None = None) -> bool:
        return True

    def get_ca_expiretime(self, person_id: str) -> datetime:
        return datetime.now(UTC) + timedelta(days=300)

    def usage(self, timeout: int = 5000) -> Any:
        self._call(lambda id: wire.ExchangePing(id=id), timeout / 1000)
        return SimpleNamespace(connections=1)

    def trade_cache_health(self, account: Any) -> Any:
        return SimpleNamespace(state=self._sdk.TradeCacheHealthState.Healthy, reasons=[])

    def set_order_callback(self, callback: OrderCallback) -> None:
        self._on_order = callback

    def clear_order_callback(self) -> None:
        self._on_order = None

    def set_event_callback(self, callback: Callable[[int, int, str, str], None]) -> None: ...

    def clear_event_callback(self) -> None: ...

    def set_session_down_callback(self, callback: Callable[[], None]) -> None:
        self._on_down = callback

    def clear_session_down_callback(self) -> None:
        self._on_down = None

    # --- orders -----------------------------------------------------------------------------------

    def place_order(self, contract: Any, order: Any, timeout: int = 30_000) -> Any:
        limit = order.price_type.value == "LMT"

        def place(id: int) -> wire.Place:
            return wire.Place(
                id=id,
                symbol=contract.code,
                side=Side.BUY if order.action.value == "Buy" else Side.SELL,
                quantity=order.quantity,
                price_type=PriceType.LIMIT if limit else PriceType(order.price_type.value),
                price=Decimal(str(order.price)) if limit else None,
                time_in_force=TimeInForce(order.time_in_force.value),
                lot=_LOTS[order.order_lot.value],
                condition=_CONDITIONS[order.order_cond.value],
                tag=order.custom_field or "",
            )

        reply = self._call(place, timeout / 1000, rejected_is_answer=True)
        if reply.order is None:
            raise self._sdk.BadRequestError(f"StatusCode: 400, Detail: {reply.detail}")
        with self._lock:
            placed = self._keep(read_order(reply.order))
            self._ordered.setdefault(placed.broker_order_id, order.quantity)
            self._natives[placed.broker_order_id] = order
            trade = self._trade(placed)
        if placed.state is not OrderState.REJECTED:
            # The answer knows neither the exchange's acceptance nor its deals.
            trade.status.status = self._sdk.OrderStatus("PendingSubmit")
            trade.status.deals, trade.status.deal_quantity = [], 0
            trade.status.cancel_quantity, trade.status.order_quantity = 0, order.quantity
        if placed.state is OrderState.SUBMITTED:  # of which the exchange sends no event
            accepted = OrderChanged(event_id=f"new-{placed.broker_order_id}", order=placed)
            timer = threading.Timer(_ACCEPTED_AFTER_S, self._tell, (accepted, placed, "New"))
            timer.daemon = True
            timer.start()
        return trade

    def update_status(self, account: Any = None, *, timeout: int = 30_000) -> None:
        reply = self._call(lambda id: wire.ListOrders(id=id), timeout / 1000)
        with self._lock:
            for order in reply.orders:
                self._keep(read_order(order))

    def list_trades(self) -> list[Any]:
        with self._lock:
            return [self._trade(order) for order in self._orders.values()]

    def cancel_order(self, trade: Any, timeout: int = 30_000) -> Any:
        """Answers the order as it is; that it is cancelled, an event or a list says later."""
        reply = self._call(
            lambda id: wire.Cancel(id=id, broker_order_id=str(trade.order.id)), timeout / 1000
        )
        return self._answered(reply, trade)

    def update_order(
        self, trade: Any, price: float | None = None, qty: int | None = None, timeout: int = 30_000
    ) -> Any:
        """Takes `qty` off, or changes the price."""
        order_id = str(trade.order.id)
        with self._lock:
            quantity = self._orders[order_id].quantity

        def change(id: int) -> wire.Replace:
            return wire.Replace(
                id=id,
                broker_order_id=order_id,
                quantity=None if qty is None else quantity - qty,
                price=None if price is None else Decimal(str(price)),
            )

        return self._answered(self._call(change, timeout / 1000), trade)

    # --- accounts ---------------------------------------------------------------------------------

    def list_positions(self, account: Any, unit: str, timeout: int = 5000) -> list[Any]:
        reply = self._call(lambda id: wire.ListPositions(id=id), timeout / 1000)
        return [
            SimpleNamespace(
                code=position.symbol,
                direction=self._sdk.Action.Buy if position.shares > 0 else self._sdk.Action.Sell,
                quantity=abs(position.shares),
                price=float(position.average_price),
                cond=next(
                    getattr(self._sdk.StockOrderCond, name)
                    for name, condition in _CONDITIONS.items()
                    if condition is position.condition
                ),
            )
            for position in reply.positions
        ]

    def account_balance(self, account: Any, timeout: int = 5000) -> Any:
        reply = self._call(lambda id: wire.GetBalance(id=id), timeout / 1000)
        if reply.balance is None:
            raise self._sdk.ServerError("StatusCode: 500, Detail: no balance")
        return SimpleNamespace(acc_balance=float(reply.balance.cash))

    # --- inside -----------------------------------------------------------------------------------

    def _own_account(self) -> Any:
        """Returns the account that trades: orders of derivatives are not simulated."""
        return self._account_with(self._sdk.AccountType.Stock, "9A95")

    def _account_with(self, account_type: Any, branch: str) -> Any:
        return self._sdk.Account(account_type, "A123456789", branch, self._account, True, "user")

    def _instruments(self, after: str) -> InstrumentPage:
        def ask(id: int) -> wire.ListExchangeInstruments:
            return wire.ListExchangeInstruments(id=id, after=after)

        page = self._call(ask, _CALL_TIMEOUT_S).instruments
        return page or InstrumentPage()

    def _call(
        self, make: MakeRequest, seconds: float, *, rejected_is_answer: bool = False
    ) -> wire.ExchangeReply:
        """Asks the exchange; raises the SDK's errors."""
        if self._link is None:
            raise self._sdk.AuthError("Not authenticated")
        try:
            reply = self._link.call(make, time.monotonic() + seconds)
        except NothingSent:
            raise self._sdk.TokenError("StatusCode: 401, Detail: Token is expired") from None
        except ConnectionLost:
            raise self._sdk.ShioajiConnectionError("connection reset") from None
        except NoReply:
            raise self._sdk.ShioajiTimeoutError("timeout") from None
        if reply.error is None or (rejected_is_answer and reply.error == errors.OrderRejected.code):
            return reply
        raise self._error(reply)

    def _error(self, reply: wire.ExchangeReply) -> Exception:
        said = reply.detail
        kind, status = {
            errors.LoginRejected.code: ("AuthError", 401),
            errors.LoginLimited.code: ("ServerError", 451),
            errors.SessionDown.code: ("TokenError", 401),
            errors.RateLimited.code: ("SystemMaintenance", 503),
            errors.BrokerMaintenance.code: ("SystemMaintenance", 503),
            errors.OrderRejected.code: ("BadRequestError", 400),
        }.get(str(reply.error), ("ServerError", 500))
        error: Exception = getattr(self._sdk, kind)(f"StatusCode: {status}, Detail: {said}")
        return error

    def _await_end(self, link: ExchangeLink) -> None:
        """Calls the session-down callback when the connection has ended, in half of the sessions:
        of the others only a call finds out (Sinotrade/Shioaji #215)."""
        link.wait_closed()
        if self._link is link and self._on_down is not None and sum(self._session_id.encode()) % 2:
            self._on_down()

    def _answered(self, reply: wire.ExchangeReply, trade: Any) -> Any:
        if reply.order is None:
            raise self._sdk.ServerError("StatusCode: 500, Detail: no order in the answer")
        with self._lock:
            return self._trade(self._keep(read_order(reply.order)))

    def _keep(self, order: BrokerOrder) -> BrokerOrder:
        """Stores what was said last; a list that lags takes no final state and no deals back."""
        known = self._orders.get(order.broker_order_id)
        self._ordered.setdefault(order.broker_order_id, order.quantity)
        if known is not None and (
            len(known.fills) > len(order.fills) or (_is_final(known) and not _is_final(order))
        ):
            return known
        self._orders[order.broker_order_id] = order
        return order

    # --- events, in the reader's thread -----------------------------------------------------------

    def _changed(self, change: OrderChanged) -> None:
        with self._lock:
            known = self._orders.get(change.order.broker_order_id)
            order = self._keep(change.order)
        if change.event_id.startswith("late-"):
            return
        callback = self._on_order
        if change.fill is not None and callback is not None:
            callback(
                self._sdk.OrderState.StockDeal,
                self._deal_event(change.event_id, order, change.fill),
            )
        if change.fill is None or order.state in _CANCELLED:
            self._tell(change, order, _kind_of(known, order))

    def _tell(self, change: OrderChanged, order: BrokerOrder, kind: str) -> None:
        callback = self._on_order
        if callback is not None:
            callback(
                self._sdk.OrderState.StockOrder, self._order_event(change.event_id, order, kind)
            )

    def _deal_event(self, event_id: str, order: BrokerOrder, fill: Fill) -> dict[str, Any]:
        return {
            "event_id": event_id,
            "trade_id": order.broker_order_id,
            "exchange_seq": fill.fill_id,
            "account_id": self._account,
            "action": "Buy" if order.side is Side.BUY else "Sell",
            "code": order.symbol,
            "price": float(fill.price),
            "quantity": fill.quantity,
            "ts": fill.at_ms / 1000,
        }

    def _order_event(self, event_id: str, order: BrokerOrder, kind: str) -> dict[str, Any]:
        filled = sum(fill.quantity for fill in order.fills)
        rejected = order.state is OrderState.REJECTED
        ordered = self._ordered[order.broker_order_id]
        return {
            "event_id": f"{event_id}-{kind}",
            "operation": {
                "op_type": kind,
                "op_code": "88" if rejected else "00",
                "op_msg": order.reason or "" if rejected else "",
            },
            "order": {
                "id": order.broker_order_id,
                "account": {"account_id": self._account},
                "action": "Buy" if order.side is Side.BUY else "Sell",
                "price": float(order.price or 0),
                "quantity": ordered,
                "time_in_force": order.time_in_force.value,
                "price_type": order.price_type.value,
                "custom_field": order.tag,
            },
            "status": {
                "id": order.broker_order_id,
                "exchange_ts": time.time(),
                "modified_price": float(order.price or 0),
                "cancel_quantity": ordered - (filled if kind == "Cancel" else order.quantity),
                "order_quantity": 0 if kind == "Cancel" else order.quantity,
            },
            "contract": {"code": order.symbol},
        }

    def _trade(self, order: BrokerOrder) -> Any:
        sdk, native = self._sdk, self._natives.get(order.broker_order_id)
        filled = sum(fill.quantity for fill in order.fills)
        ordered = self._ordered[order.broker_order_id]
        cancelled = ordered - (filled if order.state in _CANCELLED else order.quantity)
        hidden = cancelled or order.state is OrderState.FILLED
        price = float(order.price or 0)
        first = float(native.price) if native is not None else price
        return SimpleNamespace(
            contract=sdk.BaseContract("STK", "TSE", order.symbol),
            order=SimpleNamespace(
                id=order.broker_order_id,
                action=sdk.Action.Buy if order.side is Side.BUY else sdk.Action.Sell,
                price=first,
                quantity=ordered,
                price_type=sdk.PriceType(order.price_type.value),
                time_in_force=sdk.TimeInForce(order.time_in_force.value),
                custom_field=order.tag,
                account=self._own_account(),
                order_lot=native.order_lot if native is not None else sdk.StockOrderLot.Common,
            ),
            status=SimpleNamespace(
                id=order.broker_order_id,
                status=sdk.OrderStatus(_STATUS[order.state]),
                status_code="00",
                msg=order.reason or "",
                modified_price=price if price != first else 0.0,
                order_quantity=0 if hidden else order.quantity,
                deal_quantity=filled,
                cancel_quantity=cancelled,
                deals=[
                    SimpleNamespace(
                        seq=fill.fill_id,
                        quantity=fill.quantity,
                        price=float(fill.price),
                        ts=fill.at_ms / 1000,
                    )
                    for fill in order.fills
                ],
            ),
        )


def _is_final(order: BrokerOrder) -> bool:
    return order.state in _CANCELLED or order.state in (OrderState.FILLED, OrderState.REJECTED)


def _kind_of(known: BrokerOrder | None, order: BrokerOrder) -> str:
    if order.state in _CANCELLED:
        return "Cancel"
    if known is None or order.state is OrderState.REJECTED:
        return "New"
    return "UpdateQty" if order.quantity != known.quantity else "UpdatePrice"


class StandInContracts:
    """The SDK's `api.contracts`, with what the exchange lists. While its list is missing, there are
    no contracts, as before the market opens (Sinotrade/Shioaji #19).

    While the exchange's prices are due, terms have prices of the day before, as until the vendor
    updates them in the morning. Terms have the fields of `StockInfo`, `FuturesInfo`, `OptionInfo`
    and `WarrantInfo`, which cannot be made without a connection.
    """

    def __init__(self, sdk: Any, page: Callable[[str], InstrumentPage]) -> None:
        self._sdk = sdk
        self._page = page
        self._listed: dict[str, Instrument] = {}

    def preload(
        self, security_types: Sequence[str] | None = None, info: bool = False, timeout: int = 30_000
    ) -> None:
        """Loads the terms if they are asked for. Bases are there: any share can be traded."""
        if info:
            self._listed = {instrument.code: instrument for instrument in self._read()}

    def list(self, kind: str) -> Sequence[Any]:
        return [self._base(instrument) for instrument in self._of(kind)]

    def get(self, code: str, security_type: str) -> Any:
        """Returns the base of a listed contract. Shares have one though they are not listed, since
        tests trade any."""
        if len(code) > 4 and not self._listed:
            self._listed = {instrument.code: instrument for instrument in self._read()}
        listed = self._listed.get(code)
        if listed is not None:
            return self._base(listed) if _SECURITY[listed.kind] == security_type else None
        known = security_type == "STK" and code.isalnum() and len(code) <= 6
        return self._sdk.BaseContract("STK", "TSE", code) if known else None

    def info(self, base: Any) -> Any:
        listed = self._listed.get(base.code)
        if listed is None:
            return SimpleNamespace(code=base.code, reference=None, update_date=None)
        if listed.kind is InstrumentKind.WARRANT:
            raise ValueError("WarrantInfoRequiresUnderlying")
        return self._terms(listed)

    def warrant_underlyings(self) -> Sequence[Any]:
        codes = sorted({instrument.underlying for instrument in self._of("WRT")})
        return [self._sdk.BaseContract("STK", "TSE", code) for code in codes]

    def warrants(self, underlying: Any) -> Sequence[Any]:
        return [
            self._terms(instrument)
            for instrument in self._of("WRT")
            if instrument.underlying == underlying.code
        ]

    def _of(self, kind: str) -> Sequence[Instrument]:
        return [
            instrument for instrument in self._listed.values() if _SECURITY[instrument.kind] == kind
        ]

    def _read(self) -> Iterator[Instrument]:
        after = ""
        while True:
            try:
                page = self._page(after)
            except self._sdk.ServerError:  # the exchange has no list yet
                return
            yield from page.instruments
            if not page.next_after:
                return
            after = page.next_after

    def _base(self, instrument: Instrument) -> Any:
        security = _SECURITY[instrument.kind]
        exchange = "TSE" if security in ("STK", "WRT") else "TAIFEX"
        return self._sdk.BaseContract(security, exchange, instrument.code)

    def _terms(self, instrument: Instrument) -> Any:
        """Returns the terms as the SDK has them: floats, and None or 0 for what is not known."""
        today = datetime.now(_TAIPEI_ZONE).date()
        known: dict[str, Any] = {
            "security_type": _SECURITY[instrument.kind],
            "code": instrument.code,
            "target_code": None,
            "name": instrument.name,
            "reference": float(instrument.reference or 0),
            "limit_up": float(instrument.limit_up or 0),
            "limit_down": float(instrument.limit_down or 0),
            "update_date": today,
        }
        if instrument.prices_due:
            yesterday = {"reference": 1.0, "limit_up": 1.1, "limit_down": 0.9}
            known |= {**yesterday, "update_date": today - timedelta(days=1)}
        if instrument.kind in (InstrumentKind.STOCK, InstrumentKind.FUND):
            day_trade = self._sdk.DayTrade.Yes if instrument.day_trade else self._sdk.DayTrade.No
            return SimpleNamespace(**known, unit=float(instrument.lot_units), day_trade=day_trade)
        known |= {
            "last_trading_date": instrument.expires_on,
            "underlying_code": instrument.underlying,
        }
        if instrument.kind is InstrumentKind.WARRANT:
            return SimpleNamespace(**known, expiry_date=instrument.expires_on)
        banded = len(instrument.ticks) > 1
        return SimpleNamespace(
            **known,
            root=instrument.code[:3],
            delivery_date=instrument.expires_on,
            multiplier=float(instrument.lot_value),
            contract_size=None,
            tick=float(instrument.ticks[0].tick),
            tick_rule="bands" if banded else None,
        )
