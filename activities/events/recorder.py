"""Writes into PostgreSQL: order events, the times of sessions, and the timeline of a user's worker.

Events are hints: a repeat changes nothing, and a late one moves nothing back.
"""

import asyncio
import time
import uuid
from collections.abc import Awaitable, Callable, Collection, Sequence
from dataclasses import KW_ONLY, asdict, dataclass
from datetime import UTC, datetime

import structlog
from sqlalchemy.exc import DBAPIError
from sqlalchemy.ext.asyncio import AsyncSession
from temporalio import activity
from temporalio.exceptions import ApplicationError

from activities.orders import reconciliation
from infra.database.accounts import record_logins
from infra.database.dead_letters import DeadLetter, DeadLetters, fails_for_good
from infra.database.engine import Database
from infra.database.orders import attention, recording
from infra.database.trading import reconciliations
from infra.database.workers import sessions as worker_sessions
from infra.database.workers import timeline
from infra.process_metrics import REFUSED, count_claim_failure
from infra.tracing import Traces
from worker_runtime.protocol.authentication import RefusalCounter
from worker_runtime.protocol.errors import BrokerVersionRefused
from worker_runtime.protocol.messages import (
    AccountReported,
    Event,
    OrderEvent,
    WorkerEvent,
    WorkerEventKind,
    encode,
)
from worker_runtime.protocol.requests import BooksCompared, ControlMessage
from workflows.user_worker.messages import RecordTimeline

#: Begins the reason for which a person has to look at an order.
LATE_NEWS = "a worker whose assignment ended long ago has reported on it"

#: Seconds before a batch without orders is written. Nobody waits for it. A worker sends it right
#: before it answers its claim, and writing it at once would delay that answer by 6 of 63 ms.
ORDERLESS_PAUSE_S = 0.02

log = structlog.get_logger()


@dataclass(eq=False, repr=False)
class Recorder:
    """The handler of the group `recorder`; one transaction a batch."""

    database: Database
    _: KW_ONLY
    traces: Traces | None = None
    #: If True, an account whose books differ from the broker's takes no orders, and the result of
    #: each comparison is sent to the account's worker by `send_control`.
    differences_block: bool = False
    send_control: Callable[[ControlMessage], Awaitable[None]] | None = None

    def __post_init__(self) -> None:
        self._dead_letters = DeadLetters(self.database)
        self._unknown, self._failed = RefusalCounter(), RefusalCounter()
        self._refused = RefusalCounter(REFUSED.labels("order event").inc)

    async def handle(self, events: Sequence[Event], received_ms: Sequence[int] = ()) -> None:
        """Writes a batch of events. `received_ms` says when each was received.

        A batch of order events that change no quantity, the usual one, is one statement. Any other
        is one transaction. Raises `DatabaseUnavailable`; the batch comes again then.
        """
        received = received_ms or [time.time_ns() // 1_000_000] * len(events)
        chosen = [
            (event, at)
            for event, at in zip(events, received, strict=True)
            if isinstance(event, OrderEvent) and self._names_its_order(event)
        ]
        order_events, order_times = [event for event, _ in chosen], [at for _, at in chosen]
        if not order_events:
            await asyncio.sleep(ORDERLESS_PAUSE_S)
        has_only_orders = len(order_events) == len(events)
        changes_quantity = any(event.quantity is not None for event in order_events)
        if order_events and has_only_orders and not changes_quantity:
            recorded = await recording.record_events_alone(self.database, order_events, order_times)
            self._log_unknown(order_events, recorded)
            await self._trace(order_events, recorded.fresh)
            if not recorded.late:
                return
            # The transaction below has a person look at the late ones; a repeat changes nothing.
        late: list[OrderEvent] = []
        fresh: frozenset[str] = frozenset()
        compared: list[BooksCompared] = []
        async with self.database.session() as session:
            if order_events:
                recorded = await recording.record_events(session, order_events, order_times)
                self._log_unknown(order_events, recorded)
                fresh = recorded.fresh
                late = [order_events[place] for place in sorted(recorded.late)]
                await _show_late(session, late)
            # By user, so that two recorders lock accounts in the same order.
            for event, at in sorted(
                zip(events, received, strict=True), key=lambda pair: pair[0].user_id
            ):
                if isinstance(event, WorkerEvent):
                    await self._record_worker(session, event)
                elif isinstance(event, AccountReported) and not await _is_late(session, event, at):
                    await reconciliation.reconcile_account(
                        session, event, blocks=self.differences_block
                    )
                    if self.differences_block:  # also for a repeat, whose first answer may be lost
                        compared.append(await _comparison_of(session, event))
        if self.send_control is not None:
            for message in compared:
                await self.send_control(message)
        await self._trace(order_events, fresh)
        await self._dead_letters.put([_late_letter(event) for event in late])

    async def _record_worker(self, session: AsyncSession, event: WorkerEvent) -> None:
        failed = event.kind in (WorkerEventKind.FAILED, WorkerEventKind.SESSION_REPLACED)
        ids = {"user_id": event.user_id, "worker_id": event.worker_id}
        if failed and self._failed.add(f"{event.kind}:{event.worker_id}"):
            log.error("worker_failed", kind=str(event.kind), said=event.detail[:200], **ids)
        codes = [login.code for login in event.logins if login.code]
        if event.kind == WorkerEventKind.DEGRADED:
            for code in codes:
                count_claim_failure(code)
        # One line a minute for all workers, which the same installation runs.
        code = BrokerVersionRefused.code
        if code in codes and self._failed.add(code):
            log.error("broker_version_refused", code=code, **ids)
        await record_logins(session, event.user_id, event.epoch, event.at_ms, event.logins)
        if event.kind not in (WorkerEventKind.CONNECTED, WorkerEventKind.CLOSED):
            return
        row = await worker_sessions.latest_session(
            session, worker_id=event.worker_id, ended_at=None
        )
        if row is None or (row.user_id, row.epoch) != (event.user_id, event.epoch):
            if self._unknown.add(event.worker_id):
                log.info(
                    "event_of_no_open_assignment",
                    worker_id=event.worker_id[:64],
                    kind=str(event.kind),
                )
            return
        if event.kind == WorkerEventKind.CONNECTED:
            await worker_sessions.set_connected(
                session, claim_id=row.claim_id, at=event.at_ms / 1000
            )
        else:
            reason = f"{worker_sessions.CLOSED_BY_WORKER}{event.detail}"[:200]
            await worker_sessions.end_session(session, claim_id=row.claim_id, reason=reason)

    async def _trace(self, events: Sequence[OrderEvent], fresh: Collection[str]) -> None:
        """Adds the events with the ids `fresh` to the traces of their orders."""
        if self.traces is not None and fresh:
            contexts = await recording.traces_of(
                self.database, {event.order_id for event in events}
            )
            for event in events:
                if event.event_id in fresh:
                    self.traces.add_event(event, contexts.get(event.order_id, ""))

    def _log_unknown(
        self, events: Sequence[OrderEvent], recorded: recording.RecordedEvents
    ) -> None:
        for event in events:
            if event.order_id in recorded.unknown and self._refused.add(event.user_id):
                log.error("events_of_unknown_order", order_id=event.order_id, user_id=event.user_id)

    def _names_its_order(self, event: OrderEvent) -> bool:
        """Returns True if the event's id begins with the order's id.

        Otherwise a worker could use up the id of another order's event, which would then count as
        a repeat.
        """
        if event.event_id.startswith(f"{event.order_id}:"):
            return True
        if self._refused.add(event.user_id):
            reason = "its id is not of its order"
            log.error(
                "order_event_dropped", event_id=event.event_id, user_id=event.user_id, reason=reason
            )
        return False


async def _comparison_of(session: AsyncSession, event: AccountReported) -> BooksCompared:
    blocking = await reconciliations.blocking_difference(session, event.user_id, event.account_id)
    return BooksCompared(
        user_id=event.user_id,
        epoch=event.epoch,
        account_id=event.account_id,
        at_ms=event.at_ms,
        blocks=blocking is not None,
    )


async def _show_late(session: AsyncSession, events: Sequence[OrderEvent]) -> None:
    """Has a person look at orders about which a worker reports whose assignment ended long ago. The
    reason names only the epoch, so that repeats change nothing."""
    for event in events:
        reason = f"{LATE_NEWS}: assignment {event.epoch}, which ended over a day before"
        await attention.demand_attention(session, uuid.UUID(event.order_id), reason)


def _late_letter(event: OrderEvent) -> DeadLetter:
    """Returns a dead letter with the worker's message. A final order is not on the list for
    operators, so the letter is the only trace of the message."""
    return DeadLetter(
        kind="late",
        source=f"{event.user_id}:{event.epoch}",
        user_id=event.user_id,
        reason=LATE_NEWS,
        message=encode(event),
    )


async def _is_late(session: AsyncSession, event: AccountReported, received_ms: int) -> bool:
    received = datetime.fromtimestamp(received_ms / 1000, UTC)
    late = await worker_sessions.ended_before(
        session, event.user_id, event.epoch, received - recording.MAX_EVENT_DELAY
    )
    if late:
        log.warning("late_account_report", user_id=event.user_id, epoch=event.epoch)
    return late


class TimelineActivity:
    def __init__(self, database: Database) -> None:
        self._database = database

    @activity.defn
    async def record_timeline(self, request: RecordTimeline) -> None:
        """Writes rows of the timeline. Raises `DatabaseUnavailable`, and an error that is not
        retried for rows that PostgreSQL refuses for good."""
        rows = [asdict(transition) for transition in request.transitions]
        try:
            await self._database.write(
                timeline.record_transitions,
                user_id=request.user_id,
                chain=request.chain,
                transitions=rows,
            )
        except DBAPIError as error:
            if not fails_for_good(error):
                raise
            kind = type(error.orig).__name__
            raise ApplicationError(
                "PostgreSQL refuses the rows", type=kind, non_retryable=True
            ) from error
