"""Tells Temporal that an activity is alive while it waits for a call that takes long."""

import asyncio

from temporalio import activity

from infra import tasks

#: Seconds between two beats: well below the shortest heartbeat timeout of `workflows/calls.py`, 5 s.
PERIOD = 1.0


class Heartbeat:
    """`async with Heartbeat():` beats at once, then once a second."""

    async def __aenter__(self) -> None:
        self._beating = asyncio.create_task(self._beat())

    async def __aexit__(self, *_: object) -> None:
        await tasks.cancel_tasks(self._beating)

    async def _beat(self) -> None:
        while True:
            activity.heartbeat()
            await asyncio.sleep(PERIOD)
