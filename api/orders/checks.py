"""Pre-trade checks: refuse an order before it is written or queued.

These checks catch mistakes, not attackers. Duplicate detection is exact; under concurrency the
daily count may be off by a few.
"""

import time
from collections.abc import Collection, Mapping
from dataclasses import replace
from datetime import UTC, date, datetime
from decimal import Decimal
from pathlib import Path

from api.orders.instrument_cache import InstrumentCache, LoadedInstrument
from infra.database.engine import Database
from infra.database.orders.acceptance import NO_BOUNDS, NewOrder, OrderBounds
from infra.database.orders.checks import CheckedTerms
from infra.database.trading import limits as trading_limits
from infra.database.trading.instruments import find_futures
from infra.database.trading.limits import AccountUsage
from infra.market import calendar, instruments
from infra.market.instruments import SymbolTerms
from infra.settings import Settings
from worker_runtime.protocol import errors
from worker_runtime.protocol.broker_record import MarketRule, Plugin, terms_of
from worker_runtime.protocol.contract_codes import is_rolling, is_single_future
from worker_runtime.protocol.installed_brokers import market_of
from worker_runtime.protocol.order_terms import ODD_LOTS, OpenClose, OrderLot, Side

#: Seconds to cache an account's limits; a change takes effect after this time.
LIMITS_CACHE_TTL_S = 5.0
#: Accounts whose limits are cached.
MAX_CACHED_ACCOUNTS = 10_000
#: An older list of a broker's instruments does not decide which codes exist, and raises an alert.
MAX_LIST_AGE_TRADING_DAYS = 2
#: Limits are not cached when fewer orders than this remain today.
UNCACHED_BELOW_ORDERS = 500


class PreTradeChecks:
    """Runs all pre-trade checks; the first one that fails decides."""

    def __init__(self, settings: Settings, database: Database) -> None:
        """Raises `CalendarUnreadable`, `InstrumentsUnreadable`, `BrokerRecordRefused`."""
        self._settings = settings
        self._database = database
        self._calendars = calendar.MarketCalendars(
            Path(settings.calendar_file) if settings.calendar_file else None
        )
        self._instruments = instruments.load_instruments(
            Path(settings.symbols_file) if settings.symbols_file else None
        )
        self._loaded = InstrumentCache(database)
        #: By user, account and trading day: when it expires (`time.monotonic`), and the usage.
        self._usage_cache: dict[tuple[str, str, date], tuple[float, AccountUsage]] = {}

    async def check(self, order: CheckedTerms, *, is_new: bool = True) -> OrderBounds:
        """Checks an order, new or at another price. Raises the first `CheckFailed`.

        An account that does not exist passes: writing the order will say so.
        """
        usage = await self._load_usage(order)
        if usage is None:
            return NO_BOUNDS
        _refuse_expired(usage.certificate_expires_at)
        plugin, market = market_of(usage.broker, usage.broker_type)
        refuse_mixed_terms(order, market)
        lot_value = await self._check_symbol(order, plugin, market)
        self._check_market_open(order, usage, plugin, market)
        if not order.reduce_only:  # a user's limits are for orders that can increase a position
            self._check_quantity(order, usage)
        # Decides for common lots only: `refuse_mixed_terms` has checked all other lots.
        refuse_quantity(order, market)
        if order.reduce_only:
            return NO_BOUNDS
        max_price = self._check_notional(order, usage, lot_value, market.currency)
        if is_new:
            await self._check_daily_orders(order, usage)
        window, band = usage.limits.duplicate_window_s, usage.limits.price_band
        if band is None and plugin.record.trades_live:
            band = self._settings.price_band(market.daily_limit)
        return OrderBounds(
            self._settings.check_duplicate_window if window is None else window, band, max_price
        )

    async def _load_usage(self, new: CheckedTerms) -> AccountUsage | None:
        name, now = (new.user_id, new.account_id, new.trading_day), time.monotonic()
        until, usage = self._usage_cache.get(name, (0.0, None))
        if until > now:
            return usage
        usage = await self._database.read(trading_limits.account_usage, *name)
        if usage is None or self._max_orders(usage) - usage.tags < UNCACHED_BELOW_ORDERS:
            self._usage_cache.pop(name, None)
            return usage
        if len(self._usage_cache) >= MAX_CACHED_ACCOUNTS:
            self._usage_cache.clear()
        self._usage_cache[name] = (now + LIMITS_CACHE_TTL_S, usage)
        return usage

    async def round_price(self, order: NewOrder) -> NewOrder:
        """Returns the order at the next price that is no worse for the caller: lower for a buy,
        higher for a sale.

        The price stays where the steps are not known, and for a buy below the lowest price, which
        the checks refuse. Raises `DatabaseUnavailable`.
        """
        usage = await self._load_usage(order) if order.price is not None else None
        if usage is None or order.price is None:
            return order
        plugin, _ = market_of(usage.broker, usage.broker_type)
        terms, _ = await self._find_terms(order.symbol, plugin)
        around = terms.prices_around(order.price) if terms is not None else None
        if around is None:
            return order
        down, up = around
        price = down if order.side == Side.BUY else up
        return replace(order, price=price) if price > 0 else order

    async def find_symbol(self, symbol: str, plugin: Plugin) -> SymbolTerms | None:
        """Returns what is known of a broker's symbol; None: there is no such symbol. Raises
        `DatabaseUnavailable`."""
        terms, _ = await self._find_terms(symbol, plugin)
        return terms

    async def find_futures(self, product: str, plugin: Plugin) -> Mapping[str, date]:
        """Returns the futures of a product that the broker lists, with their last days; none
        without a recent list. Raises `DatabaseUnavailable`."""
        loaded = await self._loaded.find(plugin.record.name, product)
        markets = self._listed_markets(loaded, plugin)
        if not markets:
            return {}
        listed = await self._database.read(find_futures, plugin.record.name, markets, product)
        return {code: day for code, day in listed.items() if is_single_future(code, product)}

    async def _find_terms(
        self, symbol: str, plugin: Plugin
    ) -> tuple[SymbolTerms | None, LoadedInstrument]:
        """Returns what is known of a symbol (None: there is no such symbol), and what the
        broker's list says of it."""
        loaded = await self._loaded.find(plugin.record.name, symbol)
        # The operator's symbols file covers only the home markets.
        symbols = instruments.Instruments() if plugin.distribution else self._instruments
        terms = symbols.find(
            symbol,
            plugin.record.markets,
            loaded.instrument,
            listed_markets=() if loaded.instrument else self._listed_markets(loaded, plugin),
        )
        return terms, loaded

    def _listed_markets(self, loaded: LoadedInstrument, plugin: Plugin) -> Collection[str]:
        """Returns the markets whose list decides which codes exist."""
        return {
            market
            for market, list_day in loaded.list_days.items()
            if self._is_recent(market, list_day, plugin)
        }

    def _is_recent(self, market: str, list_day: date, plugin: Plugin) -> bool:
        """Returns True if the market's list is at most `MAX_LIST_AGE_TRADING_DAYS` old."""
        rule = plugin.record.markets.get(market)
        if rule is None:
            return False
        days = self._calendars.find(plugin.record.name, market)
        oldest = datetime.now(calendar.zone_of_market(rule.zone)).date()
        for _ in range(MAX_LIST_AGE_TRADING_DAYS):
            oldest = days.trading_day_before(oldest) if days is not None else oldest
        return list_day >= oldest

    async def _check_symbol(
        self, new: CheckedTerms, plugin: Plugin, market: MarketRule
    ) -> Decimal | None:
        """Checks the order's symbol and price. Returns the value of a quantity of 1 at a price of
        1; None if it is not known."""
        terms, loaded = await self._find_terms(new.symbol, plugin)
        if terms is None:
            # What is held may be closed, though the list lacks it: the broker decides.
            if self._applies_to(self._settings.check_symbols, plugin) and not new.reduce_only:
                raise errors.UnknownSymbol(f"There is no symbol {new.symbol}. Check its code.")
            return None
        if loaded.instrument is not None:
            market = plugin.record.markets.get(loaded.instrument.market, market)
        local = datetime.now(calendar.zone_of_market(market.zone))
        if self._applies_to(self._settings.check_symbols, plugin):
            _refuse_ended(new.symbol, terms, market, local)
        if new.price is not None and self._applies_to(self._settings.check_prices, plugin):
            _refuse_between_steps(new.symbol, new.price, terms)
            if _has_limits_of_now(loaded, market, local):
                _refuse_beyond_limits(new.symbol, new.price, terms, market.currency)
        ordered = market.lots.get(OrderLot(new.lot))
        if ordered is None or new.lot == OrderLot.COMMON:
            return terms.lot_value
        return terms.value_of(ordered.units)

    def _check_market_open(
        self, new: CheckedTerms, usage: AccountUsage, plugin: Plugin, market: MarketRule
    ) -> None:
        if not self._applies_to(self._settings.check_market_open, plugin):
            return
        days = self._calendars.find(usage.broker, usage.broker_type)
        lot = OrderLot(new.lot)
        if days is not None and not days.is_open(usage.broker_type, datetime.now(UTC), lot):
            kind = "" if lot is OrderLot.COMMON else f" with lot {new.lot}"
            raise errors.MarketClosed(
                f"{market.title} takes no orders{kind} now. Place the order when it is open."
            )

    def _applies_to(self, setting: str, plugin: Plugin) -> bool:
        return setting == "all" or (setting == "real" and plugin.record.trades_live)

    def _check_quantity(self, new: CheckedTerms, usage: AccountUsage) -> None:
        own = usage.limits.max_quantity
        limit = self._settings.check_max_quantity if own is None else own
        if new.quantity > limit and new.lot not in ODD_LOTS:
            raise errors.QuantityLimit(
                f"Quantity {new.quantity} is above this account's limit of {limit} lots per order. "
                "Reduce it, or ask an operator to raise the limit."
            )

    def _check_notional(
        self, order: CheckedTerms, usage: AccountUsage, lot_value: Decimal | None, currency: str
    ) -> Decimal | None:
        """Checks the order's value; `lot_value`: as `_check_symbol` returns it. Returns the highest
        price at which a market order is within the limit; None for other orders, and if limit or
        value is not known."""
        own = usage.limits.max_notional
        # None: no limit (also a setting of 0). 0, which only an account can have: no order passes.
        limit = self._settings.check_max_notional or None if own is None else own
        if limit is None or (lot_value is None and limit):
            return None
        if order.price is None and limit and lot_value is not None:
            return min(round(limit / (order.quantity * lot_value), 6), limit)
        value = (order.price or Decimal(0)) * order.quantity * (lot_value or Decimal(0))
        if value > limit or not limit:
            raise errors.NotionalLimit(
                f"{value.normalize():f} {currency} is above this account's limit of"
                f" {limit.normalize():f} {currency} per order. Reduce the quantity, or"
                " ask an operator to raise the limit."
            )
        return None

    def _max_orders(self, usage: AccountUsage) -> int:
        own = usage.limits.max_daily_orders
        return self._settings.check_daily_orders if own is None else own

    async def _check_daily_orders(self, new: CheckedTerms, usage: AccountUsage) -> None:
        limit = self._max_orders(usage)
        if usage.tags < limit:
            return
        # Repeats of a client order id use tags, too: only orders count.
        async with self._database.session(autocommit=True) as session:
            placed = await trading_limits.count_orders_of_day(
                session, new.user_id, new.account_id, new.trading_day
            )
        if placed >= limit:
            raise errors.DailyOrderLimit(
                f"{placed} orders are placed today, and this account's limit is {limit}. Ask an "
                "operator to raise the limit."
            )


def _refuse_expired(certificate_expires_at: datetime | None) -> None:
    """Raises `CertificateExpired`: the broker would refuse the order, after the wait for a
    worker."""
    if certificate_expires_at is not None and certificate_expires_at <= datetime.now(UTC):
        raise errors.CertificateExpired(
            f"The account's certificate expired on {certificate_expires_at:%Y-%m-%d}. Get a new "
            "one from the broker and store it with the credentials."
        )


def _refuse_ended(symbol: str, terms: SymbolTerms, market: MarketRule, local: datetime) -> None:
    """Raises `InstrumentExpired` after the close of the last trading day. `local`: the market's
    time."""
    last = terms.expires_on
    if last is None or local < datetime.combine(last, market.day.closes, local.tzinfo):
        return
    if not is_rolling(symbol):  # which continues with the next contract
        raise errors.InstrumentExpired(
            f"{symbol} traded until {last:%Y-%m-%d}. Order a contract that trades."
        )


def _refuse_between_steps(symbol: str, price: Decimal, terms: SymbolTerms) -> None:
    """Raises `PriceOffTick`, with the next prices down and up."""
    around = terms.prices_around(price)
    if around is None or price in around:
        return
    down, up = around
    if not down:
        raise errors.PriceOffTick(
            f"The lowest price is {up:f} for {symbol}. Send this price or a higher one."
        )
    raise errors.PriceOffTick(
        f"{price:f} is between two steps of the prices of {symbol}. The next prices are {down:f}"
        f" and {up:f}. Send one of these, or set `price_rounding` to `passive` (of a webhook:"
        " `safe`)."
    )


def _has_limits_of_now(loaded: LoadedInstrument, market: MarketRule, local: datetime) -> bool:
    """Returns True if the list's highest and lowest price apply now.

    A list has those of its trading day; an evening session has others.
    """
    if loaded.list_day != local.date():
        return False
    return market.evening is None or local.time() < market.evening.opens


def _refuse_beyond_limits(symbol: str, price: Decimal, terms: SymbolTerms, currency: str) -> None:
    """Raises `PriceLimit`."""
    if terms.limit_up is not None and price > terms.limit_up:
        raise errors.PriceLimit(
            f"{price:f} {currency} is above today's highest price of {symbol}, which is"
            f" {terms.limit_up:f}. Send a price up to that one."
        )
    if terms.limit_down is not None and price < terms.limit_down:
        raise errors.PriceLimit(
            f"{price:f} {currency} is below today's lowest price of {symbol}, which is"
            f" {terms.limit_down:f}. Send a price from that one on."
        )


def refuse_mixed_terms(new: CheckedTerms, market: MarketRule) -> None:
    """Raises `PriceTypeRule` or `OrderTermsRule` for terms that the market does not take together,
    as its record says."""
    refusal = market.refusal(*terms_of(new))
    if refusal is not None:
        raise refusal
    if new.reduce_only and new.open_close in (OpenClose.NEW, OpenClose.DAY_TRADE):
        raise errors.OrderTermsRule(
            f"This order closes a position, but `{new.open_close}` opens one. Use `auto` or "
            "`cover`."
        )
    # The market's quantities belong to the rules of the other lots (an odd lot: 1 to 999 shares).
    # They are reported before a fault of the symbol and the account's own limit. For common lots
    # the account's limit is reported first, so `PreTradeChecks.check` checks the market's after it.
    if new.lot != OrderLot.COMMON:
        refuse_quantity(new, market)


def refuse_quantity(new: CheckedTerms, market: MarketRule) -> None:
    """Raises `OrderTermsRule` for more than the market takes in one order of this lot, or less."""
    rule = market.lots[OrderLot(new.lot)]
    if not rule.min_quantity <= new.quantity <= rule.max_quantity:
        raise errors.OrderTermsRule(
            f"{market.title} takes {rule.min_quantity} to {rule.max_quantity} in an order with lot "
            f"`{new.lot}`."
        )
