"""Follows cancels, changes and queries to the answers of a user's worker, one task each.

The task outlives the HTTP request: a cancel continues after a 202. The call itself is
`WorkerClient.call`.
"""

import asyncio
import time
from collections.abc import Awaitable, Callable
from dataclasses import dataclass

import structlog
from msgspec.structs import replace

from infra.database.engine import Database
from infra.database.workers import sessions as worker_sessions
from infra.process_metrics import count_answer
from infra.tasks import SharedTasks
from infra.tracing import Traces
from infra.worker_calls.client import RequestWithdrawn, WorkerClient
from worker_runtime.protocol.errors import BerthError
from worker_runtime.protocol.messages import Answer
from worker_runtime.protocol.requests import CancelOrder, QueryAccount, ReplaceOrder

log = structlog.get_logger()

#: Called with the answer of a request.
AnswerHandler = Callable[[Answer], Awaitable[None]]
WorkerRequest = CancelOrder | ReplaceOrder | QueryAccount
#: Names of the requests in metrics.
_CALLS: dict[type[WorkerRequest], str] = {
    CancelOrder: "cancel",
    ReplaceOrder: "replace",
    QueryAccount: "query",
}


@dataclass(eq=False, repr=False)
class WorkerRequests:
    """Sends requests to users' workers, each once."""

    database: Database
    workers: WorkerClient
    traces: Traces | None = None

    def __post_init__(self) -> None:
        self._tasks: SharedTasks[str, Answer] = SharedTasks(_log_failure)

    def send(
        self,
        request: WorkerRequest,
        seconds: float,
        on_answer: AnswerHandler | None = None,
        first_epoch: int | None = None,
    ) -> asyncio.Task[Answer]:
        """Returns the task that sends the request and waits up to `seconds` for its answer. Do not
        cancel the task.

        A repeat joins the running task. A cancel that failed is sent again by a repeat, because
        cancelling an order twice does no harm; every other request is sent once per id. Starts a
        worker if there is none.

        `on_answer` is called before the task ends, even if nobody waits for the task any more.
        `first_epoch`: epoch of the first worker that may have received the request; None takes the
        user's present one.

        The task withdraws a request that no worker takes in time. It raises `NoAnswer` if no
        answer comes within 1 s after `seconds`, the error that kept a worker from starting,
        `ValkeyUnavailable` or `DatabaseUnavailable`.
        """
        if self.traces is not None:
            request = replace(request, trace=self.traces.context(_CALLS[type(request)]))
        return self._tasks.join(
            request.request_id, lambda: self._follow(request, seconds, on_answer, first_epoch)
        )

    async def close(self) -> None:
        await self._tasks.close()

    async def _follow(
        self,
        request: WorkerRequest,
        seconds: float,
        on_answer: AnswerHandler | None,
        first_epoch: int | None,
    ) -> Answer:
        deadline = time.monotonic() + seconds
        if first_epoch is None:
            first_epoch = await worker_sessions.first_epoch(self.database, request.user_id)
        try:
            answer = await self.workers.call(request, deadline, first_epoch=first_epoch)
        except RequestWithdrawn as withdrawn:
            raise withdrawn.reason from None
        call = _CALLS[type(request)]
        count_answer(call, answer)
        if self.traces is not None:
            self.traces.add_broker_call(call, request.trace, answer)
        if on_answer is not None:
            await on_answer(answer)
        return answer


def _log_failure(request_id: str, error: BaseException) -> None:
    if isinstance(error, BerthError):
        log.warning("worker_request_unanswered", request=request_id, code=error.code)
    else:
        log.error("worker_request_crashed", request=request_id, exc_info=error)
