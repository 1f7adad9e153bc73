"""`berth broker check`: tries a broker account step by step, with orders far from the market.

Runs as a process of its own (`python -m worker_runtime.brokers.check`), because a broker's SDK
prints, starts threads and may crash. Reads a `CheckRequest` on standard input and writes a
`CheckStep` a line.
"""

import os
import secrets
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from decimal import Decimal
from typing import Any

import msgspec

from worker_runtime.brokers.port import Broker, ConnectionKey, OnOrderChanged
from worker_runtime.brokers.registry import load_adapter
from worker_runtime.brokers.shioaji.broker import ShioajiBroker
from worker_runtime.brokers.shioaji.probe import ShioajiProbe
from worker_runtime.process.clock import clock_is_synchronised
from worker_runtime.process.log import silence_libraries
from worker_runtime.protocol.broker_check import CheckOutcome, CheckRequest, CheckStep, SeenMeaning
from worker_runtime.protocol.broker_record import QuantityChange
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
    OrderState,
    PlaceOrder,
    PriceType,
    Side,
)
from worker_runtime.protocol.order_terms import OrderLot, TimeInForce
from worker_runtime.protocol.requests import QuantityMeaning

#: Seconds that one call may take.
_CALL_TIMEOUT_S = 15.0
#: Seconds between two looks at the broker's list: 25 queries in 5 s are allowed.
_POLL_INTERVAL_S = 0.5
#: Prices below this share of the reference price are far from the market. Limit down is 0.9 of it.
_HIGHEST_SAFE_SHARE = Decimal("0.95")
#: Quantity of an order that is changed, and the number that is sent:
#: what stays tells the meanings apart.
_ORDERED_QUANTITY, _SENT_QUANTITY = 3, 1
#: Connections of a person at Shioaji,
#: and days before the end of a certificate from which on it warns.
_MAX_CONNECTIONS, _CERTIFICATE_WARNING_DAYS = 5, 30

#: Why the meaning of quantity changes is not tried, by what the broker's record says of them.
_WITHOUT_QUANTITY_STEP = {
    QuantityChange.NEW_TOTAL: "the broker's record says that a changed quantity is the new total",
    QuantityChange.REDUCE_BY: "the broker's record says that a changed quantity is taken off",
    QuantityChange.UNSUPPORTED: "the broker's record says that quantities cannot be changed",
    QuantityChange.CONFIRM: (
        "this check cannot see what a changed quantity means at this broker, so changes of "
        "quantities stay refused: say in its record what they mean"
    ),
}

OpenBroker = Callable[[OnOrderChanged], Broker]


class StepFailed(Exception):
    """A step did not go well; the text says how."""


class StepWarned(StepFailed):
    """A step went in a way that a person should know of."""


class StepSkipped(StepFailed):
    """A step that makes no sense here."""


class BrokerCheck:
    """All steps, in order. Each ends in a `CheckStep`, whatever happens."""

    def __init__(
        self, request: CheckRequest, open_broker: OpenBroker, report: Callable[[CheckStep], None]
    ) -> None:
        """Takes `open_broker`, which makes an unconnected session, and `report`, which gets each
        step as it ends."""
        self._request = request
        self._open = open_broker
        self._report = report
        self._changes: list[OrderChanged] = []
        self._broker: Broker | None = None
        self._evidence: dict[str, Any] = {}
        #: The orders that may have reached the broker: the numbers that it gave them, by our tags.
        #: '': it is not known whether it has the order.
        self._sent: dict[str, str] = {}
        #: Whether the last step has logged in again: the broker counts logins.
        self._has_reopened = False

    def run(self) -> list[CheckStep]:
        steps: list[CheckStep] = []

        def step(name: str, work: Callable[[], str]) -> bool:
            began, self._evidence, outcome = time.monotonic(), {}, CheckOutcome.PASSED
            try:
                detail = work()
            except StepSkipped as error:
                outcome, detail = CheckOutcome.SKIPPED, str(error)
            except StepWarned as error:
                outcome, detail = CheckOutcome.WARNED, str(error)
            except StepFailed as error:
                outcome, detail = CheckOutcome.FAILED, str(error)
            except BerthError as error:
                outcome, detail = CheckOutcome.FAILED, f"{error.code}: {error.detail}"
            except Exception as error:
                # The boundary of a step; its text may quote what the SDK was given.
                outcome, detail = (
                    CheckOutcome.FAILED,
                    f"the check failed with {type(error).__name__}",
                )
            done = CheckStep(
                name=name,
                outcome=outcome,
                detail=detail,
                seconds=round(time.monotonic() - began, 2),
                evidence=self._evidence,
            )
            steps.append(done)
            self._report(done)
            return outcome is not CheckOutcome.FAILED

        step("clock", self._check_clock)
        try:
            if step("login", self._log_in):
                step("account", self._check_account)
                step("connections", self._check_connections)
                step("certificate", self._check_certificate)
                step("contract", self._check_contract)
                step("ping", self._check_ping)
                if self._request.orders:
                    self._run_orders(step)
                step("list", self._check_list)
        finally:
            if self._broker is not None:
                self._broker.close()
        return steps

    def _run_orders(self, step: Callable[[str, Callable[[], str]], bool]) -> None:
        try:
            if step("place and cancel", self._place_and_cancel):
                step("second session", self._check_second_session)
                for lot in self._request.lots:
                    step(f"quantity: {lot.value}", lambda lot=lot: self._try_quantity(lot))  # type: ignore[misc]
                if self._request.partial_quantity:
                    step("partial fill", self._try_partial_fill)
        finally:
            step("nothing left", self._check_nothing_left)

    # --- without orders ---------------------------------------------------------------------------

    def _check_clock(self) -> str:
        synchronised = clock_is_synchronised()
        if synchronised is None:
            raise StepSkipped("the kernel does not say whether the clock is synchronised")
        if not synchronised:
            raise StepWarned(
                "nothing keeps this host's clock right; a login's time stamp may be refused"
            )
        return "the clock is synchronised"

    def _log_in(self) -> str:
        broker = self._open(self._changes.append)
        try:
            broker.login(self._request.credentials, 2 * _CALL_TIMEOUT_S)
        except BaseException:
            broker.close()
            raise
        self._broker = broker
        version = self._probe.version if self._is_shioaji else ""
        self._evidence = {"sdk_version": version} if version else {}
        return f"logged in{f' with Shioaji {version}' if version else ''}"

    def _check_account(self) -> str:
        if not self._is_shioaji:
            raise StepSkipped("this broker has no such sign")
        if not self._probe.is_signed:
            raise StepFailed(
                "the account is not signed for orders by API: sign at the broker, then try again"
            )
        return "signed for orders by API"

    def _check_connections(self) -> str:
        if not self._is_shioaji:
            raise StepSkipped("this broker does not show its connections")
        connections = self._probe.connections(_CALL_TIMEOUT_S)
        self._evidence = {"connections": connections}
        if connections >= _MAX_CONNECTIONS:
            raise StepWarned(
                f"{connections} of {_MAX_CONNECTIONS} connections are open: the next login gets 451"
            )
        return f"{connections} of {_MAX_CONNECTIONS} connections are open"

    def _check_certificate(self) -> str:
        if not self._is_shioaji or self._request.simulation:
            raise StepSkipped("needed for orders in production only")
        days = self._probe.certificate_days(self._request.credentials.person_id)
        self._evidence = {"days_left": round(days, 1)}
        if days <= 0:
            raise StepFailed(
                "the certificate has expired: get a new one from the broker and store it"
            )
        if days <= _CERTIFICATE_WARNING_DAYS:
            raise StepWarned(f"the certificate expires in {days:.0f} days")
        return f"the certificate is valid for {days:.0f} days"

    def _check_contract(self) -> str:
        if not self._is_shioaji:
            raise StepSkipped("this broker has no contracts")
        contract = self._probe.contract(self._request.symbol)
        self._evidence = {"asked": self._request.symbol, "got": contract}
        return f"{self._request.symbol} is {contract}"

    def _check_ping(self) -> str:
        self._session.ping(_CALL_TIMEOUT_S)
        if self._is_shioaji:
            state, reasons = self._probe.cache_health()
            self._evidence = {"cache": state, "reasons": reasons}
            if state == "Degraded":
                raise StepWarned(f"the SDK's list of orders may have gaps: {', '.join(reasons)}")
        return "the session answers"

    def _check_list(self) -> str:
        listing = self._session.orders(_CALL_TIMEOUT_S)
        self._evidence = {
            "orders": len(listing.orders),
            "absence_certain": listing.behind is not None,
        }
        if listing.behind is None:
            raise StepWarned(
                f"{len(listing.orders)} orders; that one is missing proves nothing here"
            )
        return f"{len(listing.orders)} orders of today"

    # --- with orders ------------------------------------------------------------------------------

    def _place_and_cancel(self) -> str:
        with self._order(1, OrderLot.COMMON) as placed:
            began = time.monotonic()
            self._await(placed, lambda order: order.state is OrderState.SUBMITTED, "be accepted")
            accepted = time.monotonic() - began
            began = time.monotonic()
            self._session.cancel(placed.broker_order_id, _CALL_TIMEOUT_S)
            self._await(placed, lambda order: order.state is OrderState.CANCELLED, "be cancelled")
            self._evidence |= {
                "accepted_after_s": round(accepted, 2),
                "cancelled_after_s": round(time.monotonic() - began, 2),
                "events": self._events_of(placed),
            }
            if not self._evidence["events"]:
                raise StepWarned(
                    "placed and cancelled, but no event came: fills are seen in lists only"
                )
        return f"cancelled {self._evidence['cancelled_after_s']} s after the request"

    def _check_second_session(self) -> str:
        other = self._open(lambda change: None)
        try:
            other.login(self._request.credentials, 2 * _CALL_TIMEOUT_S)
            listed = {order.broker_order_id for order in other.orders(_CALL_TIMEOUT_S).orders}
        finally:
            other.close()
        seen = bool(listed & set(self._sent.values()))
        self._evidence = {"sees_orders_of_others": seen}
        if not seen and not self._request.simulation:
            raise StepFailed(
                "a second session does not see the order of the first one: lists prove nothing"
            )
        if not seen:
            raise StepWarned(
                "a second session does not see the order of the first one (known in simulation)"
            )
        return "a second session sees the order of the first one"

    def _try_quantity(self, lot: OrderLot) -> str:
        """Sends 1 for an order of 3: 2 stay where the number
        is taken off, 1 where it is the new total."""
        if not self._is_shioaji:
            record = installed_brokers()[self._request.broker].record
            raise StepSkipped(_WITHOUT_QUANTITY_STEP[record.quantity_change])
        with self._order(_ORDERED_QUANTITY, lot) as placed:
            self._await(placed, lambda order: order.state is OrderState.SUBMITTED, "be accepted")
            before = self._probe.show(placed.broker_order_id, _CALL_TIMEOUT_S)
            self._probe.send_quantity(placed.broker_order_id, _SENT_QUANTITY, _CALL_TIMEOUT_S)
            changed = self._await(
                placed,
                lambda order: (
                    order.quantity != _ORDERED_QUANTITY or order.state in FINAL_ORDER_STATES
                ),
                "change",
            )
            after = self._probe.show(placed.broker_order_id, _CALL_TIMEOUT_S)
            meanings = {
                _ORDERED_QUANTITY - _SENT_QUANTITY: QuantityMeaning.REDUCE_BY,
                _SENT_QUANTITY: QuantityMeaning.NEW_TOTAL,
            }
            meaning = (
                None if changed.state in FINAL_ORDER_STATES else meanings.get(changed.quantity)
            )
            self._evidence = {
                "ordered": _ORDERED_QUANTITY,
                "sent": _SENT_QUANTITY,
                "left": changed.quantity,
            }
            self._evidence |= {"before": before, "after": after, "events": self._events_of(placed)}
            if meaning is None:
                raise StepFailed(
                    f"{_ORDERED_QUANTITY} were ordered, {_SENT_QUANTITY} was sent, "
                    f"{changed.quantity} stay as {changed.state.value}: neither meaning explains "
                    "that, and nothing is confirmed"
                )
            self._evidence["meaning"] = msgspec.to_builtins(
                SeenMeaning(
                    broker=self._request.broker,
                    sdk_version=self._probe.version,
                    lot=lot,
                    futures=self._request.broker_type == "futures",
                    simulation=self._request.simulation,
                    meaning=meaning,
                )
            )
        return (
            f"{_ORDERED_QUANTITY} ordered, {_SENT_QUANTITY} sent, "
            f"{changed.quantity} stay: {meaning.value}"
        )

    def _try_partial_fill(self) -> str:
        """Orders more than is offered at the price, and cancels the rest of what was filled."""
        ordered = self._request.partial_quantity
        with self._order(ordered, OrderLot.COMMON, self._request.partial_price) as placed:
            try:
                part = self._await(placed, lambda order: bool(order.fills), "be filled in part")
            except StepFailed as error:
                raise StepWarned(
                    f"{error}; nothing is learned, try a price that somebody sells at"
                ) from None
            if part.state in FINAL_ORDER_STATES:
                raise StepWarned(
                    f"the order ended as {part.state.value} at once; nothing is learned, and what "
                    "it bought is yours"
                )
            before = self._shown(placed)
            self._session.cancel(placed.broker_order_id, _CALL_TIMEOUT_S)
            ended = self._await(
                placed, lambda order: order.state in FINAL_ORDER_STATES, "be cancelled"
            )
            filled = sum(fill.quantity for fill in ended.fills)
            told = sum(bool(event["fill"]) for event in self._events_of(placed))
            self._evidence = {"ordered": ordered, "filled": filled, "fills_by_events": told}
            self._evidence |= {"state": ended.state.value, "quantity": ended.quantity}
            self._evidence |= {"before": before, "after": self._shown(placed)}
            self._evidence["events"] = self._events_of(placed)
            if ended.state is OrderState.FILLED and filled == ordered:
                raise StepWarned("the rest was filled before its cancel; nothing is learned")
            if (
                ended.state is not OrderState.CANCELLED
                or ended.quantity != ordered
                or filled >= ordered
            ):
                raise StepFailed(
                    f"{ordered} were ordered and {filled} filled, and the rest cancelled: the list "
                    f"shows {ended.quantity} as {ended.state.value}"
                )
            if told < len(ended.fills):
                raise StepWarned(
                    f"{told} of {len(ended.fills)} fills came by events; the others are seen "
                    "in lists only"
                )
        return f"{filled} of {ordered} were filled and are yours, the rest is cancelled"

    def _shown(self, placed: BrokerOrder) -> dict[str, Any]:
        """Returns the SDK's own fields of an order; empty for a broker without an SDK."""
        return self._probe.show(placed.broker_order_id, _CALL_TIMEOUT_S) if self._is_shioaji else {}

    def _check_nothing_left(self) -> str:
        """Cancels what still works of our orders, and says what could not be.

        Looks by their tags for orders of which nobody knows whether the broker has them.
        """
        if not self._sent:
            raise StepSkipped("no order was placed")
        asked: set[str] = set()
        until = time.monotonic() + self._request.patience_s
        while True:
            working = [
                order for order in self._list_of_ours() if order.state not in FINAL_ORDER_STATES
            ]
            missing = [tag for tag, broker_order_id in self._sent.items() if not broker_order_id]
            if not working and not missing:
                return f"none of {len(self._sent)} orders works any more"
            for order in working:
                if order.broker_order_id not in asked:
                    asked.add(order.broker_order_id)
                    # It may have ended meanwhile; whether it has, the next look shows.
                    with suppress(BerthError):
                        self._session.cancel(order.broker_order_id, _CALL_TIMEOUT_S)
            if time.monotonic() >= until:
                break
            time.sleep(_POLL_INTERVAL_S)
        ids = [f"{order.broker_order_id} (tag {order.tag})" for order in working]
        tags = [f"an order with the tag {tag}, which the broker does not list" for tag in missing]
        raise StepFailed(f"may still work, cancel by hand: {', '.join(ids + tags)}")

    def _list_of_ours(self) -> list[BrokerOrder]:
        """Returns our orders as the broker lists them, and notes the numbers that were not known.

        Logs in again, once, if the session has ended. Raises `StepFailed`, which names the orders,
        if the broker does not answer.
        """
        try:
            try:
                listed = self._session.orders(_CALL_TIMEOUT_S).orders
            except (SessionDown, BrokerUnreachable):
                if self._has_reopened:
                    raise
                self._has_reopened = True
                self._session.close()
                self._log_in()
                listed = self._session.orders(_CALL_TIMEOUT_S).orders
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

    # --- inside -----------------------------------------------------------------------------------

    @property
    def _session(self) -> Broker:
        if self._broker is None:
            raise StepFailed("not logged in")
        return self._broker

    @property
    def _is_shioaji(self) -> bool:
        return isinstance(self._broker, ShioajiBroker)

    @property
    def _probe(self) -> ShioajiProbe:
        broker = self._session
        if not isinstance(broker, ShioajiBroker):
            raise StepSkipped("for Shioaji only")
        return ShioajiProbe(broker)

    @contextmanager
    def _order(
        self, quantity: int, lot: OrderLot, price: Decimal | None = None
    ) -> Iterator[BrokerOrder]:
        """Places an order far from the market, or at a price,
        and cancels it at the end if it still works."""
        is_partial = price is not None
        price = self._request.price if price is None else price
        if price is None and self._is_shioaji:
            price = self._probe.limit_down(self._request.symbol)
        if price is None:
            raise StepFailed("no price far from the market is known: give one with --price")
        if not is_partial:
            self._check_far_below(price)
        tag = f"ck{secrets.token_hex(2)}"
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
            placed = session.place(order, _CALL_TIMEOUT_S)
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
                self._session.cancel(placed.broker_order_id, _CALL_TIMEOUT_S)

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
            listed = self._session.orders(_CALL_TIMEOUT_S).orders
            order = next((o for o in listed if o.broker_order_id == placed.broker_order_id), None)
            if order is not None and enough(order):
                return order
            if time.monotonic() >= until:
                state = "is not listed" if order is None else f"is {order.state.value}"
                raise StepFailed(
                    f"the order did not {goal} in {self._request.patience_s:.0f} s: it {state}"
                )
            time.sleep(min(_POLL_INTERVAL_S, max(0.01, until - time.monotonic())))

    def _events_of(self, placed: BrokerOrder) -> list[dict[str, Any]]:
        return [
            {
                "state": change.order.state.value,
                "quantity": change.order.quantity,
                "fill": bool(change.fill),
            }
            for change in list(self._changes)
            if change.order.broker_order_id == placed.broker_order_id
        ]


def main() -> int:
    """Makes the check that standard input asks for. Returns 0; what came of it is in the lines."""
    request = msgspec.json.decode(sys.stdin.buffer.read(), type=CheckRequest)
    output = os.dup(1)
    plugin = installed_brokers()[request.broker]
    silence_libraries()  # an SDK may print, and once the first characters of an API key
    key = ConnectionKey(
        request.broker, request.broker_type, request.simulation, request.account, request.account
    )

    def open_broker(on_order: OnOrderChanged) -> Broker:
        options = {"paper_exchange": request.paper_exchange, **request.options}
        return load_adapter(plugin.record.adapter)(key, "broker check", on_order, options)

    def report(step: CheckStep) -> None:
        os.write(output, msgspec.json.encode(step) + b"\n")

    BrokerCheck(request, open_broker, report).run()
    return 0


if __name__ == "__main__":
    code = main()
    sys.stderr.flush()
    os._exit(code)  # a call of the SDK that hangs must not hold it up
