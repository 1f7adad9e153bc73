"""Reports of Shioaji's users that needed no repair of ours, each by its number.

Plain numbers are issues of Sinotrade/Shioaji, those with a P of Sinotrade/shioaji-pro-app.
"""

from __future__ import annotations

import threading
from decimal import Decimal
from types import SimpleNamespace
from typing import Any

import pytest

from infra.berth_testing.harness import HeardOrders, order, until
from tests.support.brokers.shioaji_client import KEYS, REAL, ShioajiStage, fails
from tests.support.brokers.shioaji_reports import make_order_event, make_trade
from worker_runtime.brokers.port import ConnectionKey
from worker_runtime.brokers.shioaji.broker import ShioajiBroker
from worker_runtime.brokers.shioaji.reported_orders import ReportedOrders
from worker_runtime.protocol.errors import BrokerUnreachable, OrderRejected, OutcomeUnknown
from worker_runtime.protocol.messages import OrderState
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
