"""Odd lots, the closing price, margin, short sales and covers at the exchange."""

from __future__ import annotations

import sqlite3
from contextlib import closing
from decimal import Decimal
from pathlib import Path
from typing import Any

import pytest
from msgspec.structs import replace

from infra.exchange.behaviour import Behaviour, FillMode
from infra.exchange.exchange import PaperExchange
from infra.exchange.ledger import ExchangeLedger
from infra.exchange.records import LedgerSession
from tests.support.brokers.exchange_clock import ExchangeClock
from tests.support.brokers.exchange_traders import limit, login, market
from worker_runtime.brokers.paper.wire import ExchangePosition, Place, Replace
from worker_runtime.protocol.errors import OrderRejected
from worker_runtime.protocol.messages import OrderState, PriceType, Side, TimeInForce
from worker_runtime.protocol.order_terms import OpenClose, OrderCondition, OrderLot

ODD, FIXING = OrderLot.INTRADAY_ODD, OrderLot.FIXING
MARGIN, SHORT = OrderCondition.MARGIN, OrderCondition.SHORT_SELLING
SELL = Side.SELL
HUNDRED = Decimal(100)


@pytest.fixture
def session(exchange: PaperExchange) -> LedgerSession:
    exchange.market.set_price("2330", HUNDRED)
    exchange.market.set_price("TXFA6", Decimal(22_000))
    return login(exchange)


def an_order(quantity: int = 1, price: str = "100", **terms: Any) -> Place:
    return replace(limit(price, quantity), **terms)


def contract(quantity: int = 1, **terms: Any) -> Place:
    return replace(market("TXFA6", quantity, TimeInForce.IOC), **terms)


@pytest.mark.parametrize(
    ("place", "why"),
    [
        (an_order(1000, lot=ODD), "at most 999"),
        (an_order(1, lot=ODD, condition=MARGIN), "neither bought on margin"),
        (an_order(1, lot=OrderLot.ODD, time_in_force=TimeInForce.IOC), "limit orders of the day"),
        (replace(market(), lot=ODD), "limit orders of the day"),
        (an_order(500, lot=FIXING), "at most 499"),
        (an_order(1, open_close=OpenClose.NEW), "only a contract"),
        (replace(market(), price_type=PriceType.RANGE_MARKET), "only TAIFEX"),
        (contract(price_type=PriceType.RANGE_MARKET, time_in_force=TimeInForce.ROD), "9938"),
        (contract(lot=ODD), "no lot"),
        (contract(condition=MARGIN), "no condition"),
        (contract(open_close=OpenClose.COVER), "0 are held"),
        (an_order(1, condition=MARGIN, side=SELL), "0 are held"),
        (an_order(1, condition=SHORT), "0 are held"),
    ],
)
def test_what_the_market_does_not_take_leaves_no_order(
    exchange: PaperExchange, session: LedgerSession, place: Place, why: str
) -> None:
    with pytest.raises(OrderRejected, match=why):
        exchange.place(session, place)
    assert exchange.orders("a") == []


def held(exchange: PaperExchange) -> dict[tuple[str, str], tuple[int, int]]:
    return {
        (position.symbol, position.condition.value): (position.quantity, position.odd_shares)
        for position in exchange.positions("a")
    }


def test_odd_lots_trade_apart_and_their_shares_add_up(
    exchange: PaperExchange, session: LedgerSession
) -> None:
    exchange.place(session, an_order(2))
    follows = exchange.place(session, an_order(600, lot=ODD))
    assert follows.order.fills[0].price == HUNDRED  # without a price of their own
    exchange.market.set_price("2330.intraday_odd", Decimal(102))
    rests = exchange.place(session, an_order(600, "101", lot=ODD))
    assert rests.order.state is OrderState.SUBMITTED
    assert exchange.place(session, an_order(1, "101")).order.state is OrderState.FILLED
    exchange.market.set_price("2330", Decimal(90))
    # The lots' price is not theirs.
    assert exchange.ledger.order(rests.order.broker_order_id) == rests.order
    exchange.market.set_price("2330.intraday_odd", Decimal(101))
    assert held(exchange) == {("2330", "cash"): (4, 200)}
    [position] = exchange.positions("a")
    # 2 and 1 lots at 100, 600 shares at 100, 600 at 101.
    assert position.average_price == Decimal("100.1429")
    cash = exchange.balance("a").cash
    exchange.place(session, an_order(500, "1", lot=ODD, side=SELL))
    # Half a lot, in the books' money of a lot.
    assert exchange.balance("a").cash - cash == Decimal("50.5")
    resting = exchange.place(session, an_order(5, "1", lot=ODD))
    with pytest.raises(OrderRejected, match="only the quantity"):
        exchange.replace(
            "a", Replace(id=1, broker_order_id=resting.order.broker_order_id, price=HUNDRED)
        )


def test_an_order_at_the_closing_price_trades_at_it_whatever_its_limit(
    exchange: PaperExchange, session: LedgerSession
) -> None:
    taken = exchange.place(session, an_order(3, "1", lot=FIXING))
    assert (taken.order.state, taken.order.fills[0].price) == (OrderState.FILLED, HUNDRED)


def test_margin_and_short_sales_have_positions_and_quotas_of_their_own(
    exchange: PaperExchange, session: LedgerSession
) -> None:
    exchange.set_behaviour("a", Behaviour(margin_quota=3, short_quota=2))
    exchange.place(session, an_order(1))
    exchange.place(session, an_order(2, condition=MARGIN))
    with pytest.raises(OrderRejected, match="1 lots are left"):
        exchange.place(session, an_order(2, condition=MARGIN))
    exchange.place(session, an_order(1, "90", condition=MARGIN))  # rests, and counts
    with pytest.raises(OrderRejected, match="0 lots are left"):
        exchange.place(session, an_order(1, condition=MARGIN))
    exchange.place(session, an_order(2, condition=SHORT, side=SELL))
    with pytest.raises(OrderRejected, match="0 lots are left"):
        exchange.place(session, an_order(1, condition=SHORT, side=SELL))
    assert held(exchange) == {
        ("2330", "cash"): (1, 0),
        ("2330", "margin"): (2, 0),
        ("2330", "short_selling"): (-2, 0),
    }
    with pytest.raises(OrderRejected, match="2 are held"):
        exchange.place(session, an_order(3, condition=SHORT))
    exchange.place(session, an_order(2, condition=SHORT))
    exchange.place(session, an_order(2, "90", condition=MARGIN, side=SELL))
    assert held(exchange) == {("2330", "cash"): (1, 0)}


def test_a_contract_is_covered_as_far_as_it_is_held(
    exchange: PaperExchange, session: LedgerSession
) -> None:
    exchange.place(session, contract(2, open_close=OpenClose.NEW))
    with pytest.raises(OrderRejected, match="2 are held"):
        exchange.place(session, contract(3, side=SELL, open_close=OpenClose.COVER))
    with pytest.raises(OrderRejected, match="0 are held"):
        exchange.place(session, contract(1, open_close=OpenClose.COVER))
    exchange.place(session, contract(2, side=SELL, open_close=OpenClose.COVER))
    ranged = contract(1, price_type=PriceType.RANGE_MARKET, open_close=OpenClose.DAY_TRADE)
    taken = exchange.place(session, ranged)
    assert (taken.order.price_type, taken.sent.price_type) == (
        PriceType.RANGE_MARKET,
        PriceType.MARKET,
    )
    assert held(exchange) == {("TXFA6", "cash"): (1, 0)}


def test_a_range_market_order_never_rests(exchange: PaperExchange, session: LedgerSession) -> None:
    exchange.set_behaviour("a", Behaviour(fill=FillMode.NEVER))
    taken = exchange.place(session, contract(1, price_type=PriceType.RANGE_MARKET))
    assert taken.order.state is OrderState.CANCELLED


def test_without_an_agreement_on_day_trading_only_what_is_held_is_sold(
    exchange: PaperExchange, session: LedgerSession
) -> None:
    # As 0.1.0's exchange did, for accounts without the rule.
    exchange.place(session, an_order(1, side=SELL))
    exchange.place(session, an_order(3))
    exchange.set_behaviour("a", Behaviour(sells_held_only=True))
    with pytest.raises(OrderRejected, match="2 are held"):
        exchange.place(session, an_order(3, side=SELL))
    exchange.place(session, an_order(1, "110", side=SELL))  # rests
    with pytest.raises(OrderRejected, match="1 are held"):
        exchange.place(session, an_order(2, side=SELL))
    exchange.place(session, an_order(100, side=SELL, lot=ODD))
    with pytest.raises(OrderRejected, match="900 are held"):
        exchange.place(session, an_order(901, side=SELL, lot=ODD))


def test_hours_are_kept_where_the_behaviour_says_so(
    exchange: PaperExchange, session: LedgerSession, clock: ExchangeClock
) -> None:
    """It is ten in the morning."""
    exchange.set_behaviour("a", Behaviour(keeps_hours=True))
    for lot, opens in (
        (OrderLot.COMMON, True),
        (ODD, True),
        (OrderLot.ODD, False),
        (FIXING, False),
    ):
        if opens:
            exchange.place(session, an_order(1, lot=lot))
            continue
        with pytest.raises(OrderRejected, match="takes no orders with lot"):
            exchange.place(session, an_order(1, lot=lot))
    clock.pass_by(4 * 3600 + 60)  # 14:01
    for lot in (OrderLot.ODD, FIXING):
        exchange.place(session, an_order(1, lot=lot))
    with pytest.raises(OrderRejected, match="takes no orders"):
        exchange.place(session, an_order(1, lot=ODD))


def test_terms_are_in_the_ledger_of_this_release_and_the_usual_ones_in_an_older_one(
    exchange: PaperExchange, session: LedgerSession, ledger: ExchangeLedger, tmp_path: Path
) -> None:
    placed = exchange.place(session, an_order(7, lot=ODD)).order
    assert ledger.order(placed.broker_order_id) == placed
    assert (placed.lot, placed.condition) == (ODD, OrderCondition.CASH)
    # A ledger of release 0.1.0: without the columns.
    old = tmp_path / "old.db"
    with closing(sqlite3.connect(old)) as db, db:
        db.execute(
            "create table orders (number integer primary key, broker_order_id text not null unique,"
            " account text not null, session_id text not null, client text not null, tag text "
            "not null,"
            " client_note text not null, symbol text not null, side text not null, quantity "
            "integer not null,"
            " price_type text not null, price text, time_in_force text not null, state text "
            "not null,"
            " reason text, received_ms integer not null, updated_ms integer not null) strict"
        )
        db.execute(
            "insert into orders values (1, 'P0000001', 'a', 's', 'c', 't', '', '2330', 'buy', "
            "2, 'LMT',"
            " '100', 'ROD', 'filled', null, 1, 1)"
        )
    for _ in range(2):
        opened = ExchangeLedger(old)
        [order] = opened.orders("a")
        opened.close()
        assert (order.lot, order.condition, order.open_close) == ("common", "cash", "auto")


@pytest.mark.parametrize(
    ("shares", "lots", "odd"),
    [(2345, 2, 345), (-2345, -2, -345), (999, 0, 999), (-1, 0, -1), (1000, 1, 0)],
)
def test_a_position_of_shares_is_lots_and_the_rest_with_one_sign(
    shares: int, lots: int, odd: int
) -> None:
    position = ExchangePosition.of_shares("2330", shares, HUNDRED)
    assert (position.quantity, position.odd_shares, position.shares) == (lots, odd, shares)
    assert position.held(ODD) == odd
    assert position.held(FIXING) == lots
