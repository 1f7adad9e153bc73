"""Turns what workers tell about themselves into signals of their users' workflows.

Only changes that a workflow acts on: Temporal's load follows them, not the number of workers.
"""

from __future__ import annotations

from collections.abc import Sequence
from datetime import timedelta

import structlog
from temporalio.client import Client
from temporalio.service import RPCError, RPCStatusCode

from activities.events.stream import LogDeduplicator
from worker_runtime.protocol.errors import BerthError
from worker_runtime.protocol.messages import Event, WorkerEvent, WorkerEventKind
from workflows import names
from workflows.user_worker import messages as m

#: A worker's first event; the first connect is told by the claim's reply already.
FIRST_SEQUENCE = 2
#: What a workflow acts on beside a connect.
RELAYED = frozenset(
    {
        WorkerEventKind.RECONNECTING,
        WorkerEventKind.DEGRADED,
        WorkerEventKind.SESSION_REPLACED,
        WorkerEventKind.FAILED,
        WorkerEventKind.OWNER_MISSING,
        WorkerEventKind.FENCED,
    }
)
#: Temporal's answers that no repetition changes: no such workflow, or one that cannot even be.
REFUSED = frozenset({RPCStatusCode.NOT_FOUND, RPCStatusCode.INVALID_ARGUMENT})
#: What one signal may take; a Temporal that does not answer is found out by it.
SIGNAL_TIMEOUT = timedelta(seconds=5)

log = structlog.get_logger()


class TemporalUnreachable(BerthError):
    """Temporal does not answer."""

    code = "TEMPORAL_UNREACHABLE"
    retryable = True


class Relay:
    """The handler of the group `relay`."""

    def __init__(self, temporal: Client) -> None:
        self._temporal = temporal
        self._unheard = LogDeduplicator()

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
            await workflow.signal("worker_event", message, rpc_timeout=SIGNAL_TIMEOUT)
        except RPCError as error:
            if error.status not in REFUSED:
                raise TemporalUnreachable(error.message) from error
            if self._unheard.new((event.user_id, event.worker_id)):
                log.warning(
                    "event_of_no_workflow",
                    user_id=event.user_id[:64],
                    worker_id=event.worker_id[:64],
                    kind=str(event.kind),
                )


def _matters(event: WorkerEvent) -> bool:
    if event.kind == WorkerEventKind.CONNECTED:
        return event.sequence > FIRST_SEQUENCE
    return event.kind in RELAYED
