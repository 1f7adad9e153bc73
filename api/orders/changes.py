"""Cancels and replaces orders.

A cancel removes an order from the queue if no worker has taken it. Any other change goes through
the user's queue as a request, behind the order itself.
"""

import asyncio
import time
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import dataclass, replace
from datetime import timedelta
from decimal import Decimal
from typing import Any
from uuid import UUID

from redis.exceptions import RedisError

from api.http import errors
from api.http.problems import ProblemError
from api.orders import schemas
from api.orders.checks import PreTradeChecks
from api.orders.outcomes import NotedOutcome, OrderReader, OutcomeWriter, apply_answer, view_of
from api.orders.schemas import OrderView
from api.workers.answers import AnswerListener
from api.workers.requests import WorkerRequests
from infra.database import audit
from infra.database.engine import Database
from infra.database.models import Order as Row
from infra.database.orders import changes as order_changes
from infra.database.orders import checks as order_checks
from infra.database.orders.attention import OrderSettled
from infra.database.orders.recording import event_of_ours
from infra.database.orders.states import IN_QUEUE
from infra.database.trading import quantity_changes
from infra.database.workers import sessions as worker_sessions
from infra.settings import Settings
from infra.valkey.request_queue import RequestFate, RequestQueue
from worker_runtime.protocol.errors import BerthError, CheckFailed
from worker_runtime.protocol.messages import CANCELLED_IN_QUEUE, Answer, OrderOutcome, OrderState
from worker_runtime.protocol.order_terms import OrderLot
from worker_runtime.protocol.requests import CancelOrder, ConfirmedQuantityChange, ReplaceOrder

#: States in which the broker has the order.
_WORKING = frozenset({OrderState.SUBMITTED, OrderState.PART_FILLED})
#: Cancels of one order that the audit trail notes. Each may come under a new request id, as often
#: as wanted.
MAX_NOTED_CANCELS = 20
#: Seconds after a change's deadline, by which its call ends, within which its answer or event is
#: recorded.
CONFIRMATION_GRACE_S = 5.0


@dataclass(frozen=True, slots=True)
class ChangeResult:
    order: OrderView
    #: False: the worker has not answered yet; the change continues.
    answered: bool = True


@dataclass(frozen=True, eq=False)
class OrderChangeService:
    database: Database
    answers: AnswerListener
    queue: RequestQueue
    worker_requests: WorkerRequests
    reader: OrderReader
    outcome_writer: OutcomeWriter
    checks: PreTradeChecks
    settings: Settings

    async def cancel(
        self, row: Row, body: schemas.CancelRequest, wait: float, actor: str
    ) -> ChangeResult:
        """Cancels an order and waits up to `wait` seconds. A cancelled order is returned as it is.

        An order that no worker has taken is withdrawn from its queue: exactly one of us and the
        worker gets it. Raises `ProblemError` with `OrderSettled`, what the worker or the broker
        said, or why there is no worker; `ValkeyUnavailable`.
        """
        generation = self.answers.generation
        order = await self.reader.with_latest_answer(row)
        if order.state is OrderState.CANCELLED:
            return ChangeResult(order)
        _refuse_final(order)
        async with self.database.session() as session:
            await audit.append_entry_up_to(
                session,
                MAX_NOTED_CANCELS,
                actor,
                "order.cancel_requested",
                f"order:{order.id}",
                request_id=body.request_id,
            )
        if order.state in IN_QUEUE and row.generation == generation:
            order = await self._withdraw(row, order)
            if order.state is OrderState.CANCELLED:
                return ChangeResult(order)
            _refuse_final(order)
        request_id = order_changes.request_id_of(row.id, "cancel", body.request_id)
        request = CancelOrder(**self._request(row, order, request_id), generation=generation)
        changed = await self._send(request, order, self.settings.order_deadline, wait)
        if changed.order.final and changed.order.state is not OrderState.CANCELLED:
            _refuse_final(changed.order)
        return changed

    async def _withdraw(self, row: Row, order: OrderView) -> OrderView:
        """Returns the order, cancelled if it was still queued and no worker has taken it."""
        state, why = OrderState.CANCELLED, CANCELLED_IN_QUEUE
        outcome = OrderOutcome(order_id=order.id, state=state, reason=why, withdrawn=True)
        answer = Answer(request_id=order.id, outcome=outcome)
        if await self.queue.may_have_lost_order(row.created_at):
            return order  # a worker may have had it: the cancel follows it in the queue
        fate, stored = await self.queue.withdraw_or_resolve(row, answer)
        if row.generation != await self.queue.generation():
            return order  # asked a Valkey that has lost data: it did not know that a worker has it
        if fate is RequestFate.ANSWERED and stored is not None:
            return apply_answer(order, stored)
        if fate not in (RequestFate.WITHDRAWN, RequestFate.ABSENT):
            return order  # a worker has it: the cancel follows in the same queue
        event = event_of_ours(order.id, order.user_id, state, state, why)
        now = await self.outcome_writer.write_now(NotedOutcome(outcome, event=event))
        if fate is RequestFate.ABSENT and now.state == OrderState.CANCELLED:
            with suppress(RedisError):  # a process about to queue it waits for this answer
                await self.queue.store_answer(order.user_id, answer)
        return view_of(now)

    async def replace(
        self, row: Row, body: schemas.ReplaceRequest, wait: float, actor: str
    ) -> ChangeResult:
        """Changes a working order, once for each request id, and waits up to `wait` seconds.
        A new price is checked like a new order: here by all checks, in the worker by its switch. A
        smaller quantity always passes.

        Raises `ProblemError` with `OrderSettled`, `OrderUnknown`, `NotAtBroker`, `ReplaceInvalid`,
        `RequestIdReused`, `ChangeUnconfirmed`, what a new order would be refused for, or what the
        worker or the broker said; `ValkeyUnavailable`.
        """
        generation = self.answers.generation
        order = await self.reader.with_latest_answer(row)
        change, until = await self._note_change(row, order, body, generation, actor)
        request_id = order_changes.request_id_of(row.id, "replace", body.request_id)
        seconds_left = until - time.monotonic()
        if seconds_left <= 0 or change.generation != generation:
            # It is never sent a second time.
            return await self._outcome_of(order, change, request_id, seconds_left)
        confirmed: Sequence[ConfirmedQuantityChange] = ()
        if change.quantity is not None:
            confirmed = await self.database.read(
                quantity_changes.confirmed_for, order.user_id, order.account_id
            )
        request = ReplaceOrder(
            **self._request(row, order, request_id),
            generation=change.generation,
            quantity=change.quantity,
            price=change.price,
            reduce_only=row.reduce_only,
            price_band=change.price_band,
            confirmed=tuple(confirmed),
        )
        # Less what passed since: the worker must not take a change after its deadline.
        return await self._send(request, order, until - time.monotonic(), wait, change)

    async def _note_change(
        self,
        row: Row,
        order: OrderView,
        body: schemas.ReplaceRequest,
        generation: str,
        actor: str,
    ) -> tuple[order_changes.OrderChange, float]:
        """Checks a change and notes it under its request id; a repeat gets the one that was noted.

        Returns the change and the instant of its deadline on `time.monotonic`. Raises
        `ProblemError` with `RequestIdReused` or what the change is refused for.
        """
        first_epoch = await worker_sessions.first_epoch(self.database, order.user_id)
        read_at = time.monotonic()
        async with self.database.session() as session:
            now = await order_checks.database_clock(session)
            requested = order_changes.OrderChange(
                quantity=body.quantity,
                price=body.price,
                generation=generation,
                deadline_at=now + timedelta(seconds=self.settings.order_deadline),
                first_epoch=first_epoch,
            )
            noted = await order_changes.find_change(session, row.id, body.request_id)
        if noted is None:
            _check_replace(order, body)
            if body.price is not None:
                band = await self._check_price(
                    row, order, body.quantity or order.quantity, body.price
                )
                requested = replace(requested, price_band=band)
            async with self.database.session() as session:
                noted = await order_changes.note_change(
                    session, row, body.request_id, requested, actor=actor
                )
        change = noted or requested
        if not change.asks_the_same(requested):
            raise ProblemError(errors.RequestIdReused(), order=order)
        return change, read_at + (change.deadline_at - now).total_seconds()

    async def _outcome_of(
        self,
        order: OrderView,
        change: order_changes.OrderChange,
        request_id: str,
        seconds_left: float,
    ) -> ChangeResult:
        """Returns the result of a change that is not sent again.

        Raises `ProblemError` if it is unknown.
        """
        made = order.quantity <= (change.quantity or order.quantity) and change.price in (
            None,
            order.price,
        )
        if not made and not await self.database.fetch(order_changes.was_confirmed, request_id):
            _refuse_final(order)
            if seconds_left <= -CONFIRMATION_GRACE_S:
                raise ProblemError(errors.ChangeUnconfirmed(), order=order)
            return ChangeResult(order, answered=False)
        return ChangeResult(order)

    async def _check_price(
        self, row: Row, order: OrderView, quantity: int, price: Decimal
    ) -> Decimal | None:
        """Returns the price's band. Raises `ProblemError` where no new order would be taken now."""
        terms = order_checks.CheckedTerms.of(row, quantity, price)
        try:
            bounds = await self.checks.check(terms, is_new=False)
        except CheckFailed as error:
            raise ProblemError(error, order=order) from None
        async with self.database.session() as session:
            refusal = await order_checks.find_refusal(session, terms, self.settings.unknown_blocks)
        if refusal is not None:
            raise ProblemError(refusal, order=order)
        return bounds.price_band

    def _request(self, row: Row, order: OrderView, request_id: str) -> dict[str, Any]:
        """Returns the fields that cancels and changes share."""
        return {
            "request_id": request_id,
            "order_id": order.id,
            "user_id": order.user_id,
            "account_id": order.account_id,
            "symbol": order.symbol,
            "tag": row.tag,
            "broker_order_id": order.broker_order_id,
            "reply_to": self.answers.channels.name_of(order.user_id),
        }

    async def _send(
        self,
        request: CancelOrder | ReplaceOrder,
        order: OrderView,
        seconds: float,
        wait: float,
        change: order_changes.OrderChange | None = None,
    ) -> ChangeResult:
        first_epoch = change.first_epoch if change else None
        task = self.worker_requests.send(
            request, seconds, lambda answer: self._write_outcome(answer, change), first_epoch
        )
        await asyncio.wait({task}, timeout=wait)
        if not task.done() or task.cancelled():  # cancelled: this process is stopping
            return ChangeResult(order, answered=False)
        error = task.exception()
        if error is not None:
            raise ProblemError(error, order=order) if isinstance(error, BerthError) else error
        answer = task.result()
        if answer.outcome is not None:
            order = apply_answer(order, answer)
        if isinstance(request, CancelOrder) and order.state is OrderState.CANCELLED:
            return ChangeResult(order)  # by an earlier cancel, if this one failed
        if answer.failure is not None:
            raise ProblemError(answer.failure.error(), order=order)
        if change is not None:
            order = order.model_copy(
                update={
                    "quantity": change.quantity or order.quantity,
                    "price": change.price or order.price,
                }
            )
        return ChangeResult(order)

    async def _write_outcome(
        self, answer: Answer, change: order_changes.OrderChange | None
    ) -> None:
        """Records what the broker did, even if nobody waits any more."""
        if answer.outcome is not None:
            self.outcome_writer.write_later(NotedOutcome(answer.outcome))
            if change is not None and answer.failure is None:
                async with self.database.session() as session:
                    order_id = UUID(answer.outcome.order_id)
                    await order_changes.apply_change(session, order_id, change, answer.request_id)


def _refuse_final(order: OrderView) -> None:
    if order.final:
        raise ProblemError(OrderSettled(f"the order is {order.state.value} already"), order=order)


def _check_replace(order: OrderView, body: schemas.ReplaceRequest) -> None:
    """Raises `ProblemError` for an order that cannot be changed like this."""
    _refuse_final(order)
    if order.state not in _WORKING:
        early = order.state in IN_QUEUE or order.state is OrderState.SUBMITTING
        raise ProblemError(errors.NotAtBroker() if early else errors.OrderUnknown(), order=order)
    wrong = None
    if body.price is not None and order.price is None:
        wrong = "a market order has no price"
    elif body.price is not None and order.lot is not OrderLot.COMMON:
        wrong = (
            "of odd lots and at the closing price only the quantity changes: cancel it and "
            "place another"
        )
    elif body.quantity is not None and body.quantity > order.quantity:
        wrong = f"the quantity can only fall; it is {order.quantity}"
    elif body.quantity is not None and body.quantity < order.filled_quantity:
        wrong = f"{order.filled_quantity} are filled already: choose at least that, or cancel it"
    elif (body.quantity or order.quantity, body.price or order.price) == (
        order.quantity,
        order.price,
    ):
        wrong = "the order is like this already"
    if wrong is not None:
        raise ProblemError(errors.ReplaceInvalid(wrong), order=order)
