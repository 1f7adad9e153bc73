"""Background tasks: cancelled for certain, running during a block, or shared by callers."""

import asyncio
from collections.abc import AsyncIterator, Callable, Coroutine, Hashable
from contextlib import asynccontextmanager
from typing import Any, Generic, TypeVar

K = TypeVar("K", bound=Hashable)
T = TypeVar("T")

#: Seconds between two attempts to cancel the same task.
RETRY_INTERVAL_S = 0.1


async def cancel_tasks(*tasks: asyncio.Task[Any] | None) -> None:
    """Cancels tasks and waits until all have ended; ignores what they raised.

    It cancels repeatedly: redis-py sends through `asyncio.wait_for`, which in Python 3.11 drops a
    cancellation that comes just as the write has finished (python/cpython#86296).
    """
    given = [task for task in tasks if task is not None]
    pending = {task for task in given if not task.done()}
    while pending:
        for task in pending:
            task.cancel()
        _, pending = await asyncio.wait(pending, timeout=RETRY_INTERVAL_S)
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


class SharedTasks(Generic[K, T]):
    """Tasks by key, one at a time for each: who asks for a key meanwhile shares its task.

    Callers wait for a task without cancelling it: it continues when they are gone.
    """

    def __init__(
        self, failed: Callable[[K, BaseException], None] = lambda key, error: None
    ) -> None:
        """Calls `failed` with each error, also when nobody waits for it any more."""
        self._failed = failed
        self._running: dict[K, asyncio.Task[T]] = {}

    def join(self, key: K, work: Callable[[], Coroutine[Any, Any, T]]) -> asyncio.Task[T]:
        """Returns the task that runs under this key; starts `work()` in one if there is none."""
        task = self._running.get(key)
        if task is None:
            task = self._running[key] = asyncio.create_task(work(), name=f"{key}")
            task.add_done_callback(lambda done: self._ended(key, done))
        return task

    @property
    def keys(self) -> list[K]:
        return list(self._running)

    async def close(self) -> None:
        await cancel_tasks(*self._running.values())

    def _ended(self, key: K, task: asyncio.Task[T]) -> None:
        self._running.pop(key, None)
        # Asked for its error in any case, so that asyncio does not report it.
        if not task.cancelled() and (error := task.exception()) is not None:
            self._failed(key, error)
