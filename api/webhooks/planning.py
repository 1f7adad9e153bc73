"""Plans the orders of a signal: from the position before, the signal and the webhook's settings.

Nothing here asks a server. The table in docs/how-to/receive-signals.md is a test of this module.

TradingView's placeholders, as its help describes them
(https://www.tradingview.com/support/solutions/43000481368-strategy-alerts/):

- `{{strategy.order.action}}` is `buy` or `sell`, of the order that was executed.
- `{{strategy.order.contracts}}` is the size of that order. On a reversal it is the old position and
  the new one together, which is what the mode `delta` takes apart.
- `{{strategy.position_size}}` is the position after it: negative when short in Pine.
- `{{strategy.market_position}}` is `long`, `flat` or `short`; `{{strategy.market_position_size}}`
  the size of the position without a sign. `{{strategy.prev_market_position}}` is the position
  before.
- `{{close}}` is the price of the bar, `{{timenow}}` the time in UTC, to the second.
"""

from collections.abc import Sequence
from dataclasses import asdict, dataclass, replace
from datetime import datetime
from decimal import Decimal
from enum import StrEnum
from typing import Any, Self

from api.http.errors import OddLotRefused
from infra.market.signal_symbols import round_to_tick
from worker_runtime.protocol.broker_record import TickStep
from worker_runtime.protocol.errors import PriceOffTick
from worker_runtime.protocol.instruments import PriceStep
from worker_runtime.protocol.messages import PriceType, Side, TimeInForce
from worker_runtime.protocol.order_terms import (
    ODD_LOTS,
    SHARES_PER_LOT,
    OpenClose,
    OrderCondition,
    OrderLot,
)

#: The share by which the limit of an odd lot's order may differ from the price in a market signal:
#: odd lots are taken as limit orders only (see the record of the home broker).
ODD_LOT_MARGIN = Decimal("0.01")


class SignalAction(StrEnum):
    """Names what a signal asks for: an order, or what a strategy wants."""

    BUY = "buy"
    SELL = "sell"
    LONG_ENTRY = "long_entry"
    LONG_EXIT = "long_exit"
    SHORT_ENTRY = "short_entry"
    SHORT_EXIT = "short_exit"
    CLOSE = "close"
    POSITION = "position"


class QuantityUnit(StrEnum):
    """Says what a signal's quantity counts."""

    SHARES = "shares"
    LOTS = "lots"
    CONTRACTS = "contracts"


class OddLots(StrEnum):
    """Says what happens to shares beyond full lots."""

    SPLIT = "split"
    REFUSE = "refuse"
    ROUND_DOWN = "round_down"


class EntryMode(StrEnum):
    """Says what an entry's quantity is.

    `open`: what it opens, after it closed the other side. `delta`: all that it trades; the close of
    the other side is a part of it.
    """

    OPEN = "open"
    DELTA = "delta"


class PriceRounding(StrEnum):
    """Says what happens to a limit price between two ticks; `safe` moves it in its sender's
    favour."""

    SAFE = "safe"
    REFUSE = "refuse"


class Outcome(StrEnum):
    """Says how a signal ended that was not refused."""

    PLACED = "placed"
    #: The broker rejected an order of it.
    REJECTED = "rejected"
    NOTHING_TO_CLOSE = "nothing_to_close"
    NOTHING_TO_DO = "nothing_to_do"


@dataclass(frozen=True, kw_only=True)
class Wish:
    """Holds what a signal asks for, in the unit of its webhook."""

    action: SignalAction
    #: None: all of the position.
    quantity: int | None = None
    #: The position that `position` asks for; negative when short.
    target: int | None = None
    reduce_only: bool = False

    @property
    def is_plain(self) -> bool:
        """True for an order as it stands, whatever the positions are."""
        return self.action in (SignalAction.BUY, SignalAction.SELL) and not self.reduce_only

    @property
    def opens_side(self) -> Side | None:
        match self.action:
            case SignalAction.LONG_ENTRY | SignalAction.BUY if not self.reduce_only:
                return Side.BUY
            case SignalAction.SHORT_ENTRY | SignalAction.SELL if not self.reduce_only:
                return Side.SELL
        return None

    @property
    def closes_long(self) -> bool | None:
        """Returns True if it may close long positions, False for short ones, None for either."""
        match self.action:
            case SignalAction.LONG_EXIT | SignalAction.SHORT_ENTRY | SignalAction.SELL:
                return True
            case SignalAction.SHORT_EXIT | SignalAction.LONG_ENTRY | SignalAction.BUY:
                return False
        return None


@dataclass(frozen=True)
class Move:
    """Holds one step towards a position, in the unit of the webhook."""

    side: Side
    quantity: int
    closes: bool


@dataclass(frozen=True)
class Moves:
    """Holds all steps of a signal, closing ones first, and a sentence about what it asked for
    beyond them."""

    steps: Sequence[Move]
    outcome: Outcome = Outcome.PLACED
    note: str = ""

    def position_after(self, before: int) -> int:
        """Return the position when all steps are filled."""
        return before + sum(
            step.quantity if step.side is Side.BUY else -step.quantity for step in self.steps
        )


def plan_moves(wish: Wish, held: int, mode: EntryMode = EntryMode.OPEN) -> Moves:
    """Plan the steps from the position `held`, negative when short; a plain order ignores it."""
    if wish.action is SignalAction.POSITION:
        return _towards(wish.target or 0, held)
    side, quantity = wish.opens_side, wish.quantity
    if side is None:
        return _exit(wish, held)
    assert quantity is not None  # the schema requires it  # noqa: S101
    if wish.is_plain:
        return Moves([Move(side, quantity, closes=False)])
    against = max(0, -held if side is Side.BUY else held)
    closed = min(against, quantity) if mode is EntryMode.DELTA else against
    opened = quantity - closed if mode is EntryMode.DELTA else quantity
    return Moves(_steps(side, closed, opened))


def _steps(side: Side, closed: int, opened: int) -> list[Move]:
    steps = [Move(side, closed, closes=True), Move(side, opened, closes=False)]
    return [step for step in steps if step.quantity]


def _exit(wish: Wish, held: int) -> Moves:
    long = wish.closes_long
    closable = abs(held) if long is None or (held > 0) is long else 0
    if not closable:
        kind = {None: "position", True: "long position", False: "short position"}[long]
        return Moves([], Outcome.NOTHING_TO_CLOSE, f"there is no {kind} to close")
    quantity = min(closable, wish.quantity or closable)
    note = ""
    if wish.quantity is not None and wish.quantity > closable:
        note = f"the position is {closable}, so {closable} of {wish.quantity} are closed"
    return Moves(_steps(Side.SELL if held > 0 else Side.BUY, quantity, 0), note=note)


def _towards(target: int, held: int) -> Moves:
    if target == held:
        if not target:
            return Moves([], Outcome.NOTHING_TO_CLOSE, "there is no position to close")
        return Moves([], Outcome.NOTHING_TO_DO, f"the position is {held} already")
    side = Side.BUY if target > held else Side.SELL
    against = max(0, -held if side is Side.BUY else held)
    closed = min(against, abs(target - held))
    return Moves(_steps(side, closed, abs(target - held) - closed))


@dataclass(frozen=True, kw_only=True)
class OrderPricing:
    """Holds price and terms of a signal's orders, as the signal gives them."""

    price_type: PriceType = PriceType.MARKET
    price: Decimal | None = None
    time_in_force: TimeInForce = TimeInForce.IOC
    lot: OrderLot = OrderLot.COMMON
    condition: OrderCondition | None = None
    open_close: OpenClose = OpenClose.AUTO
    #: The price in a market signal, which only orders for odd lots use.
    quoted: Decimal | None = None

    def rounded(self, meaning: "Meaning", side: Side) -> Self:
        """Return the same pricing with a limit price that the exchange takes. Raises
        `PriceOffTick`."""
        if self.price is None:
            return self
        price = meaning.round_price(self.price, side)
        if price != self.price and meaning.rounding is PriceRounding.REFUSE:
            raise PriceOffTick(
                f"{self.price.normalize():f} is between two ticks of {meaning.symbol}; the next "
                f"one is {price:f}. Send that one, or set the webhook's `price_rounding` to `safe`."
            )
        return replace(self, price=price)


@dataclass(frozen=True, kw_only=True)
class PlannedOrder:
    """Holds the client order id and the terms of one order of a signal."""

    client_order_id: str
    closes: bool
    side: Side
    quantity: int
    pricing: OrderPricing

    def to_json(self) -> dict[str, Any]:
        pricing = self.pricing
        return {
            "client_order_id": self.client_order_id,
            "closes": self.closes,
            "side": self.side.value,
            "quantity": self.quantity,
            "price_type": pricing.price_type.value,
            "price": None if pricing.price is None else format(pricing.price, "f"),
            "time_in_force": pricing.time_in_force.value,
            "lot": pricing.lot.value,
            "condition": (pricing.condition or OrderCondition.CASH).value,
            "open_close": pricing.open_close.value,
        }

    @classmethod
    def from_json(cls, words: dict[str, Any]) -> Self:
        price = words["price"]
        pricing = OrderPricing(
            price_type=PriceType(words["price_type"]),
            price=None if price is None else Decimal(price),
            time_in_force=TimeInForce(words["time_in_force"]),
            lot=OrderLot(words["lot"]),
            condition=OrderCondition(words["condition"]),
            open_close=OpenClose(words["open_close"]),
        )
        return cls(
            client_order_id=words["client_order_id"],
            closes=words["closes"],
            side=Side(words["side"]),
            quantity=words["quantity"],
            pricing=pricing,
        )


@dataclass(frozen=True, kw_only=True)
class SignalPlan:
    """Holds the orders of a signal. It is stored before any of them is written."""

    #: The position before, in the unit of the webhook; None for a plain order, which does not look
    #: at it.
    before: int | None
    after: int | None
    outcome: Outcome
    note: str
    orders: Sequence[PlannedOrder] = ()
    #: PostgreSQL's time before which fills are in that position.
    since: datetime | None = None

    @property
    def opens(self) -> bool:
        return any(not order.closes for order in self.orders)

    def to_json(self) -> dict[str, Any]:
        words = asdict(replace(self, orders=()))
        words |= {"outcome": self.outcome.value, "since": self.since and self.since.isoformat()}
        return words | {"orders": [order.to_json() for order in self.orders]}

    @classmethod
    def from_json(cls, words: dict[str, Any]) -> Self:
        since = words["since"]
        return cls(
            before=words["before"],
            after=words["after"],
            outcome=Outcome(words["outcome"]),
            note=words["note"],
            orders=[PlannedOrder.from_json(order) for order in words["orders"]],
            since=datetime.fromisoformat(since) if since else None,
        )


@dataclass(frozen=True, kw_only=True)
class OrderNames:
    """Holds the client order ids of a signal's orders. Those that release 0.1.0 made, too, have the
    ids that it gave them."""

    close: str
    open: str

    def of(self, *, closes: bool, odd: bool) -> str:
        return f"{self.close if closes else self.open}{'-odd' if odd else ''}"

    @property
    def both(self) -> Sequence[tuple[str, bool]]:
        """Returns each name with True if an order of this name may be split into parts."""
        return (
            (self.close, True),
            (f"{self.close}-odd", False),
            (self.open, False),
            (f"{self.open}-odd", False),
        )


@dataclass(frozen=True, kw_only=True)
class Meaning:
    """Holds what a signal means on the day it came: resolved once, and stored with it."""

    symbol: str
    unit: QuantityUnit
    wish: Wish
    mode: EntryMode
    odd: OddLots
    rounding: PriceRounding
    pricing: OrderPricing
    names: OrderNames
    #: The intraday odd lot or the one after the close, by the hour in which it came; None: the
    #: market has no odd lots.
    odd_lot: OrderLot | None = OrderLot.INTRADAY_ODD
    #: Units (shares) in a full lot.
    lot_units: int = SHARES_PER_LOT
    #: Steps of the symbol's prices; None: those that the home markets have for its form, as for
    #: each signal that the release before stored.
    ticks: Sequence[TickStep | PriceStep] | None = None

    def round_price(self, price: Decimal, side: Side) -> Decimal:
        """Return the next price that the exchange takes and that is no worse for the sender."""
        return round_to_tick(self.symbol, price, buys=side is Side.BUY, ticks=self.ticks)


def plan_signal(
    meaning: Meaning,
    held: int,
    *,
    condition: OrderCondition | None = None,
    since: datetime | None = None,
) -> SignalPlan:
    """Plan a signal's orders from the position `held`, in its unit; `condition` is that of the
    position.

    Raises `OddLotRefused`, `PriceOffTick`.
    """
    moves = plan_moves(meaning.wish, held, meaning.mode)
    notes = [moves.note] if moves.note else []
    orders: list[PlannedOrder] = []
    traded = unclosed = 0
    for move in moves.steps:
        if unclosed:
            notes.append(f"{unclosed} shares of the other side are left, so nothing is opened")
            break
        planned, note = _orders_of(meaning, move, condition)
        orders += planned
        notes += [note] if note else []
        quantity = sum(_in_unit(meaning, order) for order in planned)
        traded += quantity if move.side is Side.BUY else -quantity
        unclosed = move.quantity - quantity if move.closes else 0
    if unclosed and not orders and any(not move.closes for move in moves.steps):
        raise OddLotRefused(
            f"{unclosed} shares of the other side are no full lot, and nothing is opened next to "
            "them: close them with an odd lot, or set the webhook's odd to split"
        )
    plain = meaning.wish.is_plain
    return SignalPlan(
        before=None if plain else held,
        after=None if plain else held + traded,
        outcome=moves.outcome if orders or not moves.steps else Outcome.NOTHING_TO_DO,
        note="; ".join(notes),
        orders=orders,
        since=since,
    )


def _in_unit(meaning: Meaning, order: PlannedOrder) -> int:
    lots = meaning.unit is QuantityUnit.SHARES and order.pricing.lot not in ODD_LOTS
    return order.quantity * (meaning.lot_units if lots else 1)


def _orders_of(
    meaning: Meaning, move: Move, condition: OrderCondition | None
) -> tuple[list[PlannedOrder], str]:
    pricing = meaning.pricing.rounded(meaning, move.side)
    if move.closes:
        # What was bought on margin is sold on margin; the open or close type is that of the order
        # that opens.
        opens_too = (
            meaning.wish.opens_side is not None or meaning.wish.action is SignalAction.POSITION
        )
        pricing = replace(pricing, condition=condition or pricing.condition)
        pricing = replace(pricing, open_close=OpenClose.AUTO) if opens_too else pricing

    def order(quantity: int, pricing: OrderPricing, *, odd: bool = False) -> PlannedOrder:
        return PlannedOrder(
            client_order_id=meaning.names.of(closes=move.closes, odd=odd),
            closes=move.closes,
            side=move.side,
            quantity=quantity,
            pricing=pricing,
        )

    if meaning.unit is not QuantityUnit.SHARES or pricing.lot in ODD_LOTS:
        return [order(move.quantity, pricing)], ""
    lots, rest = divmod(move.quantity, meaning.lot_units)
    orders = [order(lots, pricing)] if lots else []
    if not rest:
        return orders, ""
    verb = "bought" if move.side is Side.BUY else "sold"
    if meaning.odd is OddLots.ROUND_DOWN:
        return orders, f"{rest} of {move.quantity} shares are no full lot and are not {verb}"
    if meaning.odd_lot is None:
        raise OddLotRefused(
            f"{move.quantity} shares are {lots} lots of {meaning.lot_units} and {rest} shares, and "
            "the market takes full lots only (odd: round_down leaves the rest out)"
        )
    if meaning.odd is OddLots.REFUSE:
        raise OddLotRefused(
            f"{move.quantity} shares are {lots} lots and {rest} shares; this webhook refuses "
            "shares beyond full lots (odd: split orders them as an odd lot, round_down leaves them "
            "out)"
        )
    odd_pricing = replace(_odd_pricing(meaning, move, pricing, rest), lot=meaning.odd_lot)
    return [*orders, order(rest, odd_pricing, odd=True)], ""


def _odd_pricing(meaning: Meaning, move: Move, pricing: OrderPricing, rest: int) -> OrderPricing:
    if pricing.lot is OrderLot.FIXING:
        raise OddLotRefused(
            f"{rest} shares are no full lot, and only full lots trade at the closing price"
        )
    if pricing.condition not in (None, OrderCondition.CASH):
        raise OddLotRefused(
            f"{rest} shares are no full lot, and odd lots are bought and sold for cash only"
        )
    price = pricing.price
    if price is None:
        if meaning.pricing.quoted is None:
            raise OddLotRefused(
                f"{rest} shares are an odd lot, which the exchange takes with a limit price "
                "only: send"
                ' "price": "{{close}}" with the signal (the odd lot is limited to 1 % from '
                "it), or a limit"
                " order, or let the webhook round down"
            )
        sign = 1 if move.side is Side.BUY else -1
        price = meaning.round_price(meaning.pricing.quoted * (1 + sign * ODD_LOT_MARGIN), move.side)
    return replace(
        pricing,
        price_type=PriceType.LIMIT,
        price=price,
        time_in_force=TimeInForce.ROD,
        condition=OrderCondition.CASH,
    )
