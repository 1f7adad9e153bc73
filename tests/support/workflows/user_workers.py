"""Reads the view of the user `u1`, and the cost of a run."""

from __future__ import annotations

from temporalio.client import WorkflowHistory
from temporalio.testing import WorkflowEnvironment

from tests.support.workflows.fakes import handle, until
from workflows.user_worker.messages import UserWorkerView, WorkerState
from workflows.user_worker.workflow import UserWorkerWorkflow


async def view_user(env: WorkflowEnvironment) -> UserWorkerView:
    return await handle(env.client, "u1").query(UserWorkerWorkflow.view)


async def until_worker_serves(env: WorkflowEnvironment, worker_id: str) -> None:
    async def there() -> bool:
        seen = await view_user(env)
        return (
            seen.state == WorkerState.ACTIVE
            and seen.worker is not None
            and seen.worker.worker_id == worker_id
        )

    await until(there)


ACTIONS = (
    "timer_started",
    "activity_task_scheduled",
    "marker_recorded",
    "workflow_execution_signaled",
    "signal_external_workflow_execution_initiated",
    "workflow_execution_update_accepted",
    "upsert_workflow_search_attributes",
)


def action_times(history: WorkflowHistory) -> list[float]:
    """Returns the times of all actions, in seconds since the run began, ascending."""
    began = history.events[0].event_time.ToDatetime()
    return [
        (event.event_time.ToDatetime() - began).total_seconds()
        for event in history.events
        if (event.WhichOneof("attributes") or "").startswith(ACTIONS)
    ]
