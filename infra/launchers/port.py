"""The launcher port: where user workers run.

Adapters: the local process launcher (through `berth node`), Docker, ECS. One test suite runs
against all of them (`tests/contract/launchers`).
"""

import asyncio
from collections.abc import AsyncIterator, Sequence
from typing import Protocol

from infra.worker_task import LaunchSpec, Task, TaskExit


class Launcher(Protocol):
    """A call whose answer is lost raises `LauncherUnreachable`,
    and may have worked: call it again."""

    async def launch(self, spec: LaunchSpec, token: str) -> Task:
        """Starts one worker. The same `token` always gives the same task, even after a restart.

        Raises `LaunchFailed` or `LauncherUnreachable`.
        """

    async def stop(self, task_id: str, reason: str, *, grace: float | None = None) -> bool:
        """Asks the worker to end, and kills it after `grace` seconds (None:
        the time its config gives it).

        Returns True when the task is confirmed to have stopped, False when the platform does not
        know it, which proves nothing. Raises `StopFailed` when it still runs after the kill,
        `LauncherUnreachable` when nobody knows. Both may be retried.
        """

    async def is_running(self, task_id: str) -> bool | None:
        """Return whether the task runs; None if the platform does not know it, or not yet.

        Asks the platform about this task alone, at a cost that does not depend on how many others
        run. The answer never comes from a listing, which may be minutes old. Raises
        `LauncherUnreachable`.
        """

    async def find_tasks(self, worker_id: str) -> Sequence[Task]:
        """Return the running tasks of one worker:
        usually one, none if it has ended, two if it runs twice.

        Asks the platform, at a cost that does not depend on how many workers run. A task that
        another process launched seconds ago may be missing. Raises `LauncherUnreachable`.
        """

    async def list(self) -> list[Task]:
        """Return all running tasks as far as they are known: another process's launches and stops
        may come minutes late.

        Costs time for each task of the fleet.
        Call it once for many workers, never once for each of them.
        """

    def exits(self, after: str = "") -> AsyncIterator[TaskExit]:
        """Exits of workers as they happen, at least once each;
        first those that nobody listened for.

        An exit counts as handled when the next one is asked for. Each has its position in
        `detail["position"]`: with `after`, only exits behind that position come, without it those
        behind the last one handled by this object. A position that the launcher does not know is
        ignored. Raises `LauncherUnreachable` when the stream breaks: call it again.
        """

    async def close(self) -> None: ...


async def stop_all(launcher: Launcher, reason: str, grace: float | None = None) -> int:
    """Ends all workers at once; returns how many there were. Raises as `list` and `stop` do."""
    running = await launcher.list()
    await asyncio.gather(*(launcher.stop(task.task_id, reason, grace=grace) for task in running))
    return len(running)
