"""Interprets a signal when it comes: contract, unit, quantity and steps of prices, by the webhook's
settings of that moment and the market of its account.

It is stored with the signal before anything is placed. So a repeat, or another process that takes
the signal over, does the same after a roll date, after an edited table of symbols and after a
change of the webhook.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from datetime import datetime
from decimal import Decimal
from typing import Any

from api.http.errors import InvalidRequest
from api.orders.checks import PreTradeChecks
from api.orders.schemas import MAX_QUANTITY
from api.webhooks.planning import EntryMode, Meaning, OddLots, PriceRounding, QuantityUnit
from api.webhooks.schemas import Signal, stored_signal
from infra.database import accounts
from infra.database.engine import Database
from infra.database.trading import symbol_names
from infra.database.trading.models import Webhook, WebhookCall
from infra.market.calendar import MarketCalendars
from infra.market.instruments import SymbolTerms
from infra.market.signal_symbols import (
    ContinuousFuture,
    lane_of,
    market_of_symbol,
    read_symbol,
)
from worker_runtime.protocol.broker_record import MarketRule, TickStep
from worker_runtime.protocol.installed_brokers import market_of
from worker_runtime.protocol.instruments import PriceStep
from worker_runtime.protocol.order_terms import ODD_LOTS, SHARES_PER_LOT, OrderLot


@dataclass(frozen=True, kw_only=True)
class ReceivedSignal:
    """Holds a signal with its meaning, and the columns that store both."""

    signal: Signal
    digest: str
    meaning: Meaning

    @property
    def lane(self) -> str:
        return lane_of(self.meaning.symbol)

    @property
    def columns(self) -> dict[str, Any]:
        meaning = self.meaning
        return {
            "signal": self.signal.model_dump(mode="json", exclude={"secret"}),
            "symbol": meaning.symbol,
            "unit": meaning.unit.value,
            "quantity": meaning.wish.target
            if meaning.wish.target is not None
            else meaning.wish.quantity,
            "settings": {
                "odd": meaning.odd.value,
                "entry_mode": meaning.mode.value,
                "price_rounding": meaning.rounding.value,
                # None for shares in a market without odd lots. The release before, which takes each
                # lot for one of 1,000 shares, then refuses the signal.
                "odd_lot": meaning.odd_lot.value if meaning.odd_lot else None,
                "lot_units": meaning.lot_units,
                "ticks": [
                    [None if step.below is None else str(step.below), str(step.tick)]
                    for step in meaning.ticks or ()
                ],
            },
        }


@dataclass(frozen=True, kw_only=True)
class SignalMarket:
    """Holds the market of a signal's symbol, and what is known of the symbol."""

    rule: MarketRule
    #: None: the broker has no such symbol, as far as is known.
    terms: SymbolTerms | None = None
    #: True in the hours after the close in which the market takes odd lots.
    trades_after_close: bool = False

    @property
    def lot_units(self) -> int:
        """Units in a full lot. Odd lots exist in markets of one size of lots only."""
        if not ODD_LOTS.isdisjoint(self.rule.lots):
            return SHARES_PER_LOT
        return (self.terms.lot_units if self.terms else None) or self.rule.lot_units

    @property
    def odd_lot(self) -> OrderLot | None:
        """The kind of odd lot that is taken at this time; None: the market has none."""
        kinds = [OrderLot.INTRADAY_ODD, OrderLot.ODD]
        if self.trades_after_close:
            kinds.reverse()
        return next((kind for kind in kinds if kind in self.rule.lots), None)

    def ticks_of(self, symbol: str) -> Sequence[TickStep | PriceStep]:
        if self.terms is not None:
            return self.terms.ticks
        form = self.rule.symbol_rule(symbol)
        return form.ticks if form is not None else ()


class SignalInterpreter:
    """Interprets signals by the broker and the market of their accounts."""

    def __init__(
        self, database: Database, checks: PreTradeChecks, calendars: MarketCalendars
    ) -> None:
        self._database = database
        self._checks = checks
        self._calendars = calendars

    async def interpret(self, signal: Signal, webhook: Webhook, at: datetime) -> ReceivedSignal:
        """Return what a signal means at this time. Raises `UnknownSymbol`, `InvalidRequest`,
        `BrokerNotInstalled`, `AccountNotFound`, `DatabaseUnavailable`."""
        async with self._database.session(autocommit=True) as session:
            names = await symbol_names.load_names(session)
            account = await accounts.require_account(session, webhook.user_id, webhook.account_id)
        plugin, own = market_of(account.broker, account.broker_type)
        markets = plugin.record.markets
        own_name = next(name for name, rule in markets.items() if rule is own)
        calendar = self._calendars.find(account.broker, own_name) or self._calendars.home
        symbol = read_symbol(signal.symbol, names, markets)
        if isinstance(symbol, ContinuousFuture):
            listed = await self._checks.find_futures(symbol.product, plugin)
            symbol = symbol.find_contract(calendar, at, listed)
        rule = market_of_symbol(symbol, markets, own)
        name = next(name for name, other in markets.items() if other is rule)
        days = self._calendars.find(account.broker, name)
        market = SignalMarket(
            rule=rule,
            terms=await self._checks.find_symbol(symbol, plugin),
            trades_after_close=days is not None and days.is_open(name, at, OrderLot.ODD),
        )
        return interpret(signal, webhook, symbol, market)


def interpret(
    signal: Signal, webhook: Webhook, symbol: str, market: SignalMarket
) -> ReceivedSignal:
    """Return what a signal means for a symbol and its market. Raises `InvalidRequest`."""
    digest = signal.digest(webhook)
    if market.rule.lot_units == 1:
        unit = QuantityUnit.CONTRACTS
    elif signal.lot in ODD_LOTS:
        unit = QuantityUnit.SHARES
    else:
        unit = QuantityUnit(webhook.quantity_unit or QuantityUnit.LOTS)
    max_quantity = MAX_QUANTITY * (market.lot_units if unit is QuantityUnit.SHARES else 1)
    quantity = max(signal.quantity or 0, abs(signal.target or 0))
    if quantity > max_quantity:
        raise InvalidRequest(
            f"{quantity} {unit} are too many: one signal may be for {max_quantity} at most"
        )
    meaning = Meaning(
        symbol=symbol,
        unit=unit,
        wish=signal.wish,
        mode=EntryMode(webhook.entry_mode or EntryMode.OPEN),
        odd=OddLots(webhook.odd or OddLots.REFUSE),
        rounding=PriceRounding(webhook.price_rounding or PriceRounding.SAFE),
        pricing=signal.pricing,
        names=signal.names(digest),
        # Only shares have odd lots. The release before reads no signal without one.
        odd_lot=market.odd_lot if unit is QuantityUnit.SHARES else OrderLot.INTRADAY_ODD,
        lot_units=market.lot_units,
        ticks=tuple(market.ticks_of(symbol)),
    )
    return ReceivedSignal(signal=signal, digest=digest, meaning=meaning)


def stored_meaning(call: WebhookCall) -> Meaning:
    """Return what a signal meant when it came.
    Raises `InvalidRequest` if this release cannot read it."""
    signal = stored_signal(call.signal or {})
    settings = call.settings or {}
    odd_lot = settings.get("odd_lot")
    ticks = settings.get("ticks")
    try:
        return Meaning(
            symbol=call.symbol or "",
            unit=QuantityUnit(call.unit or ""),
            wish=signal.wish,
            mode=EntryMode(settings["entry_mode"]),
            odd=OddLots(settings["odd"]),
            rounding=PriceRounding(settings["price_rounding"]),
            pricing=signal.pricing,
            names=signal.names(call.digest or ""),
            odd_lot=None if odd_lot is None else OrderLot(odd_lot),
            lot_units=settings.get("lot_units", SHARES_PER_LOT),
            ticks=None if ticks is None else tuple(_stored_step(*step) for step in ticks),
        )
    except (KeyError, ValueError):
        raise InvalidRequest("the signal cannot be read any more") from None


def _stored_step(below: str | None, tick: str) -> TickStep:
    return TickStep(below=None if below is None else Decimal(below), tick=Decimal(tick))
