"""The node's protocol: JSON lines over a Unix socket, one reply a request, in order.

`Watch` takes its connection over: from then on the node sends `Ended` and, so that a silent node can be
told from a quiet one, `Beat` every `BEAT_PERIOD`. Anything that is no request is answered by `Refused`.
"""

from __future__ import annotations

import msgspec

from infra.launchers.port import MEMORY_HARD, MEMORY_SOFT, Task, TaskExit
from worker_runtime.protocol.launch import WorkerConfig

#: Bytes of a request's line; a launch takes about 1 KiB.
MAX_LINE = 128 * 1024
#: Bytes of a reply's line; a list takes about 140 for each worker.
MAX_REPLY = 16 * 1024 * 1024
#: Seconds between two signs of life on a connection that watches.
BEAT_PERIOD = 5.0
#: Seconds a node may take to confirm an end after SIGKILL.
KILL_CONFIRM = 10.0
#: Seconds; no worker gets more time to end than this.
GRACE_MAX = 60.0


class Launch(msgspec.Struct, frozen=True, kw_only=True, tag_field="op", tag="launch"):
    """Starts one worker, or returns the one that this token has already started. Memory is in bytes."""

    token: str
    config: WorkerConfig
    memory_soft: int = MEMORY_SOFT
    memory_hard: int = MEMORY_HARD


class Stop(msgspec.Struct, frozen=True, kw_only=True, tag_field="op", tag="stop"):
    """Ends one worker; answered once it has ended. `grace` is seconds; None is the worker's own."""

    task_id: str
    reason: str
    grace: float | None = None


class StopAll(msgspec.Struct, frozen=True, kw_only=True, tag_field="op", tag="stop_all"):
    """Ends all workers of this node."""

    reason: str
    grace: float | None = None


class ListTasks(msgspec.Struct, frozen=True, kw_only=True, tag_field="op", tag="list"):
    """Asks for all running workers."""


class Watch(msgspec.Struct, frozen=True, kw_only=True, tag_field="op", tag="watch"):
    """Asks for all ends after number `after` of the log `log`, and for those to come.

    A log other than the node's own was lost with its state folder: all ends kept are sent.
    """

    log: str = ""
    after: int = 0


class Ping(msgspec.Struct, frozen=True, kw_only=True, tag_field="op", tag="ping"):
    """Asks who is there."""


Request = Launch | Stop | StopAll | ListTasks | Watch | Ping


class Launched(msgspec.Struct, frozen=True, kw_only=True, tag_field="kind", tag="launched"):
    task: Task


class Stopped(msgspec.Struct, frozen=True, kw_only=True, tag_field="kind", tag="stopped"):
    #: How many workers this request has stopped; 0 for an unknown task.
    count: int


class Tasks(msgspec.Struct, frozen=True, kw_only=True, tag_field="kind", tag="tasks"):
    tasks: list[Task]


class Pong(msgspec.Struct, frozen=True, kw_only=True, tag_field="kind", tag="pong"):
    pid: int
    #: Identifier of this node's log of ends; a new state folder has a new one.
    log: str
    workers: int
    #: Memory limits: `cgroup v1`, `cgroup v2` or `none`.
    limits: str


class Ended(msgspec.Struct, frozen=True, kw_only=True, tag_field="kind", tag="ended"):
    log: str
    number: int
    exit: TaskExit


class Beat(msgspec.Struct, frozen=True, kw_only=True, tag_field="kind", tag="beat"):
    """The node is alive and nothing has ended."""


class Refused(msgspec.Struct, frozen=True, kw_only=True, tag_field="kind", tag="refused"):
    """The request failed, with a code of `worker_runtime.protocol.errors` or the launcher port."""

    code: str
    detail: str


Reply = Launched | Stopped | Tasks | Pong | Ended | Beat | Refused
