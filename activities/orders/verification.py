"""The activities that verify an order: by PostgreSQL, then a worker's answer, then the broker's
list.

The list is asked for through the user's queue. Several orders of an account are verified at the
same time; concurrent callers share one query.
"""

import asyncio
import time
import uuid
from datetime import datetime

import structlog
from redis.asyncio import Redis
from redis.exceptions import RedisError
from temporalio import activity

from activities.heartbeat import beating
from activities.orders.reconciliation import listed_event, may_be_listed_as
from activities.worker_calls import WorkerCaller
from infra.database.engine import Database
from infra.database.models import Order
from infra.database.orders import attention, recording
from infra.database.orders.merging import outcome_of
from infra.database.orders.states import OrderNotFound, rank
from infra.database.trading import reconciliations
from infra.database.workers import sessions as worker_sessions
from infra.tasks import SharedTasks
from infra.temporal.starter import WorkerStarter
from infra.valkey.request_queue import RequestQueue
from infra.vault.message_secret import MessageSecrets
from worker_runtime.protocol.broker_reports import BrokerOrder
from worker_runtime.protocol.errors import BerthError, WorkerLost
from worker_runtime.protocol.messages import FINAL_ORDER_STATES, OrderOutcome, OrderState
from worker_runtime.protocol.requests import AccountReport, QueryAccount, decode_report
from workflows.order.messages import UnresolvedOrder, VerificationFinding, Verified, VerifyOrder

log = structlog.get_logger()


class AccountQueryClient:
    def __init__(
        self,
        client: Redis,
        database: Database,
        starter: WorkerStarter,
        message_secrets: MessageSecrets,
    ) -> None:
        self._workers = WorkerCaller(client, database, starter, message_secrets)
        self._running: SharedTasks[tuple[str, str], AccountReport] = SharedTasks()

    async def orders(self, user_id: str, account_id: str, timeout: float) -> AccountReport:
        """Returns the orders of an account as the broker lists them now. `timeout` begins when a
        worker is active.

        Raises a `BerthError` with the reason if the broker could not be asked.
        """
        task = self._running.join(
            (user_id, account_id), lambda: self._ask(user_id, account_id, timeout)
        )
        # Shielded: another caller waits for the same.
        return await asyncio.shield(task)

    async def _ask(self, user_id: str, account_id: str, timeout: float) -> AccountReport:
        def query(request_id: str, generation: str) -> QueryAccount:
            return QueryAccount(
                request_id=request_id,
                user_id=user_id,
                account_id=account_id,
                reply_to="",
                generation=generation,
            )

        answer = await self._workers.call(user_id, query, timeout)
        if answer.report is None:
            raise BerthError("the worker answered without a report")
        return decode_report(answer.report)


#: Seconds by which the clocks of PostgreSQL, the orchestrator and the broker may differ.
MAX_CLOCK_SKEW_S = 30.0


class OrderActivities:
    """Activities `verify_order`, `settle_absent` and `demand_attention`. All may be repeated."""

    def __init__(
        self,
        client: Redis,
        database: Database,
        asking: AccountQueryClient,
        message_secrets: MessageSecrets,
    ) -> None:
        self._queue = RequestQueue(client, message_secrets)
        self._database = database
        self._asking = asking

    @activity.defn
    async def verify_order(self, request: VerifyOrder) -> Verified:
        """Compares the order once with what a worker answered, then with the broker's list.

        The list is asked for within `request.timeout` seconds, which begin when a worker is active.
        Without it the finding is `UNASKED`, and nothing is known. Raises `DatabaseUnavailable`.
        """
        async with beating():
            try:
                order = await self._load_with_answer(uuid.UUID(request.order_id))
            except OrderNotFound:
                log.error("followed_order_not_found", order_id=request.order_id)
                return Verified(finding=VerificationFinding.GONE)
            if order.state in FINAL_ORDER_STATES:
                return Verified(finding=VerificationFinding.FINAL, state=order.state)
            try:
                report = await self._asking.orders(order.user_id, order.account_id, request.timeout)
            except BerthError as error:
                log.info("order_not_verified", order_id=request.order_id, code=error.code)
                return Verified(
                    finding=VerificationFinding.UNASKED,
                    state=order.state,
                    code=error.code,
                    detail=error.detail[:200],
                )
            return await self._compare_with_list(order, report)

    @activity.defn
    async def settle_absent(self, request: UnresolvedOrder) -> bool:
        """Rejects an order that never reached the broker; False if anything is known of it
        there."""
        async with self._database.session() as session:
            order = await recording.lock_order(session, uuid.UUID(request.order_id))
            if order is None or order.broker_order_id is not None:
                return False
            if rank(order.state) > rank(OrderState.NEEDS_ATTENTION):
                return False
            outcome = OrderOutcome(
                order_id=request.order_id,
                state=OrderState.REJECTED,
                reason=f"{WorkerLost.code}: {request.reason}",
            )
            await recording.apply_outcome(session, outcome, WorkerLost.code)
        log.warning("order_never_reached_broker", order_id=request.order_id)
        return True

    @activity.defn
    async def demand_attention(self, request: UnresolvedOrder) -> bool:
        """Puts an order on the list for a person; False if it is final."""
        async with self._database.session() as session:
            raised = await attention.demand_attention(
                session, uuid.UUID(request.order_id), request.reason
            )
        if raised:
            log.warning(
                "order_needs_attention", order_id=request.order_id, reason=request.reason[:200]
            )
        return raised

    async def _load_with_answer(self, order_id: uuid.UUID) -> Order:
        """Returns the order, after writing an answer that the recorder has not written yet."""
        order = await self._database.write(recording.get_order, order_id)
        if order.state in FINAL_ORDER_STATES:
            return order
        try:
            answer = await self._queue.answer(
                order.user_id, str(order_id), str(order_id), order.first_epoch
            )
        except (RedisError, OSError):
            return order
        if answer is None:
            return order
        await self._database.write(recording.apply_outcome, *outcome_of(answer, str(order_id)))
        return await self._database.write(recording.get_order, order_id)

    async def _compare_with_list(self, order: Order, report: AccountReport) -> Verified:
        listed, doubtful = await self._find_listed(order, report)
        if listed is not None:
            await self._database.write(
                recording.record_events,
                [listed_event(order, listed, report.taken_at_ms or _now_ms())],
            )
            order = await self._database.write(recording.get_order, order.id)
            final = order.state in FINAL_ORDER_STATES
            finding = VerificationFinding.FINAL if final else VerificationFinding.LISTED
            return Verified(finding=finding, state=order.state)
        dead, quiet_since = await self._submitter_ended(order)
        return Verified(
            finding=VerificationFinding.MISSING,
            state=order.state,
            complete=report.complete,
            certain=report.complete and not doubtful and _would_list(report, order),
            dead=dead,
            quiet_since=quiet_since,
            # The age of the answer adds to the lag of the listing.
            behind=max(0, _now_ms() - report.taken_at_ms + report.behind_ms) / 1000,
        )

    async def _find_listed(
        self, order: Order, report: AccountReport
    ) -> tuple[BrokerOrder | None, bool]:
        """Returns the listed order that is ours, by the broker's id or our tag, and whether that is
        doubtful."""
        name = order.broker_order_id
        if name is not None:
            return next(
                (listed for listed in report.orders if listed.broker_order_id == name), None
            ), False
        tagged = [listed for listed in report.orders if listed.tag == order.tag]
        if not tagged:
            return None, False
        async with self._database.session() as session:
            known = await reconciliations.orders_by_broker_ids(
                session,
                order.user_id,
                order.account_id,
                [listed.broker_order_id for listed in tagged],
            )
        strange = [
            listed for listed in tagged if known.get(listed.broker_order_id, order).id == order.id
        ]
        match = next((listed for listed in strange if may_be_listed_as(order, listed)), None)
        return match, match is None and bool(strange)

    async def _submitter_ended(self, order: Order) -> tuple[bool, float]:
        """Returns whether the worker that may have submitted the order has ended, and the Unix time
        since when nobody can submit it.

        The worker that has just answered is the user's only one (one-owner) and handles one request
        at a time, so it is not submitting this order.
        """
        async with self._database.session() as session:
            last, epoch = await recording.submission_trace(session, order.id)
            serving = await worker_sessions.latest_session(session, user_id=order.user_id)
        since: datetime = max(order.deadline_at, last or order.created_at)
        if serving is None or serving.ended_at is not None:
            return False, since.timestamp()
        # Without an event the worker is unknown. One assigned after the deadline cannot have
        # submitted it.
        dead = serving.epoch > epoch if epoch else serving.assigned_at > order.deadline_at
        if dead:
            since = max(since, serving.assigned_at)
        return dead, since.timestamp()


def _would_list(report: AccountReport, order: Order) -> bool:
    """Returns True if the listing would show the order if the broker had it, up to the listing's
    lag."""
    if not report.absence_certain or report.reaches_ms is None:
        return False
    reaches_to = (_now_ms() - report.reaches_ms) / 1000
    return order.created_at.timestamp() - MAX_CLOCK_SKEW_S > reaches_to


def _now_ms() -> int:
    return int(time.time() * 1000)
