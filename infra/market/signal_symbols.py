"""Translates the symbols that charting programs write into those of an account's broker.

TradingView names a symbol by `{{ticker}}`, or with its exchange by `{{exchange}}:{{ticker}}`;
delayed data has `_DL` or `_DLY` behind the exchange
(https://www.tradingview.com/support/solutions/43000531021/). Continuous futures are the product
with `1!` for the contract that ends first and `2!` for the one after it; a single contract is the
product, the international letter of its month and the year (`TXFZ2026`). Exchanges, endings and the
form of a contract's code come from the broker's record (`charts` and `contracts` of its markets).
"""

import re
from collections.abc import Mapping, Sequence
from contextlib import suppress
from datetime import date, datetime, time, timedelta
from decimal import ROUND_CEILING, ROUND_FLOOR, Decimal
from functools import cache
from typing import NamedTuple

from infra.market.calendar import Calendar, Hours, home_broker, zone_of_market
from worker_runtime.protocol.broker_record import (
    ContractCodes,
    FinalSettlement,
    MarketRule,
    TickStep,
)
from worker_runtime.protocol.contract_codes import read_contract
from worker_runtime.protocol.errors import UnknownSymbol
from worker_runtime.protocol.installed_brokers import installed_brokers
from worker_runtime.protocol.instruments import PriceStep

_DELAYED = re.compile(r"_DLY?$")
_SYMBOL = re.compile(r"[A-Z0-9][A-Z0-9./_-]{0,31}")
_INTERNATIONAL_MONTHS = "FGHJKMNQUVXZ"


class DatedMarket(NamedTuple):
    """A market whose contracts end on known days."""

    rule: MarketRule
    codes: ContractCodes
    settlement: FinalSettlement
    #: Patterns of what charts write: the product with `1!` or `2!`, and with a month and a year.
    continuous: re.Pattern[str]
    dated: re.Pattern[str]


def market_of_symbol(symbol: str, markets: Mapping[str, MarketRule], own: MarketRule) -> MarketRule:
    """Return the market of a symbol: the account's own one, unless the symbol has the form of
    another of the broker's markets only."""
    rules = (own, *markets.values())
    return next((rule for rule in rules if rule.symbol_rule(symbol)), own)


def lane_of(symbol: str) -> str:
    """Return the name of a signal's lane: a share, an option, or the product of a future.

    A rolling code (`TXFR1`) may stand for any future of its product.
    """
    contract = read_contract(symbol)
    return contract.product if contract is not None and contract.is_future else symbol


def resolve_symbol(
    name: str,
    names: Mapping[str, str],
    calendar: Calendar,
    at: datetime,
    markets: Mapping[str, MarketRule] | None = None,
) -> str:
    """Return the symbol that a signal's text means at this time, without a list of contracts.
    Raises `UnknownSymbol`; see `read_symbol`."""
    meant = read_symbol(name, names, markets)
    return meant if isinstance(meant, str) else meant.find_contract(calendar, at, {})


def read_symbol(
    name: str, names: Mapping[str, str], markets: Mapping[str, MarketRule] | None = None
) -> "str | ContinuousFuture":
    """Return the symbol that a signal's text names, or the continuous future.

    `names` are those that operators gave; they may point to any text that is understood without
    them. `markets` are those of the account's broker; None: the home markets. Raises
    `UnknownSymbol`.
    """
    rules = _home_markets() if markets is None else tuple(markets.values())
    text = name.strip().upper()
    text = names.get(text, text).upper()
    exchange, colon, rest = text.rpartition(":")
    if colon:
        exchange = _DELAYED.sub("", exchange)
        text = names.get(rest, rest).upper()
        known = [name for rule in rules for name in rule.charts.exchanges]
        if exchange not in known:
            raise UnknownSymbol(
                f"there is no exchange {exchange[:20]}; known are {', '.join(known) or 'none'}, "
                "and an operator can give the whole name a meaning (berth symbols set)"
            )
    for suffix in (suffix for rule in rules for suffix in rule.charts.suffixes):
        if text.endswith(suffix):
            text = text.removesuffix(suffix)
            break
    for market in _dated_markets(rules):
        if (continuous := market.continuous.fullmatch(text)) is not None:
            return ContinuousFuture(market, continuous[1], int(continuous[2]) - 1)
        if (dated := market.dated.fullmatch(text)) is not None:
            month = _INTERNATIONAL_MONTHS.index(dated[2])
            return _contract(market.codes, dated[1], int(dated[3]), month)
    if _SYMBOL.fullmatch(text) is None:
        examples = [name for rule in rules for name in rule.charts.examples or [rule.check_symbol]]
        shown = ", ".join(filter(None, examples)) or "those of the broker"
        raise UnknownSymbol(
            f"{text[:64]!r} is no symbol: send one such as {shown}, or ask an operator to give it "
            "a meaning (berth symbols set)"
        )
    return text


def require_readable(name: str) -> None:
    """Raises `UnknownSymbol` for a text that no installed broker's signals may have as a symbol."""
    for plugin in installed_brokers().values():
        with suppress(UnknownSymbol):
            read_symbol(name, {}, plugin.record.markets)
            return
    read_symbol(name, {})


class ContinuousFuture(NamedTuple):
    """The contract of a product that ends first, or one that ends later."""

    market: DatedMarket
    product: str
    #: The number of contracts of the product that end before it.
    later: int

    def find_contract(self, calendar: Calendar, at: datetime, listed: Mapping[str, date]) -> str:
        """Return the code of the contract at this time.

        `listed` are the product's contracts with their last days, as the broker lists them; empty:
        there is no list, and the record's rule decides. Raises `UnknownSymbol`.
        """
        market, rule = self.market, self.market.settlement
        is_known = not rule.products or re.fullmatch(rule.products, self.product) is not None
        if not listed and is_known:
            return _front_contract(market, self.product, calendar, at, self.later)
        closes = rule.closes if is_known else market.rule.day.closes
        local = at.astimezone(zone_of_market(market.rule.zone))
        running = [
            code
            for last_day, code in sorted((day, code) for code, day in listed.items())
            if local < _close_of(market, last_day, closes, calendar)
        ]
        if self.later < len(running):
            return running[self.later]
        example = _contract(market.codes, self.product, local.year, local.month - 1)
        reason = "lists no such contract" if listed else "has no list of its contracts here"
        raise UnknownSymbol(
            f"{self.product}{self.later + 1}! is not known: the broker {reason}. Name one, such as "
            f"{example}"
        )


def chart_examples() -> list[str]:
    """Return names that charts use in the home markets, for texts."""
    return [name for rule in _home_markets() for name in rule.charts.examples]


def front_contract(product: str, calendar: Calendar, at: datetime, months_later: int = 0) -> str:
    """Return the contract of the front month at this time, or one that ends later.

    The front month is the one that ends first, until the close of its final settlement day.
    """
    market = next(
        market
        for market in _dated_markets(_home_markets())
        if re.fullmatch(market.codes.product, product)
    )
    return _front_contract(market, product, calendar, at, months_later)


def last_trade(year: int, month: int, calendar: Calendar) -> datetime:
    """Return the close of a month's final settlement day in the first home market with contracts:
    the day that its record names, or the next trading day.

    On a day with other hours, the exchange's close of that day holds if it is earlier.
    """
    return _last_trade(_dated_markets(_home_markets())[0], year, month, calendar)


def _front_contract(
    market: DatedMarket, product: str, calendar: Calendar, at: datetime, months_later: int
) -> str:
    local = at.astimezone(zone_of_market(market.rule.zone))
    year, month = local.year, local.month
    if local >= _last_trade(market, year, month, calendar):
        months_later += 1
    years, index = divmod(month - 1 + months_later, 12)
    return _contract(market.codes, product, year + years, index)


def _contract(codes: ContractCodes, product: str, year: int, month: int) -> str:
    """Returns the code of a contract; `month` counts from 0."""
    return f"{product}{codes.months[month]}{str(year)[-codes.year_digits :]}"


def _last_trade(market: DatedMarket, year: int, month: int, calendar: Calendar) -> datetime:
    first, settlement = date(year, month, 1), market.settlement
    day = first + timedelta(
        days=(settlement.weekday - first.weekday()) % 7 + 7 * (settlement.week - 1)
    )
    return _close_of(market, day, settlement.closes, calendar)


def _close_of(market: DatedMarket, last_day: date, closes: time, calendar: Calendar) -> datetime:
    """Returns when contracts with this last day end: on the next day with trading, if it has
    none, and earlier than `closes` on a day with other hours."""
    day = last_day
    while not calendar.trades_on(day) and (day - last_day).days < 60:
        day += timedelta(days=1)
    usual = market.rule.day
    hours = calendar.changed.get(day) or Hours(usual.opens, usual.closes)
    return datetime.combine(day, min(hours.closes, closes), zone_of_market(market.rule.zone))


def _home_markets() -> tuple[MarketRule, ...]:
    return tuple(home_broker().record.markets.values())


def _dated_markets(rules: Sequence[MarketRule]) -> list[DatedMarket]:
    markets = []
    for rule in rules:
        codes = rule.contracts
        if codes is not None and codes.months and codes.final_settlement is not None:
            continuous, dated = _chart_patterns(codes.product)
            markets.append(DatedMarket(rule, codes, codes.final_settlement, continuous, dated))
    return markets


@cache
def _chart_patterns(product: str) -> tuple[re.Pattern[str], re.Pattern[str]]:
    return (
        re.compile(f"({product})([12])!"),
        re.compile(f"({product})([{_INTERNATIONAL_MONTHS}])(20\\d\\d)"),
    )


def tick_of(symbol: str, price: Decimal) -> Decimal | None:
    """Return the smallest step of a price, as the records of the home markets say; None where they
    do not know it (single-stock futures)."""
    return next(
        (market.tick(symbol, price) for market in _home_markets() if market.symbol_rule(symbol)),
        None,
    )


def round_to_tick(
    symbol: str,
    price: Decimal,
    *,
    buys: bool,
    ticks: Sequence[TickStep | PriceStep] | None = None,
) -> Decimal:
    """Return a price that the exchange takes and that is no worse for the caller.

    It is lower for a buy and higher for a sale. `ticks` are those of the symbol; None: those that
    the home markets have for its form. Without a known tick it has four decimal places.
    """
    if ticks is None:
        tick = tick_of(symbol, price)
    else:
        tick = next((s.tick for s in ticks if s.below is None or price < s.below), None)
    tick = tick or Decimal("0.0001")
    steps = (price / tick).to_integral_value(ROUND_FLOOR if buys else ROUND_CEILING)
    rounded = (steps * tick).normalize()
    return rounded if rounded > 0 else tick
