"""A worker as a container: the document that creates it,
and how to read what the daemon says of it."""

import math
from datetime import datetime
from hashlib import blake2b
from typing import Any

from infra.worker_task import LaunchFailed, LaunchSpec, Task, check_worker_id, stop_grace

Document = dict[str, Any]

#: Labels. They cannot be changed later, and `docker inspect` shows them: none holds a secret.
FLEET = "berth.fleet"
WORKER = "berth.worker"
POOL = "berth.pool"
VERSION = "berth.version"
LAUNCHED_AT = "berth.launched_at"
GRACE = "berth.grace"

#: The user inside the container, made by `infra/images/worker.Dockerfile`.
USER = "10002:10002"
#: Processes of a worker: zygote, supervisor, session,
#: a broker SDK's threads, jobs; a fork bomb ends here.
MAX_PIDS = 256
#: Its two writable folders, /tmp and /dev/shm, are in memory that counts as its own. In the second
#: the SDK's log and contracts take about 20 MiB (`worker_runtime/brokers/shioaji/files.py`).
TMPFS, SHM_BYTES = "rw,nosuid,nodev,noexec,size=64m,mode=1777", 64 * 1024 * 1024
#: Limits what a worker may write before its oldest lines go. It continues when the daemon does not
#: take its lines.
LOG = {
    "Type": "json-file",
    "Config": {"max-size": "4m", "max-file": "2", "mode": "non-blocking", "max-buffer-size": "1m"},
}


def container_name(fleet: str, token: str) -> str:
    """Returns the name that a token gives: always the same, and the daemon lets no name exist
    twice."""
    digest = blake2b(token.encode(), key=fleet.encode()[:64], digest_size=10).hexdigest()
    return f"berth-{digest}"


def container_document(
    spec: LaunchSpec, *, image: str, network: str, fleet: str, now: float
) -> Document:
    """Returns the document that creates a worker's container. Raises `LaunchFailed` for an
    impossible spec."""
    config = spec.config
    check_worker_id(config.worker_id)
    grace = stop_grace(config.shutdown_timeout)
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
            GRACE: repr(grace),
        },
        "User": USER,
        # The launch document comes on standard input,
        # which ends with the connection that brings it.
        "OpenStdin": True,
        "StdinOnce": True,
        "AttachStdin": True,
        "AttachStdout": False,
        "AttachStderr": False,
        "Tty": False,
        "StopSignal": "SIGTERM",
        # For a stop that is not ours: `docker stop`, the end of the daemon.
        "StopTimeout": math.ceil(grace),
        "HostConfig": {
            "CpuShares": spec.cpu_units,
            "Memory": spec.memory_hard,
            "MemorySwap": spec.memory_hard,  # memory and swap together: none
            "MemoryReservation": spec.memory_soft,
            "OomKillDisable": False,
            "PidsLimit": MAX_PIDS,
            "Init": True,
            "ReadonlyRootfs": True,
            "Tmpfs": {"/tmp": TMPFS},  # noqa: S108 - a folder of the container
            "ShmSize": SHM_BYTES,
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
    """Returns the task that one of our containers is."""
    return Task(
        task_id=container_id,
        worker_id=labels.get(WORKER, ""),
        pool=labels.get(POOL, ""),
        version=labels.get(VERSION, ""),
        launched_at=float(labels.get(LAUNCHED_AT, 0)),
    )


def labels_of(inspected: Document) -> dict[str, str]:
    return dict(inspected["Config"]["Labels"] or {})


def finished_at(inspected: Document) -> float:
    """Returns when a container ended, in Unix seconds."""
    return datetime.fromisoformat(inspected["State"]["FinishedAt"]).timestamp()
