"""Server-sent events: sends the rows of an `EventFeed` as they are written.

A stream reads its feed at each notification, and every `heartbeat` seconds in case one was lost. It
ends with its client, with the server, when its API key is revoked, and after `life` seconds. The
client then comes back with `Last-Event-ID`, and its key is checked again.

uvicorn waits for open responses before it tells the application to stop, so an open stream would
hold it up. `on_stop` therefore listens for the signal itself.
"""

import asyncio
import signal
import threading
import time
from collections import Counter
from collections.abc import AsyncGenerator, Awaitable, Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import KW_ONLY, dataclass
from types import FrameType
from typing import Annotated, Protocol

import structlog
import uvicorn
from fastapi import Depends, Header, Query
from fastapi.responses import StreamingResponse
from fastapi.sse import format_sse_event
from starlette.types import Message, Receive, Scope, Send

from api.http.auth import Authenticator
from api.http.errors import TooManyStreams, Unauthenticated
from api.http.notifications import NotificationListener, heard_within
from infra.database import api_keys
from infra.database.engine import Database, DatabaseUnavailable


@contextmanager
def on_stop(tell: Callable[[], None]) -> Iterator[None]:
    """Calls `tell` in the event loop after uvicorn's own handler of SIGTERM or SIGINT.

    Does nothing where no uvicorn handles signals, as in tests.
    """
    with ExitStack() as stack:
        if threading.current_thread() is threading.main_thread():
            for number in (signal.SIGTERM, signal.SIGINT):
                _chain_signal_handler(stack, number, tell)
        yield


def _chain_signal_handler(
    stack: ExitStack, number: signal.Signals, tell: Callable[[], None]
) -> None:
    before = signal.getsignal(number)
    if not callable(before) or not isinstance(getattr(before, "__self__", None), uvicorn.Server):
        return
    loop = asyncio.get_running_loop()

    def handle(given: int, frame: FrameType | None) -> None:
        before(given, frame)
        loop.call_soon_threadsafe(tell)

    signal.signal(number, handle)
    stack.callback(signal.signal, number, before)


#: The largest id that PostgreSQL could give out.
_MAX_EVENT_ID = 2**63 - 1
After = Annotated[
    int | None, Query(ge=0, le=_MAX_EVENT_ID, description="Only changes behind this id.")
]
LastEventId = Annotated[
    int | None,
    Header(
        ge=0,
        le=_MAX_EVENT_ID,
        description="Sent by a client that comes back; it goes before `after`.",
    ),
]


async def stream_begin(after: After = None, last_event_id: LastEventId = None) -> int | None:
    """Returns the id behind which a stream begins; None if it begins now, with the present
    first."""
    return after if last_event_id is None else last_event_id


StreamBegin = Annotated[int | None, Depends(stream_begin)]

#: Seconds between two signs of life; proxies close a silent connection after 60 s and less.
HEARTBEAT_INTERVAL_S = 15.0
#: Seconds after which a client must come back.
MAX_STREAM_LIFETIME_S = 3600.0
#: Streams of one API key on one subject, in one process.
MAX_STREAMS_PER_SUBJECT = 8
#: Streams of all API keys together, in one process.
MAX_STREAMS = 1000
#: Streams of one API key in one process: no key takes all places.
MAX_STREAMS_PER_KEY = 64
#: Seconds in which a client has to take what was sent. One that reads nothing fills its socket's
#: buffers, and would hold its place for a `MAX_STREAM_LIFETIME_S`.
SEND_TIMEOUT_S = 30.0
#: Milliseconds that a client waits before it comes back.
RETRY_MS = 1000


@dataclass(frozen=True, slots=True)
class ServerEvent:
    """One event. `data` is JSON."""

    id: int
    name: str
    data: str

    def encoded(self) -> bytes:
        return format_sse_event(data_str=self.data, event=self.name, id=str(self.id))


class EventFeed(Protocol):
    """Where the events of one stream come from."""

    #: A notice on this channel with this key says that there is more.
    channel: str
    key: str

    async def current_event(self) -> ServerEvent:
        """Returns how things are now: the first event of a stream that begins now."""
        ...

    async def events_after(self, last: int) -> Sequence[ServerEvent]:
        """Returns the next events behind this id, at most a page; empty when there are none yet."""
        ...


@dataclass(eq=False, repr=False)
class EventStreams:
    """All streams of this process."""

    notifications: NotificationListener
    is_revoked: Callable[[str], Awaitable[bool]]
    _: KW_ONLY
    heartbeat: float = HEARTBEAT_INTERVAL_S
    life: float = MAX_STREAM_LIFETIME_S
    slowest: float = SEND_TIMEOUT_S

    def __post_init__(self) -> None:
        self._open: Counter[tuple[str, str]] = Counter()
        #: The streams of each API key that wait for news, and the keys whose streams are to end.
        self._waiting: dict[str, set[asyncio.Event]] = {}
        self._revoked: set[str] = set()
        self._ending = False
        self._log = structlog.get_logger()

    @property
    def open(self) -> int:
        """How many streams there are now."""
        return self._open.total()

    def end(self) -> None:
        """Ends all streams, and those still to come: the server stops."""
        self._ending = True
        self.notifications.wake_all()

    def holders(self) -> set[str]:
        """Returns the ids of the API keys that have streams."""
        return {holder for holder, _ in self._open}

    def end_of(self, holder: str) -> int:
        """Ends the streams of an API key that was revoked; returns how many there were."""
        ended = sum(
            count for (stream_holder, _), count in self._open.items() if stream_holder == holder
        )
        if ended:
            self._revoked.add(holder)
        for news in self._waiting.get(holder, ()):
            news.set()
        return ended

    async def open_stream(
        self, feed: EventFeed, holder: str, after: int | None, life: float = MAX_STREAM_LIFETIME_S
    ) -> StreamingResponse:
        """Returns the answer that streams `feed` behind the id `after`; None: from now on, the
        present first.

        `holder` is the caller's API key id, which ends in `life` seconds. Raises `TooManyStreams`,
        `Unauthenticated`, and what the first read raises, so that a database that is down is a
        problem and not a broken stream.
        """
        subject = (holder, f"{feed.channel} {feed.key}")
        of_key = sum(count for (key, _), count in self._open.items() if key == holder)
        for count, limit, of in (
            (self._open[subject], MAX_STREAMS_PER_SUBJECT, "of this key on this subject"),
            (of_key, MAX_STREAMS_PER_KEY, "of this key"),
            (self.open, MAX_STREAMS, "of this process"),
        ):
            if count >= limit:
                raise TooManyStreams(
                    f"{limit} event streams {of} are open. Close one, then try again."
                )
        self._open[subject] += 1
        try:
            # A notice before the stream was counted ended nothing.
            if await self.is_revoked(holder):
                raise Unauthenticated
            first = (
                [await feed.current_event()] if after is None else await feed.events_after(after)
            )
        except BaseException:
            self._release_place(subject)
            raise
        return _EventStreamResponse(
            self, subject, self._events(feed, holder, first, after or 0, life)
        )

    def _release_place(self, subject: tuple[str, str]) -> None:
        self._open[subject] -= 1
        if not self._open[subject]:
            del self._open[subject]
        if subject[0] not in self.holders():
            self._revoked.discard(subject[0])

    @contextmanager
    def _news(self, feed: EventFeed, holder: str) -> Iterator[asyncio.Event]:
        """Yields an event that a notice sets, and the end of the key's streams."""
        with self.notifications.expect(feed.channel, feed.key) as news:
            waiting = self._waiting.setdefault(holder, set())
            waiting.add(news)
            try:
                yield news
            finally:
                waiting.discard(news)
                if not waiting:
                    self._waiting.pop(holder, None)

    def _ends(self, holder: str) -> bool:
        return self._ending or holder in self._revoked

    async def _events(
        self, feed: EventFeed, holder: str, first: Sequence[ServerEvent], last: int, life: float
    ) -> AsyncGenerator[bytes, None]:
        until = time.monotonic() + min(life, self.life)
        with self._news(feed, holder) as news:
            news.set()  # whatever came between the first read and this line
            yield format_sse_event(retry=RETRY_MS)
            events = first
            while True:
                for event in events:
                    yield event.encoded()
                    last = event.id
                if self._ends(holder) or time.monotonic() >= until:
                    return
                if not events and not await heard_within(
                    news, min(self.heartbeat, until - time.monotonic())
                ):
                    yield format_sse_event(comment="alive")
                if self._ends(holder):
                    return
                news.clear()
                events = await self._read_events(feed, last)

    async def _read_events(self, feed: EventFeed, last: int) -> Sequence[ServerEvent]:
        try:
            return await feed.events_after(last)
        except DatabaseUnavailable as error:
            self._log.warning("stream_waits", channel=feed.channel, reason=error.detail)
            return []


class _SlowReader(Exception):
    """The client does not take what was sent."""


class _EventStreamResponse(StreamingResponse):
    """Gives its place back when it ends, however it ends:
    a generator that never began would not."""

    def __init__(
        self, streams: EventStreams, subject: tuple[str, str], events: AsyncGenerator[bytes, None]
    ) -> None:
        super().__init__(
            events,
            media_type="text/event-stream",
            # nginx and its like would otherwise collect events until a buffer is full.
            headers={"Cache-Control": "no-store", "X-Accel-Buffering": "no"},
        )
        self._streams = streams
        self._subject = subject
        self._events = events

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        async def send_in_time(message: Message) -> None:
            try:
                async with asyncio.timeout(self._streams.slowest):
                    await send(message)
            except TimeoutError:  # an OSError, which Starlette takes for a client that is gone
                raise _SlowReader from None

        try:
            await super().__call__(scope, receive, send_in_time)
        except _SlowReader:  # uvicorn closes the connection of an answer that has no end
            self._streams._log.warning("stream_of_a_slow_reader_ended", subject=self._subject[1])
        finally:
            self._streams._release_place(self._subject)
            await self._events.aclose()


#: Seconds between two attempts to ask PostgreSQL.
CHECK_RETRY_INTERVAL_S = 1.0


@dataclass(eq=False, repr=False)
class KeyRevocations:
    """Ends a revoked key in this process: what is remembered of it, and its open event streams.

    PostgreSQL's notification says which key. One that was lost with the listening connection is
    made up for when that is back: then everything remembered is looked up again, and the keys of
    all open streams. In between, a key counts for `api_key_cache` seconds at most.
    """

    database: Database
    notifications: NotificationListener
    authenticator: Authenticator
    streams: EventStreams

    def __post_init__(self) -> None:
        self._missed = asyncio.Event()
        self._log = structlog.get_logger()
        self.notifications.handle(api_keys.REVOKED_CHANNEL, self._revoked, self._may_have_missed)

    def _revoked(self, key_id: str) -> None:
        self.authenticator.forget(key_id)
        ended = self.streams.end_of(key_id)
        self._log.info("api_key_revoked", key_id=key_id, streams=ended)

    def _may_have_missed(self) -> None:
        self.authenticator.forget_all()
        self._missed.set()

    async def run(self) -> None:
        """Checks the keys of open streams after each time that notices may have been lost."""
        while True:
            await self._missed.wait()
            self._missed.clear()
            try:
                await self._check_streams()
            except DatabaseUnavailable as error:
                self._log.warning("stream_keys_not_checked", reason=error.detail)
                self._missed.set()
                await asyncio.sleep(CHECK_RETRY_INTERVAL_S)

    async def _check_streams(self) -> None:
        holders = self.streams.holders()
        if not holders:
            return
        async with self.database.session(autocommit=True) as session:
            revoked = await api_keys.revoked_among(session, holders)
        for key_id in revoked:
            self._revoked(key_id)
