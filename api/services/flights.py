"""Orders under way in this process, each followed by one task from the queue to its answer.

The task outlives the request that began it: after a 202 it still sees to it that a worker comes, and takes
the order back when none does. If this process dies, the order is in PostgreSQL with its deadline.
"""

from __future__ import annotations

import asyncio
import time
from dataclasses import dataclass
from typing import Any

from redis.exceptions import RedisError

from api import log
from api.errors import ValkeyUnavailable
from api.schemas.orders import Order
from api.services.answers import AnswerListener
from api.services.orders import moved_on, outcome_of
from api.services.queue import Queued, RequestQueue
from api.services.settling import Settlement, Settler
from api.services.workers import WorkerStarter
from infra import tasks
from worker_runtime.protocol.errors import BerthError, DeadlineExceeded
from worker_runtime.protocol.messages import Answer, Failure, OrderOutcome, OrderState, PlaceOrder

#: Seconds without an answer after which the mark is looked at again: the worker may have died meanwhile.
LOOK_PERIOD = 1.0
#: A withdrawal is tried so often, so many seconds apart, while Valkey does not answer.
WITHDRAW_TRIES = 3
WITHDRAW_PAUSE = 0.5
#: The first look at an order that was enqueued before, perhaps by another process: its answer may be
#: published there, and only the response key is ours to see. Doubles up to `LOOK_PERIOD`.
FIRST_LOOK = 0.05
#: Seconds past the deadline after which an unanswered order is taken back: a worker that popped it right
#: before answers meanwhile.
GRACE = 1.0


@dataclass(frozen=True, slots=True)
class Flight:
    order: Order
    request: PlaceOrder
    #: Instant of the deadline on `time.monotonic`, seconds.
    deadline: float
    #: False: a repeat, so the request may have been enqueued before.
    first: bool

    @property
    def left(self) -> float:
        return self.deadline - time.monotonic()


class Flights:
    """Starts a task for each order, or joins the one that follows it already."""

    def __init__(
        self, queue: RequestQueue, answers: AnswerListener, starter: WorkerStarter, settler: Settler
    ) -> None:
        self._queue = queue
        self._answers = answers
        self._starter = starter
        self._settler = settler
        self._tasks: dict[str, asyncio.Task[Order]] = {}
        self._log = log.logger()

    def join(self, flight: Flight) -> asyncio.Task[Order]:
        """The task that follows this order; wait for it without cancelling it.

        It returns the order as far as it came; a failure before the broker is in its `code`. Raises
        `ValkeyUnavailable` if it is not certain that the order was enqueued.
        """
        order_id = flight.order.id
        task = self._tasks.get(order_id)
        if task is None:
            task = asyncio.create_task(self._follow(flight), name=f"order {order_id}")
            self._tasks[order_id] = task
            task.add_done_callback(lambda done: self._landed(order_id, done))
        return task

    async def close(self) -> None:
        await tasks.end(*self._tasks.values())

    def _landed(self, order_id: str, task: asyncio.Task[Order]) -> None:
        self._tasks.pop(order_id, None)
        if task.cancelled():
            return
        error = task.exception()  # also marks it as seen: the request may be gone by now
        if isinstance(error, BerthError):
            self._log.warning("order_adrift", order=order_id, code=error.code)
        elif error is not None:
            self._log.error("order_crashed", order=order_id, exc_info=error)

    async def _follow(self, flight: Flight) -> Order:
        order = flight.order
        with self._answers.expect(order.user_id, order.id) as answer:
            try:
                queued = await self._queue.enqueue(flight.request, flight.left)
                if not queued.new:
                    await self._answers.read(order.user_id, order.id)
            except RedisError as error:
                self._log.warning("enqueue_failed", order=order.id, reason=type(error).__name__)
                raise ValkeyUnavailable("Valkey: whether the order was queued is not known") from None
            given_up = await self._wait(flight, queued, answer)
            if given_up is not None:
                return given_up
            found = answer.result()
        outcome, code = outcome_of(found, order.id)
        self._settler.note(Settlement(outcome, code))
        return moved_on(order, found)

    async def _wait(self, flight: Flight, queued: Queued, answer: asyncio.Future[Answer]) -> Order | None:
        """Returns None when the answer is there, else the order that was given up."""
        marked = queued.marked
        look = LOOK_PERIOD if queued.new else FIRST_LOOK
        while not answer.done():
            if flight.left < -GRACE:
                given_up = await self._give_up(flight, queued, DeadlineExceeded())
                return None if answer.done() else given_up or flight.order
            if not marked:
                error = await self._ensure(flight, answer)
                if error is not None:
                    given_up = await self._give_up(flight, queued, error)
                    if given_up is not None:
                        return given_up
                marked = True  # until the next look
            await asyncio.wait({answer}, timeout=look)
            look = min(look * 2, LOOK_PERIOD)
            if not answer.done():
                marked = await self._look(flight)
        return None

    async def _ensure(self, flight: Flight, answer: asyncio.Future[Answer]) -> BerthError | None:
        """Has a worker started, until it is there or the answer is. Returns why there will be none."""
        task = self._starter.ensure(flight.order.user_id, mark_missing=True)
        either: set[asyncio.Future[Any]] = {task, answer}
        await asyncio.wait(either, timeout=max(0.0, flight.left + GRACE), return_when=asyncio.FIRST_COMPLETED)
        if answer.done() or not task.done() or task.cancelled():
            return None
        error = task.exception()
        if error is None or isinstance(error, BerthError):
            return error
        return BerthError("the worker could not be started")

    async def _look(self, flight: Flight) -> bool:
        """Whether the mark is there; finds an answer that was announced elsewhere, or not at all."""
        user_id = flight.order.user_id
        try:
            await self._answers.read(user_id, flight.order.id)
            return await self._queue.marked(user_id)
        except RedisError:
            return True  # nothing is known, so nobody is called

    async def _give_up(self, flight: Flight, queued: Queued, error: BerthError) -> Order | None:
        """Takes the order back; None if a worker has it already, so that only its answer tells."""
        order = flight.order
        late = isinstance(error, DeadlineExceeded)
        outcome = OrderOutcome(
            order_id=order.id,
            state=OrderState.EXPIRED if late else OrderState.REJECTED,
            reason=f"{error.code}: {error.detail}",
        )
        answer = Answer(request_id=order.id, outcome=outcome, failure=Failure.of(error))
        try:
            if not await self._withdraw(order.user_id, queued, answer):
                # Also when an earlier try did it and its reply was lost: then the answer is there.
                await self._answers.read(order.user_id, order.id)
                return None
        except RedisError:
            self._log.warning("withdraw_failed", order=order.id, code=error.code)
            return None
        self._log.warning("order_withdrawn", order=order.id, code=error.code)
        await self._settler.settle(Settlement(outcome, error.code))
        return moved_on(order, answer)

    async def _withdraw(self, user_id: str, queued: Queued, answer: Answer) -> bool:
        """Repeats what may have happened without our hearing of it: the script bears that."""
        for _ in range(WITHDRAW_TRIES - 1):
            try:
                return await self._queue.withdraw(user_id, queued.frame, answer)
            except RedisError:
                await asyncio.sleep(WITHDRAW_PAUSE)
        return await self._queue.withdraw(user_id, queued.frame, answer)
