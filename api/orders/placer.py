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
from redis.exceptions import RedisError
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
from api.workers.answers import AnswerListener
from infra import tasks
from infra.database.engine import Database, DatabaseUnavailable
from infra.database.orders import acceptance
from infra.database.orders.acceptance import StoredOrder, place_request
from infra.database.orders.checks import find_refusal, orders_by_client_ids
from infra.database.orders.merging import outcome_of
from infra.database.orders.states import IN_QUEUE
from infra.market.calendar import HOME_ZONE
from infra.process_metrics import count_order
from infra.tracing import Traces
from infra.valkey.failures import explain_failure
from infra.valkey.request_queue import ClientOrderIdTaken
from infra.worker_calls.client import NoAnswer, RequestWithdrawn, WorkerClient, withdrawal_of
from worker_runtime.protocol.errors import BerthError, CheckFailed, MemoryShort
from worker_runtime.protocol.messages import Answer, OrderState, PlaceOrder


@dataclass(frozen=True, slots=True)
class PendingOrder:
    row: StoredOrder
    request: PlaceOrder
    #: Instant of the deadline on `time.monotonic`, seconds.
    deadline: float
    #: Instant of its request on `time.monotonic`, seconds.
    began: float
    #: The order with its latest answer applied; only a repeat has it. Its request may have been
    #: enqueued before.
    latest_view: schemas.OrderView | None = None

    @property
    def is_new(self) -> bool:
        return self.latest_view is None

    @property
    def order(self) -> schemas.OrderView:
        """Builds the order as callers see it, at each access: use it after the request is
        queued."""
        return view_of(self.row) if self.latest_view is None else self.latest_view

    @property
    def seconds_left(self) -> float:
        return self.deadline - time.monotonic()


@dataclass(frozen=True, slots=True)
class PlacementResult:
    order: schemas.OrderView
    #: False: the client order id was used before, and this is that order.
    new: bool
    #: Why the order was not executed, or why it may not have been queued.
    failure: BerthError | None = None

    @classmethod
    def of(cls, order: schemas.OrderView, answer: Answer | None = None) -> Self:
        """Builds the result of an order that was followed; the caller says whether it was a repeat.

        `retry_after` comes from `answer`, because PostgreSQL does not store it.
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

    workers: WorkerClient
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
        # Reading the exception keeps asyncio from reporting it: perhaps nobody waits any more.
        error = task.exception()
        if isinstance(error, BerthError):
            self._log.warning("pending_order_failed", order=order_id, code=error.code)
        elif error is not None:
            self._log.error("pending_order_crashed", order=order_id, exc_info=error)

    async def _follow(self, pending: PendingOrder) -> PlacementResult:
        request, order_id = pending.request, pending.request.order_id
        order, queued_at = pending.latest_view, pending.began

        def note_queued() -> None:
            nonlocal order, queued_at
            queued_at = time.monotonic()
            order = pending.order  # built now, while the worker handles the request

        try:
            answer = await self.workers.call(
                request,
                pending.deadline,
                first_epoch=pending.row.first_epoch,
                order=pending.row,
                on_queued=note_queued,
            )
        except ClientOrderIdTaken as before:
            return PlacementResult.of(await self.outcome_writer.take_over(pending.row.id, before))
        except MemoryShort as error:  # nothing was queued, and nothing will be
            refusal = withdrawal_of(request, error)
            return PlacementResult.of(await self._write_withdrawal(pending, refusal), refusal)
        except RequestWithdrawn as withdrawn:
            self._log.warning("order_withdrawn", order=order_id, code=withdrawn.reason.code)
            return PlacementResult.of(await self._write_withdrawal(pending, withdrawn.answer))
        except NoAnswer:  # a worker may have it: the sweeper settles the order
            return PlacementResult.of(pending.order)
        answered_at = time.monotonic()
        outcome, code = outcome_of(answer, order_id)
        if pending.is_new:
            count_order(answer, outcome.state, queued_at - pending.began, answered_at - queued_at)
            if self.traces is not None:
                self.traces.add_order(order_id, request.trace, answer, pending.began, queued_at)
        if outcome.withdrawn:
            return PlacementResult.of(await self._write_withdrawal(pending, answer), answer)
        self.outcome_writer.write_later(NotedOutcome(outcome, code))
        return PlacementResult.of(apply_answer(order or pending.order, answer), answer)

    async def _write_withdrawal(self, pending: PendingOrder, answer: Answer) -> schemas.OrderView:
        """Writes the withdrawal and returns the order. PostgreSQL may know that a worker had it
        before."""
        noted = NotedOutcome(*outcome_of(answer, pending.request.order_id))
        try:
            return view_of(await self.outcome_writer.write_now(noted))
        except DatabaseUnavailable:
            return apply_answer(pending.order, answer)


#: Fields of the request's body that PostgreSQL stores.
_TERMS = tuple(schemas.OrderRequest.model_fields.keys() - {"allow_duplicate", "price_rounding"})


@dataclass(frozen=True, kw_only=True)
class ParentRequest:
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
    #: Seconds from an order's acceptance to its deadline.
    lifetime_s: float
    #: Says what an order of unknown outcome blocks (`acceptance.NewOrder`).
    unknown_blocks: str = "symbol"
    traces: Traces | None = None

    async def place_order(
        self,
        user_id: str,
        body: schemas.OrderRequest,
        wait: float,
        actor: str,
        *,
        parent: ParentRequest | None = None,
        not_after: float | None = None,
    ) -> PlacementResult:
        """Places an order and waits up to `wait` seconds for the worker's answer.

        See `write_order` for the arguments and errors.
        """
        written = await self.write_order(user_id, body, actor, parent=parent, not_after=not_after)
        return await self.follow_order(written, wait)

    async def write_order(
        self,
        user_id: str,
        body: schemas.OrderRequest,
        actor: str,
        *,
        parent: ParentRequest | None = None,
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
        lifetime_s = self.lifetime_s
        if not_after is not None:
            lifetime_s = max(0.0, min(lifetime_s, not_after - began))
        new = self._new_order(user_id, body, actor, parent, generation, lifetime_s)
        if body.price_rounding is schemas.OrderPriceRounding.PASSIVE:
            new = await self.checks.round_price(new)
        try:
            bounds = await self.checks.check(new)
        except CheckFailed:
            # A repeat returns its first order, even if the checks would refuse it now.
            first_bounds = await self._load_bounds_of_first(user_id, body.client_order_id)
            if first_bounds is None:
                raise
            bounds = first_bounds
        if body.allow_duplicate:
            bounds = bounds._replace(duplicate_window_s=-bounds.duplicate_window_s)
        if session is None:
            accepted = await acceptance.accept_order_alone(self.database, new, bounds)
        else:
            accepted = await acceptance.accept_order(session, new, bounds)
        if not accepted.same_request:
            raise ClientOrderIdReused
        if not accepted.new:
            return await self._resume_order(accepted, bounds, generation, began)
        request = self._request_of(accepted.order, bounds, lifetime_s, new.trace)
        return PendingOrder(accepted.order, request, began + lifetime_s, began)

    async def check_order(
        self, user_id: str, body: schemas.OrderRequest, *, parent: ParentRequest | None = None
    ) -> None:
        """Raises what an order would be refused for if it was placed now. Writes nothing.

        It does not look for an order with the same client order id.
        """
        new = self._new_order(user_id, body, "", parent, "", self.lifetime_s)
        if body.price_rounding is schemas.OrderPriceRounding.PASSIVE:
            new = await self.checks.round_price(new)
        window_s = (await self.checks.check(new)).duplicate_window_s
        async with self.database.session(autocommit=True) as session:
            refusal = await find_refusal(session, new, self.unknown_blocks)
            if refusal is None and window_s > 0 and not body.allow_duplicate:
                refusal = await acceptance.find_duplicate(session, new, window_s)
        if refusal is not None:
            raise refusal

    def _new_order(
        self,
        user_id: str,
        body: schemas.OrderRequest,
        actor: str,
        parent: ParentRequest | None,
        generation: str,
        lifetime_s: float,
    ) -> acceptance.NewOrder:
        terms = {name: getattr(body, name) for name in _TERMS}
        return acceptance.NewOrder(
            **terms,
            user_id=user_id,
            fingerprint=parent.fingerprint if parent else body.fingerprint,
            generation=generation,
            lifetime_s=lifetime_s,
            trading_day=datetime.now(HOME_ZONE).date(),
            actor=actor,
            unknown_blocks=self.unknown_blocks,
            reduce_only=parent.reduce_only if parent else False,
            origin=parent.origin if parent else "",
            trace=self.traces.context("order") if self.traces is not None else "",
        )

    async def _load_bounds_of_first(
        self, user_id: str, client_order_id: str
    ) -> acceptance.OrderBounds | None:
        """Returns the bounds of the order that has this client order id; None if there is none."""
        async with self.database.session(autocommit=True) as reading:
            known = await orders_by_client_ids(reading, user_id, [client_order_id])
            if not known:
                return None
            return await acceptance.kept_bounds(reading, known[client_order_id].id)

    def _request_of(
        self, row: StoredOrder, bounds: acceptance.OrderBounds, lifetime_s: float | None, trace: str
    ) -> PlaceOrder:
        """Returns the message that the worker gets."""
        channel = self.answers.channels.name_of(row.user_id)
        request = place_request(row, channel, self.unknown_blocks, lifetime_s, trace)
        return replace(request, **bounds.price_fields)

    async def _resume_order(
        self,
        accepted: acceptance.AcceptedOrder,
        bounds: acceptance.OrderBounds,
        generation: str,
        began: float,
    ) -> PendingOrder | PlacementResult:
        """Handles a repeated client order id: sends the first order if it is still waiting, else
        returns its result."""
        row = accepted.order
        try:
            order = await self.reader.with_latest_answer(row)
        except RedisError as error:
            failure = ValkeyUnavailable(explain_failure(error))
            return PlacementResult(view_of(row), new=False, failure=failure)
        is_waiting = order.state in IN_QUEUE or order.state is OrderState.SUBMITTING
        # After a loss of Valkey's data, the sweeper settles the order.
        if not is_waiting or row.generation != generation or accepted.seconds_left <= 0:
            return PlacementResult(order, new=False, failure=failure_of(order))
        # None: use the stored lifetime. A shorter one would make the order look newer than Valkey's
        # data, and it could be submitted twice.
        request = self._request_of(row, bounds, None, "")
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
