"""A load through a real worker, which lists what the paper exchange has, into PostgreSQL."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Iterator
from datetime import date
from decimal import Decimal
from pathlib import Path

import pytest
from redis.asyncio import Redis
from temporalio.client import Client
from temporalio.testing import ActivityEnvironment

from activities.instruments.loading import InstrumentActivities
from activities.worker_calls import WorkerCaller
from infra.database import accounts, users
from infra.database.engine import Database
from infra.database.models import EncryptedCredentials
from infra.database.trading import instrument_loads, instruments
from infra.database.trading.instruments import InstrumentSearch
from infra.database.trading.models import InstrumentRow
from infra.exchange.client import ExchangeAdmin, ExchangeServer
from infra.exchange.instruments import InstrumentSettings
from infra.lab.shioaji import keys
from infra.local.servers import ValkeyServer
from infra.market.calendar import MarketCalendars
from infra.settings import Settings
from infra.temporal.starter import WorkerStarter
from tests.support.message_signing import SECRETS
from tests.support.workers.harness import WorkerHarness
from worker_runtime.protocol.instruments import Instrument, InstrumentKind
from workflows.instruments.messages import LoadInstruments, LoadOutcome

SEALED = EncryptedCredentials(ciphertext=b"c", nonce=b"n", wrapped_key=b"w", master_key_id="k")


@pytest.fixture
def exchange(short_directory: Path) -> Iterator[ExchangeServer]:
    with ExchangeServer(short_directory / "exchange") as server:
        yield server


@pytest.fixture
def harness(
    valkey_server: ValkeyServer, valkey_client: Redis, tmp_path: Path
) -> Iterator[WorkerHarness]:
    harness = WorkerHarness(valkey_server.url, tmp_path)
    yield harness
    harness.close()


@pytest.fixture
async def database(migrated_database: str, harness: WorkerHarness) -> AsyncIterator[Database]:
    database = Database(migrated_database, pool_wait=30.0)
    async with database.session() as session:
        await users.create_user(session, harness.user)
        await accounts.put_account(
            session,
            user_id=harness.user,
            account_id="a1",
            broker="paper",
            broker_type="stock",
            simulation=True,
            encrypted=SEALED,
        )
        await instrument_loads.set_source(session, "paper", harness.user, "a1", actor="op")
    yield database
    await database.close()


def connect_worker(harness: WorkerHarness, exchange: ExchangeServer) -> None:
    worker = harness.launch(command=["-m", "worker_runtime"], paper_exchange=exchange.address)
    harness.await_ready(worker)
    harness.broker = "paper"
    assert harness.claim(worker, accounts={"a1": "good"}).failure is None


def connect_stand_in(
    harness: WorkerHarness, exchange: ExchangeServer, folder: Path, market: str
) -> None:
    """Connects a worker whose SDK of Shioaji is the stand-in that has the exchange's contracts."""
    keys.write_package(folder, exchange.address)
    with keys.on_python_path(folder):
        worker = harness.launch(command=["-m", "worker_runtime"])
        harness.await_ready(worker)
    harness.broker, harness.broker_type = "shioaji", market
    harness.secret_key = keys.SECRET_KEY
    assert harness.claim(worker, accounts={"listed": keys.api_key_of("listed")}).failure is None


async def load_through_worker(
    database: Database, valkey_client: Redis, broker: str, market: str
) -> LoadOutcome:
    # It is not used: the user has a worker.
    starter = WorkerStarter(await Client.connect("127.0.0.1:1", lazy=True), Settings())
    caller = WorkerCaller(valkey_client, database, starter, SECRETS)
    activities = InstrumentActivities(database, MarketCalendars(), caller.call)
    request = LoadInstruments(broker=broker, day="2026-11-23", market=market)
    return await ActivityEnvironment().run(activities.load_instruments, request)


@pytest.mark.timeout(120)
async def test_the_exchanges_whole_list_comes_into_force_and_a_changed_lot_waits(
    harness: WorkerHarness, exchange: ExchangeServer, database: Database, valkey_client: Redis
) -> None:
    other_lot = Instrument(
        code="2330",
        market="stock",
        kind=InstrumentKind.STOCK,
        lot_units=500,
        lot_value=Decimal(500),
    )
    async with database.session() as session:
        known = instruments.told_values(other_lot)
        session.add(InstrumentRow(broker="paper", loaded_on=date(2026, 11, 20), **known))
    async with ExchangeAdmin(exchange.admin_url) as admin:
        await admin.register("a1", "good", "s")
        await admin.set_instruments(InstrumentSettings(extra_warrants=1000))
    await asyncio.to_thread(connect_worker, harness, exchange)
    outcome = await load_through_worker(database, valkey_client, "paper", "stock")

    assert outcome.loaded, outcome
    assert outcome.instruments == outcome.added + 1 > 1000
    for kind in (InstrumentKind.FUTURE, InstrumentKind.OPTION, InstrumentKind.WARRANT):
        search = InstrumentSearch(broker="paper", kind=kind, limit=1)
        assert await database.fetch(instruments.search_instruments, search), kind
    stock = await database.fetch(instruments.find_instrument, "paper", "2330")
    assert stock is not None
    assert (stock.lot_units, stock.lot_value) == (500, Decimal(500))
    assert stock.reference is not None  # of the exchange's list
    [change] = await database.fetch(instrument_loads.open_changes)
    assert (change.code, change.old_lot_units, change.new_lot_units) == ("2330", 500, 1000)


@pytest.mark.needs("shioaji")
@pytest.mark.timeout(120)
@pytest.mark.parametrize("late", [True, False])
@pytest.mark.parametrize(
    ("market", "code", "other_code"),
    [("stock", "2330", "TXO20000A6"), ("futures", "TXO20000A6", "2330")],
)
async def test_an_account_of_shioaji_lists_its_own_market_and_no_prices_of_yesterday(
    harness: WorkerHarness,
    exchange: ExchangeServer,
    database: Database,
    valkey_client: Redis,
    tmp_path: Path,
    market: str,
    code: str,
    other_code: str,
    late: bool,
) -> None:
    async with database.session() as session:
        await accounts.put_account(
            session,
            user_id=harness.user,
            account_id="listed",
            broker="shioaji",
            broker_type=market,
            simulation=True,
            encrypted=SEALED,
        )
        await instrument_loads.set_source(session, "shioaji", harness.user, "listed", actor="op")
    async with ExchangeAdmin(exchange.admin_url) as admin:
        await admin.register("listed", keys.api_key_of("listed"), keys.SECRET_KEY)
        january = InstrumentSettings(day=date(2026, 1, 5), prices_due=late)
        await admin.set_instruments(january)
    packages = tmp_path / "packages"
    packages.mkdir()
    await asyncio.to_thread(connect_stand_in, harness, exchange, packages, market)
    outcome = await load_through_worker(database, valkey_client, "shioaji", market)

    assert (outcome.loaded, outcome.pending) == (True, 0), outcome
    [load] = await database.fetch(instrument_loads.latest_of_each)
    assert (load.markets, load.prices_due) == ([market], late)
    listed = await database.fetch(instruments.find_instrument, "shioaji", code)
    assert listed is not None
    for price in (listed.reference, listed.limit_up, listed.limit_down):
        assert (price is None) == late
    assert await database.fetch(instruments.find_instrument, "shioaji", other_code) is None
