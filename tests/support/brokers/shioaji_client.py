"""A stand-in for the SDK's client, with the SDK's real order classes and errors."""

from __future__ import annotations

import inspect
from collections.abc import Callable
from datetime import UTC, datetime, timedelta
from types import SimpleNamespace
from typing import Any

import pytest

from infra.berth_testing.harness import HeardOrders
from tests.support import needs
from tests.support.brokers.shioaji_reports import make_trade
from worker_runtime.brokers.port import ConnectionKey
from worker_runtime.brokers.shioaji.broker import ShioajiBroker, load_sdk
from worker_runtime.protocol.messages import Credentials

KEYS = Credentials(api_key="A" * 44, secret_key="B" * 44)
WITH_CERTIFICATE = Credentials(
    api_key="A" * 44,
    secret_key="B" * 44,
    person_id="A123456789",
    ca_certificate=b"certificate",
    ca_password="pass",
)
needs.require("shioaji")
REAL = load_sdk()


def fails(name: str, text: str = "text") -> Callable[..., Any]:
    """A method that raises this error of the SDK."""

    def fail(*_: Any, **__: Any) -> Any:
        raise getattr(REAL, name)(text)

    return fail


def health(state: str, *reasons: str) -> SimpleNamespace:
    """The SDK's `TradeCacheHealth`, which cannot be made without a connection, with its real
    enums."""
    health_reasons = [
        SimpleNamespace(reason=getattr(REAL.TradeCacheHealthReasonCode, reason))
        for reason in reasons
    ]
    return SimpleNamespace(state=getattr(REAL.TradeCacheHealthState, state), reasons=health_reasons)


class BoundToSdk:
    """Checks each call of a stand-in's method against the installed SDK's own signature."""

    def __getattribute__(self, name: str) -> Any:
        own = super().__getattribute__(name)
        if name.startswith("_") or not callable(own) or not hasattr(REAL.Shioaji, name):
            return own
        signature = inspect.signature(getattr(REAL.Shioaji, name))

        def call(*args: Any, **words: Any) -> Any:
            try:
                signature.bind(self, *args, **words)
            except TypeError as error:
                pytest.fail(
                    f"Shioaji {REAL.__version__} does not take this call of {name}: {error}"
                )
            return own(*args, **words)

        return call


def contracts_of(preload: Any, get: Any, info: Any) -> SimpleNamespace:
    """The SDK's `api.contracts`, with these methods bound to its signatures."""

    def bound(name: str, method: Callable[..., Any]) -> Callable[..., Any]:
        signature = inspect.signature(getattr(REAL.ContractsApi, name))

        def call(*args: Any, **words: Any) -> Any:
            signature.bind(None, *args, **words)
            return method(*args, **words)

        return call

    methods = {"preload": preload, "get": get, "info": info}
    return SimpleNamespace(**{name: bound(name, method) for name, method in methods.items()})


class ShioajiClient(BoundToSdk):
    """Stands in for the SDK's `Shioaji`; each method does what its test says, or succeeds."""

    def __init__(self, simulation: bool) -> None:
        self.simulation = simulation
        self.calls: list[tuple[str, Any]] = []
        self.does: dict[str, Callable[..., Any]] = {}
        self.accounts = [
            REAL.Account(REAL.AccountType.Stock, "A1", "9A95", "111", True, "u"),
            REAL.Account(REAL.AccountType.Future, "A1", "F002", "222", True, "u"),
        ]
        self.callback: Callable[[Any, Any], None] | None = None
        self.session_down: Callable[[], None] | None = None
        self.session_event: Callable[[int, int, str, str], None] | None = None
        self.contracts = contracts_of(self._preload, self._get, self._info)

    def _do(self, name: str, result: Any, *args: Any, **words: Any) -> Any:
        self.calls.append((name, words or args))
        return self.does[name](*args, **words) if name in self.does else result

    def login(self, api_key: str, secret_key: str, force_refresh: bool = False) -> Any:
        words = {"force_refresh": True} if force_refresh else {}
        return self._do("login", self.accounts, api_key, secret_key, **words)

    def trade_cache_health(self, account: Any) -> Any:
        return self._do("trade_cache_health", health("Healthy"), account)

    def get_ca_expiretime(self, person_id: str) -> Any:
        return self._do("get_ca_expiretime", datetime.now(UTC) + timedelta(days=365), person_id)

    def logout(self) -> None:
        self._do("logout", None)

    def activate_ca(self, path: str, password: str, person_id: str | None) -> Any:
        return self._do("activate_ca", True, path, password, person_id)

    def place_order(self, contract: Any, native: Any, timeout: int) -> Any:
        return self._do(
            "place_order", make_trade(REAL), contract=contract, order=native, timeout=timeout
        )

    def update_status(self, account: Any, timeout: int) -> None:
        self._do("update_status", None, account=account, timeout=timeout)

    def list_trades(self) -> Any:
        return self._do("list_trades", [make_trade(REAL)])

    def cancel_order(self, broker_trade: Any, timeout: int) -> Any:
        return self._do(
            "cancel_order",
            make_trade(REAL, status="Cancelled"),
            trade=broker_trade,
            timeout=timeout,
        )

    def update_order(
        self, broker_trade: Any, price: float | None = None, qty: int | None = None, *, timeout: int
    ) -> Any:
        told = make_trade(REAL, order_quantity=qty, modified_price=price)
        return self._do(
            "update_order", told, trade=broker_trade, price=price, qty=qty, timeout=timeout
        )

    def account_balance(self, account: Any, timeout: int) -> Any:
        return self._do("account_balance", SimpleNamespace(acc_balance=12345.0), account=account)

    def margin(self, account: Any, timeout: int) -> Any:
        told = SimpleNamespace(today_balance=900000.0, available_margin=700000.0)
        return self._do("margin", told, account=account)

    def list_positions(self, account: Any, unit: str, timeout: int) -> Any:
        return self._do("list_positions", [], account=account, unit=unit, timeout=timeout)

    def usage(self, timeout: int) -> Any:
        return self._do("usage", SimpleNamespace(connections=1), timeout=timeout)

    def set_order_callback(self, callback: Callable[[Any, Any], None]) -> None:
        if "login" not in self.names():  # as the real one does
            raise REAL.AuthError("Not authenticated")
        self.callback = callback

    def clear_order_callback(self) -> None:
        self.callback = None

    def set_event_callback(self, callback: Callable[[int, int, str, str], None]) -> None:
        self.session_event = callback

    def clear_event_callback(self) -> None:
        self.session_event = None

    def set_session_down_callback(self, callback: Callable[[], None]) -> None:
        self.session_down = callback

    def clear_session_down_callback(self) -> None:
        self.session_down = None

    def _preload(self, kinds: list[str], timeout: int) -> None:
        self._do("preload", None, kinds, timeout=timeout)

    def _get(self, code: str, security_type: str) -> Any:
        if code == "TXFR1":
            return REAL.BaseContract("FUT", "TAIFEX", "TXFR1", target_code="TXFA6")
        known = {"STK": ["2890"], "WRT": ["030001"], "FUT": ["TXFA6"], "OPT": []}[security_type]
        exchange = "TSE" if security_type in ("STK", "WRT") else "TAIFEX"
        return REAL.BaseContract(security_type, exchange, code) if code in known else None

    def _info(self, base: Any) -> Any:
        """As the SDK's `StockInfo`, which cannot be made without a connection."""
        told = SimpleNamespace(code=base.code, reference=None, update_date=None)
        return self._do("info", told, base)

    def names(self) -> list[str]:
        return [name for name, _ in self.calls]


class ShioajiStage:
    """A broker on a stand-in client."""

    def __init__(
        self,
        heard: HeardOrders,
        kind: str = "stock",
        account: str = "111",
        simulation: bool = True,
        number: str = "",
    ) -> None:
        self.client = ShioajiClient(simulation)
        self.made: list[bool] = []
        sdk = SimpleNamespace(
            Shioaji=self._make,
            StockOrder=REAL.StockOrder,
            FuturesOrder=REAL.FuturesOrder,
            __version__=REAL.__version__,
        )
        key = ConnectionKey("shioaji", kind, simulation, account, number)
        self.broker = ShioajiBroker(key, heard, lambda: sdk)

    def _make(self, simulation: bool) -> ShioajiClient:
        self.made.append(simulation)
        return self.client

    def login(self, credentials: Credentials = KEYS) -> ShioajiBroker:
        self.broker.login(credentials, 20.0)
        return self.broker


def make_futures_trade(**changes: Any) -> Any:
    changed_trade = make_trade(REAL, **changes)
    changed_trade.contract = REAL.BaseContract("FUT", "TAIFEX", "TXFA6")
    return changed_trade
