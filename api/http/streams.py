"""Server-sent events: sends the rows of an `EventFeed` as they are written.

A stream reads its feed at each notification, and every `heartbeat` seconds in case one was lost. It ends
with its client, with the server, and after `life` seconds. The client then comes back with `Last-Event-ID`,
and its key is checked again.

uvicorn waits for open responses before it tells the application to stop, so an open stream would hold it up.
`on_stop` therefore listens for the signal itself.
"""

from __future__ import annotations

import asyncio
import signal
import threading
import time
from collections import Counter
from collections.abc import AsyncGenerator, Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from types import FrameType
from typing import Protocol

import structlog
import uvicorn
from fastapi.responses import StreamingResponse
from fastapi.sse import format_sse_event
from starlette.types import Receive, Scope, Send

from api.http.errors import TooManyStreams
from api.http.notifications import NotificationListener, heard_within
from infra.database.engine import DatabaseUnavailable


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


def _chain_signal_handler(stack: ExitStack, number: signal.Signals, tell: Callable[[], None]) -> None:
    before = signal.getsignal(number)
    if not callable(before) or not isinstance(getattr(before, "__self__", None), uvicorn.Server):
        return
    loop = asyncio.get_running_loop()

    def handle(given: int, frame: FrameType | None) -> None:
        before(given, frame)
        loop.call_soon_threadsafe(tell)

    signal.signal(number, handle)
    stack.callback(signal.signal, number, before)


#: Seconds between two signs of life; proxies close a silent connection after 60 s and less.
HEARTBEAT = 15.0
#: Seconds after which a client must come back.
LIFE = 3600.0
#: Streams of one API key on one subject, and of all together, in one process.
MOST_OF_ONE, MOST = 8, 1000
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
        """How things are now: the first event of a stream that begins now."""
        ...

    async def events_after(self, last: int) -> Sequence[ServerEvent]:
        """The next events behind this id, a page at the most; empty when there are none yet."""
        ...


class EventStreams:
    """All streams of this process."""

    def __init__(
        self, notifications: NotificationListener, *, heartbeat: float = HEARTBEAT, life: float = LIFE
    ) -> None:
        self._notifications = notifications
        self._heartbeat = heartbeat
        self._life = life
        self._open: Counter[tuple[str, str]] = Counter()
        self._ending = False
        self._log = structlog.get_logger()

    @property
    def open(self) -> int:
        """How many streams there are now."""
        return self._open.total()

    def end(self) -> None:
        """Ends all streams, and those still to come: the server stops."""
        self._ending = True
        self._notifications.wake_all()

    async def open_stream(self, feed: EventFeed, holder: str, after: int | None) -> StreamingResponse:
        """The answer that streams `feed` behind the id `after`; None: from now on, the present first.

        `holder` is the caller's API key id. Raises `TooManyStreams`, and what the first read raises, so
        that a database that is down is a problem and not a broken stream.
        """
        subject = (holder, f"{feed.channel} {feed.key}")
        if self._open[subject] >= MOST_OF_ONE or self.open >= MOST:
            raise TooManyStreams
        self._open[subject] += 1
        try:
            first = [await feed.current_event()] if after is None else await feed.events_after(after)
        except BaseException:
            self._release_place(subject)
            raise
        return _EventStreamResponse(self, subject, self._events(feed, first, after or 0))

    def _release_place(self, subject: tuple[str, str]) -> None:
        self._open[subject] -= 1
        if not self._open[subject]:
            del self._open[subject]

    async def _events(
        self, feed: EventFeed, first: Sequence[ServerEvent], last: int
    ) -> AsyncGenerator[bytes, None]:
        until = time.monotonic() + self._life
        with self._notifications.expect(feed.channel, feed.key) as news:
            news.set()  # whatever came between the first read and this line
            yield format_sse_event(retry=RETRY_MS)
            found = first
            while True:
                for event in found:
                    yield event.encoded()
                    last = event.id
                if self._ending or time.monotonic() >= until:
                    return
                if not found and not await heard_within(news, self._heartbeat):
                    yield format_sse_event(comment="alive")
                if self._ending:
                    return
                news.clear()
                found = await self._read_events(feed, last)

    async def _read_events(self, feed: EventFeed, last: int) -> Sequence[ServerEvent]:
        try:
            return await feed.events_after(last)
        except DatabaseUnavailable as error:
            self._log.warning("stream_waits", channel=feed.channel, reason=error.detail)
            return []


class _EventStreamResponse(StreamingResponse):
    """Gives its place back when it ends, however it ends: a generator that never began would not."""

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
        try:
            await super().__call__(scope, receive, send)
        finally:
            self._streams._release_place(self._subject)
            await self._events.aclose()
