"""What operators see of the lists of instruments, and loads that they begin."""

import time
from collections.abc import Mapping
from dataclasses import dataclass
from datetime import date

from temporalio.client import Client
from temporalio.common import WorkflowIDConflictPolicy, WorkflowIDReusePolicy

from api.instruments.schemas import (
    InstrumentLoadView,
    InstrumentSourceView,
    LoadBegunView,
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
        """Return each broker with an account that lists, or with a list."""
        async with self.database.session(autocommit=True) as session:
            sources = {
                source.broker: source for source in await instrument_loads.list_sources(session)
            }
            loads = {load.broker: load for load in await instrument_loads.latest_of_each(session)}
            days = await instruments.list_days(session)
        brokers = sorted(sources.keys() | loads.keys())
        return [
            self._view(broker, sources.get(broker), loads.get(broker), days) for broker in brokers
        ]

    async def missed_days(self) -> Mapping[str, int]:
        """Return how many trading days the list of each broker is old that has one, and an account
        that loads it."""
        async with self.database.session(autocommit=True) as session:
            sources = await instrument_loads.list_sources(session)
            days = await instruments.list_days(session)
        return {
            source.broker: missed_trading_days(
                self.calendars, source.broker, days[source.broker], time.time()
            )
            for source in sources
            if source.broker in days
        }

    async def require_source(self, broker: str) -> date:
        """Return the trading day of a load that begins now. Raises `InstrumentSourceMissing`, and
        `InstrumentSourceTrades`."""
        await self.database.fetch(instrument_loads.require_source, broker)
        day = latest_trading_day(self.calendars, broker, time.time())
        if day is None:
            raise InstrumentSourceMissing(f"The broker {broker} is not installed here.")
        return day

    async def begin_load(self, broker: str, day: date, *, accept_smaller: bool) -> LoadBegunView:
        """Begin a load, or let one that waits make its next attempt now. Raises
        `TemporalUnavailable`."""
        workflow_id = names.instrument_load_id(broker, day.isoformat())
        given = InstrumentLoadInput(
            broker=broker, day=day.isoformat(), until=time.time() + LOAD_TIMEOUT_S
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
        return LoadBegunView(broker=broker, trading_day=day, workflow_id=workflow_id)

    def _view(
        self,
        broker: str,
        source: InstrumentSource | None,
        load: InstrumentLoad | None,
        days: Mapping[str, date],
    ) -> InstrumentSourceView:
        loaded_on = days.get(broker)
        missed = None
        if loaded_on is not None:
            missed = missed_trading_days(self.calendars, broker, loaded_on, time.time())
        return InstrumentSourceView(
            broker=broker,
            user_id=source.user_id if source else None,
            account_id=source.account_id if source else None,
            set_by=source.set_by if source else None,
            set_at=source.set_at if source else None,
            loaded_on=loaded_on,
            missed_days=missed,
            last_load=InstrumentLoadView.model_validate(load) if load else None,
        )
