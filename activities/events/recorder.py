"""Writes into PostgreSQL: order events, the times of sessions, and the timeline of a user's worker.

Events are hints: a repeat changes nothing, and a late one moves nothing back.
"""

from __future__ import annotations

import asyncio
import uuid
from collections.abc import Sequence
from dataclasses import asdict

import asyncpg
import structlog
from sqlalchemy.exc import DBAPIError
from sqlalchemy.ext.asyncio import AsyncSession
from temporalio import activity
from temporalio.exceptions import ApplicationError

from activities.events.stream import LogDeduplicator
from activities.orders import reconciliation
from infra.database.engine import Database
from infra.database.orders import recording
from infra.database.workers import sessions as worker_sessions
from infra.database.workers import timeline
from worker_runtime.protocol.messages import AccountReported, Event, OrderEvent, WorkerEvent, WorkerEventKind
from workflows.user_worker import messages as m

#: Begins the reason of an end that the worker itself reported.
CLOSED_BY_WORKER = "worker closed: "

#: PostgreSQL's refusals, with and without a session.
_REFUSALS = (DBAPIError, asyncpg.PostgresError)
#: Classes of SQLSTATE for faulty values: a data exception, a violated constraint.
_OF_THE_VALUES = ("22", "23")

#: Seconds before a batch without orders is written. Nobody waits for it, but a worker sends it right before
#: it answers its claim, and what is done at once takes the CPU from whoever waits for that: 6 of 63 ms.
ORDERLESS_PAUSE = 0.02

log = structlog.get_logger()


class Recorder:
    """The handler of the group `recorder`; one transaction a batch."""

    def __init__(self, database: Database, *, differences_block: bool = False) -> None:
        """`differences_block`: an account whose books differ from the broker's takes no orders."""
        self._database = database
        self._differences_block = differences_block
        self._unknown = LogDeduplicator()

    async def handle(self, events: Sequence[Event]) -> None:
        """Raises `DatabaseUnavailable`: then the batch comes again."""
        if not any(isinstance(event, OrderEvent) for event in events):
            await asyncio.sleep(ORDERLESS_PAUSE)
        try:
            await self._record(events)
        except _REFUSALS as refusal:
            if not _for_its_values(refusal):
                raise
            # PostgreSQL would refuse the batch for ever because of one event: handle them one by one.
            for event in events:
                try:
                    await self._record([event])
                except _REFUSALS as error:
                    if not _for_its_values(error):
                        raise
                    reason = type(getattr(error, "orig", error)).__name__
                    log.error("event_refused", kind=type(event).__name__, reason=reason)

    async def _record(self, events: Sequence[Event]) -> None:
        order_events = [event for event in events if isinstance(event, OrderEvent) and _has_order_id(event)]
        unchanged = all(event.quantity is None for event in order_events)
        if order_events and unchanged and len(order_events) == len(events):
            _log_unknown(await recording.record_events_alone(self._database, order_events))
            return
        async with self._database.session() as session:
            if order_events:
                _log_unknown(await recording.record_events(session, order_events))
            for event in events:
                if isinstance(event, WorkerEvent):
                    await self._record_worker(session, event)
                elif isinstance(event, AccountReported):
                    await reconciliation.reconcile_account(session, event, blocks=self._differences_block)

    async def _record_worker(self, session: AsyncSession, event: WorkerEvent) -> None:
        if event.kind not in (WorkerEventKind.CONNECTED, WorkerEventKind.CLOSED):
            return
        row = await worker_sessions.open_session_of_worker(session, event.worker_id)
        if row is None or row.epoch != event.epoch:
            if self._unknown.new((event.worker_id, event.epoch)):
                log.info("event_of_no_open_assignment", worker_id=event.worker_id[:64], kind=str(event.kind))
            return
        if event.kind == WorkerEventKind.CONNECTED:
            await worker_sessions.set_connected(session, claim_id=row.claim_id, at=event.at_ms / 1000)
        else:
            reason = f"{CLOSED_BY_WORKER}{event.detail}"[:200]
            await worker_sessions.end_session(session, claim_id=row.claim_id, reason=reason)


def _for_its_values(error: Exception) -> bool:
    """Whether the values are refused every time. Other faults, such as a missing right, can be mended."""
    return _sqlstate(error).startswith(_OF_THE_VALUES)


def _sqlstate(error: Exception) -> str:
    return str(getattr(getattr(error, "orig", error), "sqlstate", None))


def _log_unknown(recorded: recording.RecordedEvents) -> None:
    for order_id in recorded.unknown:
        log.error("events_of_unknown_order", order_id=order_id)


def _has_order_id(event: OrderEvent) -> bool:
    try:
        uuid.UUID(event.order_id)
    except ValueError:
        log.error("order_event_dropped", event_id=event.event_id, reason="the order id is not a UUID")
        return False
    return True


#: SQLSTATE class of values that a column cannot hold.
_DATA_EXCEPTION = "22"


class TimelineActivity:
    """Activity `record_timeline`."""

    def __init__(self, database: Database) -> None:
        self._database = database

    @activity.defn
    async def record_timeline(self, request: m.RecordTimeline) -> None:
        """Raises `DatabaseUnavailable`; an error that is not retried for rows that PostgreSQL never takes."""
        rows = [timeline.NewTransition(**asdict(transition)) for transition in request.transitions]
        try:
            async with self._database.session() as session:
                await timeline.record_transitions(
                    session, user_id=request.user_id, chain=request.chain, transitions=rows
                )
        except DBAPIError as error:
            if not _sqlstate(error).startswith(_DATA_EXCEPTION):
                raise
            kind = type(error.orig).__name__
            raise ApplicationError("PostgreSQL refuses the rows", type=kind, non_retryable=True) from error
