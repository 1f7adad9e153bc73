"""The launcher port: where user workers run.

Adapters: the local process launcher (through `berth node`), Docker, ECS. One test suite runs against all
of them (`tests/contract/launchers`).
"""

from __future__ import annotations

from collections.abc import AsyncIterator
from dataclasses import dataclass, field
from typing import Protocol

from worker_runtime.protocol.errors import BerthError
from worker_runtime.protocol.launch import WorkerConfig

#: Bytes. Soft: what a host reserves for a worker. Hard: where only that worker is killed (R1).
MEMORY_SOFT = 384 * 1024 * 1024
MEMORY_HARD = 1024 * 1024 * 1024
#: CPU units of 1/1024 vCPU.
CPU_UNITS = 64


class LaunchFailed(BerthError):
    """The worker could not be launched."""

    code = "LAUNCH_FAILED"
    retryable = True


class LauncherUnreachable(BerthError):
    """The launcher does not answer: nothing is known about its workers."""

    code = "LAUNCHER_UNREACHABLE"
    retryable = True


class StopFailed(BerthError):
    """The worker was killed, but its end could not be confirmed: it may still run."""

    code = "STOP_FAILED"
    retryable = True


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


@dataclass(frozen=True, kw_only=True)
class Task:
    """A running worker, as its launcher sees it."""

    task_id: str
    worker_id: str
    pool: str
    version: str
    #: Unix seconds.
    launched_at: float


@dataclass(frozen=True, kw_only=True)
class TaskExit:
    """The end of a worker. `exit_code` is None when nobody could see it (adopted process, lost host)."""

    task_id: str
    worker_id: str
    exit_code: int | None
    reason: str
    #: Unix seconds.
    at: float
    detail: dict[str, str] = field(default_factory=dict)


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
