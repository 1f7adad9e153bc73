"""Tells Temporal that an activity is alive while it waits for a call that takes long."""

import asyncio
from contextlib import AbstractAsyncContextManager

from temporalio import activity

from infra import tasks

#: Seconds between two beats: well below the shortest heartbeat timeout of `workflows/calls.py`, 5
#: s.
HEARTBEAT_INTERVAL_S = 1.0


def beating() -> AbstractAsyncContextManager[None]:
    """Beats within `async with beating():`, at once, then once a second."""
    return tasks.running(_beat())


async def _beat() -> None:
    while True:
        activity.heartbeat()
        await asyncio.sleep(HEARTBEAT_INTERVAL_S)
