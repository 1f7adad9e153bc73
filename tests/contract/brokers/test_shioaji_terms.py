"""Lot, condition, open or close type and range market orders in the SDK's real order classes."""

from __future__ import annotations

from decimal import Decimal
from types import SimpleNamespace

import pytest

from infra.berth_testing.harness import HeardOrders, order
from tests.support.brokers.shioaji_client import REAL, ShioajiStage
from worker_runtime.brokers.shioaji import mapping
from worker_runtime.protocol.errors import OrderRejected
from worker_runtime.protocol.messages import PriceType, TimeInForce
from worker_runtime.protocol.order_terms import OpenClose, OrderCondition, OrderLot


@pytest.fixture
def setting(heard: HeardOrders) -> ShioajiStage:
    return ShioajiStage(heard)


def test_every_lot_condition_and_type_has_a_word_of_the_sdk() -> None:
    for ours, known in (
        (mapping.LOTS, REAL.StockOrderLot),
        (mapping.CONDITIONS, REAL.StockOrderCond),
        (mapping.OPEN_CLOSE, REAL.FuturesOCType),
    ):
        for word in ours.values():
            assert known(word).value == word
    assert mapping.LOTS == {
        OrderLot.COMMON: "Common",
        OrderLot.ODD: "Odd",
        OrderLot.INTRADAY_ODD: "IntradayOdd",
        OrderLot.FIXING: "Fixing",
    }
    assert mapping.OPEN_CLOSE[OpenClose.DAY_TRADE] == "DayTrade"


@pytest.mark.parametrize(
    ("lot", "condition", "expected"),
    [
        (OrderLot.ODD, OrderCondition.CASH, ("Odd", "Cash")),
        (OrderLot.INTRADAY_ODD, OrderCondition.CASH, ("IntradayOdd", "Cash")),
        (OrderLot.FIXING, OrderCondition.MARGIN, ("Fixing", "MarginTrading")),
        (OrderLot.COMMON, OrderCondition.SHORT_SELLING, ("Common", "ShortSelling")),
    ],
)
def test_lot_and_condition_of_a_stock_order_are_said_in_the_words_of_the_sdk(
    setting: ShioajiStage, lot: OrderLot, condition: OrderCondition, expected: tuple[str, str]
) -> None:
    setting.login().place(
        order(symbol="2890", price=Decimal(17), lot=lot, condition=condition), 20.0
    )
    [(_, sent)] = [call for call in setting.client.calls if call[0] == "place_order"]
    assert (sent["order"].order_lot.value, sent["order"].order_cond.value) == expected


@pytest.mark.parametrize("kind", OpenClose)
def test_a_range_market_order_has_no_price_and_says_whether_it_opens(
    heard: HeardOrders, kind: OpenClose
) -> None:
    setting = ShioajiStage(heard, kind="futures")
    new_order = order(
        symbol="TXFA6",
        price_type=PriceType.RANGE_MARKET,
        time_in_force=TimeInForce.IOC,
        open_close=kind,
    )
    setting.login().place(new_order, 20.0)
    [(_, sent)] = [call for call in setting.client.calls if call[0] == "place_order"]
    assert (sent["order"].price_type.value, sent["order"].price) == ("MKP", 0.0)
    assert sent["order"].octype.value.lower() == kind.replace("_", "")
    rests = order(symbol="TXFA6", price_type=PriceType.RANGE_MARKET)
    with pytest.raises(OrderRejected, match="9938"):
        setting.broker.place(rests, 20.0)


def test_positions_of_stocks_are_asked_for_in_shares_and_reported_in_lots(
    setting: ShioajiStage,
) -> None:
    buy, sell = REAL.Action.Buy, REAL.Action.Sell
    setting.client.does["list_positions"] = lambda **_: [
        SimpleNamespace(
            code=code, direction=side, quantity=shares, price=17.05, cond=REAL.StockOrderCond(cond)
        )
        for code, side, shares, cond in (
            ("2890", buy, 2345, "Cash"),
            ("2890", buy, 1000, "MarginTrading"),
            ("2330", sell, 2000, "ShortSelling"),
            ("2317", buy, 7, "Netting"),
        )
    ]
    positions = setting.login().positions(20.0)
    assert [(p.symbol, p.quantity, p.odd_shares, p.condition) for p in positions] == [
        ("2890", 2, 345, OrderCondition.CASH),
        ("2890", 1, 0, OrderCondition.MARGIN),
        ("2330", -2, 0, OrderCondition.SHORT_SELLING),
        ("2317", 0, 7, OrderCondition.CASH),
    ]
    [(_, words)] = [call for call in setting.client.calls if call[0] == "list_positions"]
    assert words["unit"] == "Share"


def test_a_rolling_code_whose_real_contract_is_not_there_is_rejected_unsent(
    heard: HeardOrders,
) -> None:
    setting = ShioajiStage(heard, kind="futures")
    setting.login()
    rolling = REAL.BaseContract("FUT", "TAIFEX", "TXFR1", target_code="TXFL5")
    setting.client.contracts.get = lambda code, security_type: rolling if code == "TXFR1" else None
    with pytest.raises(OrderRejected, match="no futures contract"):
        setting.broker.place(order(symbol="TXFR1", price=Decimal(22000)), 20.0)
    assert "place_order" not in setting.client.names()
