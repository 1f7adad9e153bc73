"""The paper adapter's connection: one socket, one reader thread, calls that wait for the reply to their id.
id.

Three failures say what is known of a request: nothing of it left this process, the connection broke after
something may have left, or no answer came in time.
"""

from __future__ import annotations

import select
import socket
import threading
import time
from collections import OrderedDict
from collections.abc import Callable
from queue import Empty, SimpleQueue

import msgspec

from worker_runtime.brokers.port import OnOrderChanged
from worker_runtime.process.log import Log
from worker_runtime.protocol.exchange import (
    ClientRequest,
    ExchangeReply,
    OrderChanged,
    ServerMessage,
    SessionEnded,
)

#: Bytes. A day's list of 10,000 orders with fills takes about 6 MB; a longer line is no exchange of ours.
_MAX_LINE = 16 * 1024 * 1024
#: Ids of events and fills that are remembered, to drop repeats.
_REMEMBERED = 4096
#: Seconds to wait for the reader thread to end.
_READER_WAIT = 0.4

_decoder: msgspec.json.Decoder[ServerMessage] = msgspec.json.Decoder(ServerMessage)
_encoder = msgspec.json.Encoder()


class NothingSent(Exception):
    """Not one byte of the request left this process."""


class ConnectionLost(Exception):
    """The connection broke after the request may have left."""


class NoReply(Exception):
    """No reply came in time."""


class PaperConnection:
    """A connected socket; `on_order` is called from its reader thread."""

    def __init__(self, link: socket.socket, on_order: OnOrderChanged, log: Log) -> None:
        link.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        link.settimeout(None)
        self._socket = link
        self._on_order = on_order
        self._log = log
        self._sending = threading.Lock()
        self._next_id = 0
        self._waiting: dict[int, SimpleQueue[ExchangeReply | None]] = {}
        self._seen: OrderedDict[str, None] = OrderedDict()
        self.down_reason: str | None = None
        self._buffer = bytearray()
        self._reader = threading.Thread(target=self._read, name="paper-reader", daemon=True)
        self._reader.start()

    def call(self, make: Callable[[int], ClientRequest], deadline: float) -> ExchangeReply:
        """Sends what `make(id)` gives and waits for its reply until `deadline` (time.monotonic).

        Raises `NothingSent`, `ConnectionLost` or `NoReply`.
        """
        answer: SimpleQueue[ExchangeReply | None] = SimpleQueue()
        if not self._sending.acquire(timeout=max(0.0, deadline - time.monotonic())):
            raise NothingSent("another request is still being sent")
        try:
            self._next_id += 1
            number = self._next_id
            self._waiting[number] = answer
            # After the entry, so that a reader that ends now either sees the entry or is seen here.
            if self.down_reason is not None:
                raise NothingSent(self.down_reason)
            self._send(_encoder.encode(make(number)) + b"\n", deadline)
        except BaseException:
            self._waiting.pop(number, None)
            raise
        finally:
            self._sending.release()
        try:
            reply = answer.get(timeout=max(0.0, deadline - time.monotonic()))
        except Empty:
            if self._waiting.pop(number, None) is not None:
                raise NoReply("no answer in time") from None
            reply = answer.get()  # the reader took it just now, and is about to put it here
        if reply is None:
            raise ConnectionLost(self.down_reason or "the connection was lost")
        return reply

    def drop(self, reason: str) -> None:
        """Closes the socket and ends the reader; may be called twice, and from `on_order`."""
        self._go_down(reason)
        if threading.get_ident() != self._reader.ident:  # which cannot end before this returns
            self._reader.join(_READER_WAIT)

    def _send(self, data: bytes, deadline: float) -> None:
        rest = memoryview(data)
        try:
            while rest:
                try:
                    rest = rest[self._socket.send(rest, socket.MSG_DONTWAIT) :]
                except BlockingIOError:
                    self._wait_writable(deadline)
        except (OSError, ValueError) as error:  # poll's ValueError: the reader has just closed the socket
            self._go_down(f"the connection was lost: {type(error).__name__}")
            # The kernel refused the very first byte: the peer cannot have seen anything.
            kind = NothingSent if len(rest) == len(data) else ConnectionLost
            raise kind(self.down_reason) from None

    def _wait_writable(self, deadline: float) -> None:
        poll = select.poll()
        poll.register(self._socket, select.POLLOUT)
        if not poll.poll(max(0.0, deadline - time.monotonic()) * 1000):
            # Half a line may be on its way; nothing can follow it on this connection.
            raise TimeoutError

    def _read(self) -> None:
        while self._receive():
            pass
        self._socket.close()

    def _receive(self) -> bool:
        """Waits for bytes and handles them; false at the end of the connection."""
        try:
            data = self._socket.recv(65536)
            if data and self._feed(data):
                return True
            reason = "the exchange sent a line without end" if data else "the exchange closed the connection"
        except OSError as error:
            reason = f"the connection was lost: {type(error).__name__}"
        except (msgspec.DecodeError, UnicodeDecodeError) as error:
            reason = f"the exchange sent what cannot be read: {error}"
        except Exception as error:
            # The boundary of what was received: waiting calls must end now, not after their whole timeout.
            reason = "the reader failed"
            self._log.crash("paper.reader_failed", error)
        self._go_down(reason)
        return False

    def _feed(self, data: bytes) -> bool:
        """Passes on the complete lines; false if a line has no end."""
        self._buffer += data
        if b"\n" not in data:
            return len(self._buffer) <= _MAX_LINE
        *lines, self._buffer = self._buffer.split(b"\n")
        for line in lines:
            self._dispatch(_decoder.decode(line))
        return True

    def _dispatch(self, message: ServerMessage) -> None:
        if isinstance(message, ExchangeReply):
            waiting = self._waiting.pop(message.id, None)
            if waiting is not None:
                waiting.put(message)
            elif message.order is not None:
                # The caller has given up: the late answer is passed on like any other change.
                order = message.order
                event_id = f"late-{order.broker_order_id}-{order.state.value}"
                self._report(OrderChanged(event_id=event_id, order=order))
        elif isinstance(message, OrderChanged):
            self._report(message)
        elif isinstance(message, SessionEnded):
            self.down_reason = f"the exchange ended the session: {message.reason}"

    def _report(self, change: OrderChanged) -> None:
        """Passes a change on once. A repeated fill is recognised by its fill id, whatever event repeats
        it."""
        key = f"fill {change.fill.fill_id}" if change.fill is not None else f"event {change.event_id}"
        if key in self._seen:
            return
        self._seen[key] = None
        if len(self._seen) > _REMEMBERED:
            self._seen.popitem(last=False)
        try:
            self._on_order(change)
        except Exception as error:  # the boundary to the session's code; the reader must live on
            self._log.crash("paper.on_order_failed", error)

    def _go_down(self, reason: str) -> None:
        if self.down_reason is None:
            self.down_reason = reason
        try:
            # Wakes the reader, which handles what came before, and closes the socket.
            self._socket.shutdown(socket.SHUT_RDWR)
        except OSError:
            self._log.debug("paper.already_disconnected")
        for number in list(self._waiting):
            waiting = self._waiting.pop(number, None)
            if waiting is not None:
                waiting.put(None)
