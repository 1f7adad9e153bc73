"""Sends cancels, changes and queries to a user's worker, and waits for the answer.

One task follows each request and outlives the call that began it: a cancel goes on after a 202.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Awaitable, Callable

import structlog
from msgspec.structs import replace
from redis.exceptions import RedisError

from api.http.errors import NoAnswer, ValkeyUnavailable
from api.orders.placer import ANSWER_GRACE
from api.workers.answers import AnswerListener, AnswerWaiter
from infra.tasks import SharedTasks
from infra.valkey.request_queue import QueuedRequest, RequestQueue
from worker_runtime.protocol.errors import BerthError
from worker_runtime.protocol.messages import Answer, Failure
from worker_runtime.protocol.requests import CancelOrder, QueryAccount, ReplaceOrder

log = structlog.get_logger()

WorkerRequest = CancelOrder | ReplaceOrder | QueryAccount


class WorkerRequests:
    def __init__(self, queue: RequestQueue, answers: AnswerListener, waiter: AnswerWaiter) -> None:
        self._queue = queue
        self._answers = answers
        self._waiter = waiter
        self._tasks: SharedTasks[str, Answer] = SharedTasks(_log_failure)

    def send(
        self, request: WorkerRequest, seconds: float, then: Callable[[Answer], Awaitable[None]] | None = None
    ) -> asyncio.Task[Answer]:
        """The task that gets the answer within `seconds`; a repeat joins it. Wait without cancelling it.

        A cancel that came to nothing is sent anew by a repeat, since an order can be taken back twice without
        harm; every other request is sent once per id.

        `then` is done with the answer before the task ends, also when nobody waits any more.

        Starts the worker if there is none. The task raises `NoAnswer` when none came in time, the reason why
        there is no worker, or `ValkeyUnavailable`; a request that was not taken by then never will be.
        """
        return self._tasks.join(request.request_id, lambda: self._follow(request, seconds, then))

    async def close(self) -> None:
        await self._tasks.close()

    async def _follow(
        self, request: WorkerRequest, seconds: float, then: Callable[[Answer], Awaitable[None]] | None
    ) -> Answer:
        first = request.request_id
        deadline = time.monotonic() + seconds
        answer, attempt = None, 1
        while answer is None:
            answer = await self._answer(request, deadline)
            if answer is None:
                attempt += 1
                request = replace(request, request_id=f"{first}#{attempt}")
        if then is not None:
            await then(answer)
        return answer

    async def _answer(self, request: WorkerRequest, deadline: float) -> Answer | None:
        """None: this was sent before, came to nothing, and may be sent anew under another id."""
        user_id, request_id = request.user_id, request.request_id
        with self._answers.expect(user_id, request_id) as answer:
            try:
                queued = await self._queue.enqueue(request, max(0.001, deadline - time.monotonic()))
                if not queued.new:
                    known = await self._answers.read(user_id, request_id)
                    if isinstance(request, CancelOrder) and await self._failed(request, known):
                        return None
            except RedisError:
                raise ValkeyUnavailable("Valkey: whether the request was queued is not known") from None
            error = await self._waiter.wait(user_id, queued, answer, deadline, marked=queued.marked)
            if not answer.done():
                await self._take_back(request, queued, error or NoAnswer())
            if not answer.done():  # a worker has it: its answer may be a moment late
                await asyncio.wait({answer}, timeout=ANSWER_GRACE)
            if answer.done():
                return answer.result()
            raise error or NoAnswer()

    async def _failed(self, request: CancelOrder, known: Answer | None) -> bool:
        if known is not None:
            return known.failure is not None
        return await self._queue.deadline_passed(request.user_id, request.request_id)

    async def _take_back(self, request: WorkerRequest, queued: QueuedRequest, error: BerthError) -> None:
        """Raises `error` if nobody had taken the request, so that nobody ever will."""
        answer = Answer(request_id=request.request_id, failure=Failure.of(error))
        try:
            withdrawn = await self._queue.withdraw(request.user_id, queued.frame, answer)
            if not withdrawn:
                await self._answers.read(request.user_id, request.request_id)
        except RedisError:
            return
        if withdrawn:
            raise error


def _log_failure(request_id: str, error: BaseException) -> None:
    if isinstance(error, BerthError):
        log.warning("worker_request_unanswered", request=request_id, code=error.code)
    else:
        log.error("worker_request_crashed", request=request_id, exc_info=error)
