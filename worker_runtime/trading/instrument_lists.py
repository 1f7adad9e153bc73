"""Reads a broker's list of instruments, holds it for a while, and answers pages of it.

A list has tens of thousands of entries and may take the broker seconds. So it is read in a thread
of its own, in slices with pauses in between: an order that comes meanwhile goes first. Requests
for pages are answered from memory, or with `INSTRUMENTS_LOADING`.
"""

import threading
import time
from bisect import bisect_right, insort
from collections import Counter
from collections.abc import Iterable
from dataclasses import dataclass, field

import msgspec

from worker_runtime.brokers.port import Instrument, ListsInstruments
from worker_runtime.process.clock import wall_ms
from worker_runtime.process.log import Log
from worker_runtime.protocol.errors import (
    BerthError,
    BrokerUnreachable,
    InstrumentsLoading,
    InstrumentsTooMany,
    InstrumentsUnavailable,
    InstrumentsUnsupported,
    SessionDown,
)
from worker_runtime.protocol.instruments import MAX_PAGE_BYTES
from worker_runtime.protocol.requests import ListInstruments
from worker_runtime.trading.broker_calls import BrokerCalls
from worker_runtime.trading.queue_item import QueueItem
from worker_runtime.trading.rate_limiter import CallKind

#: Instruments in one slice, about half a millisecond of work, and seconds until the next one.
_INSTRUMENTS_PER_SLICE, _SLICE_INTERVAL_S = 20, 0.001

_encoder = msgspec.json.Encoder()
_decoder = msgspec.json.Decoder(Instrument)


@dataclass(frozen=True)
class ListBounds:
    """Limits how much of a list a session holds, and for how long."""

    #: An instrument has about 330 bytes as JSON, so this bound is reached first. Longer lists are
    #: refused as a whole (`INSTRUMENTS_TOO_MANY`): a part of one would look like a list from which
    #: instruments have vanished.
    max_instruments: int = 100_000
    max_bytes: int = 40 * 1024 * 1024
    #: Seconds within which another first page takes the list in memory, instead of asking the
    #: broker.
    fresh_s: float = 60.0
    #: Seconds without a request after which a list is forgotten, and its memory is free.
    kept_s: float = 600.0
    #: Seconds that reading a list may take.
    load_timeout_s: float = 180.0


class EncodedPage(msgspec.Struct, frozen=True, kw_only=True):
    """An `InstrumentPage` whose instruments are JSON already. An order waits while the session's
    loop writes a page: 0.3 ms, where decoding 200 warrants first takes 27 (on a busy machine)."""

    instruments: list[msgspec.Raw]
    next_after: str
    taken_at_ms: int
    total: int


class HeldList:
    """A broker's list as it is held: the instruments as JSON, by rising code."""

    def __init__(self, taken_at_ms: int, bounds: ListBounds) -> None:
        self.taken_at_ms = taken_at_ms
        self._bounds = bounds
        self.size_bytes = 0
        self._codes: list[str] = []
        #: By code: market and JSON.
        self._entries: dict[str, tuple[str, bytes]] = {}
        self._totals: Counter[str] = Counter()

    def __len__(self) -> int:
        return len(self._codes)

    def add(self, instrument: Instrument) -> bool:
        """Add an instrument; return False if its code is there already. Raises
        `InstrumentsTooMany`, and `msgspec.MsgspecError` or `ValueError` if it makes no sense."""
        data = _encoder.encode(instrument)
        _decoder.decode(data)  # adapters make structs, whose bounds only a decoder checks
        if instrument.code in self._entries:
            return False
        count, size = self._bounds.max_instruments, self._bounds.max_bytes
        if len(self) >= count or self.size_bytes + len(data) > size:
            raise InstrumentsTooMany(
                f"The broker lists more than {count} instruments or {size} bytes of them, which "
                "is all that a worker holds. Nothing of the list was taken."
            )
        insort(self._codes, instrument.code)
        self._entries[instrument.code] = instrument.market, data
        self._totals[instrument.market] += 1
        self.size_bytes += len(data)
        return True

    def page(self, request: ListInstruments) -> EncodedPage:
        """Return the page that begins after `request.after`."""
        chosen: list[bytes] = []
        room, last, ended = MAX_PAGE_BYTES, "", True
        for index in range(bisect_right(self._codes, request.after), len(self._codes)):
            code = self._codes[index]
            market, data = self._entries[code]
            if request.market not in ("", market):
                continue
            room -= len(data) + 1
            if len(chosen) == request.limit or room < 0:
                ended = False
                break
            chosen.append(data)
            last = code
        total = self._totals[request.market] if request.market else len(self)
        return EncodedPage(
            instruments=[msgspec.Raw(data) for data in chosen],
            next_after="" if ended else last,
            taken_at_ms=self.taken_at_ms,
            total=total,
        )


@dataclass(eq=False, repr=False)
class ListLoad:
    """Reads a broker's list once, in a thread of its own."""

    broker: ListsInstruments
    account_id: str
    timeout: float
    bounds: ListBounds
    log: Log
    error: BerthError | None = field(default=None, init=False)
    _skipped: int = field(default=0, init=False)
    _reason: str = field(default="", init=False)

    def __post_init__(self) -> None:
        self.held = HeldList(wall_ms(), self.bounds)
        self.began = time.monotonic()
        self.ended = 0.0
        self._thread = threading.Thread(target=self._run, name="instruments", daemon=True)
        self._thread.start()

    @property
    def done(self) -> bool:
        return not self._thread.is_alive()

    @property
    def overdue(self) -> bool:
        return time.monotonic() - self.began > self.bounds.load_timeout_s

    def took_too_long(self) -> BrokerUnreachable:
        """Returns the error of a list that is overdue."""
        limit = self.bounds.load_timeout_s
        return BrokerUnreachable(f"the list took more than {limit:.0f} s")

    def _run(self) -> None:
        try:
            self._read(self.broker.instruments(self.timeout))
            if not len(self.held):
                raise InstrumentsUnavailable(self._reason)
        except BerthError as error:
            self.error = error
        except Exception as error:  # a fault in the adapter
            self.log.crash("instruments_crashed", error)
            self.error = BrokerUnreachable(f"the list ended with {type(error).__name__}")
        self.log.info(
            "instruments_read",
            account=self.account_id,
            instruments=len(self.held),
            bytes=self.held.size_bytes,
            skipped=self._skipped,
            reason=self._reason,
            code=self.error.code if self.error else "",
            seconds=round(time.monotonic() - self.began, 3),
        )
        if self.error is not None:
            self.held = HeldList(0, self.bounds)
        self.ended = time.monotonic()

    def _read(self, listed: Iterable[Instrument]) -> None:
        for number, instrument in enumerate(listed, 1):
            try:
                if not self.held.add(instrument):
                    self._skip("a code comes twice")
            except (msgspec.MsgspecError, ValueError, TypeError) as error:
                self._skip(str(error))
            if number % _INSTRUMENTS_PER_SLICE == 0:
                if self.overdue:
                    raise self.took_too_long()
                time.sleep(_SLICE_INTERVAL_S)

    def _skip(self, reason: str) -> None:
        """Count an instrument that is left out; keep the first reason."""
        self._skipped += 1
        self._reason = self._reason or reason[:200]


class InstrumentReader:
    """Carries out `ListInstruments`.

    Holds one list at a time, of the account that was last asked for, and has one thread at most.
    """

    def __init__(
        self, broker_calls: BrokerCalls, log: Log, bounds: ListBounds | None = None
    ) -> None:
        self._broker_calls = broker_calls
        self._bounds = bounds or ListBounds()
        self._log = log
        self._load: ListLoad | None = None
        self._used_at = 0.0

    def read_page(self, request: ListInstruments, item: QueueItem) -> EncodedPage:
        """Return a page of the list in memory, or begin to read the list.

        Raises `InstrumentsLoading` while it is read, the error with which it ended,
        `BrokerUnreachable` after `ListBounds.load_timeout_s`, or `InstrumentsUnsupported`. Reading
        it counts as one query, however many pages it has.
        """
        broker = self._broker_calls.ensure_session(request.account_id, item, listed=False)
        if not isinstance(broker, ListsInstruments):
            raise InstrumentsUnsupported
        now = time.monotonic()
        self._used_at = now
        load = self._load
        if load is not None and not load.done:
            if not load.overdue:
                raise _loading()
            # Its thread and its list stay until the broker answers. Another one would fill memory.
            self._broker_calls.session(request.account_id).suspect = True
            raise load.took_too_long()
        if load is None or not self._serves(load, request, broker, now):
            self._load = None  # first, so that the memory never holds two lists
            timeout = self._broker_calls.call_timeout(item)
            self._broker_calls.spend_budget_now(request.account_id, CallKind.QUERY)
            self._load = ListLoad(broker, request.account_id, timeout, self._bounds, self._log)
            raise _loading()
        if load.error is not None:
            self._load = None  # the next request tries again
            self._broker_calls.note_pause(request.account_id, load.error)
            if isinstance(load.error, BrokerUnreachable | SessionDown):
                self._broker_calls.session(request.account_id).suspect = True
            raise load.error
        return load.held.page(request)

    def forget_if_idle(self) -> None:
        """Free the memory of a list for which nobody asks any more."""
        load = self._load
        if (
            load is not None
            and load.done
            and time.monotonic() - self._used_at > self._bounds.kept_s
        ):
            self._load = None

    def _serves(
        self, load: ListLoad, request: ListInstruments, broker: ListsInstruments, now: float
    ) -> bool:
        if load.account_id != request.account_id:
            return False
        if load.error is not None:
            return True  # the next request gets the reason
        if request.after:
            return True
        return load.broker is broker and now - load.ended <= self._bounds.fresh_s


def _loading() -> InstrumentsLoading:
    return InstrumentsLoading(retry_after=InstrumentsLoading.RETRY_AFTER_S)
