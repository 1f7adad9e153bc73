"""Receives the answers of workers: one reader per process, one channel per user, one future per
request.

A worker knows only the channel of its own user, whose name nobody can guess, and may publish
anything on it. The listener unsubscribes from a channel that is flooded for 600 s. Answers to that
user are then read from their response keys, up to a second later (`AnswerWaiter`); other users
notice nothing.

A published message can be lost while the connection is down. So after each connect the listener
reads the response keys of all pending requests. Valkey keeps a response key for 60 s.
"""

import asyncio
import os
import secrets
import socket
import time
from collections import OrderedDict
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from hashlib import blake2b
from typing import Any
from uuid import uuid4

import structlog
from redis.asyncio import Redis
from redis.exceptions import RedisError

from api.http.errors import ValkeyUnavailable
from infra import tasks
from infra.temporal.starter import WorkerStarter
from infra.valkey import client as valkey
from infra.valkey.answer_authenticator import AnswerAuthenticator
from infra.valkey.failures import UNREACHABLE, explain_failure
from infra.valkey.link import DiedSilently, ValkeyLink
from infra.valkey.request_queue import QueuedRequest, RequestQueue
from infra.vault.message_secret import MessageSecrets
from worker_runtime.protocol import keys
from worker_runtime.protocol.errors import BerthError
from worker_runtime.protocol.messages import Answer

#: Seconds between two checks at the generation; a flushed or frozen Valkey is noticed within this
#: time plus the client's socket timeout.
CHECK_INTERVAL_S = 1.0
#: Seconds between two attempts to reconnect.
RECONNECT_INTERVAL_S = 0.1
#: Seconds for the first attempt: a Valkey that is gone fails it at once, one that stands still, as
#: a busy host does for 2 to 3 s, is waited for.
FIRST_CONNECT_TIMEOUT_S = 5.0
#: Users whose channels are listened to; the one that asked for nothing for the longest time goes
#: first.
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
        """Returns True if this process is subscribed; messages may still arrive after an
        unsubscribe."""
        channel = self._by_name.get(name)
        return channel is not None and channel.link is not None

    def count_unawaited(self, name: bytes, size: int) -> None:
        """Counts a message of `size` bytes that nobody awaits; leaves its channel if these are too
        many."""
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
class _PendingAnswer:
    user_id: str
    order_id: str
    first_epoch: int
    future: asyncio.Future[Answer]
    waiters: int = 0


@dataclass(eq=False)
class AnswerListener:
    """Subscribes before a request is queued. `generation` raises while it is not connected."""

    client: Redis
    message_secrets: MessageSecrets
    channels: AnswerChannels = field(default_factory=AnswerChannels)

    def __post_init__(self) -> None:
        self._authenticator = AnswerAuthenticator(self.message_secrets)
        self._pending: dict[str, _PendingAnswer] = {}
        self._generation: str | None = None
        #: Why there is none.
        self._why_not = UNREACHABLE
        self._link: ValkeyLink | None = None
        #: Set after the first attempt to connect, whatever came of it.
        self._tried = asyncio.Event()
        self._task: asyncio.Task[None] | None = None
        self._log = structlog.get_logger()

    @property
    def generation(self) -> str:
        """Valkey's generation on the present connection; raises `ValkeyUnavailable` when there is
        none."""
        if self._generation is None:
            raise ValkeyUnavailable(self._why_not)
        return self._generation

    @property
    def link(self) -> ValkeyLink | None:
        """The connection on which answers come, for what each order asks of Valkey; None: there is
        none."""
        link = self._link
        return None if link is None or link.lost.done() else link

    @property
    def pending(self) -> int:
        return len(self._pending)

    async def start(self, timeout_s: float = FIRST_CONNECT_TIMEOUT_S) -> None:
        """Starts the reader and gives its first attempt `timeout_s` seconds; it keeps trying after
        that."""
        self._task = asyncio.create_task(self._run(), name="answers")
        with suppress(TimeoutError):
            async with asyncio.timeout(timeout_s):
                await self._tried.wait()

    async def close(self) -> None:
        await tasks.cancel_tasks(self._task)
        for pending in self._pending.values():
            pending.future.cancel()
        self._pending.clear()

    @contextmanager
    def expect(
        self, user_id: str, request_id: str, order_id: str, first_epoch: int
    ) -> Iterator[asyncio.Future[Answer]]:
        """Yields the future of one answer (`AnswerAuthenticator.read`). All who expect it share it,
        and the last one forgets it."""
        pending = self._pending.get(request_id)
        if pending is None:
            future = asyncio.get_running_loop().create_future()
            pending = _PendingAnswer(user_id, order_id, first_epoch, future)
            self._pending[request_id] = pending
            self.channels.listen(user_id, self.link)
        pending.waiters += 1
        try:
            yield pending.future
        finally:
            pending.waiters -= 1
            if not pending.waiters:
                pending.future.cancel()
                self._pending.pop(request_id, None)

    async def read(
        self, user_id: str, request_id: str, order_id: str, first_epoch: int
    ) -> Answer | None:
        """Returns the answer in the response key, if any, and hands it to the call that waits for
        it."""
        data = await valkey.read_answer(self.client, user_id, request_id)
        answer = self._authenticator.read(data, user_id, request_id, order_id, first_epoch)
        pending = self._pending.get(request_id)
        if answer is not None and pending is not None and not pending.future.done():
            pending.future.set_result(answer)
        return answer

    async def read_pending(self, request_id: str) -> Answer | None:
        """`read` for a request whose answer is expected here."""
        pending = self._pending.get(request_id)
        if pending is None:
            return None
        return await self.read(pending.user_id, request_id, pending.order_id, pending.first_epoch)

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
        """Returns never; raises the reason when the connection is lost."""
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


#: Seconds without an answer after which the mark is checked again: the worker may have died
#: meanwhile.
MARK_CHECK_INTERVAL_S = 1.0
#: The first check of a request that was enqueued before, perhaps by another process: its answer may
#: be published there, and only the response key is ours to see. Doubles up to
#: `MARK_CHECK_INTERVAL_S`.
FIRST_CHECK_INTERVAL_S = 0.05


#: Seconds past a request's deadline for which an answer is awaited: a worker that popped the
#: request right before the deadline answers by then.
ANSWER_GRACE_S = 1.0


@dataclass(frozen=True, eq=False)
class AnswerWaiter:
    queue: RequestQueue
    answers: AnswerListener
    starter: WorkerStarter

    async def wait(
        self,
        user_id: str,
        queued: QueuedRequest,
        answer: asyncio.Future[Answer],
        until: float,
        *,
        has_live_worker: bool,
    ) -> BerthError | None:
        """Waits for the answer until `until` (time.monotonic). Returns an error if no worker can be
        started.

        `has_live_worker`: assume until the first check that the user has a live worker.
        """
        pause = MARK_CHECK_INTERVAL_S if queued.new else FIRST_CHECK_INTERVAL_S
        checks = 0
        while not answer.done() and (seconds_left := until - time.monotonic()) > 0:
            if not has_live_worker:
                error = await self._ensure_worker(user_id, answer, seconds_left)
                if error is not None:
                    return error
            await asyncio.wait({answer}, timeout=min(pause, max(0.0, until - time.monotonic())))
            pause = min(pause * 2, MARK_CHECK_INTERVAL_S)
            if not answer.done():
                checks += 1
                # Only at checks 1, 2, 4, 8…: while the broker is away, orders wait in the queue on
                # purpose.
                ring = checks.bit_count() == 1
                has_live_worker = await self._check_mark(
                    user_id, queued.frame.request_id, ring=ring
                )
        return None

    async def _ensure_worker(
        self, user_id: str, answer: asyncio.Future[Answer], timeout: float
    ) -> BerthError | None:
        """Starts a worker, and waits for it or for the answer. Returns the error if none will
        start."""
        task = self.starter.ensure(user_id, mark_missing=True)
        either: set[asyncio.Future[Any]] = {task, answer}
        await asyncio.wait(either, timeout=timeout, return_when=asyncio.FIRST_COMPLETED)
        if answer.done() or not task.done() or task.cancelled():
            return None
        error = task.exception()
        if error is None or isinstance(error, BerthError):
            return error
        return BerthError("the worker could not be started")

    async def _check_mark(self, user_id: str, request_id: str, *, ring: bool) -> bool:
        """Returns True if the user has a live worker; first reads the answer, which may have been
        missed.

        `ring`: also rings the doorbell again if the request still waits.
        """
        try:
            await self.answers.read_pending(request_id)
            return await (self.queue.ring_again if ring else self.queue.has_live_worker)(user_id)
        except RedisError:
            return True  # Valkey is away, so nothing is known: start no worker
