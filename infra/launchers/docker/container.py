"""A worker as a container: how it is made, and what the daemon's words about it mean."""

from __future__ import annotations

import math
import re
import signal
from datetime import datetime
from hashlib import blake2b
from typing import Any

from infra.launchers.port import LaunchFailed, LaunchSpec, Task, TaskExit

Document = dict[str, Any]

#: Labels. They cannot be changed afterwards, and `docker inspect` shows them: no secret is among them.
FLEET = "berth.fleet"
WORKER = "berth.worker"
POOL = "berth.pool"
VERSION = "berth.version"
LAUNCHED_AT = "berth.launched_at"
GRACE = "berth.grace"

#: Who the worker is inside: the user that `infra/images/worker.Dockerfile` makes.
USER = "10002:10002"
#: Processes of a worker: zygote, supervisor, session, a broker SDK's threads, jobs; a fork bomb ends here.
PIDS = 256
#: Its only writable folder, in memory that counts as its own. The SDK's log and cache take about 20 MiB.
TMPFS = "rw,nosuid,nodev,noexec,size=64m,mode=1777"
#: What a worker may write before its oldest lines go.
LOG = {"Type": "json-file", "Config": {"max-size": "4m", "max-file": "2"}}
#: Seconds that a worker gets on top of its own shutdown time before it is killed; no worker gets more than
#: `GRACE_MAX` altogether.
GRACE_EXTRA = 3.0
GRACE_MAX = 60.0

_WORKER_ID = re.compile(r"[A-Za-z0-9][A-Za-z0-9._-]{0,99}")
#: Nanoseconds are more than Python's dates take.
_FRACTION = re.compile(r"\.(\d{6})\d*")


def container_name(fleet: str, token: str) -> str:
    """The container's name: the same token, the same container. The daemon lets no name exist twice."""
    digest = blake2b(token.encode(), key=fleet.encode()[:64], digest_size=10).hexdigest()
    return f"berth-{digest}"


def container_document(spec: LaunchSpec, *, image: str, network: str, fleet: str, now: float) -> Document:
    """What the daemon is asked to create. Raises `LaunchFailed` for a spec that no container can be."""
    config = spec.config
    if not _WORKER_ID.fullmatch(config.worker_id):
        raise LaunchFailed("a worker id is 1 to 100 letters, digits, dots, dashes and underscores")
    if spec.memory_hard <= 0 or spec.cpu_units <= 0:
        raise LaunchFailed("a launch needs a memory limit and CPU units above zero")
    return {
        "Image": spec.image or image,
        # The worker's id as an argument: `ps` on the host shows who is who.
        "Cmd": [config.worker_id],
        "Labels": {
            FLEET: fleet,
            WORKER: config.worker_id,
            POOL: config.pool,
            VERSION: config.version,
            LAUNCHED_AT: repr(now),
            GRACE: repr(min(config.shutdown_timeout + GRACE_EXTRA, GRACE_MAX)),
        },
        "User": USER,
        # The launch document comes on standard input, which ends with the connection that brings it.
        "OpenStdin": True,
        "StdinOnce": True,
        "AttachStdin": True,
        "AttachStdout": False,
        "AttachStderr": False,
        "Tty": False,
        "StopSignal": "SIGTERM",
        # For those who stop it by other means than ours (`docker stop`, the end of the daemon).
        "StopTimeout": math.ceil(min(config.shutdown_timeout + GRACE_EXTRA, GRACE_MAX)),
        "HostConfig": {
            "CpuShares": spec.cpu_units,
            "Memory": spec.memory_hard,
            "MemorySwap": spec.memory_hard,  # memory and swap together: none
            "MemoryReservation": spec.memory_soft,
            "OomKillDisable": False,
            "PidsLimit": PIDS,
            "Init": True,
            "ReadonlyRootfs": True,
            "Tmpfs": {"/tmp": TMPFS},  # noqa: S108 - a folder of the container
            "ShmSize": 16 * 1024 * 1024,
            "CapDrop": ["ALL"],
            "SecurityOpt": ["no-new-privileges:true"],
            "Ulimits": [{"Name": "core", "Soft": 0, "Hard": 0}],
            "NetworkMode": network,
            "IpcMode": "private",
            "RestartPolicy": {"Name": "no"},
            "LogConfig": LOG,
        },
    }


def task_of(container_id: str, labels: dict[str, str]) -> Task:
    """The task that a container of ours is."""
    return Task(
        task_id=container_id,
        worker_id=labels.get(WORKER, ""),
        pool=labels.get(POOL, ""),
        version=labels.get(VERSION, ""),
        launched_at=float(labels.get(LAUNCHED_AT, 0)),
    )


def labels_of(inspected: Document) -> dict[str, str]:
    return dict(inspected["Config"]["Labels"] or {})


def exit_code(status: int) -> int:
    """As Python tells it: negative for a signal. An init process passes a signal on as 128 and its number."""
    return 128 - status if 128 < status <= 128 + 64 else status


def finished_at(inspected: Document) -> float:
    """Unix seconds."""
    text = _FRACTION.sub(r".\1", inspected["State"]["FinishedAt"])
    return datetime.fromisoformat(text.replace("Z", "+00:00")).timestamp()


def exit_of_container(
    container_id: str,
    labels: dict[str, str],
    *,
    code: int,
    at: float,
    oom_killed: bool,
    asked: bool,
    stop_reason: str | None = None,
    forced: bool = False,
) -> TaskExit:
    """The end of a worker. `asked`: somebody stopped it through the daemon, us with a reason or a stranger.

    The reasons are those of the node (`infra/node/exits.py`).
    """
    detail: dict[str, str] = {}
    if code < 0:
        detail["signal"] = _signal_name(-code)
    if oom_killed:
        detail["oom_killed"] = "true"
    if stop_reason is not None:
        detail["stop_reason"] = stop_reason
    if forced:
        detail["forced"] = "true"
    if asked:
        reason = "stopped"
    elif oom_killed and code != 0:
        reason = "oom_killed"
    else:
        reason = "killed" if code < 0 else "exited"
    return TaskExit(
        task_id=container_id,
        worker_id=labels.get(WORKER, ""),
        exit_code=code,
        reason=reason,
        at=at,
        detail=detail,
    )


def _signal_name(number: int) -> str:
    try:
        return signal.Signals(number).name
    except ValueError:  # a real-time signal
        return f"SIG{number}"
