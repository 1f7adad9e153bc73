"""How the end of a worker is told: one reason, and what is known beside it."""

from __future__ import annotations

import signal
import time

from infra.launchers.port import TaskExit
from infra.node.register import NodeEntry

#: Somebody asked for it.
STOPPED = "stopped"
#: It ended by itself; `exit_code` tells how.
EXITED = "exited"
#: A signal that did not come from the node.
KILLED = "killed"
#: The kernel killed it, because it was past its hard memory limit.
OOM_KILLED = "oom_killed"
#: It ended while no node was there to see how.
LOST = "lost"
#: Its host was restarted.
HOST_RESTARTED = "host_restarted"


def exit_of_entry(
    entry: NodeEntry,
    *,
    code: int | None,
    stop_reason: str | None = None,
    forced: bool = False,
    oom_kills: int = 0,
    unseen: bool = False,
    host_restarted: bool = False,
) -> TaskExit:
    """The end of `entry`, now. `code` is negative for a signal, None if nobody saw it."""
    detail: dict[str, str] = {}
    if code is not None and code < 0:
        detail["signal"] = _signal_name(-code)
    if oom_kills:
        detail |= {"oom_killed": "true", "oom_kills": str(oom_kills)}
    if stop_reason is not None:
        detail["stop_reason"] = stop_reason
    if forced:
        detail["forced"] = "true"
    if host_restarted:
        reason = HOST_RESTARTED
    elif stop_reason is not None:
        reason = STOPPED
    elif oom_kills and code != 0:
        reason = OOM_KILLED
    elif unseen:
        reason = LOST
    else:
        reason = KILLED if code is not None and code < 0 else EXITED
    return TaskExit(
        task_id=entry.task_id,
        worker_id=entry.worker_id,
        exit_code=code,
        reason=reason,
        at=time.time(),
        detail=detail,
    )


def _signal_name(number: int) -> str:
    try:
        return signal.Signals(number).name
    except ValueError:  # a real-time signal
        return f"SIG{number}"
