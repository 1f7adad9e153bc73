"""Pre-trade checks: refuse an order before it is written or queued.

These checks catch mistakes, not attackers. Duplicate detection is exact; under concurrency the daily count
may be off by a few.
"""

from __future__ import annotations

import time
from datetime import UTC, date, datetime
from decimal import Decimal
from pathlib import Path

from sqlalchemy.ext.asyncio import AsyncSession

from infra.database.engine import Database
from infra.database.orders.acceptance import NewOrder
from infra.database.trading import limits as trading_limits
from infra.database.trading.limits import AccountUsage
from infra.market import calendar, instruments
from infra.market.calendar import Market
from infra.settings import Settings
from worker_runtime.protocol.errors import (
    DailyOrderLimit,
    DuplicateOrder,
    MarketClosed,
    NotionalLimit,
    PriceTypeRule,
    QuantityLimit,
    UnknownSymbol,
)
from worker_runtime.protocol.messages import PriceType, TimeInForce

#: The broker of tests and of trying things out: its market never closes, and it takes any symbol.
PAPER = "paper"
#: Seconds that an account's limits are remembered: a change of them holds for all processes after that.
REMEMBERED = 5.0
#: Accounts remembered.
MAX_REMEMBERED = 10_000
#: With fewer orders left of the day than this, they are counted anew with each order.
RECOUNT_BELOW = 500


class PreTradeChecks:
    """All pre-trade checks; the first that refuses decides."""

    def __init__(self, settings: Settings, database: Database) -> None:
        """Raises `CalendarUnreadable`, `InstrumentsUnreadable`."""
        self._settings = settings
        self._database = database
        self._days = calendar.load_calendar(Path(settings.calendar_file) if settings.calendar_file else None)
        self._symbols = instruments.load_instruments(
            Path(settings.symbols_file) if settings.symbols_file else None
        )
        #: By user, account and trading day; each until an instant on `time.monotonic`.
        self._known: dict[tuple[str, str, date], tuple[float, AccountUsage]] = {}

    async def check(self, new: NewOrder) -> float:
        """Raises the first `CheckFailed`. Returns the seconds within which a second order for the same is a
        mistake, or 0; `refuse_duplicate` looks for one in the transaction that writes the order.

        An account that does not exist passes: writing the order will say so.
        """
        usage = await self._usage_of(new)
        if usage is None:
            return 0.0
        self._price_type(new, usage)
        lot = self._symbol(new, usage)
        self._open(usage)
        if new.reduce_only:  # who wants out is not held back by a limit of what goes in
            return 0.0
        self._quantity(new, usage)
        await self._notional(new, usage, lot)
        await self._day(new, usage)
        window = usage.limits.duplicate_window_s
        return float(self._settings.check_duplicate_window if window is None else window)

    async def refuse_duplicate(self, session: AsyncSession, new: NewOrder, window: float) -> None:
        """Raises `DuplicateOrder`."""
        duplicate = await trading_limits.find_duplicate(
            session,
            user_id=new.user_id,
            client_order_id=new.client_order_id,
            fingerprint=new.fingerprint,
            window=window,
        )
        if duplicate is not None:
            raise DuplicateOrder(f"{duplicate} asked for the same less than {window:g} s ago")

    async def _usage_of(self, new: NewOrder) -> AccountUsage | None:
        name, now = (new.user_id, new.account_id, new.trading_day), time.monotonic()
        until, usage = self._known.get(name, (0.0, None))
        if until > now:
            return usage
        async with self._database.session(autocommit=True) as session:
            found = await trading_limits.account_usage(session, *name)
        if found is None or self._max_orders(found) - found.tags < RECOUNT_BELOW:
            self._known.pop(name, None)
            return found
        if len(self._known) >= MAX_REMEMBERED:
            self._known.clear()
        self._known[name] = (now + REMEMBERED, found)
        return found

    def _price_type(self, new: NewOrder, usage: AccountUsage) -> None:
        futures = usage.broker_type == Market.FUTURES
        if futures and new.price_type == PriceType.MARKET and new.time_in_force == TimeInForce.ROD:
            raise PriceTypeRule("TAIFEX takes a market order as IOC or FOK only (its code 9938)")

    def _symbol(self, new: NewOrder, usage: AccountUsage) -> Decimal | None:
        lot = self._symbols.lot(new.symbol)
        if lot is None and self._concerns(self._settings.check_symbols, usage):
            raise UnknownSymbol(f"there is no symbol {new.symbol}")
        return lot

    def _open(self, usage: AccountUsage) -> None:
        if not self._concerns(self._settings.check_market_open, usage):
            return
        market = Market.FUTURES if usage.broker_type == Market.FUTURES else Market.STOCK
        if not self._days.is_open(market, datetime.now(UTC)):
            raise MarketClosed(f"the {market.value} market takes no orders now")

    def _concerns(self, setting: str, usage: AccountUsage) -> bool:
        return setting == "all" or (setting == "real" and usage.broker != PAPER)

    def _quantity(self, new: NewOrder, usage: AccountUsage) -> None:
        own = usage.limits.max_quantity
        most = self._settings.check_max_quantity if own is None else own
        if new.quantity > most:
            raise QuantityLimit(f"{new.quantity} lots; one order of this account may have {most}")

    async def _notional(self, new: NewOrder, usage: AccountUsage, lot: Decimal | None) -> None:
        own = usage.limits.max_notional
        most = self._settings.check_max_notional or None if own is None else own
        if most is None:
            return
        price = new.price
        if not price:
            async with self._database.session(autocommit=True) as session:
                price = await trading_limits.last_price(session, new.user_id, new.symbol)
        if price is None or lot is None:
            if self._settings.check_unpriced == "allow":
                return
            what = "no price" if price is None else "no lot"
            raise NotionalLimit(
                f"{what} of {new.symbol} is known, so its value cannot be held against {most}"
            )
        value = price * new.quantity * lot
        if value > most:
            raise NotionalLimit(f"{value:f} TWD; one order of this account may have {most:f}")

    def _max_orders(self, usage: AccountUsage) -> int:
        own = usage.limits.max_daily_orders
        return self._settings.check_daily_orders if own is None else own

    async def _day(self, new: NewOrder, usage: AccountUsage) -> None:
        most = self._max_orders(usage)
        if usage.tags < most:
            return
        # Repeats of a client order id use tags, too: only orders count.
        async with self._database.session(autocommit=True) as session:
            placed = await trading_limits.count_orders_of_day(
                session, new.user_id, new.account_id, new.trading_day
            )
        if placed >= most:
            raise DailyOrderLimit(f"{placed} orders today; this account may place {most}")
