"""A launcher in memory, for the tests of those who use the port; the contract suite runs on it
too."""

from __future__ import annotations

import asyncio
import builtins
import itertools
import time
from collections import Counter
from collections.abc import AsyncIterator, Awaitable, Callable, Sequence
from dataclasses import replace

from infra.worker_task import LauncherUnreachable, LaunchFailed, LaunchSpec, Task, TaskExit

#: Called with each newly launched worker: the place to let it become ready.
OnLaunch = Callable[[LaunchSpec, Task], Awaitable[None]]


class FakeLauncher:
    """Implements `Launcher`; its workers are entries in a dict that live until they are stopped."""

    def __init__(self, on_launch: OnLaunch | None = None) -> None:
        #: What was launched, in order; repeats of a token are not in it.
        self.launched: list[LaunchSpec] = []
        #: `(task_id, reason)` of each call of `stop`, also for unknown tasks.
        self.stops: list[tuple[str, str]] = []
        #: Calls by method, and tasks in all answers.
        self.calls: Counter[str] = Counter()
        self.tasks_shown = 0
        #: While True, every call raises `LauncherUnreachable`.
        self.unreachable = False
        self._on_launch = on_launch
        self._by_token: dict[str, Task] = {}
        self._running: dict[str, Task] = {}
        self._ends: list[TaskExit] = []
        self._numbers = itertools.count(1)
        self._news = asyncio.Event()
        self._position = 0

    async def launch(self, spec: LaunchSpec, token: str) -> Task:
        self._check("launch")
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

    async def stop(self, task_id: str, reason: str, *, grace: float | None = None) -> bool:
        self._check("stop")
        self.stops.append((task_id, reason))
        self.end(task_id, 0, "stopped", {"stop_reason": reason})
        return True

    async def is_running(self, task_id: str) -> bool | None:
        self._check("is_running")
        return task_id in self._running

    async def find_tasks(self, worker_id: str) -> Sequence[Task]:
        self._check("find_tasks")
        return self._show([task for task in self._running.values() if task.worker_id == worker_id])

    def end(
        self,
        task_id: str,
        exit_code: int | None = -9,
        reason: str = "killed",
        detail: dict[str, str] | None = None,
    ) -> None:
        """Ends a worker, by default like a crash. An unknown task is no error."""
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
        self._check("list")
        return self._show(list(self._running.values()))

    def _show(self, tasks: builtins.list[Task]) -> builtins.list[Task]:
        self.tasks_shown += len(tasks)
        return tasks

    async def exits(self, after: str = "") -> AsyncIterator[TaskExit]:
        """As the port says, with positions like those of the process launcher."""
        number = int(after.rpartition(":")[2]) if after else self._position
        while True:
            self._check("exits")
            news = self._news
            while number < len(self._ends):
                end = self._ends[number]
                number += 1
                yield replace(end, detail={**end.detail, "position": f"fake:{number}"})
                self._position = number
            await news.wait()

    async def close(self) -> None:
        """Nothing to close."""

    def _check(self, method: str) -> None:
        self.calls[method] += 1
        if self.unreachable:
            raise LauncherUnreachable
