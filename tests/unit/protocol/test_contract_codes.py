"""Symbols that may name the same contract are found by the records, in Python and in a pattern."""

from __future__ import annotations

import re

import pytest

from worker_runtime.protocol.contract_codes import (
    is_rolling,
    may_be_same_contract,
    product_of,
    same_contract_pattern,
)


@pytest.mark.parametrize(
    ("symbol", "product", "rolls"),
    [
        ("TXFL6", "TXF", False),
        ("TXFR1", "TXF", True),
        ("MX1A6", "MX1", False),
        ("TXO20000L6", "TXO", False),
        ("2330", "2330", False),
        ("ALFA.HB", "ALFA.HB", False),
    ],
)
def test_the_product_of_a_contract_is_the_beginning_of_its_code(
    symbol: str, product: str, rolls: bool
) -> None:
    assert (product_of(symbol), is_rolling(symbol)) == (product, rolls)


@pytest.mark.parametrize(
    ("symbol", "other", "same"),
    [
        ("TXFR1", "TXFK6", True),
        ("TXFR1", "TXFR2", True),
        ("TXFK6", "TXFL6", False),
        ("TXFR1", "MXFK6", False),
        ("2330", "2330", True),
        ("2330", "2337", False),
        ("ALFA.HB", "ALFB.HB", False),
    ],
)
def test_a_rolling_code_may_be_each_contract_of_its_product(
    symbol: str, other: str, same: bool
) -> None:
    for first, second in ((symbol, other), (other, symbol)):
        assert may_be_same_contract(first, second) is same
        pattern = same_contract_pattern(first)
        by_pattern = first == second or bool(pattern and re.search(pattern, second))
        assert by_pattern is same


def test_shares_have_no_pattern_of_others() -> None:
    assert same_contract_pattern("2330") is None
