"""A worker as the API sees it: a mark, a loop of `pop.lua`, answers by script."""

from __future__ import annotations

import asyncio
import itertools
from collections.abc import Callable
from contextlib import suppress
from decimal import Decimal

from redis.asyncio import Redis
from redis.exceptions import RedisError

from infra import tasks
from infra.valkey import client as valkey
from tests.support.message_signing import SECRETS, switch_words, worker_answer, worker_metadata
from worker_runtime.protocol import keys, scripts
from worker_runtime.protocol.messages import (
    Answer,
    Failure,
    OrderOutcome,
    OrderState,
    PlaceOrder,
    decode,
)
from worker_runtime.protocol.requests import (
    CancelOrder,
    ListInstruments,
    QueryAccount,
    ReplaceOrder,
    Request,
    parse_frame,
)

#: What the worker does with an order; None: it never answers.
Script = Callable[[PlaceOrder], Answer | None]
#: What else it may be asked for.
Question = CancelOrder | ReplaceOrder | QueryAccount | ListInstruments


def filled(order: PlaceOrder) -> Answer:
    price = order.price or Decimal("100")
    outcome = OrderOutcome(
        order_id=order.order_id,
        state=OrderState.FILLED,
        broker_order_id=f"P-{order.tag}",
        filled_quantity=order.quantity,
        average_price=price,
    )
    return Answer(request_id=order.request_id, outcome=outcome)


def failed(state: OrderState, failure: Failure) -> Script:
    def script(order: PlaceOrder) -> Answer:
        reason = f"{failure.code}: {failure.detail}"
        outcome = OrderOutcome(order_id=order.order_id, state=state, reason=reason)
        return Answer(request_id=order.request_id, outcome=outcome, failure=failure)

    return script


def silent(order: PlaceOrder) -> None:
    return None


class ScriptedWorker:
    """Serves one user until it is stopped. `popped` are the orders it took, `asked` all else, in
    order."""

    def __init__(
        self, url: str, user_id: str, script: Script = filled, *, announce: bool = True
    ) -> None:
        self.user_id = user_id
        self.script = script
        #: False: answers are stored but not published, as if the message were lost.
        self.announce = announce
        self.popped: list[PlaceOrder] = []
        self.asked: list[Question] = []
        #: What it says to cancels, changes and queries; None: nothing.
        self.reply: Callable[[Question], Answer | None] = lambda question: None
        self.taken = asyncio.Event()
        self._client = valkey.connect_valkey(url, socket_timeout=10.0)
        self._task: asyncio.Task[None] | None = None

    async def mark(self) -> None:
        """Makes itself the user's worker, as a claim does."""
        generation = await valkey.ensure_generation(self._client, "generation-1")
        owner, user = keys.owner(self.user_id), self.user_id
        owned = ["1", "scripted", generation, *switch_words(self.user_id)]
        await valkey.run_script(self._client, scripts.SET_OWNER, [owner, keys.switch(user)], owned)
        shown = worker_metadata(
            user,
            state="Active",
            version="0",
            worker="scripted",
            epoch=1,
            last_activity_ms=1_700_000_090_000,
        )
        args = ["1", "scripted", "30000", *shown]
        await valkey.run_script(
            self._client, scripts.RENEW_MARK, [owner, keys.mark(user), keys.metadata(user)], args
        )

    async def start(self) -> None:
        await self.mark()
        self._task = asyncio.create_task(self._serve())

    async def stop(self) -> None:
        await tasks.cancel_tasks(self._task)
        await self._client.aclose()

    async def _serve(self) -> None:
        for number in itertools.count():
            while not await self._pop(number):
                with suppress(RedisError):
                    await self._client.blpop([keys.doorbell(self.user_id)], timeout=5)

    async def _pop(self, number: int) -> bool:
        user = self.user_id
        names = [keys.owner(user), keys.control(user), keys.requests(user), keys.processing(user)]
        try:
            kind, item, time_left_ms, *_ = await valkey.run_script(
                self._client,
                scripts.POP,
                [*names, keys.pop(user), keys.switch(user)],
                ["1", "scripted", "s1", str(number)],
            )
        except RedisError:
            await asyncio.sleep(0.05)
            return False
        if kind != b"request":
            return False
        frame = parse_frame(item)
        assert frame.is_authentic(SECRETS.request_keys(user), user)
        request: Request = decode(frame.payload, Request)
        if time_left_ms <= 0:  # it came too late, and is left to the caller
            return True
        if isinstance(request, PlaceOrder):
            self.popped.append(request)
            answer = self.script(request)
        else:
            self.asked.append(request)
            answer = self.reply(request)
        self.taken.set()
        if answer is not None:
            await self.answer(item, answer, request.reply_to if self.announce else "")
        return True

    async def answer(self, item: bytes, answer: Answer, channel: str) -> None:
        names = keys.answering(self.user_id, answer.request_id)
        await valkey.run_script(
            self._client,
            scripts.ANSWER,
            names,
            [item, worker_answer(self.user_id, answer), keys.ANSWER_TTL_S, channel],
        )

    async def answer_later(self, answer: Answer) -> None:
        """Stores and publishes the answer to an order that was popped before."""
        (order,) = [request for request in self.popped if request.request_id == answer.request_id]
        await self.answer(b"", answer, order.reply_to)


async def connected(client: Redis) -> bool:
    try:
        return bool(await client.ping())
    except RedisError:
        return False
