"""Symbols have a lot value."""

from __future__ import annotations

from decimal import Decimal
from pathlib import Path
from typing import Any

import pytest

from infra.market.instruments import InstrumentsUnreadable, load_instruments
from worker_runtime.protocol.installed_brokers import built_in_brokers
from worker_runtime.protocol.instruments import Instrument, InstrumentKind, PriceStep

MARKETS = built_in_brokers()["paper"].record.markets


@pytest.mark.parametrize(
    ("symbol", "lot"),
    [
        ("2330", 1000),
        ("00878", 1000),
        ("00632R", 1000),
        ("030001", 1000),
        ("03001P", 1000),
        ("TXFA6", 200),
        ("MX1A6", 50),
        ("MXVL6", 50),
        ("TXO20000A6", 50),
        ("TX420000X6", 50),
        ("MXFR1", 50),
        ("TMFL6", 10),
        ("TXFM6", None),  # there is no thirteenth month
        ("ABCA6", None),
        ("233", None),
        ("2330\n", None),
        ("AAPL", None),
    ],
)
def test_without_a_list_the_form_of_a_symbol_decides(symbol: str, lot: int | None) -> None:
    known = load_instruments().find(symbol, MARKETS)
    assert (known and known.lot_value) == lot


@pytest.mark.parametrize("symbol", ["CDFA6", "CDFR1", "CD1L6", "CDO00600A6", "TEO02000M6"])
def test_a_code_without_a_known_lot_size_passes_without_a_value(symbol: str) -> None:
    known = load_instruments().find(symbol, MARKETS)
    assert known is not None
    assert (known.lot_value, known.ticks) == (None, ())


def an_instrument(**changes: Any) -> Instrument:
    """Returns futures on a share of 2,000 units, as a broker lists them."""
    terms: dict[str, Any] = {
        "code": "CDFL6",
        "market": "futures",
        "kind": InstrumentKind.FUTURE,
        "lot_units": 1,
        "lot_value": Decimal(2000),
        "ticks": (
            PriceStep(below=Decimal(1000), tick=Decimal(1)),
            PriceStep(tick=Decimal(5)),
        ),
    }
    return Instrument(**terms | changes)


def test_the_brokers_list_goes_before_the_form_of_a_code() -> None:
    known = load_instruments().find("CDFL6", MARKETS, an_instrument(), listed_markets={"futures"})
    assert known is not None
    assert known.lot_value == 2000
    assert known.prices_around(Decimal("600.5")) == (Decimal(600), Decimal(601))


def test_what_a_list_leaves_out_is_as_the_record_says() -> None:
    listed = an_instrument(code="2330", lot_units=1000, lot_value=Decimal(1000), ticks=())
    known = load_instruments().find("2330", MARKETS, listed, listed_markets={"stock"})
    assert known is not None
    assert known.prices_around(Decimal("499.75")) == (Decimal("499.5"), Decimal(500))
    assert known.value_of(1) == 1


def test_a_code_that_the_list_lacks_is_unknown_unless_it_rolls() -> None:
    symbols = load_instruments()
    assert symbols.find("2330", MARKETS, listed_markets={"stock"}) is None
    rolling = symbols.find("TXFR1", MARKETS, listed_markets={"futures"})
    assert rolling is not None
    assert rolling.lot_value == 200


def test_a_list_of_one_market_says_nothing_of_the_codes_of_another() -> None:
    known = load_instruments().find("TXFL6", MARKETS, listed_markets={"stock"})
    assert known is not None
    assert known.lot_value == 200
    assert load_instruments().find("TXFL6", MARKETS, listed_markets={"futures"}) is None


@pytest.mark.parametrize(
    ("price", "around"),
    [
        ("600", (600, 600)),
        ("999.5", (999, 1000)),
        ("1000", (1000, 1000)),
        ("1001", (1000, 1005)),
        ("0.5", (0, 1)),
    ],
)
def test_the_next_prices_are_right_at_the_border_of_two_steps(
    price: str, around: tuple[int, int]
) -> None:
    known = load_instruments().find("CDFL6", MARKETS, an_instrument())
    assert known is not None
    assert known.prices_around(Decimal(price)) == tuple(map(Decimal, around))


def test_with_a_list_only_listed_codes_are_known(tmp_path: Path) -> None:
    path = tmp_path / "symbols.csv"
    path.write_text("symbol,lot\nAAPL,31.5\n2330,1000\n")
    symbols = load_instruments(path)
    known = [symbols.find(symbol, MARKETS) for symbol in ("AAPL", "2330", "2317")]
    assert [terms and terms.lot_value for terms in known] == [Decimal("31.5"), Decimal(1000), None]


@pytest.mark.parametrize(
    "text", ["", "symbol,lot\n", "symbol,lot\nX,0\n", "symbol,lot\nX,NaN\n", "a,b\n1,2\n"]
)
def test_a_list_that_makes_no_sense_is_named(tmp_path: Path, text: str) -> None:
    path = tmp_path / "symbols.csv"
    path.write_text(text)
    with pytest.raises(InstrumentsUnreadable, match=r"symbols\.csv"):
        load_instruments(path)
