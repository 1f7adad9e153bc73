"""Symbols, and what a lot of them is worth."""

from __future__ import annotations

from decimal import Decimal
from pathlib import Path

import pytest

from infra.market.instruments import InstrumentsUnreadable, load_instruments
from worker_runtime.protocol.installed_brokers import own_brokers

MARKETS = own_brokers()["paper"].record.markets


@pytest.mark.parametrize(
    ("symbol", "lot"),
    [
        ("2330", 1000),
        ("00878", 1000),
        ("00632R", 1000),
        ("TXFA6", 200),
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
    assert load_instruments().lot(symbol, MARKETS) == lot


def test_with_a_list_only_what_stands_in_it_is_known(tmp_path: Path) -> None:
    path = tmp_path / "symbols.csv"
    path.write_text("symbol,lot\nAAPL,31.5\n2330,1000\n")
    symbols = load_instruments(path)
    lots = [symbols.lot(symbol, MARKETS) for symbol in ("AAPL", "2330", "2317")]
    assert lots == [Decimal("31.5"), Decimal(1000), None]


@pytest.mark.parametrize(
    "text", ["", "symbol,lot\n", "symbol,lot\nX,0\n", "symbol,lot\nX,NaN\n", "a,b\n1,2\n"]
)
def test_a_list_that_makes_no_sense_is_named(tmp_path: Path, text: str) -> None:
    path = tmp_path / "symbols.csv"
    path.write_text(text)
    with pytest.raises(InstrumentsUnreadable, match=r"symbols\.csv"):
        load_instruments(path)
