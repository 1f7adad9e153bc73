"""Recovers orders whose handler may have died: not final a while after acceptance (nothing-lost).

Every `sweep_period` it leases the orders that are due (`orders.verify_at`). Several sweepers may
run: a lease expires by itself, and every step may be repeated.

| order | what happens |
|---|---|
| no event, time left, same generation of Valkey | queued again, once per id; a worker is started |
| overdue, and no worker was about to submit it | expired; it cannot be queued any more |
| overdue, answered | the answer is written |
| overdue, a worker was about to submit it | unknown |
| overdue, a worker took it, no answer yet | a workflow follows it; the next worker reports it |
| overdue, and Valkey's server is another one: its data may be an older copy | unknown |
| another generation: Valkey has lost data, perhaps the order's outcome | unknown |
| all others that are not final | followed by an `OrderWorkflow` |
"""

import asyncio
from collections import Counter
from collections.abc import Awaitable, Callable, Sequence
from dataclasses import KW_ONLY, dataclass
from datetime import datetime, time, timedelta
from uuid import uuid4

import structlog
from msgspec.structs import replace
from redis.asyncio import Redis
from redis.exceptions import RedisError
from temporalio.client import Client
from temporalio.common import WorkflowIDConflictPolicy, WorkflowIDReusePolicy
from temporalio.service import RPCError

from infra.database.engine import Database
from infra.database.orders import attention, recording
from infra.database.orders import watch as order_watch
from infra.database.orders.acceptance import kept_bounds, place_request
from infra.database.orders.merging import outcome_of
from infra.database.orders.watch import DueOrder
from infra.market.calendar import HOME_ZONE
from infra.settings import Settings
from infra.temporal.client import RPC_TIMEOUT
from infra.temporal.starter import WorkerStarter
from infra.valkey import client as valkey
from infra.valkey.request_queue import ClientOrderIdTaken, RequestFate, RequestQueue
from infra.vault.message_secret import MessageSecrets
from worker_runtime.protocol.errors import BerthError, DeadlineExceeded, MemoryShort, OutcomeUnknown
from worker_runtime.protocol.messages import Answer, Failure, OrderOutcome, OrderState
from workflows import names
from workflows.order.messages import FollowOrder, FollowSettings

#: About 0.1 s of work, with one round trip for most orders.
MAX_ORDERS_PER_SWEEP = 100
#: Seconds past its deadline after which an unanswered order is due: the API withdraws its own 1 s
#: after the deadline, and a worker that popped it right before answers by then.
DEADLINE_GRACE_S = 2.0
#: Seconds until another sweeper takes over the orders of one that died: longer than a round with
#: servers that answer slowly. Valkey's socket timeout is 5 s.
LEASE_S = 10.0
#: Seconds until an order that waits for its worker is due again.
RECHECK_INTERVAL_S = 2.0
#: Seconds until an order with a workflow is due again, in case somebody ended that workflow.
WORKFLOW_CHECK_INTERVAL_S = 300.0

_COPIED_QUEUE = (
    "it was accepted before the present server of Valkey came, whose queue may be an older copy"
)

_QUEUEABLE = frozenset({OrderState.ACCEPTED.value, OrderState.QUEUED.value})

log = structlog.get_logger()


@dataclass(eq=False, repr=False)
class OrderSweeper:
    """Recovers due orders, in a loop of each orchestrator that serves the queue `orders`."""

    client: Redis
    database: Database
    temporal: Client
    starter: WorkerStarter
    settings: Settings
    message_secrets: MessageSecrets
    _: KW_ONLY
    grace: float = DEADLINE_GRACE_S
    #: As the constant.
    lease: float = LEASE_S

    def __post_init__(self) -> None:
        self._queue = RequestQueue(self.client, self.message_secrets)

    async def run(self) -> None:
        while True:
            try:
                full = await self.sweep_once() == MAX_ORDERS_PER_SWEEP
            except BerthError as error:  # PostgreSQL is away: what is leased comes again
                log.warning("sweeper_waits", code=error.code, reason=error.detail[:200])
                full = False
            await asyncio.sleep(0 if full else self.settings.sweep_period)

    async def sweep_once(self) -> int:
        """Recovers the orders that are due; returns how many. Raises `DatabaseUnavailable`."""
        due_orders = await self.database.fetch(
            order_watch.take_due_orders,
            limit=MAX_ORDERS_PER_SWEEP,
            lease=self.lease,
            grace=self.grace,
        )
        if not due_orders:
            return 0
        log.info("orders_swept", **Counter(due.order.state for due in due_orders))
        await self._handle_each(
            self._recover, [due for due in due_orders if due.order.state in _QUEUEABLE]
        )
        await self._handle_each(
            self._start_workflow, [due for due in due_orders if due.order.state not in _QUEUEABLE]
        )
        return len(due_orders)

    async def _handle_each(
        self, work: Callable[[DueOrder], Awaitable[None]], due_orders: Sequence[DueOrder]
    ) -> None:
        """Handles each order. One that fails is due again after the lease."""
        for due in due_orders:
            try:
                await work(due)
            except (RedisError, OSError, RPCError) as error:
                # The server is away for all of them, and each would wait for its time limit.
                log.warning(
                    "sweeper_cannot_read", error=type(error).__name__, reason=str(error)[:200]
                )
                return

    async def _recover(self, due: DueOrder) -> None:
        """Recovers an order without any event of a worker."""
        order = due.order
        if order.generation != await self._generation():
            await self._record_unknown(due, "Valkey has lost data since it was accepted")
        elif not due.overdue:
            if due.seconds_left > 0:
                await self._requeue(due)
            await self.database.fetch(order_watch.postpone, due, RECHECK_INTERVAL_S)
        else:
            await self._settle_overdue(due)

    async def _requeue(self, due: DueOrder) -> None:
        order = due.order
        bounds = await self.database.fetch(kept_bounds, order.id)
        request = replace(
            place_request(order, "", self.settings.unknown_blocks), **bounds.price_fields
        )
        try:
            queued = await self._queue.enqueue(request, due.expires_at, order)
        except ClientOrderIdTaken as before:
            await self.database.write(attention.take_over, order.id, before.tag, before.reason)
            log.warning("order_taken_over", order=str(order.id), reason=before.reason)
            return
        except MemoryShort:  # due again; it expires at its deadline if that stays so
            log.warning("order_waits_for_memory", order=str(order.id))
            return
        if queued.new:
            log.warning(
                "order_queued_by_sweeper", order=str(order.id), left=round(due.seconds_left, 1)
            )
        if not queued.has_live_worker:
            self.starter.ensure(order.user_id, check_worker=True)  # other orders do not wait for it

    async def _settle_overdue(self, due: DueOrder) -> None:
        order = due.order
        late: BerthError = DeadlineExceeded()
        may_be_older_copy = await self._queue.may_have_lost_order(order.created_at)
        if may_be_older_copy:  # it is withdrawn all the same
            late = OutcomeUnknown(_COPIED_QUEUE)
        outcome = OrderOutcome(
            order_id=str(order.id),
            state=OrderState.UNKNOWN if may_be_older_copy else OrderState.EXPIRED,
            reason=f"{late.code}: {late.detail}",
            withdrawn=not may_be_older_copy,
        )
        answer = Answer(request_id=str(order.id), outcome=outcome, failure=Failure.of(late))
        fate, stored = await self._queue.withdraw_or_resolve(order, answer)
        if order.generation != await self._generation():
            return  # a flushed server knows nothing; due again
        if fate == RequestFate.ANSWERED and stored is not None:
            await self.database.write(recording.apply_outcome, *outcome_of(stored, str(order.id)))
        elif fate in (RequestFate.WITHDRAWN, RequestFate.ABSENT):
            # Asked again: the server may have changed since the first look.
            if may_be_older_copy or await self._queue.may_have_lost_order(order.created_at):
                await self._record_unknown(due, _COPIED_QUEUE)
                return
            await self.database.write(recording.apply_outcome, outcome, late.code)
            if fate == RequestFate.ABSENT:
                await self._queue.store_answer(order.user_id, answer)
        elif fate == RequestFate.JOURNALED:
            await self._record_unknown(
                due, "a worker was about to submit it and did not report the outcome"
            )
            return
        else:  # a worker took it and may be dead: the user's next worker reports it
            await self._start_workflow(due)
            return
        log.warning("order_settled_by_sweeper", order=str(order.id), fate=fate.value)
        await self.database.fetch(order_watch.postpone, due, RECHECK_INTERVAL_S)

    async def _record_unknown(self, due: DueOrder, why: str) -> None:
        order = due.order
        reason = f"{OutcomeUnknown.code}: {why}"
        event = recording.event_of_ours(
            order.id, order.user_id, "swept", OrderState.UNKNOWN, reason
        )
        await self.database.write(recording.record_events, [event])
        log.warning("order_unknown", order=str(due.order.id), reason=why)
        await self._start_workflow(due)

    async def _start_workflow(self, due: DueOrder) -> None:
        """Starts the order's workflow, or wakes the running one if a person asked."""
        order = due.order
        midnight = datetime.combine(order.trading_day, time(), HOME_ZONE)
        absent_after = self.settings.absent_after
        follow = FollowOrder(
            order_id=str(order.id),
            user_id=order.user_id,
            day_end=(midnight + timedelta(seconds=self.settings.trading_day_end)).timestamp(),
            settings=FollowSettings(
                absent_after=absent_after,
                absent_after_alive=2 * absent_after,
                patience=self.settings.verify_patience,
            ),
        )
        await self.temporal.start_workflow(
            names.ORDER,
            follow,
            id=names.order_id(str(order.id)),
            task_queue=names.ORDERS_QUEUE,
            id_conflict_policy=WorkflowIDConflictPolicy.USE_EXISTING,
            id_reuse_policy=WorkflowIDReusePolicy.ALLOW_DUPLICATE,
            start_signal="recheck" if due.asked or order.attention else None,
            static_summary=f"follows an order of user {order.user_id}",
            rpc_timeout=RPC_TIMEOUT,
        )
        await self.database.fetch(order_watch.postpone, due, WORKFLOW_CHECK_INTERVAL_S)

    async def _generation(self) -> str:
        return await valkey.ensure_generation(self.client, uuid4().hex)
