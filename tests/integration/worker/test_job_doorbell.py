"""How the supervisor listens for a user's first job, between its renewals."""

from __future__ import annotations

import socket
import time
from collections.abc import Iterator
from typing import Any

import pytest

from tests.support.workers.harness import WorkerHarness
from worker_runtime.process.clock import NS_PER_S
from worker_runtime.process.doorbell import JobDoorbell
from worker_runtime.process.log import Log
from worker_runtime.process.shared_state import SharedState
from worker_runtime.process.valkey import Valkey

#: Who may do all that the supervisor does, but not look whether there are jobs.
_BLIND = "blind"


@pytest.fixture
def shared_state(harness: WorkerHarness) -> SharedState:
    shared_state = SharedState()
    shared_state.assign(harness.user, "c1", 1)
    return shared_state


@pytest.fixture
def blind_url(harness: WorkerHarness) -> Iterator[str]:
    harness.client.execute("ACL", "SETUSER", _BLIND, "on", ">secret", "~*", "+@all", "-exists")
    yield harness.url.replace("redis://", f"redis://{_BLIND}:secret@")
    harness.client.execute("ACL", "DELUSER", _BLIND)


def listening(url: str, shared_state: SharedState) -> tuple[JobDoorbell, Valkey]:
    main = Valkey(url)
    main.connect()
    return JobDoorbell(url, main, shared_state, Log(), lambda: 1.0), main


def connections(harness: WorkerHarness) -> int:
    """How many the server has accepted since its start."""
    lines = harness.client.execute("INFO", "stats").split()
    [line] = [line for line in lines if line.startswith(b"total_connections_received:")]
    return int(line.partition(b":")[2])


def test_a_question_that_is_refused_is_not_asked_again_at_once(
    harness: WorkerHarness, shared_state: SharedState, blind_url: str
) -> None:
    bell, main = listening(blind_url, shared_state)
    before, begin = connections(harness), time.monotonic()
    for _ in range(20):
        bell.run_due(reachable=True)
    # The shortest wait is half a second: after that, the next question is due.
    seconds_left, waits = bell.seconds_until_due(), time.monotonic() - begin < 0.5
    assert 0.0 < seconds_left <= 15.0 or not waits
    assert 1 <= connections(harness) - before <= 1 + (time.monotonic() - begin) / 0.5
    main.close()


def test_no_name_server_is_asked_while_the_main_connection_is_open(
    harness: WorkerHarness, shared_state: SharedState, monkeypatch: pytest.MonkeyPatch
) -> None:
    bell, main = listening(harness.url.replace("127.0.0.1", "localhost"), shared_state)
    lookup, asked = socket.getaddrinfo, []

    def noted(host: str, *rest: Any, **options: Any) -> Any:
        asked.append(host)
        return lookup(host, *rest, **options)

    monkeypatch.setattr(socket, "getaddrinfo", noted)
    bell.run_due(reachable=True)
    assert 15.0 < bell.seconds_until_due() <= 25.0  # it waits in BLPOP
    assert asked == ["127.0.0.1"]
    main.close()
    bell.run_due(reachable=True)
    assert bell.seconds_until_due() == 3600.0
    assert asked == ["127.0.0.1"]


def test_it_listens_again_when_the_pause_after_dead_runners_is_over(
    harness: WorkerHarness, shared_state: SharedState
) -> None:
    bell, main = listening(harness.url, shared_state)
    shared_state.jobs_not_before = time.monotonic_ns() + 60 * NS_PER_S
    bell.run_due(reachable=True)
    assert bell.seconds_until_due() == 3600.0
    shared_state.jobs_not_before = time.monotonic_ns() - 1
    bell.run_due(reachable=True)
    assert 15.0 < bell.seconds_until_due() <= 25.0  # it waits in BLPOP
    main.close()
    bell.run_due(reachable=True)
