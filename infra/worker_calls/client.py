"""Asks a user's worker and waits for its answer: the only place that does both.

Orders, cancels, changes and queries of the API and the orchestrator's queries come through
`WorkerClient.call`. Only the sweeper queues an order without waiting for it
(`activities/orders/sweeper.py`), and a job asks its own user's session from inside the worker
(`worker_runtime/jobs/types/position_snapshot.py`), which imports nothing of this layer.
"""

import asyncio
import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import structlog
from msgspec.structs import replace
from redis.exceptions import ConnectionError, RedisError, TimeoutError

from infra.database.orders.acceptance import StoredOrder
from infra.temporal.starter import WorkerStarter
from infra.valkey.failures import ValkeyUnavailable, code_of, explain_failure
from infra.valkey.request_queue import QueuedRequest, RequestQueue
from infra.worker_calls.answers import AnswerReader
from worker_runtime.protocol.errors import BerthError, DeadlineExceeded
from worker_runtime.protocol.messages import (
    Answer,
    Failure,
    OrderOutcome,
    OrderState,
    PlaceOrder,
)
from worker_runtime.protocol.requests import CancelOrder, Query, Request

#: Seconds past a request's deadline for which its answer is awaited. A worker that popped the
#: request right before the deadline answers by then.
ANSWER_GRACE_S = 1.0
#: Longest time in seconds between two looks at the response key and the user's mark: the worker may
#: have died. The time doubles up to this.
MARK_CHECK_INTERVAL_S = 1.0
#: While Valkey does not answer, a withdrawal is tried this many times, with this pause in seconds.
MAX_WITHDRAW_ATTEMPTS = 3
WITHDRAW_RETRY_INTERVAL_S = 0.5
#: Seconds within which an order whose queueing got no reply is queued again, and the pause before
#: it: a connection that died silently is noticed within 1.3 s, and a new one is there 0.1 s later.
ENQUEUE_RETRY_TIMEOUT_S, ENQUEUE_RETRY_INTERVAL_S = 2.5, 0.15

log = structlog.get_logger()


class NoAnswer(BerthError, code="NO_ANSWER", retryable=True, status=504):
    """The user's worker did not answer in time."""


class RequestWithdrawn(Exception):
    """No worker took the request, and none will: it is out of the queue."""

    def __init__(self, answer: Answer, reason: BerthError) -> None:
        super().__init__(reason.detail)
        #: The answer that Valkey now has to this request.
        self.answer = answer
        #: `DeadlineExceeded` (an order) or `NoAnswer` at the deadline, or why no worker started.
        self.reason = reason


@dataclass(frozen=True, eq=False)
class WorkerClient:
    queue: RequestQueue
    answers: AnswerReader
    starter: WorkerStarter

    async def call(
        self,
        request: Request,
        deadline: float,
        *,
        first_epoch: int,
        order: StoredOrder | None = None,
        on_queued: Callable[[], object] | None = None,
    ) -> Answer:
        """Queues a request once per id, and returns the answer of the user's worker.

        Starts a worker if the user has none. A repeat returns the first request's answer. A repeat
        of a cancel that failed is sent under a new id, because a second cancel does no harm.

        `deadline`: instant on `time.monotonic` after which no worker begins the request. The call
        waits 1 s longer. `first_epoch`: epoch of the first worker that may have received the
        request; an older one's answer is refused. `order`: the row of the order that the request
        places. `on_queued` is called once the request is in the queue, while the worker handles it.

        The request is not executed, now or later, if this raises

        - `ClientOrderIdTaken` or `MemoryShort`: it was not queued;
        - `RequestWithdrawn`: no worker took it by the deadline, or none could be started.

        It may be executed, or have been, if this raises

        - `NoAnswer`: a worker has it, or may have it, and has not answered;
        - `ValkeyUnavailable`: Valkey failed while it was being queued.
        """
        first_id, attempt = request.request_id, 1
        while True:
            order_id = "" if isinstance(request, Query) else request.order_id
            # First, because the worker may answer before `_enqueue` returns.
            with self.answers.expect(
                request.user_id, request.request_id, order_id, first_epoch
            ) as answer:
                queued = await self._enqueue(request, deadline, order)
                if queued is not None:
                    if on_queued is not None:
                        on_queued()
                    await _QueuedCall(self, request, queued, order, answer).wait(deadline)
                    return answer.result()
            attempt += 1
            request = replace(request, request_id=f"{first_id}#{attempt}")

    async def _enqueue(
        self, request: Request, deadline: float, order: StoredOrder | None
    ) -> QueuedRequest | None:
        """Queues the request. Returns None if an earlier cancel with this id failed: the caller
        tries another id.

        Raises `ClientOrderIdTaken`, `MemoryShort` and `ValkeyUnavailable`, as `call` says.
        """
        try:
            queued = await self._enqueue_or_retry(request, deadline, order)
            if not queued.new:
                earlier = await self.answers.read_pending(request.request_id)
                if isinstance(request, CancelOrder) and await self._failed(request, earlier):
                    return None
        except RedisError as error:
            raise _maybe_queued(request, error) from None
        return queued

    async def _failed(self, request: CancelOrder, earlier: Answer | None) -> bool:
        """Returns True if an earlier cancel under this id failed, or was never executed."""
        if earlier is not None:
            return earlier.failure is not None
        return await self.queue.deadline_passed(request.user_id, request.request_id)

    async def _enqueue_or_retry(
        self, request: Request, deadline: float, order: StoredOrder | None
    ) -> QueuedRequest:
        """Queues the request; an order again if Valkey's reply was lost. A server queues an id only
        once.

        Does not retry if Valkey was replaced after the order was accepted: the new server may not
        know the first attempt.
        Raises `ClientOrderIdTaken`, `MemoryShort`, and `RedisError` if the request may or may not
        have been queued.
        """
        retry_until = time.monotonic() + ENQUEUE_RETRY_TIMEOUT_S
        while True:
            try:
                return await self.queue.enqueue(request, deadline, order)
            except (ConnectionError, TimeoutError) as error:
                reason = type(error).__name__
                if order is None or time.monotonic() >= min(retry_until, deadline):
                    raise
                await asyncio.sleep(ENQUEUE_RETRY_INTERVAL_S)
                if await self.queue.may_have_lost_order(order.created_at):
                    raise
            log.warning("enqueue_repeated", **_id_of(request), reason=reason)


@dataclass(frozen=True, eq=False)
class _QueuedCall:
    """A request in the user's queue: waits for its answer, and withdraws it if none comes."""

    client: WorkerClient
    request: Request
    queued: QueuedRequest
    #: The row of the order that the request places.
    order: StoredOrder | None
    #: Gets the answer of the user's worker.
    answer: asyncio.Future[Answer]

    async def wait(self, deadline: float) -> None:
        """Returns when the answer is there. Raises `RequestWithdrawn` or `NoAnswer`."""
        until = deadline + ANSWER_GRACE_S
        has_live_worker = self.queued.has_live_worker
        while True:
            start_failure = await self._wait_for_answer(until, has_live_worker=has_live_worker)
            if self.answer.done():
                return
            await self._withdraw(start_failure or _timed_out(self.request))
            if self.answer.done():
                return
            if start_failure is None:
                raise NoAnswer
            has_live_worker = True  # a worker has the request: assume so until the next check

    async def _wait_for_answer(self, until: float, *, has_live_worker: bool) -> BerthError | None:
        """Waits for the answer until `until` (time.monotonic). Returns an error if no worker can be
        started.

        `has_live_worker`: assume until the first check that the user has a live worker.
        """
        pause = self.client.answers.seconds_until_look(self.queued)
        checks = 0
        while not self.answer.done() and (seconds_left := until - time.monotonic()) > 0:
            if not has_live_worker:
                error = await self._ensure_worker(seconds_left)
                if error is not None:
                    return error
            seconds_left = max(0.0, until - time.monotonic())
            await asyncio.wait({self.answer}, timeout=min(pause, seconds_left))
            pause = min(pause * 2, MARK_CHECK_INTERVAL_S)
            if not self.answer.done():
                checks += 1
                # Only at checks 1, 2, 4, 8…: while the broker is away,
                # orders wait in the queue on purpose.
                ring = checks.bit_count() == 1
                has_live_worker = await self._check_mark(ring=ring)
        return None

    async def _ensure_worker(self, timeout: float) -> BerthError | None:
        """Starts a worker, and waits for it or for the answer. Returns the error if none will
        start."""
        task = self.client.starter.ensure(self.request.user_id, check_worker=True)
        either: set[asyncio.Future[Any]] = {task, self.answer}
        await asyncio.wait(either, timeout=timeout, return_when=asyncio.FIRST_COMPLETED)
        if self.answer.done() or not task.done() or task.cancelled():
            return None
        error = task.exception()
        if error is None or isinstance(error, BerthError):
            return error
        return BerthError("the worker could not be started")

    async def _check_mark(self, *, ring: bool) -> bool:
        """Returns True if the user has a live worker; first reads the answer, which may have been
        missed.

        `ring`: also rings the doorbell again if the request still waits.
        """
        queue = self.client.queue
        try:
            await self.client.answers.read_pending(self.request.request_id)
            return await (queue.ring_again if ring else queue.has_live_worker)(self.request.user_id)
        except RedisError:
            return True  # Valkey is away, so nothing is known: start no worker

    async def _withdraw(self, reason: BerthError) -> None:
        """Takes the request out of the queue and raises `RequestWithdrawn`.

        Returns without raising if a worker has the request, or if nobody knows whether one has:
        Valkey was replaced since, or does not answer. `answer` is set then if one is stored.
        """
        withdrawal = withdrawal_of(self.request, reason)
        try:
            if await self._may_be_lost():
                return  # a worker may have had it: the sweeper settles the order
            if not await self._try_to_withdraw(withdrawal):
                # A worker has it, or an earlier attempt withdrew it and the reply was lost.
                await self.client.answers.read_pending(self.request.request_id)
                return
        except RedisError:
            log.warning("withdraw_failed", **_id_of(self.request), code=reason.code)
            return
        raise RequestWithdrawn(withdrawal, reason)

    async def _may_be_lost(self) -> bool:
        """Returns True if Valkey may have lost the order after it was queued."""
        if self.order is None:
            return False
        return await self.client.queue.may_have_lost_order(self.order.created_at)

    async def _try_to_withdraw(self, withdrawal: Answer) -> bool:
        """Withdraws the request from the queue; retries after a lost reply. The script is
        idempotent."""
        user_id, frame = self.request.user_id, self.queued.frame
        for _ in range(MAX_WITHDRAW_ATTEMPTS - 1):
            try:
                return await self.client.queue.withdraw(user_id, frame, withdrawal)
            except RedisError:
                await asyncio.sleep(WITHDRAW_RETRY_INTERVAL_S)
        return await self.client.queue.withdraw(user_id, frame, withdrawal)


def withdrawal_of(request: Request, reason: BerthError) -> Answer:
    """Returns the answer to a request that no worker will get, because of `reason`."""
    outcome = None
    if isinstance(request, PlaceOrder):
        expired = isinstance(reason, DeadlineExceeded)
        outcome = OrderOutcome(
            order_id=request.order_id,
            state=OrderState.EXPIRED if expired else OrderState.REJECTED,
            reason=f"{reason.code}: {reason.detail}",
            withdrawn=True,
        )
    return Answer(request_id=request.request_id, outcome=outcome, failure=Failure.of(reason))


def _timed_out(request: Request) -> BerthError:
    return DeadlineExceeded() if isinstance(request, PlaceOrder) else NoAnswer()


def _maybe_queued(request: Request, error: RedisError) -> ValkeyUnavailable:
    """Returns the error of a request that may or may not have been queued."""
    reason = code_of(error) or type(error).__name__
    log.warning("enqueue_failed", **_id_of(request), reason=reason)
    what_happened = explain_failure(error)
    if isinstance(request, PlaceOrder):
        return ValkeyUnavailable(
            f"{what_happened} It is not known whether the order was queued. Send it again with the "
            "same client_order_id to get its state; it is not placed twice."
        )
    return ValkeyUnavailable(f"{what_happened} It is not known whether the request was queued.")


def _id_of(request: Request) -> dict[str, str]:
    """Returns the field by which log entries name the request."""
    if isinstance(request, PlaceOrder):
        return {"order": request.order_id}
    return {"request": request.request_id}
