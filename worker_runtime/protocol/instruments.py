"""The instruments of a broker: what one of them is, how it is priced, and until when it trades.

A broker's own list is loaded once each trading day, in pages, through an account that an operator
designates. PostgreSQL keeps it; until it was loaded, a broker's record says what symbols mean.
"""

from datetime import date
from decimal import Decimal
from enum import StrEnum
from typing import Annotated

import msgspec

#: Instruments in one page of a broker's list, at most.
MAX_PAGE = 200
Code = Annotated[str, msgspec.Meta(min_length=1, max_length=32)]


class InstrumentKind(StrEnum):
    """What an instrument is."""

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


class Instrument(msgspec.Struct, frozen=True, kw_only=True):
    """One instrument, as its broker describes it on a trading day.

    Prices are in the currency of its market. What a broker does not tell is None or empty: then its
    record decides, or nothing is checked.
    """

    #: What orders name it by.
    code: Code
    name: Annotated[str, msgspec.Meta(max_length=120)] = ""
    #: The record's name of the market, which is the `broker_type` of the accounts that trade it.
    market: Annotated[str, msgspec.Meta(pattern=r"^[a-z][a-z0-9_]{0,15}$")]
    kind: InstrumentKind
    #: Units (shares, contracts) in a common lot.
    lot_units: Annotated[int, msgspec.Meta(ge=1)]
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
    #: Whether it may be bought and sold on the same day; None: the broker does not say.
    day_trade: bool | None = None
    #: Code or product of what a derivative follows.
    underlying: Annotated[str, msgspec.Meta(max_length=32)] = ""


class InstrumentPage(msgspec.Struct, frozen=True, kw_only=True):
    """A part of a broker's list, by rising code."""

    instruments: Annotated[tuple[Instrument, ...], msgspec.Meta(max_length=MAX_PAGE)] = ()
    #: The last code of this page, after which the next one begins; '': this was the last page.
    next_after: Annotated[str, msgspec.Meta(max_length=32)] = ""
