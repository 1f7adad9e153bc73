"""The instruments that brokers list, as they were loaded last: finding one, and searching.

Not here: how a list is loaded and switched to (`instrument_loads.py`).
"""

from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass
from datetime import date
from typing import Any, NamedTuple

import msgspec
from sqlalchemy import func, or_, select
from sqlalchemy.dialects.postgresql import distinct_on
from sqlalchemy.ext.asyncio import AsyncSession

from infra.database.trading.models import InstrumentLoad, InstrumentRow
from worker_runtime.protocol.errors import BerthError
from worker_runtime.protocol.instruments import Instrument, InstrumentKind, PriceStep

#: Columns of an instrument as its broker tells it. Whether its prices are due is kept of the list.
TOLD_COLUMNS = tuple(name for name in Instrument.__struct_fields__ if name != "prices_due")


class InstrumentNotFound(BerthError, code="INSTRUMENT_NOT_FOUND", status=404):
    """Neither the broker's last list nor a recent one has this instrument."""


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


class ListInForce(NamedTuple):
    """The list of a market's instruments that is in force."""

    broker: str
    market: str
    trading_day: date
    #: The market of the account that listed it. Some brokers' accounts list all markets.
    source_market: str

    @property
    def sources(self) -> frozenset[tuple[str, str]]:
        """Broker and market of the accounts that load it, where they are designated."""
        return frozenset({(self.broker, self.market), (self.broker, self.source_market)})


async def find_instrument(session: AsyncSession, broker: str, code: str) -> Instrument | None:
    """Return an instrument with the values in force; None if the last list does not have it.

    A changed lot is in force once an operator has approved it. One look-up by the primary key.
    """
    row = await session.get(InstrumentRow, (broker, code))
    return as_instrument(row) if row is not None and row.listed else None


async def find_futures(
    session: AsyncSession, broker: str, markets: Collection[str], product: str
) -> Mapping[str, date]:
    """Return the futures in a broker's markets whose codes begin with a product, and their last
    days."""
    row = InstrumentRow
    futures = select(row.code, row.expires_on).where(
        row.broker == broker,
        row.market.in_(markets),
        row.code.startswith(product, autoescape=True),
        row.listed,
        row.kind == InstrumentKind.FUTURE.value,
        row.expires_on.is_not(None),
    )
    return {code: last_day for code, last_day in await session.execute(futures) if last_day}


async def find_row(session: AsyncSession, broker: str, code: str) -> InstrumentRow | None:
    """Return an instrument with its dates, also one that the broker no longer lists."""
    return await session.get(InstrumentRow, (broker, code))


async def lists_in_force(session: AsyncSession) -> Sequence[ListInForce]:
    """Return the list of each broker and market that has one, by broker and market."""
    load = InstrumentLoad
    market = func.unnest(load.markets).column_valued("listed_market", joins_implicitly=True)
    query = (
        select(load.broker, market, load.trading_day, load.market)
        .where(load.state == "loaded")
        .ext(distinct_on(load.broker, market))
        .order_by(load.broker, market, load.trading_day.desc(), load.id.desc())
    )
    return [ListInForce(*row) for row in await session.execute(query)]


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
    values = {name: getattr(instrument, name) for name in TOLD_COLUMNS}
    return values | {
        "kind": instrument.kind.value,
        "ticks": msgspec.to_builtins(instrument.ticks),
    }
