"""Instruments in PostgreSQL: finding and searching, loads that switch at once, changed lots."""

from __future__ import annotations

from collections.abc import AsyncIterator
from datetime import date
from decimal import Decimal

import pytest

from infra.database.engine import Database
from infra.database.trading import instruments
from infra.database.trading.instruments import InstrumentSearch
from infra.database.trading.models import InstrumentLoad, InstrumentRow
from worker_runtime.protocol.instruments import Instrument, InstrumentKind, PriceStep

DAY = date(2026, 11, 23)
STOCK = Instrument(
    code="2330",
    name="台積電",
    market="stock",
    kind=InstrumentKind.STOCK,
    lot_units=1000,
    lot_value=Decimal(1000),
    ticks=(PriceStep(below=Decimal("10.5"), tick=Decimal("0.01")), PriceStep(tick=Decimal("0.05"))),
    reference=Decimal("912.5"),
    limit_up=Decimal(1000),
    limit_down=Decimal("821.5"),
    day_trade=True,
)
OPTION = Instrument(
    code="TXO20000A6",
    name="TAIEX call 20000",
    market="futures",
    kind=InstrumentKind.OPTION,
    lot_units=1,
    lot_value=Decimal(50),
    expires_on=date(2027, 1, 20),
    underlying="TX",
)


@pytest.fixture
async def database(migrated_database: str) -> AsyncIterator[Database]:
    database = Database(migrated_database, pool_wait=30.0)
    yield database
    await database.close()


async def put_listed(database: Database, *listed: Instrument, broker: str = "paper") -> None:
    async with database.session() as session:
        session.add_all(
            InstrumentRow(broker=broker, loaded_on=DAY, **instruments.told_values(instrument))
            for instrument in listed
        )


async def test_an_instrument_is_found_with_all_that_its_broker_told(database: Database) -> None:
    await put_listed(database, STOCK, OPTION)
    async with database.session() as session:
        assert await instruments.find_instrument(session, "paper", "2330") == STOCK
        assert await instruments.find_instrument(session, "paper", "TXO20000A6") == OPTION
        assert await instruments.find_instrument(session, "paper", "2331") is None
        assert await instruments.find_instrument(session, "harbour", "2330") is None


async def test_an_instrument_that_is_not_listed_any_more_is_found_with_its_dates_only(
    database: Database,
) -> None:
    await put_listed(database, STOCK)
    async with database.session() as session:
        (await session.get_one(InstrumentRow, ("paper", "2330"))).listed = False
    async with database.session() as session:
        assert await instruments.find_instrument(session, "paper", "2330") is None
        row = await instruments.find_row(session, "paper", "2330")
        assert row is not None
        assert (row.loaded_on, row.listed) == (DAY, False)
        assert await instruments.search_instruments(session, InstrumentSearch(text="2330")) == []


@pytest.mark.parametrize(
    ("search", "codes"),
    [
        (InstrumentSearch(), ["2330", "TXO20000A6", "ACME"]),
        (InstrumentSearch(text="23"), ["2330"]),
        (InstrumentSearch(text="txo2"), ["TXO20000A6"]),
        (InstrumentSearch(text="CALL"), ["TXO20000A6"]),
        (InstrumentSearch(text="積電"), ["2330"]),
        (InstrumentSearch(text="%"), []),
        (InstrumentSearch(kind="option"), ["TXO20000A6"]),
        (InstrumentSearch(market="stock", broker="paper"), ["2330"]),
        (InstrumentSearch(after=("paper", "2330")), ["TXO20000A6", "ACME"]),
        (InstrumentSearch(after=("paper", "TXO20000A6")), ["ACME"]),
        (InstrumentSearch(limit=2), ["2330", "TXO20000A6"]),
    ],
)
async def test_a_search_takes_the_beginning_of_a_code_or_a_part_of_a_name(
    database: Database, search: InstrumentSearch, codes: list[str]
) -> None:
    await put_listed(database, STOCK, OPTION)
    acme = Instrument(
        code="ACME",
        market="spot",
        kind=InstrumentKind.STOCK,
        lot_units=1,
        lot_value=Decimal(1),
    )
    await put_listed(database, acme, broker="quay")
    async with database.session() as session:
        found = await instruments.search_instruments(session, search)
        assert [row.code for row in found] == codes


async def test_the_day_of_a_table_is_that_of_the_last_load_that_went_through(
    database: Database,
) -> None:
    async with database.session() as session:
        session.add_all(
            InstrumentLoad(
                broker=broker,
                user_id="lists",
                account_id="a",
                trading_day=date(2026, 11, day),
                state=state,
            )
            for broker, day, state in (
                ("paper", 20, "loaded"),
                ("paper", 23, "loaded"),
                ("paper", 24, "refused"),
                ("quay", 24, "running"),
            )
        )
    async with database.session() as session:
        assert await instruments.list_days(session) == {"paper": DAY}
