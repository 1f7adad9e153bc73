"""A user's request queue in Valkey, from the side of those who ask: the API and the orchestrator."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from datetime import datetime
from enum import StrEnum
from uuid import UUID, uuid4

from redis.asyncio import Redis

from infra.database.models import Order
from infra.valkey import client as valkey
from infra.valkey.link import ValkeyLink
from worker_runtime.protocol import keys, scripts
from worker_runtime.protocol.errors import BerthError, MalformedMessage, UnsupportedSchema
from worker_runtime.protocol.messages import (
    Answer,
    OrderOutcome,
    OrderState,
    PlaceOrder,
    PriceType,
    Side,
    TimeInForce,
    decode,
    encode,
)
from worker_runtime.protocol.requests import Frame, Request, parse_frame

#: Seconds by which the clocks of PostgreSQL and Valkey may differ.
CLOCKS = 1.0
#: Milliseconds that a request id is remembered after its deadline.
SEEN_AFTER_DEADLINE = 3_600_000
#: Codes of answers to requests that could not be read.
_UNREAD = frozenset({MalformedMessage.code, UnsupportedSchema.code})


@dataclass(frozen=True, slots=True)
class QueuedRequest:
    frame: Frame
    #: False: the request had been enqueued before, and was not again.
    new: bool
    #: A live worker's mark is there.
    marked: bool


class RequestFate(StrEnum):
    """What has become of a request whose deadline has passed."""

    ANSWERED = "answered"  # by a worker, or by whoever took it back
    JOURNALED = "journaled"  # a worker was about to call the broker: it may have
    PROCESSING = "processing"  # a worker has taken it and not answered; it may be dead
    WITHDRAWN = "withdrawn"  # it was still queued, and is taken back now
    ABSENT = "absent"  # nobody has it, and nobody was about to call the broker; it cannot be queued any more


class RequestQueue:
    """Every call is one round trip, and may be repeated. All raise `RedisError` when Valkey is down.

    `link`: a connection to the same server that is open at the moment, for what each order does.
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
        link = self._link()
        if link is None:
            reply = await valkey.run_script(self._client, scripts.ENQUEUE, key_names, args)
        else:
            reply = await link.run(scripts.ENQUEUE, key_names, args)
        new, item, mark = reply
        return QueuedRequest(frame=parse_frame(item), new=bool(new), marked=bool(mark))

    async def withdraw(self, user_id: str, frame: Frame, answer: Answer) -> bool:
        """True if the request was still queued: it will never be executed, and `answer` says so to all."""
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
        """What has become of an order whose deadline has passed, and the answer if there is one.

        One that is still queued is taken back with `answer`, and one that never was can never be from now on.
        Holds for the generation of Valkey under which it is called; only its journal tells of a submission.
        After `ABSENT` the caller looks at the generation, and then leaves the answer.
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

    async def leave(self, user_id: str, answer: Answer) -> None:
        """Leaves an answer where a worker's would be, for who waits or comes back; an earlier one stays."""
        key = keys.response(user_id, answer.request_id)
        await self._client.set(key, encode(answer), ex=keys.ANSWER_TTL, nx=True)

    async def may_be_stale(self, accepted_at: datetime) -> bool:
        """Whether what the server knows of an order of that time may be an older copy of what another one
        knew: then its queue and its journal do not prove that no worker has had the order."""
        return accepted_at.timestamp() < await valkey.server_known_since(self._client) + CLOCKS

    async def over(self, user_id: str, request_id: str) -> bool:
        """Whether the deadline of a request has passed, by Valkey's clock: nobody will begin it any more."""
        return int(await self._client.pttl(keys.seen(user_id, request_id))) <= SEEN_AFTER_DEADLINE

    async def generation(self) -> str:
        """Valkey's generation now."""
        return await valkey.ensure_generation(self._client, uuid4().hex)

    async def answer(self, user_id: str, request_id: str) -> Answer | None:
        """The answer that stands in the response key, if any."""
        return _answer_of(await self._client.get(keys.response(user_id, request_id)))

    async def marked(self, user_id: str) -> bool:
        return bool(await self._client.exists(keys.mark(user_id)))

    async def remind(self, user_id: str) -> bool:
        """`marked`, and rings again if anything waits: a frozen worker may have taken the ring."""
        names = [
            *(keys.requests(user_id), keys.doorbell(user_id)),
            *(keys.mark(user_id), keys.control(user_id)),
        ]
        return bool(await valkey.run_script(self._client, scripts.RING_DOORBELL, names, []))


def place_request(
    order: Order, reply_to: str, unknown_blocks: str = "symbol", lasts: float | None = None
) -> PlaceOrder:
    """The request that an order's row stands for. `reply_to`: the channel of who waits, or ''.

    `lasts`: seconds from its acceptance to its deadline; None: as its row says.
    """
    if lasts is None:
        lasts = (order.deadline_at - order.created_at).total_seconds()
    order_id = str(order.id)
    return PlaceOrder(
        request_id=order_id,
        order_id=order_id,
        user_id=order.user_id,
        account_id=order.account_id,
        symbol=order.symbol,
        side=Side(order.side),
        quantity=order.quantity,
        price_type=PriceType(order.price_type),
        price=order.price,
        time_in_force=TimeInForce(order.time_in_force),
        tag=order.tag,
        reply_to=reply_to,
        generation=order.generation,
        reduce_only=order.reduce_only,
        unknown_blocks=unknown_blocks,
        lifetime_ms=max(1, round(lasts * 1000)),
    )


def _answer_of(data: bytes | str | None) -> Answer | None:
    if not data:
        return None
    try:
        answer: Answer = decode(data, Answer)
    except MalformedMessage:
        return None
    return answer


def outcome_of(answer: Answer, order_id: str) -> tuple[OrderOutcome, str | None]:
    """What an answer says of an order, and the code if it is a failure."""
    code = answer.failure.code if answer.failure else None
    if answer.outcome is not None:
        return answer.outcome, code
    # Who could not read the request has sent nothing; of any other failure nobody knows when it struck.
    state = OrderState.REJECTED if code in _UNREAD else OrderState.UNKNOWN
    detail = answer.failure.detail if answer.failure else "the worker gave no outcome"
    return OrderOutcome(order_id=order_id, state=state, reason=detail), code or BerthError.code
