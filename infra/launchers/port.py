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
    """One worker to be. `config.task_id` is filled in by the launcher."""

    config: WorkerConfig
    #: What is run, in the platform's own words (a container image, a task definition); empty: what the
    #: launcher was configured with. The process launcher has only one.
    image: str = ""
    memory_soft: int = MEMORY_SOFT
    memory_hard: int = MEMORY_HARD
    cpu_units: int = CPU_UNITS


class Launcher(Protocol):
    #: Seconds by which `list` may be behind what was launched or stopped; 0.0: it never is.
    list_lag: float

    async def launch(self, spec: LaunchSpec, token: str) -> Task:
        """Starts one worker. The same `token` always gives the same task, also after a restart.

        Raises `LaunchFailed` or `LauncherUnreachable`.
        """
        ...

    async def stop(self, task_id: str, reason: str, *, grace: float | None = None) -> None:
        """Asks the worker to end and kills it after `grace` seconds (None: the time its config gives it).

        Returns when the task is confirmed to have stopped; unknown tasks are no error. Raises `StopFailed`
        when it has not stopped after the kill, `LauncherUnreachable` when nobody knows; both may be called
        again.
        """
        ...

    async def list(self) -> list[Task]: ...

    def exits(self, after: str = "") -> AsyncIterator[TaskExit]:
        """Ends of workers, as they happen; those missed while nobody listened come first.

        The position of an end stands in its `detail["position"]`; with `after`, only those behind that one
        come. A position that the launcher does not know is none. Raises `LauncherUnreachable` when the
        stream breaks: call it again.
        """
        ...

    async def close(self) -> None: ...
