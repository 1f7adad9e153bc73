"""The exchange lists instruments for a day, and refuses orders that do not fit them."""

from __future__ import annotations

from datetime import date
from decimal import Decimal

import pytest

from infra.exchange.behaviour import Behaviour
from infra.exchange.exchange import PaperExchange
from infra.exchange.instruments import InstrumentChange, InstrumentSettings
from infra.exchange.ledger import ExchangeLedger
from infra.exchange.matching import tick_at
from infra.exchange.records import LedgerSession
from tests.support.brokers.exchange_clock import ExchangeClock
from tests.support.brokers.exchange_traders import limit, login
from worker_runtime.brokers.paper.wire import Place, Replace
from worker_runtime.protocol.errors import InstrumentsUnavailable, OrderRejected
from worker_runtime.protocol.instruments import Instrument, InstrumentKind

JANUARY = date(2026, 1, 5)


def listed(exchange: PaperExchange) -> list[Instrument]:
    """Returns all instruments, read page by page."""
    instruments: list[Instrument] = []
    after = ""
    while True:
        page = exchange.instruments.page(after, 70)
        instruments += page.instruments
        if not page.next_after:
            assert page.total == len(instruments)
            return instruments
        after = page.next_after


def on(exchange: PaperExchange, day: date = JANUARY, **changes: object) -> None:
    exchange.instruments.set(InstrumentSettings.model_validate({"day": day} | changes))


def test_pages_together_are_the_list_by_rising_code(exchange: PaperExchange) -> None:
    codes = [instrument.code for instrument in listed(exchange)]
    assert len(codes) > 200
    assert codes == sorted(set(codes))
    assert {instrument.kind for instrument in listed(exchange)} == {
        InstrumentKind.STOCK,
        InstrumentKind.FUND,
        InstrumentKind.WARRANT,
        InstrumentKind.FUTURE,
        InstrumentKind.OPTION,
    }


@pytest.mark.parametrize(
    ("code", "kind", "value", "expires"),
    [
        ("2330", "stock", 1000, None),
        ("00631L", "fund", 1000, None),
        ("030001", "warrant", 1000, date(2026, 7, 15)),
        ("03000P", "warrant", 1000, date(2026, 7, 15)),
        ("TXFA6", "future", 200, date(2026, 1, 21)),
        ("TXFF6", "future", 200, date(2026, 6, 17)),
        ("MX1A6", "future", 50, date(2026, 1, 7)),
        ("MX2A6", "future", 50, date(2026, 1, 14)),
        ("CDFA6", "future", 2000, date(2026, 1, 21)),
        ("QFFA6", "future", 100, date(2026, 1, 21)),
        ("TXO20000A6", "option", 50, date(2026, 1, 21)),
        ("TXO20000M6", "option", 50, date(2026, 1, 21)),
        ("TX120000A6", "option", 50, date(2026, 1, 7)),
    ],
)
def test_each_kind_has_the_terms_of_its_market(
    exchange: PaperExchange, code: str, kind: str, value: int, expires: date | None
) -> None:
    on(exchange)
    instrument = exchange.instruments.find(code)
    assert instrument is not None
    assert (instrument.kind.value, int(instrument.lot_value), instrument.expires_on) == (
        kind,
        value,
        expires,
    )
    for price in (instrument.reference, instrument.limit_up, instrument.limit_down):
        assert price is not None
        tick = tick_at(instrument.ticks, price)
        assert tick is not None
        assert price % tick == 0
    assert instrument.limit_down is not None
    assert instrument.limit_down < (instrument.reference or 0) < (instrument.limit_up or 0)


def test_contracts_roll_with_the_days(exchange: PaperExchange) -> None:
    on(exchange, date(2026, 1, 21))
    assert exchange.instruments.find("TXFA6")
    on(exchange, date(2026, 1, 22))
    assert exchange.instruments.find("TXFA6") is None
    assert exchange.instruments.find("TXFB6")
    assert exchange.instruments.find("MX4A6")


def test_every_day_of_years_has_a_list(exchange: PaperExchange) -> None:
    for year in range(2026, 2036):
        for month in range(1, 13):
            day = date(year, month, 28)
            on(exchange, day)
            assert all(
                instrument.expires_on is None or instrument.expires_on >= day
                for instrument in listed(exchange)
            )


def test_another_lot_and_a_delisting_are_shown_and_survive_a_restart(
    exchange: PaperExchange, ledger: ExchangeLedger, clock: ExchangeClock
) -> None:
    changes = {
        "2330": InstrumentChange(lot_units=100, lot_value=Decimal(100)),
        "CDFA6": InstrumentChange(lot_value=Decimal(1000), reference=Decimal(600)),
        "2317": InstrumentChange(delisted=True),
    }
    on(exchange, changes={code: change.model_dump() for code, change in changes.items()})
    for shown in (exchange, PaperExchange(ledger, clock.later, now=clock.now)):
        share, future = shown.instruments.find("2330"), shown.instruments.find("CDFA6")
        assert share is not None
        assert (share.lot_units, int(share.lot_value)) == (100, 100)
        assert future is not None
        assert (future.lot_value, future.limit_up, future.limit_down) == tuple(
            map(Decimal, (1000, 660, 540))
        )
        assert shown.instruments.find("2317") is None


def test_a_missing_list_is_an_error_and_its_instruments_trade_on(exchange: PaperExchange) -> None:
    on(exchange, missing=True)
    with pytest.raises(InstrumentsUnavailable):
        exchange.instruments.page()
    assert exchange.instruments.find("TXFA6") is not None


def test_a_huge_list_has_as_many_warrants_more_as_asked_for(exchange: PaperExchange) -> None:
    before = exchange.instruments.page().total
    on(exchange, day=date(2026, 3, 2), extra_warrants=3000)
    assert exchange.instruments.page().total == before + 3000


def test_a_contract_begins_to_trade_at_its_reference_price(exchange: PaperExchange) -> None:
    on(exchange)
    assert exchange.market.price("TXFA6") == 20_000
    assert exchange.market.price("TXO20000A6") == 200


def strict(exchange: PaperExchange) -> LedgerSession:
    on(exchange)
    exchange.set_behaviour("a", Behaviour(keeps_price_rules=True))
    return login(exchange)


@pytest.mark.parametrize(
    ("symbol", "price", "reason"),
    [
        ("TXFA6", "20000.5", "no multiple of the tick 1"),
        ("TXFA6", "22001", "above limit-up, 22000"),
        ("TXFA6", "17999", "below limit-down, 18000"),
        ("TXO20000A6", "49.7", "no multiple of the tick 0.5"),
        ("TXO20000A6", "1003", "no multiple of the tick 10"),
        ("CDFA6", "500.2", "no multiple of the tick 1"),
        ("TXFA5", "20000", "not listed today"),
        ("9999", "10", "not listed today"),
    ],
)
def test_a_price_that_the_market_would_refuse_is_refused_with_the_reason(
    exchange: PaperExchange, symbol: str, price: str, reason: str
) -> None:
    session = strict(exchange)
    with pytest.raises(OrderRejected, match=reason):
        exchange.place(session, limit(price, symbol=symbol))
    assert exchange.orders("a") == []


@pytest.mark.parametrize("symbol", ["TXFA6", "MX1A6", "CDFA6", "TXO20000A6", "030001", "2330"])
def test_every_kind_trades_at_its_limits(exchange: PaperExchange, symbol: str) -> None:
    session = strict(exchange)
    instrument = exchange.instruments.find(symbol)
    assert instrument is not None
    exchange.market.set_price(symbol, instrument.reference or Decimal(0))
    for price in (instrument.limit_up, instrument.limit_down):
        order: Place = limit(str(price), symbol=symbol)
        exchange.place(session, order)
    assert [order.state for order in exchange.orders("a")] == ["filled", "submitted"]


def test_a_change_to_a_price_off_the_tick_is_refused(exchange: PaperExchange) -> None:
    session = strict(exchange)
    resting = exchange.place(session, limit("19000", symbol="TXFA6")).order.broker_order_id
    with pytest.raises(OrderRejected, match="no multiple"):
        exchange.replace("a", Replace(id=1, broker_order_id=resting, price=Decimal("19000.5")))
    changed = exchange.replace("a", Replace(id=1, broker_order_id=resting, price=Decimal(18900)))
    assert changed.price == 18900
