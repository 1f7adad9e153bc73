"""Symbols as charting programs write them; front months; ticks."""

from __future__ import annotations

from datetime import date, datetime, time, timedelta
from decimal import Decimal

import msgspec
import pytest

from infra.market.calendar import HOME_ZONE, Calendar, Hours, home_broker, load_calendar
from infra.market.signal_symbols import (
    ContinuousFuture,
    lane_of,
    last_trade,
    market_of_symbol,
    read_symbol,
    require_readable,
    resolve_symbol,
    round_to_tick,
)
from worker_runtime.protocol.broker_record import ChartNames, TickStep
from worker_runtime.protocol.errors import UnknownSymbol

CALENDAR = load_calendar()
#: The third Wednesday of November 2026 is the 18th.
BEFORE = datetime(2026, 11, 18, 13, 29, 59, tzinfo=HOME_ZONE)
AFTER = datetime(2026, 11, 18, 13, 30, tzinfo=HOME_ZONE)


def resolved(name: str, at: datetime = BEFORE, **names: str) -> str:
    return resolve_symbol(name, names, CALENDAR, at)


@pytest.mark.parametrize(
    ("name", "symbol"),
    [
        ("2330", "2330"),
        ("TWSE:2330", "2330"),
        ("TPEX:6488", "6488"),
        ("2330.TW", "2330"),
        ("6488.TWO", "6488"),
        (" twse:2330 ", "2330"),
        ("TWSE_DLY:2330", "2330"),
        ("TWSE_DL:0050", "0050"),
        ("TXFL6", "TXFL6"),
        ("TXFR1", "TXFR1"),
        ("TAIFEX:MXFA7", "MXFA7"),
        ("TXFZ2026", "TXFL6"),
        ("TXF1!", "TXFK6"),
        ("TAIFEX:TXF1!", "TXFK6"),
        ("txf1!", "TXFK6"),
        ("TXF2!", "TXFL6"),
    ],
)
def test_a_symbol_is_what_the_exchange_calls_it(name: str, symbol: str) -> None:
    assert resolved(name) == symbol


def test_the_front_month_ends_with_the_close_of_its_final_settlement_day() -> None:
    assert (resolved("TXF1!", BEFORE), resolved("TXF2!", BEFORE)) == ("TXFK6", "TXFL6")
    assert (resolved("TXF1!", AFTER), resolved("TXF2!", AFTER)) == ("TXFL6", "TXFA7")
    year_end = datetime(2026, 12, 17, 9, tzinfo=HOME_ZONE)
    assert (resolved("MXF1!", year_end), resolved("MXF2!", year_end)) == ("MXFA7", "MXFB7")


def test_a_final_settlement_day_without_trading_moves_to_the_next_trading_day() -> None:
    # The third Wednesday of February 2026, the 18th, is in the lunar new year; trading continues on
    # the 23rd.
    assert last_trade(2026, 2, CALENDAR) == datetime(2026, 2, 23, 13, 30, tzinfo=HOME_ZONE)
    typhoon = Calendar(CALENDAR.holidays, CALENDAR.last, {date(2026, 11, 18): None})
    assert last_trade(2026, 11, typhoon) == datetime(2026, 11, 19, 13, 30, tzinfo=HOME_ZONE)
    assert resolve_symbol("TXF1!", {}, typhoon, AFTER) == "TXFK6"
    short = Calendar(
        CALENDAR.holidays, CALENDAR.last, {date(2026, 11, 18): Hours(time(9), time(11))}
    )
    assert last_trade(2026, 11, short) == datetime(2026, 11, 18, 11, tzinfo=HOME_ZONE)


#: As a broker lists them: quarters, weeks, and the months of a share's futures.
LISTED = {
    "UDF": {"UDFL6": date(2026, 12, 18), "UDFC7": date(2027, 3, 19), "UDFF7": date(2027, 6, 18)},
    "TX1": {"TX1L6": date(2026, 12, 2)},
    "GDF": {"GDFK6": date(2026, 11, 26), "GDFL6": date(2026, 12, 29)},
    "TXF": {"TXFK6": date(2026, 11, 18), "TXFL6": date(2026, 12, 16)},
}


@pytest.mark.parametrize(
    ("name", "symbol"),
    [
        ("UDF1!", "UDFL6"),
        ("UDF2!", "UDFC7"),
        ("TX11!", "TX1L6"),
        ("GDF1!", "GDFK6"),
        ("TXF1!", "TXFK6"),
        ("TXF2!", "TXFL6"),
    ],
)
def test_a_continuous_future_is_a_listed_contract_of_its_product(name: str, symbol: str) -> None:
    future = read_symbol(name, {})
    assert isinstance(future, ContinuousFuture)
    assert future.find_contract(CALENDAR, BEFORE, LISTED[future.product]) == symbol


def test_a_listed_contract_is_the_front_until_the_close_of_its_last_day() -> None:
    gold, index = read_symbol("GDF1!", {}), read_symbol("TXF1!", {})
    assert isinstance(gold, ContinuousFuture)
    assert isinstance(index, ContinuousFuture)
    last = datetime(2026, 11, 26, 13, 44, tzinfo=HOME_ZONE)
    assert gold.find_contract(CALENDAR, last, LISTED["GDF"]) == "GDFK6"
    assert gold.find_contract(CALENDAR, last + timedelta(minutes=1), LISTED["GDF"]) == "GDFL6"
    assert index.find_contract(CALENDAR, AFTER, LISTED["TXF"]) == "TXFL6"
    typhoon = Calendar(CALENDAR.holidays, CALENDAR.last, {date(2026, 11, 18): None})
    assert index.find_contract(typhoon, AFTER, LISTED["TXF"]) == "TXFK6"
    with pytest.raises(UnknownSymbol, match="lists no such contract"):
        gold.find_contract(CALENDAR, datetime(2027, 1, 4, tzinfo=HOME_ZONE), LISTED["GDF"])


@pytest.mark.parametrize("name", ["UDF1!", "TX11!", "GDF2!", "CDF1!", "TXO1!"])
def test_a_product_whose_last_days_nobody_knows_has_no_front_month_without_a_list(
    name: str,
) -> None:
    with pytest.raises(UnknownSymbol, match=f"{name[:3]}K6"):
        resolved(name)


def test_an_operators_name_means_what_signals_may_say() -> None:
    for target in ("2330", "TWSE:2330", "TXF1!", "UDF2!", "TXFZ2026"):
        require_readable(target)
    for target in ("TXF3!", "NASDAQ:AAPL", "!"):
        with pytest.raises(UnknownSymbol):
            require_readable(target)


def test_an_operator_gives_a_name_a_meaning() -> None:
    names = {"FITX": "TXF1!", "TW:TSMC": "2330"}
    assert resolve_symbol("fitx", names, CALENDAR, BEFORE) == "TXFK6"
    assert resolve_symbol("TAIFEX:FITX", names, CALENDAR, BEFORE) == "TXFK6"
    assert resolve_symbol("TW:TSMC", names, CALENDAR, BEFORE) == "2330"


@pytest.mark.parametrize("name", ["NASDAQ:AAPL", "", "TXF3!", "a b", "!!"])
def test_what_no_exchange_here_has_is_named_with_what_to_do(name: str) -> None:
    with pytest.raises(UnknownSymbol, match="berth symbols set"):
        resolved(name)


def test_contracts_of_a_product_wait_in_one_line_and_each_share_in_its_own() -> None:
    assert {lane_of(symbol) for symbol in ("TXFK6", "TXFL6", "TXFR1")} == {"TXF"}
    assert [lane_of(symbol) for symbol in ("2330", "2337")] == ["2330", "2337"]
    assert [lane_of(symbol) for symbol in ("CDFL6", "CDFR2")] == ["CDF", "CDF"]


def test_a_symbol_is_of_the_accounts_own_market_unless_another_one_has_its_form() -> None:
    markets = home_broker().record.markets
    stock, futures = markets["stock"], markets["futures"]
    for own in (stock, futures):
        assert market_of_symbol("2330", markets, own) is stock
        assert market_of_symbol("TXFL6", markets, own) is futures
        assert market_of_symbol("ALFA.HB", markets, own) is own
    # Two markets with symbols of one form.
    assert market_of_symbol("2330", markets | {"first": stock}, futures) is stock
    wide = msgspec.structs.replace(futures, symbols=stock.symbols)
    assert market_of_symbol("2330", markets | {"wide": wide}, wide) is wide


def test_names_of_charts_are_those_of_the_accounts_broker() -> None:
    stock = home_broker().record.markets["stock"]
    charts = ChartNames(exchanges=("HBR",), suffixes=(".HBX",))
    markets = {"spot": msgspec.structs.replace(stock, charts=charts, check_symbol="ALFA")}
    assert resolve_symbol("HBR:ALFA", {}, CALENDAR, BEFORE, markets) == "ALFA"
    assert resolve_symbol("ALFA.HBX", {}, CALENDAR, BEFORE, markets) == "ALFA"
    assert resolve_symbol("TXFZ2026", {}, CALENDAR, BEFORE, markets) == "TXFZ2026"
    with pytest.raises(UnknownSymbol, match="known are HBR"):
        resolve_symbol("TWSE:ALFA", {}, CALENDAR, BEFORE, markets)
    with pytest.raises(UnknownSymbol, match="such as ALFA"):
        resolve_symbol("!!", {}, CALENDAR, BEFORE, markets)


def test_options_of_other_strikes_do_not_wait_for_each_other() -> None:
    options = ["TXO18000L6", "TXO18000X6", "TXO19000L6", "TXO18000A7", "CDA0600L6"]
    assert [lane_of(option) for option in options] == options


@pytest.mark.parametrize(
    ("symbol", "price", "bought", "sold"),
    [
        ("2330", "1005.5", "1005", "1010"),
        ("2330", "999.9", "999", "1000"),
        ("2330", "499.75", "499.5", "500"),
        ("2330", "99.97", "99.9", "100"),
        ("2330", "9.999", "9.99", "10"),
        ("0050", "180.03", "180", "180.05"),
        ("0050", "49.999", "49.99", "50"),
        ("TXFL6", "23000.4", "23000", "23001"),
        ("EXFL6", "1000.04", "1000", "1000.05"),
        ("TXO20000L6", "10.12345678", "10", "10.5"),
        ("CDFL6", "600.12345678", "600.1234", "600.1235"),  # its step is not known
        ("2330", "0.001", "0.01", "0.01"),
    ],
)
def test_a_price_is_rounded_to_the_side_that_is_not_worse(
    symbol: str, price: str, bought: str, sold: str
) -> None:
    assert round_to_tick(symbol, Decimal(price), buys=True) == Decimal(bought)
    assert round_to_tick(symbol, Decimal(price), buys=False) == Decimal(sold)


def test_a_price_is_rounded_by_the_steps_of_its_own_market() -> None:
    ticks = (TickStep(below=Decimal(20), tick=Decimal("0.02")), TickStep(tick=Decimal("0.25")))
    for price, buys, rounded in (
        ("12.03", True, "12.02"),
        ("12.03", False, "12.04"),
        ("19.99", False, "20"),
        ("20.1", True, "20"),
    ):
        made = round_to_tick("2330", Decimal(price), buys=buys, ticks=ticks)
        assert made == Decimal(rounded)
    assert round_to_tick("2330", Decimal("12.03"), buys=True, ticks=()) == Decimal("12.03")
