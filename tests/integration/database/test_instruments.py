"""Instruments in PostgreSQL: finding and searching, loads that switch at once, changed lots."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from datetime import date
from decimal import Decimal

import msgspec
import pytest
from sqlalchemy import func, select, text

from infra.database import accounts, users
from infra.database.engine import Database
from infra.database.models import AuditEntry, EncryptedCredentials
from infra.database.trading import instrument_loads, instruments
from infra.database.trading.instrument_loads import (
    InstrumentChangeNotFound,
    InstrumentListRefused,
    InstrumentSourceBusy,
    InstrumentSourceMissing,
    InstrumentSourceTrades,
    LoadSuperseded,
    SwitchedList,
)
from infra.database.trading.instruments import InstrumentSearch
from infra.database.trading.models import InstrumentLoad, InstrumentRow, StagedInstrument
from tests.support.workflows.fakes import until
from worker_runtime.protocol.instruments import Instrument, InstrumentKind, PriceStep

SEALED = EncryptedCredentials(ciphertext=b"c", nonce=b"n", wrapped_key=b"w", master_key_id="k")
DAY, NEXT_DAY = date(2026, 11, 23), date(2026, 11, 24)
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


async def test_an_instrument_is_found_with_all_that_its_broker_listed(database: Database) -> None:
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
        rows = await instruments.search_instruments(session, search)
        assert [row.code for row in rows] == codes


async def test_the_list_of_a_market_is_the_last_one_that_has_it_and_went_through(
    database: Database,
) -> None:
    async with database.session() as session:
        session.add_all(
            InstrumentLoad(
                broker=broker,
                market="stock",
                user_id="lists",
                account_id="a",
                trading_day=date(2026, 11, day),
                state=state,
                markets=markets,
            )
            for broker, day, state, markets in (
                ("paper", 20, "loaded", ["futures", "stock"]),
                ("paper", 23, "loaded", ["stock"]),
                ("paper", 24, "refused", []),
                ("quay", 24, "running", []),
            )
        )
    assert await list_days(database) == {
        ("paper", "futures"): date(2026, 11, 20),
        ("paper", "stock"): DAY,
    }


async def list_days(database: Database) -> dict[tuple[str, str], date]:
    """Returns the trading day of the list of each broker and market."""
    in_force = await database.fetch(instruments.lists_in_force)
    return {(listed.broker, listed.market): listed.trading_day for listed in in_force}


# --- loads


async def put_user(
    database: Database, user_id: str = "lists", *, broker_type: str = "stock"
) -> None:
    async with database.session() as session:
        await users.create_user(session, user_id)
        await accounts.put_account(
            session,
            user_id=user_id,
            account_id="main",
            broker="paper",
            broker_type=broker_type,
            simulation=True,
            encrypted=SEALED,
        )


@pytest.fixture
async def source(database: Database) -> Database:
    """A database with an account that lists the instruments of paper."""
    await put_user(database)
    async with database.session() as session:
        await instrument_loads.set_source(session, "paper", "lists", "main", actor="op")
    return database


async def load(
    database: Database,
    *listed: Instrument,
    day: date = DAY,
    market: str = "",
    accept_smaller: bool = False,
) -> SwitchedList:
    begun = await database.write(instrument_loads.begin_load, "paper", day, market)
    for instrument in listed:  # a page each
        await database.write(instrument_loads.stage_page, begun.id, [instrument])
    return await database.write(
        instrument_loads.switch_list, begun.id, accept_smaller=accept_smaller
    )


async def a_statement_waits(database: Database) -> bool:
    """Returns True if a statement of this database waits for a lock."""
    waiting = text(
        "select count(*) from pg_stat_activity"
        " where datname = current_database() and wait_event_type = 'Lock'"
    )
    async with database.session(autocommit=True) as session:
        return bool(await session.scalar(waiting))


async def in_force(database: Database, code: str) -> Instrument | None:
    return await database.fetch(instruments.find_instrument, "paper", code)


async def test_a_list_is_in_force_all_at_once_when_its_last_page_came(source: Database) -> None:
    begun = await source.write(instrument_loads.begin_load, "paper", DAY)
    await source.write(instrument_loads.stage_page, begun.id, [STOCK])
    assert await in_force(source, "2330") is None
    await source.write(instrument_loads.stage_page, begun.id, [OPTION])
    switched = await source.write(instrument_loads.switch_list, begun.id)
    assert switched == SwitchedList(instruments=2, added=2, removed=0, pending=0)
    assert (await in_force(source, "2330"), await in_force(source, OPTION.code)) == (STOCK, OPTION)
    assert await list_days(source) == {("paper", "futures"): DAY, ("paper", "stock"): DAY}
    async with source.session() as session:
        assert await session.scalar(select(func.count()).select_from(StagedInstrument)) == 0
        [ended] = await instrument_loads.latest_loads(session)
        assert (ended.state, ended.instruments, ended.error) == ("loaded", 2, "")


async def test_a_later_list_replaces_prices_and_unlists_what_it_does_not_have(
    source: Database,
) -> None:
    delisted = msgspec.structs.replace(STOCK, code="2317")
    await load(source, STOCK, delisted)
    dearer = msgspec.structs.replace(STOCK, reference=Decimal(950), limit_up=Decimal(1045))
    switched = await load(source, dearer, day=NEXT_DAY)
    assert switched == SwitchedList(instruments=1, added=0, removed=1, pending=0)
    assert await in_force(source, "2330") == dearer
    assert await in_force(source, "2317") is None
    row = await source.fetch(instruments.find_row, "paper", "2317")
    assert row is not None
    assert (row.listed, row.loaded_on) == (False, DAY)
    await load(source, STOCK, delisted, day=NEXT_DAY)
    assert await in_force(source, "2317") == delisted


async def test_a_list_of_one_market_leaves_the_other_as_it_was(source: Database) -> None:
    """A broker's accounts may list their own market only."""
    await put_user(source, "lists-futures", broker_type="futures")
    async with source.session() as session:
        await instrument_loads.set_source(session, "paper", "lists-futures", "main", actor="op")
    options = [
        msgspec.structs.replace(OPTION, code=f"TXO{strike}A6") for strike in range(20000, 20010)
    ]
    await load(source, *options, market="futures")
    changed = msgspec.structs.replace(options[0], lot_value=Decimal(10))
    assert (await load(source, changed, *options[1:], market="futures")).pending == 1

    # Neither its size nor its codes are compared with those of the other market.
    switched = await load(source, STOCK, day=NEXT_DAY, market="stock")
    assert (switched.added, switched.removed, switched.pending) == (1, 0, 1)
    assert await in_force(source, options[9].code) == options[9]
    assert await list_days(source) == {("paper", "futures"): DAY, ("paper", "stock"): NEXT_DAY}
    with pytest.raises(InstrumentListRefused, match="market futures"):
        await load(source, options[0], day=NEXT_DAY, market="futures")
    await load(source, options[0], day=NEXT_DAY, market="futures", accept_smaller=True)
    assert await in_force(source, "2330") == STOCK
    assert await in_force(source, options[9].code) is None


async def test_loads_of_two_markets_run_at_the_same_time(source: Database) -> None:
    await put_user(source, "lists-futures", broker_type="futures")
    async with source.session() as session:
        await instrument_loads.set_source(session, "paper", "lists-futures", "main", actor="op")
    begun = [
        await source.write(instrument_loads.begin_load, "paper", DAY, market)
        for market in ("stock", "futures")
    ]
    assert [load.user_id for load in begun] == ["lists", "lists-futures"]
    for load_begun, listed in zip(begun, (STOCK, OPTION), strict=True):
        await source.write(instrument_loads.stage_page, load_begun.id, [listed])
        await source.write(instrument_loads.switch_list, load_begun.id)
    ended = await source.fetch(instrument_loads.latest_of_each)
    assert [(load.market, load.markets, load.state) for load in ended] == [
        ("futures", ["futures"], "loaded"),
        ("stock", ["stock"], "loaded"),
    ]


async def test_a_worker_lists_one_market_after_the_other(source: Database) -> None:
    async with source.session() as session:
        await accounts.put_account(
            session,
            user_id="lists",
            account_id="derivatives",
            broker="paper",
            broker_type="futures",
            simulation=True,
            encrypted=SEALED,
        )
        await instrument_loads.set_source(session, "paper", "lists", "derivatives", actor="op")
    first = await source.write(instrument_loads.begin_load, "paper", DAY, "stock")
    with pytest.raises(InstrumentSourceBusy, match="market stock"):
        await source.write(instrument_loads.begin_load, "paper", DAY, "futures")
    await source.write(instrument_loads.end_load, first.id, refused=False, error="no answer")
    second = await source.write(instrument_loads.begin_load, "paper", DAY, "futures")
    assert second.account_id == "derivatives"


async def test_a_list_that_is_empty_or_much_smaller_leaves_the_former_one(source: Database) -> None:
    others = [msgspec.structs.replace(STOCK, code=str(code)) for code in range(1000, 1005)]
    await load(source, *others)
    for listed in ((), others[:2]):
        with pytest.raises(InstrumentListRefused):
            await load(source, *listed, day=NEXT_DAY)
    assert await list_days(source) == {("paper", "stock"): DAY}
    assert await in_force(source, "1004") == others[4]
    with pytest.raises(InstrumentListRefused, match="no instrument"):
        await load(source, day=NEXT_DAY, accept_smaller=True)
    await load(source, *others[:2], day=NEXT_DAY, accept_smaller=True)
    assert await in_force(source, "1004") is None


async def test_a_changed_lot_waits_for_an_operator_while_the_old_one_is_in_force(
    source: Database,
) -> None:
    await load(source, STOCK, OPTION)
    smaller = msgspec.structs.replace(
        STOCK, lot_units=100, lot_value=Decimal(100), reference=Decimal(950)
    )
    assert (await load(source, smaller, OPTION, day=NEXT_DAY)).pending == 1
    kept = await in_force(source, "2330")
    assert kept == msgspec.structs.replace(STOCK, reference=Decimal(950))
    [change] = await source.fetch(instrument_loads.open_changes)
    assert (change.old_lot_units, change.new_lot_units, change.since) == (1000, 100, NEXT_DAY)

    # The same list again is the same change.
    await load(source, smaller, OPTION, day=date(2026, 11, 25))
    [again] = await source.fetch(instrument_loads.open_changes)
    assert (again.id, again.since) == (change.id, NEXT_DAY)

    await source.write(instrument_loads.approve_change, change.id, actor="op", reason="announced")
    assert await in_force(source, "2330") == smaller
    assert await source.fetch(instrument_loads.open_changes) == []
    with pytest.raises(InstrumentChangeNotFound):
        await source.write(instrument_loads.approve_change, change.id, actor="op", reason="again")
    assert (await load(source, smaller, OPTION, day=date(2026, 11, 25))).pending == 0
    async with source.session() as session:
        entry = await session.scalar(
            select(AuditEntry).filter_by(action="instrument_change.approved")
        )
        assert entry is not None
        assert (entry.actor, entry.data["new_lot_units"]) == ("op", 100)


def future(code: str, value: int) -> Instrument:
    return Instrument(
        code=code,
        market="futures",
        kind=InstrumentKind.FUTURE,
        lot_units=1,
        lot_value=Decimal(value),
    )


async def test_a_new_month_with_another_multiplier_than_its_record_waits_for_an_operator(
    source: Database,
) -> None:
    """Also in the first list of all."""
    wrong = future("TXFA7", 20)
    assert (await load(source, wrong, future("MXFA7", 50))).pending == 1
    assert await in_force(source, "TXFA7") == future("TXFA7", 200)
    [change] = await source.fetch(instrument_loads.open_changes)
    assert change.code == "TXFA7"
    assert (change.old_lot_value, change.new_lot_value) == (Decimal(200), Decimal(20))
    assert (await load(source, wrong, future("MXFA7", 50), day=NEXT_DAY)).pending == 1
    await source.write(instrument_loads.approve_change, change.id, actor="op", reason="announced")
    assert await in_force(source, "TXFA7") == wrong
    # The next month has the lot that an operator has approved.
    later = [wrong, future("MXFA7", 50), future("TXFB7", 20)]
    assert (await load(source, *later, day=NEXT_DAY)).pending == 0
    assert await in_force(source, "TXFB7") == later[2]


async def test_a_new_month_of_a_product_that_the_record_does_not_value_has_the_lot_in_force(
    source: Database,
) -> None:
    share_future = future("CDFL6", 2000)
    assert (await load(source, share_future)).pending == 0
    assert (await load(source, share_future, future("CDFA7", 1), day=NEXT_DAY)).pending == 1
    assert await in_force(source, "CDFA7") == future("CDFA7", 2000)
    # Another product is not compared with it.
    others = [share_future, future("CDFA7", 2000), future("CD1A7", 1900)]
    assert (await load(source, *others, day=NEXT_DAY)).pending == 0
    assert await in_force(source, "CD1A7") == others[2]


async def test_a_new_share_with_another_lot_than_its_record_waits_for_an_operator(
    source: Database,
) -> None:
    small = msgspec.structs.replace(STOCK, lot_units=100, lot_value=Decimal(100))
    assert (await load(source, small)).pending == 1
    assert await in_force(source, "2330") == STOCK


async def test_a_change_that_a_later_list_takes_back_cannot_be_approved(source: Database) -> None:
    await load(source, STOCK)
    await load(source, msgspec.structs.replace(STOCK, lot_value=Decimal(2000)))
    [change] = await source.fetch(instrument_loads.open_changes)
    await load(source, msgspec.structs.replace(STOCK, lot_value=Decimal(3000)))
    [other] = await source.fetch(instrument_loads.open_changes)
    assert (other.old_lot_value, other.new_lot_value) == (Decimal(1000), Decimal(3000))
    with pytest.raises(InstrumentChangeNotFound):  # an operator says yes to what they saw
        await source.write(instrument_loads.approve_change, change.id, actor="op", reason="late")
    await load(source, STOCK)
    assert await source.fetch(instrument_loads.open_changes) == []
    assert await in_force(source, "2330") == STOCK


async def test_a_lot_that_is_approved_while_a_list_is_put_in_force_is_asked_about_once(
    source: Database,
) -> None:
    await load(source, STOCK)
    smaller = msgspec.structs.replace(STOCK, lot_units=100, lot_value=Decimal(100))
    await load(source, smaller)
    [change] = await source.fetch(instrument_loads.open_changes)
    begun = await source.write(instrument_loads.begin_load, "paper", NEXT_DAY)
    await source.write(instrument_loads.stage_page, begun.id, [smaller])
    async with source.session() as session:
        await instrument_loads.approve_change(session, change.id, actor="op", reason="announced")
        switch = asyncio.create_task(source.write(instrument_loads.switch_list, begun.id))
        await until(lambda: a_statement_waits(source))
    assert (await switch).pending == 0
    assert await source.fetch(instrument_loads.open_changes) == []
    assert await in_force(source, "2330") == smaller


async def test_a_newer_load_ends_an_older_one_which_puts_nothing_in_force(source: Database) -> None:
    older = await source.write(instrument_loads.begin_load, "paper", DAY)
    await source.write(instrument_loads.stage_page, older.id, [OPTION])
    newer = await source.write(instrument_loads.begin_load, "paper", DAY)
    with pytest.raises(LoadSuperseded):
        await source.write(instrument_loads.stage_page, older.id, [STOCK])
    with pytest.raises(LoadSuperseded):
        await source.write(instrument_loads.switch_list, older.id)
    await source.write(instrument_loads.stage_page, newer.id, [STOCK])
    assert (await source.write(instrument_loads.switch_list, newer.id)).instruments == 1
    assert await in_force(source, OPTION.code) is None


async def test_two_switches_of_a_broker_at_once_leave_one_whole_list(source: Database) -> None:
    await load(source, STOCK, OPTION)
    begun = await source.write(instrument_loads.begin_load, "paper", NEXT_DAY)
    await source.write(instrument_loads.stage_page, begun.id, [STOCK, OPTION])
    outcomes = await asyncio.gather(
        *(source.write(instrument_loads.switch_list, begun.id) for _ in range(2)),
        return_exceptions=True,
    )
    assert sorted(type(outcome).__name__ for outcome in outcomes) == [
        "LoadSuperseded",
        "SwitchedList",
    ]
    assert set((await list_days(source)).values()) == {NEXT_DAY}


# --- the account that lists


async def test_a_user_who_trades_or_may_trade_lists_no_instruments(database: Database) -> None:
    await put_user(database, "lists")

    async def refused(match: str) -> None:
        with pytest.raises(InstrumentSourceTrades, match=match):
            await database.write(instrument_loads.set_source, "paper", "lists", "main", actor="op")

    for scopes, role in (("{}", "user"), ("{read,trade}", "scoped_user")):
        async with database.session() as session:
            await session.execute(
                text(
                    "insert into api_keys (id, key_hash, prefix, role, scopes, user_id) values"
                    " (gen_random_uuid(), :hash, 'p', :role, :scopes, 'lists')"
                ),
                {"hash": role, "role": role, "scopes": scopes.strip("{}").split(",")},
            )
        await refused("API key")
        async with database.session() as session:
            await session.execute(text("update api_keys set revoked_at = now()"))
    async with database.session() as session:
        await session.execute(
            text(
                "insert into api_keys (id, key_hash, prefix, role, scopes, user_id) values"
                " (gen_random_uuid(), 'reads', 'p', 'scoped_user', '{read}', 'lists')"
            )
        )
    await database.write(instrument_loads.set_source, "paper", "lists", "main", actor="op")
    async with database.session() as session:
        await session.execute(text("update users set disabled_at = now()"))
    await refused("disabled")


async def test_a_source_is_an_account_of_its_broker_and_stays_when_that_is_removed(
    database: Database,
) -> None:
    await put_user(database)
    for broker, account_id in (("harbour", "main"), ("paper", "other")):
        with pytest.raises(InstrumentSourceMissing):
            await database.write(
                instrument_loads.set_source, broker, "lists", account_id, actor="op"
            )
    with pytest.raises(InstrumentSourceMissing):
        await database.write(instrument_loads.begin_load, "paper", DAY)
    await database.write(instrument_loads.set_source, "paper", "lists", "main", actor="op")
    [source] = await database.fetch(instrument_loads.list_sources)
    assert (source.user_id, source.account_id, source.set_by) == ("lists", "main", "op")
    assert source.market == "stock"
    assert await database.fetch(instrument_loads.removed_sources) == []
    await database.write(accounts.remove_account, "lists", "main", actor="op", reason="moved")
    [removed] = await database.fetch(instrument_loads.removed_sources)
    assert (removed.broker, removed.market, removed.account_id) == ("paper", "stock", "main")
    with pytest.raises(InstrumentSourceMissing, match="was removed"):
        await database.write(instrument_loads.begin_load, "paper", DAY)
    await database.write(instrument_loads.delete_source, "paper", actor="op")
    assert await database.fetch(instrument_loads.removed_sources) == []
