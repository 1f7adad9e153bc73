"""Turns what workers tell about themselves into signals of their users' workflows.

Only changes that a workflow acts on: Temporal's load follows them, not the number of workers.
"""

from __future__ import annotations

from collections.abc import Sequence

import structlog
from temporalio.client import Client
from temporalio.service import RPCError, RPCStatusCode

from worker_runtime.protocol.errors import BerthError
from worker_runtime.protocol.messages import Event, WorkerEvent, WorkerEventKind
from workflows import messages as m
from workflows import names

#: A session's first event (its sequences are even); the first connect is told by the claim's reply already.
FIRST_SEQUENCE = 2

log = structlog.get_logger()


class TemporalUnreachable(BerthError):
    """Temporal does not answer."""

    code = "TEMPORAL_UNREACHABLE"
    retryable = True


class Relay:
    """The handler of the group `relay`."""

    def __init__(self, temporal: Client) -> None:
        self._temporal = temporal

    async def handle(self, events: Sequence[Event]) -> None:
        """Raises `TemporalUnreachable`: then the batch comes again; workflows drop repeats by sequence."""
        for event in events:
            if isinstance(event, WorkerEvent) and _matters(event):
                await self._signal(event)

    async def _signal(self, event: WorkerEvent) -> None:
        workflow = self._temporal.get_workflow_handle(names.user_worker_id(event.user_id))
        message = m.WorkerEventSignal(
            worker_id=event.worker_id,
            epoch=event.epoch,
            sequence=event.sequence,
            kind=str(event.kind),
            at=event.at_ms / 1000,
            detail=event.detail[:200],
        )
        try:
            await workflow.signal("worker_event", message)
        except RPCError as error:
            if error.status != RPCStatusCode.NOT_FOUND:
                raise TemporalUnreachable(error.message) from error
            log.info("event_of_no_workflow", user_id=event.user_id, kind=str(event.kind))


def _matters(event: WorkerEvent) -> bool:
    if event.kind == WorkerEventKind.CONNECTED:
        return event.sequence > FIRST_SEQUENCE
    return event.kind in (WorkerEventKind.RECONNECTING, WorkerEventKind.OWNER_MISSING)
