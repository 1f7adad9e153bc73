"""Pre-trade checks: refuse an order before it is written or queued.

These checks catch mistakes, not attackers. Duplicate detection is exact; under concurrency the daily count
may be off by a few.
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
from infra.market.calendar import Market
from infra.settings import Settings
from worker_runtime.protocol import errors
from worker_runtime.protocol.messages import PriceType, TimeInForce
from worker_runtime.protocol.order_terms import ODD_LOTS, SHARES_PER_LOT, OpenClose, OrderCondition, OrderLot

#: The paper broker, for tests and trials. Its market never closes, and it accepts any symbol.
PAPER = "paper"
#: Seconds to cache an account's limits; a change takes effect after this time.
LIMITS_CACHE_TTL_S = 5.0
#: Accounts whose limits are cached.
MAX_CACHED_ACCOUNTS = 10_000
#: Limits are not cached when fewer orders than this remain today.
UNCACHED_BELOW_ORDERS = 500


class PreTradeChecks:
    """Runs all pre-trade checks; the first one that fails decides."""

    def __init__(self, settings: Settings, database: Database) -> None:
        """Raises `CalendarUnreadable`, `InstrumentsUnreadable`."""
        self._settings = settings
        self._database = database
        self._calendar = calendar.load_calendar(
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
        refuse_mixed_terms(order, futures=usage.broker_type == Market.FUTURES)
        lot = self._check_symbol(order, usage)
        self._check_market_open(order, usage)
        if order.reduce_only:  # limits apply only to orders that can increase a position
            return NO_BOUNDS
        self._check_quantity(order, usage)
        max_price = self._check_notional(order, usage, lot)
        if is_new:
            await self._check_daily_orders(order, usage)
        window, band = usage.limits.duplicate_window_s, usage.limits.price_band
        if band is None and usage.broker != PAPER:
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

    def _check_symbol(self, new: CheckedTerms, usage: AccountUsage) -> Decimal | None:
        lot = self._instruments.lot(new.symbol)
        if lot is None and self._concerns(self._settings.check_symbols, usage):
            raise errors.UnknownSymbol(f"There is no symbol {new.symbol}. Check its code.")
        return lot / SHARES_PER_LOT if lot is not None and new.lot in ODD_LOTS else lot

    def _check_market_open(self, new: CheckedTerms, usage: AccountUsage) -> None:
        if not self._concerns(self._settings.check_market_open, usage):
            return
        market = Market.FUTURES if usage.broker_type == Market.FUTURES else Market.STOCK
        if not self._calendar.is_open(market, datetime.now(UTC), OrderLot(new.lot)):
            kind = "" if new.lot == OrderLot.COMMON else f" with lot {new.lot}"
            raise errors.MarketClosed(
                f"The {market.value} market takes no orders{kind} now. Place the order when it is open."
            )

    def _concerns(self, setting: str, usage: AccountUsage) -> bool:
        return setting == "all" or (setting == "real" and usage.broker != PAPER)

    def _check_quantity(self, new: CheckedTerms, usage: AccountUsage) -> None:
        own = usage.limits.max_quantity
        limit = self._settings.check_max_quantity if own is None else own
        if new.quantity > limit and new.lot not in ODD_LOTS:
            raise errors.QuantityLimit(
                f"Quantity {new.quantity} is above this account's limit of {limit} lots per order. Reduce it,"
                " or ask an operator to raise the limit."
            )

    def _check_notional(
        self, order: CheckedTerms, usage: AccountUsage, lot: Decimal | None
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
                f"{value:f} TWD is above this account's limit of {limit:f} TWD per order. Reduce the"
                " quantity, or ask an operator to raise the limit."
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
                f"{placed} orders are placed today, and this account's limit is {limit}. Ask an"
                " operator to raise the limit."
            )


#: Shares of an odd lot, and lots at the closing price (articles 2 and 4 of the regulations below).
MAX_QUANTITY_BY_LOT = {OrderLot.ODD: 999, OrderLot.INTRADAY_ODD: 999, OrderLot.FIXING: 499}


def _refuse_expired(certificate_expires_at: datetime | None) -> None:
    """Raises `CertificateExpired`: the broker would refuse the order, after the wait for a worker."""
    if certificate_expires_at is not None and certificate_expires_at <= datetime.now(UTC):
        raise errors.CertificateExpired(
            f"The account's certificate expired on {certificate_expires_at:%Y-%m-%d}. Get a new one from "
            "the broker and store it with the credentials."
        )


def refuse_mixed_terms(new: CheckedTerms, *, futures: bool) -> None:
    """Raises `PriceTypeRule` or `OrderTermsRule` for terms that the market does not take together.

    TWSE and TPEx: Regulations Governing Odd-lot Trading (article 3: limit orders of the day), Operating Rules
    for Margin Purchases and Short Sales (article 4: no odd lots), Regulations Governing After-Hours
    Fixed-Price Trading (articles 3 to 5). TAIFEX: market orders (code 9938), and those with protection (MKP),
    are IOC or FOK.
    """
    limit, of_day = new.price_type == PriceType.LIMIT, new.time_in_force == TimeInForce.ROD
    if futures:
        if of_day and not limit:
            raise errors.PriceTypeRule(
                "TAIFEX accepts market orders (MKT, MKP) only as IOC or FOK (its code 9938)."
            )
        if new.lot != OrderLot.COMMON or new.condition != OrderCondition.CASH:
            raise errors.OrderTermsRule("Only stock orders have a lot or a condition. Leave both out.")
        if new.reduce_only and new.open_close in (OpenClose.NEW, OpenClose.DAY_TRADE):
            raise errors.OrderTermsRule(
                f"This order closes a position, but `{new.open_close}` opens one. Use `auto` or `cover`."
            )
        return
    if new.price_type == PriceType.RANGE_MARKET:
        raise errors.PriceTypeRule("Only TAIFEX has range market orders (MKP). Use MKT or LMT.")
    if new.open_close != OpenClose.AUTO:
        raise errors.OrderTermsRule("Only futures orders have an open or close type. Leave it out.")
    if new.lot == OrderLot.COMMON:
        return
    if not (limit and of_day):
        raise errors.PriceTypeRule(f"Orders with lot `{new.lot}` must be LMT and ROD.")
    if new.lot in ODD_LOTS and new.condition != OrderCondition.CASH:
        raise errors.OrderTermsRule(
            "Odd lots cannot be bought on margin or sold short. Use the condition `cash`."
        )
    if new.quantity > (max_quantity := MAX_QUANTITY_BY_LOT[OrderLot(new.lot)]):
        raise errors.OrderTermsRule(
            f"An order with lot `{new.lot}` can have a quantity of at most {max_quantity}."
        )
