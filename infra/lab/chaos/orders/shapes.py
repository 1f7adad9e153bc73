"""The plan of orders: one stream of different shapes, the same for the same seed."""

from __future__ import annotations

import random
from collections.abc import Iterator
from dataclasses import dataclass
from decimal import Decimal
from enum import StrEnum

from worker_runtime.protocol.messages import PriceType, Side, TimeInForce

#: Symbols that every account trades.
#: An order of unknown outcome blocks its symbol, so one would be too few.
SYMBOLS = tuple(f"C{number:03}" for number in range(1, 41))


class FollowUp(StrEnum):
    """Says what the client does about its order afterwards."""

    NOTHING = "nothing"
    CANCEL = "cancel"
    #: Fewer lots, or a price a little further away.
    REPLACE = "replace"
    #: The position that it made is closed.
    CLOSE = "close"
    #: The same, as a strategy says it: `long_exit` or `short_exit`.
    EXIT = "exit"
    #: A position on the other side instead: `short_entry` or `long_entry`.
    REVERSE = "reverse"
    #: Two signals 0.2 s apart: the position is left, and one on the other side is entered.
    SIGNALS = "signals"


#: The frequency of each, of 20: after an order that rests, and after one that fills at once.
_RESTING_WEIGHTS = {FollowUp.CANCEL: 12, FollowUp.REPLACE: 5, FollowUp.NOTHING: 3}
_FILLING_WEIGHTS = {
    FollowUp.NOTHING: 11,
    FollowUp.CLOSE: 2,
    FollowUp.EXIT: 1,
    FollowUp.REVERSE: 3,
    FollowUp.SIGNALS: 3,
}


@dataclass(frozen=True, kw_only=True)
class OrderShape:
    """Describes an order. `at` is seconds since the begin; `lot` from 0 up to 1 says whose it is.

    `distance`: how far the price is from the market's, as a share, towards the other side; None: no
    price. `then` follows `after` seconds after the answer.
    """

    number: int
    at: float
    lot: float
    symbol: str
    side: Side
    quantity: int
    price_type: PriceType
    time_in_force: TimeInForce
    distance: float | None = None
    then: FollowUp = FollowUp.NOTHING
    after: float = 0.0

    def price(self, market: Decimal) -> Decimal | None:
        if self.distance is None:
            return None
        towards = self.distance if self.side is Side.BUY else -self.distance
        return (market * Decimal(1 + towards)).quantize(Decimal("0.01"))


def plan_orders(seed: int, rate: float, seconds: float) -> Iterator[OrderShape]:
    """Plans `rate` orders a second for `seconds`: three of five at the market, one that crosses it,
    one that rests and is mostly cancelled or changed. Some positions are closed or reversed."""
    chance = random.Random(f"orders {seed}")  # noqa: S311 - what is ordered is no secret
    for number in range(int(rate * seconds)):
        kind = chance.random()
        rests = kind >= 0.8
        follow = _RESTING_WEIGHTS if rests else _FILLING_WEIGHTS
        yield OrderShape(
            number=number,
            at=number / rate,
            lot=chance.random(),
            symbol=chance.choice(SYMBOLS),
            side=chance.choice(tuple(Side)),
            quantity=chance.randint(1, 5),
            price_type=PriceType.MARKET if kind < 0.6 else PriceType.LIMIT,
            time_in_force=TimeInForce.ROD if rests else TimeInForce.IOC,
            distance=None if kind < 0.6 else -0.05 if rests else 0.02,
            then=chance.choices(list(follow), list(follow.values()))[0],
            after=round(chance.uniform(0.0, 5.0), 2),
        )
