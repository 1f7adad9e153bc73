"""Loops beside the Temporal workers, and work that a stop cuts short."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Callable, Coroutine, Sequence
from contextlib import asynccontextmanager
from typing import Any, TypeVar

import structlog

from infra import tasks

#: Seconds until a loop that failed is started again.
RETRY = 0.5

Loop = Callable[[], Coroutine[Any, Any, None]]
T = TypeVar("T")

log = structlog.get_logger()


@asynccontextmanager
async def background(loops: Sequence[Loop]) -> AsyncIterator[None]:
    """Runs loops that never end by themselves; one that does is logged and started again."""
    running = [asyncio.create_task(_forever(loop)) for loop in loops]
    try:
        yield
    finally:
        await tasks.end(*running)


async def _forever(loop: Loop) -> None:
    while True:
        try:
            await loop()
        except Exception as error:  # a loop's boundary: the others must go on, and this one come back
            log.exception("background_loop_failed", loop=loop.__qualname__, error=type(error).__name__)
        await asyncio.sleep(RETRY)


async def unless(stopping: asyncio.Event, work: Coroutine[Any, Any, T]) -> T | None:
    """The result of `work`, or None when the process is asked to stop first."""
    task, stop = asyncio.create_task(work), asyncio.create_task(stopping.wait())
    await asyncio.wait({task, stop}, return_when=asyncio.FIRST_COMPLETED)
    await tasks.end(stop)
    if task.done():
        return task.result()
    await tasks.end(task)
    return None
