"""Interprets a signal when it comes: contract,
unit and quantity, by the webhook's settings of that moment.

It is stored with the signal before anything is placed. So a repeat, or another process that takes
the signal over, does the same after a roll date, after an edited table of symbols and after a
change of the webhook.
"""

from collections.abc import Mapping
from dataclasses import dataclass
from datetime import datetime
from typing import Any

from api.http.errors import InvalidRequest
from api.orders.schemas import MAX_QUANTITY
from api.webhooks.planning import EntryMode, Meaning, OddLots, PriceRounding, QuantityUnit
from api.webhooks.schemas import Signal, stored_signal
from infra.database.trading.models import Webhook, WebhookCall
from infra.market.calendar import Calendar, Market
from infra.market.signal_symbols import is_share, lane_of, resolve_symbol
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
                "odd_lot": meaning.odd_lot.value,
            },
        }


def interpret(
    signal: Signal, webhook: Webhook, names: Mapping[str, str], calendar: Calendar, at: datetime
) -> ReceivedSignal:
    """Return what a signal means at this time. Raises `UnknownSymbol`, `InvalidRequest`."""
    digest = signal.digest(webhook)
    symbol = resolve_symbol(signal.symbol, names, calendar, at)
    if not is_share(symbol):
        unit = QuantityUnit.CONTRACTS
    elif signal.lot in ODD_LOTS:
        unit = QuantityUnit.SHARES
    else:
        unit = QuantityUnit(webhook.quantity_unit or QuantityUnit.LOTS)
    max_quantity = MAX_QUANTITY * (SHARES_PER_LOT if unit is QuantityUnit.SHARES else 1)
    quantity = max(signal.quantity or 0, abs(signal.target or 0))
    if quantity > max_quantity:
        raise InvalidRequest(
            f"{quantity} {unit} are too many: one signal may be for {max_quantity} at most"
        )
    trades_after_close = calendar.is_open(Market.STOCK, at, OrderLot.ODD)
    meaning = Meaning(
        symbol=symbol,
        unit=unit,
        wish=signal.wish,
        mode=EntryMode(webhook.entry_mode or EntryMode.OPEN),
        odd=OddLots(webhook.odd or OddLots.REFUSE),
        rounding=PriceRounding(webhook.price_rounding or PriceRounding.SAFE),
        pricing=signal.pricing,
        names=signal.names(digest),
        odd_lot=OrderLot.ODD if trades_after_close else OrderLot.INTRADAY_ODD,
    )
    return ReceivedSignal(signal=signal, digest=digest, meaning=meaning)


def stored_meaning(call: WebhookCall) -> Meaning:
    """Return what a signal meant when it came.
    Raises `InvalidRequest` if this release cannot read it."""
    signal = stored_signal(call.signal or {})
    settings = call.settings or {}
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
            odd_lot=OrderLot(settings["odd_lot"]),
        )
    except (KeyError, ValueError):
        raise InvalidRequest("the signal cannot be read any more") from None
