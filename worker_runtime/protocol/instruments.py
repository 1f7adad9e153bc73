"""The instruments of a broker: what one of them is, how it is priced, and until when it trades.

A broker's own list is loaded once each trading day, in pages, through an account that an operator
designates. PostgreSQL keeps it; until it was loaded, a broker's record says what symbols mean.
"""

from datetime import date
from decimal import Decimal
from enum import StrEnum
from itertools import pairwise
from typing import Annotated

import msgspec

from worker_runtime.protocol.bounds import Counter, TimeMsOrZero, check_prices

#: Instruments in one page of a broker's list, at most.
MAX_INSTRUMENTS_PER_PAGE = 200
#: Bytes of the instruments of one page, as JSON: it travels in an answer, which has at most 256 KiB
#: (`messages.MAX_MESSAGE_BYTES`).
MAX_PAGE_BYTES = 128 * 1024
#: Neither control characters nor halves of surrogate pairs: PostgreSQL and JSON take the rest.
_PLAIN_PATTERN = r"^[^\x00-\x1f\x7f-\x9f\ud800-\udfff]*\Z"
Code = Annotated[str, msgspec.Meta(min_length=1, max_length=32, pattern=_PLAIN_PATTERN)]
#: A code, or '' for none.
CodeOrNone = Annotated[str, msgspec.Meta(max_length=32, pattern=_PLAIN_PATTERN)]
#: The record's name of a market.
Market = Annotated[str, msgspec.Meta(pattern=r"^[a-z][a-z0-9_]{0,15}\Z")]
#: A market, or '' for all of a broker.
MarketOrAll = Annotated[str, msgspec.Meta(pattern=r"^([a-z][a-z0-9_]{0,15})?\Z")]


class InstrumentKind(StrEnum):
    """The kind of an instrument."""

    STOCK = "stock"
    FUND = "fund"
    WARRANT = "warrant"
    FUTURE = "future"
    OPTION = "option"
    #: Anything else that the broker lists.
    OTHER = "other"


class PriceStep(msgspec.Struct, frozen=True, kw_only=True):
    """The smallest step of prices below `below`; the last step of a table has no end."""

    below: Decimal | None = None
    tick: Decimal

    def __post_init__(self) -> None:
        _check_positive(below=self.below, tick=self.tick)


class Instrument(msgspec.Struct, frozen=True, kw_only=True):
    """An instrument, as its broker describes it on a trading day.

    Prices are in the currency of its market. What a broker does not tell is None or empty: then its
    record decides, or nothing is checked.
    """

    #: The name by which orders call it.
    code: Code
    name: Annotated[str, msgspec.Meta(max_length=120, pattern=_PLAIN_PATTERN)] = ""
    #: The record's name of the market, which is the `broker_type` of the accounts that trade it.
    market: Market
    kind: InstrumentKind
    #: Units (shares, contracts) in a common lot.
    lot_units: Annotated[int, msgspec.Meta(ge=1, le=1_000_000_000)]
    #: Value of one common lot at a price of 1: units times the contract's multiplier.
    lot_value: Decimal
    #: By rising price; empty: the record's.
    ticks: Annotated[tuple[PriceStep, ...], msgspec.Meta(max_length=16)] = ()
    #: The price from which today's limits count, and the limits.
    reference: Decimal | None = None
    limit_up: Decimal | None = None
    limit_down: Decimal | None = None
    #: The last day on which it trades; None: it has none.
    expires_on: date | None = None
    #: True if it may be bought and sold on the same day; None: the broker does not say.
    day_trade: bool | None = None
    #: Code or product of what a derivative follows.
    underlying: CodeOrNone = ""
    #: The broker still has the prices of another day, so there are none here: they come later.
    prices_due: bool = False

    def __post_init__(self) -> None:
        _check_positive(lot_value=self.lot_value)
        check_prices(reference=self.reference, limit_up=self.limit_up, limit_down=self.limit_down)


class InstrumentPage(msgspec.Struct, frozen=True, kw_only=True):
    """A part of a broker's list, by rising code."""

    instruments: Annotated[
        tuple[Instrument, ...], msgspec.Meta(max_length=MAX_INSTRUMENTS_PER_PAGE)
    ] = ()
    #: The last code of this page, after which the next one begins; '': this was the last page.
    next_after: CodeOrNone = ""
    #: When the session began to read the list at the broker. Pages with different times come from
    #: different lists: a reader begins anew.
    taken_at_ms: TimeMsOrZero = 0
    #: Instruments of the whole list, in the market that was asked for.
    total: Counter = 0

    def __post_init__(self) -> None:
        codes = [instrument.code for instrument in self.instruments]
        if any(code >= following for code, following in pairwise(codes)):
            raise ValueError("the codes of a page rise, and none comes twice")
        if self.next_after and self.next_after != (codes[-1] if codes else ""):
            raise ValueError("the next page begins after the last code of this one")


def _check_positive(**numbers: Decimal | None) -> None:
    check_prices(**numbers)
    for name, number in numbers.items():
        if number is not None and number <= 0:
            raise ValueError(f"{name}: above 0")
