"""Prices that move by themselves."""

from __future__ import annotations

from decimal import Decimal
from pathlib import Path

from infra.exchange.behaviour import Behaviour, FillMode
from infra.exchange.exchange import PaperExchange
from infra.exchange.ledger import ExchangeLedger
from infra.exchange.market import PriceWalk
from tests.support.brokers.exchange_clock import ExchangeClock
from tests.support.brokers.exchange_traders import limit, login
from worker_runtime.protocol.messages import OrderState

WALK = PriceWalk(seed=3, every_ms=1000, step=0.01)


def path(exchange: PaperExchange, clock: ExchangeClock, steps: int = 50) -> list[Decimal]:
    prices = []
    for _ in range(steps):
        clock.pass_by(1)
        prices.append(exchange.market.price("2330"))
    return prices


def test_prices_stand_still_without_a_walk(exchange: PaperExchange, clock: ExchangeClock) -> None:
    exchange.market.set_price("2330", Decimal(100))
    assert set(path(exchange, clock)) == {Decimal(100)}


def test_a_walk_is_the_same_for_the_same_seed_and_price(
    exchange: PaperExchange, clock: ExchangeClock
) -> None:
    paths = []
    for walk in (WALK, WALK, PriceWalk(seed=4, every_ms=1000, step=0.01)):
        exchange.market.set_price("2330", Decimal(100))
        exchange.market.set_walk(walk)
        paths.append(path(exchange, clock))
    assert paths[0] == paths[1] != paths[2]
    steps = [abs(b / a - 1) for a, b in zip(paths[0], paths[0][1:], strict=False)]
    assert max(steps) < Decimal("0.0102")
    assert len(set(paths[0])) > 30


def test_a_price_stays_within_a_tenth_of_where_its_walk_began(
    exchange: PaperExchange, clock: ExchangeClock
) -> None:
    exchange.market.set_price("2330", Decimal(100))
    exchange.market.set_walk(PriceWalk(seed=1, every_ms=1000, step=0.1))
    prices = path(exchange, clock, 300)
    assert Decimal(90) <= min(prices) < Decimal(92)
    assert Decimal(108) < max(prices) <= Decimal(110)


def test_a_limit_order_rests_until_the_walk_comes_to_its_price(
    exchange: PaperExchange, clock: ExchangeClock
) -> None:
    exchange.market.set_price("2330", Decimal(100))
    taken = exchange.place(login(exchange), limit("98"))
    assert taken.order.state is OrderState.SUBMITTED
    exchange.market.set_walk(WALK)
    prices = path(exchange, clock, 300)
    [order] = exchange.orders("a")
    assert order.state is OrderState.FILLED
    assert order.fills[0].price == next(price for price in prices if price <= 98)


def test_a_market_that_moves_does_not_put_a_delayed_fill_off(
    exchange: PaperExchange, clock: ExchangeClock
) -> None:
    exchange.set_behaviour("a", Behaviour(fill=FillMode.DELAYED, fill_delay_ms=2500))
    exchange.market.set_price("2330", Decimal(100))
    exchange.market.set_walk(WALK)
    exchange.place(login(exchange), limit("120"))
    clock.pass_by(3)
    assert exchange.orders("a")[0].state is OrderState.FILLED


def test_walk_and_prices_outlive_the_process(
    exchange: PaperExchange, ledger: ExchangeLedger, tmp_path: Path, clock: ExchangeClock
) -> None:
    exchange.market.set_price("2330", Decimal(100))
    exchange.market.set_walk(WALK)
    last = path(exchange, clock)[-1]
    ledger.close()
    reopened = ExchangeLedger(tmp_path / "ledger.db")
    clock = ExchangeClock()  # the timers of the first one are gone with it
    second = PaperExchange(reopened, clock.later, now=clock.now)
    assert (second.market.walk, second.market.price("2330")) == (WALK, last)
    assert len(set(path(second, clock))) > 30
    reopened.close()
