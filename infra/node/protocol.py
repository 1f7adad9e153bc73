"""The node's protocol: JSON lines over a Unix socket,
one reply a request, in order; and its errors.

After `WatchExits` the node sends `TaskEnded` on that connection, and a `Beat` every
`BEAT_INTERVAL_S`: its client can tell a dead node from one with nothing to say. `NodeRefused`
answers what is no request.
"""

import msgspec

from infra.worker_task import LaunchSpec, Task, TaskExit
from worker_runtime.protocol.errors import BerthError


class NodeBusy(BerthError, code="NODE_BUSY"):
    """Another node serves this socket or owns this state folder."""


class NodeSocketInvalid(BerthError, code="NODE_SOCKET_INVALID"):
    """The node's socket path cannot be used."""


class NodeStateUnreadable(BerthError, code="NODE_STATE_UNREADABLE"):
    """The node's register cannot be read: it is unknown which processes are its workers."""


#: Bytes of a request's line; a launch takes about 1 KiB.
MAX_LINE_BYTES = 128 * 1024
#: Bytes of a reply's line; a list takes about 140 for each worker.
MAX_REPLY_BYTES = 16 * 1024 * 1024
#: Seconds between two signs of life on a connection that watches.
BEAT_INTERVAL_S = 5.0
#: Seconds a node may take to confirm an end after SIGKILL.
KILL_CONFIRM_TIMEOUT_S = 10.0


class LaunchTask(LaunchSpec, frozen=True, kw_only=True, tag_field="op", tag="launch"):
    """Starts one worker, or returns the one that this token has started.
    A node has no image or CPU units."""

    token: str


class StopTask(msgspec.Struct, frozen=True, kw_only=True, tag_field="op", tag="stop"):
    """Ends one worker; the reply comes once it has ended.
    `grace`: seconds; None: the worker's own."""

    task_id: str
    reason: str
    grace: float | None = None


class StopAllTasks(msgspec.Struct, frozen=True, kw_only=True, tag_field="op", tag="stop_all"):
    """Ends all workers of this node."""

    reason: str
    grace: float | None = None


class ListTasks(msgspec.Struct, frozen=True, kw_only=True, tag_field="op", tag="list"):
    """Asks for all running workers."""


class CheckTask(msgspec.Struct, frozen=True, kw_only=True, tag_field="op", tag="check"):
    """Asks whether one task runs. Nodes of 0.1 do not know this request."""

    task_id: str


class FindTasks(msgspec.Struct, frozen=True, kw_only=True, tag_field="op", tag="find"):
    """Asks for the running tasks of one worker. Nodes of 0.1 do not know this request."""

    worker_id: str


class WatchExits(msgspec.Struct, frozen=True, kw_only=True, tag_field="op", tag="watch"):
    """Asks for all exits after number `after` of the log `log`, and for those to come.

    Another log than the node's own was lost with its state folder:
    the node sends all exits it has kept.
    """

    log: str = ""
    after: int = 0


class PingNode(msgspec.Struct, frozen=True, kw_only=True, tag_field="op", tag="ping"):
    """Asks for the node's status."""


NodeRequest = (
    LaunchTask | StopTask | StopAllTasks | ListTasks | CheckTask | FindTasks | WatchExits | PingNode
)


class TaskLaunched(msgspec.Struct, frozen=True, kw_only=True, tag_field="kind", tag="launched"):
    task: Task


class TasksStopped(msgspec.Struct, frozen=True, kw_only=True, tag_field="kind", tag="stopped"):
    #: The number of workers that this request has stopped; 0 for an unknown task.
    count: int


class TaskList(msgspec.Struct, frozen=True, kw_only=True, tag_field="kind", tag="tasks"):
    tasks: list[Task]


class TaskChecked(msgspec.Struct, frozen=True, kw_only=True, tag_field="kind", tag="checked"):
    #: None: what launches the tasks does not know this one.
    running: bool | None


class NodeStatus(msgspec.Struct, frozen=True, kw_only=True, tag_field="kind", tag="pong"):
    pid: int
    #: Identifier of this node's log of exits; a new state folder has a new one.
    log: str
    workers: int
    #: Memory limits: `cgroup v1`, `cgroup v2` or `none`.
    limits: str


class TaskEnded(msgspec.Struct, frozen=True, kw_only=True, tag_field="kind", tag="ended"):
    log: str
    number: int
    exit: TaskExit


class Beat(msgspec.Struct, frozen=True, kw_only=True, tag_field="kind", tag="beat"):
    """The node is alive and nothing has ended."""

    #: Errors of the node since the last beat, which one client hears: a key, a sentence, how often.
    errors: list[tuple[str, str, int]] = []


class NodeRefused(msgspec.Struct, frozen=True, kw_only=True, tag_field="kind", tag="refused"):
    """The request failed, with a code of `worker_runtime.protocol.errors` or the launcher port."""

    code: str
    detail: str


NodeReply = (
    TaskLaunched
    | TasksStopped
    | TaskList
    | TaskChecked
    | NodeStatus
    | TaskEnded
    | Beat
    | NodeRefused
)
