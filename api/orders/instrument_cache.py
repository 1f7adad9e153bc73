"""The instruments that brokers have listed, for the pre-trade checks of this process.

An order costs no query where its code was asked for a moment ago, and none where its broker's
instruments were never loaded.
"""

import time
from collections.abc import Mapping
from datetime import date
from typing import NamedTuple

from infra.database.engine import Database
from infra.database.trading import instruments
from worker_runtime.protocol.instruments import Instrument

#: Seconds for which an answer counts: a new list or an approved lot takes effect after it.
CACHE_TTL_S = 30.0
#: Codes that are kept. A broker may list 30,000, most of them warrants and options.
MAX_CACHED_CODES = 20_000


class LoadedInstrument(NamedTuple):
    """Holds what the broker's list says of a code."""

    #: None: the list does not have the code.
    instrument: Instrument | None
    #: The trading day of each market's list; a market whose list was never loaded is not in it.
    list_days: Mapping[str, date]

    @property
    def list_day(self) -> date | None:
        """The trading day of the list that has the instrument."""
        return None if self.instrument is None else self.list_days.get(self.instrument.market)


_NO_LIST = LoadedInstrument(None, {})


class InstrumentCache:
    """Finds instruments, and keeps the answers for a while. Not for several threads."""

    def __init__(self, database: Database) -> None:
        self._database = database
        self._list_days: Mapping[str, Mapping[str, date]] = {}
        self._days_until = 0.0
        #: By broker and code: until when it counts (`time.monotonic`), and the answer.
        self._known: dict[tuple[str, str], tuple[float, LoadedInstrument]] = {}

    async def find(self, broker: str, code: str) -> LoadedInstrument:
        """Return what the broker's last list says. Raises `DatabaseUnavailable`."""
        now = time.monotonic()
        if self._days_until <= now:
            self._list_days = await self._read_days()
            self._days_until = now + CACHE_TTL_S
        list_days = self._list_days.get(broker)
        if list_days is None:
            return _NO_LIST
        until, known = self._known.get((broker, code), (0.0, _NO_LIST))
        if until > now:
            return known
        instrument = await self._database.read(instruments.find_instrument, broker, code)
        if len(self._known) >= MAX_CACHED_CODES:
            self._known.clear()
        known = LoadedInstrument(instrument, list_days)
        self._known[broker, code] = (now + CACHE_TTL_S, known)
        return known

    async def _read_days(self) -> Mapping[str, Mapping[str, date]]:
        days: dict[str, dict[str, date]] = {}
        for listed in await self._database.read(instruments.lists_in_force):
            days.setdefault(listed.broker, {})[listed.market] = listed.trading_day
        return days
