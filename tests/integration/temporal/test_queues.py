"""The task queues of orchestrators: one whose activities all hang holds up no other."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from contextlib import AsyncExitStack
from dataclasses import replace
from datetime import timedelta
from types import SimpleNamespace
from typing import Any, cast

import pytest
from temporalio import activity, workflow
from temporalio.client import Client
from temporalio.worker import UnsandboxedWorkflowRunner, Worker

from activities.orchestrator.deployment import Deployment
from activities.orchestrator.queues import hosted_queues, make_worker
from infra.local.servers import TemporalServer
from infra.settings import Settings
from workflows import names

#: More than a queue runs at a time.
FLOOD = 150
OWN_QUEUE = "tests-of-queues"


@workflow.defn
class FloodWorkflow:
    @workflow.run
    async def run(self, queue: str) -> None:
        limit = timedelta(seconds=60)
        hang = (
            workflow.execute_activity("hang", task_queue=queue, start_to_close_timeout=limit)
            for _ in range(FLOOD)
        )
        await asyncio.gather(*hang)


@workflow.defn
class AskWorkflow:
    @workflow.run
    async def run(self, queue: str) -> str:
        limit = timedelta(seconds=20)
        answer: str = await workflow.execute_activity(
            "answer", task_queue=queue, schedule_to_close_timeout=limit
        )
        return answer


class TierActivities:
    """Stand for what the queues' own activities do: wait for something that is away, or answer."""

    def __init__(self) -> None:
        self.hanging, self.go_on = 0, asyncio.Event()

    def all(self) -> list[Callable[..., Any]]:
        return [self.hang, self.answer]

    @activity.defn
    async def hang(self) -> None:
        self.hanging += 1
        await self.go_on.wait()

    @activity.defn
    async def answer(self) -> str:
        return activity.info().task_queue


@pytest.mark.timeout(60)
@pytest.mark.parametrize("flooded", [names.BULK_QUEUE, names.LIFECYCLE_QUEUE])
async def test_a_flooded_tier_holds_up_no_other(
    temporal_server: TemporalServer, flooded: str
) -> None:
    client = await Client.connect(temporal_server.address)
    deployment = Deployment(client, name="tiers", build="one")
    parts = cast(Any, SimpleNamespace(settings=Settings()))
    known = hosted_queues(client, cast(Any, None), parts)
    tiers = {hosted.name: TierActivities() for hosted in known}
    assert len(tiers) == 4
    async with AsyncExitStack() as stack:
        for hosted in known:
            own = tiers[hosted.name]
            # As orchestrators host it, but for what it does.
            tried = replace(hosted, activities=own.all, workflows=())
            await stack.enter_async_context(make_worker(client, tried, deployment, grace=0.0))
        await stack.enter_async_context(
            Worker(
                client,
                task_queue=OWN_QUEUE,
                workflows=[FloodWorkflow, AskWorkflow],
                workflow_runner=UnsandboxedWorkflowRunner(),
            )
        )
        flood = await client.start_workflow(
            FloodWorkflow.run, flooded, id=f"flood-{flooded}", task_queue=OWN_QUEUE
        )
        before = -1
        async with asyncio.timeout(30):
            while not before == tiers[flooded].hanging > 0:  # all that it takes at a time hang
                before = tiers[flooded].hanging
                await asyncio.sleep(1.0)
        assert before < FLOOD
        for queue in tiers:
            if queue != flooded:
                name = f"ask-{flooded}-{queue}"
                asked = client.execute_workflow(
                    AskWorkflow.run, queue, id=name, task_queue=OWN_QUEUE
                )
                assert await asked == queue
        assert tiers[flooded].hanging == before
        tiers[flooded].go_on.set()
        await flood.result()
        assert tiers[flooded].hanging == FLOOD
