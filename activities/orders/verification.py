"""The activities that verify an order: by PostgreSQL, then a worker's answer, then the broker's list."""

from __future__ import annotations

import time
import uuid
from datetime import datetime

import structlog
from redis.asyncio import Redis
from redis.exceptions import RedisError
from sqlalchemy import func, select
from temporalio import activity

from activities.heartbeat import Heartbeat
from activities.orders.account_query import AccountQueryClient
from activities.orders.reconciliation import listed_event, may_be_listed_as
from infra.database.engine import Database
from infra.database.models import Order, OrderEventRow
from infra.database.orders import attention, recording
from infra.database.orders.states import OrderNotFound, rank
from infra.database.trading import reconciliations
from infra.database.workers import sessions as worker_sessions
from infra.valkey.request_queue import RequestQueue, outcome_of
from worker_runtime.protocol.errors import BerthError, WorkerLost
from worker_runtime.protocol.exchange import ExchangeOrder
from worker_runtime.protocol.messages import FINAL_ORDER_STATES, OrderOutcome, OrderState
from worker_runtime.protocol.requests import AccountReport
from workflows.order import messages as om

#: Seconds by which the clocks of PostgreSQL, the orchestrator and the broker may differ.
CLOCKS = 30.0

log = structlog.get_logger()


class OrderActivities:
    """Activities `verify_order`, `settle_absent` and `demand_attention`. All may be repeated."""

    def __init__(self, client: Redis, database: Database, asking: AccountQueryClient) -> None:
        self._queue = RequestQueue(client)
        self._database = database
        self._asking = asking

    @activity.defn
    async def verify_order(self, request: om.VerifyOrder) -> om.Verified:
        """Verifies once. Raises `DatabaseUnavailable`."""
        async with Heartbeat():
            try:
                order = await self._known(uuid.UUID(request.order_id))
            except OrderNotFound:
                log.error("followed_order_not_found", order_id=request.order_id)
                return om.Verified(finding=om.VerificationFinding.GONE)
            if order.state in FINAL_ORDER_STATES:
                return om.Verified(finding=om.VerificationFinding.FINAL, state=order.state)
            try:
                report = await self._asking.orders(order.user_id, order.account_id, request.timeout)
            except BerthError as error:
                log.info("order_not_verified", order_id=request.order_id, code=error.code)
                return om.Verified(
                    finding=om.VerificationFinding.UNASKED,
                    state=order.state,
                    code=error.code,
                    detail=error.detail[:200],
                )
            return await self._compared(order, report)

    @activity.defn
    async def settle_absent(self, request: om.SettleAbsent) -> bool:
        """Rejects an order that never reached the broker; False if anything is known of it there."""
        async with self._database.session() as session:
            order = await session.scalar(
                select(Order).where(Order.id == uuid.UUID(request.order_id)).with_for_update()
            )
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
    async def demand_attention(self, request: om.DemandAttention) -> bool:
        """Puts an order on the list for a person; False if it is final."""
        async with self._database.session() as session:
            raised = await attention.demand_attention(session, uuid.UUID(request.order_id), request.reason)
        if raised:
            log.warning("order_needs_attention", order_id=request.order_id, reason=request.reason[:200])
        return raised

    async def _known(self, order_id: uuid.UUID) -> Order:
        """The order, after a worker's answer that the recorder has not written yet."""
        async with self._database.session() as session:
            order = await recording.get_order(session, order_id)
        if order.state in FINAL_ORDER_STATES:
            return order
        try:
            answer = await self._queue.answer(order.user_id, str(order_id))
        except (RedisError, OSError):
            return order
        if answer is None:
            return order
        async with self._database.session() as session:
            await recording.apply_outcome(session, *outcome_of(answer, str(order_id)))
        async with self._database.session() as session:
            return await recording.get_order(session, order_id)

    async def _compared(self, order: Order, report: AccountReport) -> om.Verified:
        listed, doubtful = await self._find(order, report)
        if listed is not None:
            async with self._database.session() as session:
                await recording.record_events(
                    session, [listed_event(order, listed, report.taken_at_ms or _now_ms())]
                )
            async with self._database.session() as session:
                order = await recording.get_order(session, order.id)
            final = order.state in FINAL_ORDER_STATES
            finding = om.VerificationFinding.FINAL if final else om.VerificationFinding.LISTED
            return om.Verified(finding=finding, state=order.state)
        dead, quiet_since = await self._quiet(order)
        return om.Verified(
            finding=om.VerificationFinding.MISSING,
            state=order.state,
            complete=report.complete,
            certain=report.complete and not doubtful and _would_list(report, order),
            dead=dead,
            quiet_since=quiet_since,
            # The age of the answer adds to the lag of the listing.
            behind=max(0, _now_ms() - report.taken_at_ms + report.behind_ms) / 1000,
        )

    async def _find(self, order: Order, report: AccountReport) -> tuple[ExchangeOrder | None, bool]:
        """The listed order that is ours, by the broker's id or our tag; and whether that is doubtful."""
        name = order.broker_order_id
        if name is not None:
            return next((one for one in report.orders if one.broker_order_id == name), None), False
        tagged = [one for one in report.orders if one.tag == order.tag]
        if not tagged:
            return None, False
        async with self._database.session() as session:
            known = await reconciliations.orders_by_broker_ids(
                session, order.user_id, order.account_id, [one.broker_order_id for one in tagged]
            )
        strange = [one for one in tagged if known.get(one.broker_order_id, order).id == order.id]
        found = next((one for one in strange if may_be_listed_as(order, one)), None)
        return found, found is None and bool(strange)

    async def _quiet(self, order: Order) -> tuple[bool, float]:
        """Whether the worker that may have submitted it has ended, and since when nobody can submit it.

        The worker that has just answered is the user's only one (one-owner) and handles one request at a
        time, so it is not submitting this order.
        """
        async with self._database.session() as session:
            last, epoch = (
                await session.execute(
                    select(
                        func.max(OrderEventRow.at),
                        func.max(OrderEventRow.data["epoch"].as_integer()).filter(
                            OrderEventRow.state == OrderState.SUBMITTING
                        ),
                    ).where(OrderEventRow.order_id == order.id)
                )
            ).one()
            serving = await worker_sessions.latest_session(session, order.user_id)
        since: datetime = max(order.deadline_at, last or order.created_at)
        if serving is None or serving.ended_at is not None:
            return False, since.timestamp()
        # Without an event the worker is unknown. One assigned after the deadline cannot have submitted it.
        dead = serving.epoch > epoch if epoch else serving.assigned_at > order.deadline_at
        if dead:
            since = max(since, serving.assigned_at)
        return dead, since.timestamp()


def _would_list(report: AccountReport, order: Order) -> bool:
    """Whether the listing would show the order if the broker had it, up to the listing's lag."""
    if not report.absence_certain or report.reaches_ms is None:
        return False
    reaches_to = (_now_ms() - report.reaches_ms) / 1000
    return order.created_at.timestamp() - CLOCKS > reaches_to


def _now_ms() -> int:
    return int(time.time() * 1000)
