"""The naive design's Temporal worker as a child process, and its workflows."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Sequence
from pathlib import Path

from temporalio.client import Client

from infra.bench.polling.workflow import NAME, PERIOD, QUEUE, PollingInput
from infra.local.components import Component
from infra.settings import Settings

#: Starts under way at once.
_AT_ONCE = 32


class PollingWorker(Component):
    """Ready when its Temporal worker polls."""

    name = "polling"
    module = "infra.bench.polling"

    def __init__(self, directory: Path, settings: Settings) -> None:
        super().__init__(directory, settings)
        self._ready = directory / "polling.ready"

    def ports(self) -> list[tuple[int, str]]:
        return []

    def command(self) -> Sequence[str]:
        return [*super().command(), str(self._ready)]

    def answers(self) -> bool:
        return self._ready.exists()


async def start_polling(client: Client, user_ids: Sequence[str], told: Callable[[int], None]) -> None:
    """Starts one workflow per user; their looks are spread over the period. `told` gets the number."""
    turn, started = asyncio.Semaphore(_AT_ONCE), 0

    async def start(number: int, user_id: str) -> None:
        nonlocal started
        async with turn:
            first = PERIOD * number / len(user_ids)
            await client.start_workflow(
                NAME,
                PollingInput(user_id=user_id, first=first),
                id=f"naive-polling-{user_id}",
                task_queue=QUEUE,
            )
        started += 1
        told(started)

    await asyncio.gather(*(start(number, user_id) for number, user_id in enumerate(user_ids)))
