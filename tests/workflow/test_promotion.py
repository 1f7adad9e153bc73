"""When a version is settled: not before Temporal knows all the queues that it serves."""

from __future__ import annotations

import asyncio
import uuid
from collections.abc import Collection
from contextlib import AsyncExitStack

from temporalio import activity, workflow
from temporalio.client import Client
from temporalio.worker import UnsandboxedWorkflowRunner, Worker

from activities.orchestrator.deployment import Deployment
from activities.orchestrator.promotion import Promotion


@workflow.defn(name="Nothing")
class Nothing:
    @workflow.run
    async def run(self) -> None:
        """Ends at once."""


@activity.defn(name="nothing")
async def nothing() -> None:
    """Does nothing."""


class Asked(Deployment):
    """Notes what it answered."""

    def __init__(self, temporal: Client, *, name: str, build: str) -> None:
        super().__init__(temporal, name=name, build=build)
        self.answers: asyncio.Queue[bool] = asyncio.Queue()

    async def serves(self, queues: Collection[str]) -> bool:
        served = await super().serves(queues)
        self.answers.put_nowait(served)
        return served


async def test_a_version_is_settled_when_it_may_be_made_current_and_not_before(
    temporal: Client,
) -> None:
    """Each queue registers by itself: between the first and the last, Temporal would refuse the
    version."""
    name = uuid.uuid4().hex
    queues = [f"{name}-a", f"{name}-b"]

    def polls(deployment: Deployment, queue: str) -> Worker:
        return Worker(
            temporal,
            task_queue=queue,
            workflows=[Nothing],
            activities=[nothing],
            deployment_config=deployment.config,
            workflow_runner=UnsandboxedWorkflowRunner(),
        )

    old, new = (Deployment(temporal, name=name, build=build) for build in ("old", "new"))
    async with AsyncExitStack() as running:
        for queue in queues:
            await running.enter_async_context(polls(old, queue))
        await Promotion(old, promotes=True, queues=queues).run()
        await running.enter_async_context(polls(new, queues[0]))
        await Promotion(new, promotes=False, queues=queues[:1]).run()  # that queue is known
        asked = Asked(temporal, name=name, build="new")
        waits = Promotion(asked, promotes=False, queues=queues)
        waiting = asyncio.create_task(waits.run())
        assert [await asked.answers.get() for _ in range(2)] == [False, False]
        assert not waits.decided.is_set()
        await running.enter_async_context(polls(new, queues[1]))
        await waiting
        seen = await new.describe()
        assert seen is not None
        assert seen.current == "old"
        await new.make_current(seen)
        seen = await new.describe()
        assert seen is not None
        assert seen.current == "new"
