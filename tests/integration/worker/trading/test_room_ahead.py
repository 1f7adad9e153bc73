"""Room for an order, asked for in the round trip of the pop that brings it."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from infra.local.servers import ValkeyServer
from tests.integration.worker.stage import WorkerStage
from tests.integration.worker.trading.test_limits import query
from tests.integration.worker.wire import ValkeyWire
from tests.integration.worker.worker import PATIENCE, eventually
from worker_runtime.brokers.port import ConnectionKey
from worker_runtime.process.log import Log
from worker_runtime.process.shared_state import SharedState
from worker_runtime.process.valkey import Valkey, ValkeyUnreachable
from worker_runtime.protocol import keys
from worker_runtime.protocol.errors import RateLimited
from worker_runtime.protocol.launch import Allowance, BrokerLimits
from worker_runtime.protocol.messages import Credentials, PlaceOrder
from worker_runtime.protocol.scripts import POP, SPEND_BUDGET
from worker_runtime.session.queue_reader import QueueItem, RequestQueueReader
from worker_runtime.trading.account_session import OpenedAccount
from worker_runtime.trading.rate_limiter import CallKind
from worker_runtime.trading.shared_rate_limiter import GRANT_LIFETIME, SharedRateLimiter

ACCOUNT = OpenedAccount(
    ConnectionKey("paper", "stock", True, "a1"), 1, Credentials(api_key="k", secret_key="s")
)


@pytest.fixture
def wire(valkey_server: ValkeyServer) -> Iterator[ValkeyWire]:
    with ValkeyWire(("127.0.0.1", valkey_server.port)) as wire:
        yield wire


class Till:
    """One session's inlet and budget, on one connection, as `Serving` has them."""

    def __init__(self, stage: WorkerStage, client: Valkey, allowance: Allowance | None = None) -> None:
        self.stage = stage
        self.client = client
        for script in (POP, SPEND_BUDGET):
            stage.client.execute("SCRIPT", "LOAD", script.source)
        stage.own("w1", 1)
        board = SharedState()
        board.session_number = 1
        board.assign(stage.user, "c1", 1)
        config = stage.config(worker_id="w1", allowance=allowance or Allowance())
        self.inlet = RequestQueueReader(client, board, "w1")
        self.budget = SharedRateLimiter(client, config, board, Log("ERROR"))
        assert self.inlet.bound()

    def pop(self) -> QueueItem:
        return self.inlet.pop(ahead=self.budget, accounts=[ACCOUNT])

    def spend(self, patience: float = 0.0) -> int:
        """Commands that an order's room costs now, besides those of the pop."""
        before = self.commands()
        self.budget.spend(ACCOUNT, CallKind.ORDER, lambda: patience)
        return self.commands() - before

    def commands(self) -> int:
        """Runs of scripts. Nobody else runs any."""
        info = self.stage.client.execute("INFO", "commandstats").decode()
        calls = [line for line in info.splitlines() if line.startswith(("cmdstat_evalsha:", "cmdstat_eval:"))]
        return sum(int(line.split("calls=")[1].split(",")[0]) for line in calls)

    def counted(self) -> list[int]:
        """Orders of each owner."""
        return counted(self.stage)


def counted(stage: WorkerStage) -> list[int]:
    names = stage.client.execute("KEYS", "broker:budget:*:orders")
    return [stage.client.execute("ZCARD", name) for name in names]


def enqueue(stage: WorkerStage) -> PlaceOrder:
    order = stage.order()
    stage.enqueue(order)
    return order


def test_an_order_that_was_popped_with_its_room_asks_for_no_more_and_counts_once(stage: WorkerStage) -> None:
    till = Till(stage, stage.client)
    enqueue(stage)
    before = till.commands()
    assert till.pop().kind == "request"
    assert till.commands() - before == 2
    assert till.spend() == 0
    assert till.budget.granted
    assert till.counted() == [1]


def test_room_is_kept_from_an_empty_pop_to_the_next_order(stage: WorkerStage) -> None:
    till = Till(stage, stage.client)
    assert till.pop().kind == "empty"
    enqueue(stage)
    before = till.commands()
    assert till.pop().kind == "request"
    assert till.commands() - before == 1
    if till.spend() == 0:  # unless this process stood still for too long
        assert till.counted() == [1]


def test_room_that_is_older_than_a_grant_may_be_is_asked_for_anew(stage: WorkerStage) -> None:
    till = Till(stage, stage.client)
    enqueue(stage)
    till.pop()
    popped = stage.now_ms()
    eventually(lambda: stage.now_ms() - popped > GRANT_LIFETIME * 1000, "the grant is void")
    assert till.spend() == 1
    assert till.counted() == [2]


def test_an_order_without_room_ahead_waits_as_ever(stage: WorkerStage) -> None:
    till = Till(stage, stage.client, Allowance(paper=BrokerLimits(orders_per_10s=2)))
    assert till.spend() == 1
    enqueue(stage)
    assert till.pop().kind == "request"
    with pytest.raises(RateLimited, match="used up"):
        till.spend()
    assert till.counted() == [1]
    assert till.spend(60.0) >= 1


def test_scripts_that_the_server_does_not_know_cost_neither_the_piece_nor_a_call(stage: WorkerStage) -> None:
    till = Till(stage, stage.client)
    order = enqueue(stage)
    stage.client.execute("SCRIPT", "FLUSH")
    piece = till.pop()
    assert (piece.kind, stage.processing()) == ("request", 1)
    assert order.order_id.encode() in piece.item
    assert till.counted() == []
    assert till.spend() == 2
    assert till.counted() == [1]
    assert till.pop().kind == "empty"
    assert till.spend() == 0  # known from then on
    assert till.counted() == [2]


def test_a_pop_and_a_question_whose_replies_were_lost_return_the_same_piece_and_count_once(
    stage: WorkerStage, wire: ValkeyWire
) -> None:
    client = Valkey(wire.url, timeout=PATIENCE)
    till = Till(stage, client)
    order = enqueue(stage)
    enqueue(stage)
    wire.lose = 1
    with pytest.raises(ValkeyUnreachable):
        till.pop()
    eventually(lambda: till.counted() == [1], "the question has arrived")
    piece = till.pop()
    assert order.order_id.encode() in piece.item
    assert stage.processing() == 1
    asked_anew = till.spend()  # if this process stood still for too long
    assert till.counted() == [1 + asked_anew]
    client.close()


def test_a_person_and_an_address_count_an_order_once_each(stage: WorkerStage) -> None:
    till = Till(stage, stage.client, Allowance(egress="10.0.0.1", egress_persons=1))
    enqueue(stage)
    till.pop()
    assert till.spend() == 0
    assert till.counted() == [1, 1]


def test_an_address_without_room_lets_the_order_wait_as_ever(stage: WorkerStage) -> None:
    limits = BrokerLimits(orders_per_10s=2)
    till = Till(stage, stage.client, Allowance(paper=limits, egress="10.0.0.1", egress_persons=1))
    other = OpenedAccount(
        ACCOUNT.key, 1, Credentials(api_key="k", secret_key="s", person_id="another person")
    )
    till.budget.spend(other, CallKind.ORDER, lambda: 0.0)  # of the same address
    enqueue(stage)
    assert till.inlet.pop(ahead=till.budget, accounts=[ACCOUNT]).kind == "request"
    with pytest.raises(RateLimited):
        till.spend()


def test_a_budget_that_cannot_be_asked_costs_no_piece(stage: WorkerStage) -> None:
    till = Till(stage, stage.client)
    enqueue(stage)
    [question] = till.budget.ask_ahead([ACCOUNT])
    stage.client.execute("SET", question[3], "no hash")  # the script fails
    assert till.pop().kind == "request"
    with pytest.raises(RateLimited):
        till.spend()
    assert till.counted() == []


# --- in a worker


def pops(stage: WorkerStage) -> int:
    return int(stage.client.execute("HGET", keys.pop(stage.user), "number") or 0)


def settled(stage: WorkerStage) -> int:
    """Orders that were counted when the worker had nothing more to do."""
    eventually(lambda: pops(stage) >= 2, "its own looks at the queue")
    eventually(lambda: stage.client.execute("LLEN", keys.doorbell(stage.user)) == 0, "the ring was heard")
    eventually(lambda: not stage.processing(), "it is idle")
    return sum(counted(stage))


def ring(stage: WorkerStage) -> None:
    """A ring without anything to pop, and the pop."""
    before = pops(stage)
    stage.client.execute("LPUSH", keys.doorbell(stage.user), "1")
    eventually(lambda: pops(stage) > before, "the pop after the ring")


def test_a_worker_that_looks_by_itself_asks_for_no_room(stage: WorkerStage) -> None:
    stage.active()
    # One pop when it begins, and one when its doorbell has been connected.
    eventually(lambda: pops(stage) >= 2, "its looks at the queue")
    assert counted(stage) == [2]  # its listing


def test_a_worker_counts_each_order_once(stage: WorkerStage) -> None:
    stage.active()
    listing = settled(stage)
    for _ in range(3):
        assert stage.send().failure is None
    assert settled(stage) - listing == 3


def test_a_worker_pops_once_for_an_order_that_is_alone_and_until_the_queue_is_empty_for_more(
    stage: WorkerStage,
) -> None:
    stage.active()
    settled(stage)
    before = pops(stage)
    assert stage.send().failure is None
    assert pops(stage) == before + 1
    orders = [stage.order() for _ in range(3)]
    for order in orders:
        stage.enqueue(order)
    for order in orders:
        assert stage.answer(order.request_id).failure is None
    # A ring may come after its order was popped with the one before: a look at an empty queue.
    assert pops(stage) <= before + 1 + 2 * len(orders)


def test_a_worker_asks_ahead_when_it_is_rung_and_not_again_when_that_was_for_nothing(
    stage: WorkerStage,
) -> None:
    stage.active()
    listing = settled(stage)
    ring(stage)
    rung = stage.now_ms()
    assert sum(counted(stage)) - listing == 1
    eventually(lambda: stage.now_ms() - rung > GRANT_LIFETIME * 1000, "the grant is void")
    ring(stage)
    ring(stage)
    assert sum(counted(stage)) - listing == 1


def test_whoever_only_asks_for_lists_pays_with_one_call(stage: WorkerStage) -> None:
    stage.active(accounts={f"account-{stage.user}": "good"})
    listing = settled(stage)
    for number in range(3):
        assert stage.answer(query(stage, number, 60.0)).failure is None
        until = stage.now_ms() + int(GRANT_LIFETIME * 1000)
        eventually(lambda: stage.now_ms() > until, "the grant is void")  # noqa: B023
    assert settled(stage) - listing == 3 + 1  # a list counts as an order, too
