"""The timeline of a user's worker: transitions are collected at once and written in the background.

Callers are answered first, and one activity at a time writes what has come together. What is not written yet
is carried into the next run.
"""

from __future__ import annotations

import asyncio
from collections.abc import Mapping
from dataclasses import asdict
from typing import Any

from temporalio import workflow
from temporalio.converter import value_to_type
from temporalio.exceptions import FailureError

with workflow.unsafe.imports_passed_through():
    from workflows.user_worker import messages as m
    from workflows.user_worker.state import UserWorkerState

from workflows import calls
from workflows.calls import cause

#: Transitions that one activity writes.
BATCH_MAX = 100
#: Transitions kept while they cannot be written: a state that changes every 10 s for more than an hour, and
#: far below what continue-as-new may carry (2 MB).
PENDING_MAX = 500
#: Characters of a reason.
REASON_MAX = 500


class Timeline:
    """The transitions of one run; `carried` is what the last run of the chain left to be written."""

    def __init__(self, user_id: str, carried: Mapping[str, Any] | None = None) -> None:
        self._user_id = user_id
        left = dict(carried or {})
        self._number: int = left.get("number", 0)
        self._pending = [value_to_type(m.Transition, item) for item in left.get("pending", [])]
        self._task: asyncio.Task[None] | None = None

    def record(self, before: UserWorkerState, after: UserWorkerState) -> None:
        """Adds the transition, if the state changed."""
        if (before.state, before.since) == (after.state, after.since):
            return
        self._number += 1
        worker = after.worker or before.worker
        transition = m.Transition(
            number=self._number,
            at=after.since,
            before=str(before.state),
            after=str(after.state),
            reason=after.reason[:REASON_MAX],
            worker_id=worker.worker_id if worker else "",
            epoch=worker.epoch if worker else 0,
            deadline=after.deadline,
        )
        self._pending = [*self._pending, transition]
        if len(self._pending) > PENDING_MAX:
            lost = self._pending.pop(0)
            workflow.logger.warning("transition_lost", extra={"number": lost.number})

    def flush(self) -> None:
        """Starts writing the pending transitions in the background."""
        if self._pending and self._task is None:
            self._task = asyncio.create_task(self._write())

    @property
    def settled(self) -> bool:
        """Whether nothing is being written."""
        return self._task is None

    def carried(self) -> dict[str, Any]:
        return {"number": self._number, "pending": [asdict(item) for item in self._pending]}

    async def _write(self) -> None:
        # Lets the callers be answered first.
        await workflow.wait_condition(lambda: True)
        try:
            while self._pending:
                batch = tuple(self._pending[:BATCH_MAX])
                chain = workflow.info().first_execution_run_id
                request = m.RecordTimeline(user_id=self._user_id, chain=chain, transitions=batch)
                await calls.record_timeline(request)
                self._pending = [item for item in self._pending if item.number > batch[-1].number]
        except FailureError as error:  # after an hour; the next transition has it tried again
            workflow.logger.warning("timeline_not_written", extra={"reason": cause(error)})
        finally:
            self._task = None
