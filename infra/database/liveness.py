"""Finds connections to PostgreSQL that died without a word,
before or while somebody waits for them.

A connection that was idle for a moment is asked before it is used. One on which a statement has
waited for long is asked about on a new connection: if its server process is not busy with anything,
the statement or its answer was lost. One dead connection makes all that are as old suspect: they
are replaced, not waited for.
"""

import asyncio
import random
import time
from collections.abc import Awaitable, Callable, Iterable
from dataclasses import dataclass
from datetime import datetime
from typing import Any

import asyncpg
import structlog

from worker_runtime.protocol.sockets import watch_peer

#: Seconds without use after which a connection is asked
#: before it is used: 0.15 ms, and nothing under load.
IDLE_BEFORE_CHECK_S = 1.0
#: Seconds within which it has to answer.
CHECK_TIMEOUT_S = 0.5
#: Seconds that a connection is used, at least;
#: some live a quarter longer, so that not all end at once.
MAX_AGE_S = 1800.0
#: Seconds after which a statement without an answer is looked into,
#: and again each time they have doubled.
SILENT_AFTER_S = 0.5
#: Seconds after which a statement is looked into
#: together with another one: connections die together.
SILENT_WITH_OTHERS_AFTER_S = 0.1
#: Seconds that its answer, if it is on its way, still has.
CONFIRM_TIMEOUT_S = 0.2
#: Seconds that a look may take.
LOOK_TIMEOUT_S = 1.0

#: The states of server processes, and that of the process which answers.
_STATES = """
select pid, state, state_change from pg_stat_activity
 where pid = any($1::int[]) or pid = pg_backend_pid()
"""
#: The state of a server process that does nothing or is gone.
_IDLE = "idle"

#: A generator of our own: programs that test by random examples watch the state of the common one.
_ages = random.Random()  # noqa: S311 - no secret

log = structlog.get_logger()


class WatchedConnection(asyncpg.Connection):
    """A connection that knows its age."""

    def __init__(
        self, protocol: Any, transport: asyncio.Transport, *args: Any, **options: Any
    ) -> None:
        super().__init__(protocol, transport, *args, **options)
        watch_peer(transport.get_extra_info("socket"))
        self.opened_at = self.used_at = time.monotonic()
        self.ends_at = self.opened_at + MAX_AGE_S * _ages.uniform(1.0, 1.25)


@dataclass(slots=True)
class _Wait:
    began: float
    #: When it is looked into.
    due: float


class ConnectionWatch:
    """Watches the connections of one database's pools. Only its event loop may call.

    `connect` opens a further connection to the same server; None: a pooler is between, which hides
    who does what.
    """

    def __init__(self, connect: Callable[[], Awaitable[asyncpg.Connection]] | None) -> None:
        self._connect = connect
        self._waits: dict[WatchedConnection, _Wait] = {}
        self._timer: asyncio.TimerHandle | None = None
        self._look: asyncio.Task[None] | None = None
        #: Connections that were opened before this instant are not used any more.
        self._suspect_before = 0.0

    def close(self) -> None:
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None
        if self._look is not None:
            self._look.cancel()

    # --- before a use -----------------------------------------------------------------------------

    def is_outdated(self, connection: WatchedConnection) -> bool:
        """Return True if the connection is closed,
        too old or suspect, so that it must not be used."""
        now = time.monotonic()
        return (
            connection.is_closed()
            or connection.opened_at < self._suspect_before
            or now >= connection.ends_at
        )

    @staticmethod
    def needs_check(connection: WatchedConnection) -> bool:
        return time.monotonic() - connection.used_at > IDLE_BEFORE_CHECK_S

    async def answers(self, connection: WatchedConnection) -> bool:
        """Return True if the server answers on an idle connection.
        If not, suspects all that are as old."""
        asked = time.monotonic()
        try:
            await connection.execute("select 1", timeout=CHECK_TIMEOUT_S)
        except (OSError, TimeoutError, asyncpg.PostgresError, asyncpg.InterfaceError) as error:
            self._suspect(asked, type(error).__name__, 1)
            return False
        connection.used_at = time.monotonic()
        return True

    def _suspect(self, before: float, reason: str, count: int) -> None:
        if before > self._suspect_before + 1.0:
            log.warning("database_connections_dead", reason=reason, count=count)
        self._suspect_before = max(self._suspect_before, before)

    # --- during a use -----------------------------------------------------------------------------

    def began(self, connection: WatchedConnection) -> None:
        """Notes that a statement was sent whose answer somebody waits for."""
        if self._connect is None:
            return
        now = time.monotonic()
        self._waits[connection] = _Wait(now, now + SILENT_AFTER_S)
        if self._timer is None:
            self._timer = asyncio.get_running_loop().call_later(SILENT_AFTER_S, self._check_waits)

    def ended(self, connection: WatchedConnection) -> None:
        """Notes that nobody waits for an answer on this connection."""
        self._waits.pop(connection, None)

    def _check_waits(self) -> None:
        """Checks all waiting statements: one timer serves them."""
        self._timer = None
        for connection in [known for known in self._waits if known.is_closed()]:
            del self._waits[connection]
        if not self._waits or self._look is not None:
            return
        seconds_left = min(wait.due for wait in self._waits.values()) - time.monotonic()
        if seconds_left > 0:
            self._timer = asyncio.get_running_loop().call_later(seconds_left, self._check_waits)
        else:
            self._look = asyncio.create_task(self._end_silent(), name="silent database connections")
            self._look.add_done_callback(self._looked)

    def _looked(self, look: asyncio.Task[None]) -> None:
        self._look = None
        if look.cancelled():
            return
        if (error := look.exception()) is not None:
            log.error("database_watch_crashed", exc_info=error)
        self._check_waits()

    async def _end_silent(self) -> None:
        """Ends the connections whose statement has no answer to come,
        so that those who wait get an error."""
        now = time.monotonic()
        waits = {
            connection: wait.began
            for connection, wait in self._waits.items()
            if now - wait.began >= SILENT_WITH_OTHERS_AFTER_S
        }
        for connection, began in waits.items():
            self._waits[connection].due = max(self._waits[connection].due, now + (now - began))
        try:
            async with asyncio.timeout(LOOK_TIMEOUT_S):
                states = await self._read_states(
                    connection.get_server_pid() for connection in waits
                )
        except (OSError, TimeoutError, asyncpg.PostgresError, asyncpg.InterfaceError) as error:
            # The server is away for everybody: the time limits of those who wait apply.
            log.warning("database_watch_failed", reason=type(error).__name__)
            return
        silent = {
            connection: state
            for connection in waits
            if (state := states.get(connection.get_server_pid())) is not None and state[0] == _IDLE
        }
        if not silent:
            return
        await asyncio.sleep(CONFIRM_TIMEOUT_S)
        try:
            async with asyncio.timeout(LOOK_TIMEOUT_S):
                states = await self._read_states(
                    connection.get_server_pid() for connection in silent
                )
        except (OSError, TimeoutError, asyncpg.PostgresError, asyncpg.InterfaceError) as error:
            log.warning("database_watch_failed", reason=type(error).__name__)
            return
        # A server process that took up or ended a statement
        # meanwhile is slow, and its answer is on its way.
        silent = {
            connection: state
            for connection, state in silent.items()
            if states.get(connection.get_server_pid()) == state
            and (wait := self._waits.get(connection)) is not None
            and wait.began == waits[connection]
        }
        for connection in silent:
            del self._waits[connection]
            connection.terminate()
        if silent:
            self._suspect(now, "no answer", len(silent))

    async def _read_states(
        self, process_ids: Iterable[int]
    ) -> dict[int, tuple[str, datetime | None]]:
        """Return the state of each server process, and since when it is in it.

        `_IDLE` stands for a process that does nothing or is gone.

        Behind a pooler the ids are the pooler's own, and nothing is known of them.
        """
        asked = list(process_ids)
        if self._connect is None:
            return {}
        connection = await self._connect()
        try:
            rows = await connection.fetch(_STATES, asked)
            announced = connection.get_server_pid()
        finally:
            connection.terminate()
        states = {row["pid"]: (str(row["state"] or "unknown"), row["state_change"]) for row in rows}
        if announced not in states:
            return {}
        seen = {pid: states.get(pid, (_IDLE, None)) for pid in asked}
        return {
            pid: (_IDLE if state.startswith(_IDLE) else state, at)
            for pid, (state, at) in seen.items()
        }
