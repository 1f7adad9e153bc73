"""Lists what the exchange trades on a day: shares, funds, warrants, futures and options with their
terms.

The data file has products; their series follow by rule, so that the same day and seed give the same
list. Codes are those of TWSE and TAIFEX: the month of a contract is a letter (`A` to `L`, puts `M`
to `X`) and the last digit of its year; the weekly contracts of week 1 are `MX1A6` and `TX120000A6`.
Holidays do not move the last trading day here, as they do at TAIFEX.
"""

from __future__ import annotations

import tomllib
from bisect import bisect_right
from collections.abc import Callable, Iterator
from datetime import UTC, date, datetime, timedelta
from decimal import ROUND_CEILING, ROUND_FLOOR, Decimal
from functools import cache
from pathlib import Path
from typing import Any, NamedTuple

import msgspec
from pydantic import BaseModel, ConfigDict, Field

from infra.exchange.ledger import ExchangeLedger
from infra.exchange.matching import tick_at
from infra.market.calendar import HOME_ZONE, home_broker
from worker_runtime.protocol.errors import InstrumentsUnavailable
from worker_runtime.protocol.instruments import (
    MAX_INSTRUMENTS_PER_PAGE,
    Instrument,
    InstrumentKind,
    InstrumentPage,
    PriceStep,
)

_DATA = Path(__file__).with_name("instruments.toml")
_SETTING = "instruments"
#: The share by which limit-up and limit-down differ from the reference price (TWSE, TAIFEX).
_DAILY_LIMIT_SHARE = Decimal("0.1")
_SHARES_PER_LOT = 1000
_MONTHS = "ABCDEFGHIJKL"
_PUT_MONTHS = "MNOPQRSTUVWX"
#: Months in which TXF is listed: this and the next two,
#: then two of March, June, September and December.
_NEAR_MONTHS, _QUARTERS = 3, 2
_WEDNESDAY = 2
_THIRD_WEEK = 3
_WEEKS_LISTED = 2
#: Units of the share that a warrant stands for.
_WARRANT_RATIO = Decimal("0.1")
#: The first code of the warrants that are only there to make the list long.
_FIRST_EXTRA_CODE = 700_000


class InstrumentChange(BaseModel):
    """Other terms of one instrument than the rules give it; None: the same."""

    model_config = ConfigDict(frozen=True, extra="forbid")

    name: str | None = Field(default=None, max_length=120)
    lot_units: int | None = Field(default=None, ge=1, le=1_000_000)
    lot_value: Decimal | None = Field(default=None, gt=0, le=1_000_000_000)
    reference: Decimal | None = Field(default=None, gt=0, le=10_000_000)
    day_trade: bool | None = None
    delisted: bool = False


class InstrumentSettings(BaseModel):
    """The changes that an admin call makes to the list."""

    model_config = ConfigDict(frozen=True, extra="forbid")

    #: The day for which the list is made; None: today in Taipei.
    day: date | None = None
    #: No contracts are there yet, as before the market opens (Sinotrade/Shioaji #19).
    missing: bool = False
    #: Contracts are there, but not yet their prices of the day.
    prices_due: bool = False
    #: Warrants more than the rules give: real lists have tens of thousands.
    extra_warrants: int = Field(default=0, ge=0, le=200_000)
    changes: dict[str, InstrumentChange] = Field(default_factory=dict)


class _Expiry(NamedTuple):
    """A listed month (`week` 0) or week."""

    last_day: date
    week: int = 0

    @property
    def month_code(self) -> str:
        return f"{_MONTHS[self.last_day.month - 1]}{self.last_day.year % 10}"

    @property
    def put_code(self) -> str:
        return f"{_PUT_MONTHS[self.last_day.month - 1]}{self.last_day.year % 10}"


class ExchangeInstruments:
    """The list of a day, with what admin calls have changed. Settings survive a restart."""

    def __init__(
        self,
        ledger: ExchangeLedger,
        first_price: Callable[[str], Decimal],
        now: Callable[[], int],
    ) -> None:
        """Takes `first_price`, which gives the price with which a share begins; `now` is in Unix
        milliseconds."""
        self._ledger = ledger
        self._first_price = first_price
        self._now = now
        kept = ledger.setting(_SETTING)
        self._settings = (
            InstrumentSettings.model_validate_json(kept) if kept else InstrumentSettings()
        )
        self._day: date | None = None
        self._listed: dict[str, Instrument] = {}
        self._codes: list[str] = []

    @property
    def settings(self) -> InstrumentSettings:
        return self._settings

    def set(self, settings: InstrumentSettings) -> None:
        self._ledger.save_setting(_SETTING, settings.model_dump_json())
        self._settings = settings
        self._day = None

    def find(self, code: str) -> Instrument | None:
        """Return a listed instrument, also while the list is missing: it still trades."""
        self._refresh()
        return self._listed.get(code)

    def page(self, after: str = "", limit: int = MAX_INSTRUMENTS_PER_PAGE) -> InstrumentPage:
        """Return the instruments behind a code.
        Raises `InstrumentsUnavailable` while the list is missing."""
        if self._settings.missing:
            raise InstrumentsUnavailable("the exchange has no contracts yet; ask again later")
        self._refresh()
        begin = bisect_right(self._codes, after)
        codes = self._codes[begin : begin + limit]
        ended = begin + limit >= len(self._codes)
        return InstrumentPage(
            instruments=tuple(self._shown(self._listed[code]) for code in codes),
            next_after="" if ended or not codes else codes[-1],
            taken_at_ms=self._now(),
            total=len(self._codes),
        )

    def _shown(self, instrument: Instrument) -> Instrument:
        if not self._settings.prices_due:
            return instrument
        return msgspec.structs.replace(
            instrument, reference=None, limit_up=None, limit_down=None, prices_due=True
        )

    def _refresh(self) -> None:
        today = datetime.fromtimestamp(self._now() / 1000, UTC).astimezone(HOME_ZONE).date()
        day = self._settings.day or today
        if self._day == day:
            return
        listed = (self._changed(instrument) for instrument in self._instruments(day))
        self._listed = {entry.code: entry for entry in listed if entry is not None}
        self._codes = sorted(self._listed)
        self._day = day

    def _changed(self, instrument: Instrument) -> Instrument | None:
        change = self._settings.changes.get(instrument.code)
        if change is None:
            return instrument
        if change.delisted:
            return None
        given = change.model_dump(exclude_none=True, exclude={"delisted"})
        changed = {name: getattr(instrument, name) for name in Instrument.__struct_fields__} | given
        if change.reference is not None:
            changed |= _limits(change.reference, changed["ticks"])
        return Instrument(**changed)

    # --- the rules
    # --------------------------------------------------------------------------------

    def _instruments(self, day: date) -> Iterator[Instrument]:
        data = _data()
        no_day_trade = frozenset(data["no_day_trade"]["codes"])
        for kind, names in (
            (InstrumentKind.STOCK, data["stocks"]),
            (InstrumentKind.FUND, data["funds"]),
        ):
            for code, name in names.items():
                yield self._share(code, name, kind, day_trade=code not in no_day_trade)
        for series in data["warrants"]:
            yield from self._warrants(series, day)
        for number in range(self._settings.extra_warrants):
            yield self._warrant(f"{_FIRST_EXTRA_CODE + number:06d}", "2330", day)
        for product in data["futures"]:
            yield from self._futures(product, day)
        for product in data["options"]:
            yield from self._options(product, day)

    def _share(self, code: str, name: str, kind: InstrumentKind, *, day_trade: bool) -> Instrument:
        ticks = _stock_ticks(code)
        reference = _on_tick(self._first_price(code), ticks)
        return Instrument(
            code=code,
            name=name,
            market="stock",
            kind=kind,
            lot_units=_SHARES_PER_LOT,
            lot_value=Decimal(_SHARES_PER_LOT),
            ticks=ticks,
            day_trade=day_trade,
            **_limits(reference, ticks),
        )

    def _warrants(self, series: dict[str, Any], day: date) -> Iterator[Instrument]:
        first, underlying = series["first"], series["underlying"]
        for number in range(series["calls"]):
            yield self._warrant(f"{first + number:06d}", underlying, day)
        for number in range(series["puts"]):
            yield self._warrant(f"{first // 10 + number:05d}P", underlying, day)

    def _warrant(self, code: str, underlying: str, day: date) -> Instrument:
        ticks = _stock_ticks(code)
        share = self._reference(underlying)
        reference = _on_tick(max(share * _WARRANT_RATIO / 10, Decimal("0.5")), ticks)
        kind = "售" if code.endswith("P") else "購"
        return Instrument(
            code=code,
            name=f"{_data()['stocks'][underlying]}{kind}{code[-3:]}",
            market="stock",
            kind=InstrumentKind.WARRANT,
            lot_units=_SHARES_PER_LOT,
            lot_value=Decimal(_SHARES_PER_LOT),
            ticks=ticks,
            day_trade=False,
            expires_on=_third_wednesday(*_month_after(day, 6)),
            underlying=underlying,
            **_limits(reference, ticks, share * _WARRANT_RATIO * _DAILY_LIMIT_SHARE),
        )

    def _futures(self, product: dict[str, Any], day: date) -> Iterator[Instrument]:
        underlying = product["underlying"]
        of_index = underlying in _data()["indices"]
        ticks = _tick_of(product) if of_index else _stock_ticks(underlying)
        reference = _on_tick(self._reference(underlying), ticks)
        expiries = _expiries(day, weekly=product.get("weekly", "") != "")
        # The nearest and the next month under rolling codes, too.
        rolling = [(f"{product['product']}R{n}", expiries[n - 1]) for n in (1, 2)]
        for code, expiry in [
            *((_future_code(product, expiry), expiry) for expiry in expiries),
            *rolling,
        ]:
            yield Instrument(
                code=code,
                name=f"{product['name']}{_series_name(expiry)}",
                market="futures",
                kind=InstrumentKind.FUTURE,
                lot_units=1,
                lot_value=Decimal(product["value"]),
                ticks=ticks,
                day_trade=of_index,
                expires_on=expiry.last_day,
                underlying=underlying,
                **_limits(reference, ticks),
            )

    def _options(self, product: dict[str, Any], day: date) -> Iterator[Instrument]:
        ticks = tuple(
            PriceStep(
                below=Decimal(step["below"]) if "below" in step else None,
                tick=Decimal(step["tick"]),
            )
            for step in product["ticks"]
        )
        index = self._reference(product["underlying"])
        step, strikes = product["strike_step"], product["strikes"]
        middle = int(index) // step * step
        for expiry in _expiries(day, weekly=True, months=2):
            head = f"{product['weekly']}{expiry.week}" if expiry.week else product["product"]
            for strike in range(middle - strikes * step, middle + strikes * step + 1, step):
                for is_put in (False, True):
                    month = expiry.put_code if is_put else expiry.month_code
                    within = (Decimal(strike) - index) * (1 if is_put else -1)
                    # The time value is highest at the money.
                    premium = max(within, Decimal(0)) + max(200 - abs(within) / 5, Decimal(1))
                    reference = _on_tick(premium, ticks)
                    yield Instrument(
                        code=f"{head}{strike:05d}{month}",
                        name=f"{product['name']}{_series_name(expiry)} {strike}"
                        f"{'賣權' if is_put else '買權'}",
                        market="futures",
                        kind=InstrumentKind.OPTION,
                        lot_units=1,
                        lot_value=Decimal(product["value"]),
                        ticks=ticks,
                        day_trade=False,
                        expires_on=expiry.last_day,
                        underlying=product["underlying"],
                        **_limits(reference, ticks, index * _DAILY_LIMIT_SHARE),
                    )

    def _reference(self, underlying: str) -> Decimal:
        index = _data()["indices"].get(underlying)
        if index is not None:
            return Decimal(index)
        return _on_tick(self._first_price(underlying), _stock_ticks(underlying))


@cache
def _data() -> dict[str, Any]:
    return tomllib.loads(_DATA.read_text(encoding="utf-8"))


@cache
def _stock_ticks(code: str) -> tuple[PriceStep, ...]:
    rule = home_broker().record.markets["stock"].symbol_rule(code)
    assert rule is not None, code  # noqa: S101 - the file has shares only
    return tuple(PriceStep(below=step.below, tick=step.tick) for step in rule.ticks)


def _tick_of(product: dict[str, Any]) -> tuple[PriceStep, ...]:
    return (PriceStep(tick=Decimal(product["tick"])),)


def _on_tick(price: Decimal, ticks: tuple[PriceStep, ...], up: bool = False) -> Decimal:
    """Return the nearest price of the table that is not above (`up`: not below) this one."""
    tick = tick_at(ticks, price) or Decimal(1)
    steps = (price / tick).to_integral_value(ROUND_CEILING if up else ROUND_FLOOR)
    return max(steps * tick, tick)


def _limits(
    reference: Decimal, ticks: tuple[PriceStep, ...], reach: Decimal | None = None
) -> dict[str, Any]:
    """Returns reference and limits; `reach` is how far they are from each other, if not by a share
    of the reference, as premiums follow the limits of what is underneath."""
    reach = reference * _DAILY_LIMIT_SHARE if reach is None else reach
    lowest = tick_at(ticks, Decimal(0)) or Decimal(1)
    return {
        "reference": reference,
        "limit_up": _on_tick(reference + reach, ticks),
        "limit_down": _on_tick(max(reference - reach, lowest), ticks, up=True),
    }


def _expiries(day: date, *, weekly: bool, months: int = _NEAR_MONTHS) -> list[_Expiry]:
    """Returns the contracts that trade on a day: months, quarters behind them, and the next
    weeks."""
    expiries: list[_Expiry] = []
    ahead = 0
    while len(expiries) < months:
        last = _third_wednesday(*_month_after(day, ahead))
        ahead += 1
        if last >= day:
            expiries.append(_Expiry(last))
    quarters = 0
    while quarters < _QUARTERS and months == _NEAR_MONTHS:
        year, month = _month_after(day, ahead)
        ahead += 1
        if month % 3 == 0:
            expiries.append(_Expiry(_third_wednesday(year, month)))
            quarters += 1
    if weekly:
        wednesday = day + timedelta(days=(_WEDNESDAY - day.weekday()) % 7)
        weeks = 0
        while weeks < _WEEKS_LISTED:
            week = (wednesday.day - 1) // 7 + 1
            if week != _THIRD_WEEK:
                expiries.append(_Expiry(wednesday, week))
                weeks += 1
            wednesday += timedelta(days=7)
    return expiries


def _month_after(day: date, months: int) -> tuple[int, int]:
    years, month = divmod(day.month - 1 + months, 12)
    return day.year + years, month + 1


def _third_wednesday(year: int, month: int) -> date:
    first = date(year, month, 1)
    return first + timedelta(days=(_WEDNESDAY - first.weekday()) % 7 + 14)


def _future_code(product: dict[str, Any], expiry: _Expiry) -> str:
    head = f"{product['weekly']}{expiry.week}" if expiry.week else product["product"]
    return f"{head}{expiry.month_code}"


def _series_name(expiry: _Expiry) -> str:
    week = f"W{expiry.week}" if expiry.week else ""
    return f"{expiry.last_day.year % 100:02d}{expiry.last_day.month:02d}{week}"
