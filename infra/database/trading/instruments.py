"""The instruments that brokers list, as they were loaded last: finding one, and searching.

Not here: how a list is loaded and switched to (`instrument_loads.py`).
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from datetime import date
from typing import Any

import msgspec
from sqlalchemy import func, or_, select
from sqlalchemy.ext.asyncio import AsyncSession

from infra.database.trading.models import InstrumentLoad, InstrumentRow
from worker_runtime.protocol.errors import BerthError
from worker_runtime.protocol.instruments import Instrument, InstrumentKind, PriceStep

#: Columns of an instrument as its broker tells it, but for the code.
TOLD_COLUMNS = tuple(name for name in Instrument.__struct_fields__ if name != "code")


class InstrumentNotFound(BerthError, code="INSTRUMENT_NOT_FOUND", status=404):
    """The broker's last list does not have this instrument, nor had an earlier one of late."""


@dataclass(frozen=True, kw_only=True)
class InstrumentSearch:
    """What is searched for; a field that is empty restricts nothing."""

    broker: str = ""
    #: The beginning of a code, or a part of a name; the case of letters does not matter.
    text: str = ""
    market: str = ""
    kind: str = ""
    #: Broker and code of the last one that the caller has.
    after: tuple[str, str] = ("", "")
    limit: int = 100


async def find_instrument(session: AsyncSession, broker: str, code: str) -> Instrument | None:
    """Return an instrument with the values in force; None if the last list does not have it.

    A changed lot is in force once an operator has approved it. One look-up by the primary key.
    """
    row = await session.get(InstrumentRow, (broker, code))
    return as_instrument(row) if row is not None and row.listed else None


async def find_futures(session: AsyncSession, broker: str, product: str) -> Mapping[str, date]:
    """Return the listed futures whose codes begin with a product, and their last days."""
    row = InstrumentRow
    futures = select(row.code, row.expires_on).where(
        row.broker == broker,
        row.code.startswith(product, autoescape=True),
        row.listed,
        row.kind == InstrumentKind.FUTURE.value,
        row.expires_on.is_not(None),
    )
    return {code: last_day for code, last_day in await session.execute(futures) if last_day}


async def find_row(session: AsyncSession, broker: str, code: str) -> InstrumentRow | None:
    """Return an instrument with its dates, also one that the broker no longer lists."""
    return await session.get(InstrumentRow, (broker, code))


async def list_days(session: AsyncSession) -> Mapping[str, date]:
    """Return the trading day of each broker's table; a broker without one is not in it."""
    load = InstrumentLoad
    loaded = select(load.broker, func.max(load.trading_day)).where(load.state == "loaded")
    rows = await session.execute(loaded.group_by(load.broker))
    return {broker: day for broker, day in rows}


async def search_instruments(
    session: AsyncSession, search: InstrumentSearch
) -> Sequence[InstrumentRow]:
    """Return the next listed instruments that fit, by broker and code."""
    row = InstrumentRow
    query = select(row).where(row.listed).order_by(row.broker, row.code).limit(search.limit)
    for column, value in (
        (row.broker, search.broker),
        (row.market, search.market),
        (row.kind, search.kind),
    ):
        if value:
            query = query.where(column == value)
    if search.text:
        prefix = row.code.istartswith(search.text, autoescape=True)
        query = query.where(or_(prefix, row.name.icontains(search.text, autoescape=True)))
    broker, code = search.after
    if broker:
        query = query.where(or_(row.broker > broker, (row.broker == broker) & (row.code > code)))
    return (await session.scalars(query)).all()


def as_instrument(row: InstrumentRow) -> Instrument:
    """Return a row as the protocol has it."""
    return Instrument(
        code=row.code,
        name=row.name,
        market=row.market,
        kind=InstrumentKind(row.kind),
        lot_units=row.lot_units,
        lot_value=row.lot_value,
        ticks=msgspec.convert(row.ticks, tuple[PriceStep, ...]),
        reference=row.reference,
        limit_up=row.limit_up,
        limit_down=row.limit_down,
        expires_on=row.expires_on,
        day_trade=row.day_trade,
        underlying=row.underlying,
    )


def told_values(instrument: Instrument) -> dict[str, Any]:
    """Return the columns of `ToldInstrument` and the code."""
    values = {name: getattr(instrument, name) for name in Instrument.__struct_fields__}
    return values | {
        "kind": instrument.kind.value,
        "ticks": msgspec.to_builtins(instrument.ticks),
    }
