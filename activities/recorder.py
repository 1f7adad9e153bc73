"""Writes what workers tell into PostgreSQL: order events, and the times of their sessions.

Events are hints: a repeat changes nothing, a late one moves nothing back.
"""

from __future__ import annotations

from collections.abc import Sequence

import structlog
from sqlalchemy.ext.asyncio import AsyncSession

from infra.database import orders, worker_sessions
from infra.database.engine import Database
from worker_runtime.protocol.messages import Event, OrderEvent, WorkerEvent, WorkerEventKind

#: How an assignment's end reads that the worker itself reported, and nobody asked for here.
CLOSED_BY_WORKER = "worker closed: "

log = structlog.get_logger()


class Recorder:
    """The handler of the group `recorder`; one transaction a batch."""

    def __init__(self, database: Database) -> None:
        self._database = database

    async def handle(self, events: Sequence[Event]) -> None:
        """Raises `DatabaseUnavailable`: then the batch comes again."""
        async with self._database.session() as session:
            for event in events:
                if isinstance(event, OrderEvent):
                    try:
                        await orders.record_event(session, event)
                    except (orders.OrderNotFound, ValueError) as error:
                        log.error("order_event_dropped", event_id=event.event_id, reason=str(error))
                else:
                    await self._record_worker(session, event)

    async def _record_worker(self, session: AsyncSession, event: WorkerEvent) -> None:
        if event.kind not in (WorkerEventKind.CONNECTED, WorkerEventKind.CLOSED):
            return
        row = await worker_sessions.of_worker(session, event.worker_id)
        if row is None or row.epoch != event.epoch:
            return
        if event.kind == WorkerEventKind.CONNECTED:
            await worker_sessions.set_connected(session, claim_id=row.claim_id, at=event.at_ms / 1000)
        else:
            reason = f"{CLOSED_BY_WORKER}{event.detail}"[:200]
            await worker_sessions.end(session, claim_id=row.claim_id, reason=reason)
