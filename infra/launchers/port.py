"""The launcher port: where user workers run.

Adapters: the local process launcher (through `berth node`), Docker, ECS. One test suite runs against all
of them (`tests/contract/launchers`).
"""

from __future__ import annotations

from collections.abc import AsyncIterator
from dataclasses import dataclass
from typing import Protocol

from infra.worker_task import CPU_UNITS, MEMORY_HARD, MEMORY_SOFT, Task, TaskExit
from worker_runtime.protocol.launch import WorkerConfig


@dataclass(frozen=True, kw_only=True)
class LaunchSpec:
    """A worker to launch. The launcher fills in `config.task_id`."""

    config: WorkerConfig
    #: What to run, in the platform's terms (a container image, a task definition); empty: what the launcher
    #: was configured with. The process launcher has only one.
    image: str = ""
    memory_soft: int = MEMORY_SOFT
    memory_hard: int = MEMORY_HARD
    cpu_units: int = CPU_UNITS


class Launcher(Protocol):
    """A call whose answer is lost raises `LauncherUnreachable`, and may have worked: call it again."""

    #: Seconds by which `list` may be behind what was launched or stopped; 0.0: it never is.
    list_lag: float

    async def launch(self, spec: LaunchSpec, token: str) -> Task:
        """Starts one worker. The same `token` always gives the same task, even after a restart.

        Raises `LaunchFailed` or `LauncherUnreachable`.
        """
        ...

    async def stop(self, task_id: str, reason: str, *, grace: float | None = None) -> None:
        """Asks the worker to end, and kills it after `grace` seconds (None: the time its config gives it).

        Returns when the task is confirmed to have stopped; an unknown task is no error. Raises `StopFailed`
        when it still runs after the kill, `LauncherUnreachable` when nobody knows. Both may be retried.
        """
        ...

    async def list(self) -> list[Task]: ...

    def exits(self, after: str = "") -> AsyncIterator[TaskExit]:
        """Exits of workers as they happen, at least once each; first those that nobody listened for.

        An exit counts as handled when the next one is asked for. Each has its position in
        `detail["position"]`: with `after`, only exits behind that position come, without it those behind the
        last one handled by this object. A position that the launcher does not know is ignored. Raises
        `LauncherUnreachable` when the stream breaks: call it again.
        """
        ...

    async def close(self) -> None: ...
