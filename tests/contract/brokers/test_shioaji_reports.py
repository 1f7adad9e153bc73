"""Reports of Shioaji's users that needed no repair of ours, each by its number.

Plain numbers are issues of Sinotrade/Shioaji, those with a p of Sinotrade/shioaji-pro-app.
docs/reference/brokers.md says what each report is about.
"""

from __future__ import annotations

import threading
from decimal import Decimal
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from infra.berth_testing.harness import HeardOrders, order, until
from tests.support.brokers.shioaji_client import (
    KEYS,
    REAL,
    WITH_CERTIFICATE,
    ShioajiStage,
    fails,
)
from tests.support.brokers.shioaji_reports import make_order_event, make_trade
from worker_runtime.brokers.port import ConnectionKey
from worker_runtime.brokers.shioaji import broker as adapter
from worker_runtime.brokers.shioaji.broker import ShioajiBroker
from worker_runtime.brokers.shioaji.reported_orders import ReportedOrders
from worker_runtime.protocol.broker_record import CountedPer
from worker_runtime.protocol.errors import BrokerUnreachable, OrderRejected, OutcomeUnknown
from worker_runtime.protocol.installed_brokers import installed_brokers
from worker_runtime.protocol.messages import OrderState, TimeInForce
from worker_runtime.protocol.order_terms import OrderLot

ID = "531e27af"


@pytest.fixture
def setting(heard: HeardOrders) -> ShioajiStage:
    return ShioajiStage(heard)


@pytest.mark.parametrize("name", ["ServerError", "ShioajiConnectionError"])
def test_230_a_login_whose_session_is_never_established_is_ended_and_tried_again(
    setting: ShioajiStage, name: str
) -> None:
    """The accounts were there, and the contracts could not be loaded: no session with half of it is
    kept."""
    setting.client.does["preload"] = fails(
        name, "SessionNotEstablished: Unable to wait for session"
    )
    with pytest.raises(BrokerUnreachable) as caught:
        setting.login()
    assert caught.value.retryable
    until(lambda: "logout" in setting.client.names())
    assert not setting.broker.alive()


def test_86_a_login_that_ends_with_an_empty_error_is_tried_again(setting: ShioajiStage) -> None:
    """As it did when it took longer than the SDK waited."""

    def log_in(*_: Any, **__: Any) -> Any:
        raise Exception({})

    setting.client.does["login"] = log_in
    with pytest.raises(BrokerUnreachable) as caught:
        setting.login()
    assert caught.value.retryable


def test_112_a_constructor_that_does_not_answer_ends_with_the_logins_time(
    heard: HeardOrders,
) -> None:
    """It looks for its host's address for a minute when no name is resolved."""
    release = threading.Event()
    setting = ShioajiStage(heard)

    def make(simulation: bool) -> Any:
        assert release.wait(30)
        return setting.client

    sdk = SimpleNamespace(Shioaji=make, __version__=REAL.__version__)
    broker = ShioajiBroker(ConnectionKey("shioaji", "stock", True, "111"), heard, lambda: sdk)
    with pytest.raises(BrokerUnreachable):
        broker.login(KEYS, 0.1)
    release.set()
    until(lambda: "logout" in setting.client.names())


def test_88_a_cancel_that_the_broker_wants_a_status_for_has_changed_nothing(
    setting: ShioajiStage,
) -> None:
    """Until 1.7.5 also for futures, 235."""
    broker = setting.login()
    setting.client.does["cancel_order"] = fails(
        "BadRequestError",
        "{'status': {'status_code': 400}, 'response': {'detail': 'Please run update_status first "
        "to get trade details.'}}",
    )
    with pytest.raises(OrderRejected, match="update_status"):
        broker.cancel(ID, 20.0)
    assert broker.alive()


def held(quantity: int) -> Any:
    return SimpleNamespace(
        code="4958",
        direction=REAL.Action.Buy,
        quantity=quantity,
        price=588.0,
        cond=REAL.StockOrderCond.Cash,
    )


def test_209_positions_of_a_simulation_that_are_a_thousandfold_prove_no_fill(
    setting: ShioajiStage,
) -> None:
    """One lot and 703 odd shares were shown as 704 lots. What is shown cannot be told from the
    truth, so no fill is concluded from a simulation's positions, and no absence from its list."""
    setting.client.does["list_positions"] = lambda **_: [held(704_000)]
    broker = setting.login()
    [position] = broker.positions(20.0)
    assert (position.quantity, position.odd_shares) == (704, 0)
    listing = broker.orders(20.0)
    assert (listing.positions_agree, listing.behind) == (False, None)


def test_209_mixed_lots_that_are_shown_right_are_read_right(setting: ShioajiStage) -> None:
    setting.client.does["list_positions"] = lambda **_: [held(1703)]
    [position] = setting.login().positions(20.0)
    assert (position.held(OrderLot.COMMON), position.held(OrderLot.INTRADAY_ODD)) == (1, 703)


def test_182_positions_that_a_simulation_does_not_show_take_no_fill_back(
    setting: ShioajiStage,
) -> None:
    row = make_trade(REAL, status="Filled", deals=[("1", 3, 17.0, 1673501631.6)])
    setting.client.does["list_trades"] = lambda: [row]
    broker = setting.login()
    assert broker.positions(20.0) == []
    listing = broker.orders(20.0)
    [listed] = listing.orders
    assert (listed.state, sum(fill.quantity for fill in listed.fills)) == (OrderState.FILLED, 3)
    assert not listing.positions_agree


@pytest.mark.parametrize("message", ["無此商品代碼", "集保不足"])
def test_182_104_an_order_that_only_an_event_refuses_ends_with_its_reason(
    setting: ShioajiStage, heard: HeardOrders, message: str
) -> None:
    """Answered as on its way, then refused: 182 for its symbol, 104 for a day-trade short that got
    lost."""
    placed = setting.login().place(order(symbol="2890", price=Decimal(17), quantity=3), 20.0)
    event = make_order_event("New", "88", order_quantity=0)
    event["operation"]["op_msg"] = message
    assert setting.client.callback is not None
    setting.client.callback(REAL.OrderState.StockOrder, event)
    [change] = heard.changes
    assert change.order.broker_order_id == placed.broker_order_id
    assert (change.order.state, change.order.reason) == (OrderState.REJECTED, message)


def test_182_an_event_whose_order_has_no_id_is_taken_by_its_status_or_dropped() -> None:
    book = ReportedOrders()
    event = make_order_event("New", "88", event_id="e1")
    event["order"]["id"], event["status"]["id"] = "", ID
    change = book.merge_event("SORDER", event)
    assert change is not None
    assert change.order.broker_order_id == ID
    event = make_order_event("New", "88", event_id="e2")
    event["order"]["id"] = event["status"]["id"] = ""
    assert book.merge_event("SORDER", event) is None


def test_104_no_order_of_ours_is_a_day_trade_short(setting: ShioajiStage) -> None:
    """It came back as `false` and was refused as a sale of what is not held. Berth has no such
    order."""
    setting.login().place(order(symbol="2890", price=Decimal(17)), 20.0)
    [(_, sent)] = [call for call in setting.client.calls if call[0] == "place_order"]
    assert not sent["order"].daytrade_short


def test_p120_a_cancel_is_believed_when_the_broker_says_so_and_never_sent_twice(
    setting: ShioajiStage, heard: HeardOrders
) -> None:
    broker = setting.login()
    setting.client.does["cancel_order"] = lambda *_, **__: make_trade(REAL)  # answered as Submitted
    assert broker.cancel(ID, 20.0).state is OrderState.SUBMITTED
    assert [order.state for order in broker.orders(20.0).orders] == [OrderState.SUBMITTED]
    setting.client.does["cancel_order"] = fails("ShioajiTimeoutError")
    with pytest.raises(OutcomeUnknown):
        broker.cancel(ID, 20.0)
    assert setting.client.names().count("cancel_order") == 2  # one a call
    row = make_trade(REAL, status="Cancelled", cancel_quantity=3)
    setting.client.does["list_trades"] = lambda: [row]
    assert [order.state for order in broker.orders(20.0).orders] == [OrderState.CANCELLED]


@pytest.mark.parametrize("done", [1, 2])
def test_p120_a_cancel_that_covers_less_than_the_rest_is_not_the_end(
    setting: ShioajiStage, done: int
) -> None:
    row = make_trade(REAL, cancel_quantity=done)
    setting.client.does["list_trades"] = lambda: [row]
    [listed] = setting.login().orders(20.0).orders
    assert (listed.state, listed.quantity) == (OrderState.SUBMITTED, 3 - done)


# --- sessions and contracts ----------------------------------------------------------------------


def test_46_an_order_of_a_session_that_idled_for_a_day_is_neither_working_nor_refused(
    setting: ShioajiStage,
) -> None:
    """`Inactive` was the answer, and a new session placed the same order. Nobody says what it
    means, so the order is unknown, and only the broker's list settles it."""
    broker = setting.login()
    setting.client.does["place_order"] = lambda **_: make_trade(REAL, status="Inactive")
    placed = broker.place(order(symbol="2890", price=Decimal(17), quantity=3), 20.0)
    assert placed.state is OrderState.UNKNOWN
    assert setting.client.names().count("place_order") == 1
    for status, state in (("Failed", OrderState.REJECTED), ("Submitted", OrderState.SUBMITTED)):
        row = make_trade(REAL, status=status, id=status)
        setting.client.does["list_trades"] = lambda row=row: [row]
        assert [listed.state for listed in broker.orders(20.0).orders] == [state]


def test_156_a_rolling_code_names_the_next_contract_once_the_former_one_has_ended(
    heard: HeardOrders,
) -> None:
    """Whether contracts have to be loaded again after a settlement: Berth keeps none. Each order
    asks the SDK, which has the current ones."""
    setting = ShioajiStage(heard, kind="futures")
    broker = setting.login()
    targets = {"TXFR1": "TXFA6"}

    def get(code: str, security_type: str) -> Any:
        return REAL.BaseContract("FUT", "TAIFEX", code, target_code=targets.get(code, ""))

    setting.client.contracts.get = get
    for target in ("TXFA6", "TXFB6"):
        targets["TXFR1"] = target
        broker.place(order(symbol="TXFR1", price=Decimal(22000)), 20.0)
    sent = [words["contract"].code for name, words in setting.client.calls if name == "place_order"]
    assert sent == ["TXFA6", "TXFB6"]
    assert setting.client.names() == ["login", "preload", "place_order", "place_order"]


def test_181_contracts_that_never_finish_loading_end_the_login_in_its_time(
    setting: ShioajiStage,
) -> None:
    release = threading.Event()
    setting.client.does["preload"] = lambda *_, **__: release.wait(30)
    with pytest.raises(BrokerUnreachable) as caught:
        setting.broker.login(KEYS, 0.2)
    assert caught.value.retryable
    release.set()
    until(lambda: "logout" in setting.client.names())


def test_181_an_order_whose_contract_is_never_found_is_not_sent_when_it_is(
    setting: ShioajiStage,
) -> None:
    broker, others = setting.login(), set(threading.enumerate())
    get, asked, release = setting.client.contracts.get, threading.Event(), threading.Event()

    def hang(code: str, security_type: str) -> Any:
        asked.set()
        assert release.wait(30)
        return get(code, security_type=security_type)

    setting.client.contracts.get = hang
    with pytest.raises(OutcomeUnknown):
        broker.place(order(symbol="2890", price=Decimal(17)), 0.2)
    until(asked.is_set)
    release.set()
    until(lambda: "broker-call" not in {t.name for t in {*threading.enumerate()} - others})
    assert "place_order" not in setting.client.names()


def test_111_an_order_of_an_open_session_is_one_call(setting: ShioajiStage) -> None:
    """It took ten seconds and more, as login and contracts came with each order."""
    broker = setting.login()
    before = len(setting.client.calls)
    for _ in range(3):
        broker.place(order(symbol="2890", price=Decimal(17)), 20.0)
    assert setting.client.names()[before:] == ["place_order"] * 3


def test_201_limits_are_counted_for_the_person_and_no_history_of_prices_is_asked_for() -> None:
    """It is not said whether the limits of `ticks` and `kbars` count for a key, an account or a
    connection, nor when they begin anew. Berth asks for neither; the limits that it spends count
    for the person, in all workers."""
    record = installed_brokers()["shioaji"].record
    assert record.limits.counted_per is CountedPer.PERSON
    folder = Path(str(adapter.__file__)).parent
    source = "".join(path.read_text(encoding="utf-8") for path in folder.glob("*.py"))
    called = {name for name in dir(REAL.Shioaji) if f"api.{name}(" in source}
    assert {"place_order", "usage"} <= called
    assert called.isdisjoint({"ticks", "kbars", "snapshots", "daily_quotes", "scanners"})


# --- orders ---------------------------------------------------------------------------------------


@pytest.mark.parametrize("word", [TimeInForce.IOC, TimeInForce.FOK])
def test_87_a_market_order_of_futures_has_no_price_and_does_not_rest(
    heard: HeardOrders, word: TimeInForce
) -> None:
    """What a market order has as its price, and why one for the rest of the day is refused."""
    setting = ShioajiStage(heard, kind="futures")
    broker = setting.login()
    with pytest.raises(OrderRejected, match="9938"):
        broker.place(order(symbol="TXFA6", time_in_force=TimeInForce.ROD), 20.0)
    assert "place_order" not in setting.client.names()
    broker.place(order(symbol="TXFA6", time_in_force=word), 20.0)
    [(_, sent)] = [call for call in setting.client.calls if call[0] == "place_order"]
    native = sent["order"]
    assert (native.price, native.price_type.value, native.time_in_force.value) == (0, "MKT", word)


def test_153_a_certificate_that_is_not_valid_yet_refuses_the_order_unsent(
    heard: HeardOrders,
) -> None:
    """It was activated without an error, and the first order's signature failed."""
    setting = ShioajiStage(heard, simulation=False)
    broker = setting.login(WITH_CERTIFICATE)
    setting.client.does["place_order"] = fails("CaError", "RTN_CERT_NOT_YET_VALID 5012")
    with pytest.raises(OrderRejected, match="RTN_CERT_NOT_YET_VALID"):
        broker.place(order(symbol="2890", price=Decimal(17)), 20.0)
    assert setting.client.names().count("place_order") == 1
    assert broker.alive()
    assert len(broker.orders(20.0).orders) == 1


def test_177_odd_shares_are_positions_though_they_make_no_lot(setting: ShioajiStage) -> None:
    """200 shares were shown with a quantity of 0: the SDK counts in lots unless told otherwise."""
    lots = {"Share": 200, "Common": 0}
    setting.client.does["list_positions"] = lambda unit, **_: [held(lots[unit])]
    [position] = setting.login().positions(20.0)
    assert (position.quantity, position.odd_shares) == (0, 200)


def test_vnpy3_an_event_with_an_unknown_condition_ends_its_order_and_stops_no_others(
    setting: ShioajiStage, heard: HeardOrders
) -> None:
    """ypochien/vnpy_sinopac 3: a sale was refused, its event had a condition that the program did
    not know, and the callback died of it."""
    setting.login().place(order(symbol="2890", price=Decimal(17), quantity=3), 20.0)
    tell = setting.client.callback
    assert tell is not None
    event = make_order_event("New", "88", order_quantity=0)
    event["operation"]["op_msg"] = "集保不足"
    event["order"] |= {"action": "Sell", "order_cond": "a new condition", "first_sell": "a word"}
    tell(REAL.OrderState.StockOrder, event)
    other = make_order_event("New", event_id="e2")
    other["order"]["id"] = other["status"]["id"] = "another"
    tell(REAL.OrderState.StockOrder, other)
    assert [(c.order.broker_order_id, c.order.state) for c in heard.changes] == [
        (ID, OrderState.REJECTED),
        ("another", OrderState.SUBMITTED),
    ]
