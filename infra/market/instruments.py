"""The symbols that exist, and the size of one lot of each."""

import csv
import re
from collections.abc import Mapping
from dataclasses import dataclass, field
from decimal import Decimal, InvalidOperation
from pathlib import Path

from worker_runtime.protocol.errors import BerthError

#: Shares in one lot (TWSE).
SHARES = Decimal(1000)
#: TWD an index point of one contract (TAIFEX: TX, MTX, TMF, TE, TF).
_FAMILIES = {
    "TXF": Decimal(200),
    "MXF": Decimal(50),
    "TMF": Decimal(10),
    "EXF": Decimal(4000),
    "FXF": Decimal(1000),
}
#: A family with a month (`MXFA6`: letter of the month, digit of the year), or a rolling code (`MXFR1`).
_CONTRACT = re.compile(r"([A-Z]{3})(?:[A-L]\d|R[12])")
#: Shares have 4 digits; funds, warrants and preferred shares up to 6, some with a letter at the end.
_SHARE = re.compile(r"\d{4,6}[A-Z]?")


class InstrumentsUnreadable(BerthError, code="INSTRUMENTS_UNREADABLE"):
    """The file of symbols cannot be read."""


@dataclass(frozen=True)
class Instruments:
    """Known symbols: those in the list, or without a list every text that has a symbol's form."""

    listed: Mapping[str, Decimal] = field(default_factory=dict)

    def lot(self, symbol: str) -> Decimal | None:
        """Returns the value of one lot at a price of 1, in TWD; None for an unknown symbol."""
        if symbol in self.listed:
            return self.listed[symbol]
        if self.listed:
            return None
        contract = _CONTRACT.fullmatch(symbol)
        if contract is not None:
            return _FAMILIES.get(contract[1])
        return SHARES if _SHARE.fullmatch(symbol) else None


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
