"""A link of the paper adapter ends: each waiting call hears of it, all messages that had come are
reported, and nothing stays open."""

from __future__ import annotations

import contextlib
import os
import socket
import threading
import time
from collections.abc import Iterator

import pytest

from tests.support.brokers.scripted_exchange import (
    LONG,
    SOON,
    HeardRequests,
    ScriptedExchange,
    event,
    in_bytes,
    readers,
    scripted,
    until,
)
from worker_runtime.brokers.paper.broker import ConnectionLost, NothingSent
from worker_runtime.brokers.paper.wire import ExchangePing, ExchangeReply
from worker_runtime.protocol.broker_reports import OrderChanged


class PausedListener(HeardRequests):
    """Pauses at the event "slow" until the test resumes it."""

    def __init__(self) -> None:
        super().__init__()
        self.go_on = threading.Event()

    def __call__(self, change: OrderChanged) -> None:
        super().__call__(change)
        if change.event_id == "slow":
            assert self.go_on.wait(SOON)


@pytest.fixture
def heard() -> PausedListener:
    return PausedListener()


@pytest.fixture
def exchange(heard: PausedListener) -> Iterator[ScriptedExchange]:
    with scripted(heard) as made:
        yield made


def assert_over(exchange: ScriptedExchange, reason: str) -> None:
    """Asserts that the reader has closed the socket and gone, and that a call says why."""
    until(lambda: readers() == 0)
    assert exchange.own.fileno() == -1
    with pytest.raises(NothingSent, match=reason):
        exchange.link.call(ExchangePing, time.monotonic() + LONG)


def test_a_reset_in_a_call(exchange: ScriptedExchange, heard: PausedListener) -> None:
    _, call = exchange.call()
    _, other = exchange.call()
    exchange.reset()
    for waiting in (call, other):
        with pytest.raises(ConnectionLost, match="ConnectionResetError"):
            waiting.result(SOON)
    assert_over(exchange, "ConnectionResetError")


def test_a_reset_between_calls(exchange: ScriptedExchange) -> None:
    exchange.reset()
    assert_over(exchange, "ConnectionResetError")


def test_the_exchange_hangs_up_in_a_call(exchange: ScriptedExchange, heard: PausedListener) -> None:
    _, call = exchange.call()
    exchange.send(event("last"))
    exchange.hang_up()
    with pytest.raises(ConnectionLost, match="the exchange closed the connection"):
        call.result(SOON)
    assert heard.names[-1] == "last"
    assert_over(exchange, "the exchange closed the connection")


def test_nonsense_in_a_call(exchange: ScriptedExchange, heard: PausedListener) -> None:
    _, call = exchange.call()
    exchange.peer.sendall(b"220 mail.example.com ESMTP\r\n")
    with pytest.raises(ConnectionLost, match="what cannot be read"):
        call.result(SOON)
    assert_over(exchange, "what cannot be read")


def test_nothing_is_believed_that_came_behind_nonsense(
    exchange: ScriptedExchange, heard: PausedListener
) -> None:
    _, call = exchange.call()
    exchange.send(event("slow"))
    heard.thread_of("slow")
    nonsense = b"x" * 65535 + b"\n"  # as much as is read at once: the event is left in the socket
    behind = nonsense + in_bytes(event("behind"))
    exchange.peer.sendall(behind)
    until(lambda: exchange.has_come(len(behind)))
    heard.go_on.set()
    with pytest.raises(ConnectionLost, match="what cannot be read"):
        call.result(SOON)
    assert_over(exchange, "what cannot be read")
    assert heard.names[-1] == "slow"


def test_a_line_without_end_in_a_call(exchange: ScriptedExchange, heard: PausedListener) -> None:
    _, call = exchange.call()
    piece = b"x" * 2**20
    with contextlib.suppress(ConnectionError):  # it is hung up on in the midst of it
        for _ in range(32):
            exchange.peer.sendall(piece)
    with pytest.raises(ConnectionLost, match="a line without end"):
        call.result(SOON)
    assert_over(exchange, "a line without end")


def test_a_drop_by_another_thread_ends_all_calls(
    exchange: ScriptedExchange, heard: PausedListener
) -> None:
    _, call = exchange.call()
    _, other = exchange.call()
    exchange.link.drop("no longer wanted")
    for waiting in (call, other):
        with pytest.raises(ConnectionLost, match="no longer wanted"):
            waiting.result(SOON)
    assert_over(exchange, "no longer wanted")
    exchange.link.drop("again")
    assert exchange.link.down_reason == "no longer wanted"


@pytest.mark.parametrize("in_a_call", [True, False])
def test_a_drop_from_an_observer_waits_for_nobody(in_a_call: bool) -> None:
    took: list[float] = []

    def drops(change: OrderChanged) -> None:
        heard(change)
        if change.event_id == "drop":
            began = time.monotonic()
            made.link.drop("seen enough")
            took.append(time.monotonic() - began)

    for _ in range(5):
        heard = HeardRequests()
        with scripted(drops) as made:
            call = made.call()[1] if in_a_call else None
            made.send(event("drop"))
            heard.thread_of("drop")
            if call is not None:
                with pytest.raises(ConnectionLost, match="seen enough"):
                    call.result(SOON)
            assert_over(made, "seen enough")
    # A wait for the reader, which waits for the observer, would take 0.4 s each time.
    assert min(took) < 0.3


@pytest.mark.parametrize("in_a_call", [True, False])
def test_messages_that_came_before_a_drop_are_reported(
    exchange: ScriptedExchange, heard: PausedListener, in_a_call: bool
) -> None:
    call = exchange.call()[1] if in_a_call else None
    exchange.send(event("slow"))
    heard.thread_of("slow")
    last = in_bytes(event("last"))
    exchange.peer.sendall(last)
    until(lambda: exchange.has_come(len(last)))
    exchange.link.drop("no longer wanted")
    heard.go_on.set()
    heard.thread_of("last")
    if call is not None:
        with pytest.raises(ConnectionLost, match="no longer wanted"):
            call.result(SOON)
    assert_over(exchange, "no longer wanted")


def test_messages_that_came_before_a_reset_are_reported_though_a_request_fails_first(
    exchange: ScriptedExchange, heard: PausedListener
) -> None:
    exchange.send(event("slow"))
    heard.thread_of("slow")
    last = in_bytes(event("last"))
    exchange.peer.sendall(last)
    until(lambda: exchange.has_come(len(last)))
    exchange.reset()
    with pytest.raises(NothingSent, match="the connection was lost"):
        exchange.link.call(ExchangePing, time.monotonic() + LONG)
    heard.go_on.set()
    heard.thread_of("last")
    assert_over(exchange, "the connection was lost")


def test_two_hundred_links_leave_nothing_open() -> None:
    until(lambda: readers() == 0)
    before = len(os.listdir("/proc/self/fd"))
    for number in range(200):
        heard = HeardRequests()
        with scripted(heard) as exchange:
            if number % 4 == 1:
                asked, call = exchange.call()
                exchange.send(ExchangeReply(id=asked))
                call.result(SOON)
            elif number % 4 == 2:
                _, call = exchange.call()
                exchange.reset()
                assert isinstance(call.exception(SOON), ConnectionLost)
            elif number % 4 == 3:
                exchange.hang_up()
    until(lambda: readers() == 0)
    assert len(os.listdir("/proc/self/fd")) == before


class NeverWritable(socket.socket):
    """Takes nothing, and loses its connection meanwhile."""

    exchange: ScriptedExchange

    def send(self, *data: object) -> int:
        self.exchange.link.drop("closed meanwhile")
        raise BlockingIOError


def test_a_connection_that_is_closed_while_a_request_waits_for_room() -> None:
    def dial(address: tuple[str, int]) -> socket.socket:
        own = NeverWritable()
        own.connect(address)
        return own

    with scripted(HeardRequests(), dial) as exchange:
        assert isinstance(exchange.own, NeverWritable)
        exchange.own.exchange = exchange
        with pytest.raises(NothingSent, match="closed meanwhile"):
            exchange.link.call(ExchangePing, time.monotonic() + LONG)
