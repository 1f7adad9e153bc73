"""Sends a runner's events to a collector, beside the log.

The inputs `tcp` and `unix` of Filebeat, Vector and Fluent Bit take JSON lines as they are. Sending never
waits and never repeats: up to `MAX_BUFFERED` bytes wait in memory, then the oldest lines are dropped. The log
has all of them. A connection that takes nothing is closed after a while: TCP would notice a vanished peer
only after 15 minutes (tcp_retries2).
"""

import ipaddress
import socket
import time
from collections import deque
from collections.abc import Sequence
from urllib.parse import urlsplit

from worker_runtime.process.clock import Backoff
from worker_runtime.process.log import Log
from worker_runtime.protocol.errors import BerthError

#: Bytes of lines that wait for the collector.
MAX_BUFFERED = 1 << 20
#: Seconds that a connection may take to be made.
CONNECT_LIMIT = 5.0
#: Seconds in which a connection has to accept something while lines wait.
STALL_LIMIT = 30.0
#: Seconds until the next try while the collector accepts nothing.
_POLL_INTERVAL = 0.05
#: Seconds between two tries when the runner ends, and how long it goes on.
_CLOSE_POLL_INTERVAL = 0.01
_CLOSE_LIMIT = 1.0
#: Lines of one write.
_BATCH = 64


class BadEventSink(BerthError, code="BAD_SINK"):
    """The address of the collector cannot be used."""


def parse_sink_address(url: str) -> tuple[socket.AddressFamily, str | tuple[str, int]]:
    """`tcp://127.0.0.1:9000`, `tcp://[::1]:9000` or `unix:///run/filebeat.sock`; raises `BadEventSink`.

    Host names are refused: resolving one can take longer than a lease.
    """
    parts = urlsplit(url)
    if parts.scheme == "unix" and parts.path.startswith("/") and not parts.netloc:
        return socket.AF_UNIX, parts.path
    if parts.scheme != "tcp" or parts.path:
        raise BadEventSink("it is tcp://ADDRESS:PORT or unix:///PATH")
    try:
        host, port = ipaddress.ip_address(parts.hostname or ""), parts.port
    except ValueError:
        raise BadEventSink("it needs an IP address and a port: no name") from None
    if not port:
        raise BadEventSink("it needs a port")
    return socket.AF_INET if host.version == 4 else socket.AF_INET6, (str(host), port)


class EventSink:
    """One connection to a collector. Never raises after its start."""

    def __init__(self, url: str, log: Log) -> None:
        self._family, self._address = parse_sink_address(url)
        self._log = log
        self._lines: deque[bytes] = deque()
        self._size = 0
        #: Bytes of the first line that have gone out on this connection.
        self._sent = 0
        self._socket: socket.socket | None = None
        #: Until when the connection has to accept something (monotonic seconds), and the reason to give if it
        #: does not; None: it has accepted everything.
        self._deadline: tuple[float, str] | None = None
        self._backoff = Backoff(0.25, 10.0)
        #: Lines dropped since the collector last accepted one.
        self._dropped = 0
        #: The log says already that nothing can be sent.
        self._outage_logged = False

    def send(self, lines: Sequence[bytes]) -> None:
        """Queues whole lines and sends what can be sent at once."""
        self._lines.extend(lines)
        self._size += sum(map(len, lines))
        oldest = 1 if self._sent else 0  # a line that is partly sent stays
        while self._size > MAX_BUFFERED and len(self._lines) > oldest:
            self._size -= len(self._lines[oldest])
            del self._lines[oldest]
            self._dropped += 1
        self.run_due()

    def seconds_until_due(self) -> float:
        """Seconds until `run_due` has something to do."""
        if not self._lines:
            return 3600.0
        return self._backoff.left() if self._socket is None else _POLL_INTERVAL

    def run_due(self) -> None:
        """Connects and sends, as far as possible without waiting."""
        if not self._lines:
            return
        if self._socket is not None and self._is_closed(self._socket):
            self._drop("the collector has closed the connection")
        if self._socket is None:
            if not self._backoff.due():
                return
            self._connect()
        self._send_lines()

    def close(self) -> None:
        """Sends the remaining lines, for at most a second."""
        until = time.monotonic() + _CLOSE_LIMIT
        while self._lines and time.monotonic() < until:
            self.run_due()
            if self._lines:
                time.sleep(_CLOSE_POLL_INTERVAL)
        if self._lines or self._dropped:
            self._log.warning("job_events_left_out", lines=len(self._lines) + self._dropped)
        if self._socket is not None:
            self._socket.close()

    def _connect(self) -> None:
        link = socket.socket(self._family, socket.SOCK_STREAM)
        link.setblocking(False)
        self._socket, self._deadline = link, (time.monotonic() + CONNECT_LIMIT, "no connection in time")
        try:
            link.connect(self._address)
        except BlockingIOError:
            return  # under way
        except OSError as error:
            self._drop(type(error).__name__)

    def _send_lines(self) -> None:
        while self._lines and self._socket is not None:
            batch = b"".join(self._lines[number] for number in range(min(_BATCH, len(self._lines))))
            try:
                taken = self._socket.send(memoryview(batch)[self._sent :], socket.MSG_NOSIGNAL)
            except BlockingIOError:
                self._check_stall()
                return
            except OSError as error:
                self._drop(type(error).__name__)
                return
            self._count_sent(taken)

    def _check_stall(self) -> None:
        now = time.monotonic()
        if self._deadline is None:
            self._deadline = now + STALL_LIMIT, "the collector takes nothing"
        elif now > self._deadline[0]:
            self._drop(self._deadline[1])

    def _count_sent(self, taken: int) -> None:
        self._deadline = None
        self._outage_logged = False
        self._backoff.reset()
        self._sent += taken
        while self._lines and self._sent >= len(self._lines[0]):
            self._sent -= len(self._lines[0])
            self._size -= len(self._lines.popleft())
        if self._dropped:
            self._log.warning("job_events_left_out", lines=self._dropped)
            self._dropped = 0

    def _is_closed(self, link: socket.socket) -> bool:
        """Whether the collector has closed the connection: the first write after it would not fail."""
        try:
            return not link.recv(4096)
        except BlockingIOError:
            return False
        except OSError:
            return True

    def _drop(self, why: str) -> None:
        if self._socket is not None:
            self._socket.close()
        if not self._outage_logged:
            self._log.warning("job_events_unsent", reason=why, waiting=len(self._lines))
        self._outage_logged = True
        self._socket, self._sent = None, 0
        self._backoff.failed()
