"""Positions and money, computed from the fills: the ledger is the only truth."""

from __future__ import annotations

from collections.abc import Iterable
from decimal import Decimal

from infra.exchange.records import LedgerOrder
from worker_runtime.protocol.exchange import Balance, Position
from worker_runtime.protocol.messages import Side

_CENT = Decimal("0.0001")
#: What every account begins with.
FIRST_MONEY = Decimal(100_000_000)


def positions(orders: Iterable[LedgerOrder]) -> list[Position]:
    """Open positions of the given orders' fills, by symbol; flat ones are left out.

    The average price is that of the fills which opened or enlarged the position; reducing keeps it.
    """
    held: dict[str, tuple[int, Decimal]] = {}
    fills = [(fill, order) for order in orders for fill in order.fills]
    for fill, order in sorted(fills, key=lambda pair: (pair[0].at_ms, pair[0].fill_id)):
        quantity, average = held.get(order.symbol, (0, Decimal(0)))
        change = fill.quantity if order.side is Side.BUY else -fill.quantity
        after = quantity + change
        if quantity * change >= 0:  # opens or enlarges
            average = (average * abs(quantity) + fill.price * abs(change)) / abs(after)
        elif quantity * after < 0:  # turned round: the rest was opened by this fill
            average = fill.price
        held[order.symbol] = (after, average)
    return [
        Position(symbol=symbol, quantity=quantity, average_price=average.quantize(_CENT))
        for symbol, (quantity, average) in sorted(held.items())
        if quantity
    ]


def balance(orders: Iterable[LedgerOrder]) -> Balance:
    """Money after the given orders' fills. A lot is worth its price: the exchange knows no contract sizes."""
    cash, bound = FIRST_MONEY, Decimal(0)
    for order in orders:
        sign = -1 if order.side is Side.BUY else 1
        cash += sum((sign * fill.quantity * fill.price for fill in order.fills), Decimal(0))
        if order.side is Side.BUY and not order.final and order.price is not None:
            bound += order.remaining * order.price
    return Balance(currency="TWD", cash=cash, available=cash - bound)
