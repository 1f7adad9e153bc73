"""Places orders: writes each to PostgreSQL, queues it, and follows it to its answer in one task.

The task outlives the HTTP request. After a 202 it still has a worker started, and withdraws the
order if none comes. If this process dies, PostgreSQL has the order and its deadline.
"""

import asyncio
import time
from contextlib import suppress
from dataclasses import KW_ONLY, dataclass
from datetime import datetime
from typing import Self

import structlog
from msgspec.structs import replace
from redis.exceptions import ConnectionError, RedisError, TimeoutError
from sqlalchemy.ext.asyncio import AsyncSession

from api.http.errors import ClientOrderIdReused, ValkeyUnavailable
from api.orders import schemas
from api.orders.checks import PreTradeChecks
from api.orders.outcomes import (
    NotedOutcome,
    OrderReader,
    OutcomeWriter,
    apply_answer,
    failure_of,
    view_of,
)
from api.workers.answers import ANSWER_GRACE_S, AnswerListener, AnswerWaiter
from infra import tasks
from infra.database.engine import Database, DatabaseUnavailable
from infra.database.orders import acceptance
from infra.database.orders.acceptance import StoredOrder, place_request
from infra.database.orders.checks import orders_by_client_ids
from infra.database.orders.states import IN_QUEUE
from infra.market.calendar import HOME_ZONE
from infra.process_metrics import count_order
from infra.tracing import Traces
from infra.valkey.failures import code_of, explain_failure
from infra.valkey.request_queue import ClientOrderIdTaken, QueuedRequest, RequestQueue, outcome_of
from worker_runtime.protocol.errors import BerthError, CheckFailed, DeadlineExceeded, MemoryShort
from worker_runtime.protocol.messages import Answer, Failure, OrderOutcome, OrderState, PlaceOrder

#: While Valkey does not answer, a withdrawal is tried this many times, with this pause in seconds.
MAX_WITHDRAW_ATTEMPTS = 3
WITHDRAW_RETRY_INTERVAL_S = 0.5
#: Seconds within which a request whose answer was lost is queued again, and the pause before it: a
#: connection that died silently is found out within 1.3 s, and a new one is there 0.1 s later.
ENQUEUE_RETRY_TIMEOUT_S, ENQUEUE_RETRY_INTERVAL_S = 2.5, 0.15


@dataclass(frozen=True, slots=True)
class PendingOrder:
    row: StoredOrder
    request: PlaceOrder
    #: Instant of the deadline on `time.monotonic`, seconds.
    deadline: float
    #: Instant of its request on `time.monotonic`, seconds.
    began: float
    #: For a repeat: the order with its latest answer applied. Its request may have been enqueued
    #: before.
    latest_view: schemas.OrderView | None = None

    @property
    def is_new(self) -> bool:
        return self.latest_view is None

    @property
    def order(self) -> schemas.OrderView:
        """As callers see it; made when it is asked for, so after the request is on its way."""
        return view_of(self.row) if self.latest_view is None else self.latest_view

    @property
    def seconds_left(self) -> float:
        return self.deadline - time.monotonic()


@dataclass(frozen=True, slots=True)
class PlacementResult:
    order: schemas.OrderView
    #: False: the client order id was used before, and this is that order.
    new: bool
    #: Why the order was not executed, or is not known to be on its way.
    failure: BerthError | None = None

    @classmethod
    def of(cls, order: schemas.OrderView, answer: Answer | None = None) -> Self:
        """Builds a new order's result.

        Takes `retry_after` from `answer`, because it is not stored.
        """
        failure = failure_of(order)
        failed = (
            answer.failure.error() if answer is not None and answer.failure is not None else None
        )
        if failure is not None and failed is not None:
            failure.retry_after = failed.retry_after
        return cls(order, True, failure)


@dataclass(eq=False, repr=False)
class PendingOrders:
    """Follows each order in one task, which repeats of the same order share."""

    queue: RequestQueue
    answers: AnswerListener
    waiter: AnswerWaiter
    outcome_writer: OutcomeWriter
    traces: Traces | None = None

    def __post_init__(self) -> None:
        self._tasks: dict[str, asyncio.Task[PlacementResult]] = {}
        self._log = structlog.get_logger()

    def follow(self, pending: PendingOrder) -> asyncio.Task[PlacementResult]:
        """Returns the task that sends this order and waits for its answer. Do not cancel the task.

        Its result is the latest state of the order, with the error that kept it from the broker, if
        any. The task raises `ValkeyUnavailable` if the order may or may not have been queued.
        """
        order_id = pending.request.order_id
        task = self._tasks.get(order_id)
        if task is None:
            task = asyncio.create_task(self._follow(pending), name=f"order {order_id}")
            self._tasks[order_id] = task
            task.add_done_callback(lambda done: self._forget(order_id, done))
        return task

    async def close(self) -> None:
        await tasks.cancel_tasks(*self._tasks.values())

    def _forget(self, order_id: str, task: asyncio.Task[PlacementResult]) -> None:
        self._tasks.pop(order_id, None)
        if task.cancelled():
            return
        # Reading it keeps asyncio from reporting it: nobody may wait any more.
        error = task.exception()
        if isinstance(error, BerthError):
            self._log.warning("pending_order_failed", order=order_id, code=error.code)
        elif error is not None:
            self._log.error("pending_order_crashed", order=order_id, exc_info=error)

    async def _follow(self, pending: PendingOrder) -> PlacementResult:
        user_id, order_id = pending.request.user_id, pending.request.order_id
        with self.answers.expect(user_id, order_id, order_id, pending.row.first_epoch) as future:
            try:
                queued = await self._enqueue(pending)
                if not queued.new:
                    await self.answers.read_pending(order_id)
            except ClientOrderIdTaken as before:
                return PlacementResult.of(
                    await self.outcome_writer.take_over(pending.row.id, before)
                )
            except MemoryShort as error:  # nothing was queued, and nothing will be
                refused = _withdrawn(order_id, error)
                order = await self._write_withdrawal(pending.order, refused)
                return PlacementResult.of(order, refused)
            except RedisError as error:
                self._log.warning(
                    "enqueue_failed", order=order_id, reason=code_of(error) or type(error).__name__
                )
                raise ValkeyUnavailable(
                    f"{explain_failure(error)} It is not known whether the order was queued. "
                    "Send it again"
                    " with the same client_order_id to get its state; it is not placed twice."
                ) from None
            queued_at = time.monotonic()
            order = pending.order  # built now, while the worker handles the request
            withdrawn = await self._wait(pending, queued, future)
            if withdrawn is not None:
                return PlacementResult.of(withdrawn)
            answer = future.result()
        answered_at = time.monotonic()
        outcome, code = outcome_of(answer, order_id)
        if pending.is_new:
            count_order(answer, outcome.state, queued_at - pending.began, answered_at - queued_at)
            if self.traces is not None:
                self.traces.add_order(
                    order_id, pending.request.trace, answer, pending.began, queued_at
                )
        if outcome.withdrawn:
            return PlacementResult.of(await self._write_withdrawal(order, answer), answer)
        self.outcome_writer.write_later(NotedOutcome(outcome, code))
        return PlacementResult.of(apply_answer(order, answer), answer)

    async def _enqueue(self, pending: PendingOrder) -> QueuedRequest:
        """Queues the order, and retries if Valkey's reply was lost. A server queues an order id
        only once.

        Does not retry on a server that came after the order, which may not know the first attempt.
        Raises `ClientOrderIdTaken`, and `RedisError` if the order may or may not have been queued.
        """
        until = time.monotonic() + min(ENQUEUE_RETRY_TIMEOUT_S, pending.seconds_left)
        while True:
            try:
                return await self.queue.enqueue(pending.request, pending.seconds_left, pending.row)
            except (ConnectionError, TimeoutError) as error:
                reason = type(error).__name__
                if time.monotonic() >= until:
                    raise
                await asyncio.sleep(ENQUEUE_RETRY_INTERVAL_S)
                if await self.queue.may_have_lost_order(pending.row.created_at):
                    raise
            self._log.warning("enqueue_repeated", order=pending.request.order_id, reason=reason)

    async def _wait(
        self, pending: PendingOrder, queued: QueuedRequest, future: asyncio.Future[Answer]
    ) -> schemas.OrderView | None:
        """Waits for the answer.

        Returns None when it is there, else the order after its withdrawal.
        """
        until, has_live_worker = pending.deadline + ANSWER_GRACE_S, queued.has_live_worker
        while not future.done():
            error = await self.waiter.wait(
                pending.request.user_id, queued, future, until, has_live_worker=has_live_worker
            )
            if future.done():
                break
            withdrawn = await self._withdraw_unanswered(
                pending, queued, error or DeadlineExceeded()
            )
            if error is None:
                return None if future.done() else withdrawn or pending.order
            if withdrawn is not None:
                return withdrawn
            has_live_worker = True  # a worker has the order: assume so until the next check
        return None

    async def _withdraw_unanswered(
        self, pending: PendingOrder, queued: QueuedRequest, error: BerthError
    ) -> schemas.OrderView | None:
        """Withdraws the order and returns it; returns None if a worker has it, or may have it."""
        order = pending.order
        answer = _withdrawn(order.id, error)
        try:
            if await self.queue.may_have_lost_order(order.accepted_at):
                return None  # a worker may have had it: the sweeper settles the order
            if not await self._withdraw(order.user_id, queued, answer):
                # A worker has it, or an earlier attempt withdrew it and the reply was lost.
                await self.answers.read_pending(order.id)
                return None
        except RedisError:
            self._log.warning("withdraw_failed", order=order.id, code=error.code)
            return None
        self._log.warning("order_withdrawn", order=order.id, code=error.code)
        return await self._write_withdrawal(order, answer)

    async def _write_withdrawal(
        self, order: schemas.OrderView, answer: Answer
    ) -> schemas.OrderView:
        """Writes the withdrawal and returns the order.

        PostgreSQL may know that a worker had it before.
        """
        try:
            row = await self.outcome_writer.write_now(NotedOutcome(*outcome_of(answer, order.id)))
        except DatabaseUnavailable:
            return apply_answer(order, answer)
        return view_of(row)

    async def _withdraw(self, user_id: str, queued: QueuedRequest, answer: Answer) -> bool:
        """Withdraws the request from the queue; retries after a lost reply.

        The script is idempotent.
        """
        for _ in range(MAX_WITHDRAW_ATTEMPTS - 1):
            try:
                return await self.queue.withdraw(user_id, queued.frame, answer)
            except RedisError:
                await asyncio.sleep(WITHDRAW_RETRY_INTERVAL_S)
        return await self.queue.withdraw(user_id, queued.frame, answer)


def _withdrawn(order_id: str, error: BerthError) -> Answer:
    """Returns the answer to an order that no worker will get, because of `error`."""
    outcome = OrderOutcome(
        order_id=order_id,
        state=OrderState.EXPIRED if isinstance(error, DeadlineExceeded) else OrderState.REJECTED,
        reason=f"{error.code}: {error.detail}",
        withdrawn=True,
    )
    return Answer(request_id=order_id, outcome=outcome, failure=Failure.of(error))


#: Fields of the request's body that PostgreSQL stores.
_TERMS = tuple(schemas.OrderRequest.model_fields.keys() - {"allow_duplicate"})


@dataclass(frozen=True, kw_only=True)
class OrderLeg:
    """Describes the larger request of which an order is one leg."""

    #: Identifies the larger request, so that a repeat of it is recognised.
    fingerprint: str
    origin: str
    reduce_only: bool = False


@dataclass(frozen=True, eq=False, repr=False)
class OrderPlacer:
    database: Database
    answers: AnswerListener
    pending_orders: PendingOrders
    reader: OrderReader
    checks: PreTradeChecks
    _: KW_ONLY
    deadline: float
    #: What an order of unknown outcome blocks (`acceptance.NewOrder`).
    unknown_blocks: str = "symbol"
    traces: Traces | None = None

    async def place_order(
        self,
        user_id: str,
        body: schemas.OrderRequest,
        wait: float,
        actor: str,
        *,
        leg: OrderLeg | None = None,
        not_after: float | None = None,
    ) -> PlacementResult:
        """Places an order and waits up to `wait` seconds for the worker's answer.

        See `write_order` for the arguments and errors.
        """
        written = await self.write_order(user_id, body, actor, leg=leg, not_after=not_after)
        return await self.follow_order(written, wait)

    async def write_order(
        self,
        user_id: str,
        body: schemas.OrderRequest,
        actor: str,
        *,
        leg: OrderLeg | None = None,
        not_after: float | None = None,
        session: AsyncSession | None = None,
    ) -> PendingOrder | PlacementResult:
        """Writes the order without sending it, in `session`'s transaction if given.

        Returns the stored result if this is a repeat that needs no sending.

        `not_after`: an instant on `time.monotonic` after which the order must not be sent any more.
        Raises `ClientOrderIdReused`, `CheckFailed`, what `accept_order` refuses, and before
        anything is written `ValkeyUnavailable` or `DatabaseUnavailable`.
        """
        generation = self.answers.generation
        began = time.monotonic()
        lifetime_s = self.deadline
        if not_after is not None:
            lifetime_s = max(0.0, min(lifetime_s, not_after - began))
        terms = {name: getattr(body, name) for name in _TERMS}
        new = acceptance.NewOrder(
            **terms,
            user_id=user_id,
            fingerprint=leg.fingerprint if leg else body.fingerprint,
            generation=generation,
            lifetime_s=lifetime_s,
            trading_day=datetime.now(HOME_ZONE).date(),
            actor=actor,
            unknown_blocks=self.unknown_blocks,
            reduce_only=leg.reduce_only if leg else False,
            origin=leg.origin if leg else "",
            trace=self.traces.context("order") if self.traces is not None else "",
        )
        try:
            bounds = await self.checks.check(new)
        except CheckFailed:
            # A repeat returns its first order, even if the checks would refuse it now.
            async with self.database.session(autocommit=True) as reading:
                known = await orders_by_client_ids(reading, user_id, [body.client_order_id])
                if not known:
                    raise
                bounds = await acceptance.kept_bounds(reading, known[body.client_order_id].id)
        if body.allow_duplicate:
            bounds = bounds._replace(duplicate_window_s=-bounds.duplicate_window_s)
        if session is None:
            accepted = await acceptance.accept_order_alone(self.database, new, bounds)
        else:
            accepted = await acceptance.accept_order(session, new, bounds)
        if not accepted.same_request:
            raise ClientOrderIdReused
        row = accepted.order
        trace = new.trace if accepted.new else ""
        channel = self.answers.channels.name_of(user_id)
        request = place_request(row, channel, self.unknown_blocks, lifetime_s, trace)
        request = replace(request, **bounds.price_fields)
        if accepted.new:
            return PendingOrder(row, request, began + lifetime_s, began)
        try:
            order = await self.reader.with_latest_answer(row)
        except RedisError as error:
            failure = ValkeyUnavailable(explain_failure(error))
            return PlacementResult(view_of(row), new=False, failure=failure)
        waits = order.state in IN_QUEUE or order.state is OrderState.SUBMITTING
        if not waits or row.generation != generation or accepted.seconds_left <= 0:
            return PlacementResult(order, new=False, failure=failure_of(order))
        return PendingOrder(row, request, began + accepted.seconds_left, began, latest_view=order)

    async def follow_order(
        self, pending: PendingOrder | PlacementResult, wait: float
    ) -> PlacementResult:
        """Sends a written order once, and waits up to `wait` seconds for the worker's answer."""
        if isinstance(pending, PlacementResult):
            return pending
        task = self.pending_orders.follow(pending)
        await asyncio.wait({task}, timeout=wait)
        new = pending.is_new
        if not task.done():
            order = pending.order
            with suppress(DatabaseUnavailable, RedisError):  # the recorder may know a later state
                order = await self.reader.get(pending.row.id)
            return PlacementResult(order, new=new, failure=failure_of(order))
        if task.cancelled():  # this process stops; the worker still executes the order
            return PlacementResult(pending.order, new=new)
        error = task.exception()
        if isinstance(error, BerthError):
            return PlacementResult(pending.order, new=new, failure=error)
        result = task.result()
        return PlacementResult(result.order, new=new, failure=result.failure)
