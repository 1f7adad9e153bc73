"""Reads a stream of events, which `EventPump` writes, as a consumer group: each entry at least
once.

An entry is acknowledged after its handler returned; one that the handler keeps comes again, also if
this process is killed meanwhile. What is not from the worker that it names is dropped before a
handler sees it. What cannot be read, and what the handler fails on for good, goes to the dead
letters; an outage is waited for. Entries of a dead consumer are claimed by another one. A missing
group (new or flushed server) starts again at 0, so handlers must tolerate repeats. The stream is
trimmed below what its group has acknowledged.
"""

import asyncio
import os
import socket
import time
from collections.abc import Sequence
from dataclasses import KW_ONLY, dataclass
from typing import NamedTuple, Protocol

import structlog
from redis.asyncio import Redis
from redis.exceptions import ResponseError

from infra.database.dead_letters import MAX_TRIES, DeadLetter, DeadLetters, TryCounter, reason_of
from infra.process_metrics import EVENTS, REFUSED
from infra.valkey.client import reply_of, text_of
from infra.vault.message_secret import MessageSecrets
from worker_runtime.protocol import keys
from worker_runtime.protocol.authentication import RefusalCounter
from worker_runtime.protocol.errors import InvalidSignature, MalformedMessage, NewerKeyNeeded
from worker_runtime.protocol.messages import Event, OrderEvent, WorkerEvent
from worker_runtime.protocol.worker_reports import EVENT, payload_of, read_event, read_sender

#: Writes order events and session times to PostgreSQL.
RECORDER_GROUP = "recorder"
#: Turns lifecycle events into signals.
RELAY_GROUP = "relay"
#: The stream of each group.
GROUPS = {RECORDER_GROUP: keys.EVENTS, RELAY_GROUP: keys.CHANGES}

#: Entries handled together: one transaction, one acknowledgement.
BATCH_SIZE = 64
#: Seconds that entries gather before the next read: an order's three events arrive within a few
#: milliseconds, and one transaction for them costs what one for a single event does.
GATHER_S = 0.02
#: The same after a batch of more than one order: each batch costs over 1 ms of CPU here and in
#: PostgreSQL.
BUSY_GATHER_S = 0.06
#: Events of one order, from its submission to its fill.
EVENTS_PER_ORDER = 4
#: Milliseconds of one blocking read; the socket timeout is 5 s.
READ_TIMEOUT_MS = 1000
#: Milliseconds after which an entry that its consumer has not acknowledged goes to another one.
ABANDONED_AFTER_MS = 30_000
#: Seconds between two rounds of claiming abandoned entries and trimming.
UPKEEP_INTERVAL_S = 10.0
#: Milliseconds after which a consumer without entries is forgotten.
IDLE_CONSUMER_TTL_MS = 3_600_000
#: Seconds that a message waits for a version of the message secret that this process has not read;
#: the file is read again each second. Each version is waited for once in `KEY_WAIT_INTERVAL_S`,
#: because anyone who can write to Valkey can name one.
KEY_TIMEOUT_S = 5.0
KEY_WAIT_INTERVAL_S = 120.0
KEY_RETRY_INTERVAL_S = 0.2
#: Seconds between two tries while Valkey or the handler's server is away.
RETRY_INTERVAL_S = 1.0

log = structlog.get_logger()


class EventHandler(Protocol):
    async def handle(
        self, events: Sequence[Event], received_ms: Sequence[int] = ()
    ) -> Sequence[Event] | None:
        """Handles a batch in order. Must tolerate repeats. `received_ms`: when each was put into
        the stream.

        Those that it returns are kept: they come again, not before `abandoned_ms`. After an error
        the batch comes again, as a whole while `TryCounter` says that the error may pass, else one
        by one.
        """
        ...


class ReceivedEvent(NamedTuple):
    entry_id: bytes
    event: Event
    entry: bytes
    #: Unix ms at which the pump took it from its worker's list. An outage of the handler's server
    #: makes no event late by this time.
    at_ms: int


@dataclass(eq=False, repr=False)
class EventStream:
    """Reads one group's events as one of its consumers, and has them handled."""

    client: Redis
    group: str
    handler: EventHandler
    message_secrets: MessageSecrets
    _: KW_ONLY
    #: None: an event that fails for good is dropped.
    dead_letters: DeadLetters | None = None
    consumer: str = ""
    abandoned_ms: int = ABANDONED_AFTER_MS
    most_tries: int = MAX_TRIES

    def __post_init__(self) -> None:
        self._stream = GROUPS[self.group]
        self.refused = RefusalCounter(REFUSED.labels("event").inc)
        self._tries = TryCounter(self.most_tries)
        self._consumer = self.consumer or f"{socket.gethostname()}-{os.getpid()}"
        self._last_id = b"0"
        self._upkeep_at = 0.0
        self._wait_until = self._next_wait = 0.0

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
                cursor = self._last_id if handled and cursor != b">" else b">"
                if 0 < handled < BATCH_SIZE:
                    await asyncio.sleep(GATHER_S if handled <= EVENTS_PER_ORDER else BUSY_GATHER_S)
                if time.monotonic() >= self._upkeep_at:
                    self._upkeep_at = time.monotonic() + UPKEEP_INTERVAL_S
                    await self.upkeep()
            except ResponseError as error:
                missing = str(error).startswith("NOGROUP")
                if not missing:
                    await self._wait("event_stream_failed", error)
            except Exception as error:  # the boundary of a loop that outlives every outage
                cursor = b"0"
                await self._wait("event_stream_waits", error)

    async def step(self, cursor: bytes = b">") -> int:
        """Handles one batch; returns its size."""
        reply = await reply_of(
            self.client.xreadgroup(
                self.group,
                self._consumer,
                {self._stream: cursor},
                count=BATCH_SIZE,
                block=READ_TIMEOUT_MS,
            )
        )
        entries = [
            entry
            for lists in (reply or {}).values()
            for stream_entries in lists
            for entry in stream_entries
        ]
        if entries:
            self._last_id = entries[-1][0]
        await self._handle(entries)
        return len(entries)

    async def upkeep(self) -> None:
        """Takes over abandoned entries and those that were kept, forgets idle consumers, trims."""
        cursor, mine = b"0-0", (self._stream, self.group, self._consumer, self.abandoned_ms)
        while True:
            cursor, claimed, _ = await reply_of(
                self.client.xautoclaim(*mine, start_id=cursor, count=BATCH_SIZE)
            )
            await self._handle([entry for entry in claimed if entry[1]])
            if cursor == b"0-0":
                break
        for consumer in await reply_of(self.client.xinfo_consumers(self._stream, self.group)):
            if consumer["pending"] == 0 and consumer["idle"] > IDLE_CONSUMER_TTL_MS:
                await reply_of(
                    self.client.xgroup_delconsumer(self._stream, self.group, consumer["name"])
                )
        await self._trim()

    async def _handle(self, entries: list[tuple[bytes, dict[bytes, bytes]]]) -> None:
        if not entries:
            return
        events: list[ReceivedEvent] = []
        dead: list[DeadLetter] = []
        for entry_id, fields in entries:
            if not fields:  # it was delivered before, and then deleted
                continue
            entry = fields.get(EVENT.encode(), b"")
            try:
                event = await self._read(entry)
                at_ms = int(text_of(entry_id).partition("-")[0])
                events.append(ReceivedEvent(entry_id, event, entry, at_ms))
            except NewerKeyNeeded as error:
                if self.group == RECORDER_GROUP:
                    # One dead letter for each user and epoch. Nobody knows the author, so all such
                    # letters share one part of the list.
                    why = reason_of(error)
                    dead.append(
                        DeadLetter(kind="event", subject=why, source="newer key", reason=why)
                    )
            except InvalidSignature as error:
                if self.refused.add(error.detail):
                    log.warning("event_not_authentic", of=error.detail, count=self.refused.count)
            except MalformedMessage as error:
                # The relay reads the same events.
                if self.group == RECORDER_GROUP:
                    dead.append(_dead_letter("event", entry, error))
        kept = await self._deliver(events, dead)
        for received in events:
            if received.entry_id not in kept:
                EVENTS.labels(self.group, kind_of(received.event)).inc()
        if self.dead_letters is not None:
            await self.dead_letters.put(dead)
        if done := [entry_id for entry_id, _ in entries if entry_id not in kept]:
            await reply_of(self.client.xack(self._stream, self.group, *done))

    async def _read(self, entry: bytes) -> Event:
        """Reads an event; waits a while for a secret that was rotated and is not here yet."""
        while True:
            try:
                return read_event(entry, self.message_secrets.assignment_keys)
            except NewerKeyNeeded:
                now = time.monotonic()
                if now >= self._next_wait:
                    self._wait_until, self._next_wait = (
                        now + KEY_TIMEOUT_S,
                        now + KEY_WAIT_INTERVAL_S,
                    )
                if now >= self._wait_until:
                    raise
                await asyncio.sleep(KEY_RETRY_INTERVAL_S)

    async def _deliver(
        self, received: Sequence[ReceivedEvent], dead: list[DeadLetter]
    ) -> set[bytes]:
        """Hands the events to the handler; adds those on which it fails for good to `dead`, and
        returns the ids of the entries that it keeps."""
        try:
            kept = await self._hand_over(received)
            self._tries.handled()
            return kept
        except Exception as error:  # the boundary of a batch
            if not self._tries.gives_up(error):
                raise
        kept = set()
        for item in received:
            try:
                kept |= await self._hand_over([item])
            except Exception as error:  # the boundary of one message
                if not self._tries.gives_up(error):
                    raise
                dead.append(_dead_letter(self.group, item.entry, error))
        self._tries.handled()
        return kept

    async def _hand_over(self, received: Sequence[ReceivedEvent]) -> set[bytes]:
        if not received:
            return set()
        kept = await self.handler.handle(
            [item.event for item in received], [item.at_ms for item in received]
        )
        return {
            item.entry_id for item in received if any(item.event is event for event in kept or ())
        }

    async def _create_group(self) -> None:
        try:
            await reply_of(
                self.client.xgroup_create(self._stream, self.group, id="0", mkstream=True)
            )
            log.info("event_group_created", group=self.group)
        except ResponseError as error:
            if not str(error).startswith("BUSYGROUP"):
                raise

    async def _trim(self) -> None:
        for group in await reply_of(self.client.xinfo_groups(self._stream)):
            pending = await reply_of(self.client.xpending(self._stream, group["name"]))
            lowest = pending["min"] or group["last-delivered-id"]
            await reply_of(
                self.client.xtrim(self._stream, minid=text_of(lowest), approximate=False)
            )

    async def _wait(self, event: str, error: Exception) -> None:
        log.warning(event, group=self.group, error=type(error).__name__, reason=str(error)[:200])
        await asyncio.sleep(RETRY_INTERVAL_S)


def kind_of(event: Event) -> str:
    """Returns what the metrics call an event: an order's state, a change of the worker, or
    `account`."""
    if isinstance(event, OrderEvent):
        return event.state
    return event.kind if isinstance(event, WorkerEvent) else "account"


def _dead_letter(kind: str, entry: bytes, error: Exception) -> DeadLetter:
    """Makes the dead letter of an authentic message. Its MAC covers the user and the epoch, not the
    worker's id."""
    sender = read_sender(payload_of(entry))
    source = f"{sender.user_id}:{sender.epoch}"
    return DeadLetter(
        kind=kind, source=source, user_id=sender.user_id, reason=reason_of(error), message=entry
    )
