"""Bounds of what messages carry, so that whatever can be decoded can also be handled.

They are wide: no honest sender meets them. They keep out what raises later, such as a time that `datetime`
cannot hold, a price that is no number, or a quantity that does not fit its column. msgspec checks them while
it decodes. A price has no bounds in msgspec, so the structs that hold one call `check_prices` when they are
made, which takes 0.15 µs.
"""

from decimal import Decimal
from typing import Annotated

from msgspec import Meta

#: Unix milliseconds of the years 2000 and 2200.
EARLIEST_MS = 946_684_800_000
LATEST_MS = 7_258_118_400_000

TimeMs = Annotated[int, Meta(ge=EARLIEST_MS, le=LATEST_MS)]
#: A time that may be unknown: 0.
TimeMsOrZero = Annotated[int, Meta(ge=0, le=LATEST_MS)]
#: A span of milliseconds, at most 100 years.
SpanMs = Annotated[int, Meta(ge=0, le=100 * 366 * 86_400_000)]
#: How long a call took, at most an hour; a share.
SpanUs = Annotated[int, Meta(ge=0, le=3_600_000_000)]
Permille = Annotated[int, Meta(ge=0, le=1000)]
#: A span of seconds that a message asks somebody to wait.
WaitSeconds = Annotated[float, Meta(ge=0, le=86_400)]

#: Lots; the columns are integers of 32 bits, and sums of them have to fit, too.
Lots = Annotated[int, Meta(ge=0, le=100_000_000)]
#: Lots of a position, negative when short.
SignedLots = Annotated[int, Meta(ge=-100_000_000, le=100_000_000)]
#: Epochs, sequences and versions: what grows by one. JSON readers keep integers of 53 bits.
Counter = Annotated[int, Meta(ge=0, le=2**53)]

#: Ids of users, accounts, orders and requests; the columns have 64 characters.
Id = Annotated[str, Meta(max_length=64)]
#: Ids of requests, workers, claims and fills.
LongId = Annotated[str, Meta(max_length=128)]
#: The name of a channel, with the name of a host in it.
Channel = Annotated[str, Meta(max_length=512)]
EventId = Annotated[str, Meta(max_length=160)]
#: An order's id, as Berth makes them: a UUID in its canonical form.
OrderId = Annotated[
    str, Meta(pattern="^[0-9a-f]{8}-[0-9a-f]{4}-[0-9a-f]{4}-[0-9a-f]{4}-[0-9a-f]{12}$", max_length=36)
]
#: Symbols, tags, codes of errors.
Word = Annotated[str, Meta(max_length=64)]
#: A sentence for a person. What a broker says is passed on as it is.
Sentence = Annotated[str, Meta(max_length=16_000)]

#: Entries of a list. A message of `MAX_MESSAGE` bytes has room for about a thousand orders.
LISTED = Meta(max_length=4_000)
#: Accounts of one user: each is unsealed and logged in while a claim waits.
MAX_ACCOUNTS = 32
FEW = Meta(max_length=MAX_ACCOUNTS)

#: Prices and amounts have at most 12 digits before the point, as the columns do.
_MOST = Decimal(10) ** 12
#: Characters of a price; an average may have 28 digits.
_LONGEST = 40


def check_prices(**prices: Decimal | None) -> None:
    """Raises `ValueError` for what is no price: not finite, negative, too large or too long."""
    for name, price in prices.items():
        if price is None:
            continue
        # Finite first: NaN cannot be compared.
        if not price.is_finite() or not 0 <= price < _MOST or len(str(price)) > _LONGEST:
            raise ValueError(f"{name}: a price is finite, not negative and below 10^12")


def check_amounts(**amounts: Decimal) -> None:
    """The same for money, which may be owed."""
    check_prices(**{name: abs(amount) if amount.is_finite() else amount for name, amount in amounts.items()})
