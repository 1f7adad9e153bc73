"""Temporal actions, counted from the histories:
what a hosted Temporal bills, and what the server works for.

An action is a started workflow (also by continue-as-new or as a child), a timer, an activity and
each of its retries, a local activity, a signal or an update that was received, and a change of
search attributes. A signal is counted where it arrives. Queries leave no trace; the benchmarks send
none while they count.
"""

from __future__ import annotations

import asyncio
from collections import Counter
from datetime import UTC, datetime

from temporalio.api.enums.v1 import EventType
from temporalio.api.history.v1 import HistoryEvent
from temporalio.client import Client, WorkflowExecution

#: Histories read at once.
_MAX_CONCURRENT_READS = 16

_KINDS: dict[int, str] = {
    EventType.EVENT_TYPE_WORKFLOW_EXECUTION_STARTED: "starts",
    EventType.EVENT_TYPE_TIMER_STARTED: "timers",
    EventType.EVENT_TYPE_ACTIVITY_TASK_SCHEDULED: "activities",
    EventType.EVENT_TYPE_MARKER_RECORDED: "local_activities",
    EventType.EVENT_TYPE_WORKFLOW_EXECUTION_SIGNALED: "signals",
    EventType.EVENT_TYPE_WORKFLOW_EXECUTION_UPDATE_ACCEPTED: "updates",
    EventType.EVENT_TYPE_UPSERT_WORKFLOW_SEARCH_ATTRIBUTES: "search_attributes",
}


def kinds_of(event: HistoryEvent) -> list[str]:
    """Returns the kinds of action that an event of a history counts as; mostly none."""
    if event.event_type == EventType.EVENT_TYPE_ACTIVITY_TASK_STARTED:
        return ["retries"] * (event.activity_task_started_event_attributes.attempt - 1)
    kind = _KINDS.get(event.event_type)
    return [kind] if kind else []


async def count(client: Client, began: datetime, ended: datetime) -> dict[str, Counter[str]]:
    """Counts actions from `began` to `ended` (UTC), by workflow type and kind."""
    actions: dict[str, Counter[str]] = {}
    turn = asyncio.Semaphore(_MAX_CONCURRENT_READS)

    async def read(execution: WorkflowExecution) -> None:
        handle = client.get_workflow_handle(execution.id, run_id=execution.run_id)
        async with turn:
            counted = actions.setdefault(execution.workflow_type, Counter())
            async for event in handle.fetch_history_events():
                if began <= event.event_time.ToDatetime(UTC) < ended:
                    counted.update(kinds_of(event))

    runs = [
        run
        async for run in client.list_workflows()
        if not (run.close_time and run.close_time < began)
    ]
    await asyncio.gather(*(read(run) for run in runs))
    return actions
