"""A client of the node for callers without an event loop: the local stack and the drain of a container."""

from __future__ import annotations

import socket
from pathlib import Path

from infra.node.address import reachable
from infra.node.protocol import (
    KILL_CONFIRM,
    MAX_REPLY,
    ListTasks,
    NodeRefused,
    NodeReply,
    NodeRequest,
    StopAllTasks,
    TaskList,
    TasksStopped,
)
from infra.worker_task import GRACE_MAX, Task
from worker_runtime.protocol.errors import BerthError
from worker_runtime.protocol.messages import decode, encode


class NodeSilent(BerthError):
    """The node does not answer."""

    code = "NODE_SILENT"
    retryable = True


def ask_node(path: Path, request: NodeRequest, timeout: float = 10.0) -> NodeReply:
    """One request, one reply, within `timeout` seconds. Raises `NodeSilent`."""
    try:
        with reachable(path) as short, socket.socket(socket.AF_UNIX) as link:
            link.settimeout(timeout)
            link.connect(short)
            link.sendall(encode(request) + b"\n")
            with link.makefile("rb") as lines:
                return decode(lines.readline(MAX_REPLY), NodeReply, limit=MAX_REPLY)
    except OSError as error:
        raise NodeSilent(f"node at {path}: {error}") from None


def list_tasks(path: Path) -> list[Task]:
    """The node's workers that run now. Raises `NodeSilent`."""
    reply = ask_node(path, ListTasks())
    if not isinstance(reply, TaskList):
        raise _refusal(reply)
    return reply.tasks


def stop_all_tasks(path: Path, reason: str, grace: float | None = None) -> int:
    """Ends all workers of the node, each within its grace period; returns how many there were.

    Raises `NodeSilent`, also when an end could not be confirmed.
    """
    reply = ask_node(path, StopAllTasks(reason=reason, grace=grace), timeout=GRACE_MAX + KILL_CONFIRM)
    if not isinstance(reply, TasksStopped):
        raise _refusal(reply)
    return reply.count


def _refusal(reply: NodeReply) -> NodeSilent:
    if isinstance(reply, NodeRefused):
        return NodeSilent(f"the node refused: {reply.code}: {reply.detail}")
    return NodeSilent(f"the node answered {type(reply).__name__}")
