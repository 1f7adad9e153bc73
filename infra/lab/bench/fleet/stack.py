"""A local stack whose workers are simulated, and the naive design's Temporal worker next to it.

Everything but the workers is real.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

from temporalio.client import Client

from infra.lab.bench.fleet.polling_workflow import (
    CHECK_INTERVAL_S,
    QUEUE,
    WORKFLOW_NAME,
    PollingInput,
)
from infra.lab.bench.fleet.simulated.worker import SimulatedBehaviour
from infra.local.components import ChildComponent, NodeComponent
from infra.local.stack import LocalStack
from infra.settings import Settings

#: Launches per second: what limits a host's real processes must not limit simulated ones.
_MAX_LAUNCHES_PER_S = 1000.0


class SimulatedNode(NodeComponent):
    """`python -m infra.lab.bench.fleet.simulated` in the node's place; its workers end with it."""

    module = "infra.lab.bench.fleet.simulated"
    keeps_children = False

    def __init__(self, directory: Path, settings: Settings, habits: SimulatedBehaviour) -> None:
        super().__init__(directory, settings)
        self._habits = habits

    def command(self) -> Sequence[str]:
        habits = self._habits
        own = ["--own-login"] if habits.own_login else []
        words = ["--start", str(habits.start), "--connect", str(habits.connect)]
        return [*super().command(), *words, *(["--used"] if habits.used else []), *own]


class SimulatedStack(LocalStack):
    """`LocalStack` with simulated workers."""

    def __init__(self, directory: Path, *, habits: SimulatedBehaviour, **options: Any) -> None:
        super().__init__(directory, launch_rate=_MAX_LAUNCHES_PER_S, **options)
        real = self.node
        node = SimulatedNode(real.directory, self.settings, habits)
        node.log_path, node.records = real.log_path, real.records
        self.node = node
        self.servers = tuple(node if server is real else server for server in self.servers)


#: Starts under way at once.
_MAX_CONCURRENT_STARTS = 32


class PollingWorker(ChildComponent):
    """Ready when its Temporal worker polls."""

    name = "polling"
    module = "infra.lab.bench.fleet.polling_worker"

    def __init__(self, directory: Path, settings: Settings) -> None:
        super().__init__(directory, settings)
        self._ready = directory / "polling.ready"

    def ports(self) -> list[tuple[int, str]]:
        return []

    def command(self) -> Sequence[str]:
        return [*super().command(), str(self._ready)]

    def answers(self) -> bool:
        return self._ready.exists()


async def start_polling(
    client: Client, user_ids: Sequence[str], on_progress: Callable[[int], None]
) -> None:
    """Starts one workflow per user; their polls are spread over the period.
    `on_progress` gets the number."""
    turn, started = asyncio.Semaphore(_MAX_CONCURRENT_STARTS), 0

    async def start(number: int, user_id: str) -> None:
        nonlocal started
        async with turn:
            first = CHECK_INTERVAL_S * number / len(user_ids)
            await client.start_workflow(
                WORKFLOW_NAME,
                PollingInput(user_id=user_id, first=first),
                id=f"naive-polling-{user_id}",
                task_queue=QUEUE,
            )
        started += 1
        on_progress(started)

    await asyncio.gather(*(start(number, user_id) for number, user_id in enumerate(user_ids)))
