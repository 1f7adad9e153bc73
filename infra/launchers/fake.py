"""A launcher in memory, and its troublesome siblings, for the tests of those who use the port."""

from __future__ import annotations

import asyncio
import itertools
import time
from collections.abc import AsyncIterator, Awaitable, Callable
from dataclasses import replace

from infra.launchers.port import LauncherUnreachable, LaunchFailed, LaunchSpec, Task, TaskExit

#: Called with each newly launched worker: the place to let it become ready.
OnLaunch = Callable[[LaunchSpec, Task], Awaitable[None]]


class FakeLauncher:
    """Implements `Launcher`; its workers are entries in a dict that live until they are stopped."""

    def __init__(self, on_launch: OnLaunch | None = None) -> None:
        #: What was launched, in order; repeats of a token are not in it.
        self.launched: list[LaunchSpec] = []
        #: `(task_id, reason)` of each call of `stop`, also for unknown tasks.
        self.stops: list[tuple[str, str]] = []
        #: While True, every call raises `LauncherUnreachable`.
        self.unreachable = False
        self.list_lag = 0.0
        self._on_launch = on_launch
        self._by_token: dict[str, Task] = {}
        self._running: dict[str, Task] = {}
        self._ends: list[TaskExit] = []
        self._numbers = itertools.count(1)
        self._news = asyncio.Event()
        self._position = 0

    async def launch(self, spec: LaunchSpec, token: str) -> Task:
        self._check()
        known = self._by_token.get(token)
        if known is not None:
            return known
        config = spec.config
        if any(task.worker_id == config.worker_id for task in self._running.values()):
            raise LaunchFailed(f"worker {config.worker_id} runs already, launched by another token")
        task = Task(
            task_id=f"fake-{next(self._numbers)}",
            worker_id=config.worker_id,
            pool=config.pool,
            version=config.version,
            launched_at=time.time(),
        )
        self._by_token[token] = self._running[task.task_id] = task
        self.launched.append(spec)
        await self._launched(spec, task)
        return task

    async def _launched(self, spec: LaunchSpec, task: Task) -> None:
        if self._on_launch is not None:
            await self._on_launch(spec, task)

    async def stop(self, task_id: str, reason: str, *, grace: float | None = None) -> None:
        self._check()
        self.stops.append((task_id, reason))
        self.end(task_id, 0, "stopped", {"stop_reason": reason})

    def end(
        self,
        task_id: str,
        exit_code: int | None = -9,
        reason: str = "killed",
        detail: dict[str, str] | None = None,
    ) -> None:
        """Ends a worker, by default as a crash would. Unknown tasks are no error."""
        task = self._running.pop(task_id, None)
        if task is None:
            return
        self._ends.append(
            TaskExit(
                task_id=task_id,
                worker_id=task.worker_id,
                exit_code=exit_code,
                reason=reason,
                at=time.time(),
                detail=detail or {},
            )
        )
        news, self._news = self._news, asyncio.Event()
        news.set()

    async def list(self) -> list[Task]:
        self._check()
        return list(self._running.values())

    async def exits(self, after: str = "") -> AsyncIterator[TaskExit]:
        """As the port says; positions as in the process launcher."""
        number = int(after.rpartition(":")[2]) if after else self._position
        while True:
            self._check()
            news = self._news
            while number < len(self._ends):
                end = self._ends[number]
                number += 1
                yield replace(end, detail={**end.detail, "position": f"fake:{number}"})
                self._position = number
            await news.wait()

    async def close(self) -> None:
        """Nothing to close."""

    def _check(self) -> None:
        if self.unreachable:
            raise LauncherUnreachable


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
            raise LaunchFailed("this launcher was told to fail")
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
    """Its list is behind by `list_lag` seconds, and the answers of every `loses`-th launch are lost."""

    def __init__(self, *, list_lag: float, loses: int, on_launch: OnLaunch | None = None) -> None:
        super().__init__(on_launch)
        self.list_lag = list_lag
        self.loses = loses
        self._calls = 0
        #: What ran, and from when on (monotonic seconds).
        self._versions: list[tuple[float, list[Task]]] = [(0.0, [])]

    def _changed(self) -> None:
        self._versions.append((time.monotonic(), list(self._running.values())))

    async def launch(self, spec: LaunchSpec, token: str) -> Task:
        task = await super().launch(spec, token)
        self._changed()
        self._calls += 1
        if self._calls % self.loses == 0:
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

    async def list(self) -> list[Task]:
        self._check()
        then = time.monotonic() - self.list_lag
        while len(self._versions) > 1 and self._versions[1][0] <= then:
            self._versions.pop(0)
        return list(self._versions[0][1])
