"""Events that go straight to a collector: nobody waits for it, and what it missed is told."""

from __future__ import annotations

import select
import socket
import time
from collections.abc import Iterator
from contextlib import closing
from pathlib import Path
from typing import Any

import pytest

from worker_runtime.jobs import event_sink as sinks
from worker_runtime.jobs.config import RunnerConfig, parse_config
from worker_runtime.jobs.event_sink import BadEventSink, EventSink, parse_sink_address
from worker_runtime.process.config import BadConfig
from worker_runtime.process.log import Log
from worker_runtime.protocol.authentication import MessageKey
from worker_runtime.protocol.messages import encode


class RecordingLog(Log):
    """A log that keeps what it is told."""

    def __init__(self) -> None:
        super().__init__()
        self.events: list[tuple[str, dict[str, Any]]] = []

    def warning(self, event: str, **fields: Any) -> None:
        self.events.append((event, fields))


def lines(first: int, count: int, size: int = 20) -> list[bytes]:
    return [f"{number}".ljust(size - 1, ".").encode() + b"\n" for number in range(first, first + count)]


@pytest.fixture
def collector() -> Iterator[socket.socket]:
    with socket.create_server(("127.0.0.1", 0)) as server:
        server.settimeout(10)
        yield server


def url_of(server: socket.socket) -> str:
    return f"tcp://127.0.0.1:{server.getsockname()[1]}"


def read(link: socket.socket, sink: EventSink, count: int) -> bytes:
    """Reads `count` bytes, while the sink is looked after."""
    link.settimeout(0.02)
    found, until = b"", time.monotonic() + 20
    while len(found) < count:
        assert time.monotonic() < until, f"{len(found)} of {count} bytes came"
        sink.run_due()
        try:
            found += link.recv(1 << 16)
        except TimeoutError:
            continue
    return found


@pytest.mark.parametrize(
    "url",
    [
        *("", "tcp://", "tcp://127.0.0.1", "tcp://127.0.0.1:0", "tcp://127.0.0.1:70000", "tcp://name:1"),
        *("udp://127.0.0.1:1", "tcp://127.0.0.1:1/x", "unix://", "unix:relative", "unix://host/x", "///"),
    ],
)
def test_addresses_that_cannot_be_used_are_refused(url: str) -> None:
    with pytest.raises(BadEventSink):
        parse_sink_address(url)


def test_a_runner_with_such_an_address_is_refused() -> None:
    config = RunnerConfig(
        name="r",
        valkey_url="redis://127.0.0.1:1/0",
        message_keys=(MessageKey(1, b"k"),),
        events_to="tcp://name:1",
    )
    with pytest.raises(BadConfig, match="events_to: it needs an IP address"):
        parse_config(encode(config))


def test_ipv6_and_unix_addresses() -> None:
    assert parse_sink_address("tcp://[::1]:9000") == (socket.AF_INET6, ("::1", 9000))
    assert parse_sink_address("unix:///run/x.sock") == (socket.AF_UNIX, "/run/x.sock")


def test_lines_come_whole_and_in_order_over_tcp(collector: socket.socket) -> None:
    sink, wanted = EventSink(url_of(collector), RecordingLog()), lines(0, 500)
    for start in range(0, 500, 7):
        sink.send(wanted[start : start + 7])
    link, _ = collector.accept()
    with closing(link):
        assert read(link, sink, 10_000) == b"".join(wanted)
    assert sink.seconds_until_due() > 60
    sink.close()


def test_lines_come_over_a_unix_socket(short_directory: Path) -> None:
    path = short_directory / "collector"
    with socket.socket(socket.AF_UNIX) as server:
        server.bind(str(path))
        server.listen()
        sink = EventSink(f"unix://{path}", RecordingLog())
        sink.send(lines(0, 3))
        link, _ = server.accept()
        with closing(link):
            assert read(link, sink, 60) == b"".join(lines(0, 3))
        sink.close()


def test_lines_wait_for_a_collector_that_is_not_there_yet() -> None:
    with socket.create_server(("127.0.0.1", 0)) as gone:
        address = gone.getsockname()
    log = RecordingLog()
    sink = EventSink(f"tcp://127.0.0.1:{address[1]}", log)
    for _ in range(5):
        sink.send(lines(0, 1))
        time.sleep(0.01)
        sink.run_due()
    assert [event for event, _ in log.events] == ["job_events_unsent"]  # once, not for each try
    with socket.create_server(address) as server:
        server.settimeout(10)
        deadline = time.monotonic() + 20
        while sink.seconds_until_due() < 60:
            sink.run_due()
            time.sleep(0.01)
            assert time.monotonic() < deadline
        link, _ = server.accept()
        with closing(link):
            assert read(link, sink, 100) == b"".join(lines(0, 1) * 5)
    sink.close()


def test_a_collector_that_takes_nothing_delays_nobody_and_loses_the_oldest(
    collector: socket.socket, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(sinks, "MAX_BUFFERED", 100_000)
    log = RecordingLog()
    sink, wanted = EventSink(url_of(collector), log), lines(0, 4_000, size=10_000)  # 40 MB
    began = time.monotonic()
    for line in wanted:
        sink.send([line])
    assert time.monotonic() - began < 20
    link, _ = collector.accept()
    with closing(link):
        got = b""
        link.settimeout(0.02)
        until = time.monotonic() + 20
        while sink.seconds_until_due() < 60 or wanted[-1] not in got:
            assert time.monotonic() < until
            sink.run_due()
            try:
                got += link.recv(1 << 20)
            except TimeoutError:
                continue
    kept = got.splitlines(keepends=True)
    assert set(kept) <= set(wanted)  # whole lines
    assert kept == sorted(kept, key=wanted.index)
    left_out = sum(fields["lines"] for event, fields in log.events if event == "job_events_left_out")
    assert len(kept) + left_out == len(wanted)
    assert left_out > 0
    sink.close()


@pytest.fixture
def narrow(short_directory: Path) -> Iterator[socket.socket]:
    """A collector whose connections hold 200 KB: the kernel does not widen a Unix socket's buffers. Those of
    TCP hold four times `LIMIT` (tcp_wmem), so that after a new connection nothing is left to wait."""
    with socket.socket(socket.AF_UNIX) as server:
        server.bind(str(short_directory / "collector"))
        server.listen()
        server.settimeout(20)
        yield server


def test_a_connection_that_takes_nothing_is_made_anew_and_no_line_is_missing(
    narrow: socket.socket, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(sinks, "STALL_LIMIT", 0.1)
    log = RecordingLog()
    sink, wanted = EventSink(f"unix://{narrow.getsockname()}", log), lines(0, 4_000, size=100)
    sink.send(wanted)
    stalled, _ = narrow.accept()
    until = time.monotonic() + 20
    while not log.events:  # nobody reads
        assert time.monotonic() < until, "the connection was kept"
        sink.run_due()
        time.sleep(0.01)
    [(event, fields)] = log.events
    assert (event, fields["reason"]) == ("job_events_unsent", "the collector takes nothing")
    assert fields["waiting"] > 0
    monkeypatch.setattr(sinks, "STALL_LIMIT", 60.0)
    with closing(stalled), stalled.makefile("rb") as old:
        taken = [line for line in old.read().splitlines(keepends=True) if line.endswith(b"\n")]
    while sink._socket is None:
        assert time.monotonic() < until, "no new connection"
        sink.run_due()
        time.sleep(0.01)
    anew, _ = narrow.accept()
    left = b"".join(wanted[len(taken) :])
    with closing(anew):
        assert read(anew, sink, len(left)) == left
    assert taken == wanted[: len(taken)]
    assert log.events[1:] == []
    sink.close()


def test_a_slow_collector_keeps_its_connection(
    narrow: socket.socket, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(sinks, "STALL_LIMIT", 0.05)
    log = RecordingLog()
    sink = EventSink(f"unix://{narrow.getsockname()}", log)
    sink.send(lines(0, 9_000, size=100))
    link, _ = narrow.accept()
    with closing(link):
        for _ in range(6):
            time.sleep(0.06)  # the deadline passes, but something is taken before the sink looks
            assert len(link.recv(1 << 16)) > 0
            sink.run_due()
            assert sink.seconds_until_due() < 60
        assert log.events == []
        monkeypatch.setattr(sinks, "_CLOSE_LIMIT", 0.0)
        sink.close()


def test_a_collector_that_starts_anew_gets_whole_lines(collector: socket.socket) -> None:
    sink = EventSink(url_of(collector), RecordingLog())
    sink.send(lines(0, 3))
    first, _ = collector.accept()
    with closing(first):
        assert read(first, sink, 60) == b"".join(lines(0, 3))
    assert sink._socket is not None
    assert select.select([sink._socket], [], [], 10)[0]  # the end has come
    sink.send(lines(3, 3))
    deadline = time.monotonic() + 20
    while sink.seconds_until_due() < 60:
        sink.run_due()
        time.sleep(0.01)
        assert time.monotonic() < deadline
    second, _ = collector.accept()
    with closing(second):
        assert read(second, sink, 60) == b"".join(lines(3, 3))
    sink.close()


def test_who_leaves_says_what_was_not_sent(collector: socket.socket, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sinks, "_CLOSE_LIMIT", 0.05)
    port = collector.getsockname()[1]
    collector.close()
    log = RecordingLog()
    sink = EventSink(f"tcp://127.0.0.1:{port}", log)
    sink.send(lines(0, 2))
    sink.close()
    assert log.events[-1] == ("job_events_left_out", {"lines": 2})
