"""Has the kernel watch a TCP connection whose other end may vanish without a word.

A firewall, a balancer or a host that lost its power drops packets and closes nothing. Without
these options the kernel sends the same bytes again for 15 minutes, and never asks after a
connection that only receives.
"""

import socket

#: Seconds without traffic after which the kernel asks the peer, and between two questions.
KEEPALIVE_IDLE_S, KEEPALIVE_INTERVAL_S = 5, 1
#: Unanswered questions after which the connection is lost.
KEEPALIVE_PROBES = 3
#: Milliseconds for which sent bytes may stay unacknowledged. The peer's kernel acknowledges them
#: also while its processes stand still; ours sends them again after 0.2, 0.6 and 1.4 s.
USER_TIMEOUT_MS = 1500


def watch_peer(link: socket.socket | None) -> None:
    """Has the kernel end this connection soon after its peer has vanished;
    does nothing for other sockets."""
    if link is None or link.family not in (socket.AF_INET, socket.AF_INET6):
        return
    link.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
    link.setsockopt(socket.IPPROTO_TCP, socket.TCP_KEEPIDLE, KEEPALIVE_IDLE_S)
    link.setsockopt(socket.IPPROTO_TCP, socket.TCP_KEEPINTVL, KEEPALIVE_INTERVAL_S)
    link.setsockopt(socket.IPPROTO_TCP, socket.TCP_KEEPCNT, KEEPALIVE_PROBES)
    link.setsockopt(socket.IPPROTO_TCP, socket.TCP_USER_TIMEOUT, USER_TIMEOUT_MS)


#: The same for redis-py, as its argument `socket_keepalive_options`.
KEEPALIVE_OPTIONS = {
    socket.TCP_KEEPIDLE: KEEPALIVE_IDLE_S,
    socket.TCP_KEEPINTVL: KEEPALIVE_INTERVAL_S,
    socket.TCP_KEEPCNT: KEEPALIVE_PROBES,
    socket.TCP_USER_TIMEOUT: USER_TIMEOUT_MS,
}
