"""The fresh session's way back, step by step in this process, on a real Valkey."""

from __future__ import annotations

import math
import signal
import time
from collections.abc import Callable, Iterator

import pytest

from tests.integration.worker.stage import Stage
from tests.integration.worker.worker import PATIENCE
from worker_runtime.board import Board, State
from worker_runtime.boottime import boot_ns
from worker_runtime.brokers.fake import FakeBroker, FakeMarket
from worker_runtime.brokers.port import Broker, BrokerFactory, ConnectionKey, OnOrderChanged
from worker_runtime.connection import Account
from worker_runtime.credentials import Opener
from worker_runtime.exits import WorkerEnds
from worker_runtime.log import Log
from worker_runtime.mark import Mark
from worker_runtime.outbox import Outbox
from worker_runtime.protocol.exit_codes import ExitCode
from worker_runtime.protocol.messages import Credentials
from worker_runtime.protocol.sealing import new_worker_key
from worker_runtime.resuming import TELL_AGAIN, Resuming
from worker_runtime.serving import Serving
from worker_runtime.valkey import Valkey


def factory() -> BrokerFactory:
    market = FakeMarket()

    def create(key: ConnectionKey, client: str, on_order: OnOrderChanged) -> Broker:
        return FakeBroker(market, key.account_id, client, on_order)

    return create


class Fresh:
    """A fresh session's parts, on a board that a predecessor left."""

    def __init__(self, stage: Stage, tell_again: float = TELL_AGAIN) -> None:
        config = stage.config(worker_id="w-fresh")
        log = Log("ERROR")
        self.board = Board()
        self.board.session_number, self.board.session_end = 2, -signal.SIGKILL
        self.board.assign(stage.user, "c1", 1)
        self.board.connected = 1
        key = new_worker_key()
        self.board.publish_key(key.public_key().public_bytes_raw())
        self.client = Valkey(stage.url, timeout=PATIENCE)
        outbox = Outbox(self.client, config, self.board, log)
        self.serving = Serving(
            config,
            self.board,
            client=self.client,
            outbox=outbox,
            opener=Opener(key, self.board, config.worker_id),
            load_factory=factory,
            stopping=lambda: False,
            wake=lambda: None,
            log=log,
        )
        self.resuming = Resuming(
            config,
            self.board,
            client=self.client,
            mark=Mark(config, self.board),
            outbox=outbox,
            open_service=lambda: self.serving,
            log=log,
            tell_again=tell_again,
        )


@pytest.fixture
def make(stage: Stage) -> Iterator[Callable[..., Fresh]]:
    made: list[Fresh] = []

    def fresh(**changes: float) -> Fresh:
        made.append(Fresh(stage, **changes))
        return made[-1]

    yield fresh
    for one in made:
        one.client.close()


def test_it_takes_the_lease_shows_its_key_and_tells_once(stage: Stage, make: Callable[..., Fresh]) -> None:
    stage.own("w-fresh", 1)
    fresh = make()
    for _ in range(3):
        fresh.resuming.tend()
    assert fresh.resuming.active
    assert fresh.board.lease_session > boot_ns()
    assert bytes.fromhex(stage.metadata()["public_key"]) == fresh.board.public_key()
    assert stage.metadata()["state"] == State.Reconnecting.name
    assert stage.kinds() == ["session_replaced"]
    assert 0 < fresh.resuming.left() <= TELL_AGAIN


def test_while_nobody_answers_it_tells_again_and_with_credentials_no_more(
    stage: Stage, make: Callable[..., Fresh]
) -> None:
    stage.own("w-fresh", 1)
    fresh = make(tell_again=0.0)
    fresh.resuming.tend()
    fresh.resuming.tend()
    assert stage.kinds() == ["session_replaced"] * 2
    key = ConnectionKey("fake", "stock", True, "a1")
    fresh.serving.connections.load([Account(key, 1, Credentials(api_key="k", secret_key="s"))])
    fresh.resuming.tend()
    assert stage.kinds() == ["session_replaced"] * 2
    assert fresh.resuming.left() == math.inf


def test_without_an_owner_key_it_waits_and_says_nothing(stage: Stage, make: Callable[..., Fresh]) -> None:
    fresh, began = make(), time.monotonic()
    fresh.resuming.tend()
    assert not fresh.resuming.active
    # The first wait is 25 to 50 ms; when it is over, the next look is due.
    left, waits = fresh.resuming.left(), time.monotonic() - began < 0.025
    assert 0 < left <= 1.0 or (left == 0 and not waits)
    assert (stage.kinds(), stage.mark()) == ([], "")


def test_under_a_later_owner_it_ends_fenced(stage: Stage, make: Callable[..., Fresh]) -> None:
    stage.own("another", 2)
    fresh = make()
    with pytest.raises(WorkerEnds) as ends:
        fresh.resuming.tend()
    assert ends.value.code is ExitCode.FENCED
    assert fresh.board.fenced == 1
