"""Orders under way in this process, each followed by one task from the queue to its answer.

The task outlives the request that began it: after a 202 it still sees to it that a worker comes, and takes
the order back when none does. If this process dies, the order is in PostgreSQL with its deadline.
"""

from __future__ import annotations

import asyncio
import time
from dataclasses import dataclass

from redis.exceptions import RedisError

from api.http import log
from api.http.errors import ValkeyUnavailable
from api.orders.outcomes import NotedOutcome, OutcomeWriter
from api.orders.reader import apply_answer, failure_of, view_of
from api.orders.schemas import OrderView
from api.workers.answers import AnswerListener, AnswerWaiter
from infra import tasks
from infra.database.models import Order as Row
from infra.valkey.request_queue import QueuedRequest, RequestQueue, outcome_of
from worker_runtime.protocol.errors import BerthError, DeadlineExceeded
from worker_runtime.protocol.messages import Answer, Failure, OrderOutcome, OrderState, PlaceOrder

#: A withdrawal is tried so often, so many seconds apart, while Valkey does not answer.
WITHDRAW_TRIES = 3
WITHDRAW_PAUSE = 0.5
#: Seconds past the deadline after which an unanswered order is taken back: a worker that popped it right
#: before answers meanwhile.
ANSWER_GRACE = 1.0


@dataclass(frozen=True, slots=True)
class PendingOrder:
    row: Row
    request: PlaceOrder
    #: Instant of the deadline on `time.monotonic`, seconds.
    deadline: float
    #: The order, further than its row, of a repeat: its request may have been enqueued before.
    seen: OrderView | None = None

    @property
    def first(self) -> bool:
        return self.seen is None

    @property
    def order(self) -> OrderView:
        """As callers see it; made when it is asked for, so after the request is on its way."""
        return view_of(self.row) if self.seen is None else self.seen

    @property
    def left(self) -> float:
        return self.deadline - time.monotonic()


@dataclass(frozen=True, slots=True)
class PendingOrderResult:
    order: OrderView
    #: Why it never reached the broker.
    failure: BerthError | None

    @classmethod
    def of(cls, order: OrderView, answer: Answer | None = None) -> PendingOrderResult:
        """`answer`: knows when another try makes sense, which is not written down."""
        failure = failure_of(order)
        told = answer.failure.error() if answer is not None and answer.failure is not None else None
        if failure is not None and told is not None:
            failure.retry_after = told.retry_after
        return cls(order, failure)


class PendingOrders:
    """Starts a task for each order, or joins the one that follows it already."""

    def __init__(
        self, queue: RequestQueue, answers: AnswerListener, waiting: AnswerWaiter, settler: OutcomeWriter
    ) -> None:
        self._queue = queue
        self._answers = answers
        self._waiting = waiting
        self._settler = settler
        self._tasks: dict[str, asyncio.Task[PendingOrderResult]] = {}
        self._log = log.logger()

    def join(self, flight: PendingOrder) -> asyncio.Task[PendingOrderResult]:
        """The task that follows this order; wait for it without cancelling it.

        It returns the order as far as it came, with its failure before the broker. Raises
        `ValkeyUnavailable` if it is not certain that the order was enqueued.
        """
        order_id = flight.request.order_id
        task = self._tasks.get(order_id)
        if task is None:
            task = asyncio.create_task(self._follow(flight), name=f"order {order_id}")
            self._tasks[order_id] = task
            task.add_done_callback(lambda done: self._landed(order_id, done))
        return task

    async def close(self) -> None:
        await tasks.cancel_tasks(*self._tasks.values())

    def _landed(self, order_id: str, task: asyncio.Task[PendingOrderResult]) -> None:
        self._tasks.pop(order_id, None)
        if task.cancelled():
            return
        error = task.exception()  # also marks it as seen: the request may be gone by now
        if isinstance(error, BerthError):
            self._log.warning("order_adrift", order=order_id, code=error.code)
        elif error is not None:
            self._log.error("order_crashed", order=order_id, exc_info=error)

    async def _follow(self, flight: PendingOrder) -> PendingOrderResult:
        user_id, order_id = flight.request.user_id, flight.request.order_id
        with self._answers.expect(user_id, order_id) as answer:
            try:
                queued = await self._queue.enqueue(flight.request, flight.left)
                if not queued.new:
                    await self._answers.read(user_id, order_id)
            except RedisError as error:
                self._log.warning("enqueue_failed", order=order_id, reason=type(error).__name__)
                raise ValkeyUnavailable("Valkey: whether the order was queued is not known") from None
            order = flight.order  # while the worker is at it
            given_up = await self._wait(flight, queued, answer)
            if given_up is not None:
                return PendingOrderResult.of(given_up)
            found = answer.result()
        outcome, code = outcome_of(found, order_id)
        if outcome.withdrawn:
            return PendingOrderResult.of(await self._withdrawn(order, found), found)
        self._settler.note(NotedOutcome(outcome, code))
        return PendingOrderResult.of(apply_answer(order, found), found)

    async def _wait(
        self, flight: PendingOrder, queued: QueuedRequest, answer: asyncio.Future[Answer]
    ) -> OrderView | None:
        """Returns None when the answer is there, else the order that was given up."""
        until, marked = flight.deadline + ANSWER_GRACE, queued.marked
        while not answer.done():
            error = await self._waiting.wait(flight.request.user_id, queued, answer, until, marked=marked)
            if answer.done():
                break
            given_up = await self._give_up(flight, queued, error or DeadlineExceeded())
            if error is None:
                return None if answer.done() else given_up or flight.order
            if given_up is not None:
                return given_up
            marked = True  # somebody had it: until the next look
        return None

    async def _give_up(
        self, flight: PendingOrder, queued: QueuedRequest, error: BerthError
    ) -> OrderView | None:
        """Takes the order back; None if a worker has it already, so that only its answer tells."""
        order = flight.order
        late = isinstance(error, DeadlineExceeded)
        outcome = OrderOutcome(
            order_id=order.id,
            state=OrderState.EXPIRED if late else OrderState.REJECTED,
            reason=f"{error.code}: {error.detail}",
            withdrawn=True,
        )
        answer = Answer(request_id=order.id, outcome=outcome, failure=Failure.of(error))
        try:
            if await self._queue.may_be_stale(order.accepted_at):
                return None  # a worker may have had it: the sweeper finds out
            if not await self._withdraw(order.user_id, queued, answer):
                # Also when an earlier try did it and its reply was lost: then the answer is there.
                await self._answers.read(order.user_id, order.id)
                return None
        except RedisError:
            self._log.warning("withdraw_failed", order=order.id, code=error.code)
            return None
        self._log.warning("order_withdrawn", order=order.id, code=error.code)
        return await self._withdrawn(order, answer)

    async def _withdrawn(self, order: OrderView, answer: Answer) -> OrderView:
        """The order after it was taken back. PostgreSQL may know that a worker had taken it before."""
        row = await self._settler.settle(NotedOutcome(*outcome_of(answer, order.id)))
        return apply_answer(order, answer) if row is None else view_of(row)

    async def _withdraw(self, user_id: str, queued: QueuedRequest, answer: Answer) -> bool:
        """Repeats what may have happened without our hearing of it: the script bears that."""
        for _ in range(WITHDRAW_TRIES - 1):
            try:
                return await self._queue.withdraw(user_id, queued.frame, answer)
            except RedisError:
                await asyncio.sleep(WITHDRAW_PAUSE)
        return await self._queue.withdraw(user_id, queued.frame, answer)
