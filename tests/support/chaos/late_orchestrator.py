"""An orchestrator whose launcher behaves like ECS on a bad day; run as a program.

What its launcher lists is `LAG` seconds old, and so is what it knows of a task that it did not
launch itself. A stop is carried out at once and answered `STOP_DELAY` seconds late, and of a task
that is not there the launcher only says that it does not know it.
"""

from __future__ import annotations

import asyncio
import sys
import time
from collections.abc import Sequence
from unittest.mock import patch

from activities.__main__ import main
from infra.launchers import process
from infra.launchers.process import ProcessLauncher
from infra.worker_task import LaunchSpec, Task

LAG = 60.0
STOP_DELAY = 3.0


class LateLauncher(ProcessLauncher):
    """Implements `Launcher`."""

    _own: frozenset[str] = frozenset()
    #: What ran, and when that was looked up (monotonic seconds).
    _seen: tuple[tuple[float, list[Task]], ...] = ()

    async def launch(self, spec: LaunchSpec, token: str) -> Task:
        task = await super().launch(spec, token)
        self._own |= {task.task_id}
        return task

    async def stop(self, task_id: str, reason: str, *, grace: float | None = None) -> bool:
        known = task_id in {task.task_id for task in await super().list()}
        await super().stop(task_id, reason, grace=grace)
        await asyncio.sleep(STOP_DELAY)
        return known

    async def is_running(self, task_id: str) -> bool | None:
        shown = await (super().list() if task_id in self._own else self.list())
        return True if task_id in {task.task_id for task in shown} else None

    async def find_tasks(self, worker_id: str) -> Sequence[Task]:
        return [task for task in await self.list() if task.worker_id == worker_id]

    async def list(self) -> list[Task]:
        now = time.monotonic()
        self._seen += ((now, await super().list()),)
        old = [shown for at, shown in self._seen if at <= now - LAG]
        return old[-1] if old else []


if __name__ == "__main__":
    with patch.object(process, "ProcessLauncher", LateLauncher):
        sys.exit(main())
