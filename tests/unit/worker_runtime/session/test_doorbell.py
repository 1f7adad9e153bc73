"""The bell hands on a ring before it listens for the next one."""

from __future__ import annotations

import selectors
import socket
import time
from collections.abc import Iterator

import pytest

from worker_runtime.process.doorbell import PATIENT, Doorbell, Listening
from worker_runtime.process.log import Log
from worker_runtime.process.valkey import Valkey

RING = b"*2\r\n$3\r\nkey\r\n$1\r\n1\r\n"
LISTENS = b"*3\r\n$5\r\nBLPOP\r\n$3\r\nkey\r\n$2\r\n20\r\n"


@pytest.fixture
def server() -> Iterator[socket.socket]:
    with socket.create_server(("127.0.0.1", 0)) as server:
        yield server


def heard(link: socket.socket) -> bytes:
    """Returns what has arrived."""
    try:
        return link.recv(4096, socket.MSG_DONTWAIT)
    except BlockingIOError:
        return b""


def listening(server: socket.socket) -> tuple[Doorbell, socket.socket, selectors.BaseSelector]:
    selector = selectors.DefaultSelector()
    client = Valkey(f"redis://127.0.0.1:{server.getsockname()[1]}/0")
    bell = Doorbell(client, ("key",), selector, Log("CRITICAL"))
    assert bell.run_due()
    link, _ = server.accept()
    assert link.recv(4096) == LISTENS
    assert 0.0 < bell.seconds_until_due() <= PATIENT.block + PATIENT.grace
    return bell, link, selector


def test_it_listens_again_when_it_is_tended_and_not_before_the_ring_is_handed_on(
    server: socket.socket,
) -> None:
    bell, link, selector = listening(server)
    with link:
        link.sendall(RING)
        assert selector.select(5.0)
        assert bell.read_rings() == [b"1"]
        assert heard(link) == b""
        assert bell.seconds_until_due() == 0.0
        assert not bell.run_due()  # the connection is the same
        assert link.recv(4096) == LISTENS
        assert bell.seconds_until_due() > 0.0
        assert not bell.run_due()
        assert heard(link) == b""
        bell.close()


@pytest.mark.parametrize("rang", [False, True])
def test_a_connection_that_broke_is_replaced(server: socket.socket, rang: bool) -> None:
    bell, link, selector = listening(server)
    if rang:
        link.sendall(RING)
        assert selector.select(5.0)
        assert bell.read_rings() == [b"1"]
    link.close()
    assert selector.select(5.0)
    assert bell.read_rings() == []
    assert not selector.get_map()
    while not bell.run_due():
        selector.select(bell.seconds_until_due())
    bell.close()


def test_a_bell_that_was_closed_after_a_ring_connects_anew(server: socket.socket) -> None:
    bell, link, selector = listening(server)
    with link:
        link.sendall(RING)
        assert selector.select(5.0)
        assert bell.read_rings() == [b"1"]
        bell.close()
        assert bell.run_due()
        bell.close()


def test_a_process_that_stood_still_keeps_its_connection_and_reads_the_ring_that_came_meanwhile(
    server: socket.socket,
) -> None:
    # given a bell whose server has answered in time
    dropped: list[str] = []
    selector = selectors.DefaultSelector()
    client = Valkey(f"redis://127.0.0.1:{server.getsockname()[1]}/0")
    listening = Listening(1, -0.9)
    bell = Doorbell(
        client,
        ("key",),
        selector,
        Log("CRITICAL"),
        listening=listening,
        on_silence=lambda: dropped.append("all"),
    )
    assert bell.run_due()
    link, _ = server.accept()
    with link:
        link.sendall(RING)
        # when the process stands still until its own deadline has passed
        time.sleep(2 * (listening.block + listening.grace))
        assert bell.seconds_until_due() == 0.0
        # then it hands on the ring, and ends no connection
        assert not bell.run_due()
        assert selector.select(0)
        assert bell.read_rings() == [b"1"]
        assert dropped == []
        bell.close()
