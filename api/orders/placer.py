"""Places orders: writes each to PostgreSQL, queues it, and follows it to its answer in one task.

The task outlives the request that began it. After a 202 it still has a worker started, and takes the order
back if none comes. If this process dies, PostgreSQL has the order and its deadline.
"""

from __future__ import annotations

import asyncio
import time
from dataclasses import dataclass
from datetime import UTC, date, datetime, timedelta
from hashlib import sha256

import structlog
from redis.exceptions import RedisError

from api.http.errors import ClientOrderIdReused, ValkeyUnavailable
from api.orders import schemas
from api.orders.checks import PreTradeChecks
from api.orders.outcomes import NotedOutcome, OrderReader, OutcomeWriter, apply_answer, failure_of, view_of
from api.orders.schemas import OrderView
from api.workers.answers import AnswerListener, AnswerWaiter
from infra import tasks
from infra.database.engine import Database, DatabaseUnavailable
from infra.database.models import Order as Row
from infra.database.orders import acceptance
from infra.database.orders.acceptance import place_request
from infra.database.trading import limits as trading_limits
from infra.market.calendar import TAIPEI
from infra.valkey.request_queue import QueuedRequest, RequestQueue, outcome_of
from worker_runtime.protocol.errors import BerthError, CheckFailed, DeadlineExceeded, DuplicateOrder
from worker_runtime.protocol.messages import Answer, Failure, OrderOutcome, OrderState, PlaceOrder

#: While Valkey does not answer, a withdrawal is tried this many times, with this pause in seconds.
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
        failed = answer.failure.error() if answer is not None and answer.failure is not None else None
        if failure is not None and failed is not None:
            failure.retry_after = failed.retry_after
        return cls(order, failure)


class PendingOrders:
    """Follows each order in one task, which repeats of the same order share."""

    def __init__(
        self,
        queue: RequestQueue,
        answers: AnswerListener,
        waiter: AnswerWaiter,
        outcome_writer: OutcomeWriter,
    ) -> None:
        self._queue = queue
        self._answers = answers
        self._waiter = waiter
        self._outcome_writer = outcome_writer
        self._tasks: dict[str, asyncio.Task[PendingOrderResult]] = {}
        self._log = structlog.get_logger()

    def follow(self, pending: PendingOrder) -> asyncio.Task[PendingOrderResult]:
        """The task that follows this order; wait for it without cancelling it.

        It returns the order as far as it came, with its failure before the broker. Raises
        `ValkeyUnavailable` if it is not certain that the order was enqueued.
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

    def _forget(self, order_id: str, task: asyncio.Task[PendingOrderResult]) -> None:
        self._tasks.pop(order_id, None)
        if task.cancelled():
            return
        error = task.exception()  # also marks it as seen: the request may be gone by now
        if isinstance(error, BerthError):
            self._log.warning("pending_order_failed", order=order_id, code=error.code)
        elif error is not None:
            self._log.error("pending_order_crashed", order=order_id, exc_info=error)

    async def _follow(self, pending: PendingOrder) -> PendingOrderResult:
        user_id, order_id = pending.request.user_id, pending.request.order_id
        with self._answers.expect(user_id, order_id) as answer:
            try:
                queued = await self._queue.enqueue(pending.request, pending.left)
                if not queued.new:
                    await self._answers.read(user_id, order_id)
            except RedisError as error:
                self._log.warning("enqueue_failed", order=order_id, reason=type(error).__name__)
                raise ValkeyUnavailable("Valkey: whether the order was queued is not known") from None
            order = pending.order  # while the worker is at it
            given_up = await self._wait(pending, queued, answer)
            if given_up is not None:
                return PendingOrderResult.of(given_up)
            found = answer.result()
        outcome, code = outcome_of(found, order_id)
        if outcome.withdrawn:
            return PendingOrderResult.of(await self._write_withdrawal(order, found), found)
        self._outcome_writer.write_later(NotedOutcome(outcome, code))
        return PendingOrderResult.of(apply_answer(order, found), found)

    async def _wait(
        self, pending: PendingOrder, queued: QueuedRequest, answer: asyncio.Future[Answer]
    ) -> OrderView | None:
        """Returns None when the answer is there, else the order that was given up."""
        until, marked = pending.deadline + ANSWER_GRACE, queued.marked
        while not answer.done():
            error = await self._waiter.wait(pending.request.user_id, queued, answer, until, marked=marked)
            if answer.done():
                break
            given_up = await self._give_up(pending, queued, error or DeadlineExceeded())
            if error is None:
                return None if answer.done() else given_up or pending.order
            if given_up is not None:
                return given_up
            marked = True  # somebody had it: until the next check
        return None

    async def _give_up(
        self, pending: PendingOrder, queued: QueuedRequest, error: BerthError
    ) -> OrderView | None:
        """Takes the order back; None if a worker has it already, so that only its answer tells."""
        order = pending.order
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
        return await self._write_withdrawal(order, answer)

    async def _write_withdrawal(self, order: OrderView, answer: Answer) -> OrderView:
        """The order after it was taken back. PostgreSQL may know that a worker had taken it before."""
        try:
            row = await self._outcome_writer.write_now(NotedOutcome(*outcome_of(answer, order.id)))
        except DatabaseUnavailable:
            return apply_answer(order, answer)
        return view_of(row)

    async def _withdraw(self, user_id: str, queued: QueuedRequest, answer: Answer) -> bool:
        """Repeats what may have happened without our hearing of it: the script bears that."""
        for _ in range(WITHDRAW_TRIES - 1):
            try:
                return await self._queue.withdraw(user_id, queued.frame, answer)
            except RedisError:
                await asyncio.sleep(WITHDRAW_PAUSE)
        return await self._queue.withdraw(user_id, queued.frame, answer)


#: States in which an order may still be waiting in its queue.
_IN_QUEUE = frozenset({OrderState.ACCEPTED, OrderState.QUEUED, OrderState.SUBMITTING})


def trading_day(now: datetime) -> date:
    """The date in Taipei; what is counted for a day is counted for this."""
    return now.astimezone(TAIPEI).date()


def fingerprint_of(body: schemas.OrderRequest) -> str:
    """The same for two bodies that ask for the same order, however the price is written."""
    price = "" if body.price is None else format(body.price.normalize(), "f")
    parts = (
        *(body.account_id, body.symbol, body.side, str(body.quantity)),
        *(body.price_type, price, body.time_in_force),
    )
    return sha256("|".join(parts).encode()).hexdigest()


@dataclass(frozen=True, kw_only=True)
class OrderLeg:
    """What an order is that stands for more than its body says."""

    #: Of what was asked for; a repeat is known by it.
    fingerprint: str
    origin: str
    reduce_only: bool = False


@dataclass(frozen=True, slots=True)
class PlacementResult:
    order: schemas.OrderView
    #: False: the client order id was used before, and this is that order.
    new: bool
    #: Why the order was not executed, or is not known to be on its way.
    failure: BerthError | None = None


class OrderPlacer:
    def __init__(
        self,
        database: Database,
        answers: AnswerListener,
        pending_orders: PendingOrders,
        reader: OrderReader,
        checks: PreTradeChecks,
        *,
        deadline: float,
        unknown_blocks: str = "symbol",
    ) -> None:
        self._database = database
        self._answers = answers
        self._pending_orders = pending_orders
        self._reader = reader
        self._checks = checks
        self._deadline = deadline
        #: What an order of unknown outcome blocks (`acceptance.NewOrder`).
        self._unknown_blocks = unknown_blocks

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

        `not_after`: an instant on `time.monotonic` after which the order must not be sent any more.
        Raises `ClientOrderIdReused`, `CheckFailed`, what `accept_order` refuses, and before anything is
        written `ValkeyUnavailable` or `DatabaseUnavailable`.
        """
        generation = self._answers.generation
        now = datetime.now(UTC)
        began = time.monotonic()
        lasts = self._deadline
        if not_after is not None:
            lasts = max(0.0, min(lasts, not_after - began))
        new = acceptance.NewOrder(
            user_id=user_id,
            account_id=body.account_id,
            client_order_id=body.client_order_id,
            fingerprint=leg.fingerprint if leg else fingerprint_of(body),
            symbol=body.symbol,
            side=body.side.value,
            quantity=body.quantity,
            price_type=body.price_type.value,
            price=body.price,
            time_in_force=body.time_in_force.value,
            generation=generation,
            deadline_at=now + timedelta(seconds=lasts),
            trading_day=trading_day(now),
            actor=actor,
            unknown_blocks=self._unknown_blocks,
            reduce_only=leg.reduce_only if leg else False,
            origin=leg.origin if leg else "",
        )
        accepted = await self._accept(new)
        if not accepted.same_request:
            raise ClientOrderIdReused
        row = accepted.order
        if accepted.new:
            return await self._wait_for_order(
                PendingOrder(row, self._request(row, lasts), began + lasts), wait
            )
        order = view_of(row)
        try:
            order = await self._reader.with_latest_answer(order)
        except RedisError:
            return PlacementResult(order, new=False, failure=ValkeyUnavailable())
        left = (row.deadline_at - now).total_seconds()
        if order.state not in _IN_QUEUE or row.generation != generation or left <= 0:
            return PlacementResult(order, new=False, failure=failure_of(order))
        return await self._wait_for_order(
            PendingOrder(row, self._request(row, lasts), began + left, seen=order), wait
        )

    async def _accept(self, new: acceptance.NewOrder) -> acceptance.AcceptedOrder:
        """Checks and writes. A repeat is answered whatever the checks would say of it now."""
        try:
            window = await self._checks.check(new)
        except CheckFailed:
            async with self._database.session(autocommit=True) as session:
                if not await trading_limits.client_id_used(session, new.user_id, new.client_order_id):
                    raise
            window = 0.0
        if not window:
            return await acceptance.accept_order_alone(self._database, new)
        async with self._database.session() as session:
            try:
                await self._checks.refuse_duplicate(session, new, window)
            except DuplicateOrder:
                if not await trading_limits.client_id_used(session, new.user_id, new.client_order_id):
                    raise
            return await acceptance.accept_order(session, new)

    def _request(self, row: Row, lasts: float) -> PlaceOrder:
        """`lasts`: seconds from its acceptance to its deadline."""
        return place_request(row, self._answers.channel, self._unknown_blocks, lasts)

    async def _wait_for_order(self, pending: PendingOrder, wait: float) -> PlacementResult:
        task = self._pending_orders.follow(pending)
        await asyncio.wait({task}, timeout=wait)
        new = pending.first
        if not task.done():
            return PlacementResult(pending.order, new=new)
        if task.cancelled():  # this process is stopping; the order goes on
            return PlacementResult(pending.order, new=new)
        error = task.exception()
        if isinstance(error, BerthError):
            return PlacementResult(pending.order, new=new, failure=error)
        result = task.result()
        return PlacementResult(result.order, new=new, failure=result.failure)
