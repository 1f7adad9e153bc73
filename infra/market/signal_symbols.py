"""Translates the symbols that charting programs write into contracts and shares of Taiwan's
exchanges.

TradingView names a symbol by `{{ticker}}`, or with its exchange by `{{exchange}}:{{ticker}}`;
delayed data has `_DL` or `_DLY` behind the exchange
(https://www.tradingview.com/support/solutions/43000531021/). Continuous futures are the product
with `1!` for the front month and `2!` for the one after it; a single contract is the product, the
international letter of its month and the year (`TXFZ2026`). Yahoo's suffixes `.TW` and `.TWO` name
TWSE and TPEx. TAIFEX itself writes the month as A to L and the last digit of the year (`TXFL6`).
"""

import re
from collections.abc import Mapping
from datetime import date, datetime, time, timedelta
from decimal import ROUND_CEILING, ROUND_FLOOR, Decimal

from infra.market.calendar import HOME_ZONE, Calendar, Market, home_broker
from worker_runtime.protocol.errors import UnknownSymbol

_EXCHANGES = frozenset({"TWSE", "TPEX", "TAIFEX"})
_DELAYED = re.compile(r"_DLY?$")
_SUFFIX = re.compile(r"\.TWO?$")
_CONTINUOUS = re.compile(r"([A-Z]{2}[A-Z0-9])([12])!")
_DATED = re.compile(r"([A-Z]{2}[A-Z0-9])([FGHJKMNQUVXZ])(20\d\d)")
_SYMBOL = re.compile(r"[A-Z0-9][A-Z0-9./_-]{0,31}")
_INTERNATIONAL_MONTHS = "FGHJKMNQUVXZ"
_TAIFEX_MONTHS = "ABCDEFGHIJKL"
#: A contract that ends trades until 13:30 on its final settlement day (TAIFEX, trading hours of
#: TX), and not until 13:45.
_LAST_CLOSE = time(13, 30)
_WEDNESDAY = 2


def is_share(symbol: str) -> bool:
    """Return True for shares and funds, whose symbols begin with a digit; futures begin with a
    letter."""
    return symbol[:1].isdigit()


def lane_of(symbol: str) -> str:
    """Return the name of a signal's lane: a share, or the product of a contract.

    A rolling code (`TXFR1`) may stand for any contract of its product.
    """
    return symbol if is_share(symbol) else symbol[:3]


def resolve_symbol(name: str, names: Mapping[str, str], calendar: Calendar, at: datetime) -> str:
    """Return the symbol that a signal's text means at this time.

    `names` are those that operators gave; they may point to any text that is understood without
    them. Raises `UnknownSymbol`.
    """
    text = name.strip().upper()
    text = names.get(text, text).upper()
    exchange, colon, rest = text.rpartition(":")
    if colon:
        exchange = _DELAYED.sub("", exchange)
        text = names.get(rest, rest).upper()
        if exchange not in _EXCHANGES:
            raise UnknownSymbol(
                f"there is no exchange {exchange[:20]}; TWSE, TPEX and TAIFEX are known, and an "
                "operator can give the whole name a meaning (berth symbols set)"
            )
    text = _SUFFIX.sub("", text)
    if (continuous := _CONTINUOUS.fullmatch(text)) is not None:
        return front_contract(continuous[1], calendar, at, months_later=int(continuous[2]) - 1)
    if (dated := _DATED.fullmatch(text)) is not None:
        month = _TAIFEX_MONTHS[_INTERNATIONAL_MONTHS.index(dated[2])]
        return f"{dated[1]}{month}{dated[3][-1]}"
    if _SYMBOL.fullmatch(text) is None:
        raise UnknownSymbol(
            f"{text[:64]!r} is no symbol: send 2330, TWSE:2330, 2330.TW, TXFL6, TXF1! or "
            "TAIFEX:TXF1!, or ask an operator to give it a meaning (berth symbols set)"
        )
    return text


def front_contract(product: str, calendar: Calendar, at: datetime, months_later: int = 0) -> str:
    """Return the contract of the front month at this time, or one that ends later.

    The front month is the one that ends first, until the close of its final settlement day.
    """
    local = at.astimezone(HOME_ZONE)
    year, month = local.year, local.month
    if local >= last_trade(year, month, calendar):
        months_later += 1
    years, index = divmod(month - 1 + months_later, 12)
    return f"{product}{_TAIFEX_MONTHS[index]}{(year + years) % 10}"


def last_trade(year: int, month: int, calendar: Calendar) -> datetime:
    """Return the close of a month's final settlement day: its third Wednesday, or the next trading
    day.

    On a day with other hours, the exchange's close of that day holds if it is earlier.
    """
    first = date(year, month, 1)
    day = first + timedelta(days=(_WEDNESDAY - first.weekday()) % 7 + 14)
    while not calendar.trades_on(day) and (day - first).days < 60:
        day += timedelta(days=1)
    hours = calendar.changed.get(day) or calendar.day_hours(Market.FUTURES)
    return datetime.combine(day, min(hours.closes, _LAST_CLOSE), HOME_ZONE)


def tick_of(symbol: str, price: Decimal) -> Decimal | None:
    """Return the smallest step of a price, as the records of the home markets say; None where they
    do not know it (options, single stock futures)."""
    markets = home_broker().record.markets.values()
    return next(
        (market.tick(symbol, price) for market in markets if market.symbol_rule(symbol)), None
    )


def round_to_tick(symbol: str, price: Decimal, *, buys: bool) -> Decimal:
    """Return a price that the exchange takes and that is no worse for the caller.

    It is lower for a buy and higher for a sale. Without a known tick it has four decimal places.
    """
    tick = tick_of(symbol, price) or Decimal("0.0001")
    steps = (price / tick).to_integral_value(ROUND_FLOOR if buys else ROUND_CEILING)
    rounded = (steps * tick).normalize()
    return rounded if rounded > 0 else tick
