"""Passes PostgreSQL's notifications (LISTEN) to waiting tasks; one connection a process.

A notification is a hint and can be lost while the connection is down, so a waiting task must also
check from time to time. Every (re)connect wakes all waiting tasks once.
"""

import asyncio
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from typing import Any

import asyncpg
import structlog

from infra.database.engine import parse_url, require_session

#: Seconds to connect, or for the answer to a check.
ANSWER_TIMEOUT_S = 3.0
#: Seconds between two checks; a connection that died
#: silently is noticed within this time plus `ANSWER_TIMEOUT_S`.
CHECK_INTERVAL_S = 10.0
#: The key under which one waits for any notice of a channel.
ANY = ""
#: Seconds between the first two attempts to reconnect; doubled each time.
RECONNECT_INTERVAL_S = 0.1
#: Seconds between two attempts to reconnect, at most.
MAX_RECONNECT_INTERVAL_S = 5.0


async def heard_within(event: asyncio.Event, seconds: float) -> bool:
    """Waits at most `seconds` for an event; returns whether it was set."""
    with suppress(TimeoutError):
        async with asyncio.timeout(seconds):
            return await event.wait()
    return False


class NotificationListener:
    """Listens on `channels`; `expect` gives an event
    that is set whenever a notice has the key as payload."""

    def __init__(self, database_url: str, channels: Sequence[str]) -> None:
        require_session(database_url)
        url, tls = parse_url(database_url)
        #: As SQLAlchemy would connect: host, password and so on, from one URL.
        self._arguments: Mapping[str, Any] = {
            **url.get_dialect()().create_connect_args(url)[1],
            **tls,
        }
        self._channels = tuple(channels)
        self._waiting: dict[tuple[str, str], set[asyncio.Event]] = {}
        self._handlers: dict[str, tuple[Callable[[str], None], Callable[[], None]]] = {}
        #: Notices so far by channel; a (re)connect counts as one, because some may have been lost.
        self.heard = Counter[str]()
        #: Set while the connection listens.
        self.listening = asyncio.Event()
        self._log = structlog.get_logger()

    def handle(
        self, channel: str, notice: Callable[[str], None], missed: Callable[[], None]
    ) -> None:
        """Calls `notice` with the payload of each notice, and `missed` at each (re)connect. Before
        `run`."""
        self._handlers[channel] = (notice, missed)

    @contextmanager
    def expect(self, channel: str, key: str) -> Iterator[asyncio.Event]:
        """Yields an event that a notice sets; the key may be `ANY`. Clear it before reading: then
        no notice falls in between."""
        event = asyncio.Event()
        waiting = self._waiting.setdefault((channel, key), set())
        waiting.add(event)
        try:
            yield event
        finally:
            waiting.discard(event)
            if not waiting:
                self._waiting.pop((channel, key), None)

    def wake_all(self) -> None:
        for waiting in self._waiting.values():
            for event in waiting:
                event.set()

    def _notify(self, connection: Any, pid: int, channel: str, payload: object) -> None:
        if channel in self._handlers:
            self._handlers[channel][0](str(payload))
        self.heard[channel] += 1
        for key in (str(payload), ANY):
            for event in self._waiting.get((channel, key), ()):
                event.set()

    async def run(self) -> None:
        """Connects, and tries without end."""
        pause = RECONNECT_INTERVAL_S
        while True:
            try:
                await self._listen()
            except Exception as error:  # the boundary of a loop: whatever it was, it connects again
                if self.listening.is_set():
                    pause = RECONNECT_INTERVAL_S
                self._log.warning(
                    "notifications_disconnected", reason=type(error).__name__, again_in=pause
                )
            finally:
                self.listening.clear()
            await asyncio.sleep(pause)
            pause = min(pause * 2, MAX_RECONNECT_INTERVAL_S)

    async def _listen(self) -> None:
        """Listens and never returns; raises when the connection is gone."""
        connection = await asyncpg.connect(
            **self._arguments,
            timeout=ANSWER_TIMEOUT_S,
            command_timeout=ANSWER_TIMEOUT_S,
            server_settings={"application_name": "berth-notices"},
        )
        ended = asyncio.Event()
        connection.add_termination_listener(lambda _: ended.set())
        try:
            for channel in (*self._channels, *self._handlers):
                await connection.add_listener(channel, self._notify)
            self.listening.set()
            self._log.info("notifications_connected", channels=self._channels)
            self.heard.update(self._channels)
            self.wake_all()
            for _, missed in self._handlers.values():
                missed()
            while not await heard_within(ended, CHECK_INTERVAL_S):
                await connection.execute("select 1")
            raise ConnectionResetError("PostgreSQL closed the connection")
        finally:
            connection.terminate()  # nothing is under way that a polite end would save
