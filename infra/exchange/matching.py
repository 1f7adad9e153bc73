"""Matching: when and at which price an order is filled, as pure functions, and the resting orders.

The market has one price per symbol. An order that crosses it trades at the market's price, as in
continuous trading, where the resting side sets the price.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable
from decimal import Decimal
from zlib import crc32

import msgspec

from infra.exchange.behaviour import Behaviour
from infra.exchange.records import LedgerOrder, net_positions
from infra.market.calendar import Market
from worker_runtime.protocol.instruments import Instrument, PriceStep
from worker_runtime.protocol.messages import OrderState, PriceType, Side, TimeInForce
from worker_runtime.protocol.order_terms import (
    ODD_LOTS,
    SHARES_PER_LOT,
    OpenClose,
    OrderCondition,
    OrderLot,
)

#: Lots; a larger order is refused as a typing error.
MAX_QUANTITY = 1_000_000
#: Characters: all that Shioaji's `custom_field` holds.
MAX_TAG_LENGTH = 6
MAX_SYMBOL_LENGTH = 16
#: TAIFEX: a product of three characters and the month (TXFA6,
#: MXFR1), or strike and month (TXO18000L4).
_TAIFEX = re.compile(r"[A-Z]{2}[A-Z0-9]([A-L]\d|R[12]|\d{4,5}[A-X]\d)")
_MAX_PRICE = Decimal(10_000_000)
#: Shares of an odd lot (TWSE Regulations Governing Odd-lot Trading, article 2), and lots at the
#: closing price (Regulations Governing After-Hours Fixed-Price Trading, article 4).
_MAX_QUANTITY_BY_LOT = {OrderLot.ODD: 999, OrderLot.INTRADAY_ODD: 999, OrderLot.FIXING: 499}


class OrderTerms(msgspec.Struct, frozen=True, kw_only=True):
    """The part of an order that decides its match."""

    symbol: str
    side: Side
    quantity: int
    price_type: PriceType
    price: Decimal | None
    time_in_force: TimeInForce
    lot: OrderLot = OrderLot.COMMON
    condition: OrderCondition = OrderCondition.CASH
    open_close: OpenClose = OpenClose.AUTO
    tag: str = ""

    @property
    def market(self) -> Market:
        return Market.FUTURES if _TAIFEX.fullmatch(self.symbol) else Market.STOCK


class MatchResult(msgspec.Struct, frozen=True, kw_only=True):
    """Says what happens to the open rest of an order now. `quantity` is the filled lots."""

    state: OrderState
    quantity: int = 0
    reason: str | None = None


def first_price(symbol: str, seed: int) -> Decimal:
    """Returns a symbol's first price:
    between 10.00 and 999.99, always the same for the same seed."""
    return Decimal(1000 + crc32(f"{seed}:{symbol}".encode()) % 99_000) / 100


def refusal(terms: OrderTerms) -> str | None:
    """Returns why the terms are invalid, or None.

    TAIFEX takes market orders (its code 9938) and those with protection (its notice of 2014 on
    them) as IOC or FOK. For odd lots and the closing price see `_refusal_apart`.
    """
    if not 1 <= len(terms.symbol) <= MAX_SYMBOL_LENGTH or not terms.symbol.isascii():
        return "unknown symbol"
    if not 1 <= terms.quantity <= MAX_QUANTITY:
        return f"quantity must be 1 to {MAX_QUANTITY} lots"
    if len(terms.tag) > MAX_TAG_LENGTH:
        return f"the tag has more than {MAX_TAG_LENGTH} characters"
    if terms.market is Market.FUTURES:
        if terms.price_type is not PriceType.LIMIT and terms.time_in_force is TimeInForce.ROD:
            return "9938: TAIFEX takes no market order that is good for the day"
        if (terms.lot, terms.condition) != (OrderLot.COMMON, OrderCondition.CASH):
            return "a contract has no lot and no condition"
    elif terms.price_type is PriceType.RANGE_MARKET:
        return "only TAIFEX has range market orders"
    elif terms.open_close is not OpenClose.AUTO:
        return "only a contract is opened and closed"
    elif terms.lot is not OrderLot.COMMON and (refused := _refusal_apart(terms)):
        return refused
    if terms.price_type is PriceType.LIMIT and not is_price(terms.price):
        return "a limit order needs a price above zero"
    return None


def refusal_of_price(terms: OrderTerms, instrument: Instrument | None) -> str | None:
    """Returns why TWSE or TAIFEX refuse the symbol or the price of an order on this day, or None.
    Orders at the closing price have no price of their own."""
    if instrument is None:
        return f"unknown symbol: {terms.symbol} is not listed today"
    price = terms.price
    if terms.price_type is not PriceType.LIMIT or price is None or terms.lot is OrderLot.FIXING:
        return None
    tick = tick_at(instrument.ticks, price)
    if tick is not None and price % tick:
        return f"the price {price} is no multiple of the tick {tick}"
    if instrument.limit_up is not None and price > instrument.limit_up:
        return f"the price {price} is above limit-up, {instrument.limit_up}"
    if instrument.limit_down is not None and price < instrument.limit_down:
        return f"the price {price} is below limit-down, {instrument.limit_down}"
    return None


def tick_at(ticks: Iterable[PriceStep], price: Decimal) -> Decimal | None:
    """Returns the step of prices at a price; None without a table."""
    return next((step.tick for step in ticks if step.below is None or price < step.below), None)


def _refusal_apart(terms: OrderTerms) -> str | None:
    """Returns why an order of odd lots is refused. TWSE and TPEx: odd lots are limit orders of the
    day (Regulations Governing Odd-lot Trading, article 3) and are neither bought on margin nor sold
    short (Operating Rules for Securities Firms Handling Margin Purchases and Short Sales of
    Securities, article 4)."""
    if terms.price_type is not PriceType.LIMIT or terms.time_in_force is not TimeInForce.ROD:
        return f"{terms.lot.value} takes limit orders of the day"
    if terms.lot in ODD_LOTS and terms.condition is not OrderCondition.CASH:
        return "odd lots are neither bought on margin nor sold short"
    max_quantity = _MAX_QUANTITY_BY_LOT[terms.lot]
    return (
        f"{terms.lot.value} takes at most {max_quantity}" if terms.quantity > max_quantity else None
    )


def refusal_of_holdings(
    terms: OrderTerms, orders: Callable[[], Iterable[LedgerOrder]], behaviour: Behaviour
) -> str | None:
    """Returns why an account with these orders (asked for only when they matter) may not place one
    with these terms, or None.

    What was bought on margin is sold on margin, and what was sold short is bought back so; new ones
    take of the quota that the broker has been allotted (Operation Directions for the Allocation of
    Limits for Margin Purchases and Short Sales, point 3). A contract is covered as far as it is
    held. Resting orders count as filled. Not kept, since no public text fixes them for one broker:
    prices of short sales below the last close, margin ratios, and that positions of day trading
    orders are closed before the day ends.
    """
    condition, sells = terms.condition, terms.side is Side.SELL
    covers = terms.open_close is OpenClose.COVER
    cash_sale = behaviour.sells_held_only and sells and terms.market is Market.STOCK
    if condition is OrderCondition.CASH and not covers and not cash_sale:
        return None
    counted = [
        order for order in orders() if (order.symbol, order.condition) == (terms.symbol, condition)
    ]
    held = sum(order.shares for order in net_positions(counted))
    unit = 1 if terms.lot in ODD_LOTS else SHARES_PER_LOT
    shares = terms.quantity * unit
    resting = sum(
        order.remaining * order.unit
        for order in counted
        if not order.final and order.side is terms.side
    )
    opens_with = Side.SELL if condition is OrderCondition.SHORT_SELLING else Side.BUY
    if covers or terms.side is not opens_with:
        available = (held if sells else -held) - resting
        return f"{max(0, available) // unit} are held to be closed" if shares > available else None
    quota = behaviour.short_quota if sells else behaviour.margin_quota
    available = (quota or 0) * SHARES_PER_LOT - abs(held) - resting
    return (
        None
        if quota is None or shares <= available
        else f"{max(0, available) // unit} lots are left of the quota"
    )


def book_of(symbol: str, lot: OrderLot) -> str:
    """Returns the book in which an order trades: odd lots have their own, by day and after the
    close."""
    return f"{symbol}.{lot.value}" if lot in ODD_LOTS else symbol


def symbol_of(book: str) -> str:
    """Returns the symbol of a book."""
    symbol, _, lot = book.rpartition(".")
    return symbol if lot in ODD_LOTS else book


def is_price(price: Decimal | None) -> bool:
    """Returns True if an order may have this price."""
    # NaN cannot be compared, so finiteness comes first.
    return price is not None and price.is_finite() and 0 < price <= _MAX_PRICE


def crosses(terms: OrderTerms, market: Decimal) -> bool:
    """Returns True if the order can trade at the market's price."""
    if (
        terms.price_type is not PriceType.LIMIT
        or terms.price is None
        or terms.lot is OrderLot.FIXING
    ):
        return True
    return terms.price >= market if terms.side is Side.BUY else terms.price <= market


def match_order(
    terms: OrderTerms, filled: int, market: Decimal | None, liquidity: int | None
) -> MatchResult:
    """Matches an order of which `filled` lots are filled,
    with at most `liquidity` lots (None: any).

    With `market` None nothing can be filled. Market orders never rest: the unfilled part is
    cancelled, as at real exchanges.
    """
    rest = terms.quantity - filled
    available = rest if liquidity is None else min(rest, liquidity)
    if market is None or not crosses(terms, market):
        available = 0
    if terms.time_in_force is TimeInForce.FOK and available < rest:
        return MatchResult(
            state=OrderState.CANCELLED, reason="fill or kill: not all could be filled at once"
        )
    if available == rest:
        return MatchResult(state=OrderState.FILLED, quantity=rest)
    if terms.time_in_force is TimeInForce.IOC or terms.price_type is not PriceType.LIMIT:
        return MatchResult(
            state=OrderState.CANCELLED, quantity=available, reason="the rest found no other side"
        )
    state = OrderState.PART_FILLED if filled + available else OrderState.SUBMITTED
    return MatchResult(state=state, quantity=available)


class RestingOrders:
    """The orders that are not final, by id, account and symbol.
    `put` replaces an order in its old place."""

    def __init__(self, orders: Iterable[LedgerOrder]) -> None:
        self._orders: dict[str, LedgerOrder] = {}
        self._by_account: dict[str, dict[str, None]] = {}
        self._by_symbol: dict[str, dict[str, None]] = {}
        for order in orders:
            self.put(order)

    def put(self, order: LedgerOrder) -> None:
        self._orders[order.broker_order_id] = order
        self._by_account.setdefault(order.account, {})[order.broker_order_id] = None
        self._by_symbol.setdefault(order.symbol, {})[order.broker_order_id] = None

    def remove(self, order: LedgerOrder) -> None:
        if self._orders.pop(order.broker_order_id, None) is None:
            return
        for index, key in ((self._by_account, order.account), (self._by_symbol, order.symbol)):
            del index[key][order.broker_order_id]
            if not index[key]:
                del index[key]

    def get(self, broker_order_id: str) -> LedgerOrder | None:
        return self._orders.get(broker_order_id)

    def all(self) -> list[LedgerOrder]:
        """Returns all orders, oldest first, like `of_account` and `of_symbol`."""
        return list(self._orders.values())

    def of_account(self, account: str) -> list[LedgerOrder]:
        return [self._orders[order_id] for order_id in self._by_account.get(account, ())]

    def of_symbol(self, symbol: str) -> list[LedgerOrder]:
        return [self._orders[order_id] for order_id in self._by_symbol.get(symbol, ())]
