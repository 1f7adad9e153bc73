"""The fresh session's way back, step by step in this process, on a real Valkey."""

from __future__ import annotations

import math
import signal
import time
from collections.abc import Callable, Iterator

import pytest

from tests.support.brokers.fake import FakeBroker, FakeMarket
from tests.support.workers.harness import WorkerHarness
from tests.support.workers.process import PATIENCE
from worker_runtime.brokers.port import Broker, BrokerFactory, ConnectionKey, OnOrderChanged
from worker_runtime.process.clock import boot_ns
from worker_runtime.process.log import Log
from worker_runtime.process.replacement import WorkerExit
from worker_runtime.process.shared_state import SharedState, WorkerActivity
from worker_runtime.process.valkey import Valkey
from worker_runtime.protocol.launch import ExitCode
from worker_runtime.protocol.messages import Credentials
from worker_runtime.session.claim import ResumeHandler
from worker_runtime.session.control import SessionParts
from worker_runtime.trading.account_session import OpenedAccount


def factory() -> BrokerFactory:
    market = FakeMarket()

    def create(key: ConnectionKey, client: str, on_order: OnOrderChanged) -> Broker:
        return FakeBroker(market, key.account_id, client, on_order)

    return create


class Fresh:
    """A fresh session's parts, in a shared state that a predecessor left."""

    def __init__(
        self, harness: WorkerHarness, repeat_event: float = ResumeHandler.repeat_event
    ) -> None:
        config = harness.config(worker_id="w-fresh")
        log = Log("ERROR")
        self.shared_state = SharedState()
        self.shared_state.session_number, self.shared_state.session_end = 2, -signal.SIGKILL
        self.shared_state.write_message_keys(harness.secrets.for_worker(harness.user, 1))
        self.shared_state.assign(harness.user, "c1", 1)
        self.shared_state.connected = 1
        self.client = Valkey(harness.url, timeout=PATIENCE)
        parts = SessionParts(
            config, self.shared_state, self.client, factory, lambda: False, lambda: None, log
        )
        self.resuming = ResumeHandler(parts)
        self.resuming.repeat_event = repeat_event


@pytest.fixture
def make(harness: WorkerHarness) -> Iterator[Callable[..., Fresh]]:
    made: list[Fresh] = []

    def fresh(**changes: float) -> Fresh:
        made.append(Fresh(harness, **changes))
        return made[-1]

    yield fresh
    for created in made:
        created.client.close()


def test_it_takes_the_lease_shows_its_key_and_tells_once(
    harness: WorkerHarness, make: Callable[..., Fresh]
) -> None:
    harness.own("w-fresh", 1)
    fresh = make()
    for _ in range(3):
        fresh.resuming.run_due()
    assert fresh.resuming.active
    assert fresh.shared_state.lease_session > boot_ns()
    assert bytes.fromhex(harness.metadata()["public_key"]) == fresh.shared_state.public_key()
    assert harness.metadata()["state"] == WorkerActivity.Reconnecting.name
    assert harness.kinds() == ["session_replaced"]
    assert 0 < fresh.resuming.seconds_until_due() <= ResumeHandler.repeat_event


def test_while_nobody_answers_it_tells_again_and_with_credentials_no_more(
    harness: WorkerHarness, make: Callable[..., Fresh]
) -> None:
    harness.own("w-fresh", 1)
    fresh = make(repeat_event=0.0)
    fresh.resuming.run_due()
    fresh.resuming.run_due()
    assert harness.kinds() == ["session_replaced"] * 2
    key = ConnectionKey("fake", "stock", True, "a1")
    assert fresh.resuming.request_loop is not None
    fresh.resuming.request_loop.broker_sessions.load(
        [OpenedAccount(key, 1, Credentials(api_key="k", secret_key="s"), ["b"])]
    )
    fresh.resuming.run_due()
    assert harness.kinds() == ["session_replaced"] * 2
    assert fresh.resuming.seconds_until_due() == math.inf


def test_without_an_owner_key_it_waits_and_says_nothing(
    harness: WorkerHarness, make: Callable[..., Fresh]
) -> None:
    fresh, began = make(), time.monotonic()
    fresh.resuming.run_due()
    assert not fresh.resuming.active
    # The first wait is 25 to 50 ms; when it is over, the next check is due.
    seconds_left, waits = fresh.resuming.seconds_until_due(), time.monotonic() - began < 0.025
    assert 0 < seconds_left <= 1.0 or (seconds_left == 0 and not waits)
    assert (harness.kinds(), harness.mark()) == ([], "")


def test_under_a_later_owner_it_ends_fenced(
    harness: WorkerHarness, make: Callable[..., Fresh]
) -> None:
    harness.own("another", 2)
    fresh = make()
    with pytest.raises(WorkerExit) as ends:
        fresh.resuming.run_due()
    assert ends.value.code is ExitCode.FENCED
    assert fresh.shared_state.fenced == 1
