"""Bounds of what messages carry, so that whatever can be decoded can also be handled.

They are wide: no honest sender meets them. They keep out what raises later, such as a time that
`datetime` cannot hold, a price that is no number, or a quantity that does not fit its column.
msgspec checks them while it decodes. A price has no bounds in msgspec, so the structs that hold one
call `check_prices` when they are made, which takes 0.15 µs.
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
#: The time that a call took, at most an hour; a share.
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
    str,
    Meta(pattern="^[0-9a-f]{8}-[0-9a-f]{4}-[0-9a-f]{4}-[0-9a-f]{4}-[0-9a-f]{12}$", max_length=36),
]
#: Symbols, tags, codes of errors.
Word = Annotated[str, Meta(max_length=64)]
#: A sentence for a person. What a broker says is passed on as it is.
Sentence = Annotated[str, Meta(max_length=16_000)]

#: Entries of a list. A message of `MAX_MESSAGE_BYTES` has room for about a thousand orders.
LIST_BOUNDS = Meta(max_length=4_000)
#: Accounts of one user: each is unsealed and logged in while a claim waits.
MAX_ACCOUNTS = 32
ACCOUNT_BOUNDS = Meta(max_length=MAX_ACCOUNTS)

#: A price has at most 12 digits before the point and 6 behind it,
#: as its column does (`Numeric(18, 6)`).
PRICE_PLACES = 6
_PRICE_STEP = Decimal(1).scaleb(-PRICE_PLACES)
MAX_PRICE = Decimal(10) ** 12 - _PRICE_STEP
#: The bounds of what readers accept as a price or an amount. An average cost such as 1661/3 has 28
#: digits by default, so the bounds are wider than what our own adapters send (`round_price`).
MIN_EXPONENT, MAX_EXPONENT = -28, 12
MAX_DIGITS = 30
#: Characters of the longest accepted number, written without an exponent: a sign, `0.`, 28 places.
MAX_PRICE_LENGTH = MAX_DIGITS + 3
#: Text that is at most this long and has no exponent
#: is within the bounds: cheaper to ask than `as_tuple`.
_SHORT_TEXT_LENGTH = -MIN_EXPONENT


def check_prices(**prices: Decimal | None) -> None:
    """Raises `ValueError` for what is no price: not finite, negative, too large or too long.

    A number such as `1E-999999` is short as it arrives, and a million characters long when somebody
    writes it without an exponent.
    """
    for name, price in prices.items():
        if price is None:
            continue
        # In this order: NaN cannot be compared,
        # and arithmetic with a huge exponent takes long or overflows.
        if not price.is_finite() or not _is_short(price) or not 0 <= price <= MAX_PRICE:
            raise ValueError(
                f"{name}: a price is finite, not negative, below 10^12, and has at most "
                f"{MAX_DIGITS} digits and an exponent from {MIN_EXPONENT} to {MAX_EXPONENT}"
            )


def check_amounts(**amounts: Decimal) -> None:
    """Raises `ValueError` like `check_prices`, for money: an amount may be negative."""
    check_prices(**{name: amount.copy_abs() for name, amount in amounts.items()})


def _is_short(number: Decimal) -> bool:
    text = str(number)
    if len(text) <= _SHORT_TEXT_LENGTH and "E" not in text:
        return True
    _, digits, exponent = number.as_tuple()
    if not isinstance(exponent, int):  # of NaN and infinity it is a letter
        return False
    return MIN_EXPONENT <= exponent <= MAX_EXPONENT and len(digits) <= MAX_DIGITS


def round_price(price: Decimal) -> Decimal:
    """Returns a broker's number as adapters report it:
    with at most six places, rounded half to even.

    A number that `check_prices` refuses is returned as it is, so that the refusal names it.
    """
    if not price.is_finite() or price.adjusted() >= MAX_EXPONENT:
        return price
    exponent = price.as_tuple().exponent
    if isinstance(exponent, int) and exponent >= -PRICE_PLACES:
        return price
    return price.quantize(_PRICE_STEP)


def plain_number(number: Decimal) -> str:
    """Returns a number as text, without an exponent and without trailing zeros.

    The text of an accepted price has at most `MAX_PRICE_LENGTH` characters. The caller has
    checked the number (`check_prices`): the text of an unchecked one may be of any length.
    """
    if not number:
        return "0"
    text = format(number, "f")
    return text.rstrip("0").rstrip(".") if "." in text else text
