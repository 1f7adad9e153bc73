"""Turns events of workers into signals of their users' workflows.

Only events on which a workflow acts: Temporal's load follows these, not the number of workers.
"""

from __future__ import annotations

from collections.abc import Sequence

import structlog
from temporalio.client import Client
from temporalio.service import RPCError

from activities.events.stream import LogDeduplicator
from infra.temporal.client import TemporalUnavailable, signal_workflow
from worker_runtime.protocol.messages import Event, WorkerEvent, WorkerEventKind
from workflows import names
from workflows.user_worker import messages as m

#: A worker's first connect: the claim's reply reports it already.
FIRST_SEQUENCE = 2
#: Events on which a workflow acts, besides a connect.
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

log = structlog.get_logger()


class Relay:
    """The handler of the group `relay`."""

    def __init__(self, temporal: Client) -> None:
        self._temporal = temporal
        self._logged = LogDeduplicator()

    async def handle(self, events: Sequence[Event]) -> None:
        """Raises `TemporalUnavailable`: then the batch comes again. Workflows drop repeats by sequence."""
        for event in events:
            if isinstance(event, WorkerEvent) and _matters(event):
                await self._signal(event)

    async def _signal(self, event: WorkerEvent) -> None:
        message = m.WorkerEventSignal(
            worker_id=event.worker_id,
            epoch=event.epoch,
            sequence=event.sequence,
            kind=str(event.kind),
            at=event.at_ms / 1000,
            detail=event.detail[:200],
        )
        try:
            workflow_id = names.user_worker_id(event.user_id)
            found = await signal_workflow(self._temporal, workflow_id, "worker_event", message)
        except RPCError as error:
            raise TemporalUnavailable(error.message) from error
        if not found and self._logged.new((event.user_id, event.worker_id)):
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
