"""The session of a `berth broker check`: its logins, its orders and what it has heard of them."""

import secrets
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from decimal import Decimal
from typing import Any

from worker_runtime.brokers.port import Broker, OnOrderChanged
from worker_runtime.brokers.shioaji.broker import ShioajiBroker
from worker_runtime.brokers.shioaji.probe import ShioajiProbe, shown_event
from worker_runtime.protocol.broker_check import CheckRequest
from worker_runtime.protocol.broker_record import BrokerRecord
from worker_runtime.protocol.broker_reports import BrokerOrder, OrderChanged
from worker_runtime.protocol.errors import (
    BerthError,
    BrokerUnreachable,
    OutcomeUnknown,
    SessionDown,
)
from worker_runtime.protocol.installed_brokers import installed_brokers
from worker_runtime.protocol.messages import (
    FINAL_ORDER_STATES,
    PlaceOrder,
    PriceType,
    Side,
)
from worker_runtime.protocol.order_terms import OrderLot, TimeInForce

#: Seconds that one call may take.
CALL_TIMEOUT_S = 15.0
#: Seconds between two looks at the broker's list: 25 queries in 5 s are allowed.
POLL_INTERVAL_S = 0.5
#: Prices below this share of the reference price are far from the market. Limit down is 0.9 of it.
_HIGHEST_SAFE_SHARE = Decimal("0.95")
#: Tags of a check's orders: this, and four digits to the base 16. Berth's own tags have capital
#: letters.
_TAG_PREFIX, _TAG_DIGITS = "ck", 4

OpenBroker = Callable[[OnOrderChanged], Broker]


class StepFailed(Exception):
    """A step did not go well; the text says how."""


class StepWarned(StepFailed):
    """A step went in a way that a person should know of."""


class StepSkipped(StepFailed):
    """A step that makes no sense here."""


@dataclass(frozen=True)
class RawEvent:
    """An event as the SDK reported it, before it is merged with what is known of its order."""

    broker_order_id: str
    is_deal: bool
    #: Its kind and quantities.
    shown: dict[str, Any]


class CheckSession:
    """A check's broker session and its orders, which are cancelled whatever happens."""

    def __init__(self, request: CheckRequest, open_broker: OpenBroker) -> None:
        self._request = request
        self._open = open_broker
        self._changes: list[OrderChanged] = []
        self._raw_events: list[RawEvent] = []
        self._broker: Broker | None = None
        self._evidence: dict[str, Any] = {}
        #: The orders that may have reached the broker: the numbers that it gave them, by our tags.
        #: '': it is not known whether it has the order.
        self._sent: dict[str, str] = {}
        #: Whether the last step has logged in again: the broker counts logins.
        self._has_reopened = False

    # --- sessions ---------------------------------------------------------------------------------

    @property
    def _session(self) -> Broker:
        if self._broker is None:
            raise StepFailed("not logged in")
        return self._broker

    @property
    def _record(self) -> BrokerRecord:
        return installed_brokers()[self._request.broker].record

    @property
    def _is_shioaji(self) -> bool:
        return isinstance(self._broker, ShioajiBroker)

    @property
    def _probe(self) -> ShioajiProbe:
        broker = self._session
        if not isinstance(broker, ShioajiBroker):
            raise StepSkipped("for Shioaji only")
        return ShioajiProbe(broker)

    def _log_in(self, *, renews_token: bool = False) -> None:
        """Logs in and makes that the session of all further steps. The former one is the caller's
        to close."""
        broker = self._open(self._changes.append)
        try:
            if isinstance(broker, ShioajiBroker):
                broker.watch_events(self._note_event)
                if renews_token:
                    broker.forget_token()
            broker.login(self._request.credentials, 2 * CALL_TIMEOUT_S)
        except BaseException:
            broker.close()
            raise
        self._broker = broker

    def _note_event(self, kind: str, event: Mapping[str, Any]) -> None:
        """Called from the SDK's threads."""
        order_id = event.get("trade_id") or (event.get("order") or {}).get("id") or ""
        self._raw_events.append(RawEvent(str(order_id), "DEAL" in kind, shown_event(kind, event)))

    # --- orders -----------------------------------------------------------------------------------

    def _safe_price(self) -> Decimal:
        """Returns the price of orders that shall not be filled. Raises `StepFailed`."""
        price = self._request.price
        if price is None and self._is_shioaji:
            price = self._probe.limit_down(self._request.symbol)
        if price is None:
            raise StepFailed("no price far from the market is known: give one with --price")
        self._check_far_below(price)
        return price

    def _next_price(self, price: Decimal) -> Decimal:
        """Returns a price one step away: below, where the broker may take that, as it is farther
        from the market."""
        market = self._record.markets[self._request.broker_type]
        tick = market.tick(self._request.symbol, price)
        if tick is None:
            raise StepSkipped(
                f"the broker's record does not know the step of prices of {self._request.symbol}"
            )
        lowest = self._probe.limit_down(self._request.symbol) if self._is_shioaji else None
        if price - tick >= (tick if lowest is None else lowest):
            return price - tick
        self._check_far_below(price + tick)
        return price + tick

    @contextmanager
    def _order(
        self, quantity: int, lot: OrderLot, price: Decimal | None = None
    ) -> Iterator[BrokerOrder]:
        """Places an order far from the market, or at a price,
        and cancels it at the end if it still works."""
        if price is None:
            price = self._safe_price()
        tag = f"{_TAG_PREFIX}{secrets.token_hex(_TAG_DIGITS // 2)}"
        order = PlaceOrder(
            request_id=tag,
            order_id=tag,
            user_id="check",
            account_id=self._request.account,
            symbol=self._request.symbol,
            side=Side.BUY,
            quantity=quantity,
            price_type=PriceType.LIMIT,
            price=price,
            time_in_force=TimeInForce.ROD,
            tag=tag,
            lot=lot,
            reply_to="",
            generation="",
        )
        session = self._session
        self._sent[tag] = ""  # before it is sent: no answer may come
        try:
            placed = session.place(order, CALL_TIMEOUT_S)
        except OutcomeUnknown:
            raise
        except BerthError:
            del self._sent[tag]  # nothing was sent, or the broker refused it
            raise
        self._sent[tag] = placed.broker_order_id
        try:
            yield placed
        finally:
            with suppress(BerthError):  # it has ended; the last step says so if it has not
                self._session.cancel(placed.broker_order_id, CALL_TIMEOUT_S)

    def _check_far_below(self, price: Decimal) -> None:
        """Raises `StepFailed` if an order to buy at this price might be filled."""
        reference = self._session.reference_price(self._request.symbol)
        if reference is not None and price >= reference * _HIGHEST_SAFE_SHARE:
            raise StepFailed(
                f"{price} is too near to the reference price {reference}: an order to buy might be "
                f"filled. Give a --price below {reference * _HIGHEST_SAFE_SHARE}, or none"
            )

    def _await(
        self, placed: BrokerOrder, enough: Callable[[BrokerOrder], bool], goal: str
    ) -> BrokerOrder:
        """Returns the order as the broker's list shows it, as soon as that is enough. Raises
        `StepFailed` if it never is."""
        until = time.monotonic() + self._request.patience_s
        while True:
            listed = self._session.orders(CALL_TIMEOUT_S).orders
            order = next((o for o in listed if o.broker_order_id == placed.broker_order_id), None)
            if order is not None and enough(order):
                return order
            if time.monotonic() >= until:
                state = "is not listed" if order is None else f"is {order.state.value}"
                raise StepFailed(
                    f"the order did not {goal} in {self._request.patience_s:.0f} s: it {state}"
                )
            time.sleep(min(POLL_INTERVAL_S, max(0.01, until - time.monotonic())))

    def _await_change(self, placed: BrokerOrder, enough: Callable[[BrokerOrder], bool]) -> bool:
        """Returns True as soon as an event has shown the order so; False if none does."""
        until = time.monotonic() + self._request.patience_s
        while True:
            changes = [change.order for change in list(self._changes)]
            if any(o.broker_order_id == placed.broker_order_id and enough(o) for o in changes):
                return True
            if time.monotonic() >= until:
                return False
            time.sleep(0.01)

    def _events_of(self, placed: BrokerOrder) -> list[dict[str, Any]]:
        return [
            {
                "state": change.order.state.value,
                "quantity": change.order.quantity,
                "price": str(change.order.price or ""),
                "fill": bool(change.fill),
            }
            for change in list(self._changes)
            if change.order.broker_order_id == placed.broker_order_id
        ]

    def _raw_events_of(self, placed: BrokerOrder) -> list[RawEvent]:
        return [e for e in list(self._raw_events) if e.broker_order_id == placed.broker_order_id]

    def _shown(self, placed: BrokerOrder) -> dict[str, Any]:
        """Returns the SDK's own fields of an order; empty for a broker without an SDK."""
        return self._probe.show(placed.broker_order_id, CALL_TIMEOUT_S) if self._is_shioaji else {}

    # --- what may be left -------------------------------------------------------------------------

    def _end_orders(self) -> tuple[list[BrokerOrder], list[str]]:
        """Cancels what still works of our orders. Returns those of which that is not confirmed, and
        the tags of those that the broker does not list."""
        asked: set[str] = set()
        until = time.monotonic() + self._request.patience_s
        while True:
            working = [
                order for order in self._list_of_ours() if order.state not in FINAL_ORDER_STATES
            ]
            missing = [tag for tag, broker_order_id in self._sent.items() if not broker_order_id]
            if not working and not missing:
                return [], []
            for order in working:
                if order.broker_order_id not in asked:
                    asked.add(order.broker_order_id)
                    # It may have ended meanwhile; whether it has, the next look shows.
                    with suppress(BerthError):
                        self._session.cancel(order.broker_order_id, CALL_TIMEOUT_S)
            if time.monotonic() >= until:
                return working, missing
            time.sleep(POLL_INTERVAL_S)

    def _list_of_ours(self) -> list[BrokerOrder]:
        """Returns our orders as the broker lists them, and notes the numbers that were not known.

        Logs in again, once, if the session has ended. Raises `StepFailed`, which names the orders,
        if the broker does not answer.
        """
        try:
            try:
                listed = self._session.orders(CALL_TIMEOUT_S).orders
            except (SessionDown, BrokerUnreachable):
                if self._has_reopened:
                    raise
                self._has_reopened = True
                self._session.close()
                self._log_in()
                listed = self._session.orders(CALL_TIMEOUT_S).orders
        except BerthError as error:
            raise StepFailed(
                f"{error.code}: {error.detail}. Look at the broker for orders with the tags "
                f"{', '.join(self._sent)}: they may still work"
            ) from None
        ours = [
            order
            for order in listed
            if order.broker_order_id in self._sent.values() or order.tag in self._sent
        ]
        for order in ours:
            if order.tag in self._sent:
                self._sent[order.tag] = order.broker_order_id
        return ours


def is_of_a_check(order: BrokerOrder) -> bool:
    """Returns True if an order looks as those that a check places: by its tag, above all."""
    digits = order.tag.removeprefix(_TAG_PREFIX)
    return (
        order.tag.startswith(_TAG_PREFIX)
        and len(digits) == _TAG_DIGITS
        and set(digits) <= set("0123456789abcdef")
        and (order.side, order.price_type) == (Side.BUY, PriceType.LIMIT)
    )


def named(orders: list[BrokerOrder]) -> list[str]:
    return [f"{order.broker_order_id} (tag {order.tag})" for order in orders]
