"""A workflow that stands in for a user's or a pool's, and keeps what it hears.

No postponed annotations: Temporal reads those of a dynamic handler as they are.
"""

import asyncio
import os
from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager
from typing import Any

from temporalio import workflow
from temporalio.client import Client, WorkflowHandle
from temporalio.common import RawValue
from temporalio.worker import UnsandboxedWorkflowRunner, Worker

QUEUE = f"listeners-{os.getpid()}"


@workflow.defn
class ListenerWorkflow:
    """Keeps every signal."""

    def __init__(self) -> None:
        self._heard: list[tuple[str, dict[str, Any]]] = []

    @workflow.run
    async def run(self) -> None:
        await workflow.wait_condition(lambda: False)

    @workflow.signal(dynamic=True)
    def take_event(self, name: str, args: Sequence[RawValue]) -> None:
        self._heard.append((name, workflow.payload_converter().from_payload(args[0].payload, dict)))

    @workflow.query
    def view(self) -> dict[str, Any]:
        """What the last signal `shows` carried."""
        return next((said for name, said in reversed(self._heard) if name == "shows"), {})

    @workflow.query
    def heard(self) -> list[tuple[str, dict[str, Any]]]:
        return self._heard


@asynccontextmanager
async def listening(
    client: Client, workflow_id: str
) -> AsyncIterator[WorkflowHandle[ListenerWorkflow, None]]:
    queue = f"{QUEUE}-{workflow_id}"
    async with Worker(
        client,
        task_queue=queue,
        workflows=[ListenerWorkflow],
        workflow_runner=UnsandboxedWorkflowRunner(),
        debug_mode=True,  # a moment in which the machine stands still is no deadlock
    ):
        handle = await client.start_workflow(ListenerWorkflow.run, id=workflow_id, task_queue=queue)
        try:
            yield handle
        finally:
            await handle.terminate()


async def start(client: Client, workflow_id: str) -> None:
    """A listener that nobody runs yet: it hears all the same."""
    await client.start_workflow(
        ListenerWorkflow.run, id=workflow_id, task_queue=f"{QUEUE}-{workflow_id}"
    )


async def heard_by(
    client: Client, workflow_id: str, count: int
) -> list[tuple[str, dict[str, Any]]]:
    """What a listener that was started has heard, when that is at least `count` signals."""
    async with Worker(
        client,
        task_queue=f"{QUEUE}-{workflow_id}",
        workflows=[ListenerWorkflow],
        workflow_runner=UnsandboxedWorkflowRunner(),
    ):
        return await signals(
            client.get_workflow_handle_for(ListenerWorkflow.run, workflow_id), count
        )


async def signals(
    handle: WorkflowHandle[ListenerWorkflow, None], count: int
) -> list[tuple[str, dict[str, Any]]]:
    while len(heard := await handle.query(ListenerWorkflow.heard)) < count:  # noqa: ASYNC110
        await asyncio.sleep(0.02)
    return heard
