"""A user's request queue in Valkey, as the API and the orchestrator use it."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from datetime import datetime
from enum import StrEnum
from uuid import UUID, uuid4

from redis.asyncio import Redis

from infra.valkey import client as valkey
from infra.valkey.link import ValkeyLink
from worker_runtime.protocol import keys, scripts
from worker_runtime.protocol.errors import BerthError, MalformedMessage, UnsupportedSchema
from worker_runtime.protocol.messages import (
    Answer,
    OrderOutcome,
    OrderState,
    decode,
    encode,
)
from worker_runtime.protocol.requests import Frame, Request, parse_frame

#: Seconds by which the clocks of PostgreSQL and Valkey may differ.
CLOCKS = 1.0
#: Milliseconds for which a request id is remembered after its deadline.
SEEN_AFTER_DEADLINE = 3_600_000
#: Codes of answers to requests that could not be decoded.
_UNREAD = frozenset({MalformedMessage.code, UnsupportedSchema.code})


@dataclass(frozen=True, slots=True)
class QueuedRequest:
    frame: Frame
    #: False: the request was enqueued before.
    new: bool
    #: The user has a live worker.
    marked: bool


class RequestFate(StrEnum):
    """What became of a request whose deadline has passed."""

    ANSWERED = "answered"  # by a worker, or by the process that withdrew it
    JOURNALED = "journaled"  # a worker was about to call the broker: it may have
    PROCESSING = "processing"  # a worker took it and has not answered; it may be dead
    WITHDRAWN = "withdrawn"  # it was still queued, and is withdrawn now
    ABSENT = "absent"  # no worker has it or was about to call the broker, and it cannot be queued any more


class RequestQueue:
    """Every call is one round trip and safe to repeat. All raise `RedisError` when Valkey is down.

    `link` returns an open link to the same server, if there is one, for the calls of every order.
    """

    def __init__(self, client: Redis, link: Callable[[], ValkeyLink | None] = lambda: None) -> None:
        self._client = client
        self._link = link

    async def enqueue(self, request: Request, ttl: float) -> QueuedRequest:
        """Queues a request once, with a deadline `ttl` seconds from now by Valkey's clock."""
        user = request.user_id
        key_names = [
            keys.seen(user, request.request_id),
            keys.requests(user),
            keys.doorbell(user),
            keys.mark(user),
        ]
        args = [request.request_id, encode(request), max(1, int(ttl * 1000)), SEEN_AFTER_DEADLINE]
        if (link := self._link()) is not None:
            new, item, mark = await link.run(scripts.ENQUEUE, key_names, args)
        else:
            new, item, mark = await valkey.run_script(self._client, scripts.ENQUEUE, key_names, args)
        return QueuedRequest(frame=parse_frame(item), new=bool(new), marked=bool(mark))

    async def withdraw(self, user_id: str, frame: Frame, answer: Answer) -> bool:
        """Removes a request that is still queued and stores `answer` for it; False if it was not queued."""
        return bool(
            await valkey.run_script(
                self._client,
                scripts.WITHDRAW,
                [keys.requests(user_id), keys.response(user_id, frame.request_id)],
                [frame.raw, encode(answer), keys.ANSWER_TTL],
            )
        )

    async def overdue(
        self, user_id: str, order_id: UUID, answer: Answer
    ) -> tuple[RequestFate, Answer | None]:
        """Finds what became of an order whose deadline has passed, with its answer if there is one.

        An order that is still queued is withdrawn with `answer`; one that never was cannot be queued from now
        on. This holds within one generation of Valkey: after `ABSENT` the caller checks the generation before
        it stores the answer.
        """
        request_id = str(order_id)
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
            [request_id, encode(answer), keys.ANSWER_TTL, SEEN_AFTER_DEADLINE],
        )
        return RequestFate(bytes(fate).decode()), _answer_of(data)

    async def store_answer(self, user_id: str, answer: Answer) -> None:
        """Stores an answer in place of a worker's; an earlier answer stays."""
        key = keys.response(user_id, answer.request_id)
        await self._client.set(key, encode(answer), ex=keys.ANSWER_TTL, nx=True)

    async def may_be_stale(self, accepted_at: datetime) -> bool:
        """Whether the server may hold older data than an order of this time.

        Then its queue and journal do not prove that no worker has had the order.
        """
        return accepted_at.timestamp() < await valkey.server_known_since(self._client) + CLOCKS

    async def deadline_passed(self, user_id: str, request_id: str) -> bool:
        """Whether the deadline of a request has passed by Valkey's clock, so that no worker will begin it."""
        return int(await self._client.pttl(keys.seen(user_id, request_id))) <= SEEN_AFTER_DEADLINE

    async def generation(self) -> str:
        """Returns Valkey's present generation."""
        return await valkey.ensure_generation(self._client, uuid4().hex)

    async def answer(self, user_id: str, request_id: str) -> Answer | None:
        """Returns the stored answer to a request, if any."""
        return _answer_of(await self._client.get(keys.response(user_id, request_id)))

    async def marked(self, user_id: str) -> bool:
        return bool(await self._client.exists(keys.mark(user_id)))

    async def ring_again(self, user_id: str) -> bool:
        """Like `marked`, and rings if requests wait: a frozen worker may have taken the last ring."""
        names = [
            *(keys.requests(user_id), keys.doorbell(user_id)),
            *(keys.mark(user_id), keys.control(user_id)),
        ]
        return bool(await valkey.run_script(self._client, scripts.RING_DOORBELL, names, []))


def _answer_of(data: bytes | str | None) -> Answer | None:
    if not data:
        return None
    try:
        answer: Answer = decode(data, Answer)
    except MalformedMessage:
        return None
    return answer


def outcome_of(answer: Answer, order_id: str) -> tuple[OrderOutcome, str | None]:
    """Returns the order's outcome in an answer, and the code of a failure."""
    code = answer.failure.code if answer.failure else None
    if answer.outcome is not None:
        return answer.outcome, code
    # A worker that could not decode the request has sent nothing; any other failure may have come after.
    state = OrderState.REJECTED if code in _UNREAD else OrderState.UNKNOWN
    detail = answer.failure.detail if answer.failure else "the worker gave no outcome"
    return OrderOutcome(order_id=order_id, state=state, reason=detail), code or BerthError.code
