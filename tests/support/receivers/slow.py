"""Servers on this machine that are slow on purpose: they send a little now and then, without an
end."""

from __future__ import annotations

import socket
import socketserver
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress

#: Seconds between two pieces.
PAUSE_S = 0.1


class DrippingServer(socketserver.ThreadingTCPServer):
    """Sends `first`, then `again` every `PAUSE_S` seconds, for as long as the client listens."""

    daemon_threads = True
    block_on_close = False

    def __init__(
        self, first: bytes, again: bytes, reads: Callable[[socket.socket], object]
    ) -> None:
        super().__init__(("127.0.0.1", 0), _DrippingHandler)
        self.first, self.again, self.reads = first, again, reads
        self.stopping = threading.Event()
        #: Of this moment, of all, and the most at a time.
        self.open = self.connections = self.most_at_once = 0
        self._lock = threading.Lock()

    def count(self, by: int) -> None:
        with self._lock:
            self.open += by
            self.connections += max(0, by)
            self.most_at_once = max(self.most_at_once, self.open)

    @property
    def port(self) -> int:
        return int(self.server_address[1])


class _DrippingHandler(socketserver.BaseRequestHandler):
    server: DrippingServer

    def handle(self) -> None:
        self.server.count(1)
        with suppress(OSError):
            self.server.reads(self.request)
            self.request.sendall(self.server.first)
            while not self.server.stopping.wait(PAUSE_S) and not _is_closed(self.request):
                self.request.sendall(self.server.again)
        self.server.count(-1)


def _is_closed(link: socket.socket) -> bool:
    """Whether the client has hung up."""
    try:
        return link.recv(65536, socket.MSG_DONTWAIT) == b""
    except BlockingIOError:
        return False


@contextmanager
def dripping(
    first: bytes,
    again: bytes,
    reads: Callable[[socket.socket], object] = lambda link: link.recv(65536),
) -> Iterator[DrippingServer]:
    """`reads`: what is read before the first byte is sent; a request by default."""
    with DrippingServer(first, again, reads) as server:
        thread = threading.Thread(target=server.serve_forever, kwargs={"poll_interval": 0.01})
        thread.start()
        try:
            yield server
        finally:
            server.stopping.set()
            server.shutdown()
            thread.join()


def nothing(_link: socket.socket) -> None:
    """Reads nothing: the server speaks first."""
