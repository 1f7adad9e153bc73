"""Cancels, changes and money on Shioaji's adapter, with a stand-in for the SDK's client."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable
from datetime import datetime, timedelta
from decimal import Decimal
from types import SimpleNamespace
from zoneinfo import ZoneInfo

import pytest

from infra.berth_testing.harness import HeardOrders
from tests.support.brokers.shioaji_client import (
    REAL,
    WITH_CERTIFICATE,
    ShioajiStage,
    fails,
    make_futures_trade,
)
from tests.support.brokers.shioaji_reports import make_trade
from worker_runtime.brokers.shioaji.broker import ShioajiBroker
from worker_runtime.protocol.broker_reports import BrokerOrder
from worker_runtime.protocol.errors import BrokerError, OrderRejected, OutcomeUnknown, SessionDown
from worker_runtime.protocol.messages import OrderState

ID = "531e27af"


@pytest.fixture
def setting(heard: HeardOrders) -> ShioajiStage:
    return ShioajiStage(heard)


def test_a_stock_order_is_cancelled_with_one_call(setting: ShioajiStage) -> None:
    broker = setting.login()
    cancelled = broker.cancel(ID, 20.0)
    assert (cancelled.broker_order_id, cancelled.state) == (ID, OrderState.CANCELLED)
    assert setting.client.names()[2:] == ["list_trades", "cancel_order"]
    assert 10_000 < setting.client.calls[-1][1]["timeout"] < 20_000
    assert not broker.queries_before_change(ID)


def test_l_235_a_futures_order_is_cancelled_without_a_query_before(heard: HeardOrders) -> None:
    """Sinotrade/Shioaji #235, which 1.7.6 has fixed."""
    setting = ShioajiStage(heard, kind="futures")
    setting.client.does["list_trades"] = lambda: [make_futures_trade()]
    broker = setting.login()
    broker.cancel(ID, 20.0)
    assert setting.client.names()[2:] == ["list_trades", "cancel_order"]
    assert not broker.queries_before_change(ID)
    assert broker.queries_before_change(ID, quantity=True)


def test_an_order_of_an_earlier_session_is_looked_for_at_the_broker(setting: ShioajiStage) -> None:
    broker = setting.login()
    listings = [[], [], [make_trade(REAL)]]
    setting.client.does["list_trades"] = lambda: listings.pop(0)
    assert broker.queries_before_change(ID)
    del setting.client.calls[2:]
    broker.cancel(ID, 20.0)
    assert setting.client.names()[2:] == [
        "list_trades",
        "update_status",
        "list_trades",
        "cancel_order",
    ]


def test_a_price_is_changed_by_one_call_and_never_together_with_a_quantity(
    setting: ShioajiStage,
) -> None:
    broker = setting.login()
    assert broker.replace(ID, None, Decimal("17.5"), 20.0).price == Decimal("17.5")
    sent = [words for name, words in setting.client.calls if name == "update_order"]
    assert [(words["qty"], words["price"]) for words in sent] == [(None, 17.5)]
    for quantity, price in ((None, None), (1, Decimal(17))):
        with pytest.raises(OrderRejected, match="either"):
            broker.replace(ID, quantity, price, 20.0)


def test_what_is_final_unknown_or_of_another_account_is_not_touched(setting: ShioajiStage) -> None:
    broker = setting.login()
    others = setting.client.accounts[1]
    for listed in ([make_trade(REAL, status="Filled")], [], [make_trade(REAL, account=others)]):
        setting.client.does["list_trades"] = lambda listed=listed: listed
        with pytest.raises(OrderRejected):
            broker.cancel(ID, 20.0)
    assert "cancel_order" not in setting.client.names()


CALLS: list[Callable[[ShioajiBroker], BrokerOrder]] = [
    lambda broker: broker.cancel(ID, 20.0),
    lambda broker: broker.replace(ID, None, Decimal(17), 20.0),
]


@pytest.mark.parametrize("call", CALLS)
@pytest.mark.parametrize(
    ("name", "error_type"),
    [
        ("ShioajiTimeoutError", OutcomeUnknown),
        ("OrderOutcomeUnknownError", OutcomeUnknown),
        ("BadRequestError", OrderRejected),
        ("TokenError", SessionDown),
    ],
)
def test_errors_of_a_change_are_distinguished_and_never_retried(
    setting: ShioajiStage,
    call: Callable[[ShioajiBroker], BrokerOrder],
    name: str,
    error_type: type[BrokerError],
) -> None:
    broker = setting.login()
    setting.client.does.update(cancel_order=fails(name), update_order=fails(name))
    with pytest.raises(error_type):
        call(broker)
    names = setting.client.names()
    assert names.count("cancel_order") + names.count("update_order") == 1


def test_a_list_that_fails_before_a_change_leaves_no_doubt(heard: HeardOrders) -> None:
    setting = ShioajiStage(heard, kind="futures")
    broker = setting.login()
    setting.client.does["list_trades"] = lambda: []
    setting.client.does["update_status"] = fails("ShioajiTimeoutError")
    with pytest.raises(OrderRejected, match="not sent"):
        broker.cancel(ID, 20.0)
    setting.client.does["update_status"] = fails("TokenError")
    with pytest.raises(SessionDown):
        broker.cancel(ID, 20.0)


def test_a_cancel_that_overruns_its_time_is_unknown_and_reported_late(
    setting: ShioajiStage, heard: HeardOrders
) -> None:
    broker = setting.login()
    release = threading.Event()
    setting.client.does["cancel_order"] = lambda *_, **__: (
        release.wait(30) and make_trade(REAL, status="Cancelled")
    )
    with pytest.raises(OutcomeUnknown):
        broker.cancel(ID, 4.0)  # long enough to be begun
    release.set()
    [change] = heard.wait(lambda changes: len(changes) == 1)
    assert change.order.state is OrderState.CANCELLED


def test_money_of_a_stock_and_of_a_futures_account(heard: HeardOrders) -> None:
    stock = ShioajiStage(heard).login().balance(20.0)
    assert (stock.currency, stock.cash, stock.available) == (
        "TWD",
        Decimal("12345.0"),
        Decimal("12345.0"),
    )
    futures = ShioajiStage(heard, kind="futures").login().balance(20.0)
    assert (futures.cash, futures.available) == (Decimal("900000.0"), Decimal("700000.0"))


def test_218_what_a_simulation_does_not_list_may_be_there_all_the_same(heard: HeardOrders) -> None:
    """Sinotrade/Shioaji #218."""
    assert ShioajiStage(heard).login().orders(20.0).behind is None


def test_a_list_in_production_shows_the_orders_since_midnight_in_taipei(heard: HeardOrders) -> None:
    listing = ShioajiStage(heard, simulation=False).login(WITH_CERTIFICATE).orders(20.0)
    now = datetime.now(ZoneInfo("Asia/Taipei"))
    midnight = now.replace(hour=0, minute=0, second=0, microsecond=0)
    since = (now - midnight).total_seconds()
    assert (listing.behind, listing.positions_agree) == (0, False)
    assert (since - listing.reaches + 1) % 86_400 < 10  # also when midnight passes between the two


def test_the_reference_price_is_that_of_the_contracts_info_if_it_is_of_today(
    setting: ShioajiStage,
) -> None:
    broker = setting.login()
    assert broker.reference_price("2890") is None  # the info says none
    assert broker.reference_price("nosuch") is None
    today = datetime.now(ZoneInfo("Asia/Taipei")).date()
    for day, reference, expected in (
        (today, 17.05, Decimal("17.05")),
        (today, 0.0, None),
        (today - timedelta(days=1), 17.05, None),
    ):
        info = SimpleNamespace(reference=reference, update_date=day)
        setting.client.does["info"] = lambda base, info=info: info
        assert broker.reference_price("2890") == expected
    release = threading.Event()
    setting.client.does["info"] = lambda _: release.wait(30)
    began = time.monotonic()
    assert broker.reference_price("2890") is None  # no order waits long for it
    assert time.monotonic() - began < 20
    release.set()
    broker.close()
    assert broker.reference_price("2890") is None
