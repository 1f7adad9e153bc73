"""What the orchestrator process runs on: its stop by signals, and its background loops."""

from __future__ import annotations

import asyncio
import os
import signal
from collections.abc import AsyncIterator, Callable, Coroutine, Sequence
from contextlib import asynccontextmanager
from typing import Any, TypeVar

import structlog

from infra import tasks

log = structlog.get_logger()


def stop_on_signals(cut_short: Callable[[], None], *, limit: float) -> asyncio.Event:
    """The event is set by the first SIGTERM or SIGINT; a second one, or `limit` seconds, end the process.

    The limit is needed because Temporal's client waits for ever while Temporal is away. Activities in hand
    are repeated elsewhere, as after a crash. `cut_short` is called before an end at once.
    """
    stopping = asyncio.Event()
    loop = asyncio.get_running_loop()

    def end(number: signal.Signals, reason: str) -> None:
        log.warning("stopped_at_once", reason=reason)
        cut_short()
        os._exit(128 + number)  # without clean-up, which is what takes time

    def heard(number: signal.Signals) -> None:
        if stopping.is_set():
            end(number, f"a second signal, {number.name}")
        stopping.set()
        loop.call_later(limit, end, number, f"the stop took longer than {limit:.0f} s")

    for number in (signal.SIGTERM, signal.SIGINT):
        loop.add_signal_handler(number, heard, number)
    return stopping


#: Seconds until a loop that failed is started again.
LOOP_RETRY = 0.5

Loop = Callable[[], Coroutine[Any, Any, None]]
T = TypeVar("T")


@asynccontextmanager
async def run_in_background(loops: Sequence[Loop]) -> AsyncIterator[None]:
    """Runs loops that never end; one that fails or ends is started again."""
    running = [asyncio.create_task(_forever(loop)) for loop in loops]
    try:
        yield
    finally:
        await tasks.cancel_tasks(*running)


async def _forever(loop: Loop) -> None:
    while True:
        try:
            await loop()
        except Exception as error:  # the boundary of a loop, which is started again
            log.exception("background_loop_failed", loop=loop.__qualname__, error=type(error).__name__)
        await asyncio.sleep(LOOP_RETRY)


async def unless_stopped(stopping: asyncio.Event, work: Coroutine[Any, Any, T]) -> T | None:
    """The result of `work`, or None when the process is asked to stop first."""
    task, stop = asyncio.create_task(work), asyncio.create_task(stopping.wait())
    await asyncio.wait({task, stop}, return_when=asyncio.FIRST_COMPLETED)
    await tasks.cancel_tasks(stop)
    if task.done():
        return task.result()
    await tasks.cancel_tasks(task)
    return None
