"""Reads the stream `worker:events` as a consumer group: each entry at least once, none lost.

An entry is acknowledged after its handler returned. Entries of a dead consumer are claimed by another one. A
missing group (new or flushed server) starts again at 0, so handlers must tolerate repeats. The stream is
trimmed below what every group has acknowledged, and only while all groups exist.
"""

from __future__ import annotations

import asyncio
import os
import socket
import time
from collections import OrderedDict
from collections.abc import Hashable, Sequence
from typing import Protocol

import structlog
from redis.asyncio import Redis
from redis.exceptions import RedisError, ResponseError

from infra.valkey.client import reply_of, text_of
from worker_runtime.protocol import keys
from worker_runtime.protocol.errors import BerthError, MalformedMessage
from worker_runtime.protocol.messages import Event, decode

#: Remembered keys: with short ids about 100 kB.
REMEMBERED = 1000


class LogDeduplicator:
    """Remembers what was logged recently, so that a sender that repeats itself is logged once."""

    def __init__(self, kept: int = REMEMBERED) -> None:
        self._kept = kept
        self._logged: OrderedDict[Hashable, None] = OrderedDict()

    def new(self, thing: Hashable) -> bool:
        """Whether `thing` is not remembered; from now on it is."""
        new = thing not in self._logged
        self._logged[thing] = None
        self._logged.move_to_end(thing)
        if len(self._logged) > self._kept:
            self._logged.popitem(last=False)
        return new


#: Writes order events and session times to PostgreSQL.
RECORDER_GROUP = "recorder"
#: Turns lifecycle events into signals.
RELAY_GROUP = "relay"
GROUPS = (RECORDER_GROUP, RELAY_GROUP)

#: Entries handled together: one transaction, one acknowledgement.
BATCH = 64
#: Seconds that entries gather before the next read: an order's three events arrive within a few
#: milliseconds, and one transaction for them costs what one for a single event does.
GATHER = 0.02
#: The same after a batch of more than one order: each batch costs over 1 ms of CPU here and in PostgreSQL.
GATHER_MORE = 0.06
#: Events of one order, from its submission to its fill.
ONE_ORDER = 4
#: Milliseconds of one blocking read; the socket timeout is 5 s.
BLOCK_MS = 1000
#: Milliseconds after which an entry that its consumer has not acknowledged goes to another one.
ABANDONED_MS = 30_000
#: Seconds between two rounds of claiming abandoned entries and trimming.
UPKEEP = 10.0
#: Milliseconds after which a consumer without entries is forgotten.
IDLE_CONSUMER_MS = 3_600_000
#: Seconds between two tries while Valkey or the handler's server is away.
RETRY = 1.0

log = structlog.get_logger()


class EventHandler(Protocol):
    async def handle(self, events: Sequence[Event]) -> None:
        """Handles a batch in order; raises to get all of it again. Must tolerate repeats."""
        ...


class EventStream:
    """One consumer of one group."""

    def __init__(
        self,
        client: Redis,
        group: str,
        handler: EventHandler,
        *,
        consumer: str = "",
        abandoned_ms: int = ABANDONED_MS,
    ) -> None:
        self._client = client
        self._group = group
        self._handler = handler
        self._consumer = consumer or f"{socket.gethostname()}-{os.getpid()}"
        self._abandoned_ms = abandoned_ms
        self._upkeep_at = 0.0

    async def run(self) -> None:
        """Runs until cancelled; survives outages of Valkey and of what the handler writes to."""
        cursor = b"0"  # unacknowledged entries of this consumer first, then new ones
        missing = False
        while True:
            try:
                if missing:
                    await self._create_group()
                    missing = False
                handled = await self.step(cursor)
                if handled == 0:
                    cursor = b">"
                elif handled < BATCH:
                    await asyncio.sleep(GATHER if handled <= ONE_ORDER else GATHER_MORE)
                if time.monotonic() >= self._upkeep_at:
                    self._upkeep_at = time.monotonic() + UPKEEP
                    await self.upkeep()
            except ResponseError as error:
                missing = str(error).startswith("NOGROUP")
                if not missing:
                    await self._wait("event_stream_failed", error)
            except (RedisError, OSError, BerthError) as error:
                cursor = b"0"
                await self._wait("event_stream_waits", error)

    async def step(self, cursor: bytes = b">") -> int:
        """Handles one batch; returns its size."""
        found = await reply_of(
            self._client.xreadgroup(
                self._group, self._consumer, {keys.EVENTS: cursor}, count=BATCH, block=BLOCK_MS
            )
        )
        entries = [entry for lists in (found or {}).values() for some in lists for entry in some]
        await self._handle(entries)
        return len(entries)

    async def upkeep(self) -> None:
        """Takes over abandoned entries, forgets idle consumers, trims."""
        claimed = await reply_of(
            self._client.xautoclaim(keys.EVENTS, self._group, self._consumer, self._abandoned_ms, count=BATCH)
        )
        await self._handle([entry for entry in claimed[1] if entry[1]])
        for consumer in await reply_of(self._client.xinfo_consumers(keys.EVENTS, self._group)):
            if consumer["pending"] == 0 and consumer["idle"] > IDLE_CONSUMER_MS:
                await reply_of(self._client.xgroup_delconsumer(keys.EVENTS, self._group, consumer["name"]))
        await self._trim()

    async def _handle(self, entries: list[tuple[bytes, dict[bytes, bytes]]]) -> None:
        if not entries:
            return
        events = []
        for entry_id, fields in entries:
            try:
                event: Event = decode(fields.get(b"e", b""), Event)
            except MalformedMessage as error:
                log.error("malformed_event", entry=entry_id.decode(), reason=error.detail)
            else:
                events.append(event)
        if events:
            await self._handler.handle(events)
        await reply_of(self._client.xack(keys.EVENTS, self._group, *(entry_id for entry_id, _ in entries)))

    async def _create_group(self) -> None:
        try:
            await reply_of(self._client.xgroup_create(keys.EVENTS, self._group, id="0", mkstream=True))
            log.info("event_group_created", group=self._group)
        except ResponseError as error:
            if not str(error).startswith("BUSYGROUP"):
                raise

    async def _trim(self) -> None:
        groups = {
            text_of(group["name"]): group for group in await reply_of(self._client.xinfo_groups(keys.EVENTS))
        }
        if not set(GROUPS) <= groups.keys():
            return
        lowest = []
        for name, group in groups.items():
            pending = await reply_of(self._client.xpending(keys.EVENTS, name))
            lowest.append(text_of(pending["min"] or group["last-delivered-id"]))
        await reply_of(self._client.xtrim(keys.EVENTS, minid=min(lowest, key=_position), approximate=False))

    async def _wait(self, event: str, error: Exception) -> None:
        log.warning(event, group=self._group, error=type(error).__name__, reason=str(error)[:200])
        await asyncio.sleep(RETRY)


def _position(entry_id: str) -> tuple[int, int]:
    milliseconds, _, number = entry_id.partition("-")
    return int(milliseconds), int(number or 0)
