"""The market: one price per symbol, which changes by an admin call or a seeded random walk."""

from __future__ import annotations

from collections.abc import Callable
from decimal import Decimal

from pydantic import BaseModel, ConfigDict, Field

from infra.exchange import matching
from infra.exchange.behaviour import seeded_draw
from infra.exchange.ledger import ExchangeLedger
from worker_runtime.protocol.order_terms import OrderLot

_WALK_SETTING = "walk"
_TICK_SIZE = 0.01
#: The highest price of a limit order.
_MAX_PRICE = 10_000_000.0
#: A walk keeps within this share of its first price: Taiwan's daily limit is 10 %.
_MAX_WALK_SHARE = 0.1


class PriceWalk(BaseModel):
    """A random walk of all known prices, each by at most `step` at a time."""

    model_config = ConfigDict(frozen=True, extra="forbid")

    seed: int = 1
    #: Milliseconds between steps; 0: prices stand still.
    every_ms: int = Field(default=0, ge=0)
    #: The largest move in one step, as a share of the price.
    step: float = Field(default=0.001, gt=0, le=0.1)


class ExchangeMarket:
    """Prices and their walk, kept in the ledger.
    Calls `moved` after a symbol's price has changed."""

    def __init__(
        self,
        ledger: ExchangeLedger,
        later: Callable[[float, Callable[[], None]], object],
        moved: Callable[[str], None],
        *,
        first_price: Callable[[str], Decimal],
        walk: PriceWalk,
    ) -> None:
        """Takes `first_price`, which gives the price of a symbol that nobody has set."""
        self._ledger = ledger
        self._later = later
        self._moved = moved
        self._first_price = first_price
        self._prices = ledger.prices()
        self._anchors: dict[str, float] = {}
        kept = ledger.setting(_WALK_SETTING)
        self.walk = PriceWalk.model_validate_json(kept) if kept else walk
        self._steps = 0
        self._round = 0
        self._schedule_step()

    def price(self, symbol: str, lot: OrderLot = OrderLot.COMMON) -> Decimal:
        """Returns the price of a symbol, or of its odd lots where they have one of their own."""
        book = matching.book_of(symbol, lot)
        if book in self._prices:
            return self._prices[book]
        if symbol not in self._prices:
            self._prices[symbol] = self._first_price(symbol)
        return self._prices[symbol]

    def set_price(self, symbol: str, price: Decimal) -> None:
        """Sets a price; a walk continues from there. Odd lots trade apart: their symbol
        is that of `matching.book_of`, such as `2330.odd`, and without a price of their
        own they follow the lots."""
        self._anchors.pop(symbol, None)
        self._ledger.save_prices({symbol: price})
        self._prices[symbol] = price
        self._moved(matching.symbol_of(symbol))

    def set_walk(self, walk: PriceWalk) -> None:
        """Begins a walk at the present prices; the same seed and prices give the same moves."""
        self._ledger.save_setting(_WALK_SETTING, walk.model_dump_json())
        self.walk = walk
        self._anchors.clear()
        self._steps = 0
        self._round += 1
        self._schedule_step()

    def _schedule_step(self) -> None:
        if not self.walk.every_ms:
            return
        current = self._round

        def step() -> None:
            if current == self._round:  # else another walk was set meanwhile
                self._step()
                self._schedule_step()

        self._later(self.walk.every_ms / 1000, step)

    def _step(self) -> None:
        self._steps += 1
        moved = {}
        for symbol, price in ((symbol, float(price)) for symbol, price in self._prices.items()):
            anchor = self._anchors.setdefault(symbol, price)
            draw = seeded_draw(self.walk.seed, self._ledger.start, symbol, self._steps)
            target = price * (1 + (2 * draw - 1) * self.walk.step)
            kept = min(
                max(target, anchor * (1 - _MAX_WALK_SHARE)),
                anchor * (1 + _MAX_WALK_SHARE),
                _MAX_PRICE,
            )
            moved[symbol] = Decimal(f"{max(kept, _TICK_SIZE):.2f}")
        moved = {symbol: price for symbol, price in moved.items() if price != self._prices[symbol]}
        self._ledger.save_prices(moved)
        self._prices.update(moved)
        for symbol in moved:
            self._moved(matching.symbol_of(symbol))
