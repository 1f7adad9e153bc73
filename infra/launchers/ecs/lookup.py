"""Looks up single tasks in ECS, for many callers with few calls.

A clean-up, a launch and a health check each ask about one task. ECS describes up to 100 in one call
and allows some 20 calls a second to all callers together, so those who ask while a call is under
way share the next one. An answer always comes from a call that began after the question.
"""

import asyncio
from collections.abc import Awaitable, Callable

from infra import tasks

#: Seconds from the beginning of one call to the next: at most five a second.
CALL_INTERVAL_S = 0.2


class TaskLookup:
    """Belongs to one event loop."""

    def __init__(self, describe: Callable[[set[str]], Awaitable[set[str]]]) -> None:
        """Takes `describe`, which asks ECS about these tasks, notes what it says, and returns those
        that ECS denies."""
        self._describe = describe
        self._waiting: dict[str, asyncio.Future[bool]] = {}
        self._serving: asyncio.Task[None] | None = None

    async def is_known(self, task_id: str) -> bool:
        """Return whether ECS knows the task. Raises `LauncherUnreachable`."""
        answer = self._waiting.get(task_id)
        if answer is None:
            answer = self._waiting[task_id] = asyncio.get_running_loop().create_future()
        if self._serving is None or self._serving.done():
            self._serving = asyncio.create_task(self._serve())
        return await asyncio.shield(answer)  # others may wait for the same answer

    async def close(self) -> None:
        await tasks.cancel_tasks(self._serving)
        for answer in self._waiting.values():
            answer.cancel()

    async def _serve(self) -> None:
        loop = asyncio.get_running_loop()
        while self._waiting:
            began, batch = loop.time(), self._waiting
            self._waiting = {}
            try:
                denied = await self._describe(set(batch))
            except asyncio.CancelledError:
                for answer in batch.values():
                    answer.cancel()
                raise
            except Exception as error:  # each caller gets it
                for answer in batch.values():
                    answer.set_exception(error)
                    answer.exception()  # retrieved, in case the callers have given up
            else:
                for task_id, answer in batch.items():
                    answer.set_result(task_id not in denied)
            if self._waiting:
                await asyncio.sleep(began + CALL_INTERVAL_S - loop.time())
