from __future__ import annotations

from decimal import Decimal

import pytest
from hypothesis import given
from hypothesis import strategies as st

from infra.exchange.matching import (
    MAX_QUANTITY,
    MatchResult,
    OrderTerms,
    first_price,
    match_order,
    refusal,
)
from worker_runtime.protocol.messages import OrderState, PriceType, Side, TimeInForce


def terms(
    side: Side = Side.BUY,
    quantity: int = 10,
    price: Decimal | None = None,
    time_in_force: TimeInForce = TimeInForce.ROD,
    symbol: str = "2330",
    tag: str = "",
    price_type: PriceType | None = None,
) -> OrderTerms:
    if price_type is None:
        price_type = PriceType.MARKET if price is None else PriceType.LIMIT
    return OrderTerms(
        symbol=symbol,
        side=side,
        quantity=quantity,
        price_type=price_type,
        price=price,
        time_in_force=time_in_force,
        tag=tag,
    )


HUNDRED = Decimal(100)


@pytest.mark.parametrize(
    ("side", "price", "state"),
    [
        (Side.BUY, "100", OrderState.FILLED),
        (Side.BUY, "100.5", OrderState.FILLED),
        (Side.BUY, "99.5", OrderState.SUBMITTED),
        (Side.SELL, "100", OrderState.FILLED),
        (Side.SELL, "99.5", OrderState.FILLED),
        (Side.SELL, "100.5", OrderState.SUBMITTED),
    ],
)
def test_a_limit_order_trades_when_the_market_is_at_its_price_or_better(
    side: Side, price: str, state: OrderState
) -> None:
    assert match_order(terms(side=side, price=Decimal(price)), 0, HUNDRED, None).state is state


def test_a_part_that_finds_no_other_side_rests_or_is_cancelled_by_its_time_in_force() -> None:
    rod = match_order(terms(price=HUNDRED), 0, HUNDRED, 4)
    assert rod == MatchResult(state=OrderState.PART_FILLED, quantity=4)
    ioc = match_order(terms(price=HUNDRED, time_in_force=TimeInForce.IOC), 0, HUNDRED, 4)
    assert (ioc.state, ioc.quantity) == (OrderState.CANCELLED, 4)
    fok = match_order(terms(price=HUNDRED, time_in_force=TimeInForce.FOK), 0, HUNDRED, 4)
    assert (fok.state, fok.quantity) == (OrderState.CANCELLED, 0)


def test_a_market_order_never_rests() -> None:
    match = match_order(terms(), 0, None, None)
    assert (match.state, match.quantity) == (OrderState.CANCELLED, 0)


def test_the_rest_of_an_order_is_filled_and_no_more() -> None:
    assert match_order(terms(price=HUNDRED), 7, HUNDRED, None) == MatchResult(
        state=OrderState.FILLED, quantity=3
    )


@given(
    side=st.sampled_from(Side),
    quantity=st.integers(1, 1000),
    filled=st.integers(0, 999),
    price=st.none() | st.decimals("0.01", "1000", places=2),
    market=st.none() | st.decimals("0.01", "1000", places=2),
    liquidity=st.none() | st.integers(0, 1000),
    time_in_force=st.sampled_from(TimeInForce),
)
def test_no_match_fills_too_much_or_at_a_worse_price(
    side: Side,
    quantity: int,
    filled: int,
    price: Decimal | None,
    market: Decimal | None,
    liquidity: int | None,
    time_in_force: TimeInForce,
) -> None:
    filled = min(filled, quantity - 1)
    order = terms(side=side, quantity=quantity, price=price, time_in_force=time_in_force)
    match = match_order(order, filled, market, liquidity)
    assert 0 <= match.quantity <= quantity - filled
    assert liquidity is None or match.quantity <= liquidity
    assert (match.state is OrderState.FILLED) == (filled + match.quantity == quantity)
    if match.quantity:
        assert market is not None
        if price is not None:
            assert market <= price if side is Side.BUY else market >= price
    if time_in_force is TimeInForce.FOK:
        assert match.quantity in (0, quantity - filled)
    if time_in_force is not TimeInForce.ROD or price is None:
        assert match.state in (OrderState.FILLED, OrderState.CANCELLED)


@pytest.mark.parametrize(
    "bad",
    [
        terms(quantity=0),
        terms(quantity=-1),
        terms(quantity=MAX_QUANTITY + 1),
        terms(symbol=""),
        terms(symbol="X" * 17),
        terms(symbol="台積電"),
        terms(tag="seven77"),
        terms(price_type=PriceType.LIMIT),
        terms(price=Decimal(0)),
        terms(price=Decimal(-1)),
        terms(price=Decimal("NaN")),
        terms(price=Decimal("Infinity")),
        terms(price=Decimal("1E+1000")),
    ],
)
def test_a_malformed_order_is_refused(bad: OrderTerms) -> None:
    assert refusal(bad)


def test_a_good_order_is_not_refused() -> None:
    assert refusal(terms(price=Decimal("99.95"), tag="abcdef")) is None


def test_first_prices_follow_from_the_seed() -> None:
    assert first_price("2330", 1) == first_price("2330", 1)
    assert first_price("2330", 1) != first_price("2330", 2)
    assert all(10 <= first_price(str(number), 3) < 1000 for number in range(200))


@pytest.mark.parametrize("symbol", ["TXFA6", "MXFR1", "CDFL5", "TXO18000L4", "TE1G6"])
def test_taifex_takes_no_market_order_for_the_day(symbol: str) -> None:
    refused = refusal(terms(symbol=symbol))
    assert refused is not None
    assert refused.startswith("9938")
    assert refusal(terms(symbol=symbol, time_in_force=TimeInForce.IOC)) is None
    assert refusal(terms(symbol=symbol, price=HUNDRED)) is None


@pytest.mark.parametrize("symbol", ["2330", "00878", "00632R", "9904", "ABC"])
def test_the_rule_of_taifex_is_not_for_stocks(symbol: str) -> None:
    assert refusal(terms(symbol=symbol)) is None
