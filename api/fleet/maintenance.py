"""Maintenance begun by hand: its schedule is triggered, and the pass waited for."""

from __future__ import annotations

import asyncio
from datetime import timedelta

from temporalio.client import (
    Client,
    ScheduleActionExecution,
    ScheduleActionExecutionStartWorkflow,
    ScheduleHandle,
    ScheduleOverlapPolicy,
    WorkflowFailureError,
)

from api.http.errors import NoMaintenance, OrchestratorUnavailable
from infra.temporal.client import temporal_errors
from workflows.maintenance.messages import Maintained
from workflows.names import MAINTENANCE_SCHEDULE

#: What one call may take.
RPC = timedelta(seconds=5)
#: Seconds between two looks at the schedule, until it has begun the pass.
CHECK_PERIOD = 0.1


class MaintenanceTrigger:
    def __init__(self, client: Client) -> None:
        self._client = client

    async def run_pass(self, wait: float) -> Maintained | None:
        """What one pass saw and did; None: it is not done after `wait` seconds, and goes on.

        A pass that is under way is waited for instead: none overtakes another. Raises `NoMaintenance`,
        `TemporalUnavailable`, `OrchestratorUnavailable` when the pass failed.
        """
        schedule = self._client.get_schedule_handle(MAINTENANCE_SCHEDULE)
        try:
            with temporal_errors(missing=NoMaintenance()):
                async with asyncio.timeout(wait):
                    begun = await self._start_pass(schedule)
                    if not isinstance(begun, ScheduleActionExecutionStartWorkflow):
                        raise NoMaintenance("the schedule starts something else")
                    handle = self._client.get_workflow_handle(
                        begun.workflow_id, run_id=begun.first_execution_run_id, result_type=Maintained
                    )
                    done: Maintained = await handle.result()
                    return done
        except TimeoutError:
            return None
        except WorkflowFailureError as error:
            raise OrchestratorUnavailable(f"the pass failed: {error.cause}"[:300]) from None

    async def _start_pass(self, schedule: ScheduleHandle) -> ScheduleActionExecution:
        """The pass that is under way, or the next one to begin: by our trigger, or by the clock just then."""
        before = (await schedule.describe(rpc_timeout=RPC)).info
        if before.running_actions:
            return before.running_actions[0]
        await schedule.trigger(overlap=ScheduleOverlapPolicy.SKIP, rpc_timeout=RPC)
        while True:
            now = (await schedule.describe(rpc_timeout=RPC)).info
            if now.num_actions > before.num_actions:
                return now.recent_actions[-1].action
            await asyncio.sleep(CHECK_PERIOD)
