"""Matching: when and at which price an order is filled, as pure functions, and the resting orders.

The market has one price per symbol. An order that crosses it trades at the market's price, as in continuous
trading, where the resting side sets the price.
"""

from __future__ import annotations

import re
from collections.abc import Iterable
from decimal import Decimal
from zlib import crc32

import msgspec

from infra.exchange.records import LedgerOrder
from worker_runtime.protocol.messages import OrderState, PriceType, Side, TimeInForce

#: Lots; a larger order is refused as a typing error.
MAX_QUANTITY = 1_000_000
#: Characters: all that Shioaji's `custom_field` holds.
MAX_TAG = 6
MAX_SYMBOL = 16
#: TAIFEX: a product of three characters and the month (TXFA6, MXFR1), or strike and month (TXO18000L4).
_TAIFEX = re.compile(r"[A-Z]{2}[A-Z0-9]([A-L]\d|R[12]|\d{4,5}[A-X]\d)")
_MAX_PRICE = Decimal(10_000_000)


class OrderTerms(msgspec.Struct, frozen=True, kw_only=True):
    """The part of an order that decides its match."""

    symbol: str
    side: Side
    quantity: int
    price_type: PriceType
    price: Decimal | None
    time_in_force: TimeInForce
    tag: str = ""


class MatchResult(msgspec.Struct, frozen=True, kw_only=True):
    """What happens to the open rest of an order now. `quantity` is the filled lots."""

    state: OrderState
    quantity: int = 0
    reason: str | None = None


def first_price(symbol: str, seed: int) -> Decimal:
    """Returns a symbol's first price: between 10.00 and 999.99, always the same for the same seed."""
    return Decimal(1000 + crc32(f"{seed}:{symbol}".encode()) % 99_000) / 100


def refusal(terms: OrderTerms) -> str | None:
    """Returns why the terms are invalid, or None."""
    if not 1 <= len(terms.symbol) <= MAX_SYMBOL or not terms.symbol.isascii():
        return "unknown symbol"
    if not 1 <= terms.quantity <= MAX_QUANTITY:
        return f"quantity must be 1 to {MAX_QUANTITY} lots"
    if len(terms.tag) > MAX_TAG:
        return f"the tag has more than {MAX_TAG} characters"
    if (
        terms.price_type is PriceType.MARKET
        and terms.time_in_force is TimeInForce.ROD
        and _TAIFEX.fullmatch(terms.symbol)
    ):
        return "9938: TAIFEX takes no market order that is good for the day"
    if terms.price_type is PriceType.LIMIT and not is_price(terms.price):
        return "a limit order needs a price above zero"
    return None


def is_price(price: Decimal | None) -> bool:
    """Whether an order may have this price."""
    # NaN cannot be compared, so finiteness comes first.
    return price is not None and price.is_finite() and 0 < price <= _MAX_PRICE


def crosses(terms: OrderTerms, market: Decimal) -> bool:
    """Whether the order can trade at the market's price."""
    if terms.price_type is PriceType.MARKET or terms.price is None:
        return True
    return terms.price >= market if terms.side is Side.BUY else terms.price <= market


def match_order(terms: OrderTerms, filled: int, market: Decimal | None, liquidity: int | None) -> MatchResult:
    """Matches an order of which `filled` lots are filled, with at most `liquidity` lots (None: any).

    With `market` None nothing can be filled. Market orders never rest: the unfilled part is cancelled, as at
    real exchanges.
    """
    rest = terms.quantity - filled
    available = rest if liquidity is None else min(rest, liquidity)
    if market is None or not crosses(terms, market):
        available = 0
    if terms.time_in_force is TimeInForce.FOK and available < rest:
        return MatchResult(state=OrderState.CANCELLED, reason="fill or kill: not all could be filled at once")
    if available == rest:
        return MatchResult(state=OrderState.FILLED, quantity=rest)
    if terms.time_in_force is TimeInForce.IOC or terms.price_type is PriceType.MARKET:
        return MatchResult(
            state=OrderState.CANCELLED, quantity=available, reason="the rest found no other side"
        )
    state = OrderState.PART_FILLED if filled + available else OrderState.SUBMITTED
    return MatchResult(state=state, quantity=available)


class RestingOrders:
    """The orders that are not final, by id, account and symbol. `put` replaces an order in its old place."""

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
        """Oldest first, like `of_account` and `of_symbol`."""
        return list(self._orders.values())

    def of_account(self, account: str) -> list[LedgerOrder]:
        return [self._orders[found] for found in self._by_account.get(account, ())]

    def of_symbol(self, symbol: str) -> list[LedgerOrder]:
        return [self._orders[found] for found in self._by_symbol.get(symbol, ())]
