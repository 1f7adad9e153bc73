"""Reads the contracts of Shioaji as instruments, from its SDK's own caches.

The SDK has bases (`contracts.list`) and the terms of each (`contracts.info`); those of
warrants it gives by what is underneath (`contracts.warrants`). `preload(info=True)` loads
both. Before the market opens they may be missing (Sinotrade/Shioaji #19): then nothing is
listed, rather than a part.

Contracts are there early, but with the prices of the day before until the vendor updates them:
those of futures at 07:50, those of stocks at 08:00. Such prices are left out.
"""

import math
from collections.abc import Callable, Iterable, Iterator
from datetime import date
from decimal import Decimal
from functools import partial
from typing import Any

from worker_runtime.brokers.port import Instrument, InstrumentKind, PriceStep
from worker_runtime.protocol.errors import InstrumentsUnavailable

#: Kinds of contracts of an account's type, as the SDK names them.
LISTED = {"stock": ("STK", "WRT"), "futures": ("FUT", "OPT")}
#: Contracts whose terms are read in one go. Each may be a call of the network if it was not loaded.
_CONTRACTS_PER_BATCH = 50
#: The share of contracts without terms from which on the list counts as not loaded.
_MAX_MISSING_SHARE = 0.1
#: Units of a lot of warrants, whose terms do not say it (TWSE Operating Rules, article 59).
_WARRANT_LOT_UNITS = 1000
#: Tells whether a share may be bought and sold on a day: `OnlyBuy` means that the purchase comes
#: first.
_DAY_TRADE = {"Yes": True, "OnlyBuy": True, "No": False}
_KINDS = {"FUT": InstrumentKind.FUTURE, "OPT": InstrumentKind.OPTION}
#: Characters that the fields of an instrument may have.
_MAX_NAME_LENGTH, _MAX_CODE_LENGTH = 120, 32

#: Runs work of the SDK within the time of one wait; raises the port's errors.
RunWork = Callable[[Callable[[], Any]], Any]


def read_instruments(
    api: Any, broker_type: str, run: RunWork, timeout_ms: int, today: date
) -> Iterator[Instrument]:
    """Yields the instruments that accounts of this type trade. `today`: the market's.

    Raises `InstrumentsUnavailable` if a kind of contract is missing, or the terms of many.
    """
    kinds = list(LISTED[broker_type])
    run(lambda: api.contracts.preload(kinds, info=True, timeout=timeout_ms))
    for kind in kinds:
        if kind == "WRT":
            yield from _warrants(api, run, today)
        else:
            yield from _contracts(api, kind, run, today)


def _contracts(api: Any, kind: str, run: RunWork, today: date) -> Iterator[Instrument]:
    bases = list(run(lambda: api.contracts.list(kind)))
    if not bases:
        raise InstrumentsUnavailable(f"Shioaji has no contracts of the kind {kind} yet")
    missing = 0
    for begin in range(0, len(bases), _CONTRACTS_PER_BATCH):
        batch = bases[begin : begin + _CONTRACTS_PER_BATCH]
        for base, info in zip(batch, run(partial(_terms, api, kind, batch)), strict=True):
            instrument = None if info is None else _instrument_of(kind, base, info, today)
            if instrument is None:
                missing += 1
            else:
                yield instrument
    if missing > len(bases) * _MAX_MISSING_SHARE:
        raise InstrumentsUnavailable(
            f"Shioaji has no terms of {missing} of {len(bases)} contracts of the kind {kind}"
        )


def _terms(api: Any, kind: str, bases: Iterable[Any]) -> list[Any]:
    terms = []
    for base in bases:
        real = base
        # A rolling code (TXFR1) has the terms of the contract for which it stands.
        if base.target_code:
            real = api.contracts.get(base.target_code, security_type=kind)
        try:
            info = None if real is None else api.contracts.info(real)
        except ValueError:  # the SDK's word for a code without terms
            info = None
        terms.append(info)
    return terms


def _warrants(api: Any, run: RunWork, today: date) -> Iterator[Instrument]:
    underlyings = list(run(api.contracts.warrant_underlyings))
    if not underlyings:
        raise InstrumentsUnavailable("Shioaji has no warrants yet")
    listed = False
    for underlying in underlyings:
        for info in run(partial(api.contracts.warrants, underlying)):
            listed = True
            yield _warrant_of(info, today)
    if not listed:
        raise InstrumentsUnavailable("Shioaji has no warrants yet")


def _instrument_of(kind: str, base: Any, info: Any, today: date) -> Instrument | None:
    """Returns the instrument of a contract; None if its terms do not say what a lot is worth."""
    if kind == "STK":
        return _share_of(base, info, today)
    multiplier = _number(info.multiplier) or _number(info.contract_size)
    if multiplier is None:
        return None
    tick = _number(info.tick)
    return Instrument(
        code=base.code,
        name=_text(info.name, _MAX_NAME_LENGTH),
        market="futures",
        kind=_KINDS[kind],
        lot_units=1,
        lot_value=multiplier,
        # With a rule the tick depends on the price, and one step would be wrong at others.
        ticks=(PriceStep(tick=tick),) if tick is not None and not info.tick_rule else (),
        # A rolling code continues with the next contract when the one it stands for ends.
        expires_on=None if base.target_code else _last_day(info),
        underlying=_text(info.underlying_code or info.root, _MAX_CODE_LENGTH),
        **_prices(info, today),
    )


def _last_day(info: Any) -> date | None:
    return _day(info.last_trading_date) or _day(info.delivery_date)


def _share_of(base: Any, info: Any, today: date) -> Instrument | None:
    unit = _number(info.unit)
    if unit is None or unit != int(unit):
        return None
    code = str(base.code)
    # Funds have codes that begin with 00 (TWSE Operating Rules, article 62).
    kind = InstrumentKind.FUND if code.startswith("00") else InstrumentKind.STOCK
    return Instrument(
        code=code,
        name=_text(info.name, _MAX_NAME_LENGTH),
        market="stock",
        kind=kind,
        lot_units=int(unit),
        lot_value=unit,
        day_trade=_DAY_TRADE.get(str(getattr(info.day_trade, "value", info.day_trade))),
        **_prices(info, today),
    )


def _warrant_of(info: Any, today: date) -> Instrument:
    return Instrument(
        code=info.code,
        name=_text(info.name, _MAX_NAME_LENGTH),
        market="stock",
        kind=InstrumentKind.WARRANT,
        lot_units=_WARRANT_LOT_UNITS,
        lot_value=Decimal(_WARRANT_LOT_UNITS),
        expires_on=_day(info.last_trading_date) or _day(info.expiry_date),
        underlying=_text(info.underlying_code, _MAX_CODE_LENGTH),
        **_prices(info, today),
    )


def _prices(info: Any, today: date) -> dict[str, Any]:
    """Returns the reference price and the limits, if they are today's; no limits if the upper one
    is below the lower."""
    if not has_prices_of(info, today):
        return {"prices_due": True}
    reference = _number(info.reference)
    up, down = _number(info.limit_up), _number(info.limit_down)
    if up is not None and down is not None and up < down:
        up = down = None
    return {"reference": reference, "limit_up": up, "limit_down": down}


def has_prices_of(info: Any, day: date) -> bool:
    """Returns True if a contract's terms were updated on this day."""
    return str(info.update_date) == day.isoformat()


def _number(value: Any) -> Decimal | None:
    """Returns a positive number of the SDK; None for 0, which it has where it knows none."""
    if value is None or not math.isfinite(value) or value <= 0:
        return None
    return Decimal(int(value)) if value == int(value) else Decimal(repr(value))


def _text(value: Any, limit: int) -> str:
    return "" if value is None else str(value)[:limit]


def _day(value: Any) -> date | None:
    return value if isinstance(value, date) else None
