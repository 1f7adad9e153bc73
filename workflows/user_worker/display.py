"""What Temporal's web UI shows of a user's workflow: search attributes and current details."""

from __future__ import annotations

from datetime import UTC, datetime

from temporalio.common import SearchAttributeKey, SearchAttributeUpdate

from workflows import names
from workflows.user_worker.state import CRASH_LIMIT, UserWorkerState

USER = SearchAttributeKey.for_keyword(names.SA_USER)
STATE = SearchAttributeKey.for_keyword(names.SA_STATE)
WORKER = SearchAttributeKey.for_keyword(names.SA_WORKER)
POOL = SearchAttributeKey.for_keyword(names.SA_POOL)


def _values(state: UserWorkerState | None) -> dict[SearchAttributeKey[str], str | None]:
    if state is None:
        return {}
    worker = state.worker.worker_id if state.worker else None
    return {USER: state.user_id, STATE: str(state.state), WORKER: worker, POOL: state.pool}


def attribute_changes(
    state: UserWorkerState, before: UserWorkerState | None
) -> list[SearchAttributeUpdate[str]]:
    """What to upsert so that the attributes show `state`, if they show `before` now."""
    old = _values(before)
    return [
        key.value_unset() if value is None else key.value_set(value)
        for key, value in _values(state).items()
        if value != old.get(key)
    ]


def _clock(at: float | None) -> str:
    return "-" if not at else f"{datetime.fromtimestamp(at, UTC):%Y-%m-%d %H:%M:%S} UTC"


def details(state: UserWorkerState) -> str:
    """The current details, in Markdown."""
    lines = [
        f"### {state.state} since {_clock(state.since)}",
        f"**Next:** {state.next_step}{_when(state)}",
    ]
    if state.reason:
        lines.append(f"**Reason:** {state.reason}")
    if state.worker:
        worker = state.worker
        origin = "from the pool" if worker.warm else "launched for this user"
        lines.append(
            f"**Worker:** `{worker.worker_id}`, task `{worker.task_id}`, epoch {worker.epoch}, {origin}"
        )
    if state.attempts and not state.serving:
        most = state.settings.connect_attempts
        lines.append(f"**Broker login:** attempt {state.attempts} of {most}")
    if state.serving:
        lines.append(f"**Connected:** {_clock(state.connected_at)}, attempt {state.attempts}")
        lines.append(f"**Health:** {state.health}, known since {_clock(state.health_at)}")
        lines.append(f"**Last known use:** {_clock(state.last_activity)}")
    if state.note:
        lines.append(f"**Note:** {state.note}")
    if state.crashes:
        times = ", ".join(_clock(at) for at in state.crashes)
        lines.append(f"**Recent crashes:** {len(state.crashes)} ({times}); at {CRASH_LIMIT} it is parked")
    return "\n\n".join(lines)


def _when(state: UserWorkerState) -> str:
    if state.retry_at:
        return f", at {_clock(state.retry_at)}, and is stuck after {_clock(state.deadline)}"
    return "" if state.deadline is None else f", by {_clock(state.deadline)}"
