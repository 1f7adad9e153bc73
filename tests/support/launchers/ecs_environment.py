"""The ECS launcher's surroundings: moto's server, a queue for each launcher, and a launch key."""

from __future__ import annotations

from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import Any

import pytest

from infra.launchers.ecs.api import EcsApi
from infra.launchers.ecs.launcher import EcsLauncher
from infra.settings import EcsSettings
from infra.worker_task import Task
from tests.support.launchers.call_counts import Cost, CountedLauncher
from tests.support.launchers.ecs_on_moto import CLUSTER, CONTAINER, FAMILY, REGION, EcsOnMoto

KEY = bytes(range(64))


class EcsHarness:
    def __init__(self, aws: EcsOnMoto) -> None:
        self.aws = aws
        self._made: list[EcsLauncher] = []

    def client(
        self, *, queue: str = "", listing_period: float = 1e-9, **options: Any
    ) -> EcsLauncher:
        """Lists anew for every question unless `listing_period` says otherwise."""
        settings = EcsSettings(
            cluster=CLUSTER,
            task_definition=FAMILY,
            container=CONTAINER,
            capacity_providers={"FARGATE": 1},
            placement="spread",
            queue_url=queue or self.aws.queue(),
            region=REGION,
            listing_period=listing_period,
        )
        api = EcsApi(settings, endpoint=self.aws.url)
        made = EcsLauncher(settings, api, KEY, **{"denial": 0.1, **options})
        self._made.append(made)
        return made

    @asynccontextmanager
    async def counted(self) -> AsyncIterator[CountedLauncher]:
        operations = ("ListTasks", "DescribeTasks", "StopTask")
        yield CountedLauncher(
            self.client(listing_period=600.0),
            lambda: Cost(sum(self.aws.calls[name] for name in operations), self.aws.answered_bytes),
        )

    async def crash(self, task: Task) -> None:
        self.aws.crash(task.task_id)

    async def close(self) -> None:
        for launcher in self._made:
            await launcher.close()


@asynccontextmanager
async def on_moto(monkeypatch: pytest.MonkeyPatch) -> AsyncIterator[EcsHarness]:
    for name in ("AWS_ACCESS_KEY_ID", "AWS_SECRET_ACCESS_KEY", "AWS_SESSION_TOKEN"):
        monkeypatch.setenv(name, "testing")
    with EcsOnMoto() as aws:
        made = EcsHarness(aws)
        yield made
        await made.close()
