"""Launchers with troubles: slow ones, failing ones, and those whose answers or lists cannot be
trusted."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Sequence

from infra.worker_task import LauncherUnreachable, LaunchFailed, LaunchSpec, Task
from tests.support.launchers.fake import FakeLauncher, OnLaunch


class SlowLauncher(FakeLauncher):
    """Every launch takes `delay` seconds."""

    def __init__(self, delay: float, on_launch: OnLaunch | None = None) -> None:
        super().__init__(on_launch)
        self.delay = delay

    async def launch(self, spec: LaunchSpec, token: str) -> Task:
        await asyncio.sleep(self.delay)
        return await super().launch(spec, token)


class NeverReadyLauncher(FakeLauncher):
    """Launches, and the worker never becomes ready: `on_launch` is not called."""

    async def _launched(self, spec: LaunchSpec, task: Task) -> None:
        return None


class FailingLauncher(FakeLauncher):
    """The first `failures` launches fail (None: all of them)."""

    def __init__(self, failures: int | None = None, on_launch: OnLaunch | None = None) -> None:
        super().__init__(on_launch)
        self.failures = failures
        self.attempts = 0

    async def launch(self, spec: LaunchSpec, token: str) -> Task:
        self.attempts += 1
        if self.failures is None or self.attempts <= self.failures:
            raise LaunchFailed("this launcher fails on purpose")
        return await super().launch(spec, token)


class LostReplyLauncher(FakeLauncher):
    """Launches, but the answers of the first `losses` launches are lost."""

    def __init__(self, losses: int = 1, on_launch: OnLaunch | None = None) -> None:
        super().__init__(on_launch)
        self.losses = losses

    async def launch(self, spec: LaunchSpec, token: str) -> Task:
        task = await super().launch(spec, token)
        if self.losses > 0:
            self.losses -= 1
            raise LauncherUnreachable("the answer was lost")
        return task


class UnsteadyLauncher(FakeLauncher):
    """Its list is behind by `list_lag` seconds, as is what it knows of a task; the answers of every
    `loses`-th launch are lost (0: none), and a stop answers `stop_delay` seconds late."""

    def __init__(
        self,
        *,
        list_lag: float,
        loses: int = 0,
        stop_delay: float = 0.0,
        on_launch: OnLaunch | None = None,
    ) -> None:
        super().__init__(on_launch)
        self.list_lag = list_lag
        self.loses = loses
        self.stop_delay = stop_delay
        self._calls = 0
        #: What ran, and from when on (monotonic seconds).
        self._versions: list[tuple[float, list[Task]]] = [(0.0, [])]

    def _changed(self) -> None:
        self._versions.append((time.monotonic(), list(self._running.values())))

    async def launch(self, spec: LaunchSpec, token: str) -> Task:
        task = await super().launch(spec, token)
        self._changed()
        self._calls += 1
        if self.loses and self._calls % self.loses == 0:
            raise LauncherUnreachable("the answer was lost")
        return task

    def end(
        self,
        task_id: str,
        exit_code: int | None = -9,
        reason: str = "killed",
        detail: dict[str, str] | None = None,
    ) -> None:
        super().end(task_id, exit_code, reason, detail)
        self._changed()

    async def stop(self, task_id: str, reason: str, *, grace: float | None = None) -> bool:
        known = task_id in self._running
        await super().stop(task_id, reason, grace=grace)
        await asyncio.sleep(self.stop_delay)
        return known

    async def is_running(self, task_id: str) -> bool | None:
        return True if any(task.task_id == task_id for task in await self.list()) else None

    async def find_tasks(self, worker_id: str) -> Sequence[Task]:
        return [task for task in await self.list() if task.worker_id == worker_id]

    async def list(self) -> list[Task]:
        self._check("list")
        then = time.monotonic() - self.list_lag
        while len(self._versions) > 1 and self._versions[1][0] <= then:
            self._versions.pop(0)
        return list(self._versions[0][1])
