"""The client of the benches, against a server that answers as the test says."""

from __future__ import annotations

import socket
import threading
from collections.abc import Iterator, Sequence
from contextlib import contextmanager

import pytest

from infra.lab.rest import RequestFailed, RestConnection


@contextmanager
def serving(*connections: Sequence[bytes]) -> Iterator[tuple[str, list[bytes]]]:
    """Answers the requests of one connection after the other, then ends it; yields what was
    asked."""
    asked: list[bytes] = []
    with socket.create_server(("127.0.0.1", 0)) as listening:
        listening.settimeout(10)

        def serve() -> None:
            for answers in connections:
                link, _ = listening.accept()
                with link:
                    for answer in answers:
                        asked.append(link.recv(65536))
                        for part in answer.split(b"|"):
                            link.sendall(part)

        thread = threading.Thread(target=serve)
        thread.start()
        try:
            yield f"http://127.0.0.1:{listening.getsockname()[1]}", asked
        finally:
            thread.join(10)


def _answer(body: bytes, *, status: str = "200 OK", extra_header: str = "") -> bytes:
    return f"HTTP/1.1 {status}\r\nContent-Length: {len(body)}\r\n{extra_header}\r\n".encode() + body


def test_requests_share_a_connection() -> None:
    with serving([_answer(b'{"a": 1}'), _answer(b"")]) as (url, asked):
        rest = RestConnection(url, "key")
        assert rest.call("POST", "/v1/things", {"b": 2}) == {"a": 1}
        assert rest.call("GET", "/v1/things") is None
        rest.close()
    assert asked[0].startswith(b"POST /v1/things HTTP/1.1\r\n")
    assert b"X-API-Key: key\r\n" in asked[0]
    assert asked[0].endswith(b'Content-Length: 8\r\n\r\n{"b": 2}')
    assert asked[1].endswith(b"Content-Length: 0\r\n\r\n")


def test_an_answer_in_pieces() -> None:
    chunked = (
        b"HTTP/1.1 200 OK\r\nTransfer-Encoding: chunked\r\n\r\n|3\r\n[1,\r\n|2\r\n2]|\r\n0\r\n\r\n"
    )
    with serving([chunked]) as (url, _):
        rest = RestConnection(url, "key")
        assert rest.call("GET", "/") == [1, 2]
        rest.close()


def test_a_connection_that_was_to_be_closed_is_opened_again() -> None:
    closing = _answer(b"1", extra_header="Connection: close\r\n")
    with serving([closing], [_answer(b"2")]) as (url, _):
        rest = RestConnection(url, "key")
        assert [rest.call("GET", "/"), rest.call("GET", "/")] == [1, 2]
        rest.close()


@pytest.mark.parametrize(
    ("answer", "reason"),
    [
        (_answer(b'{"code": "HALTED"}', status="403 Forbidden"), '403 b\'{"code": "HALTED"}\''),
        (b"+PONG\r\n", "HttpParser"),
        (b"HTTP/1.1 200 OK\r\nContent-Length: 9\r\n\r\nhalf", "ConnectionResetError"),
    ],
)
def test_failures_are_reported_and_the_next_call_works(answer: bytes, reason: str) -> None:
    second = [answer, _answer(b"3")] if answer.startswith(b"HTTP/1.1 403") else [answer]
    with serving(second, *([] if len(second) == 2 else [[_answer(b"3")]])) as (url, _):
        rest = RestConnection(url, "key")
        with pytest.raises(RequestFailed, match="POST /: ") as raised:
            rest.call("POST", "/", {})
        assert reason in str(raised.value)
        assert rest.call("GET", "/") == 3
        rest.close()
