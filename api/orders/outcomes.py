"""Shows orders to callers, and writes their outcomes to PostgreSQL for the API.

Callers see the row in PostgreSQL, updated by an answer that is newer. The recorder writes a
worker's outcome from the event stream, usually before `OutcomeWriter`. The response key expires
after 60 s, so `OutcomeWriter` writes the outcome even if the recorder is down. Both only move an
order forward, so their order does not matter. A withdrawn order has no events of a worker: only
this writer knows of it.
"""

import asyncio
import re
from collections.abc import Mapping
from dataclasses import dataclass, fields
from typing import Any
from uuid import UUID

import structlog
from sqlalchemy.ext.asyncio import AsyncSession

from api.orders.schemas import OrderDetailView, OrderStepView, OrderView
from api.workers.answers import AnswerListener
from infra import tasks
from infra.database.dead_letters import DeadLetter, DeadLetters, TryCounter, reason_of
from infra.database.engine import Database, DatabaseUnavailable
from infra.database.models import Order
from infra.database.orders import attention, recording
from infra.database.orders.acceptance import StoredOrder
from infra.database.orders.merging import OrderStanding, outcome_of
from infra.database.orders.states import IN_QUEUE
from infra.database.workers import sessions as worker_sessions
from infra.valkey.request_queue import ClientOrderIdTaken
from worker_runtime.protocol.errors import BerthError, OrderRejected, from_code
from worker_runtime.protocol.messages import (
    FINAL_ORDER_STATES,
    Answer,
    OrderEvent,
    OrderOutcome,
    OrderState,
    encode,
)

#: States in which nobody knows the broker's answer yet: 202.
UNANSWERED = IN_QUEUE | {OrderState.SUBMITTING, OrderState.UNKNOWN, OrderState.NEEDS_ATTENTION}
#: Our own reasons begin with their code, then comes the sentence.
_CODED = re.compile(r"([A-Z][A-Z0-9_]*): (.*)", re.DOTALL)


def _reason_of(code: str | None, reason: str | None) -> tuple[str | None, str | None]:
    coded = _CODED.fullmatch(reason or "")
    if coded is None:
        return code, reason
    return code or coded[1], coded[2]


#: Fields that are shown as they are stored.
_AS_STORED = OrderView.model_fields.keys() - {
    "id",
    "final",
    "code",
    "origin",
    "accepted_at",
    *(field.name for field in fields(OrderStanding)),
}


def view_of(row: StoredOrder) -> OrderView:
    """Returns the order as PostgreSQL has it."""
    standing = OrderStanding.of(row)
    known = {"id": str(row.id), "origin": row.origin or None, "accepted_at": row.created_at}
    stored = {name: getattr(row, name) for name in _AS_STORED}
    return OrderView.model_validate(stored | known | _shown(standing))


def _shown(standing: OrderStanding) -> dict[str, Any]:
    """Returns the fields of an `OrderView` that an outcome may change."""
    code, reason = _reason_of(standing.reason_code, standing.reason)
    final = standing.state in FINAL_ORDER_STATES
    attention = None if final else standing.attention
    return {
        # While an operator has to look, that is what callers see, whatever the broker says.
        "state": standing.state if attention is None else OrderState.NEEDS_ATTENTION,
        "final": final,
        "broker_order_id": standing.broker_order_id,
        "filled_quantity": standing.filled_quantity,
        "average_price": standing.average_price,
        "code": code,
        "reason": reason,
        "attention": attention,
    }


def apply_answer(order: OrderView, answer: Answer) -> OrderView:
    """Returns the order after this answer; unchanged if the order is already as far."""
    outcome, answer_code = outcome_of(answer, order.id)
    known = OrderStanding(
        state=order.state,
        reason_code=order.code,
        reason=order.reason,
        broker_order_id=order.broker_order_id,
        filled_quantity=order.filled_quantity,
        average_price=order.average_price,
        attention=order.attention,
    )
    standing = known.after(outcome, answer_code)
    if standing is known:
        return order
    return order.model_copy(update=_shown(standing))


def failure_of(order: OrderView) -> BerthError | None:
    """Returns why the order never reached the broker; None if it did, may have, or still can."""
    if not order.final or order.code is None or order.code == OrderRejected.code:
        return None
    return from_code(order.code, order.reason or "")


@dataclass(frozen=True, eq=False)
class OrderReader:
    database: Database
    answers: AnswerListener

    async def with_latest_answer(self, row: StoredOrder) -> OrderView:
        """Returns the order, updated by the answer in its response
        key if PostgreSQL does not have that yet.

        Raises `RedisError` when Valkey is down:
        an older state than the one answered is never shown.
        """
        order = view_of(row)
        if order.final:
            return order
        answer = await self.answers.read(order.user_id, order.id, order.id, row.first_epoch)
        return apply_answer(order, answer) if answer else order

    async def get(self, order_id: UUID) -> OrderView:
        """Raises `OrderNotFound`."""
        async with self.database.session() as session:
            row = await recording.get_order(session, order_id)
        return await self.with_latest_answer(row)

    async def with_timeline(self, order: OrderView) -> OrderDetailView:
        """Returns the order with its recorded steps.

        The recorder may be a moment behind the state.
        """
        async with self.database.session() as session:
            events = await recording.events_of_order(session, UUID(order.id))
            serving = await worker_sessions.session_at(session, order.user_id, order.accepted_at)
        steps = [(event.at, event.state, event.data.get("reason")) for event in events]
        if serving is not None:
            last = max((at for at, _, _ in steps), default=order.accepted_at)
            for at, name in ((serving.claimed_at, "claimed"), (serving.connected_at, "connected")):
                # The timeline leaves out a worker that was
                # there before the order, or came after its end.
                if at is not None and order.accepted_at <= at and (at <= last or not order.final):
                    steps.append((at, name, serving.worker_id))
        steps.sort(key=lambda step: step[0])
        timeline = [
            OrderStepView(
                step=name,
                at=at,
                elapsed_ms=round((at - order.accepted_at).total_seconds() * 1000, 1),
                detail=detail,
            )
            for at, name, detail in steps
        ]
        return OrderDetailView(**order.model_dump(), timeline=timeline)


#: An answer is written after one to two of these intervals. The recorder needs milliseconds, so
#: usually there is nothing to write by then.
WRITE_INTERVAL_S = 2.0
#: Outcomes kept in memory while PostgreSQL is away,
#: about 300 bytes each. Further ones only the recorder writes.
MAX_WAITING_OUTCOMES = 50_000


@dataclass(frozen=True, slots=True)
class NotedOutcome:
    outcome: OrderOutcome
    code: str | None = None
    #: Recorded with the outcome if the order is then in the event's state.
    event: OrderEvent | None = None


class OutcomeWriter:
    """Notes outcomes and writes them in batches."""

    def __init__(self, database: Database) -> None:
        self._database = database
        self._dead_letters = DeadLetters(database)
        self._tries = TryCounter()
        #: Noted since the last round: the recorder still has its time.
        self._noted: dict[str, NotedOutcome] = {}
        self._waiting: dict[str, NotedOutcome] = {}
        self._task: asyncio.Task[None] | None = None
        self._log = structlog.get_logger()

    def start(self) -> None:
        self._task = asyncio.create_task(self._run(), name="outcome writer")

    async def close(self) -> None:
        """Writes what is left, if PostgreSQL answers."""
        await tasks.cancel_tasks(self._task)
        self._move_noted_to_waiting()
        try:
            await self._write()
        except Exception:  # the boundary of the process: what is left, the recorder writes
            self._log.exception("outcomes_left_unwritten", waiting=len(self._waiting))

    def write_later(self, noted: NotedOutcome) -> None:
        """Has the outcome written in the round after the next one."""
        if len(self._waiting) + len(self._noted) < MAX_WAITING_OUTCOMES:
            self._noted[noted.outcome.order_id] = noted
        else:
            self._log.error("outcome_writer_full", order=noted.outcome.order_id)

    async def write_now(self, noted: NotedOutcome) -> Order:
        """Writes an outcome that no worker will ever report, and returns the order as it is then.

        Raises `DatabaseUnavailable`; the outcome is then written later.
        """
        try:
            async with self._database.session() as session:
                return await _write_outcome(session, noted)
        except DatabaseUnavailable as error:
            self._log.warning(
                "outcome_postponed", order=noted.outcome.order_id, reason=error.detail
            )
            self.write_later(noted)
            raise

    async def take_over(self, order_id: UUID, before: ClientOrderIdTaken) -> OrderView:
        """Records the order in place of an earlier one that PostgreSQL has lost, and returns it.

        Raises `DatabaseUnavailable`; the sweeper does it then.
        """
        async with self._database.session() as session:
            await attention.take_over(session, order_id, before.tag, before.reason)
            return view_of(await recording.get_order(session, order_id))

    async def _run(self) -> None:
        while True:
            await asyncio.sleep(WRITE_INTERVAL_S)
            try:
                await self._write()
            except DatabaseUnavailable as error:
                self._log.warning(
                    "outcome_writer_waits", reason=error.detail, waiting=len(self._waiting)
                )
            except Exception:  # the boundary of a loop: one bad outcome must not stop it
                self._log.exception("outcome_writer_failed", waiting=len(self._waiting))
            self._move_noted_to_waiting()

    def _move_noted_to_waiting(self) -> None:
        self._waiting |= self._noted
        self._noted = {}

    async def _write(self) -> None:
        while self._waiting:
            batch = dict(list(self._waiting.items())[:200])
            try:
                await self._write_batch(batch)
            except Exception as error:  # the boundary of a batch
                if not self._tries.gives_up(error):
                    raise
                for order_id, noted in batch.items():
                    await self._write_alone(order_id, noted)
            self._tries.handled()
            for order_id, noted in batch.items():
                if self._waiting.get(order_id) is noted:
                    del self._waiting[order_id]

    async def _write_batch(self, batch: Mapping[str, NotedOutcome]) -> None:
        async with self._database.session() as session:
            outcomes = {
                UUID(order_id): (noted.outcome, noted.code) for order_id, noted in batch.items()
            }
            # One query a round replaces an update an order: usually the recorder has written all.
            for order_id in await recording.orders_behind(session, outcomes):
                await _write_outcome(session, batch[str(order_id)])

    async def _write_alone(self, order_id: str, noted: NotedOutcome) -> None:
        """Writes one outcome; one that fails for good goes to the dead letters."""
        try:
            await self._write_batch({order_id: noted})
        except Exception as error:  # the boundary of one outcome
            if not self._tries.gives_up(error):
                raise
            letter = DeadLetter(
                kind="outcome",
                subject=order_id,
                source=order_id,
                reason=reason_of(error),
                message=encode(noted.outcome),
            )
            await self._dead_letters.put([letter])


async def _write_outcome(session: AsyncSession, noted: NotedOutcome) -> Order:
    await recording.apply_outcome(session, noted.outcome, noted.code)
    row = await recording.get_order(session, UUID(noted.outcome.order_id))
    # PostgreSQL may know that a worker took or refused the order before it was withdrawn.
    if noted.event is not None and row.state == noted.event.state:
        await recording.record_event(session, noted.event)
    return row
