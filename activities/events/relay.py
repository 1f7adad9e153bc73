"""Turns events of workers into signals of their users' workflows.

Only events on which a workflow acts: Temporal's load follows these, not the number of workers.
"""

import time
from collections.abc import Sequence
from dataclasses import dataclass

import structlog
from temporalio.client import Client
from temporalio.service import RPCError

from infra.temporal.client import TemporalUnavailable, signal_workflow
from worker_runtime.protocol.authentication import RefusalCounter
from worker_runtime.protocol.messages import Event, WorkerEvent, WorkerEventKind
from workflows import names
from workflows.user_worker.messages import WorkerEventSignal

#: The sequence of a worker's first connect, which the claim's reply has reported already.
FIRST_SEQUENCE = 2
#: Events on which a workflow acts, besides a connect.
RELAYED_KINDS = frozenset(
    {
        WorkerEventKind.RECONNECTING,
        WorkerEventKind.DEGRADED,
        WorkerEventKind.SESSION_REPLACED,
        WorkerEventKind.FAILED,
        WorkerEventKind.OWNER_MISSING,
        WorkerEventKind.FENCED,
    }
)
#: Signals of one assignment in `SIGNAL_WINDOW_S` seconds. A worker whose broker comes and goes
#: would otherwise fill its workflow's history: each signal is three events or more. Of any further
#: events, the newest stays in the stream until the window is over, so the workflow gets the present
#: state even if a process is killed.
MAX_SIGNALS_PER_WINDOW = 12
SIGNAL_WINDOW_S = 60.0

log = structlog.get_logger()


@dataclass(slots=True)
class _SignalWindow:
    until: float
    count: int = 0
    #: When the newest event came.
    newest_ms: int = 0


class Relay:
    """The handler of the group `relay`."""

    def __init__(self, temporal: Client, *, window: float = SIGNAL_WINDOW_S) -> None:
        self._temporal = temporal
        self._window = window
        self._unheard = RefusalCounter()
        #: By user and epoch.
        self._windows: dict[tuple[str, int], _SignalWindow] = {}
        self._forget_at = 0.0

    async def handle(
        self, events: Sequence[Event], received_ms: Sequence[int] = ()
    ) -> list[WorkerEvent]:
        """Signals workflows of the events that concern them, and returns the events that are held
        back. Raises `TemporalUnavailable`: then the batch comes again. Workflows drop repeats by
        sequence."""
        received = received_ms or [time.time_ns() // 1_000_000] * len(events)
        held: dict[tuple[str, int], WorkerEvent] = {}
        for event, at_ms in zip(events, received, strict=True):
            if not (isinstance(event, WorkerEvent) and _matters(event)):
                continue
            key = event.user_id, event.epoch
            window = self._window_of(key)
            if at_ms < window.newest_ms:  # it was held back, and a newer one came
                continue
            window.newest_ms = at_ms
            if window.count < MAX_SIGNALS_PER_WINDOW:
                await self._signal(event)
                held.pop(key, None)
            else:
                if window.count == MAX_SIGNALS_PER_WINDOW:
                    log.warning("worker_flaps", user_id=event.user_id, epoch=event.epoch)
                held[key] = event
            window.count += (
                1  # not before: while Temporal is away, the same event comes again and again
            )
        return list(held.values())

    def _window_of(self, key: tuple[str, int]) -> _SignalWindow:
        """Returns the present window of an assignment."""
        now = time.monotonic()
        if now >= self._forget_at:
            self._forget_at = now + self._window
            self._windows = {
                at: window
                for at, window in self._windows.items()
                if window.until + self._window > now
            }
        window = self._windows.get(key)
        if window is None or window.until <= now:
            newest_ms = window.newest_ms if window else 0
            window = self._windows[key] = _SignalWindow(now + self._window, newest_ms=newest_ms)
        return window

    async def _signal(self, event: WorkerEvent) -> None:
        message = WorkerEventSignal(
            worker_id=event.worker_id,
            epoch=event.epoch,
            sequence=event.sequence,
            kind=str(event.kind),
            at=event.at_ms / 1000,
            detail=event.detail[:200],
        )
        try:
            workflow_id = names.user_worker_id(event.user_id)
            signalled = await signal_workflow(self._temporal, workflow_id, "worker_event", message)
        except RPCError as error:
            raise TemporalUnavailable(error.message) from error
        if not signalled and self._unheard.add(f"{event.user_id} {event.worker_id}"):
            ids = {"user_id": event.user_id[:64], "worker_id": event.worker_id[:64]}
            log.warning("event_of_no_workflow", kind=str(event.kind), **ids)


def _matters(event: WorkerEvent) -> bool:
    return event.kind in RELAYED_KINDS or (
        event.kind == WorkerEventKind.CONNECTED and event.sequence > FIRST_SEQUENCE
    )
