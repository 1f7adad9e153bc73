"""What can go wrong in a node, with stable codes."""

from __future__ import annotations

from worker_runtime.protocol.errors import BerthError


class NodeBusy(BerthError):
    """Another node serves this socket or owns this state folder."""

    code = "NODE_BUSY"


class NodeSocketInvalid(BerthError):
    """The node's socket path cannot be used."""

    code = "NODE_SOCKET_INVALID"


class NodeStateUnreadable(BerthError):
    """The node's register cannot be read: its workers cannot be told from strangers."""

    code = "NODE_STATE_UNREADABLE"
