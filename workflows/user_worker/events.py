"""Decides what an event of a worker's stream changes in the state of its user's worker.

Events come at least once, late, and from earlier workers. An event counts only if it is of the
present worker and epoch, and newer than the last one that counted.
"""

from dataclasses import dataclass, replace

from worker_runtime.protocol.messages import WorkerEventKind
from workflows.user_worker.messages import WorkerEventSignal, WorkerState
from workflows.user_worker.state import UserWorkerState

#: Characters of a worker's own words that are kept.
MAX_DETAIL_LENGTH = 200


@dataclass(frozen=True, kw_only=True)
class EventEffect:
    """The state after an event, and what the workflow has to do then."""

    state: UserWorkerState
    #: Check the worker: its mark, its owner key, its task.
    check: bool = False
    #: The worker cannot get its broker back, for this reason: end it.
    given_up: str = ""
    #: The worker that is being connected lost its credentials: end it and claim another.
    lost: bool = False


def apply_event(state: UserWorkerState, event: WorkerEventSignal, now: float) -> EventEffect:
    """Returns the effect of `event` at `now` (Unix seconds)."""
    worker = state.worker
    if worker is None or (worker.worker_id, worker.epoch) != (event.worker_id, event.epoch):
        return EventEffect(state=state)
    if event.sequence <= state.sequence:
        return EventEffect(state=state)
    counted = replace(state, sequence=event.sequence)
    # A worker's clock may be wrong: it is never believed to be ahead.
    at = event.at if 0.0 < event.at <= now else now
    detail = event.detail[:MAX_DETAIL_LENGTH]
    if state.serving:
        return _apply_in_service(counted, event.kind, detail, at, now)
    if state.state in (WorkerState.CLAIMED, WorkerState.CONNECTING):
        # The first session of this claim is gone,
        # and with it the credentials that were sealed to it.
        return EventEffect(
            state=counted,
            lost=event.kind in (WorkerEventKind.SESSION_REPLACED, WorkerEventKind.FAILED),
        )
    return EventEffect(state=counted)


def _apply_in_service(
    state: UserWorkerState, kind: str, detail: str, at: float, now: float
) -> EventEffect:
    match kind:
        case WorkerEventKind.RECONNECTING | WorkerEventKind.DEGRADED:
            why = detail or (
                "broker session lost"
                if kind == WorkerEventKind.RECONNECTING
                else "broker unreachable"
            )
            changed = (
                state.reconnecting(why, now)
                if state.state == WorkerState.ACTIVE
                else replace(state, reason=why)
            )
            return EventEffect(state=changed.degraded(why, at))
        case WorkerEventKind.CONNECTED if state.state == WorkerState.RECONNECTING:
            return EventEffect(state=state.reconnected(now))
        case WorkerEventKind.SESSION_REPLACED:
            why = f"session replaced: {detail}" if detail else "session replaced"
            return EventEffect(state=state.session_replaced(why, now))
        case WorkerEventKind.FAILED:
            why = detail or "BROKER_ERROR: the worker could not get its broker back"
            return EventEffect(state=state.degraded(why, at), given_up=why)
        case WorkerEventKind.OWNER_MISSING | WorkerEventKind.FENCED:
            return EventEffect(state=state, check=True)  # the check puts a missing owner key back
        case _:
            # CLOSED: the launcher reports the end of the task; other kinds are of a later release.
            return EventEffect(state=state)
