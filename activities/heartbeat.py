"""Tells Temporal that an activity lives, while it waits for something that says nothing."""

from __future__ import annotations

import asyncio

from temporalio import activity

from infra import tasks

#: Seconds between two beats: a third of what Temporal waits for one, and less.
PERIOD = 1.0


class Heartbeat:
    """`async with Heartbeat():` beats once a second around a call that takes long."""

    async def __aenter__(self) -> None:
        self._beating = asyncio.create_task(self._beat())

    async def __aexit__(self, *_: object) -> None:
        await tasks.cancel_tasks(self._beating)

    async def _beat(self) -> None:
        while True:
            activity.heartbeat()
            await asyncio.sleep(PERIOD)
