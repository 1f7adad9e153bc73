"""The orders that rest, found by id, account or symbol: a price moves often, and few orders are in it."""

from __future__ import annotations

from collections.abc import Iterable

from infra.exchange.records import LedgerOrder


class Book:
    """What is not final. Orders are frozen: `put` replaces the one with the same id, in its old place."""

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
        """Oldest first, as the others are."""
        return list(self._orders.values())

    def of_account(self, account: str) -> list[LedgerOrder]:
        return [self._orders[found] for found in self._by_account.get(account, ())]

    def of_symbol(self, symbol: str) -> list[LedgerOrder]:
        return [self._orders[found] for found in self._by_symbol.get(symbol, ())]
