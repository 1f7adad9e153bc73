"""Which symbols may name the same contract, as the brokers' records say (`ContractCodes`).

A rolling code (`TXFR1`) stands for a contract of its product, and only the broker knows for which
one. What is locked, blocked or compared by symbol takes both for the same. The rules of all
installed brokers count, whatever the account's broker: to take two contracts for one only makes an
order wait.
"""

import re
from functools import cache
from typing import NamedTuple

from worker_runtime.protocol.broker_record import ContractCodes
from worker_runtime.protocol.installed_brokers import installed_brokers


class Contract(NamedTuple):
    """Holds what the code of a contract says."""

    product: str
    is_rolling: bool
    #: False: the code says more than product and month, as an option's does.
    is_future: bool = True


class CodeRule:
    """The contract codes of a market, compiled."""

    def __init__(self, codes: ContractCodes) -> None:
        self._codes = codes
        # A pattern that matches nothing, where the market has no rolling codes.
        self._rolling = codes.rolling or "(?!)"
        self._form = re.compile(f"({codes.product})(?:({self._rolling})|{codes.dated})")
        month = f"[{codes.months}]\\d{{{codes.year_digits}}}" if codes.months else codes.dated
        self._future = re.compile(f"(?:{codes.product})(?:{self._rolling}|{month})")

    def read(self, symbol: str) -> Contract | None:
        """Return the product of a contract; None if the symbol is none of this market."""
        match = self._form.fullmatch(symbol)
        if match is None:
            return None
        is_future = self._future.fullmatch(symbol) is not None
        return Contract(match[1], match[2] is not None, is_future)

    def pattern_of_same(self, symbol: str) -> str | None:
        """Return a pattern of all other symbols that may name the same contract, for Python and
        PostgreSQL; None if there are none."""
        contract = self.read(symbol)
        if contract is None or not self._codes.rolling:
            return None
        rest = self._codes.rolling
        if contract.is_rolling:
            rest = f"{rest}|{self._codes.dated}"
        return f"^{re.escape(contract.product)}(?:{rest})$"


@cache
def _rules() -> tuple[CodeRule, ...]:
    codes = {
        market.contracts: None
        for plugin in installed_brokers().values()
        for market in plugin.record.markets.values()
        if market.contracts is not None
    }
    return tuple(CodeRule(rule) for rule in codes)


def read_contract(symbol: str) -> Contract | None:
    """Return what a contract's code says; None for shares and other symbols. No I/O."""
    return next(
        (contract for rule in _rules() if (contract := rule.read(symbol)) is not None), None
    )


def product_of(symbol: str) -> str:
    """Return the product of a contract, or the symbol itself."""
    contract = read_contract(symbol)
    return symbol if contract is None else contract.product


def is_rolling(symbol: str) -> bool:
    """Return True if only the broker knows which contract the symbol stands for."""
    contract = read_contract(symbol)
    return contract is not None and contract.is_rolling


def is_single_future(symbol: str, product: str) -> bool:
    """Return True for a future of the product that ends on one day."""
    contract = read_contract(symbol)
    return (
        contract is not None
        and contract.product == product
        and contract.is_future
        and not contract.is_rolling
    )


def same_contract_pattern(symbol: str) -> str | None:
    """Return a pattern, for Python and PostgreSQL, of the other symbols that may name the same
    contract; None if there are none."""
    patterns = [pattern for rule in _rules() if (pattern := rule.pattern_of_same(symbol))]
    return "|".join(patterns) or None


def may_be_same_contract(symbol: str, other: str) -> bool:
    """Return True if two symbols may name the same contract."""
    if symbol == other:
        return True
    return any(_same(rule.read(symbol), rule.read(other)) for rule in _rules())


def _same(first: Contract | None, second: Contract | None) -> bool:
    if first is None or second is None or first.product != second.product:
        return False
    return first.is_rolling or second.is_rolling
