"""Shows operators the lists of instruments, and begins the loads that they ask for."""

import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from datetime import date

from temporalio.client import Client
from temporalio.common import WorkflowIDConflictPolicy, WorkflowIDReusePolicy

from api.instruments.schemas import (
    InstrumentLoadView,
    InstrumentSourceView,
    LoadsBegunView,
)
from infra.database.engine import Database
from infra.database.trading import instrument_loads, instruments
from infra.database.trading.instrument_loads import InstrumentSourceMissing
from infra.database.trading.models import InstrumentLoad, InstrumentSource
from infra.market.calendar import MarketCalendars
from infra.market.list_age import latest_trading_day, missed_trading_days
from infra.temporal.client import RPC_TIMEOUT, temporal_errors
from workflows import names
from workflows.instruments.messages import InstrumentLoadInput, LoadNow

#: Seconds for which a load that an operator has begun is tried again.
LOAD_TIMEOUT_S = 4 * 3600.0


@dataclass(frozen=True)
class InstrumentLists:
    """The lists of all brokers: whose account loads them, and how old they are."""

    temporal: Client
    database: Database
    calendars: MarketCalendars

    async def sources(self) -> list[InstrumentSourceView]:
        """Return each market of a broker with an account that lists, or listed."""
        async with self.database.session(autocommit=True) as session:
            sources = await instrument_loads.list_sources(session)
            removed = await instrument_loads.removed_sources(session)
            loads = await instrument_loads.latest_of_each(session)
            in_force = await instruments.lists_in_force(session)
        source_of = {(source.broker, source.market): source for source in sources}
        removed_markets = {(source.broker, source.market) for source in removed}
        load_of = {(load.broker, load.market): load for load in loads}
        return [
            self._view(
                broker,
                market,
                source_of.get((broker, market)),
                load_of.get((broker, market)),
                (broker, market) in removed_markets,
                [listed.trading_day for listed in in_force if (broker, market) in listed.sources],
            )
            for broker, market in sorted(source_of.keys() | load_of.keys())
        ]

    async def missed_days(self) -> Mapping[tuple[str, str], int]:
        """Return how many trading days the list of each broker and market is old that has one, and
        an account that is designated to load it, though it was removed."""
        async with self.database.session(autocommit=True) as session:
            sources = await instrument_loads.list_sources(session)
            in_force = await instruments.lists_in_force(session)
        designated = {(source.broker, source.market) for source in sources}
        return {
            (listed.broker, listed.market): missed_trading_days(
                self.calendars, listed.broker, listed.trading_day, time.time()
            )
            for listed in in_force
            if listed.sources & designated
        }

    async def require_markets(self, broker: str, market: str = "") -> tuple[date, list[str]]:
        """Return the trading day of loads that begin now, and the markets whose accounts list.
        Raises `InstrumentSourceMissing`, and `InstrumentSourceTrades`."""
        sources = await self.database.fetch(instrument_loads.require_sources, broker, market)
        day = latest_trading_day(self.calendars, broker, time.time())
        if day is None:
            raise InstrumentSourceMissing(f"The broker {broker} is not installed here.")
        return day, [source.market for source in sources]

    async def begin_loads(
        self, broker: str, day: date, markets: Sequence[str], *, accept_smaller: bool
    ) -> LoadsBegunView:
        """Begin a load through each market's account, or let one that waits make its next attempt
        now. Raises `TemporalUnavailable`."""
        workflow_ids = [
            await self._begin_load(broker, day, market, accept_smaller) for market in markets
        ]
        return LoadsBegunView(broker=broker, trading_day=day, workflow_ids=workflow_ids)

    async def _begin_load(self, broker: str, day: date, market: str, accept_smaller: bool) -> str:
        workflow_id = names.instrument_load_id(broker, day.isoformat(), market)
        given = InstrumentLoadInput(
            broker=broker,
            day=day.isoformat(),
            market=market,
            until=time.time() + LOAD_TIMEOUT_S,
        )
        with temporal_errors():
            await self.temporal.start_workflow(
                names.INSTRUMENT_LOAD,
                given,
                id=workflow_id,
                task_queue=names.BULK_QUEUE,
                id_conflict_policy=WorkflowIDConflictPolicy.USE_EXISTING,
                id_reuse_policy=WorkflowIDReusePolicy.ALLOW_DUPLICATE,
                start_signal="load_now",
                start_signal_args=[LoadNow(accept_smaller=accept_smaller)],
                static_summary=f"loads the instruments of {broker} for {day}",
                rpc_timeout=RPC_TIMEOUT,
            )
        return workflow_id

    def _view(
        self,
        broker: str,
        market: str,
        source: InstrumentSource | None,
        load: InstrumentLoad | None,
        account_removed: bool,
        list_days: Sequence[date],
    ) -> InstrumentSourceView:
        loaded_on = min(list_days, default=None)
        missed = None
        if loaded_on is not None:
            missed = missed_trading_days(self.calendars, broker, loaded_on, time.time())
        return InstrumentSourceView(
            broker=broker,
            market=market,
            user_id=source.user_id if source else None,
            account_id=source.account_id if source else None,
            account_removed=account_removed,
            set_by=source.set_by if source else None,
            set_at=source.set_at if source else None,
            loaded_on=loaded_on,
            missed_days=missed,
            last_load=InstrumentLoadView.model_validate(load) if load else None,
        )
