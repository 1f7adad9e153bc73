"""The activities of the loads of instruments: which brokers are due, and one attempt."""

import asyncio
import time
from collections import Counter
from collections.abc import AsyncIterator, Awaitable, Callable, Mapping
from dataclasses import replace
from datetime import UTC, date, datetime, timedelta
from decimal import Decimal

import structlog
from temporalio import activity
from temporalio.exceptions import ApplicationError

from activities.heartbeat import beating
from infra.database.engine import Database
from infra.database.trading import instrument_loads
from infra.database.trading.instrument_loads import InstrumentListChanged, InstrumentListRefused
from infra.database.trading.models import InstrumentLoad
from infra.market.calendar import MarketCalendars, zone_of_market
from worker_runtime.protocol.broker_record import MarketRule
from worker_runtime.protocol.errors import BerthError, InstrumentsLoading
from worker_runtime.protocol.installed_brokers import installed_brokers
from worker_runtime.protocol.instruments import Instrument, InstrumentKind, InstrumentPage
from worker_runtime.protocol.messages import Answer
from worker_runtime.protocol.requests import ListInstruments
from workflows.instruments.messages import (
    DueLoad,
    InstrumentsPlan,
    LoadInstruments,
    LoadOutcome,
    PlanInstruments,
)

#: Seconds that a worker may take for a page.
PAGE_TIMEOUT_S = 30.0
#: Seconds that a session may take to read the list at its broker.
READ_TIMEOUT_S = 600.0
#: Seconds after a market has begun to take orders for which a list without the prices of the day is
#: loaded again, at each look. Brokers have them before: Shioaji at 07:50 and 08:00, of 08:30.
PRICES_TIMEOUT_S = 2 * 3600.0
#: Instruments of a broker's list. A session holds at most 100,000
#: (`worker_runtime/trading/instrument_lists.py`); a worker that was broken into may say anything.
#: To switch to so many takes PostgreSQL 6 s on a busy machine; a statement may take 10 s.
MAX_INSTRUMENTS = 100_000
#: The smallest step that a column holds (`Numeric(18, 6)`).
_MIN_DECIMAL_STEP = Decimal("0.000001")

log = structlog.get_logger()

#: Calls the worker of a user; like `WorkerCaller.call`.
CallWorker = Callable[[str, Callable[[str, str], ListInstruments], float], Awaitable[Answer]]


class InstrumentActivities:
    """Activities `plan_instruments` and `load_instruments`. Both may be repeated."""

    def __init__(
        self, database: Database, calendars: MarketCalendars, call_worker: CallWorker
    ) -> None:
        self._database = database
        self._calendars = calendars
        self._call_worker = call_worker

    @activity.defn
    async def plan_instruments(self, request: PlanInstruments) -> InstrumentsPlan:
        due = []
        for source in await self._database.fetch(instrument_loads.list_sources):
            load = find_due(self._calendars, source.broker, request.at, request.lead)
            if load is None:
                continue
            is_loaded = await self._database.fetch(
                instrument_loads.is_loaded,
                source.broker,
                source.market,
                date.fromisoformat(load.day),
                since=datetime.fromtimestamp(load.since, UTC),
                with_prices=request.at < load.since + request.lead + PRICES_TIMEOUT_S,
            )
            if not is_loaded:
                due.append(replace(load, market=source.market))
        return InstrumentsPlan(loads=tuple(due))

    @activity.defn
    async def load_instruments(self, request: LoadInstruments) -> LoadOutcome:
        """Loads a list in one attempt, from the first page on. A list comes into force as a whole
        or not at all."""
        try:
            day = date.fromisoformat(request.day)
        except ValueError as error:
            raise ApplicationError(str(error), type="INVALID_DAY", non_retryable=True) from None
        try:
            async with beating():
                return await self._load(request, day)
        except BerthError as error:
            log.warning(
                "instruments_not_loaded",
                broker=request.broker,
                market=request.market,
                code=error.code,
                reason=error.detail[:300],
            )
            return LoadOutcome(loaded=False, code=error.code, detail=error.detail[:500])

    async def _load(self, request: LoadInstruments, day: date) -> LoadOutcome:
        load = await self._database.write(
            instrument_loads.begin_load, request.broker, day, request.market
        )
        listed: Counter[InstrumentKind] = Counter()
        without_prices: Counter[InstrumentKind] = Counter()
        try:
            async for page in self._pages(load):
                await self._database.write(instrument_loads.stage_page, load.id, page.instruments)
                listed.update(instrument.kind for instrument in page.instruments)
                without_prices.update(
                    instrument.kind for instrument in page.instruments if instrument.prices_due
                )
            switched = await self._database.write(
                instrument_loads.switch_list,
                load.id,
                accept_smaller=request.accept_smaller,
                # Of a kind: brokers update one after the other. Single ones may be suspended.
                prices_due=any(without_prices[kind] * 2 > count for kind, count in listed.items()),
            )
        except BerthError as error:
            refused = isinstance(error, InstrumentListRefused)
            await self._database.write(
                instrument_loads.end_load, load.id, refused=refused, error=error.detail
            )
            raise
        log.info(
            "instruments_loaded",
            broker=request.broker,
            market=load.market,
            day=request.day,
            instruments=switched.instruments,
            added=switched.added,
            removed=switched.removed,
            pending=switched.pending,
        )
        return LoadOutcome(
            loaded=True,
            instruments=switched.instruments,
            added=switched.added,
            removed=switched.removed,
            pending=switched.pending,
        )

    async def _pages(self, load: InstrumentLoad) -> AsyncIterator[InstrumentPage]:
        """Yields the pages of one list, each of them checked. Raises `InstrumentListRefused`."""
        plugin = installed_brokers().get(load.broker)
        if plugin is None:
            raise InstrumentListRefused(f"The broker {load.broker} is not installed here.")
        after, count, taken_at_ms = "", 0, None
        while True:
            page = await self._page(load, after)
            if taken_at_ms not in (None, page.taken_at_ms):
                raise InstrumentListChanged  # the session was replaced
            taken_at_ms = page.taken_at_ms
            for instrument in page.instruments:
                if instrument.code <= after:
                    raise InstrumentListRefused(
                        f"{load.broker} listed {instrument.code} after {after}: codes must rise."
                    )
                after = instrument.code
                if (reason := find_fault(instrument, plugin.record.markets)) is not None:
                    raise InstrumentListRefused(f"{load.broker} listed {after} with {reason}.")
            count += len(page.instruments)
            if count > MAX_INSTRUMENTS:
                raise InstrumentListRefused(
                    f"{load.broker} listed more than {MAX_INSTRUMENTS:,} instruments."
                )
            yield page
            if not page.next_after:
                break
        if count != page.total:
            raise InstrumentListRefused(
                f"{load.broker} listed {count} instruments, and said that it has {page.total}."
            )

    async def _page(self, load: InstrumentLoad, after: str) -> InstrumentPage:
        """Waits while the session reads the list at the broker."""

        def request(request_id: str, generation: str) -> ListInstruments:
            return ListInstruments(
                request_id=request_id,
                user_id=load.user_id,
                account_id=load.account_id,
                reply_to="",
                generation=generation,
                after=after,
            )

        began = time.monotonic()
        while True:
            try:
                answer = await self._call_worker(load.user_id, request, PAGE_TIMEOUT_S)
            except InstrumentsLoading:
                if time.monotonic() - began > READ_TIMEOUT_S:
                    raise
                await asyncio.sleep(InstrumentsLoading.RETRY_AFTER_S)
                continue
            if answer.instruments is None:
                raise BerthError("the worker answered without instruments")
            return answer.instruments


def find_due(calendars: MarketCalendars, broker: str, at: float, lead: float) -> DueLoad | None:
    """Return the load of today if a market of the broker trades today and takes orders within
    `lead` seconds, or has begun to; None if none does.

    `at`: Unix seconds. The day is the market's; of several markets the first that opens decides.
    """
    plugin = installed_brokers().get(broker)
    if plugin is None:
        return None
    begins = []
    for market, rule in plugin.record.markets.items():
        zone = zone_of_market(rule.zone)
        day = datetime.fromtimestamp(at, zone).date()
        calendar = calendars.find(broker, market)
        if calendar is None or not calendar.trades_on(day):
            continue
        hours = calendar.changed.get(day) or calendar.day_hours(market)
        opens = datetime.combine(day, hours.opens, zone).timestamp()
        midnight = datetime.combine(day + timedelta(days=1), datetime.min.time(), zone).timestamp()
        begins.append((opens - lead, day.isoformat(), midnight))
    if not begins or min(begins)[0] > at:
        return None
    since, first_day, until = min(begins)
    return DueLoad(broker=broker, day=first_day, until=until, since=since)


def find_fault(instrument: Instrument, markets: Mapping[str, MarketRule]) -> str | None:
    """Return what is impossible in an instrument, in words; None if nothing is.

    The message's own bounds were checked when it was decoded: these are the ones that need the
    broker's record, or the columns.
    """
    if instrument.market not in markets:
        return f"the market {instrument.market!r}, which is not in the broker's record"
    bounds = [step.below for step in instrument.ticks]
    known = [below for below in bounds if below is not None]
    if bounds and (bounds[-1] is not None or len(known) != len(bounds) - 1):
        return "ticks of which not only the last one is without an end"
    if sorted(set(known)) != known:
        return "ticks whose bounds do not rise"
    low, high = instrument.limit_down, instrument.limit_up
    if low is not None and high is not None and low > high:
        return f"a lower limit of {low}, above the upper one of {high}"
    columns = (instrument.lot_value, instrument.reference, low, high)
    for value in (*columns, *known, *(step.tick for step in instrument.ticks)):
        if value is not None and value != value.quantize(_MIN_DECIMAL_STEP):
            return f"the value {value}, which has more than 6 decimals"
    return None
