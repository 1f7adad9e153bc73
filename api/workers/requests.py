"""Sends cancels, changes and queries to a user's worker, and waits for the answer.

One task follows each request. It outlives the HTTP request: a cancel continues after a 202.
"""

import asyncio
import time
from collections.abc import Awaitable, Callable
from dataclasses import dataclass

import structlog
from msgspec.structs import replace
from redis.exceptions import RedisError

from api.http.errors import NoAnswer, ValkeyUnavailable
from api.workers.answers import ANSWER_GRACE_S, AnswerListener, AnswerWaiter
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
#: Names of the requests in metrics.
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
        self,
        request: WorkerRequest,
        seconds: float,
        then: Then | None = None,
        first_epoch: int | None = None,
    ) -> asyncio.Task[Answer]:
        """Returns the task that sends the request and waits up to `seconds` for its answer. Do not
        cancel it.

        A repeat joins the running task. A cancel that failed is sent again by a repeat, because
        cancelling an order twice does no harm; every other request is sent once per id. Starts a
        worker if there is none.

        `then` is called with the answer before the task ends, even if nobody waits any more.
        `first_epoch`: epoch of the first worker that may have received the request; None takes the
        user's present one.

        The task raises `NoAnswer` if no answer came in time, the error that kept a worker from
        starting, `ValkeyUnavailable` or `DatabaseUnavailable`. A request that no worker took by
        then is withdrawn.
        """
        if self.traces is not None:
            request = replace(request, trace=self.traces.context(_CALLS[type(request)]))
        return self._tasks.join(
            request.request_id, lambda: self._follow(request, seconds, then, first_epoch)
        )

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

    async def _answer(
        self, request: WorkerRequest, deadline: float, first_epoch: int
    ) -> Answer | None:
        """Returns the answer; None if an earlier cancel failed, so that it may be sent under a new
        id."""
        user_id, request_id = request.user_id, request.request_id
        order_id = "" if isinstance(request, QueryAccount) else request.order_id
        with self.answers.expect(user_id, request_id, order_id, first_epoch) as answer:
            try:
                queued = await self.queue.enqueue(request, deadline)
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
            if not answer.done():  # a worker has the request: its answer may come a moment late
                await asyncio.wait({answer}, timeout=ANSWER_GRACE_S)
            if answer.done():
                call, result = _CALLS[type(request)], answer.result()
                count_answer(call, result)
                if self.traces is not None:
                    self.traces.add_broker_call(call, request.trace, result)
                return result
            raise error or NoAnswer()

    async def _failed(self, request: CancelOrder, known: Answer | None) -> bool:
        if known is not None:
            return known.failure is not None
        return await self.queue.deadline_passed(request.user_id, request.request_id)

    async def _take_back(
        self, request: WorkerRequest, queued: QueuedRequest, error: BerthError
    ) -> None:
        """Withdraws the request; raises `error` if that succeeded, because no worker will execute
        it then."""
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
