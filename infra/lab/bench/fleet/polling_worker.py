"""The Temporal worker of the naive design:
`python -m infra.lab.bench.fleet.polling_worker READY_FILE`.

It runs until SIGTERM.

Settings: BERTH_TEMPORAL_ADDRESS, BERTH_VALKEY_URL. Its limits are those of our orchestrator.
"""

from __future__ import annotations

import asyncio
import signal
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

from temporalio import activity
from temporalio.worker import PollerBehaviorAutoscaling, Worker

from infra.lab.bench.fleet.polling_workflow import QUEUE, READ_MARK, NaivePollingWorkflow
from infra.settings import Settings
from infra.temporal.connection import open_client
from infra.valkey import client as valkey
from worker_runtime.protocol import keys

#: Workflows kept in memory, as in our orchestrator.
_MAX_CACHED_WORKFLOWS = 4000


class PollingActivities:
    """The activity of the naive workflow."""

    def __init__(self, client: Any) -> None:
        self._client = client

    @activity.defn(name=READ_MARK)
    async def read_mark(self, user_id: str) -> bool:
        """Returns True if the user's worker is marked as alive."""
        return bool(await self._client.exists(keys.mark(user_id)))


async def _serve(polls: Callable[[], None]) -> None:
    settings = Settings()
    ending = asyncio.Event()
    loop = asyncio.get_running_loop()
    for number in (signal.SIGTERM, signal.SIGINT):
        loop.add_signal_handler(number, ending.set)
    client = valkey.connect_valkey(settings.valkey_url, max_connections=256)
    temporal = await open_client(settings)
    async with Worker(
        temporal,
        task_queue=QUEUE,
        workflows=[NaivePollingWorkflow],
        activities=[PollingActivities(client).read_mark],
        max_cached_workflows=_MAX_CACHED_WORKFLOWS,
        workflow_task_poller_behavior=PollerBehaviorAutoscaling(),
        activity_task_poller_behavior=PollerBehaviorAutoscaling(),
    ):
        polls()
        await ending.wait()
    await client.aclose()
    await asyncio.sleep(0.1)  # the client's threads end before the loop does (sdk-python#300)


if __name__ == "__main__":
    asyncio.run(_serve(Path(sys.argv[1]).touch))
