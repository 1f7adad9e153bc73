"""The symbols that exist, and the size of one lot of each."""

import csv
from collections.abc import Mapping
from dataclasses import dataclass, field
from decimal import Decimal, InvalidOperation
from pathlib import Path

from worker_runtime.protocol.broker_record import MarketRule
from worker_runtime.protocol.errors import BerthError


class InstrumentsUnreadable(BerthError, code="INSTRUMENTS_UNREADABLE"):
    """The file of symbols cannot be read."""


@dataclass(frozen=True)
class Instruments:
    """Known symbols: those in the list, or without a list every text that has a symbol's form."""

    listed: Mapping[str, Decimal] = field(default_factory=dict)

    def lot(self, symbol: str, markets: Mapping[str, MarketRule]) -> Decimal | None:
        """Return the value of one lot at a price of 1, in the market's currency; None for an
        unknown symbol.

        `markets`: those of the account's broker.
        """
        if symbol in self.listed:
            return self.listed[symbol]
        if self.listed:
            return None
        for market in markets.values():
            rule = market.symbol_rule(symbol)
            if rule is not None:
                return rule.lot_value
        return None


def load_instruments(path: Path | None = None) -> Instruments:
    """Loads a CSV file with the columns `symbol` and `lot`. Raises `InstrumentsUnreadable`."""
    if path is None:
        return Instruments()
    try:
        with path.open(encoding="utf-8", newline="") as file:
            listed = {row["symbol"].strip(): Decimal(row["lot"]) for row in csv.DictReader(file)}
    except (OSError, ValueError, KeyError, InvalidOperation, AttributeError, TypeError) as error:
        raise InstrumentsUnreadable(f"{path}: {type(error).__name__} {error}") from None
    if not listed or any(not lot.is_finite() or lot <= 0 for lot in listed.values()):
        raise InstrumentsUnreadable(f"{path}: it lists no symbol, or a lot that is not above 0")
    return Instruments(listed)
