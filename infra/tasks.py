"""Ending background tasks for certain."""

from __future__ import annotations

import asyncio
from typing import Any

#: Seconds between two attempts to cancel the same task.
AGAIN = 0.1


async def cancel_tasks(*tasks: asyncio.Task[Any] | None) -> None:
    """Cancels tasks and returns when all have ended; what they raised is dropped.

    Cancels more than once: redis-py sends through `asyncio.wait_for`, which in Python 3.11 drops a
    cancellation that comes just as the write has finished (python/cpython#86296).
    """
    given = [task for task in tasks if task is not None]
    left = {task for task in given if not task.done()}
    while left:
        for task in left:
            task.cancel()
        _, left = await asyncio.wait(left, timeout=AGAIN)
    for task in given:
        if not task.cancelled():
            task.exception()  # seen, so that asyncio does not report it
