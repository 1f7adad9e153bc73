"""Tells how a symbol trades: from the broker's instruments where a table was loaded, from an
operator's list, or from the form of its code, as the broker's record says."""

import csv
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, field
from datetime import date
from decimal import ROUND_CEILING, ROUND_FLOOR, Decimal, InvalidOperation
from pathlib import Path

from worker_runtime.protocol.broker_record import MarketRule, TickStep
from worker_runtime.protocol.contract_codes import is_rolling
from worker_runtime.protocol.errors import BerthError
from worker_runtime.protocol.instruments import Instrument, PriceStep
from worker_runtime.protocol.order_terms import OrderLot


class InstrumentsUnreadable(BerthError, code="INSTRUMENTS_UNREADABLE"):
    """The file of symbols cannot be read."""


@dataclass(frozen=True, kw_only=True)
class SymbolTerms:
    """Holds what is known of a symbol. What nobody knows is None or empty, and is not checked."""

    #: Value of one common lot at a price of 1, in the market's currency.
    lot_value: Decimal | None
    #: Units in that lot.
    lot_units: int | None = None
    ticks: Sequence[TickStep | PriceStep] = ()
    limit_up: Decimal | None = None
    limit_down: Decimal | None = None
    #: The last day on which it trades.
    expires_on: date | None = None

    def value_of(self, units: int) -> Decimal | None:
        """Return the value of a lot of so many units at a price of 1."""
        if self.lot_value is None or self.lot_units in (None, units):
            return self.lot_value
        return self.lot_value * units / self.lot_units

    def prices_around(self, price: Decimal) -> tuple[Decimal, Decimal] | None:
        """Return the next prices that are allowed, down and up; both are `price` if that is one.
        None: the steps are not known. The lower one is 0 below the first step."""
        tick = next((s.tick for s in self.ticks if s.below is None or price < s.below), None)
        if tick is None:
            return None
        # A step begins at a multiple of its own and of the step before, so the next price up is
        # right at the border of two steps, too.
        down, up = (
            ((price / tick).to_integral_value(rounding) * tick).normalize()
            for rounding in (ROUND_FLOOR, ROUND_CEILING)
        )
        return down, up


@dataclass(frozen=True)
class Instruments:
    """An operator's list of the home markets' symbols. Without one, a table or the form of a symbol
    decides."""

    listed: Mapping[str, Decimal] = field(default_factory=dict)

    def find(
        self,
        symbol: str,
        markets: Mapping[str, MarketRule],
        instrument: Instrument | None = None,
        *,
        listed_markets: Collection[str] = (),
    ) -> SymbolTerms | None:
        """Return what is known of a symbol; None for an unknown one.

        `markets`: those of the account's broker. `instrument`: what the broker's list says of this
        code. `listed_markets`: those whose list decides which codes exist; the form of a code says
        to which it belongs. A rolling code may be missing in a list.
        """
        if self.listed:
            if symbol not in self.listed:
                return None
            known = _of_instrument(instrument, markets) if instrument else None
            known = known or _of_form(symbol, markets)
            common = next(iter(markets.values())).lots.get(OrderLot.COMMON)
            return SymbolTerms(
                lot_value=self.listed[symbol],
                lot_units=known.lot_units if known else common.units if common else None,
                ticks=known.ticks if known else (),
                limit_up=known.limit_up if known else None,
                limit_down=known.limit_down if known else None,
                expires_on=known.expires_on if known else None,
            )
        if instrument is not None:
            return _of_instrument(instrument, markets)
        market = _market_of_form(symbol, markets) if listed_markets else None
        if market in listed_markets and not is_rolling(symbol):
            return None
        return _of_form(symbol, markets)


def _of_instrument(instrument: Instrument, markets: Mapping[str, MarketRule]) -> SymbolTerms:
    form = _of_form(instrument.code, markets)
    return SymbolTerms(
        lot_value=instrument.lot_value,
        lot_units=instrument.lot_units,
        ticks=instrument.ticks or (form.ticks if form else ()),
        limit_up=instrument.limit_up,
        limit_down=instrument.limit_down,
        expires_on=instrument.expires_on,
    )


def _market_of_form(symbol: str, markets: Mapping[str, MarketRule]) -> str | None:
    return next((name for name, rule in markets.items() if rule.symbol_rule(symbol)), None)


def _of_form(symbol: str, markets: Mapping[str, MarketRule]) -> SymbolTerms | None:
    for market in markets.values():
        rule = market.symbol_rule(symbol)
        if rule is not None:
            common = market.lots.get(OrderLot.COMMON)
            return SymbolTerms(
                lot_value=rule.lot_value,
                lot_units=common.units if common else None,
                ticks=rule.ticks,
            )
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
