"""The client of Valkey waits for its timeout, and no longer, on one connection or the
next."""

from __future__ import annotations

import socket
import threading
from collections.abc import Iterator

import pytest

from worker_runtime.process.valkey import NOTHING, Valkey, ValkeyUnreachable


@pytest.fixture
def mute() -> Iterator[socket.socket]:
    """Makes a server that takes connections and sends nothing by itself."""
    with socket.create_server(("127.0.0.1", 0)) as server:
        yield server


def url(server: socket.socket) -> str:
    return f"redis://127.0.0.1:{server.getsockname()[1]}/0"


def test_a_server_that_does_not_answer_in_time_is_given_up(mute: socket.socket) -> None:
    client = Valkey(url(mute), timeout=0.05)
    with pytest.raises(ValkeyUnreachable, match="no reply in time"):
        client.execute("PING")
    assert not client.connected


def test_no_wait_takes_longer_than_the_limit_says(mute: socket.socket) -> None:
    client = Valkey(url(mute), timeout=3600.0, limit=lambda: 0.05)
    with pytest.raises(ValkeyUnreachable, match="no reply in time"):
        client.execute("PING")
    seconds_left = [1.0]
    client = Valkey(url(mute), timeout=3600.0, limit=lambda: seconds_left[-1])
    client.connect()
    seconds_left.append(0.0)
    with pytest.raises(ValkeyUnreachable, match="no reply in time"):
        client.receive()


def test_each_wait_has_its_own_time(mute: socket.socket) -> None:
    client = Valkey(url(mute), timeout=0.05)
    client.send("PING")
    link, _ = mute.accept()
    with link:
        link.sendall(b"+PONG\r\n")
        assert client.receive(3600.0) == b"PONG"
        with pytest.raises(ValkeyUnreachable, match="no reply in time"):
            client.receive()


def test_the_limit_is_asked_before_a_wait_and_not_for_a_reply_that_is_there(
    mute: socket.socket,
) -> None:
    asked: list[float] = []

    def limit() -> float:
        asked.append(3600.0)
        return asked[-1]

    client = Valkey(url(mute), limit=limit)
    client.connect()
    link, _ = mute.accept()
    with link:
        link.sendall(b"+A\r\n+B\r\n+C\r\n")
        asked.clear()
        assert [client.receive(3600.0) for _ in range(3)] == [b"A", b"B", b"C"]
    assert len(asked) == 1
    client.close()


def test_an_answer_in_pieces_is_waited_for(mute: socket.socket) -> None:
    client = Valkey(url(mute), timeout=0.05)
    client.send("PING")
    link, _ = mute.accept()
    with link:
        link.sendall(b"+PO")
        assert client.ready() is NOTHING
        with pytest.raises(ValkeyUnreachable, match="no reply in time"):
            client.receive()


def test_a_check_does_not_wait(mute: socket.socket) -> None:
    client = Valkey(url(mute), timeout=3600.0)
    client.send("PING")
    assert client.ready() is NOTHING
    assert client.connected
    client.close()


def test_a_server_that_takes_nothing_is_given_up(mute: socket.socket) -> None:
    client = Valkey(url(mute), timeout=0.05)
    with pytest.raises(ValkeyUnreachable, match="sending"):
        client.send("SET", "key", bytes(64 * 1024 * 1024))
    assert not client.connected


def test_a_server_that_takes_a_little_now_and_then_is_given_up_in_time(mute: socket.socket) -> None:
    client = Valkey(url(mute), timeout=0.2)
    client.connect()
    link, _ = mute.accept()
    over = threading.Event()

    def sip() -> None:  # 64 MB would take it 20 s
        while not over.wait(0.02):
            link.recv(64 * 1024)

    sipping = threading.Thread(target=sip)
    sipping.start()
    try:
        with pytest.raises(ValkeyUnreachable, match="sending"):
            client.send("SET", "key", bytes(64 * 1024 * 1024))
    finally:
        over.set()
        sipping.join()
        link.close()


def test_a_server_that_hangs_up_is_gone(mute: socket.socket) -> None:
    client = Valkey(url(mute))
    client.send("PING")
    mute.accept()[0].close()
    with pytest.raises(ValkeyUnreachable):
        client.receive()
    assert not client.connected
