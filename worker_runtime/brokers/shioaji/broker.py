"""The adapter of SinoPac's Shioaji (package `shioaji`, written against 1.7.9).

The first login imports the SDK, never earlier, because it starts threads, which do not
survive a fork. Blocking calls run through `call_within`, because neither the constructor nor
the login takes a timeout.
"""

import math
import os
import shutil
import threading
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from datetime import datetime
from decimal import Decimal
from functools import cache
from importlib import import_module
from pathlib import Path
from typing import Any, TypeVar

from worker_runtime.brokers.port import (
    BrokerOrderTerms,
    ConnectionKey,
    Instrument,
    Listing,
    OnOrderChanged,
)
from worker_runtime.brokers.shioaji import mapping, sdk
from worker_runtime.brokers.shioaji.files import private_folder, session_files
from worker_runtime.brokers.shioaji.instruments import has_prices_of, read_instruments
from worker_runtime.brokers.shioaji.reported_orders import ReportedOrders, filled_quantity
from worker_runtime.process.clock import clock_is_synchronised
from worker_runtime.process.log import Log
from worker_runtime.protocol.broker_reports import Balance, BrokerOrder, OrderChanged, Position
from worker_runtime.protocol.errors import (
    BerthError,
    BrokerClockRefused,
    BrokerError,
    BrokerMaintenance,
    BrokerUnreachable,
    CertificateExpired,
    LoginRejected,
    OrderRejected,
    OutcomeUnknown,
    QuantityChangeUnconfirmed,
    SessionDown,
)
from worker_runtime.protocol.messages import FINAL_ORDER_STATES, Credentials, OrderState
from worker_runtime.protocol.order_terms import OrderLot
from worker_runtime.protocol.requests import ConfirmedQuantityChange, QuantityMeaning

#: Characters; the SDK refuses shorter ones, but only after its constructor was on the network.
_MIN_KEY_LENGTH = 10
_BASE58 = frozenset("123456789ABCDEFGHJKLMNPQRSTUVWXYZabcdefghijkmnopqrstuvwxyz")
#: Seconds `close()` waits for the logout; the port allows a second in all.
_LOGOUT_TIMEOUT_S = 0.8
#: Seconds that an order waits for its contract's info. The load continues, for the next order.
_INFO_TIMEOUT_S = 0.5
#: Seconds of a call's time that are kept for the way back from the SDK.
_RETURN_MARGIN_S = 0.05
#: Seconds of the broker's day, and of Taipei's offset from UTC.
_DAY_S, _TAIPEI_OFFSET_S = 86_400.0, 28_800.0
#: Classes of the SDK for our broker types.
_ACCOUNT_CLASSES = {"stock": "Stock", "futures": "Future"}
#: Connections of a person from which on each session
#: says how many there are; the sixth is refused (451).
_CONNECTIONS_TO_WARN_AT = 4
#: Days before a certificate's end at which a session warns.
_CERTIFICATE_WARNING_DAYS = (30, 7, 1)
#: Connections whose last token the broker refused, or whose token is about to end: their next login
#: asks for a new one.
_refused_tokens: set[ConnectionKey] = set()

T = TypeVar("T")


@cache
def load_sdk() -> Any:
    """Imports the SDK, once a process, with its files in a private folder.

    Raises `BrokerError` where it is not installed.
    """
    session_files()
    try:
        return import_module("shioaji")
    except ModuleNotFoundError:
        raise BrokerError(
            "Shioaji's SDK is not installed where this worker runs. Install the package `shioaji` "
            "there (requirements-shioaji.lock), or use the paper broker."
        ) from None


def open_session(
    key: ConnectionKey, client: str, on_order: OnOrderChanged, options: Mapping[str, str]
) -> "ShioajiBroker":
    """Returns an unconnected session. The SDK is loaded by its first login."""
    return ShioajiBroker(key, on_order)


class ShioajiBroker:
    """One login, used for the one account of `key`."""

    def __init__(
        self, key: ConnectionKey, on_order: OnOrderChanged, load: Callable[[], Any] = load_sdk
    ) -> None:
        if key.broker_type not in _ACCOUNT_CLASSES:
            raise BrokerError(
                f"shioaji has no broker type {key.broker_type!r}; known: "
                f"{', '.join(_ACCOUNT_CLASSES)}"
            )
        self._key = key
        self._on_order = on_order
        self._load = load
        self._log = Log(broker="shioaji", account=key.account_id)
        self._blank: mapping.Redactor = str
        self._reported = ReportedOrders(lambda text: self._blank(text))
        self._api: Any = None
        self._account: Any = None
        #: Unix seconds at which the active certificate expires: the earliest, from which we warn,
        #: and the latest that the SDK may mean, from which we refuse.
        self._certificate_warning_end = self._certificate_ends = math.inf
        #: Whether the SDK has refused to activate the certificate because it has expired.
        self._certificate_refused = False
        #: The last of `_CERTIFICATE_WARNING_DAYS` that was logged.
        self._certificate_warned: int | None = None
        #: Whether the login has no other account of this type.
        self._is_only_account = False
        self._down: str | None = None
        #: CLOCK_MONOTONIC seconds until which the broker wants no call.
        self._paused_until = 0.0
        self._uses_files = False
        self._closing = threading.Lock()
        #: Gets each event as the SDK reports it; for `berth broker check`.
        self._watch_event: Callable[[str, Any], None] | None = None

    def login(self, credentials: Credentials, timeout: float) -> None:
        """Constructs the client, logs in,
        activates the certificate (production), loads the contracts.

        A login that takes too long continues in its thread, which logs out if it succeeds after
        all: a person has only five connections.
        """
        if self._down is not None:
            raise SessionDown(self._down)
        _check_keys(credentials)
        self._blank = mapping.redactor_of(credentials)
        if not self._uses_files:
            try:
                session_files().session_opened()
            except OSError as error:
                raise BrokerError(
                    f"no folder for Shioaji's files: {type(error).__name__}"
                ) from None
            self._uses_files = True
        deadline = time.monotonic() + timeout

        def open_session() -> tuple[Any, Any]:
            api = self._load().Shioaji(simulation=self._key.simulation)
            try:
                accounts = self._log_in(api, credentials)
                # After the login: before it everything raises AuthError,
                # which would look like a refusal.
                api.set_order_callback(self._on_event)
                api.set_event_callback(self._on_session_event)
                api.set_session_down_callback(self._session_down)
                account = self._choose_account(accounts)
                if not self._key.simulation:
                    self._certificate_refused = not _activate_certificate(api, credentials)
                    self._read_certificate_end(api, credentials.person_id or account.person_id)
                remaining_ms = max(1, int((deadline - time.monotonic()) * 1000))
                api.contracts.preload(
                    list(sdk.PRELOADED[self._key.broker_type]), timeout=remaining_ms
                )
                return api, account
            except BaseException:
                # The login itself may have succeeded, and nobody may be waiting any more.
                threading.Thread(target=self._log_out, args=(api,), daemon=True).start()
                raise

        try:
            self._api, self._account = sdk.call_within(
                timeout, open_session, lambda made: self._log_out(made[0])
            )
        except sdk.CallTimedOut as error:
            raise BrokerUnreachable(f"login: {error}") from None
        except BerthError:
            raise
        except Exception as error:
            refused = mapping.login_error(error)
            if isinstance(refused, BrokerClockRefused):
                known = {
                    True: "is synchronised",
                    False: "is not synchronised",
                    None: "cannot be checked",
                }
                refused = BrokerClockRefused(
                    f"{refused.detail}: the broker found the login's time stamp too old. This "
                    f"host's clock {known[clock_is_synchronised()]}; a slow login is another cause."
                )
            raise refused from None

    def _log_in(self, api: Any, credentials: Credentials) -> list[Any]:
        """Logs in once, with a token of its own where the last one was refused. A second login
        would have to be counted, so it is the caller's."""
        words: dict[str, Any] = {"force_refresh": True} if self._key in _refused_tokens else {}
        accounts: list[Any] = api.login(credentials.api_key, credentials.secret_key, **words)
        _refused_tokens.discard(self._key)
        return accounts

    def forget_token(self) -> None:
        _refused_tokens.add(self._key)

    def place(self, order: BrokerOrderTerms, timeout: float) -> BrokerOrder:
        api, account = self._session()
        self._check_certificate()
        deadline = time.monotonic() + timeout - _RETURN_MARGIN_S

        def submit() -> BrokerOrder:
            try:
                contract, native = sdk.build_order(
                    self._load(), api, account, self._key.broker_type, order, deadline
                )
            except BerthError:
                raise
            except Exception as error:
                raise self._unsent(error) from None
            remaining_s = deadline - time.monotonic()
            if (
                remaining_s <= 0
            ):  # the caller has given up or is about to: nothing may be sent after that
                raise OrderRejected("no time was left to send the order; it was not sent")
            placed = self._reported.merge_trade(
                api.place_order(contract, native, timeout=sdk.to_milliseconds(remaining_s))
            )
            if placed.state is OrderState.REJECTED:
                raise OrderRejected(placed.reason or "")
            return placed

        return self._call_once(timeout, submit)

    def reference_price(self, symbol: str) -> Decimal | None:
        """Returns the contract's reference price; None if that is not of today in Taipei, as in an
        old session. The price is in the contract's info, which the SDK loads when it is first
        asked for."""
        today = datetime.now(mapping.TAIPEI).date()

        def read() -> Any:
            api, _ = self._session()
            return api.contracts.info(sdk.find_contract(api, self._key.broker_type, symbol))

        try:
            info = sdk.call_within(_INFO_TIMEOUT_S, read, lambda _: None)
            return Decimal(str(info.reference)) or None if has_prices_of(info, today) else None
        except Exception as error:
            # The boundary of the SDK: without it the exchange's own limits remain.
            self._note_status(error)
            self._log.debug("shioaji.no_reference", symbol=symbol, error=type(error).__name__)
            return None

    def queries_before_change(self, broker_order_id: str, *, quantity: bool = False) -> bool:
        api, _ = self._session()
        return sdk.queries_first(api, broker_order_id, fresh=quantity)

    def cancel(self, broker_order_id: str, timeout: float) -> BrokerOrder:
        def cancel(api: Any, trade: Any, remaining_ms: int) -> Any:
            return api.cancel_order(trade, timeout=remaining_ms)

        return self._change(broker_order_id, timeout, cancel)

    def replace(
        self,
        broker_order_id: str,
        quantity: int | None,
        price: Decimal | None,
        timeout: float,
        confirmed: Sequence[ConfirmedQuantityChange] = (),
    ) -> BrokerOrder:
        """Changes one of the two: the SDK would send both as two changes, of which one may fail.

        The evidence on what the SDK's `qty` means contradicts itself (docs/reference/brokers.md),
        and a wrong guess trades the wrong quantity. So a quantity is changed only as somebody has
        seen it work.
        """
        if (quantity is None) == (price is None):
            raise OrderRejected("Shioaji changes either the quantity or the price")
        if price is not None:
            self._check_certificate()

        def change(api: Any, trade: Any, remaining_ms: int) -> Any:
            if price is not None:
                return api.update_order(trade, price=float(price), timeout=remaining_ms)
            qty = self._quantity_argument(trade, quantity or 0, confirmed)
            return api.update_order(trade, qty=qty, timeout=remaining_ms)

        return self._change(broker_order_id, timeout, change, fresh=quantity is not None)

    def orders(self, timeout: float) -> Listing:
        """Returns today's orders.

        In simulation a session does not see the orders of earlier ones (Sinotrade/Shioaji #218),
        so absence proves nothing. It is not documented whether last night's orders are listed after
        midnight, nor when positions include a fill: neither is relied on."""
        api, account = self._session()

        def read() -> tuple[list[BrokerOrder], bool]:
            api.update_status(account, timeout=sdk.to_milliseconds(timeout))
            trades = [trade for trade in api.list_trades() if self._is_ours(trade)]
            orders = [self._reported.merge_trade(trade) for trade in trades]
            return orders, all(
                filled_quantity(order.fills) >= mapping.counted_fills(trade)
                for order, trade in zip(orders, trades, strict=True)
            )

        orders, has_all_fills = self._query(timeout, read)
        if not has_all_fills:
            self._log.warning("shioaji.fills_missing")
        if self._key.simulation or not has_all_fills or not self._cache_is_healthy(api, account):
            return Listing(orders)
        return Listing(orders, behind=0.0, reaches=(time.time() + _TAIPEI_OFFSET_S) % _DAY_S)

    def positions(self, timeout: float) -> list[Position]:
        api, account = self._session()
        limit = sdk.to_milliseconds(timeout)
        stock = self._key.broker_type == "stock"
        unit = "Share" if stock else "Common"
        listed = self._query(timeout, lambda: api.list_positions(account, unit=unit, timeout=limit))
        return mapping.stock_positions_of(listed) if stock else mapping.positions_of(listed)

    def balance(self, timeout: float) -> Balance:
        api, account = self._session()
        limit = sdk.to_milliseconds(timeout)
        if self._key.broker_type == "stock":
            return mapping.balance_of(
                self._query(timeout, lambda: api.account_balance(account, timeout=limit))
            )
        return mapping.margin_of(self._query(timeout, lambda: api.margin(account, timeout=limit)))

    def instruments(self, timeout: float) -> Iterator[Instrument]:
        """Yields the contracts that accounts of this type trade, as the SDK has loaded them."""
        api, _ = self._session()
        remaining_ms = sdk.to_milliseconds(timeout - _RETURN_MARGIN_S)

        def run(work: Callable[[], T]) -> T:
            self._session()  # it may have ended since
            return self._query(timeout, work)

        today = datetime.now(mapping.TAIPEI).date()
        yield from read_instruments(api, self._key.broker_type, run, remaining_ms, today)

    def ping(self, timeout: float) -> None:
        """Queries the usage, which is a real round trip. The SDK's own view of its session can be
        wrong for hours (Sinotrade/Shioaji #215)."""
        api, _ = self._session()
        usage = self._query(timeout, lambda: api.usage(timeout=sdk.to_milliseconds(timeout)))
        if (connections := int(usage.connections)) >= _CONNECTIONS_TO_WARN_AT:
            self._log.warning("shioaji.many_connections", connections=connections)
        self._warn_of_certificate()

    def alive(self) -> bool:
        """Returns False once the session-down callback has come. The SDK misses some ends, which
        the ping finds."""
        return self._down is None and self._api is not None

    def close(self) -> None:
        with self._closing:
            api, self._api = self._api, None
            self._down = self._down or "this broker session was closed"
            used, self._uses_files = self._uses_files, False
        if api is not None:
            try:
                sdk.call_within(_LOGOUT_TIMEOUT_S, lambda: self._log_out(api), lambda _: None)
            except sdk.CallTimedOut:
                self._log.warning("shioaji.logout_unanswered")
        if used:
            try:
                session_files().session_closed()
            except OSError as error:
                self._log.warning("shioaji.files_left", error=type(error).__name__)

    # --- the certificate of production orders -----------------------------------------------------

    def _read_certificate_end(self, api: Any, person_id: str) -> None:
        """Notes when the certificate expires. With one that has expired the session lists and
        cancels orders, and places none."""
        try:
            self._certificate_warning_end, self._certificate_ends = mapping.end_of(
                api.get_ca_expiretime(person_id)
            )
        except Exception as error:
            # The boundary of the SDK: an order shows whether the certificate is valid.
            self._log.warning("shioaji.certificate_end_unknown", error=type(error).__name__)
        self._warn_of_certificate()

    def certificate_ends_ms(self) -> int:
        """Returns the Unix ms at which the certificate expires, or has expired; 0 if there is none,
        or if the SDK does not say."""
        return int(self._certificate_ends * 1000) if math.isfinite(self._certificate_ends) else 0

    def _check_certificate(self) -> None:
        """Raises `CertificateExpired` if no order with this certificate passes."""
        if self._certificate_refused or time.time() >= self._certificate_ends:
            raise CertificateExpired(
                "The certificate has expired. Get a new one from the broker and store it with the "
                "credentials."
            )

    def _warn_of_certificate(self) -> None:
        """Logs a warning as each of `_CERTIFICATE_WARNING_DAYS` passes, once a session."""
        days = (self._certificate_warning_end - time.time()) / _DAY_S
        due = min((limit for limit in _CERTIFICATE_WARNING_DAYS if days <= limit), default=None)
        if due is not None and due != self._certificate_warned:
            self._certificate_warned = due
            self._log.warning("shioaji.certificate_expires", days=round(days, 1))

    # --- for `berth broker check` -----------------------------------------------------------------

    @property
    def broker_type(self) -> str:
        return self._key.broker_type

    def native(self) -> tuple[Any, Any, Any]:
        """Returns the SDK's client, account and module, for a look past this adapter."""
        return *self._session(), self._load()

    def watch_events(self, watch: Callable[[str, Any], None]) -> None:
        """Calls `watch`, from the SDK's threads, with the kind of each event and the event."""
        self._watch_event = watch

    def blanked(self, value: Any) -> Any:
        """Returns a value of the SDK as plain data, without credentials and without ids of the
        person or the account."""
        if value is None or isinstance(value, bool | int | float):
            return value
        text = self._blank(str(getattr(value, "value", value)))
        for own in (self._account.account_id, self._account.person_id):
            text = text.replace(own, "***") if own else text
        return text

    # --- inside -----------------------------------------------------------------------------------

    def _session(self) -> tuple[Any, Any]:
        """Returns the SDK's client and account for a call. Raises `SessionDown`, and
        `BrokerMaintenance` in a pause that this session has met."""
        if self._down is not None:
            raise SessionDown(self._down)
        if self._api is None:
            raise SessionDown("not logged in")
        if (pause := self._paused_until - time.monotonic()) > 0:
            raise BrokerMaintenance("the broker has asked for a pause", retry_after=pause)
        return self._api, self._account

    def _change(
        self,
        broker_order_id: str,
        timeout: float,
        call: Callable[[Any, Any, int], Any],
        *,
        fresh: bool = False,
    ) -> BrokerOrder:
        """Finds the SDK's object of the order and makes one call with it.
        `fresh`: as the broker has it."""
        api, account = self._session()
        deadline = time.monotonic() + timeout - _RETURN_MARGIN_S

        def run() -> BrokerOrder:
            trade = self._find_working(api, account, broker_order_id, deadline, fresh)
            remaining_s = deadline - time.monotonic()
            if remaining_s <= 0:
                raise OrderRejected("no time was left for the change; it was not sent")
            return self._reported.merge_trade(call(api, trade, sdk.to_milliseconds(remaining_s)))

        return self._call_once(timeout, run)

    def _call_once(self, timeout: float, call: Callable[[], BrokerOrder]) -> BrokerOrder:
        """Makes a call that places or changes an order; says what its failure means."""
        try:
            return sdk.call_within(timeout, call, self._report_late)
        except sdk.CallTimedOut as error:
            raise OutcomeUnknown(str(error)) from None
        except BerthError:
            raise
        except Exception as error:
            self._note_status(error)
            raise mapping.place_error(error, self._blank) from None

    def _unsent(self, error: Exception) -> BrokerError:
        """Says what an error means that came before anything was sent."""
        self._note_status(error)
        return mapping.unsent_error(error, self._blank)

    def _quantity_argument(
        self, trade: Any, quantity: int, confirmed: Sequence[ConfirmedQuantityChange]
    ) -> int:
        """Returns the `qty` with which `update_order` makes this the order's total quantity."""
        order = mapping.order_of(trade)
        futures = self._key.broker_type == "futures"
        lot = OrderLot.COMMON if futures else mapping.lot_of(trade)
        version = self._load().__version__
        meanings = [
            change.meaning
            for change in confirmed
            if (change.sdk_version, change.lot, change.futures) == (version, lot, futures)
        ]
        kind = "futures" if futures else f"lot {lot}" if lot else "an order whose lot is not named"
        if len(set(meanings)) != 1:
            raise QuantityChangeUnconfirmed(
                f"What Shioaji {version} does with a changed quantity is not confirmed for {kind}. "
                "Cancel the order and place a new one, or run `berth broker check`."
            )
        if not 0 < quantity < order.quantity:
            raise OrderRejected(f"the quantity can only fall; it is {order.quantity}")
        if meanings[0] is QuantityMeaning.REDUCE_BY:
            return order.quantity - quantity
        if order.fills:  # nobody has seen whether the new number includes what is filled
            raise QuantityChangeUnconfirmed(
                f"What Shioaji {version} does with the quantity of a partly filled order is not "
                f"confirmed for {kind}. Cancel the order and place a new one."
            )
        return quantity

    def _cache_is_healthy(self, api: Any, account: Any) -> bool:
        """Returns False if the SDK knows that its list of orders may have gaps."""
        try:
            health = api.trade_cache_health(account)
            state = health.state.value
            reasons = sorted({reason.reason.value for reason in health.reasons})
        except Exception as error:  # the boundary of the SDK: what it cannot say is not relied on
            state, reasons = "Degraded", [type(error).__name__]
        if state == "Degraded":
            self._log.warning("shioaji.trade_cache_degraded", reasons=reasons)
        return bool(state != "Degraded")

    def _find_working(
        self, api: Any, account: Any, broker_order_id: str, deadline: float, fresh: bool
    ) -> Any:
        """Returns the SDK's object of a working order. Whatever this raises, nothing was
        changed."""
        try:
            trade = sdk.find_trade(api, account, broker_order_id, deadline, fresh=fresh)
        except Exception as error:
            raise self._unsent(error) from None
        if trade is None or not self._is_ours(trade):
            raise OrderRejected(f"no order {broker_order_id}")
        if mapping.order_of(trade).state in FINAL_ORDER_STATES:
            raise OrderRejected(f"order {broker_order_id} is final")
        return trade

    def _choose_account(self, accounts: list[Any]) -> Any:
        """Returns the account of this connection: the one with its id or, if none is given, the
        only one of its type."""
        kind = _ACCOUNT_CLASSES[self._key.broker_type]
        of_type = [account for account in accounts if account.account_type.name == kind]
        named = [account for account in of_type if account.account_id == self._key.at_broker]
        chosen = named or ([] if self._key.number else of_type)
        if len(chosen) != 1:
            raise LoginRejected(
                f"the login has {len(of_type)} accounts of the type {kind}, none with our id"
            )
        self._is_only_account = len(of_type) == 1
        if not self._key.simulation and not chosen[0].signed:
            raise LoginRejected("the account is not signed for orders by API")
        return chosen[0]

    def _query(self, timeout: float, call: Callable[[], T]) -> T:
        try:
            return sdk.call_within(timeout, call, lambda _: None)
        except sdk.CallTimedOut as error:
            raise BrokerUnreachable(str(error)) from None
        except Exception as error:
            self._note_status(error)
            raise mapping.query_error(error, self._blank) from None

    def _note_status(self, error: BaseException) -> None:
        """Notes what an error of a call says of the calls after it: 401, the next login asks for a
        new token; 503, none is made for a minute, also if nobody hears of this one."""
        status = mapping.status_of(error)
        if status == 401:
            _refused_tokens.add(self._key)
        elif status == 503:
            self._paused_until = time.monotonic() + mapping.PAUSE_S

    def _is_ours(self, trade: Any) -> bool:
        """Returns True if a trade is of this account. Some trades name no account
        (Sinotrade/Shioaji #22): then the kind of their contract decides, unless the login has
        several accounts for it."""
        owner = trade.order.account
        if owner is not None:
            return bool(owner.account_id == self._account.account_id)
        others = {
            kind
            for name, kinds in sdk.SECURITY.items()
            if name != self._key.broker_type
            for kind in kinds
        }
        return self._is_only_account and mapping.security_of(trade.contract) not in others

    def _log_out(self, api: Any) -> None:
        try:
            api.clear_order_callback()
            api.clear_event_callback()
            api.clear_session_down_callback()
            api.logout()
        except Exception as error:  # it is gone either way; the broker drops what is silent
            self._log.info("shioaji.logout_failed", error=type(error).__name__)

    # --- callbacks, from the SDK's threads --------------------------------------------------------

    def _on_session_event(self, response: int, code: int, info: str, event: str) -> None:
        """Logs what the SDK does about its connection: 0 up, 1 down, 12 reconnecting, 13
        reconnected. Its words stay here: they may quote what it was given."""
        self._log.info("shioaji.session_event", code=int(code), response=int(response))

    def _session_down(self) -> None:
        self._down = self._down or "the broker ended the session"
        self._log.warning("shioaji.session_down")

    def _on_event(self, state: Any, event: Any) -> None:
        try:
            owner = event.get("account_id") or (event.get("order") or {}).get("account", {}).get(
                "account_id"
            )
            if self._account is not None and owner and owner != self._account.account_id:
                return  # the other account of this login
            if self._watch_event is not None:
                self._watch_event(state.value, event)
            change = self._reported.merge_event(state.value, event)
            if change is not None:
                self._on_order(change)
        except Exception as error:  # the boundary of one event: the SDK's thread must live on
            self._log.crash("shioaji.event_failed", error)

    def _report_late(self, order: BrokerOrder) -> None:
        """Reports an order whose call returned after its caller had given up."""
        event_id = f"late-{order.broker_order_id}-{order.state.value}"
        try:
            self._on_order(OrderChanged(event_id=event_id, order=order))
        except Exception as error:  # the boundary to the session's code, in a thread of its own
            self._log.crash("shioaji.late_answer_failed", error)


def _check_keys(credentials: Credentials) -> None:
    """Refuses at once what the SDK would refuse only after using the network (up to 5.6 s)."""
    for name, key in (("API key", credentials.api_key), ("secret key", credentials.secret_key)):
        if len(key) < _MIN_KEY_LENGTH:
            raise LoginRejected(f"the {name} has fewer than {_MIN_KEY_LENGTH} characters")
    if not _BASE58.issuperset(credentials.secret_key):
        raise LoginRejected("the secret key is not base58")


def _activate_certificate(api: Any, credentials: Credentials) -> bool:
    """Activates the certificate that signs production orders. The SDK needs a path, so it is a file
    for a moment. Returns False if it has expired."""
    if not credentials.ca_certificate:
        raise LoginRejected("orders in production need a certificate, and none is stored")
    folder = private_folder()
    try:
        path = Path(folder) / "certificate.pfx"
        with os.fdopen(os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600), "wb") as file:
            file.write(credentials.ca_certificate)
        person = credentials.person_id or None
        if not api.activate_ca(str(path), credentials.ca_password, person):
            raise LoginRejected("the certificate could not be activated")
        return True
    except Exception as error:
        if mapping.is_certificate_expired(error):
            return False
        raise
    finally:
        shutil.rmtree(folder, ignore_errors=True)
