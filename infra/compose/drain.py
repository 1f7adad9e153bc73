"""Ends all workers of a node gracefully: `python -m infra.compose.drain SOCKET`.

A node that stops leaves its workers running, for the next node to adopt. In a container there is no next
one: when its first process ends, the kernel kills the rest in the middle of their orders. So compose runs
this before it stops the container.
"""

from __future__ import annotations

import socket
import sys

from infra.node.protocol import (
    GRACE_MAX,
    KILL_CONFIRM,
    MAX_LINE,
    NodeRefused,
    NodeReply,
    StopAllTasks,
    TasksStopped,
)
from worker_runtime.protocol.errors import BerthError
from worker_runtime.protocol.messages import decode, encode


def drain(path: str) -> int:
    """Returns how many workers were stopped. Raises OSError, or `BerthError` if the node refuses."""
    with socket.socket(socket.AF_UNIX) as link:
        link.settimeout(GRACE_MAX + KILL_CONFIRM)
        link.connect(path)
        link.sendall(encode(StopAllTasks(reason="the node's container stops")) + b"\n")
        with link.makefile("rb") as lines:
            reply: NodeReply = decode(lines.readline(MAX_LINE), NodeReply)
    if isinstance(reply, TasksStopped):
        return reply.count
    raise BerthError(f"{reply.code}: {reply.detail}" if isinstance(reply, NodeRefused) else "an odd answer")


def main(arguments: list[str]) -> int:
    try:
        count = drain(arguments[0])
    except (OSError, BerthError) as error:
        sys.stderr.write(f"drain {arguments[0]}: {error}\n")
        return 1
    sys.stdout.write(f"{count} workers stopped\n")
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
