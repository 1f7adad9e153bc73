"""A user's request queue in Valkey, as the API and the orchestrator use it."""

import math
import time
from collections.abc import Callable
from dataclasses import dataclass
from datetime import datetime
from enum import StrEnum
from uuid import uuid4

from redis.asyncio import Redis

from infra.database.orders.acceptance import StoredOrder
from infra.valkey import client as valkey
from infra.valkey.answer_authenticator import AnswerAuthenticator
from infra.valkey.client import text_of
from infra.valkey.link import ValkeyLink
from infra.valkey.memory import REFUSED_ABOVE_PERMILLE
from infra.vault.message_secret import MessageSecrets
from worker_runtime.protocol import keys, scripts
from worker_runtime.protocol.errors import MemoryShort
from worker_runtime.protocol.messages import Answer, encode
from worker_runtime.protocol.requests import Frame, Request, parse_frame, sign_request

#: Seconds by which the clocks of PostgreSQL and Valkey may differ.
MAX_CLOCK_SKEW_S = 1.0
#: Milliseconds for which a request id is remembered after its deadline.
SEEN_AFTER_DEADLINE_MS = 3_600_000
#: Reply of `enqueue.lua`: another order uses this client order id.
REPLY_CLIENT_ID_TAKEN = 2
#: Reply of `enqueue.lua`: the order was refused, because memory is short.
REPLY_MEMORY_SHORT = 3
#: Milliseconds for which an order is known by its client order id: repeats come within a day.
CLIENT_ID_TTL_MS = 86_400_000


@dataclass(frozen=True, slots=True)
class QueuedRequest:
    frame: Frame
    #: False: the request was enqueued before.
    new: bool
    #: The user has a live worker.
    has_live_worker: bool


class ClientOrderIdTaken(Exception):
    """Another order was queued under this client order id, but PostgreSQL has lost it.

    The broker's list shows its outcome under `tag`.
    """

    def __init__(self, order_id: str, tag: str) -> None:
        super().__init__(order_id)
        self.tag = tag
        self.reason = (
            f"order {order_id} was sent under this client order id before PostgreSQL was restored"
        )


class RequestFate(StrEnum):
    """Says what happened to a request that is overdue or to be cancelled."""

    ANSWERED = "answered"  # by a worker, or by the process that withdrew it
    JOURNALED = "journaled"  # a worker was about to call the broker: it may have
    PROCESSING = "processing"  # a worker took it and has not answered; it may be dead
    WITHDRAWN = "withdrawn"  # it was still queued, and is withdrawn now
    # No worker has it or was about to call the broker, and it cannot be queued any more.
    ABSENT = "absent"


class RequestQueue:
    """Every call is one round trip and safe to repeat. All raise `RedisError` when Valkey is down.

    `link` returns an open link to the same server, if there is one, for the calls of every order.
    """

    def __init__(
        self,
        client: Redis,
        message_secrets: MessageSecrets,
        link: Callable[[], ValkeyLink | None] = lambda: None,
    ) -> None:
        self._client = client
        self._secrets = message_secrets
        self._answers = AnswerAuthenticator(message_secrets)
        self._link = link

    async def enqueue(
        self, request: Request, expires_at: float, order: StoredOrder | None = None
    ) -> QueuedRequest:
        """Queues a request once, with a deadline by Valkey's clock.

        `expires_at`: the deadline on `time.monotonic`, seconds. It is an instant, because a
        duration would start late if this process stands still. The order would then look newer than
        it is, and a worker could execute it a second time from an older copy of the queue. A
        request that comes too late is queued with the deadline that has passed, and no worker
        begins it.

        The deadline is signed, so it is set here and not by the script; no wall clock of this host
        matters. `order`: the order that the request places. Raises `ClientOrderIdTaken` and, for an
        order that was not queued before while memory is short, `MemoryShort`.
        """
        user = request.user_id
        link = self._link()
        now_ms = await valkey.read_clock(self._client) if link is None else link.server_ms()
        # After the server's clock was read: a wait for it makes the deadline earlier, never later.
        deadline_ms = now_ms + math.floor((expires_at - time.monotonic()) * 1000)
        payload = encode(request)
        key_names = keys.enqueueing(user, request.request_id)
        mac = sign_request(
            self._secrets.request_keys(user), user, request.request_id, deadline_ms, payload
        )
        args = [request.request_id, payload, deadline_ms, SEEN_AFTER_DEADLINE_MS, mac]
        if order is not None:
            key_names.append(keys.client_order(user, order.client_order_id))
            args += [order.tag, CLIENT_ID_TTL_MS, REFUSED_ABOVE_PERMILLE]
        if link is not None:
            new, item, mark = await link.run(scripts.ENQUEUE, key_names, args)
        else:
            new, item, mark = await valkey.run_script(
                self._client, scripts.ENQUEUE, key_names, args
            )
        if new == REPLY_CLIENT_ID_TAKEN:
            raise ClientOrderIdTaken(*text_of(item).split("|", 1))
        if new == REPLY_MEMORY_SHORT:
            raise MemoryShort(retry_after=MemoryShort.RETRY_AFTER_S)
        return QueuedRequest(frame=parse_frame(item), new=bool(new), has_live_worker=bool(mark))

    async def withdraw(self, user_id: str, frame: Frame, answer: Answer) -> bool:
        """Removes a queued request and stores `answer` for it; False if it was not queued."""
        return bool(
            await valkey.run_script(
                self._client,
                scripts.WITHDRAW,
                keys.withdrawing(user_id, frame.request_id),
                [frame.raw, self._answers.sign(user_id, answer), keys.ANSWER_TTL_S],
            )
        )

    async def withdraw_or_resolve(
        self, order: StoredOrder, answer: Answer
    ) -> tuple[RequestFate, Answer | None]:
        """Returns the fate of an order that is overdue or cancelled,
        with its answer if there is one.

        An order that is still queued is withdrawn with `answer`; one that never was cannot be
        queued from now on. This holds within one generation of Valkey: after `ABSENT` the caller
        checks the generation before it stores the answer.
        """
        user_id, request_id = order.user_id, str(order.id)
        fate, data = await valkey.run_script(
            self._client,
            scripts.RESOLVE_OVERDUE,
            [
                keys.seen(user_id, request_id),
                keys.requests(user_id),
                keys.processing(user_id),
                keys.journal(user_id, request_id),
                keys.response(user_id, request_id),
            ],
            [
                request_id,
                self._answers.sign(user_id, answer),
                keys.ANSWER_TTL_S,
                SEEN_AFTER_DEADLINE_MS,
            ],
        )
        stored = self._answers.read(data, user_id, request_id, request_id, order.first_epoch)
        return RequestFate(bytes(fate).decode()), stored

    async def store_answer(self, user_id: str, answer: Answer) -> None:
        """Stores an answer in place of a worker's; an earlier answer stays."""
        key = keys.response(user_id, answer.request_id)
        await self._client.set(
            key, self._answers.sign(user_id, answer), ex=keys.ANSWER_TTL_S, nx=True
        )

    async def may_have_lost_order(self, accepted_at: datetime) -> bool:
        """Returns True if the server may lack what was written after `accepted_at`.

        Then its queue and journal do not prove that no worker has had the order.
        """
        return (
            accepted_at.timestamp()
            < await valkey.server_known_since(self._client) + MAX_CLOCK_SKEW_S
        )

    async def deadline_passed(self, user_id: str, request_id: str) -> bool:
        """Returns True if the deadline has passed by Valkey's clock: no worker will begin it."""
        return (
            int(await self._client.pttl(keys.seen(user_id, request_id))) <= SEEN_AFTER_DEADLINE_MS
        )

    async def generation(self) -> str:
        return await valkey.ensure_generation(self._client, uuid4().hex)

    async def answer(
        self, user_id: str, request_id: str, order_id: str, first_epoch: int
    ) -> Answer | None:
        """Returns the stored answer to a request, if any (`AnswerAuthenticator.read`)."""
        data = await valkey.read_answer(self._client, user_id, request_id)
        return self._answers.read(data, user_id, request_id, order_id, first_epoch)

    async def has_live_worker(self, user_id: str) -> bool:
        return bool(await self._client.exists(keys.mark(user_id)))

    async def ring_again(self, user_id: str) -> bool:
        """Returns what `has_live_worker` does; also rings if requests wait, in case the last ring
        was missed."""
        names = [
            keys.requests(user_id),
            keys.doorbell(user_id),
            keys.mark(user_id),
            keys.control(user_id),
        ]
        return bool(await valkey.run_script(self._client, scripts.RING_DOORBELL, names, []))
