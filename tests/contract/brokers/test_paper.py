"""What only the paper adapter shows, on a real exchange that misbehaves on purpose."""

from __future__ import annotations

import socket
import threading
import time
from collections.abc import Iterator
from decimal import Decimal
from pathlib import Path

import pytest

from infra.berth_testing.harness import (
    API_KEY,
    CREDENTIALS,
    SECRET_KEY,
    HeardOrders,
    order,
    until,
)
from infra.exchange.behaviour import Behaviour, FaultPoint, FillMode
from infra.exchange.client import ExchangeServer
from infra.local.process import free_port
from tests.support.brokers.harnesses import PaperStage
from worker_runtime.brokers.paper.broker import PaperBroker
from worker_runtime.brokers.port import ConnectionKey
from worker_runtime.brokers.registry import create_broker
from worker_runtime.protocol.errors import (
    BrokerError,
    BrokerMaintenance,
    BrokerUnreachable,
    LoginLimited,
    OrderRejected,
    OutcomeUnknown,
    RateLimited,
    SessionDown,
)
from worker_runtime.protocol.launch import WorkerConfig
from worker_runtime.protocol.messages import OrderState


@pytest.fixture
def broker(paper: PaperStage, account: str, heard: HeardOrders) -> Iterator[PaperBroker]:
    paper.register(account, API_KEY, SECRET_KEY)
    made = paper.broker(account, heard)
    made.login(CREDENTIALS, 5.0)
    yield made
    made.close()


def test_an_exchange_that_is_not_there_is_unreachable(heard: HeardOrders) -> None:
    lonely = PaperBroker(f"127.0.0.1:{free_port()}", "a", "suite", heard)
    with pytest.raises(BrokerUnreachable):
        lonely.login(CREDENTIALS, 1.0)
    lonely.close()


@pytest.mark.parametrize("address", ["", "nonsense", "127.0.0.1:99999", "127.0.0.1:x"])
def test_an_invalid_address_is_unreachable(address: str, heard: HeardOrders) -> None:
    with pytest.raises(BrokerUnreachable):
        PaperBroker(address, "a", "suite", heard).login(CREDENTIALS, 1.0)


def test_a_login_that_is_never_answered_ends_in_time(
    paper: PaperStage, account: str, heard: HeardOrders
) -> None:
    paper.register(account, API_KEY, SECRET_KEY)
    paper.behave(account, Behaviour(faults={FaultPoint.LOST_LOGIN: 1}))
    broker = paper.broker(account, heard)
    started = time.monotonic()
    with pytest.raises(BrokerUnreachable):
        broker.login(CREDENTIALS, 4.0)  # long enough for the exchange to take it, and to lose it
    assert time.monotonic() - started < 9.0  # the exchange itself gives up after 10 s
    broker.login(CREDENTIALS, 5.0)  # may be tried again
    broker.ping(5.0)
    broker.close()


def test_a_lost_acknowledgement_is_unknown_and_the_ledger_has_the_order(
    paper: PaperStage, broker: PaperBroker, account: str, heard: HeardOrders
) -> None:
    paper.behave(account, Behaviour(faults={FaultPoint.LOST_ACK: 1}))
    new_order = order()
    with pytest.raises(OutcomeUnknown):
        broker.place(new_order, 0.3)
    until(lambda: [taken.note for taken in paper.taken(account)] == [new_order.order_id])
    [change] = heard.wait(lambda changes: len(changes) == 1)  # the fill is reported all the same
    assert change.order.tag == new_order.tag
    assert [known.tag for known in broker.orders(5.0).orders] == [new_order.tag]


def test_a_lost_request_is_unknown_too_and_the_ledger_has_nothing(
    paper: PaperStage, broker: PaperBroker, account: str
) -> None:
    paper.behave(account, Behaviour(faults={FaultPoint.LOST_REQUEST: 1}))
    with pytest.raises(OutcomeUnknown):
        broker.place(order(), 5.0)
    assert paper.taken(account) == []


def test_an_answer_that_comes_too_late_is_reported_as_a_change(
    paper: PaperStage, broker: PaperBroker, account: str, heard: HeardOrders
) -> None:
    paper.behave(
        account, Behaviour(fill=FillMode.NEVER, late_ack_ms=5_000, faults={FaultPoint.LATE_ACK: 1})
    )
    new_order = order(price=Decimal(1))
    with pytest.raises(OutcomeUnknown):
        broker.place(new_order, 0.1)
    [change] = heard.wait(lambda changes: len(changes) == 1)
    assert change.order.tag == new_order.tag
    assert change.order.state is OrderState.SUBMITTED


def test_a_fill_that_the_broker_reports_twice_is_one_event(
    paper: PaperStage, broker: PaperBroker, account: str, heard: HeardOrders
) -> None:
    paper.behave(account, Behaviour(faults={FaultPoint.DUPLICATE_FILL: 1}))
    first = broker.place(order(), 5.0)
    second = broker.place(order(), 5.0)  # its event comes behind both copies of the first
    told = heard.wait(lambda changes: len(changes) >= 2)
    assert [change.fill for change in told] == [first.fills[0], second.fills[0]]


def test_a_delayed_fill_comes_as_a_change(
    paper: PaperStage, broker: PaperBroker, account: str, heard: HeardOrders
) -> None:
    paper.behave(account, Behaviour(fill=FillMode.DELAYED, fill_delay_ms=50))
    placed = broker.place(order(), 5.0)
    assert placed.state is OrderState.SUBMITTED
    [change] = heard.wait(lambda changes: len(changes) == 1)
    assert change.order.state is OrderState.FILLED
    assert change.order.broker_order_id == placed.broker_order_id


def test_orders_filled_by_hand_in_parts_are_reported_part_by_part(
    paper: PaperStage, broker: PaperBroker, account: str, heard: HeardOrders
) -> None:
    paper.behave(account, Behaviour(fill=FillMode.MANUAL))
    placed = broker.place(order(quantity=5), 5.0)
    paper.ask(lambda admin: admin.fill(placed.broker_order_id, 2, Decimal("10.5")))
    paper.ask(lambda admin: admin.fill(placed.broker_order_id))
    told = heard.wait(lambda changes: len(changes) == 2)
    assert [change.order.state for change in told] == [OrderState.PART_FILLED, OrderState.FILLED]
    assert [change.fill.quantity for change in told if change.fill] == [2, 3]


def test_latency_delays_the_answer_and_not_the_ledger(
    paper: PaperStage, broker: PaperBroker, account: str
) -> None:
    paper.behave(account, Behaviour(latency_ms=10_000))
    with pytest.raises(OutcomeUnknown):
        broker.place(order(), 0.05)
    until(lambda: len(paper.taken(account)) == 1)


def test_a_session_that_the_exchange_ends_is_down_before_anything_is_sent(
    paper: PaperStage, broker: PaperBroker, account: str
) -> None:
    assert broker.alive()
    assert paper.ask(lambda admin: admin.end_sessions(account, "token expired")) == 1
    until(lambda: not broker.alive())  # told by the exchange, without a question from here
    with pytest.raises(SessionDown):
        broker.ping(1.0)
    with pytest.raises(SessionDown, match="token expired"):
        broker.place(order(), 1.0)
    assert paper.taken(account) == []


def test_a_ping_without_an_answer_is_unreachable(
    paper: PaperStage, broker: PaperBroker, account: str
) -> None:
    paper.behave(account, Behaviour(faults={FaultPoint.LOST_PONG: 1}))
    with pytest.raises(BrokerUnreachable):
        broker.ping(0.2)
    broker.ping(5.0)


def test_no_time_at_all_sends_nothing(paper: PaperStage, broker: PaperBroker, account: str) -> None:
    with pytest.raises(OrderRejected):
        broker.place(order(), 0.0)
    assert paper.taken(account) == []


def test_an_observer_that_fails_does_not_end_the_session(paper: PaperStage, account: str) -> None:
    def fails(change: object) -> None:
        raise RuntimeError("a fault in the session's code")

    paper.register(account, API_KEY, SECRET_KEY)
    broker = paper.broker(account, fails)
    broker.login(CREDENTIALS, 5.0)
    broker.place(order(), 5.0)
    assert broker.place(order(), 5.0).state is OrderState.FILLED
    broker.close()


def test_two_threads_get_their_own_answers(broker: PaperBroker) -> None:
    wrong: list[str] = []

    def trade() -> None:
        for _ in range(50):
            new_order = order()
            if broker.place(new_order, 5.0).tag != new_order.tag:
                wrong.append(new_order.tag)

    threads = [threading.Thread(target=trade) for _ in range(2)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert wrong == []
    assert len(broker.orders(5.0).orders) == 100


def test_an_exchange_that_is_killed_leaves_the_outcome_unknown(
    tmp_path: Path, heard: HeardOrders
) -> None:
    with ExchangeServer(tmp_path) as server:
        stage = PaperStage(server.address, server.admin_url)
        stage.register("a", API_KEY, SECRET_KEY)
        stage.behave("a", Behaviour(latency_ms=60_000))
        broker = stage.broker("a", heard)
        broker.login(CREDENTIALS, 5.0)
        new_order = order()
        caught: list[Exception] = []

        def place() -> None:
            try:
                broker.place(new_order, 55.0)
            except BrokerError as error:
                caught.append(error)

        thread = threading.Thread(target=place)
        thread.start()
        until(lambda: len(stage.taken("a")) == 1)
        server.kill()
        thread.join(20.0)
        assert [type(error) for error in caught] == [OutcomeUnknown]
        broker.close()
        server.start()
        assert [taken.note for taken in stage.taken("a")] == [new_order.order_id]


def test_a_token_that_expires_ends_the_session(
    paper: PaperStage, account: str, heard: HeardOrders
) -> None:
    paper.register(account, API_KEY, SECRET_KEY)
    paper.behave(account, Behaviour(session_life_ms=300))
    broker = paper.broker(account, heard)
    broker.login(CREDENTIALS, 5.0)
    until(lambda: not broker.alive())
    with pytest.raises(SessionDown, match="the token expired"):
        broker.place(order(), 5.0)
    paper.behave(account, Behaviour())
    broker.login(CREDENTIALS, 5.0)  # a new one is as good as the first
    broker.ping(5.0)
    broker.close()
    assert paper.taken(account) == []


def test_fills_that_a_gap_swallowed_are_in_the_list(
    paper: PaperStage, broker: PaperBroker, account: str, heard: HeardOrders
) -> None:
    paper.behave(
        account,
        Behaviour(fill=FillMode.MANUAL, event_gap_ms=60_000, faults={FaultPoint.EVENT_GAP: 1}),
    )
    placed = broker.place(order(quantity=5), 5.0)
    paper.ask(lambda admin: admin.fill(placed.broker_order_id, 2))
    paper.ask(lambda admin: admin.fill(placed.broker_order_id))
    [known] = broker.orders(5.0).orders
    assert (known.state, [fill.quantity for fill in known.fills]) == (OrderState.FILLED, [2, 3])
    assert heard.changes == []


def test_fills_may_come_out_of_order(
    paper: PaperStage, broker: PaperBroker, account: str, heard: HeardOrders
) -> None:
    paper.behave(
        account,
        Behaviour(fill=FillMode.MANUAL, late_event_ms=6_000, faults={FaultPoint.LATE_EVENT: 1}),
    )
    placed = broker.place(order(quantity=5), 5.0)
    paper.ask(lambda admin: admin.fill(placed.broker_order_id, 2))
    paper.ask(lambda admin: admin.fill(placed.broker_order_id))
    told = heard.wait(lambda changes: len(changes) == 2)
    assert sorted(change.fill.quantity for change in told if change.fill) == [2, 3]
    assert told[0].order.state is OrderState.FILLED


def test_a_lost_answer_to_a_cancel_leaves_it_open(
    paper: PaperStage, broker: PaperBroker, account: str, heard: HeardOrders
) -> None:
    placed = broker.place(order(price=Decimal("0.01")), 5.0)
    paper.behave(account, Behaviour(faults={FaultPoint.LOST_CHANGE_ACK: 1}))
    with pytest.raises(OutcomeUnknown):
        broker.cancel(placed.broker_order_id, 0.3)
    [change] = heard.wait(lambda changes: len(changes) == 1)
    assert change.order.state is OrderState.CANCELLED


def test_a_question_that_is_not_answered_is_unreachable(
    paper: PaperStage, broker: PaperBroker, account: str
) -> None:
    paper.behave(account, Behaviour(faults={FaultPoint.LOST_QUERY: 1}))
    with pytest.raises(BrokerUnreachable):
        broker.orders(0.2)
    assert broker.orders(5.0).orders == []
    paper.behave(account, Behaviour(faults={FaultPoint.DROP_IN_QUERY: 1}))
    with pytest.raises(SessionDown):
        broker.positions(5.0)
    assert not broker.alive()


def test_what_the_exchange_refuses_by_its_rules_was_not_done(
    tmp_path: Path, heard: HeardOrders
) -> None:
    with ExchangeServer(
        tmp_path, options=("--orders-per-10s", "2", "--queries-per-5s", "1")
    ) as server:
        stage = PaperStage(server.address, server.admin_url)
        stage.register("a", API_KEY, SECRET_KEY)
        broker = stage.broker("a", heard)
        broker.login(CREDENTIALS, 5.0)
        stage.ask(lambda admin: admin.begin_maintenance(60, ends_sessions=False))
        with pytest.raises(BrokerMaintenance):
            broker.place(order(), 5.0)
        with pytest.raises(BrokerMaintenance):
            broker.orders(5.0)
        with pytest.raises(BrokerMaintenance):
            stage.broker("a", heard).login(CREDENTIALS, 5.0)
        broker.ping(5.0)
        stage.ask(lambda admin: admin.end_maintenance())
        placed = broker.place(order(), 5.0)
        with pytest.raises(OrderRejected):  # it is filled; the call counts all the same
            broker.cancel(placed.broker_order_id, 5.0)
        with pytest.raises(RateLimited, match="more than 2 orders in 10 s"):
            broker.place(order(), 5.0)
        with pytest.raises(RateLimited, match="banned"):
            broker.positions(5.0)
        with pytest.raises(LoginLimited, match="banned"):
            stage.broker("a", heard).login(CREDENTIALS, 5.0)
        assert broker.alive()
        assert len(stage.taken("a")) == 1
        broker.close()


def test_a_server_that_talks_nonsense_is_unreachable(heard: HeardOrders) -> None:
    with socket.create_server(("127.0.0.1", 0)) as listener:

        def babble() -> None:
            link, _ = listener.accept()
            with link:
                link.sendall(b"220 mail.example.com ESMTP\r\n")
                link.recv(1000)

        thread = threading.Thread(target=babble)
        thread.start()
        broker = PaperBroker(f"127.0.0.1:{listener.getsockname()[1]}", "a", "suite", heard)
        with pytest.raises(BrokerUnreachable):
            broker.login(CREDENTIALS, 5.0)
        thread.join(5.0)


def test_a_login_is_in_the_ledger_under_its_name(
    paper: PaperStage, broker: PaperBroker, account: str
) -> None:
    [session] = paper.ask(lambda admin: admin.sessions(account, open=True))
    assert session.client == "suite"
    broker.close()
    until(lambda: not paper.ask(lambda admin: admin.sessions(account, open=True)))
    [closed] = paper.ask(lambda admin: admin.sessions(account))
    assert closed.close_reason == "logged out"


def _config(paper_exchange: str) -> WorkerConfig:
    return WorkerConfig(
        worker_id="w",
        pool="p",
        valkey_url="redis://127.0.0.1:1/0",
        launch_token=b"t",
        orchestrator_keys=(b"k" * 32,),
        paper_exchange=paper_exchange,
    )


def test_the_registry_makes_a_paper_broker(exchange: ExchangeServer, heard: HeardOrders) -> None:
    key = ConnectionKey("paper", "stock", True, "a")
    assert isinstance(create_broker(_config(exchange.address), key, "w", heard), PaperBroker)


def test_the_registry_refuses_what_it_does_not_know(heard: HeardOrders) -> None:
    with pytest.raises(
        BrokerError, match="This worker has no broker 'gold'; it has paper, shioaji"
    ):
        create_broker(_config("x:1"), ConnectionKey("gold", "stock", True, "a"), "w", heard)
    with pytest.raises(BrokerError, match="where the paper exchange is"):
        create_broker(_config(""), ConnectionKey("paper", "stock", True, "a"), "w", heard)
