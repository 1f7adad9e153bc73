"""Many workers of few persons ask for more than the exchange allows: it never has to refuse."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from infra.exchange.client import ExchangeAdmin, ExchangeServer
from infra.exchange.records import Incident, LedgerOrder
from infra.local.servers import ValkeyServer
from tests.support.message_signing import read_workers_answer
from tests.support.waiting import eventually
from tests.support.workers.harness import GENERATION, WorkerHarness
from tests.support.workers.process import PATIENCE, SpawnedWorker
from worker_runtime.brokers.port import ConnectionKey
from worker_runtime.process.log import Log
from worker_runtime.process.shared_state import SharedState
from worker_runtime.protocol import keys
from worker_runtime.protocol.errors import LoginLimited, RateLimited
from worker_runtime.protocol.launch import Allowance, BrokerLimits, WorkerConfig
from worker_runtime.protocol.messages import (
    Answer,
    Credentials,
    OrderState,
    PriceType,
    TimeInForce,
    encode,
)
from worker_runtime.protocol.requests import QueryAccount
from worker_runtime.trading.account_session import OpenedAccount
from worker_runtime.trading.rate_limiter import CallKind, SharedRateLimiter

REAL = ["-m", "worker_runtime"]
PERSONS, USERS = 4, 5
LIMITS = BrokerLimits(orders_per_10s=40)


class Crowd:
    """Users with a worker each, behind one exchange."""

    def __init__(self, valkey: ValkeyServer, exchange: ExchangeServer, folder: Path) -> None:
        self.valkey = valkey
        self.exchange = exchange
        self.folder = folder
        self.harnesses: list[WorkerHarness] = []

    def join(
        self,
        person: str,
        egress: tuple[str, ...] = (),
        limits: BrokerLimits = LIMITS,
        **config: float,
    ) -> tuple[WorkerHarness, SpawnedWorker]:
        """Another user of the person, with a worker that is ready to be claimed."""
        harness = WorkerHarness(self.valkey.url, self.folder)
        self.harnesses.append(harness)
        harness.broker, harness.person = "paper", person
        account = f"account-{harness.user}"
        asyncio.run(self._register(account, person))
        allowance = Allowance(limits={"paper": limits}, egress=egress, egress_persons=PERSONS)
        worker = harness.launch(
            REAL, paper_exchange=self.exchange.address, allowance=allowance, **config
        )
        return harness, worker

    def claim(self, harness: WorkerHarness, worker: SpawnedWorker) -> str:
        """The code of the claim's failure, or ''."""
        harness.await_ready(worker)
        reply = harness.claim(worker, accounts={f"account-{harness.user}": "key"})
        return reply.failure.code if reply.failure else ""

    def end_sessions(self, harness: WorkerHarness) -> None:
        async def end() -> None:
            async with ExchangeAdmin(self.exchange.admin_url) as admin:
                await admin.end_sessions(f"account-{harness.user}", "maintenance")

        asyncio.run(end())

    def incidents(self) -> list[Incident]:
        async def ask() -> list[Incident]:
            async with ExchangeAdmin(self.exchange.admin_url) as admin:
                return await admin.incidents()

        return asyncio.run(ask())

    def ledger(self) -> list[LedgerOrder]:
        async def ask() -> list[LedgerOrder]:
            async with ExchangeAdmin(self.exchange.admin_url) as admin:
                return await admin.ledger()

        return asyncio.run(ask())

    async def _register(self, account: str, person: str) -> None:
        async with ExchangeAdmin(self.exchange.admin_url) as admin:
            await admin.register(account, "key", "s", person_id=person)


@pytest.fixture
def crowd(valkey_server: ValkeyServer, short_directory: Path, tmp_path: Path) -> Iterator[Crowd]:
    options = ["--orders-per-10s", str(LIMITS.orders_per_10s)]
    with ExchangeServer(short_directory / "exchange", options=options) as exchange:
        crowd = Crowd(valkey_server, exchange, tmp_path)
        harness = WorkerHarness(valkey_server.url, tmp_path)
        harness.client.execute("FLUSHALL")
        harness.client.close()
        yield crowd
        for member in crowd.harnesses:
            member.close()


def place(harness: WorkerHarness, seconds: float) -> str:
    """Enqueues a market order; returns the request id."""
    order = harness.order(
        account_id=f"account-{harness.user}",
        price_type=PriceType.MARKET,
        price=None,
        time_in_force=TimeInForce.IOC,
    )
    harness.enqueue(order, ttl_ms=int(seconds * 1000))
    return order.request_id


def query(harness: WorkerHarness, number: int, seconds: float) -> str:
    request = QueryAccount(
        request_id=f"q{number}",
        user_id=harness.user,
        account_id=f"account-{harness.user}",
        reply_to=keys.answers("test"),
        generation=GENERATION,
    )
    harness.enqueue_raw(request.request_id, encode(request), ttl_ms=int(seconds * 1000))
    return request.request_id


def answer(harness: WorkerHarness, request_id: str, patience: float) -> Answer:
    key = keys.response(harness.user, request_id)
    data = eventually(
        lambda: harness.client.execute("GET", key), f"an answer to {request_id}", patience
    )
    parsed = read_workers_answer(data, harness.user)
    return parsed


@pytest.mark.timeout(150)
def test_twenty_workers_that_ask_for_too_much_are_never_refused_by_the_exchange(
    crowd: Crowd,
) -> None:
    joined = [
        crowd.join(f"person-{number % PERSONS}", ("address",)) for number in range(PERSONS * USERS)
    ]
    assert [crowd.claim(harness, worker) for harness, worker in joined] == [""] * len(joined)
    one_more = crowd.join("person-0", ("address",))
    assert crowd.claim(*one_more) == "LOGIN_LIMITED"
    asked = []
    for harness, _ in joined:
        asked += [(harness, query(harness, number, 60.0)) for number in range(3)]
        asked += [(harness, place(harness, 60.0)) for _ in range(8)]
    answers = [answer(harness, request_id, 60.0) for harness, request_id in asked]
    assert [reply.failure for reply in answers if reply.failure] == []
    assert crowd.incidents() == []
    assert len(crowd.ledger()) == 8 * len(joined)
    assert any(worker.logged("budget_awaited") for _, worker in joined)
    assert len(crowd.harnesses[0].client.execute("KEYS", "broker:budget:*")) > PERSONS


@pytest.mark.parametrize(
    ("kind", "queries", "orders"),
    [(CallKind.ORDER, 0, 1), (CallKind.QUERY, 1, 1), (CallKind.QUERY_AND_CHANGE, 1, 2)],
)
def test_a_call_counts_in_all_windows_that_it_falls_into(
    harness: WorkerHarness, kind: CallKind, queries: int, orders: int
) -> None:
    config = WorkerConfig(
        worker_id="w",
        pool="p",
        valkey_url="",
        launch_token=b"",
        orchestrator_keys=(),
    )
    shared_state = SharedState()
    # A user's first worker: no count was lost.
    shared_state.epoch, shared_state.claimed_session = (1, shared_state.session_number)
    credentials = Credentials(api_key="k", secret_key="s")
    account = OpenedAccount(ConnectionKey("shioaji", "futures", True, "a"), 1, credentials, ["b"])
    SharedRateLimiter(harness.client, config, shared_state, Log("ERROR")).spend(
        account, kind, lambda: 1.0
    )
    counted = {
        key.rsplit(b":", 1)[1]: harness.client.execute("ZCARD", key)
        for key in harness.client.execute("KEYS", "broker:budget:*")
        if not key.endswith(b":since")
    }
    assert (counted.get(b"queries", 0), counted.get(b"orders", 0)) == (queries, orders)


def limiter_with(
    harness: WorkerHarness, *budgets: str, epoch: int = 1, limits: BrokerLimits = LIMITS
) -> Callable[[str], str]:
    """Takes 'orders' or 'connection NAME' for one person, and returns why it is refused, or ''."""
    config = harness.config(allowance=Allowance(limits={"paper": limits}))
    shared_state = SharedState()
    shared_state.session_number = 1
    shared_state.assign(harness.user, "c1", epoch)
    limiter = SharedRateLimiter(harness.client, config, shared_state, Log("ERROR"))

    def take(kind: str) -> str:
        account = OpenedAccount(
            ConnectionKey("paper", "stock", True, kind),
            1,
            Credentials(api_key="k", secret_key="s"),
            budgets,
        )
        try:
            if kind == "orders":
                limiter.spend(account, CallKind.ORDER, lambda: 0.0)
            else:
                limiter.connect(account, lambda: 0.0)
        except (RateLimited, LoginLimited) as refused:
            return refused.detail
        return ""

    return take


def test_workers_of_before_and_after_a_rotation_of_the_budget_key_share_one_count(
    harness: WorkerHarness,
) -> None:
    old, new = "under-the-old-key", "under-the-new-key"
    limits = BrokerLimits(orders_per_10s=6, connections=2)  # 5 orders of it are ours
    before = limiter_with(harness, old, limits=limits)
    # Of a user who had a worker before, for whom a missing count is a lost one, unless there is an
    # older one.
    after = limiter_with(harness, old, new, epoch=2, limits=limits)
    assert [before("connection 1"), after("connection 2")] == ["", ""]
    assert "No connection" in before("connection 3")
    assert "No connection" in after("connection 3")
    assert [
        before("orders"),
        before("orders"),
        after("orders"),
        after("orders"),
        after("orders"),
    ] == [""] * 5
    assert "used up" in before("orders")
    assert "used up" in after("orders")
    # Those claimed when the old key is gone know what those counted that had both.
    last = limiter_with(harness, new, epoch=3, limits=limits)
    assert [last("orders"), last("orders")] == ["", ""]
    assert "used up" in last("orders")


def test_an_order_beyond_the_limit_waits_within_its_deadline_or_is_refused(crowd: Crowd) -> None:
    # 6 of which 5 are used, and the listing after the login took 2 of these.
    harness, worker = crowd.join("person", limits=BrokerLimits(orders_per_10s=6))
    assert crowd.claim(harness, worker) == ""
    granted = 3
    for _ in range(granted):
        assert answer(harness, place(harness, 60.0), PATIENCE).failure is None
    refused = answer(harness, place(harness, 5.0), PATIENCE)
    # All of it took so long that there was room again, or the order was popped too late: then once
    # more.
    while refused.failure is None or refused.failure.code == "DEADLINE_EXCEEDED":
        granted += refused.failure is None
        refused = answer(harness, place(harness, 5.0), PATIENCE)
    assert (refused.failure.code, refused.failure.retryable) == ("RATE_LIMITED", True)
    assert "is used up. Nothing was sent. Retry in" in refused.failure.detail
    assert refused.outcome is not None
    assert refused.outcome.state is OrderState.REJECTED
    assert len(crowd.ledger()) == granted
    assert answer(harness, place(harness, 60.0), PATIENCE).failure is None
    assert len(crowd.ledger()) == granted + 1
    assert worker.end() == 0


def test_a_worker_that_ends_gives_its_connection_to_the_next_one(crowd: Crowd) -> None:
    limits = BrokerLimits(connections=1)
    harness, worker = crowd.join("person", limits=limits)
    assert crowd.claim(harness, worker) == ""
    assert crowd.claim(*crowd.join("person", limits=limits)) == "LOGIN_LIMITED"
    assert worker.end() == 0
    assert crowd.claim(*crowd.join("person", limits=limits)) == ""
    assert crowd.incidents() == []


def test_a_wait_for_room_lasts_until_the_deadline_and_not_only_as_long_as_a_call_may(
    crowd: Crowd,
) -> None:
    # 4 of which 3 are used in 5 s: the listing after the login takes 2, the next one has to wait.
    harness, worker = crowd.join(
        "person", limits=BrokerLimits(queries_per_5s=4), broker_timeout=3.5
    )
    began = harness.now_ms()
    assert crowd.claim(harness, worker) == ""
    crowd.end_sessions(harness)
    sent = place(harness, 1.0)
    eventually(
        lambda: harness.answered(sent) or not harness.waiting(),
        "it is answered, or was taken too late",
    )
    refused = answer(harness, sent, PATIENCE) if harness.answered(sent) else None
    # There is room again when the listing is that old.
    assert refused is None or refused.failure is not None or harness.now_ms() > began + 5000
    # Else the worker had begun by itself to log in, and to wait, or the end of the session met the
    # order.
    others = {"DEADLINE_EXCEEDED", "SESSION_DOWN", "OUTCOME_UNKNOWN"}
    if refused is not None and refused.failure is not None and refused.failure.code not in others:
        assert refused.failure.code == "RATE_LIMITED"
        assert refused.failure.retry_after_ms is not None
        assert 0 < refused.failure.retry_after_ms <= 5500
    assert answer(harness, place(harness, 60.0), PATIENCE).failure is None
    assert crowd.incidents() == []
    assert worker.end() == 0


def counted(harness: WorkerHarness) -> list[int]:
    """Orders counted for each owner."""
    names = harness.client.execute("KEYS", "broker:budget:*:orders")
    return [harness.client.execute("ZCARD", name) for name in names]


def pops(harness: WorkerHarness) -> int:
    return int(harness.client.execute("HGET", keys.pop(harness.user), "number") or 0)


def settled(harness: WorkerHarness) -> int:
    """Orders that were counted when the worker had nothing more to do."""
    eventually(lambda: pops(harness) >= 2, "its own looks at the queue")
    eventually(
        lambda: harness.client.execute("LLEN", keys.doorbell(harness.user)) == 0,
        "the ring was heard",
    )
    eventually(lambda: not harness.processing(), "it is idle")
    return sum(counted(harness))


def test_a_worker_counts_each_order_once(harness: WorkerHarness) -> None:
    harness.active()
    listing = settled(harness)
    for _ in range(3):
        assert harness.send().failure is None
    assert settled(harness) - listing == 3


def test_a_worker_pops_once_for_an_order_that_is_alone_and_until_the_queue_is_empty_for_more(
    harness: WorkerHarness,
) -> None:
    harness.active()
    settled(harness)
    before = pops(harness)
    assert harness.send().failure is None
    assert pops(harness) == before + 1
    orders = [harness.order() for _ in range(3)]
    for order in orders:
        harness.enqueue(order)
    for order in orders:
        assert harness.answer(order.request_id).failure is None
    # A ring may come after its order was popped with the one before: a look at an empty queue.
    assert pops(harness) <= before + 1 + 2 * len(orders)


def test_a_person_and_an_address_count_an_order_once_each(harness: WorkerHarness) -> None:
    config = harness.config(
        worker_id="w1", allowance=Allowance(egress=("address",), egress_persons=1)
    )
    shared_state = SharedState()
    shared_state.session_number = 1
    shared_state.assign(harness.user, "c1", 1)
    limiter = SharedRateLimiter(harness.client, config, shared_state, Log("ERROR"))
    account = OpenedAccount(
        ConnectionKey("paper", "stock", True, "a1"),
        1,
        Credentials(api_key="k", secret_key="s"),
        ["b"],
    )
    limiter.spend(account, CallKind.ORDER, lambda: 0.0)
    assert counted(harness) == [1, 1]


def limiter_of(harness: WorkerHarness, worker_id: str, epoch: int) -> SharedRateLimiter:
    shared_state = SharedState()
    shared_state.session_number = 1
    shared_state.assign(harness.user, worker_id, epoch)
    config = harness.config(worker_id=worker_id, allowance=Allowance(paper=LIMITS))
    return SharedRateLimiter(harness.client, config, shared_state, Log("ERROR"))


def test_e_a_pause_outlives_the_worker_that_met_it(harness: WorkerHarness) -> None:
    """Sinotrade's manual: a minute without calls; each call during a pause may extend it."""

    def account_of(name: str, budget: str = "person") -> OpenedAccount:
        key = ConnectionKey("shioaji", "stock", False, name)
        return OpenedAccount(key, 1, Credentials(api_key="k", secret_key="s"), [budget])

    first, successor = limiter_of(harness, "w1", 1), limiter_of(harness, "w2", 2)
    first.connect(account_of("a1"), lambda: 0.0)
    first.note_pause(account_of("a1"), 60.0)
    for limiter, name in ((successor, "a1"), (successor, "a2"), (first, "a1")):
        with pytest.raises(LoginLimited) as caught:
            limiter.connect(account_of(name), lambda: 0.0)
        assert caught.value.retry_after is not None
        assert 55 < caught.value.retry_after <= 60
    limiter_of(harness, "w3", 1).connect(account_of("a1", "other person"), lambda: 0.0)
    # As a minute does.
    harness.client.execute("HSET", keys.budget("person", "since"), "quiet_until", "1")
    first.connect(account_of("a1"), lambda: 0.0)
