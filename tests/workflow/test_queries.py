"""A query never runs a workflow ahead of its next task, whatever the orchestrator before left
behind."""

from __future__ import annotations

import asyncio
import sys
from datetime import timedelta

import pytest
from temporalio import workflow
from temporalio.api.enums.v1 import EventType
from temporalio.client import Client, WorkflowQueryFailedError
from temporalio.common import RetryPolicy
from temporalio.exceptions import ActivityError
from temporalio.worker import Replayer, Worker
from temporalio.worker.workflow_sandbox import SandboxedWorkflowRunner

from workflows.sandbox import workflow_runner

#: Seconds of the activity that nobody runs. It ends while the query waits for the orchestrator that
#: died.
ACTIVITY = 2.0
#: Seconds that Temporal waits for the orchestrator that had the workflow in memory: first the
#: query, and `ACTIVITY` later the task with the end of the activity.
STICKY = timedelta(seconds=4)


@workflow.defn
class Waiting:
    """Does one thing or another by the time at which its activity has failed."""

    def __init__(self) -> None:
        self.late: bool | None = None
        self.done = False

    @workflow.run
    async def run(self) -> None:
        began = workflow.time()
        try:
            await workflow.execute_activity(
                "nobody_runs_it",
                schedule_to_close_timeout=timedelta(seconds=ACTIVITY),
                retry_policy=RetryPolicy(maximum_attempts=1),
            )
        except ActivityError:
            self.late = workflow.time() - began >= ACTIVITY / 2
        if self.late:
            await workflow.sleep(0.01)
        await workflow.wait_condition(lambda: self.done)

    @workflow.signal
    def finish(self) -> None:
        self.done = True

    @workflow.query
    def seen(self) -> bool | None:
        return self.late


def serving_queries(temporal: Client, queue: str, runner: SandboxedWorkflowRunner) -> Worker:
    return Worker(
        temporal,
        task_queue=queue,
        workflows=[Waiting],
        workflow_runner=runner,
        sticky_queue_schedule_to_start_timeout=STICKY,
    )


@pytest.mark.timeout(90)
@pytest.mark.parametrize(
    "runner", [workflow_runner(), workflow_runner(passed=())], ids=["product", "suite"]
)
async def test_a_query_after_a_crash_leaves_a_history_that_can_be_replayed(
    temporal: Client, runner: SandboxedWorkflowRunner
) -> None:
    queue = f"queries-{id(runner)}"
    asked = await temporal.start_workflow(Waiting.run, id=queue, task_queue=queue)
    address = temporal.service_client.config.target_host
    first = await asyncio.create_subprocess_exec(
        sys.executable, "-m", __spec__.name, address, queue
    )

    try:
        while not (await asked.describe()).raw_description.pending_activities:
            assert first.returncode is None
            await asyncio.sleep(0.05)
    finally:
        first.kill()
        await first.wait()
    async with serving_queries(temporal, queue, runner):
        for _ in range(20):
            try:
                late = await asked.query(Waiting.seen)
                break
            except WorkflowQueryFailedError:
                await asyncio.sleep(0.2)
        await asked.signal(Waiting.finish)
        await asked.result()
        history = await asked.fetch_history()
    kinds = [event.event_type for event in history.events]
    # The query was there before the task.
    assert EventType.EVENT_TYPE_WORKFLOW_TASK_TIMED_OUT in kinds
    assert EventType.EVENT_TYPE_WORKFLOW_TASK_FAILED not in kinds
    assert EventType.EVENT_TYPE_TIMER_FIRED in kinds
    assert late
    await Replayer(workflows=[Waiting], workflow_runner=runner).replay_workflow(history)


async def serve(address: str, queue: str) -> None:
    await serving_queries(await Client.connect(address), queue, workflow_runner(passed=())).run()


if __name__ == "__main__":
    asyncio.run(serve(*sys.argv[1:]))
