"""Sends cancels, changes and queries to a user's worker, and waits for the answer.

One task follows each request and outlives the call that began it: a cancel goes on after a 202.
"""

import asyncio
import time
from collections.abc import Awaitable, Callable
from dataclasses import dataclass

import structlog
from msgspec.structs import replace
from redis.exceptions import RedisError

from api.http.errors import NoAnswer, ValkeyUnavailable
from api.orders.placer import ANSWER_GRACE_S
from api.workers.answers import AnswerListener, AnswerWaiter
from infra.database.engine import Database
from infra.database.workers import sessions as worker_sessions
from infra.process_metrics import count_answer
from infra.tasks import SharedTasks
from infra.tracing import Traces
from infra.valkey.failures import explain_failure
from infra.valkey.request_queue import QueuedRequest, RequestQueue
from worker_runtime.protocol.errors import BerthError
from worker_runtime.protocol.messages import Answer, Failure
from worker_runtime.protocol.requests import CancelOrder, QueryAccount, ReplaceOrder

log = structlog.get_logger()

Then = Callable[[Answer], Awaitable[None]]
WorkerRequest = CancelOrder | ReplaceOrder | QueryAccount
#: How the metrics name them.
_CALLS: dict[type[WorkerRequest], str] = {
    CancelOrder: "cancel",
    ReplaceOrder: "replace",
    QueryAccount: "query",
}


@dataclass(eq=False, repr=False)
class WorkerRequests:
    database: Database
    queue: RequestQueue
    answers: AnswerListener
    waiter: AnswerWaiter
    traces: Traces | None = None

    def __post_init__(self) -> None:
        self._tasks: SharedTasks[str, Answer] = SharedTasks(_log_failure)

    def send(
        self, request: WorkerRequest, seconds: float, then: Then | None = None, first_epoch: int | None = None
    ) -> asyncio.Task[Answer]:
        """The task that gets the answer within `seconds`; a repeat joins it. Wait without cancelling it.

        A cancel that came to nothing is sent anew by a repeat, since an order can be taken back twice without
        harm; every other request is sent once per id.

        `then` is done with the answer before the task ends, also when nobody waits any more. `first_epoch`:
        of the first worker that can have got it, if it may have been sent before; else that of the present.

        Starts the worker if there is none. The task raises `NoAnswer` when none came in time, the reason why
        there is no worker, `ValkeyUnavailable` or `DatabaseUnavailable`; a request that was not taken by then
        never will be.
        """
        if self.traces is not None:
            request = replace(request, trace=self.traces.context(_CALLS[type(request)]))
        return self._tasks.join(request.request_id, lambda: self._follow(request, seconds, then, first_epoch))

    async def close(self) -> None:
        await self._tasks.close()

    async def _follow(
        self, request: WorkerRequest, seconds: float, then: Then | None, first_epoch: int | None
    ) -> Answer:
        first = request.request_id
        deadline = time.monotonic() + seconds
        if first_epoch is None:
            first_epoch = await worker_sessions.first_epoch(self.database, request.user_id)
        answer, attempt = None, 1
        while answer is None:
            answer = await self._answer(request, deadline, first_epoch)
            if answer is None:
                attempt += 1
                request = replace(request, request_id=f"{first}#{attempt}")
        if then is not None:
            await then(answer)
        return answer

    async def _answer(self, request: WorkerRequest, deadline: float, first_epoch: int) -> Answer | None:
        """None: this was sent before, came to nothing, and may be sent anew under another id."""
        user_id, request_id = request.user_id, request.request_id
        order_id = "" if isinstance(request, QueryAccount) else request.order_id
        with self.answers.expect(user_id, request_id, order_id, first_epoch) as answer:
            try:
                queued = await self.queue.enqueue(request, max(0.001, deadline - time.monotonic()))
                if not queued.new:
                    known = await self.answers.read_pending(request_id)
                    if isinstance(request, CancelOrder) and await self._failed(request, known):
                        return None
            except RedisError as lost:
                raise ValkeyUnavailable(
                    f"{explain_failure(lost)} It is not known whether the request was queued."
                ) from None
            error = await self.waiter.wait(
                user_id, queued, answer, deadline, has_live_worker=queued.has_live_worker
            )
            if not answer.done():
                await self._take_back(request, queued, error or NoAnswer())
            if not answer.done():  # a worker has it: its answer may be a moment late
                await asyncio.wait({answer}, timeout=ANSWER_GRACE_S)
            if answer.done():
                call, found = _CALLS[type(request)], answer.result()
                count_answer(call, found)
                if self.traces is not None:
                    self.traces.add_broker_call(call, request.trace, found)
                return found
            raise error or NoAnswer()

    async def _failed(self, request: CancelOrder, known: Answer | None) -> bool:
        if known is not None:
            return known.failure is not None
        return await self.queue.deadline_passed(request.user_id, request.request_id)

    async def _take_back(self, request: WorkerRequest, queued: QueuedRequest, error: BerthError) -> None:
        """Raises `error` if nobody had taken the request, so that nobody ever will."""
        answer = Answer(request_id=request.request_id, failure=Failure.of(error))
        try:
            withdrawn = await self.queue.withdraw(request.user_id, queued.frame, answer)
            if not withdrawn:
                await self.answers.read_pending(request.request_id)
        except RedisError:
            return
        if withdrawn:
            raise error


def _log_failure(request_id: str, error: BaseException) -> None:
    if isinstance(error, BerthError):
        log.warning("worker_request_unanswered", request=request_id, code=error.code)
    else:
        log.error("worker_request_crashed", request=request_id, exc_info=error)
