"""The faults A to L that a look at Shioaji 1.7.9 found in the adapter, each with its test.

The letters are those of docs/reference/brokers.md, which says what is known of each.
"""

from __future__ import annotations

import inspect
import threading
from collections.abc import Callable
from datetime import UTC, datetime, timedelta
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
    health,
    make_futures_trade,
)
from tests.support.brokers.shioaji_reports import (
    make_deal_event,
    make_order_event,
    make_trade,
)
from tests.support.commands import ROOT
from worker_runtime.brokers.port import KeepsToken
from worker_runtime.brokers.shioaji import mapping, sdk
from worker_runtime.brokers.shioaji.broker import ShioajiBroker
from worker_runtime.brokers.shioaji.probe import ShioajiProbe
from worker_runtime.brokers.shioaji.reported_orders import ReportedOrders
from worker_runtime.protocol.errors import (
    BerthError,
    BrokerClockRefused,
    BrokerMaintenance,
    BrokerUnreachable,
    BrokerVersionRefused,
    CertificateExpired,
    LoginLimited,
    OrderRejected,
    OutcomeUnknown,
    QuantityChangeUnconfirmed,
    SessionDown,
)
from worker_runtime.protocol.messages import (
    FINAL_ORDER_STATES,
    OrderState,
    PriceType,
    TimeInForce,
)
from worker_runtime.protocol.order_terms import OrderCondition, OrderLot
from worker_runtime.protocol.requests import ConfirmedQuantityChange, QuantityMeaning

ID = "531e27af"


@pytest.fixture
def setting(heard: HeardOrders) -> ShioajiStage:
    return ShioajiStage(heard)


def confirmed(
    meaning: QuantityMeaning,
    lot: OrderLot = OrderLot.COMMON,
    *,
    futures: bool = False,
    version: str = REAL.__version__,
) -> ConfirmedQuantityChange:
    return ConfirmedQuantityChange(sdk_version=version, lot=lot, futures=futures, meaning=meaning)


def quantities_sent(setting: ShioajiStage) -> list[int]:
    return [words["qty"] for name, words in setting.client.calls if name == "update_order"]


# --- A: what `qty` of a change means --------------------------------------------------------------


@pytest.mark.parametrize(
    "known",
    [
        (),
        (confirmed(QuantityMeaning.REDUCE_BY, version="1.7.8"),),
        (confirmed(QuantityMeaning.REDUCE_BY, OrderLot.ODD),),
        (confirmed(QuantityMeaning.REDUCE_BY, futures=True),),
        (confirmed(QuantityMeaning.REDUCE_BY), confirmed(QuantityMeaning.NEW_TOTAL)),
    ],
)
def test_a_a_quantity_change_that_nobody_has_confirmed_is_refused_unsent(
    setting: ShioajiStage, known: tuple[ConfirmedQuantityChange, ...]
) -> None:
    broker = setting.login()
    with pytest.raises(QuantityChangeUnconfirmed, match="Cancel the order and place a new one"):
        broker.replace(ID, 2, None, 20.0, known)
    assert quantities_sent(setting) == []
    # Another price passes.
    assert broker.replace(ID, None, Decimal(17), 20.0, known).price == Decimal(17)


@pytest.mark.parametrize(
    ("meaning", "sent"), [(QuantityMeaning.REDUCE_BY, 8), (QuantityMeaning.NEW_TOTAL, 2)]
)
def test_a_a_confirmed_quantity_change_sends_what_this_sdk_takes(
    setting: ShioajiStage, meaning: QuantityMeaning, sent: int
) -> None:
    broker = setting.login()
    setting.client.does["list_trades"] = lambda: [make_trade(REAL, quantity=10)]
    setting.client.does["update_order"] = lambda *_, **__: make_trade(
        REAL, quantity=10, cancel_quantity=8
    )
    assert broker.replace(ID, 2, None, 20.0, (confirmed(meaning),)).quantity == 2
    assert quantities_sent(setting) == [sent]
    assert "update_status" in setting.client.names()  # it counts from what the broker has now


def test_a_each_kind_of_lot_is_confirmed_by_itself(heard: HeardOrders) -> None:
    stock, futures = ShioajiStage(heard), ShioajiStage(heard, kind="futures")
    known = (
        confirmed(QuantityMeaning.NEW_TOTAL, OrderLot.ODD),
        confirmed(QuantityMeaning.REDUCE_BY, futures=True),
    )
    stock.client.does["list_trades"] = lambda: [make_trade(REAL, quantity=10, lot="Odd")]
    futures.client.does["list_trades"] = lambda: [make_futures_trade(quantity=10)]
    stock.login().replace(ID, 2, None, 20.0, known)
    futures.login().replace(ID, 2, None, 20.0, known)
    assert (quantities_sent(stock), quantities_sent(futures)) == ([2], [8])


@pytest.mark.parametrize("lot", [None, "BlockTrade"])
def test_a_a_row_that_does_not_name_its_lot_is_not_changed(
    setting: ShioajiStage, lot: str | None
) -> None:
    broker = setting.login()
    setting.client.does["list_trades"] = lambda: [make_trade(REAL, quantity=10, lot=lot)]
    known = tuple(confirmed(QuantityMeaning.REDUCE_BY, kind) for kind in OrderLot)
    with pytest.raises(QuantityChangeUnconfirmed, match="lot is not named"):
        broker.replace(ID, 2, None, 20.0, known)
    assert quantities_sent(setting) == []


def test_a_a_partly_filled_order_is_not_changed_to_a_total_that_may_mean_the_rest(
    setting: ShioajiStage,
) -> None:
    broker = setting.login()
    partly = make_trade(REAL, status="PartFilled", deals=[("1", 1, 17.0, 1673501631.6)])
    setting.client.does["list_trades"] = lambda: [partly]
    with pytest.raises(QuantityChangeUnconfirmed, match="partly filled"):
        broker.replace(ID, 2, None, 20.0, (confirmed(QuantityMeaning.NEW_TOTAL),))
    broker.replace(ID, 2, None, 20.0, (confirmed(QuantityMeaning.REDUCE_BY),))
    assert quantities_sent(setting) == [1]


# --- B: the oldest SDK that takes our calls -------------------------------------------------------


def test_b_the_package_asks_for_an_sdk_that_knows_time_in_force() -> None:
    assert 'shioaji = ["shioaji>=1.7.9,<1.8"]' in (ROOT / "pyproject.toml").read_text(
        encoding="utf-8"
    )


@pytest.mark.parametrize("name", ["StockOrder", "FuturesOrder"])
def test_b_the_sdks_orders_take_our_words(name: str) -> None:
    taken = set(inspect.signature(getattr(REAL, name)).parameters)
    ours = {"action", "price", "quantity", "price_type", "time_in_force", "custom_field", "account"}
    ours |= {"order_lot", "order_cond"} if name == "StockOrder" else {"octype"}
    assert ours <= taken, (
        f"Shioaji {REAL.__version__} has no {', '.join(sorted(ours - taken))} in {name}"
    )


# --- C: releases that the index no longer has -----------------------------------------------------


def test_c_the_documents_say_how_to_keep_the_wheel() -> None:
    text = Path(ROOT / "docs/reference/brokers.md").read_text(encoding="utf-8")
    assert "pip download" in text
    assert "latest two patch releases" in text


# --- D: quantities of reduced and cancelled orders ------------------------------------------------


@pytest.mark.parametrize(
    ("row", "quantity", "state"),
    [
        ({"quantity": 10, "cancel_quantity": 8, "order_quantity": 0}, 2, OrderState.SUBMITTED),
        ({"quantity": 10, "cancel_quantity": 8, "order_quantity": 2}, 2, OrderState.SUBMITTED),
        # Sinotrade/Shioaji #234: everything is cancelled, the status has not heard of it.
        ({"quantity": 10, "cancel_quantity": 10, "order_quantity": 0}, 10, OrderState.CANCELLED),
        ({"quantity": 3, "order_quantity": 0, "status": "Filled"}, 3, OrderState.FILLED),
        ({"quantity": 3, "cancel_quantity": 3, "status": "Cancelled"}, 3, OrderState.CANCELLED),
        ({"quantity": 3, "cancel_quantity": 0, "order_quantity": 3}, 3, OrderState.SUBMITTED),
    ],
)
def test_d_the_quantity_is_what_was_ordered_less_what_was_taken_off(
    row: dict[str, Any], quantity: int, state: OrderState
) -> None:
    deals = [("1", 3, 17.0, 1673501631.6)] if row.get("status") == "Filled" else []
    mapped = mapping.order_of(make_trade(REAL, deals=deals, **row))
    assert (mapped.quantity, mapped.state) == (quantity, state)


def test_d_the_recorded_sequence_of_a_reduced_order_does_not_grow_again() -> None:
    book = ReportedOrders()
    shown = []
    for number, (kind, said) in enumerate(
        (("New", 2), ("UpdateQty", 1), ("UpdatePrice", 2), ("Cancel", 1))
    ):
        event = make_order_event(kind, event_id=f"e{number}", order_quantity=said)
        event["order"]["quantity"] = said
        change = book.merge_event("SORDER", event)
        assert change is not None
        shown.append(change.order.quantity)
    assert shown == [2, 1, 1, 1]


@pytest.mark.parametrize("known", [True, False])
def test_d_a_cancel_of_the_rest_leaves_a_partly_filled_order_cancelled(known: bool) -> None:
    book = ReportedOrders()
    if known:
        book.merge_trade(make_trade(REAL))
    for sequence in ("1", "2"):
        book.merge_event("SDEAL", make_deal_event(sequence))
    event = make_order_event("Cancel", event_id="c", order_quantity=1, cancel_quantity=1)
    event["order"]["quantity"] = 1
    change = book.merge_event("SORDER", event)
    assert change is not None
    assert (change.order.state, change.order.quantity) == (OrderState.CANCELLED, 3)
    assert sum(fill.quantity for fill in change.order.fills) == 2


@pytest.mark.parametrize("fills_first", [True, False])
@pytest.mark.parametrize(
    ("row", "state", "quantity"),
    [
        # The event says what stays: 5 were ordered and 3 taken off, 2 are filled.
        (
            {"status": "Filled", "cancel_quantity": 3, "order_quantity": 0},
            OrderState.FILLED,
            2,
        ),
        # It says something else: 1 was taken off, 2 lots work on.
        (
            {"status": "PartFilled", "cancel_quantity": 1, "order_quantity": 4},
            OrderState.PART_FILLED,
            4,
        ),
    ],
)
def test_d_a_reduction_that_an_event_reports_after_a_fill_ends_nothing(
    fills_first: bool, row: dict[str, Any], state: OrderState, quantity: int
) -> None:
    book = ReportedOrders()
    book.merge_trade(make_trade(REAL, quantity=5))
    reduction = make_order_event("UpdateQty", event_id="u", order_quantity=2, cancel_quantity=1)
    reduction["order"]["quantity"] = 2
    events = [("SDEAL", make_deal_event("1")), ("SDEAL", make_deal_event("2"))]
    events.insert(len(events) if fills_first else 0, ("SORDER", reduction))
    for kind, event in events:
        change = book.merge_event(kind, event)
        assert change is not None
        assert change.order.state not in FINAL_ORDER_STATES
        # Whoever counts fills against the quantity must not take it for filled either.
        assert change.order.quantity > sum(fill.quantity for fill in change.order.fills)
    deals = [(number, 1, 17.0, 1673501631.6) for number in ("1", "2")]
    listed = book.merge_trade(make_trade(REAL, quantity=5, deals=deals, **row))
    assert (listed.state, listed.quantity) == (state, quantity)
    assert sum(fill.quantity for fill in listed.fills) == 2


def test_d_a_reduction_that_is_the_first_news_of_an_order_ends_nothing_with_its_fills() -> None:
    book = ReportedOrders()
    for sequence in ("1", "2"):
        book.merge_event("SDEAL", make_deal_event(sequence))
    event = make_order_event("UpdateQty", order_quantity=2)
    event["order"]["quantity"] = 2
    change = book.merge_event("SORDER", event)
    assert change is not None
    assert change.order.state is OrderState.PART_FILLED


@pytest.mark.parametrize(
    ("row", "state"),
    [
        ({"status": "PartFilled"}, OrderState.PART_FILLED),
        # Nothing is left of the 3: 1 was taken off, 2 are filled.
        ({"status": "Submitted", "cancel_quantity": 1}, OrderState.CANCELLED),
        ({"status": "Cancelled", "cancel_quantity": 1}, OrderState.CANCELLED),
    ],
)
def test_d_fills_that_a_row_counts_but_does_not_list_are_not_lost(
    heard: HeardOrders, row: dict[str, Any], state: OrderState
) -> None:
    setting = ShioajiStage(heard, simulation=False)
    broker = setting.login(WITH_CERTIFICATE)
    deals = [("1", 1, 17.0, 1673501631.6), ("2", 1, 17.0, 1673501631.6)]
    known: list[tuple[str, int, float, float]] = []
    setting.client.does["list_trades"] = lambda: [
        make_trade(REAL, quantity=3, deal_quantity=2, deals=known, **row)
    ]
    for listed in ([], deals[:1]):
        known[:] = listed
        listing = broker.orders(20.0)
        [shown] = listing.orders
        # An order that ended without its fills would keep what it has.
        assert (shown.state, len(shown.fills)) == (OrderState.PART_FILLED, len(listed))
        assert listing.behind is None
    known[:] = deals
    listing = broker.orders(20.0)
    [shown] = listing.orders
    assert (shown.state, len(shown.fills)) == (state, 2)
    assert listing.behind is not None


def test_d_a_filled_row_without_its_deals_is_filled_once_events_tell_them() -> None:
    book = ReportedOrders()
    row = make_trade(REAL, status="Filled", deal_quantity=3)
    assert book.merge_trade(row).state is OrderState.PART_FILLED
    changes = [book.merge_event("SDEAL", make_deal_event(str(number))) for number in range(3)]
    states = [change.order.state for change in changes if change]
    assert states == [OrderState.PART_FILLED, OrderState.PART_FILLED, OrderState.FILLED]
    assert book.merge_trade(row).state is OrderState.FILLED


def test_d_a_count_that_is_more_than_was_ordered_says_nothing() -> None:
    listed = mapping.order_of(make_trade(REAL, quantity=3, deal_quantity=3000))
    assert (listed.state, listed.quantity) == (OrderState.SUBMITTED, 3)


# --- E: pauses ------------------------------------------------------------------------------------


def test_e_a_login_refused_with_503_asks_for_a_pause_of_a_minute(setting: ShioajiStage) -> None:
    setting.client.does["login"] = fails(
        "SystemMaintenance", "StatusCode: 503, Detail: Service Unavailable"
    )
    with pytest.raises(LoginLimited) as caught:
        setting.login()
    assert caught.value.retry_after == 60
    assert not isinstance(caught.value, BrokerVersionRefused)


def test_e_a_503_that_means_an_old_version_is_a_state_of_its_own(setting: ShioajiStage) -> None:
    setting.client.does["login"] = fails(
        "SystemMaintenance", "503: Please update the version of shioaji"
    )
    with pytest.raises(BrokerVersionRefused) as caught:
        setting.login()
    assert caught.value.code == "BROKER_VERSION_REFUSED"
    assert caught.value.retry_after == 3600


def test_e_a_503_of_a_ping_says_nothing_against_the_session(setting: ShioajiStage) -> None:
    broker = setting.login()
    setting.client.does["usage"] = fails("SystemMaintenance", "503")
    with pytest.raises(BrokerMaintenance) as caught:
        broker.ping(20.0)
    assert caught.value.retry_after == 60
    assert broker.alive()


def test_e_a_503_of_an_order_a_cancel_or_a_query_asks_for_a_pause_and_nothing_follows_it(
    heard: HeardOrders,
) -> None:
    new_order = order(symbol="2890", price=Decimal(17))
    calls: list[tuple[str, Callable[[ShioajiBroker], object], type[BerthError]]] = [
        ("place_order", lambda broker: broker.place(new_order, 20.0), OutcomeUnknown),
        ("cancel_order", lambda broker: broker.cancel(ID, 20.0), OutcomeUnknown),
        ("update_status", lambda broker: broker.cancel("other", 20.0), BrokerMaintenance),
        ("update_status", lambda broker: broker.orders(20.0), BrokerMaintenance),
        ("list_positions", lambda broker: broker.positions(20.0), BrokerMaintenance),
    ]
    for name, call, error_type in calls:
        setting = ShioajiStage(heard)
        broker = setting.login()
        setting.client.does[name] = fails("SystemMaintenance", "StatusCode: 503")
        with pytest.raises(error_type) as caught:
            call(broker)
        assert (type(caught.value), caught.value.retry_after) == (error_type, 60)
        sent = len(setting.client.calls)
        with pytest.raises(BrokerMaintenance) as paused:
            broker.ping(20.0)
        assert paused.value.retry_after is not None
        assert 50 < paused.value.retry_after <= 60
        assert (len(setting.client.calls), broker.alive()) == (sent, True)


def test_e_a_503_while_warrants_are_loaded_is_a_pause_and_sends_no_order(
    setting: ShioajiStage,
) -> None:
    broker = setting.login()
    setting.client.contracts.get = lambda code, security_type: None
    setting.client.does["preload"] = fails("SystemMaintenance", "503")
    with pytest.raises(BrokerMaintenance) as caught:
        broker.place(order(symbol="030001", price=Decimal(1)), 20.0)
    assert caught.value.retry_after == 60
    assert "place_order" not in setting.client.names()


def test_e_a_503_of_a_reference_price_sends_no_order_after_it(setting: ShioajiStage) -> None:
    broker = setting.login()
    setting.client.does["info"] = fails("SystemMaintenance", "503")
    assert broker.reference_price("2890") is None
    with pytest.raises(BrokerMaintenance):
        broker.place(order(symbol="2890", price=Decimal(17)), 20.0)
    assert "place_order" not in setting.client.names()


# --- F: a time stamp that the broker finds too old ------------------------------------------------


def test_f_a_clock_that_is_off_is_said_and_not_taken_for_wrong_keys(setting: ShioajiStage) -> None:
    setting.client.does["login"] = fails("AuthError", "Sign data is timeout")
    with pytest.raises(BrokerClockRefused, match="host's clock") as caught:
        setting.login()
    assert caught.value.retryable
    assert setting.client.names().count("login") == 1  # the session counts the next one


def test_f_no_second_login_is_sent_after_its_callers_time(setting: ShioajiStage) -> None:
    release = threading.Event()

    def log_in(*_: Any, **__: Any) -> Any:
        assert release.wait(30)
        raise REAL.BadRequestError("StatusCode: 400, Detail: Sign data is timeout")

    setting.client.does["login"] = log_in
    with pytest.raises(BrokerUnreachable):
        setting.broker.login(KEYS, 0.2)
    release.set()
    until(lambda: "logout" in setting.client.names())
    assert setting.client.names().count("login") == 1


# --- G: the contract that was asked for -----------------------------------------------------------


@pytest.mark.parametrize(("kind", "asked"), [("stock", "2330"), ("futures", "TXFR1")])
def test_g_an_order_for_another_contract_than_the_one_asked_for_is_not_sent(
    heard: HeardOrders, kind: str, asked: str
) -> None:
    """Sinotrade/Shioaji #176: asked for 2330, the SDK answered with 4903."""
    setting = ShioajiStage(heard, kind=kind)
    setting.login()

    def get(code: str, security_type: str) -> Any:
        if code == "TXFR1":
            return REAL.BaseContract("FUT", "TAIFEX", "TXFR1", target_code="TXFA6")
        return REAL.BaseContract(security_type, "TSE", "4903")

    setting.client.contracts.get = get
    with pytest.raises(OrderRejected, match="answered with 4903; nothing was sent"):
        setting.broker.place(order(symbol=asked, price=Decimal(17)), 20.0)
    assert "place_order" not in setting.client.names()


# --- H: market orders with protection -------------------------------------------------------------


@pytest.mark.parametrize("word", [TimeInForce.IOC, TimeInForce.FOK])
def test_h_a_market_order_with_protection_is_immediate_or_nothing(
    heard: HeardOrders, word: TimeInForce
) -> None:
    setting = ShioajiStage(heard, kind="futures")
    new_order = order(symbol="TXFA6", price_type=PriceType.RANGE_MARKET, time_in_force=word)
    setting.login().place(new_order, 20.0)
    with pytest.raises(OrderRejected, match="9938"):
        setting.broker.place(order(symbol="TXFA6", price_type=PriceType.RANGE_MARKET), 20.0)
    assert setting.client.names().count("place_order") == 1


# --- I: kinds of contracts, lots and conditions ---------------------------------------------------


def test_i_a_warrant_is_found_under_its_own_type(setting: ShioajiStage) -> None:
    setting.login().place(order(symbol="030001", price=Decimal(1)), 20.0)
    [(_, sent)] = [call for call in setting.client.calls if call[0] == "place_order"]
    assert sent["contract"].security_type == "WRT"


def test_i_warrants_are_loaded_when_the_first_one_is_asked_for(setting: ShioajiStage) -> None:
    broker = setting.login()
    get = setting.client.contracts.get
    loaded: list[str] = []
    setting.client.does["preload"] = lambda kinds, **_: loaded.extend(kinds)
    setting.client.contracts.get = lambda code, security_type: (
        None if security_type == "WRT" and not loaded else get(code, security_type=security_type)
    )
    broker.place(order(symbol="030001", price=Decimal(1)), 20.0)
    assert loaded == ["WRT"]


@pytest.mark.parametrize("name", ["SBLShort", "SBLShortPriceExempt"])
def test_i_borrowed_stock_that_was_sold_is_no_cash(setting: ShioajiStage, name: str) -> None:
    row = SimpleNamespace(
        code="2330",
        direction=REAL.Action.Sell,
        quantity=2000,
        price=17.05,
        cond=REAL.StockOrderCond(name),
    )
    setting.client.does["list_positions"] = lambda **_: [row]
    [position] = setting.login().positions(20.0)
    assert (position.quantity, position.condition) == (-2, OrderCondition.SHORT_SELLING)


def test_i_every_condition_and_lot_of_the_sdk_is_known_by_name() -> None:
    conditions = {name for name in dir(REAL.StockOrderCond) if name[0].isupper()}
    assert conditions == set(mapping.CONDITION_OF)
    lots = {name for name in dir(REAL.StockOrderLot) if name[0].isupper()}
    assert lots == {*mapping.LOTS.values(), *mapping.UNSUPPORTED_LOTS}
    securities = {
        getattr(REAL.SecurityType, n).value for n in dir(REAL.SecurityType) if n[0].isupper()
    }
    assert securities == {"IND", *sdk.SECURITY["stock"], *sdk.SECURITY["futures"]}


# --- J: signals of the SDK ------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("state", "certain"), [("Healthy", True), ("Unknown", True), ("Degraded", False)]
)
def test_j_a_list_with_gaps_proves_no_absence(
    heard: HeardOrders, state: str, certain: bool
) -> None:
    setting = ShioajiStage(heard, simulation=False)
    setting.client.does["trade_cache_health"] = lambda _: health(state, "SequenceGap")
    listing = setting.login(WITH_CERTIFICATE).orders(20.0)
    assert (listing.behind is not None) is certain


def test_j_session_events_and_the_number_of_connections_are_logged(
    setting: ShioajiStage, capfd: pytest.CaptureFixture[str]
) -> None:
    broker = setting.login()
    assert setting.client.session_event is not None
    setting.client.session_event(0, 12, "secret info", "reconnecting")
    setting.client.does["usage"] = lambda **_: SimpleNamespace(connections=5)
    broker.ping(20.0)
    logged = capfd.readouterr().err
    assert '"event":"shioaji.session_event"' in logged
    assert '"code":12' in logged
    assert "secret info" not in logged
    assert '"connections":5' in logged


def test_j_a_login_after_a_refused_token_asks_for_a_new_one(heard: HeardOrders) -> None:
    first = ShioajiStage(heard, account="token-test", number="111")
    broker = first.login()
    first.client.does["usage"] = fails("TokenError", "Token is expired")
    with pytest.raises(SessionDown):
        broker.ping(20.0)
    for words in ({"force_refresh": True}, None):  # and only once
        again = ShioajiStage(heard, account="token-test", number="111")
        again.login()
        [(_, sent)] = [call for call in again.client.calls if call[0] == "login"]
        assert (sent == words) if words else isinstance(sent, tuple)


def test_a_login_that_renews_a_session_asks_for_a_token_of_its_own(heard: HeardOrders) -> None:
    """The SDK may hand out the token of the session whose day ends (#81)."""
    first = ShioajiStage(heard, account="renewal-test", number="111").login()
    assert isinstance(first, KeepsToken)
    first.forget_token()
    assert first.alive()
    again = ShioajiStage(heard, account="renewal-test", number="111")
    again.login()
    [(_, sent)] = [call for call in again.client.calls if call[0] == "login"]
    assert sent == {"force_refresh": True}


@pytest.mark.parametrize(("days", "warned"), [(100, False), (29, True), (0.5, True)])
def test_j_a_session_warns_of_a_certificate_that_expires_soon_and_once(
    heard: HeardOrders, capfd: pytest.CaptureFixture[str], days: float, warned: bool
) -> None:
    setting = ShioajiStage(heard, simulation=False)
    setting.client.does["get_ca_expiretime"] = lambda _: datetime.now(UTC) + timedelta(days=days)
    setting.login(WITH_CERTIFICATE).ping(20.0)
    assert capfd.readouterr().err.count("shioaji.certificate_expires") == warned


@pytest.mark.parametrize(
    ("activated", "end_is_known"), [(True, True), (False, True), (False, False)]
)
def test_j_with_an_expired_certificate_orders_are_refused_and_cancels_reach_the_broker(
    heard: HeardOrders, activated: bool, end_is_known: bool
) -> None:
    setting = ShioajiStage(heard, simulation=False)
    ends = datetime.now(UTC) - timedelta(days=1)
    setting.client.does["get_ca_expiretime"] = (
        (lambda _: ends) if end_is_known else fails("CaError")
    )
    if not activated:
        setting.client.does["activate_ca"] = fails("CaExpiredError")
    broker = setting.login(WITH_CERTIFICATE)
    assert broker.certificate_ends_ms() == (int(ends.timestamp() * 1000) if end_is_known else 0)
    assert len(broker.orders(20.0).orders) == 1
    with pytest.raises(CertificateExpired):
        broker.place(order(symbol="2890", price=Decimal(17)), 20.0)
    with pytest.raises(CertificateExpired):
        broker.replace(ID, None, Decimal(17), 20.0)
    assert {"place_order", "update_order"}.isdisjoint(setting.client.names())
    assert broker.cancel(ID, 20.0).state is OrderState.CANCELLED


def test_j_a_certificate_that_expires_while_a_session_is_open_refuses_the_next_order(
    heard: HeardOrders,
) -> None:
    soon = ShioajiStage(heard, simulation=False)
    ends = datetime.now(UTC) + timedelta(seconds=1)
    soon.client.does["get_ca_expiretime"] = lambda _: ends
    broker = soon.login(WITH_CERTIFICATE)
    until(lambda: datetime.now(UTC) > ends)
    with pytest.raises(CertificateExpired, match="certificate has expired"):
        broker.place(order(symbol="2890", price=Decimal(17)), 20.0)
    assert "place_order" not in soon.client.names()


def test_j_an_end_without_a_zone_refuses_nothing_before_its_latest_reading(
    heard: HeardOrders, capfd: pytest.CaptureFixture[str]
) -> None:
    """The manual shows 15:59:59, which is the end of a day in Taipei if it is written in UTC."""
    setting = ShioajiStage(heard, simulation=False)
    ends = (datetime.now(UTC) + timedelta(hours=6)).replace(tzinfo=None, microsecond=0)
    setting.client.does["get_ca_expiretime"] = lambda _: ends
    broker = setting.login(WITH_CERTIFICATE)
    broker.place(order(symbol="2890", price=Decimal(17)), 20.0)
    assert broker.certificate_ends_ms() == ends.replace(tzinfo=UTC).timestamp() * 1000
    assert 0 < ShioajiProbe(broker).certificate_days("") < 1
    warned = ShioajiStage(heard, simulation=False)  # by the earlier reading: 7 days and 4 hours
    ends = (datetime.now(UTC) + timedelta(days=7, hours=4)).replace(tzinfo=None)
    warned.client.does["get_ca_expiretime"] = lambda _: ends
    capfd.readouterr()
    warned.login(WITH_CERTIFICATE)
    assert '"days":6.8' in capfd.readouterr().err


def test_j_an_end_of_the_certificate_that_the_sdk_does_not_say_holds_nothing_up(
    heard: HeardOrders,
) -> None:
    setting = ShioajiStage(heard, simulation=False)
    setting.client.does["get_ca_expiretime"] = fails("CaError")
    setting.login(WITH_CERTIFICATE).place(order(symbol="2890", price=Decimal(17)), 20.0)


# --- K: one way to read a status ------------------------------------------------------------------


@pytest.mark.parametrize(
    "text",
    [
        "451 Too Many Connections",
        "StatusCode: 451, Detail: anything else",
        "status 451",
        "(451)",
        "[451] x",
        "Too Many Connections",
        "{'status': {'status_code': 451}, 'response': {'detail': 'x'}}",
        '{"status_code":451}',
        "HTTP 451",
        "HTTP/1.1 451 Unavailable",
        "login: error code=451",
        "status '451'",
    ],
)
def test_k_a_451_is_recognised_however_it_is_written(text: str) -> None:
    assert type(mapping.login_error(REAL.ServerError(text))) is LoginLimited


@pytest.mark.parametrize(
    "text",
    [
        "took 451.5 ms",
        "order a451",
        "port 4510",
        "v1.451",
        "Timeout after 451 ms",
        "price 503 is off the tick",
        "status 451.5",
        "code 4510",
        "barcode of 451",
    ],
)
def test_k_other_numbers_are_no_status(text: str) -> None:
    assert type(mapping.login_error(REAL.ServerError(text))) is BrokerUnreachable


# --- other reports of users -----------------------------------------------------------------------


def test_22_a_trade_without_an_account_counts_for_one_account_of_the_login(
    heard: HeardOrders,
) -> None:
    stock, futures = ShioajiStage(heard), ShioajiStage(heard, kind="futures")
    listed = [make_trade(REAL), make_futures_trade(id="f")]
    listed[0].contract = REAL.BaseContract("STK", "TSE", "2890")
    for setting in (stock, futures):
        setting.client.does["list_trades"] = lambda: listed
    assert [order.broker_order_id for order in stock.login().orders(20.0).orders] == [ID]
    assert [order.broker_order_id for order in futures.login().orders(20.0).orders] == ["f"]


def test_19_contracts_that_are_missing_in_the_morning_refuse_the_order_unsent(
    setting: ShioajiStage,
) -> None:
    broker = setting.login()
    setting.client.contracts.get = lambda code, security_type: None
    with pytest.raises(OrderRejected, match="no stock contract"):
        broker.place(order(symbol="2890", price=Decimal(17)), 20.0)
    assert "place_order" not in setting.client.names()


def test_216_a_row_without_number_and_deals_is_not_taken_for_working(setting: ShioajiStage) -> None:
    """A futures order that was filled the day before, as the report shows it before the opening.
    Our books have its fill, and an order on its way contradicts nothing there."""
    row = make_trade(
        REAL,
        id="f7d867e1",
        seqno="855089",
        ordno="",
        quantity=1,
        status="PendingSubmit",
        order_quantity=1,
        deal_quantity=0,
        cancel_quantity=0,
        deals=[],
    )
    setting.client.does["list_trades"] = lambda: [row]
    [listed] = setting.login().orders(20.0).orders
    assert (listed.state, listed.fills) == (OrderState.SUBMITTING, [])
    # A session that has seen the fill keeps it.
    book = ReportedOrders()
    filled = [("1", 1, 17.0, 1673501631.6)]
    book.merge_trade(make_trade(REAL, id="f7d867e1", quantity=1, status="Filled", deals=filled))
    assert book.merge_trade(row).state is OrderState.FILLED
    # Nor does the broker cancel it.
    setting.client.does["cancel_order"] = fails(
        "BadRequestError",
        "StatusCode: 400, Detail: Please run update_status first to get trade details.",
    )
    with pytest.raises(OrderRejected):
        setting.broker.cancel("f7d867e1", 20.0)


def test_216_a_row_that_has_its_fills_is_filled_whatever_its_status() -> None:
    row = make_trade(REAL, status="PendingSubmit", deals=[("1", 3, 17.0, 1673501631.6)])
    assert mapping.order_of(row).state is OrderState.FILLED
