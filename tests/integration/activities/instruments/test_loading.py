"""Attempts to load a broker's list: whole or not at all, with every value checked."""

from __future__ import annotations

from collections.abc import AsyncIterator, Callable, Sequence
from datetime import UTC, date, datetime
from decimal import Decimal
from typing import Any
from zoneinfo import ZoneInfo

import msgspec
import pytest
from sqlalchemy import func, select, update
from temporalio.testing import ActivityEnvironment

from activities.instruments.loading import InstrumentActivities, find_due, find_fault
from infra.database import accounts, users
from infra.database.engine import Database
from infra.database.models import EncryptedCredentials
from infra.database.trading import instrument_loads, instruments
from infra.database.trading.models import InstrumentLoad, StagedInstrument
from infra.market.calendar import MarketCalendars
from worker_runtime.protocol.errors import BerthError, InstrumentsLoading, WorkerUnavailable
from worker_runtime.protocol.installed_brokers import installed_brokers
from worker_runtime.protocol.instruments import (
    Instrument,
    InstrumentKind,
    InstrumentPage,
    PriceStep,
)
from worker_runtime.protocol.messages import Answer
from worker_runtime.protocol.requests import ListInstruments
from workflows.instruments.messages import (
    LoadInstruments,
    LoadOutcome,
    PlanInstruments,
)

SEALED = EncryptedCredentials(ciphertext=b"c", nonce=b"n", wrapped_key=b"w", master_key_id="k")
#: A Monday, on which Taiwan's markets open at 08:30 and 08:45.
DAY = date(2026, 11, 23)
TAIPEI = ZoneInfo("Asia/Taipei")
HOUR = 3600.0


def stock(code: str, **changes: Any) -> Instrument:
    given = Instrument(
        code=code,
        market="stock",
        kind=InstrumentKind.STOCK,
        lot_units=1000,
        lot_value=Decimal(1000),
    )
    return msgspec.structs.replace(given, **changes)


LISTED = [stock(str(code)) for code in range(1000, 1010)]


class ListingWorker:
    """Answers `ListInstruments` with pages of four; `faults` are raised first, in turn."""

    def __init__(self, listed: Sequence[Instrument], *faults: BerthError) -> None:
        self.listed = list(listed)
        self.faults = list(faults)
        self.requests: list[ListInstruments] = []
        #: Replaces the page after this code.
        self.replaced: dict[str, InstrumentPage] = {}

    async def call(
        self, user_id: str, make_request: Callable[[str, str], ListInstruments], timeout: float
    ) -> Answer:
        request = make_request("r", "g")
        self.requests.append(request)
        if self.faults:
            raise self.faults.pop(0)
        return Answer(
            request_id="r", instruments=self.replaced.get(request.after) or self.page(request.after)
        )

    def page(self, after: str) -> InstrumentPage:
        later = [instrument for instrument in self.listed if instrument.code > after]
        return InstrumentPage(
            instruments=tuple(later[:4]),
            next_after=later[3].code if len(later) > 4 else "",
            taken_at_ms=1_795_410_000_000,
            total=len(self.listed),
        )


@pytest.fixture
async def database(migrated_database: str) -> AsyncIterator[Database]:
    database = Database(migrated_database, pool_wait=30.0)
    async with database.session() as session:
        await users.create_user(session, "lists")
        await accounts.put_account(
            session,
            user_id="lists",
            account_id="main",
            broker="paper",
            broker_type="stock",
            simulation=True,
            encrypted=SEALED,
        )
        await instrument_loads.set_source(session, "paper", "lists", "main", actor="op")
    yield database
    await database.close()


async def attempt(database: Database, worker: ListingWorker, **given: Any) -> LoadOutcome:
    activities = InstrumentActivities(database, MarketCalendars(), worker.call)
    request = LoadInstruments(broker="paper", day=DAY.isoformat(), **given)
    return await ActivityEnvironment().run(activities.load_instruments, request)


async def codes_in_force(database: Database) -> list[str]:
    rows = await database.fetch(
        instruments.search_instruments, instruments.InstrumentSearch(broker="paper")
    )
    return [row.code for row in rows]


async def test_a_list_of_several_pages_comes_into_force(database: Database) -> None:
    worker = ListingWorker(LISTED, InstrumentsLoading(), InstrumentsLoading())
    outcome = await attempt(database, worker)
    assert (outcome.loaded, outcome.instruments, outcome.added) == (True, 10, 10)
    assert [request.after for request in worker.requests] == ["", "", "", "1003", "1007"]
    assert {(each.user_id, each.account_id) for each in worker.requests} == {("lists", "main")}
    assert len(await codes_in_force(database)) == 10


async def test_a_load_that_breaks_off_leaves_the_former_list_whole(database: Database) -> None:
    await attempt(database, ListingWorker(LISTED))
    other = ListingWorker([stock(f"A{code}") for code in range(10)])
    calls = 0

    async def broken(
        user_id: str, make_request: Callable[[str, str], ListInstruments], timeout: float
    ) -> Answer:
        nonlocal calls
        calls += 1
        if calls == 3:
            raise WorkerUnavailable("no answer of the worker")
        return await other.call(user_id, make_request, timeout)

    activities = InstrumentActivities(database, MarketCalendars(), broken)
    request = LoadInstruments(broker="paper", day="2026-11-24")
    outcome = await ActivityEnvironment().run(activities.load_instruments, request)
    assert (outcome.loaded, outcome.code) == (False, "WORKER_UNAVAILABLE")
    assert await codes_in_force(database) == [each.code for each in LISTED]
    async with database.session() as session:
        assert await session.scalar(select(func.count()).select_from(StagedInstrument)) == 0
        last, _ = await instrument_loads.latest_loads(session)
        assert (last.state, last.error) == ("failed", "no answer of the worker")
    # The next attempt begins with the first page.
    assert (await attempt(database, other)).loaded
    assert "1000" not in await codes_in_force(database)


@pytest.mark.parametrize(
    ("page", "code"),
    [
        (
            InstrumentPage(instruments=(stock("1002"),), total=5, taken_at_ms=1_795_410_000_000),
            "INSTRUMENT_LIST_REFUSED",
        ),
        (
            InstrumentPage(instruments=(stock("1004"),), total=10, taken_at_ms=1_795_410_000_001),
            "INSTRUMENT_LIST_CHANGED",
        ),
        (
            InstrumentPage(instruments=(stock("1004"),), total=10, taken_at_ms=1_795_410_000_000),
            "INSTRUMENT_LIST_REFUSED",
        ),
        (
            InstrumentPage(
                instruments=(stock("1004", market="moon"),),
                total=5,
                taken_at_ms=1_795_410_000_000,
            ),
            "INSTRUMENT_LIST_REFUSED",
        ),
    ],
    ids=["codes fall", "another list", "too few", "no such market"],
)
async def test_a_page_that_does_not_fit_ends_the_attempt(
    database: Database, page: InstrumentPage, code: str
) -> None:
    worker = ListingWorker(LISTED)
    worker.replaced["1003"] = page
    outcome = await attempt(database, worker)
    assert (outcome.loaded, outcome.code) == (False, code)
    assert await codes_in_force(database) == []


async def test_a_much_smaller_list_is_refused_until_an_operator_takes_it(
    database: Database,
) -> None:
    await attempt(database, ListingWorker(LISTED))
    outcome = await attempt(database, ListingWorker(LISTED[:4]))
    assert (outcome.loaded, outcome.code) == (False, "INSTRUMENT_LIST_REFUSED")
    assert len(await codes_in_force(database)) == 10
    [last] = await database.fetch(instrument_loads.last_ended)
    assert last.state == "refused"
    assert (await attempt(database, ListingWorker(LISTED[:4]), accept_smaller=True)).loaded
    assert len(await codes_in_force(database)) == 4


@pytest.mark.parametrize(
    ("changes", "fault"),
    [
        ({}, None),
        (
            {"ticks": (PriceStep(below=Decimal(5), tick=Decimal(1)), PriceStep(tick=Decimal(2)))},
            None,
        ),
        ({"limit_down": Decimal(0), "limit_up": Decimal(0)}, None),
        ({"market": "moon"}, "market"),
        ({"ticks": (PriceStep(below=Decimal(5), tick=Decimal(1)),)}, "without an end"),
        ({"ticks": (PriceStep(tick=Decimal(1)), PriceStep(tick=Decimal(2)))}, "without an end"),
        (
            {
                "ticks": (
                    PriceStep(below=Decimal(5), tick=Decimal(1)),
                    PriceStep(below=Decimal(5), tick=Decimal(1)),
                    PriceStep(tick=Decimal(2)),
                )
            },
            "do not rise",
        ),
        ({"limit_down": Decimal(2), "limit_up": Decimal(1)}, "above the upper one"),
        ({"lot_value": Decimal("0.0000001")}, "decimals"),
        ({"ticks": (PriceStep(tick=Decimal("0.0000001")),)}, "decimals"),
    ],
)
def test_every_value_of_an_instrument_is_checked(
    changes: dict[str, Any], fault: str | None
) -> None:
    markets = installed_brokers()["paper"].record.markets
    reason = find_fault(stock("2330", **changes), markets)
    assert (reason is None) if fault is None else (reason is not None and fault in reason)


def at(hour: int, minute: int, day: date = DAY) -> float:
    return datetime(day.year, day.month, day.day, hour, minute, tzinfo=TAIPEI).timestamp()


@pytest.mark.parametrize(
    ("now", "due"),
    [
        (at(6, 0), False),
        (at(7, 30), True),
        (at(13, 0), True),
        (at(23, 59), True),
        (at(9, 0, date(2026, 11, 22)), False),  # a Sunday
        (at(9, 0, date(2026, 1, 1)), False),
    ],
)
def test_a_load_is_due_ahead_of_the_first_market_until_the_day_ends(now: float, due: bool) -> None:
    load = find_due(MarketCalendars(), "paper", now, 1.5 * HOUR)
    assert (load is not None) == due
    if load is not None:
        assert load.day == DAY.isoformat()
        assert datetime.fromtimestamp(load.until, UTC) == datetime(2026, 11, 23, 16, tzinfo=UTC)
    assert find_due(MarketCalendars(), "nobody", now, HOUR) is None


class Looks:
    """Looks at which lists are due, and the loads between them."""

    def __init__(self, database: Database) -> None:
        self._database = database

    async def due_at(self, now: float) -> list[tuple[str, str, str]]:
        worker = ListingWorker(LISTED)
        activities = InstrumentActivities(self._database, MarketCalendars(), worker.call)
        request = PlanInstruments(lead=1.5 * HOUR, at=now)
        plan = await ActivityEnvironment().run(activities.plan_instruments, request)
        return [(load.broker, load.market, load.day) for load in plan.loads]

    async def load_at(self, now: float, *listed: Instrument) -> None:
        assert (await attempt(self._database, ListingWorker(listed))).loaded
        async with self._database.session() as session:
            last = select(func.max(InstrumentLoad.id)).scalar_subquery()
            begin = update(InstrumentLoad).where(InstrumentLoad.id == last)
            await session.execute(begin.values(began_at=datetime.fromtimestamp(now, UTC)))


@pytest.fixture
def looks(database: Database) -> Looks:
    return Looks(database)


async def test_a_broker_is_due_until_its_list_of_the_day_is_in_force(looks: Looks) -> None:
    assert await looks.due_at(at(8, 0)) == [("paper", "stock", "2026-11-23")]
    await looks.load_at(at(8, 0), *LISTED)
    assert await looks.due_at(at(8, 15)) == []
    tomorrow = date(2026, 11, 24)
    assert await looks.due_at(at(8, 0, tomorrow)) == [("paper", "stock", "2026-11-24")]


async def test_a_load_by_hand_before_the_lead_is_not_the_load_of_the_day(looks: Looks) -> None:
    await looks.load_at(at(0, 30), *LISTED)
    assert await looks.due_at(at(0, 45)) == []
    assert await looks.due_at(at(7, 0)) == [("paper", "stock", "2026-11-23")]
    await looks.load_at(at(7, 0), *LISTED)
    assert await looks.due_at(at(7, 15)) == []


async def test_a_list_without_the_prices_of_the_day_is_loaded_again_until_it_has_them(
    looks: Looks, database: Database
) -> None:
    late = [msgspec.structs.replace(each, prices_due=True) for each in LISTED]
    await looks.load_at(at(7, 0), *late)
    assert len(await codes_in_force(database)) == 10
    assert await looks.due_at(at(7, 15)) == [("paper", "stock", "2026-11-23")]
    # A suspended one never gets prices.
    await looks.load_at(at(8, 0), *LISTED[:9], late[9])
    assert await looks.due_at(at(8, 15)) == []


async def test_kinds_whose_prices_come_late_make_the_list_due_though_they_are_few(
    looks: Looks,
) -> None:
    fund = stock("0050", kind=InstrumentKind.FUND, prices_due=True)
    await looks.load_at(at(7, 0), fund, *LISTED)
    assert await looks.due_at(at(7, 15)) == [("paper", "stock", "2026-11-23")]


async def test_prices_that_never_come_end_the_loads_while_the_market_is_open(looks: Looks) -> None:
    await looks.load_at(at(8, 15), *(msgspec.structs.replace(e, prices_due=True) for e in LISTED))
    assert await looks.due_at(at(10, 15)) == [("paper", "stock", "2026-11-23")]
    assert await looks.due_at(at(10, 30)) == []
