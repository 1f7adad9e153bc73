"""A user's request queue in Valkey, from the API's side."""

from __future__ import annotations

from dataclasses import dataclass

from redis.asyncio import Redis

from infra import valkey
from worker_runtime.protocol import keys, scripts
from worker_runtime.protocol.frames import Frame, parse
from worker_runtime.protocol.messages import Answer, PlaceOrder, encode

#: Milliseconds that a request id is remembered after its deadline.
SEEN_AFTER_DEADLINE = 3_600_000


@dataclass(frozen=True, slots=True)
class Queued:
    frame: Frame
    #: False: the request had been enqueued before, and was not again.
    new: bool
    #: A live worker's mark is there.
    marked: bool


class RequestQueue:
    """Every call is one round trip, and may be repeated. All raise `RedisError` when Valkey is down."""

    def __init__(self, client: Redis) -> None:
        self._client = client

    async def enqueue(self, order: PlaceOrder, ttl: float) -> Queued:
        """Queues an order once, with a deadline `ttl` seconds from now by Valkey's clock."""
        user = order.user_id
        new, item, mark = await valkey.run(
            self._client,
            scripts.ENQUEUE,
            [
                keys.seen(user, order.request_id),
                keys.requests(user),
                keys.doorbell(user),
                keys.mark(user),
            ],
            [order.request_id, encode(order), max(1, int(ttl * 1000)), SEEN_AFTER_DEADLINE],
        )
        return Queued(frame=parse(item), new=bool(new), marked=bool(mark))

    async def withdraw(self, user_id: str, frame: Frame, answer: Answer) -> bool:
        """True if the request was still queued: it will never be executed, and `answer` says so to all."""
        return bool(
            await valkey.run(
                self._client,
                scripts.WITHDRAW,
                [keys.requests(user_id), keys.response(user_id, frame.request_id)],
                [frame.raw, encode(answer), keys.ANSWER_TTL],
            )
        )

    async def marked(self, user_id: str) -> bool:
        return bool(await self._client.exists(keys.mark(user_id)))
