"""The paper adapter's link: a call reads by itself, the reader reads whenever no call does, and
nothing is lost between the two."""

from __future__ import annotations

import random
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor

import pytest

from tests.support.brokers.scripted_exchange import (
    LONG,
    READER,
    SOON,
    HeardRequests,
    ScriptedExchange,
    a_broker_order,
    event,
    in_bytes,
    scripted,
    until,
)
from worker_runtime.brokers.paper.broker import NoReply
from worker_runtime.brokers.paper.wire import ExchangePing, ExchangeReply
from worker_runtime.protocol.broker_reports import OrderChanged


@pytest.fixture
def heard() -> HeardRequests:
    return HeardRequests()


@pytest.fixture
def exchange(heard: HeardRequests) -> Iterator[ScriptedExchange]:
    with scripted(heard) as made:
        yield made


def test_the_reader_brings_the_events_in_calls_and_between(
    exchange: ScriptedExchange, heard: HeardRequests
) -> None:
    assert heard.thread_of(exchange.send_event()) == READER
    for _ in range(20):
        number, call = exchange.call()
        assert heard.thread_of(exchange.send_event()) == READER
        assert not call.done()
        exchange.send(ExchangeReply(id=number))
        call.result(SOON)
        assert heard.thread_of(exchange.send_event()) == READER


def test_a_reply_among_events_in_one_piece(
    exchange: ScriptedExchange, heard: HeardRequests
) -> None:
    number, call = exchange.call()
    exchange.send(event("before"), ExchangeReply(id=number), event("behind"))
    assert call.result(SOON).id == number
    heard.thread_of("behind")
    assert heard.names[-2:] == ["before", "behind"]


def test_an_event_that_begins_with_the_reply_and_ends_after_the_call(
    exchange: ScriptedExchange, heard: HeardRequests
) -> None:
    number, call = exchange.call()
    begun = in_bytes(event("in two"))
    exchange.peer.sendall(in_bytes(ExchangeReply(id=number)) + begun[:10])
    call.result(SOON)
    exchange.peer.sendall(begun[10:])
    assert heard.thread_of("in two") == READER


def test_a_reply_in_many_pieces(exchange: ScriptedExchange, heard: HeardRequests) -> None:
    number, call = exchange.call()
    for byte in in_bytes(ExchangeReply(id=number, order=a_broker_order("o"))):
        until(lambda: not exchange.has_come(1))  # else two of them could be read as one
        exchange.peer.sendall(bytes([byte]))
    assert call.result(SOON).order == a_broker_order("o")


def test_a_call_ends_in_time_though_bytes_keep_coming(
    exchange: ScriptedExchange, heard: HeardRequests
) -> None:
    number, call = exchange.call(seconds=0.5)
    late = in_bytes(ExchangeReply(id=number, order=a_broker_order("o")))
    exchange.peer.sendall(late[:-2])
    end = time.monotonic() + SOON
    while not call.done():
        assert time.monotonic() < end, "the bytes keep the call from its end"
        exchange.peer.sendall(b" ")  # between the last two brackets
    with pytest.raises(NoReply):
        call.result()
    exchange.peer.sendall(late[-2:])
    assert heard.thread_of("late-o-submitted") == READER


def test_calls_are_answered_in_any_order(exchange: ScriptedExchange) -> None:
    calls = [exchange.call() for _ in range(4)]
    for number, call in reversed(calls):
        exchange.send(ExchangeReply(id=number))
        assert call.result(SOON).id == number


def test_a_call_gets_its_reply_after_another_gave_up(exchange: ScriptedExchange) -> None:
    _, late = exchange.call(0.2)
    number, waiting = exchange.call()
    assert isinstance(late.exception(SOON), NoReply)
    exchange.send(ExchangeReply(id=number))
    assert waiting.result(SOON).id == number


def test_an_observer_that_fails_harms_nobody(capfd: pytest.CaptureFixture[str]) -> None:
    heard = HeardRequests()

    def observe(change: OrderChanged) -> None:
        heard(change)
        if change.event_id == "bad":
            raise RuntimeError("a fault in the session's code")

    with scripted(observe) as exchange:
        number, call = exchange.call()
        exchange.send(event("bad"), event("good"), ExchangeReply(id=number))
        assert call.result(SOON).id == number
        assert heard.names[-2:] == ["bad", "good"]
        assert exchange.link.down_reason is None
        assert heard.thread_of(exchange.send_event()) == READER


@pytest.mark.parametrize("seed", range(3))
def test_many_calls_and_events_in_pieces_of_any_size(
    seed: int, exchange: ScriptedExchange, heard: HeardRequests
) -> None:
    """Three threads that call, and an exchange that answers out of order, with events in
    between."""
    chance = random.Random(seed)  # noqa: S311
    each, callers = 100, 3

    def serve() -> list[str]:
        names = []
        for _ in range(each):
            asked = [exchange.next_request() for _ in range(callers)]
            chance.shuffle(asked)
            rest = b""
            for number in asked:
                names.append(f"with {number}")
                rest += in_bytes(ExchangeReply(id=number, session_id=str(number)), event(names[-1]))
            while rest:  # who has its reply asks again while the others' are still on their way
                size = chance.choice([1, 7, 100, 1000])
                exchange.peer.sendall(rest[:size])
                rest = rest[size:]
        return names

    def trade() -> None:
        for _ in range(each):
            numbers: list[int] = []

            def ping(id: int, numbers: list[int] = numbers) -> ExchangePing:
                numbers.append(id)
                return ExchangePing(id=id)

            reply = exchange.link.call(ping, time.monotonic() + LONG)
            assert reply.session_id == str(numbers[0])

    with ThreadPoolExecutor(callers + 1) as pool:
        serving = pool.submit(serve)
        trading = [pool.submit(trade) for _ in range(callers)]
        for trader in trading:
            trader.result(LONG)
        names = serving.result(SOON)
        heard.thread_of(names[-1])
        assert heard.names == names
