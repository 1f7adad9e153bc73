"""Launches no faster than the platform allows, and none of the pools waits for all of another's.

When the rate is used up (`launch_rate.py`), those who wait are served in turn, pool by pool; a user who waits
for a worker of his own takes turns with his pool's refill.
"""

from __future__ import annotations

import asyncio
from collections import deque
from collections.abc import AsyncIterator, Awaitable, Callable

from infra import tasks
from infra.launchers.launch_rate import LaunchRate
from infra.launchers.port import Launcher, LaunchFailed, LaunchSpec, Task, TaskExit

#: Seconds that a launch waits for its turn at the most: nothing was launched then, and it may be tried again.
PATIENCE = 25.0


class LaunchLimited(LaunchFailed):
    """Too many workers are to be launched at once; this one was not, and may be tried again."""

    code = "LAUNCH_LIMITED"


class Turns:
    """Who waits for a launch, and whose turn is next."""

    def __init__(
        self, rate: LaunchRate, *, sleep: Callable[[float], Awaitable[None]] = asyncio.sleep
    ) -> None:
        self._rate = rate
        self._sleep = sleep
        #: Who waits, by group; the first group is the next.
        self._waiting: dict[str, deque[asyncio.Future[None]]] = {}
        self._serving: asyncio.Task[None] | None = None

    async def take(self, group: str) -> None:
        """Returns when this launch may begin."""
        turn: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        self._waiting.setdefault(group, deque()).append(turn)
        if self._serving is None or self._serving.done():
            self._serving = asyncio.create_task(self._serve())
        await turn

    async def close(self) -> None:
        if self._serving is not None:
            await tasks.end(self._serving)

    async def _serve(self) -> None:
        while self._waiting:
            wait = await self._rate.take()
            if wait > 0.0:
                await self._sleep(wait)
                continue
            while self._waiting and not self._give():
                pass  # he gave up meanwhile

    def _give(self) -> bool:
        """The turn of the first group's first; whether somebody still waited for it."""
        group = next(iter(self._waiting))
        queue = self._waiting.pop(group)
        turn = queue.popleft()
        if queue:
            self._waiting[group] = queue  # behind the others
        if turn.done():
            return False
        turn.set_result(None)
        return True


class LimitedLauncher:
    """Implements `Launcher` by another one, whose launches wait for their turn."""

    def __init__(self, launcher: Launcher, turns: Turns, *, patience: float = PATIENCE) -> None:
        """Closes `launcher` with itself."""
        self._launcher = launcher
        self._turns = turns
        self._patience = patience
        self.list_lag = launcher.list_lag

    async def launch(self, spec: LaunchSpec, token: str) -> Task:
        """Raises `LaunchLimited` as well: nothing was launched by this call."""
        group = f"{'user' if spec.config.reserved_claim else 'pool'}:{spec.config.pool}"
        try:
            await asyncio.wait_for(self._turns.take(group), self._patience)
        except TimeoutError:
            raise LaunchLimited from None
        return await self._launcher.launch(spec, token)

    async def stop(self, task_id: str, reason: str, *, grace: float | None = None) -> None:
        await self._launcher.stop(task_id, reason, grace=grace)

    async def list(self) -> list[Task]:
        return await self._launcher.list()

    def exits(self, after: str = "") -> AsyncIterator[TaskExit]:
        return self._launcher.exits(after)

    async def close(self) -> None:
        await self._turns.close()
        await self._launcher.close()
