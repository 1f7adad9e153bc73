"""Receives the answers of workers: one listener per process, one channel per user.

A worker knows only the channel of its own user, whose name nobody can guess, and may publish
anything on it. The listener unsubscribes from a channel that is flooded for 600 s. Answers
to that user are then read from their response keys, up to a second later (`WorkerClient`);
other users notice nothing.

A published message can be lost while the connection is down. So after each connect the listener
reads the response keys of all pending requests. Valkey keeps a response key for 60 s.
"""

import asyncio
import os
import secrets
import socket
import time
from collections import OrderedDict
from contextlib import suppress
from dataclasses import dataclass, field
from hashlib import blake2b
from typing import Any
from uuid import uuid4

import structlog
from redis.exceptions import RedisError

from infra import tasks
from infra.valkey import client as valkey
from infra.valkey.failures import UNREACHABLE, ValkeyUnavailable, explain_failure
from infra.valkey.link import DiedSilently, ValkeyLink
from infra.valkey.request_queue import QueuedRequest
from infra.worker_calls.answers import AnswerReader
from worker_runtime.protocol import keys

#: Seconds between two checks of the generation; a flushed or frozen Valkey is noticed within this
#: time plus the client's socket timeout.
CHECK_INTERVAL_S = 1.0
#: Seconds until the first look at the response key of a repeated request. The first request may
#: have come through another process, which then receives the published answer; we read the response
#: key.
FIRST_REPEAT_LOOK_S = 0.05
#: Seconds between two attempts to reconnect.
RECONNECT_INTERVAL_S = 0.1
#: Seconds for the first attempt. If Valkey is down, the attempt fails at once. If its host stalls
#: (2 to 3 s when busy), we wait.
FIRST_CONNECT_TIMEOUT_S = 5.0
#: Users whose channels are listened to; the least recently used is dropped first.
MAX_CHANNELS = 10_000
#: The listener unsubscribes from a channel for `UNSUBSCRIBED_FOR_S` seconds when more than this
#: many KiB that nobody awaits arrive on it within `FLOOD_WINDOW_S` seconds; each message counts as
#: one KiB more. A repeated or late answer takes a KiB or two.
MAX_UNAWAITED_KIB, FLOOD_WINDOW_S, UNSUBSCRIBED_FOR_S = 1000, 60.0, 600.0


@dataclass(eq=False, slots=True)
class _Channel:
    user_id: str
    name: str
    #: The connection that is subscribed to it; None: none is.
    link: ValkeyLink | None = None
    unawaited: float = 0.0
    #: Instants on `time.monotonic`.
    counted_since: float = 0.0
    unsubscribed_until: float = 0.0


class AnswerChannels:
    """Manages this process's channels. Call it from the event loop only."""

    def __init__(self) -> None:
        self._prefix = f"{socket.gethostname()}-{os.getpid()}-{secrets.token_hex(4)}"
        self._secret = secrets.token_bytes(32)
        self._by_user: OrderedDict[str, _Channel] = OrderedDict()
        self._by_name: dict[bytes, _Channel] = {}
        self._log = structlog.get_logger()

    def name_of(self, user_id: str) -> str:
        known = self._by_user.get(user_id)
        if known is not None:
            return known.name
        tag = blake2b(user_id.encode(), key=self._secret, digest_size=16).hexdigest()
        return keys.answers(f"{self._prefix}:{tag}")

    def listen(self, user_id: str, link: ValkeyLink | None) -> None:
        """Subscribes to the user's channel, ahead of all that is sent on this connection from now
        on."""
        channel = self._by_user.get(user_id)
        if channel is None:
            channel = _Channel(user_id, self.name_of(user_id))
            self._by_user[user_id] = self._by_name[channel.name.encode()] = channel
            if len(self._by_user) > MAX_CHANNELS:
                _, oldest = self._by_user.popitem(last=False)
                del self._by_name[oldest.name.encode()]
                self._unsubscribe(oldest)
        self._by_user.move_to_end(user_id)
        if (
            link is not None
            and channel.link is not link
            and time.monotonic() >= channel.unsubscribed_until
        ):
            channel.link = link
            link.subscribe(channel.name)

    def is_open(self, name: bytes) -> bool:
        """Returns True if this process is subscribed;
        messages may still arrive after an unsubscribe."""
        channel = self._by_name.get(name)
        return channel is not None and channel.link is not None

    def count_unawaited(self, name: bytes, size: int) -> None:
        """Counts a message of `size` bytes that nobody awaits;
        leaves its channel if these are too many."""
        channel, now = self._by_name[name], time.monotonic()
        if now - channel.counted_since > FLOOD_WINDOW_S:
            channel.counted_since, channel.unawaited = now, 0.0
        channel.unawaited += 1 + size / 1024
        if channel.unawaited > MAX_UNAWAITED_KIB:
            channel.unsubscribed_until, channel.unawaited = now + UNSUBSCRIBED_FOR_S, 0.0
            self._unsubscribe(channel)
            self._log.error("answers_flooded", user_id=channel.user_id, left_for=UNSUBSCRIBED_FOR_S)

    @staticmethod
    def _unsubscribe(channel: _Channel) -> None:
        link, channel.link = channel.link, None
        if link is not None:
            link.unsubscribe(channel.name)


@dataclass(eq=False)
class AnswerListener(AnswerReader):
    """Receives answers as messages, and reads those that it missed from their response keys.

    It subscribes before a request is queued. `generation` raises while it is not connected.
    """

    channels: AnswerChannels = field(default_factory=AnswerChannels)

    def __post_init__(self) -> None:
        super().__post_init__()
        self._generation: str | None = None
        #: Why there is no generation.
        self._why_not = UNREACHABLE
        self._link: ValkeyLink | None = None
        #: Set after the first attempt to connect, whatever came of it.
        self._tried = asyncio.Event()
        self._task: asyncio.Task[None] | None = None
        self._log = structlog.get_logger()

    @property
    def generation(self) -> str:
        """Valkey's generation on the present connection;
        raises `ValkeyUnavailable` when there is none."""
        if self._generation is None:
            raise ValkeyUnavailable(self._why_not)
        return self._generation

    @property
    def link(self) -> ValkeyLink | None:
        """The connection on which answers come,
        for what each order asks of Valkey; None: there is none."""
        link = self._link
        return None if link is None or link.lost.done() else link

    def seconds_until_look(self, queued: QueuedRequest) -> float:
        return CHECK_INTERVAL_S if queued.new else FIRST_REPEAT_LOOK_S

    async def start(self, timeout_s: float = FIRST_CONNECT_TIMEOUT_S) -> None:
        """Starts the reader and gives its first attempt
        `timeout_s` seconds; it keeps trying after that."""
        self._task = asyncio.create_task(self._run(), name="answers")
        with suppress(TimeoutError):
            async with asyncio.timeout(timeout_s):
                await self._tried.wait()

    async def close(self) -> None:
        await tasks.cancel_tasks(self._task)
        for pending in self._pending.values():
            pending.future.cancel()
        self._pending.clear()

    def _listen_for(self, user_id: str) -> None:
        self.channels.listen(user_id, self.link)

    def _on_message(self, channel: bytes, data: bytes) -> None:
        if self.channels.is_open(channel) and not self._take(data):
            self.channels.count_unawaited(channel, len(data))

    def _take(self, data: bytes) -> bool:
        """Completes the future that awaits this answer; returns False if nobody does."""
        signed = self._authenticator.decode(data)
        pending = None if signed is None else self._pending.get(signed.answer.request_id)
        if signed is None or pending is None or pending.future.done():
            return False
        answer = self._authenticator.check(
            signed, pending.user_id, signed.answer.request_id, pending.order_id, pending.first_epoch
        )
        if answer is not None:
            pending.future.set_result(answer)
        return answer is not None

    async def _run(self) -> None:
        while True:
            link = None
            try:
                link = await ValkeyLink.connect(self.client, self._on_message)
                await self._connect(link)
                await self._listen(link)
            except (RedisError, OSError) as error:
                self._why_not = explain_failure(error)
                if isinstance(error, DiedSilently):
                    valkey.pool_of(self.client).suspect_all()
                if self._generation is not None:
                    self._log.warning(
                        "answers_disconnected", reason=str(error), pending=self.pending
                    )
            finally:
                self._generation = None
                self._tried.set()
                self._link = None
                if link is not None:
                    link.close()
            await asyncio.sleep(RECONNECT_INTERVAL_S)

    async def _connect(self, link: ValkeyLink) -> None:
        await link.read_clock()
        self._link = link
        for user_id in {pending.user_id for pending in self._pending.values()}:
            self.channels.listen(user_id, link)
        await link.execute("PING")  # from now on everything that is published arrives
        self._generation = await valkey.ensure_generation(self.client, uuid4().hex)
        self._tried.set()
        self._log.info("answers_connected", generation=self._generation, pending=self.pending)
        for request_id in list(self._pending):
            await self.read_pending(request_id)

    async def _listen(self, link: ValkeyLink) -> None:
        """Listens and never returns; raises the reason when the connection is lost."""
        checking = asyncio.create_task(self._check(link))
        try:
            either: set[asyncio.Future[Any]] = {checking, link.lost}
            await asyncio.wait(either, return_when=asyncio.FIRST_COMPLETED)
        finally:
            await tasks.cancel_tasks(checking)
        if link.lost.done():
            raise link.lost.result()
        checking.result()

    async def _check(self, link: ValkeyLink) -> None:
        while True:
            await asyncio.sleep(CHECK_INTERVAL_S)
            await link.read_clock()  # finds a dead connection before an order does
            generation = await valkey.ensure_generation(self.client, uuid4().hex)
            if generation != self._generation:
                self._log.warning("generation_changed", before=self._generation, now=generation)
                self._generation = generation
