"""An orchestrator's workflows and activities on real servers, and the ways in which somebody ends
its workflows in Temporal."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Coroutine
from dataclasses import dataclass
from typing import Any

from temporalio.api.common.v1 import WorkflowExecution
from temporalio.api.enums.v1 import EventType
from temporalio.api.workflowservice import v1 as api
from temporalio.client import Client, WorkflowHandle
from temporalio.service import RPCError

from activities.orchestrator.restorer import EntityRestorer
from infra.database.entities import finding_of
from infra.settings import Settings
from infra.temporal import executions
from tests.support.activities.harness import ActivityHarness
from tests.support.workers.pool_worker import POOL
from worker_runtime.protocol.messages import ReleaseClaim
from workflows import names
from workflows.user_worker.messages import UserWorkerView, WorkerRef
from workflows.worker_pool.messages import PoolView

PATIENCE = 40.0


async def until(condition: Callable[[], Awaitable[Any]], description: str) -> Any:
    """The first value that is true; errors of Temporal mean: not yet."""
    end = asyncio.get_running_loop().time() + PATIENCE
    while True:
        try:
            if value := await condition():
                return value
        except RPCError:
            pass
        assert asyncio.get_running_loop().time() < end, f"no {description}"
        await asyncio.sleep(0.05)


@dataclass
class OrchestratorHarness:
    """An orchestrator's workflows and activities, on real servers, with workers in memory."""

    harness: ActivityHarness
    temporal: Client
    settings: Settings
    restorer: EntityRestorer

    async def pool_view(self) -> PoolView:
        handle = self.temporal.get_workflow_handle(names.worker_pool_id(POOL))
        view: PoolView = await handle.query("view", result_type=PoolView)
        return view

    async def user_view(self, user: str) -> UserWorkerView:
        handle = self.temporal.get_workflow_handle(names.user_worker_id(user))
        view: UserWorkerView = await handle.query("view", result_type=UserWorkerView)
        return view

    async def change_pool(self, update: str, *given: Any) -> PoolView:
        handle = self.temporal.get_workflow_handle(names.worker_pool_id(POOL))
        view: PoolView = await handle.execute_update(update, args=given, result_type=PoolView)
        return view

    async def pool_is_filled(self, count: int) -> PoolView:
        async def filled() -> PoolView | None:
            view = await self.pool_view()
            return view if view.ready == count and not view.starting else None

        view: PoolView = await until(filled, f"pool of {count}")
        return view

    async def active_user(self) -> tuple[str, WorkerRef]:
        """A new user whose worker is Active, as PostgreSQL knows."""
        user = await self.harness.user()
        before = set(self.harness.made)
        starting = asyncio.create_task(self.restorer.starter.ensure_active(user))
        served = [asyncio.create_task(self.harness.made[name].serve()) for name in before]
        await starting
        for task in served:
            task.cancel()
        worker = (await self.user_view(user)).worker
        assert worker is not None
        await self.harness.sql(
            "update worker_sessions set connected_at = now() where worker_id = "  # noqa: S608
            f"'{worker.worker_id}'"
        )
        await self.harness.renew_mark(user, worker.worker_id, worker.epoch, state="Active")
        return user, worker

    async def let_end(self, worker: WorkerRef) -> None:
        """Ends a worker once it is asked to, as a real one ends within its time to drain."""
        message = await self.harness.made[worker.worker_id].next()
        assert isinstance(message, ReleaseClaim)
        self.harness.launcher.end(worker.task_id, 0, "released")

    def another_pools_restorer(self) -> EntityRestorer:
        settings = self.settings.model_copy(update={"pool": "another"})
        starter = self.restorer.starter
        return EntityRestorer(self.harness.database, self.temporal, starter, settings, 0.2)

    async def finding(self, entity: str) -> tuple[str, str] | None:
        row = await self.harness.database.fetch(finding_of, entity)
        return None if row is None else row[:2]

    async def is_gone(self, workflow_id: str) -> bool:
        state = await executions.read_execution(self.temporal, workflow_id)
        return state is None or not state.is_open


End = Callable[[Client, WorkflowHandle[Any, Any]], Coroutine[Any, Any, None]]


async def terminated(temporal: Client, handle: WorkflowHandle[Any, Any]) -> None:
    await handle.terminate(reason="by a test")


async def cancelled(temporal: Client, handle: WorkflowHandle[Any, Any]) -> None:
    await handle.cancel()


async def deleted(temporal: Client, handle: WorkflowHandle[Any, Any]) -> None:
    request = api.DeleteWorkflowExecutionRequest(
        namespace=temporal.namespace, workflow_execution=WorkflowExecution(workflow_id=handle.id)
    )
    await temporal.workflow_service.delete_workflow_execution(request)

    async def gone() -> bool:
        return await executions.read_execution(temporal, handle.id) is None

    await until(gone, "deletion")


async def pause(temporal: Client, workflow_id: str) -> None:
    """Pauses a workflow, as Temporal's UI and `temporal workflow pause` do."""
    request = api.PauseWorkflowExecutionRequest(
        namespace=temporal.namespace,
        workflow_id=workflow_id,
        reason="by a test",
        request_id=workflow_id,
    )
    await temporal.workflow_service.pause_workflow_execution(request)


async def unpause(temporal: Client, workflow_id: str) -> None:
    request = api.UnpauseWorkflowExecutionRequest(
        namespace=temporal.namespace,
        workflow_id=workflow_id,
        reason="by a test",
        request_id=workflow_id,
    )
    await temporal.workflow_service.unpause_workflow_execution(request)


async def reset_to(temporal: Client, handle: WorkflowHandle[Any, Any], number: int = 0) -> None:
    """Resets the last run to the end of one of its workflow tasks, as `temporal workflow reset`
    does."""
    run_id = (await handle.describe()).run_id
    ends = [
        event.event_id
        async for event in temporal.get_workflow_handle(
            handle.id, run_id=run_id
        ).fetch_history_events()
        if event.event_type == EventType.EVENT_TYPE_WORKFLOW_TASK_COMPLETED
    ]
    request = api.ResetWorkflowExecutionRequest(
        namespace=temporal.namespace,
        workflow_execution=WorkflowExecution(workflow_id=handle.id, run_id=run_id),
        reason="by a test",
        workflow_task_finish_event_id=ends[number],
        request_id=f"reset-{run_id}",
    )
    await temporal.workflow_service.reset_workflow_execution(request)
