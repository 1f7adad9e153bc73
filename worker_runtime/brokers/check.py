"""`berth broker check`: tries a broker account step by step, with orders far from the market.

Runs as a process of its own (`python -m worker_runtime.brokers.check`), because a broker's SDK
prints, starts threads and may crash. Reads a `CheckRequest` on standard input and writes a
`CheckStep` a line.
"""

import os
import sys
import time
from collections.abc import Callable

import msgspec

from worker_runtime.brokers.check_session import (
    CALL_TIMEOUT_S,
    POLL_INTERVAL_S,
    CheckSession,
    OpenBroker,
    StepFailed,
    StepSkipped,
    StepWarned,
    is_of_a_check,
    named,
)
from worker_runtime.brokers.port import Broker, ConnectionKey, OnOrderChanged
from worker_runtime.brokers.registry import load_adapter
from worker_runtime.process.clock import clock_is_synchronised
from worker_runtime.process.log import silence_libraries
from worker_runtime.protocol.broker_check import CheckOutcome, CheckRequest, CheckStep, SeenMeaning
from worker_runtime.protocol.broker_record import QuantityChange
from worker_runtime.protocol.errors import BerthError, LoginRejected, SessionDown
from worker_runtime.protocol.installed_brokers import installed_brokers
from worker_runtime.protocol.messages import FINAL_ORDER_STATES, OrderState
from worker_runtime.protocol.order_terms import OrderLot
from worker_runtime.protocol.requests import QuantityMeaning

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


class BrokerCheck(CheckSession):
    """All steps, in order. Each ends in a `CheckStep`, whatever happens."""

    def __init__(
        self, request: CheckRequest, open_broker: OpenBroker, report: Callable[[CheckStep], None]
    ) -> None:
        """Takes `open_broker`, which makes an unconnected session, and `report`, which gets each
        step as it ends."""
        super().__init__(request, open_broker)
        self._report = report

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
            if step("login", self._check_login):
                step("account", self._check_account)
                step("connections", self._check_connections)
                step("certificate", self._check_certificate)
                step("contract", self._check_contract)
                step("ping", self._check_ping)
                step("positions", self._check_positions)
                nothing_works = step("earlier orders", self._check_earlier_orders)
                if self._request.orders and nothing_works:
                    self._run_orders(step)
                step("list", self._check_list)
                # The last one: after a refused login the broker wants no call for a while.
                step("token", self._renew_token)
        finally:
            if self._broker is not None:
                self._broker.close()
        return steps

    def _run_orders(self, step: Callable[[str, Callable[[], str]], bool]) -> None:
        try:
            if step("place and cancel", self._place_and_cancel):
                step("price", self._try_price)
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

    def _check_login(self) -> str:
        try:
            self._log_in()
        except LoginRejected as error:
            raise StepFailed(
                f"{error.code}: {error.detail}. Look at the keys, their rights, and the addresses "
                "from which the broker takes them"
            ) from None
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
        connections = self._probe.connections(CALL_TIMEOUT_S)
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
        self._session.ping(CALL_TIMEOUT_S)
        if self._is_shioaji:
            state, reasons = self._probe.cache_health()
            self._evidence = {"cache": state, "reasons": reasons}
            if state == "Degraded":
                raise StepWarned(f"the SDK's list of orders may have gaps: {', '.join(reasons)}")
        return "the session answers"

    def _check_positions(self) -> str:
        """Reads positions and balance, for which the keys need rights of their own."""
        positions = self._session.positions(CALL_TIMEOUT_S)
        balance = self._session.balance(CALL_TIMEOUT_S)
        self._evidence = {"positions": len(positions), "currency": balance.currency}
        return f"{len(positions)} positions, and a balance in {balance.currency}, can be read"

    def _check_earlier_orders(self) -> str:
        """Cancels the orders of a check that was ended before it could do so itself."""
        listed = self._session.orders(CALL_TIMEOUT_S).orders
        remaining = [o for o in listed if is_of_a_check(o) and o.state not in FINAL_ORDER_STATES]
        if not remaining:
            lists = self._record.lists
            simulation = self._request.simulation
            if not (lists.all_sessions_in_simulation if simulation else lists.all_sessions):
                raise StepSkipped(
                    "a session lists its own orders only here: if an earlier check was ended, look "
                    "at the broker for its orders"
                )
            return "no order of an earlier check works any more"
        names = ", ".join(named(remaining))
        self._evidence = {"found": len(remaining), "left_working": len(remaining)}
        if not self._request.orders:
            raise StepFailed(
                f"an order of an earlier check still works: {names}. Check again with --orders, "
                "which cancels it, or cancel it by hand"
            )
        self._sent |= {order.tag: order.broker_order_id for order in remaining}
        working, _ = self._end_orders()
        self._evidence["left_working"] = len(working)
        if working:
            raise StepFailed(f"may still work, cancel by hand: {', '.join(named(working))}")
        raise StepWarned(
            f"an earlier check was ended between an order and its cancel; cancelled now: {names}"
        )

    def _check_list(self) -> str:
        listing = self._session.orders(CALL_TIMEOUT_S)
        self._evidence = {
            "orders": len(listing.orders),
            "absence_certain": listing.behind is not None,
        }
        if listing.behind is None:
            raise StepWarned(
                f"{len(listing.orders)} orders; that one is missing proves nothing here"
            )
        return f"{len(listing.orders)} orders of today"

    def _renew_token(self) -> str:
        """Logs in again with a new token while the former session lives, then ends that one, as a
        worker does whose token was refused."""
        before = self._count_connections()
        former = self._session
        self._log_in(renews_token=True)
        former_lives = True
        try:
            former.ping(CALL_TIMEOUT_S)
        except SessionDown:
            former_lives = False
        finally:
            former.close()
        self._session.ping(CALL_TIMEOUT_S)
        self._evidence = {"former_session_lives": former_lives}
        if before is None:
            return "logged in again; the new session answers"
        after = self._await_connections(before)
        self._evidence |= {"connections_before": before, "connections_after": after}
        problems = []
        if after > before:
            problems.append(
                f"{after} connections are counted after it, {before} before: the session that was "
                "ended still counts, and the next logins get 451"
            )
        if not former_lives:
            problems.append("a new token ends the sessions that have the former one")
        if problems:
            raise StepWarned(f"logged in again; {'; '.join(problems)}")
        return f"logged in again with a new token; {after} connections, as before"

    def _count_connections(self) -> int | None:
        """Returns the person's connections; None for a broker that does not show them."""
        return self._probe.connections(CALL_TIMEOUT_S) if self._is_shioaji else None

    def _await_connections(self, expected: int) -> int:
        """Returns the connections as soon as there are no more than expected, or at last."""
        until = time.monotonic() + self._request.patience_s
        while True:
            connections = self._probe.connections(CALL_TIMEOUT_S)
            if connections <= expected or time.monotonic() >= until:
                return connections
            time.sleep(POLL_INTERVAL_S)

    # --- with orders ------------------------------------------------------------------------------

    def _place_and_cancel(self) -> str:
        with self._order(1, OrderLot.COMMON) as placed:
            began = time.monotonic()
            self._await(placed, lambda order: order.state is OrderState.SUBMITTED, "be accepted")
            accepted = time.monotonic() - began
            began = time.monotonic()
            self._session.cancel(placed.broker_order_id, CALL_TIMEOUT_S)
            self._await(placed, lambda order: order.state is OrderState.CANCELLED, "be cancelled")
            self._evidence |= {
                "accepted_after_s": round(accepted, 2),
                "cancelled_after_s": round(time.monotonic() - began, 2),
                "events": self._events_of(placed),
                "raw_events": [event.shown for event in self._raw_events_of(placed)],
            }
            if not self._evidence["events"]:
                raise StepWarned(
                    "placed and cancelled, but no event came: fills are seen in lists only"
                )
        return f"cancelled {self._evidence['cancelled_after_s']} s after the request"

    def _try_price(self) -> str:
        """Changes the price of a resting order by one step."""
        with self._order(1, OrderLot.COMMON) as placed:
            resting = self._await(
                placed, lambda order: order.state is OrderState.SUBMITTED, "be accepted"
            )
            if resting.price is None:
                raise StepFailed("the list shows no price of a limit order")
            price = self._next_price(resting.price)
            before = self._shown(placed)
            began = time.monotonic()
            self._session.replace(placed.broker_order_id, None, price, CALL_TIMEOUT_S)
            changed = self._await(
                placed,
                lambda order: order.price == price or order.state in FINAL_ORDER_STATES,
                "change its price",
            )
            self._evidence = {"from": str(resting.price), "to": str(price)}
            self._evidence |= {"changed_after_s": round(time.monotonic() - began, 2)}
            self._evidence |= {"before": before, "after": self._shown(placed)}
            if (changed.state, changed.quantity) != (OrderState.SUBMITTED, resting.quantity):
                raise StepFailed(
                    f"after the change of its price to {price}, the order of {resting.quantity} is "
                    f"{changed.state.value} with {changed.quantity} at {changed.price}"
                )
            is_told = self._await_change(placed, lambda order: order.price == price)
            self._evidence |= {"events": self._events_of(placed)}
            self._evidence |= {"raw_events": [e.shown for e in self._raw_events_of(placed)]}
            if not is_told:
                raise StepWarned(
                    f"changed from {resting.price} to {price}, but no event came: other prices are "
                    "seen in lists only"
                )
        return (
            f"changed from {resting.price} to {price}, seen "
            f"{self._evidence['changed_after_s']} s after the request"
        )

    def _check_second_session(self) -> str:
        other = self._open(lambda change: None)
        try:
            other.login(self._request.credentials, 2 * CALL_TIMEOUT_S)
            listed = {order.broker_order_id for order in other.orders(CALL_TIMEOUT_S).orders}
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
            before = self._probe.show(placed.broker_order_id, CALL_TIMEOUT_S)
            self._probe.send_quantity(placed.broker_order_id, _SENT_QUANTITY, CALL_TIMEOUT_S)
            changed = self._await(
                placed,
                lambda order: (
                    order.quantity != _ORDERED_QUANTITY or order.state in FINAL_ORDER_STATES
                ),
                "change",
            )
            after = self._probe.show(placed.broker_order_id, CALL_TIMEOUT_S)
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
            self._session.cancel(placed.broker_order_id, CALL_TIMEOUT_S)
            ended = self._await(
                placed, lambda order: order.state in FINAL_ORDER_STATES, "be cancelled"
            )
            filled = sum(fill.quantity for fill in ended.fills)
            told = sum(bool(event["fill"]) for event in self._events_of(placed))
            self._evidence = {"ordered": ordered, "filled": filled, "fills_by_events": told}
            self._evidence |= {"state": ended.state.value, "quantity": ended.quantity}
            self._evidence |= {"before": before, "after": self._shown(placed)}
            self._evidence["events"] = self._events_of(placed)
            raw = self._raw_events_of(placed)
            self._evidence["raw_events"] = [event.shown for event in raw]
            # Whether the first event of the order itself came after one of its deals.
            self._evidence["deal_came_first"] = bool(raw and raw[0].is_deal)
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
        order = "before" if self._evidence["deal_came_first"] else "after"
        return f"{filled} of {ordered} were filled and are yours, the rest is cancelled" + (
            f"; deals were reported {order} their order" if raw else ""
        )

    def _check_nothing_left(self) -> str:
        """Cancels what still works of our orders, and says what could not be.

        Looks by their tags for orders of which nobody knows whether the broker has them.
        """
        if not self._sent:
            raise StepSkipped("no order was placed")
        working, missing = self._end_orders()
        if not working and not missing:
            return f"none of {len(self._sent)} orders works any more"
        tags = [f"an order with the tag {tag}, which the broker does not list" for tag in missing]
        raise StepFailed(f"may still work, cancel by hand: {', '.join(named(working) + tags)}")


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
