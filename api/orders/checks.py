"""Pre-trade checks: refuse an order before it is written or queued.

These checks catch mistakes, not attackers. Duplicate detection is exact; under concurrency the
daily count may be off by a few.
"""

import time
from datetime import UTC, date, datetime
from decimal import Decimal
from pathlib import Path

from infra.database.engine import Database
from infra.database.orders.acceptance import NO_BOUNDS, OrderBounds
from infra.database.orders.checks import CheckedTerms
from infra.database.trading import limits as trading_limits
from infra.database.trading.limits import AccountUsage
from infra.market import calendar, instruments
from infra.settings import Settings
from worker_runtime.protocol import errors
from worker_runtime.protocol.broker_record import MarketRule, Plugin, terms_of
from worker_runtime.protocol.installed_brokers import market_of
from worker_runtime.protocol.order_terms import ODD_LOTS, OpenClose, OrderLot

#: Seconds to cache an account's limits; a change takes effect after this time.
LIMITS_CACHE_TTL_S = 5.0
#: Accounts whose limits are cached.
MAX_CACHED_ACCOUNTS = 10_000
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
        lot = self._check_symbol(order, plugin, market)
        self._check_market_open(order, usage, plugin, market)
        if order.reduce_only:  # limits apply only to orders that can increase a position
            return NO_BOUNDS
        self._check_quantity(order, usage)
        refuse_quantity(order, market)
        max_price = self._check_notional(order, usage, lot, market.currency)
        if is_new:
            await self._check_daily_orders(order, usage)
        window, band = usage.limits.duplicate_window_s, usage.limits.price_band
        if band is None and plugin.record.trades_live:
            band = self._settings.check_price_band or None
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

    def _check_symbol(
        self, new: CheckedTerms, plugin: Plugin, market: MarketRule
    ) -> Decimal | None:
        """Returns the value of one of the order's quantity at a price of 1."""
        # The operator's list is of the home markets.
        symbols = instruments.Instruments() if plugin.distribution else self._instruments
        value = symbols.lot(new.symbol, plugin.record.markets)
        if value is None:
            if self._concerns(self._settings.check_symbols, plugin):
                raise errors.UnknownSymbol(f"There is no symbol {new.symbol}. Check its code.")
            return None
        ordered, common = market.lots[OrderLot(new.lot)], market.lots.get(OrderLot.COMMON)
        if common is None or ordered.units == common.units:
            return value
        return value * ordered.units / common.units

    def _check_market_open(
        self, new: CheckedTerms, usage: AccountUsage, plugin: Plugin, market: MarketRule
    ) -> None:
        if not self._concerns(self._settings.check_market_open, plugin):
            return
        days = self._calendars.find(usage.broker, usage.broker_type)
        lot = OrderLot(new.lot)
        if days is not None and not days.is_open(usage.broker_type, datetime.now(UTC), lot):
            kind = "" if lot is OrderLot.COMMON else f" with lot {new.lot}"
            raise errors.MarketClosed(
                f"{market.title} takes no orders{kind} now. Place the order when it is open."
            )

    def _concerns(self, setting: str, plugin: Plugin) -> bool:
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
        self, order: CheckedTerms, usage: AccountUsage, lot: Decimal | None, currency: str
    ) -> Decimal | None:
        """Returns the price up to which a market order is within the limit."""
        own = usage.limits.max_notional
        limit = self._settings.check_max_notional or None if own is None else own
        if limit is None or lot is None:
            return None
        if order.price is None and limit:
            return min(round(limit / (order.quantity * lot), 6), limit)
        value = (order.price or 0) * order.quantity * lot
        if value > limit or not limit:
            raise errors.NotionalLimit(
                f"{value:f} {currency} is above this account's limit of {limit:f} {currency} per "
                "order. Reduce the quantity, or ask an operator to raise the limit."
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
    if new.lot != OrderLot.COMMON:  # for common lots the account's own limit comes first
        refuse_quantity(new, market)


def refuse_quantity(new: CheckedTerms, market: MarketRule) -> None:
    """Raises `OrderTermsRule` for more than the market takes in one order of this lot, or less."""
    rule = market.lots[OrderLot(new.lot)]
    if not rule.min_quantity <= new.quantity <= rule.max_quantity:
        raise errors.OrderTermsRule(
            f"{market.title} takes {rule.min_quantity} to {rule.max_quantity} in an order with lot "
            f"`{new.lot}`."
        )
