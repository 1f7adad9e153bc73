"""A worker as the platform that runs it sees it:
the running task, its end, its limits, and what can fail.

The launchers and the node both speak of workers in these terms.
"""

import re
import signal
from dataclasses import dataclass, field

import msgspec

from worker_runtime.protocol.errors import BerthError
from worker_runtime.protocol.launch import WorkerConfig

#: Bytes. Soft: what a host reserves for a worker. Hard: where only that worker is killed.
MEMORY_SOFT_BYTES = 384 * 1024 * 1024
MEMORY_HARD_BYTES = 1024 * 1024 * 1024
#: CPU units of 1/1024 vCPU.
CPU_UNITS = 64

#: Seconds that a worker gets on top of its own shutdown time before it is killed; no worker gets
#: more than `MAX_GRACE_S` altogether.
_EXTRA_GRACE_S = 3.0
MAX_GRACE_S = 60.0

#: Worker ids become file names, arguments and labels.
_WORKER_ID = re.compile(r"[A-Za-z0-9][A-Za-z0-9._-]{0,99}")

#: Why a worker ended. Somebody asked for it.
STOPPED = "stopped"
#: It ended by itself; `exit_code` says how.
EXITED = "exited"
#: A signal that did not come from its launcher.
KILLED = "killed"
#: The kernel killed it, because it was past its hard memory limit.
OOM_KILLED = "oom_killed"
#: Nobody saw how it ended.
LOST = "lost"
#: Its host was restarted.
HOST_RESTARTED = "host_restarted"
#: Its host went away.
HOST_LOST = "host_lost"
#: The platform could not start it.
FAILED_TO_START = "failed_to_start"


class LaunchFailed(BerthError, code="LAUNCH_FAILED", retryable=True):
    """The worker could not be launched."""


class LauncherUnreachable(BerthError, code="LAUNCHER_UNREACHABLE", retryable=True):
    """The launcher does not answer: nothing is known about its workers."""


class StopFailed(BerthError, code="STOP_FAILED", retryable=True):
    """The worker was killed, but its end could not be confirmed: it may still run."""


class LaunchSpec(msgspec.Struct, frozen=True, kw_only=True):
    """A worker to launch. The launcher fills in `config.task_id`. Memory is in bytes."""

    config: WorkerConfig
    #: The image to run, in the platform's terms (a container image, a task definition); empty: what
    #: the launcher was configured with. The process launcher has only one.
    image: str = ""
    memory_soft: int = MEMORY_SOFT_BYTES
    memory_hard: int = MEMORY_HARD_BYTES
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
    """The end of a worker. `exit_code` is None when nobody saw it; negative for a signal."""

    task_id: str
    worker_id: str
    exit_code: int | None
    reason: str
    #: Unix seconds.
    at: float
    detail: dict[str, str] = field(default_factory=dict)


def worker_exit(
    task_id: str,
    worker_id: str,
    *,
    code: int | None,
    at: float,
    reason: str = "",
    stopped: bool = False,
    stop_reason: str | None = None,
    forced: bool = False,
    oom_killed: bool = False,
    seen: bool = True,
    detail: dict[str, str] | None = None,
) -> TaskExit:
    """Returns the end of a worker with its one reason, and the facts next to it.

    `reason` is one that the platform knows for sure; else it follows from the rest. `stopped`:
    somebody asked for the end; `stop_reason` says why, `forced` that it took SIGKILL. `oom_killed`
    is the reason only when the worker did not end well: its child may have been killed and replaced
    before. `seen`: somebody watched.
    """
    if not reason:
        if stopped or stop_reason is not None:
            reason = STOPPED
        elif oom_killed and code != 0:
            reason = OOM_KILLED
        elif not seen:
            reason = LOST
        else:
            reason = KILLED if code is not None and code < 0 else EXITED
    facts = {
        "signal": signal_name(-code) if code is not None and code < 0 else "",
        "oom_killed": "true" if oom_killed else "",
        "forced": "true" if forced else "",
    }
    details = {name: value for name, value in facts.items() if value} | (detail or {})
    if stop_reason is not None:
        details["stop_reason"] = stop_reason
    return TaskExit(
        task_id=task_id, worker_id=worker_id, exit_code=code, reason=reason, at=at, detail=details
    )


def check_worker_id(worker_id: str) -> None:
    """Raises `LaunchFailed`."""
    if not _WORKER_ID.fullmatch(worker_id):
        raise LaunchFailed("a worker id is 1 to 100 letters, digits, dots, dashes and underscores")


def stop_grace(shutdown_timeout: float) -> float:
    """Returns the seconds from SIGTERM to SIGKILL for a worker with this shutdown time."""
    return min(shutdown_timeout + _EXTRA_GRACE_S, MAX_GRACE_S)


def signal_name(number: int) -> str:
    try:
        return signal.Signals(number).name
    except ValueError:  # a real-time signal
        return f"SIG{number}"


def signed_exit_code(status: int) -> int:
    """Returns a container's exit status with a signal as a negative number; there it is 128 and the
    number."""
    return 128 - status if 128 < status <= 128 + signal.NSIG else status
