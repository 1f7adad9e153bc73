"""Cancellation of background tasks that is certain to end them."""

from __future__ import annotations

import asyncio
from typing import Any

#: Seconds between two attempts to cancel the same task.
RETRY_PAUSE = 0.1


async def cancel_tasks(*tasks: asyncio.Task[Any] | None) -> None:
    """Cancels tasks and waits until all have ended; ignores what they raised.

    It cancels repeatedly: redis-py sends through `asyncio.wait_for`, which in Python 3.11 drops a
    cancellation that comes just as the write has finished (python/cpython#86296).
    """
    given = [task for task in tasks if task is not None]
    left = {task for task in given if not task.done()}
    while left:
        for task in left:
            task.cancel()
        _, left = await asyncio.wait(left, timeout=RETRY_PAUSE)
    for task in given:
        if not task.cancelled():
            task.exception()  # retrieved, so that asyncio does not report it
