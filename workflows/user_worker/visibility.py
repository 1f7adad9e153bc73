"""Shows a user's workflow to others: search attributes, current details, and the timeline.

Transitions of the timeline are collected at once and written in the background: callers are
answered first, and one activity at a time writes what has come together. What is not written yet is
carried into the next run.
"""

import asyncio
import re
from collections.abc import Mapping
from dataclasses import asdict
from datetime import UTC, datetime
from typing import Any

from temporalio import workflow
from temporalio.common import SearchAttributeKey, SearchAttributeUpdate
from temporalio.converter import value_to_type
from temporalio.exceptions import FailureError

with workflow.unsafe.imports_passed_through():
    from workflows import names
    from workflows.user_worker.messages import RecordTimeline, Transition
    from workflows.user_worker.state import MAX_CRASHES, UserWorkerState

from workflows import calls

#: Transitions that one activity writes.
MAX_TRANSITIONS_PER_WRITE = 100
#: Transitions kept while they cannot be written: a state that changes every 10 s for more than an
#: hour, and far below what continue-as-new may carry (2 MB).
MAX_PENDING_TRANSITIONS = 500
#: The characters that make links, pictures and code.
_MARKUP = re.compile(r"[\\`\[\]<>]")
#: Characters of a reason.
MAX_REASON_LENGTH = 500


def _values(state: UserWorkerState | None) -> dict[SearchAttributeKey[str], str | None]:
    if state is None:
        return {}
    worker = state.worker.worker_id if state.worker else None
    return {
        names.SA_USER: state.user_id,
        names.SA_STATE: str(state.state),
        names.SA_WORKER: worker,
        names.SA_POOL: state.pool,
    }


def attribute_changes(
    state: UserWorkerState, before: UserWorkerState | None
) -> list[SearchAttributeUpdate[str]]:
    """Returns what to upsert so that the attributes show `state`, if they show `before` now."""
    old = _values(before)
    return [
        key.value_unset() if value is None else key.value_set(value)
        for key, value in _values(state).items()
        if value != old.get(key)
    ]


def _clock(at: float | None) -> str:
    return "-" if not at else f"{datetime.fromtimestamp(at, UTC):%Y-%m-%d %H:%M:%S} UTC"


def _plain(text: str) -> str:
    """Returns what a worker or a broker said, in one line and without links and markup of
    Markdown."""
    return _MARKUP.sub(r"\\\g<0>", " ".join(text.split()))


def details(state: UserWorkerState) -> str:
    """Returns the current details, in Markdown."""
    lines = [
        f"### {state.state} since {_clock(state.since)}",
        f"**Next:** {state.next_step}{_when(state)}",
    ]
    if state.reason:
        lines.append(f"**Reason:** {_plain(state.reason)}")
    if state.worker:
        worker = state.worker
        origin = "from the pool" if worker.warm else "launched for this user"
        lines.append(
            f"**Worker:** `{worker.worker_id}`, task `{worker.task_id}`, epoch {worker.epoch}, "
            f"{origin}"
        )
    if state.attempts and not state.serving:
        max_attempts = state.settings.connect_attempts
        lines.append(f"**Broker login:** attempt {state.attempts} of {max_attempts}")
    if state.serving:
        lines.append(f"**Connected:** {_clock(state.connected_at)}, attempt {state.attempts}")
        lines.append(f"**Health:** {_plain(state.health)}, known since {_clock(state.health_at)}")
        lines.append(f"**Last known use:** {_clock(state.last_activity)}")
    if state.note:
        lines.append(f"**Note:** {_plain(state.note)}")
    if state.crash_times:
        times = ", ".join(_clock(at) for at in state.crash_times)
        lines.append(
            f"**Recent crashes:** {len(state.crash_times)} ({times}); at {MAX_CRASHES} it is parked"
        )
    return "\n\n".join(lines)


def _when(state: UserWorkerState) -> str:
    if state.retry_at:
        return f", at {_clock(state.retry_at)}, and is stuck after {_clock(state.deadline)}"
    return "" if state.deadline is None else f", by {_clock(state.deadline)}"


class Timeline:
    """The transitions of one run; `carried` is what the last run of the chain left to be
    written."""

    def __init__(self, user_id: str, carried: Mapping[str, Any] | None = None) -> None:
        self._user_id = user_id
        unwritten = dict(carried or {})
        self._branch: str = unwritten.get("branch", "")
        self._number: int = unwritten.get("number", 0)
        self._pending = [value_to_type(Transition, item) for item in unwritten.get("pending", [])]
        self._task: asyncio.Task[None] | None = None

    def branch(self, seed: int) -> None:
        """Branches the numbers of a run that was reset to an earlier event: its next ones were used
        before."""
        self._branch = f"{seed & (2**64 - 1):x}"

    def record(self, before: UserWorkerState, after: UserWorkerState) -> None:
        if (before.state, before.since) == (after.state, after.since):
            return
        self._number += 1
        worker = after.worker or before.worker
        transition = Transition(
            number=self._number,
            at=after.since,
            before=str(before.state),
            after=str(after.state),
            reason=after.reason[:MAX_REASON_LENGTH],
            worker_id=worker.worker_id if worker else "",
            epoch=worker.epoch if worker else 0,
            deadline=after.deadline,
        )
        self._pending = [*self._pending, transition]
        if len(self._pending) > MAX_PENDING_TRANSITIONS:
            lost = self._pending.pop(0)
            workflow.logger.warning("transition_lost", extra={"number": lost.number})

    def flush(self) -> None:
        """Starts writing the pending transitions in the background."""
        if self._pending and self._task is None:
            self._task = asyncio.create_task(self._write())

    @property
    def settled(self) -> bool:
        """Returns True if nothing is being written."""
        return self._task is None

    def carried(self) -> dict[str, Any]:
        pending = [asdict(item) for item in self._pending]
        return {"number": self._number, "pending": pending, "branch": self._branch}

    async def _write(self) -> None:
        # Lets the callers be answered first.
        await workflow.wait_condition(lambda: True)
        try:
            while self._pending:
                batch = tuple(self._pending[:MAX_TRANSITIONS_PER_WRITE])
                chain = workflow.info().first_execution_run_id
                if self._branch:
                    chain = f"{chain}-{self._branch}"
                request = RecordTimeline(user_id=self._user_id, chain=chain, transitions=batch)
                await calls.record_timeline(request)
                self._pending = [item for item in self._pending if item.number > batch[-1].number]
        except FailureError as error:  # after an hour; the next transition has it tried again
            workflow.logger.warning("timeline_not_written", extra={"reason": calls.cause(error)})
        finally:
            self._task = None
