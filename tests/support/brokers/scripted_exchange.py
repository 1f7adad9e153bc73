"""An exchange that says what a test tells it to say, and a link to it."""

from __future__ import annotations

import socket
import struct
import threading
import time
from collections.abc import Callable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import contextmanager

import msgspec

from worker_runtime.brokers.paper.broker import PaperConnection
from worker_runtime.brokers.paper.wire import (
    ExchangeOrder,
    ExchangeOrderChanged,
    ExchangePing,
    ExchangeReply,
    ServerMessage,
)
from worker_runtime.brokers.port import OnOrderChanged
from worker_runtime.process.log import Log
from worker_runtime.protocol import broker_reports
from worker_runtime.protocol.messages import OrderState, PriceType, Side, TimeInForce

#: Seconds for what has to happen; far more than it ever takes, far less than a call's own time.
SOON = 15.0
#: Seconds a call may take when its time is not what the test is about.
LONG = 40.0
READER = "paper-reader"


def a_broker_order(name: str) -> ExchangeOrder:
    return ExchangeOrder(
        broker_order_id=name,
        tag="t",
        symbol="2330",
        side=Side.BUY,
        quantity=1,
        price_type=PriceType.MARKET,
        price=None,
        time_in_force=TimeInForce.ROD,
        state=OrderState.SUBMITTED,
    )


def event(name: str) -> ExchangeOrderChanged:
    return ExchangeOrderChanged(event_id=name, order=a_broker_order(name))


def in_bytes(*messages: ServerMessage) -> bytes:
    return b"".join(msgspec.json.encode(message) + b"\n" for message in messages)


def until(condition: Callable[[], bool]) -> None:
    """Waits for a condition that nothing announces."""
    end = time.monotonic() + SOON
    while not condition():
        assert time.monotonic() < end, "the condition did not come true"
        time.sleep(0.002)


def readers() -> int:
    """How many reader threads there are."""
    return sum(thread.name == READER for thread in threading.enumerate())


class HeardRequests:
    """Collects the names of events, and of the threads that brought them."""

    def __init__(self) -> None:
        self.names: list[str] = []
        self.threads: list[str] = []
        self._arrived = threading.Condition()

    def __call__(self, change: broker_reports.OrderChanged) -> None:
        with self._arrived:
            self.names.append(change.event_id)
            self.threads.append(threading.current_thread().name)
            self._arrived.notify_all()

    def thread_of(self, name: str) -> str:
        """Waits for this event; returns the name of the thread that brought it."""
        with self._arrived:
            assert self._arrived.wait_for(lambda: name in self.names, SOON), (name, self.names)
            return self.threads[self.names.index(name)]


class ScriptedExchange:
    """The other end of one link, played by the test itself; `calls` run in threads of their own."""

    def __init__(
        self,
        peer: socket.socket,
        own: socket.socket,
        link: PaperConnection,
        pool: ThreadPoolExecutor,
    ) -> None:
        self.peer = peer
        self.own = own
        self.link = link
        self._pool = pool
        self._lines = peer.makefile("rb")
        self._events = 0

    def call(self, seconds: float = LONG) -> tuple[int, Future[ExchangeReply]]:
        """Begins a call; returns its number as soon as the request is here."""
        deadline = time.monotonic() + seconds
        future = self._pool.submit(self.link.call, ExchangePing, deadline)
        return self.next_request(), future

    def next_request(self) -> int:
        return msgspec.json.decode(self._lines.readline(), type=ExchangePing).id

    def send(self, *messages: ServerMessage) -> None:
        """All in one piece."""
        self.peer.sendall(in_bytes(*messages))

    def send_event(self) -> str:
        """Sends an event of its own name."""
        self._events += 1
        name = f"e{self._events}"
        self.send(event(name))
        return name

    def reset(self) -> None:
        """Breaks the connection as a killed machine's kernel does."""
        self.peer.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
        self.hang_up()

    def hang_up(self) -> None:
        self._lines.close()
        self.peer.close()

    def has_come(self, size: int) -> bool:
        """Whether `size` bytes lie unread at the link's end."""
        try:
            return len(self.own.recv(size, socket.MSG_PEEK | socket.MSG_DONTWAIT)) == size
        except BlockingIOError:
            return False


@contextmanager
def scripted(
    on_order: OnOrderChanged,
    dial: Callable[[tuple[str, int]], socket.socket] = socket.create_connection,
) -> Iterator[ScriptedExchange]:
    """A link to an exchange that does nothing by itself; dropped at the end."""
    with ThreadPoolExecutor(4, thread_name_prefix="caller") as pool:
        with socket.create_server(("127.0.0.1", 0)) as server:
            own = dial(server.getsockname())
            peer, _ = server.accept()
        peer.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        peer.settimeout(SOON)
        exchange = ScriptedExchange(
            peer, own, PaperConnection(own, on_order, Log("CRITICAL")), pool
        )
        try:
            yield exchange
        finally:
            exchange.link.drop("the test is over")
            exchange.hang_up()
