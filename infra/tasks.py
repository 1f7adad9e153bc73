"""Background tasks, and a cancellation that is certain to end them."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Coroutine
from contextlib import asynccontextmanager
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


@asynccontextmanager
async def running(work: Coroutine[Any, Any, Any]) -> AsyncIterator[None]:
    """Runs `work` in a task until the block is left."""
    task = asyncio.create_task(work)
    try:
        yield
    finally:
        await cancel_tasks(task)
