"""Lost and late replies between the worker's client and Valkey."""

from __future__ import annotations

import time
from collections.abc import Iterator

import pytest

from infra.local.servers import ValkeyServer
from tests.support.message_signing import switch_args
from tests.support.proxies.valkey_wire import ValkeyWire
from tests.support.workers.harness import WorkerStage
from tests.support.workers.process import PATIENCE
from worker_runtime.process.clock import SECOND, boot_ns
from worker_runtime.process.log import Log
from worker_runtime.process.mark import WorkerMark
from worker_runtime.process.shared_state import SharedState
from worker_runtime.process.valkey import Valkey, ValkeyRefused, ValkeyUnreachable
from worker_runtime.protocol import keys
from worker_runtime.protocol.messages import Answer, WorkerEventKind
from worker_runtime.protocol.requests import UserSwitch
from worker_runtime.protocol.scripts import POP, WRITE_SWITCH
from worker_runtime.session.queue_reader import RequestQueueReader
from worker_runtime.trading.send_buffer import SendBuffer


@pytest.fixture
def wire(valkey_server: ValkeyServer) -> Iterator[ValkeyWire]:
    with ValkeyWire(("127.0.0.1", valkey_server.port)) as wire:
        yield wire


@pytest.fixture
def client(wire: ValkeyWire) -> Iterator[Valkey]:
    client = Valkey(wire.url, timeout=PATIENCE)  # the wire's threads stand still with this process
    yield client
    client.close()


def _shared_state(stage: WorkerStage) -> SharedState:
    shared_state = SharedState()
    shared_state.session_number = 1
    shared_state.write_message_keys(stage.secrets.for_worker(stage.user, 1))
    shared_state.assign(stage.user, "c1", 1)
    return shared_state


def test_a_pop_whose_reply_was_lost_returns_the_same_item(
    stage: WorkerStage, wire: ValkeyWire, client: Valkey
) -> None:
    stage.own("w1", 1)
    items = [stage.enqueue(stage.order()) for _ in range(2)]
    client.execute("SCRIPT", "LOAD", POP.source)
    queue_reader = RequestQueueReader(client, _shared_state(stage), "w1", Log("ERROR"))
    assert queue_reader.is_switch_current()
    wire.lose = 1
    with pytest.raises(ValkeyUnreachable):
        queue_reader.pop()
    assert stage.processing() == 1
    item = queue_reader.pop()
    assert (item.kind, item.raw) == ("request", items[0])
    assert stage.processing() == 1
    assert queue_reader.pop().raw == items[1]
    assert queue_reader.pop().kind == "empty"


def test_a_pop_that_is_repeated_at_another_server_says_that_its_switch_is_stale(
    stage: WorkerStage, wire: ValkeyWire, client: Valkey
) -> None:
    stage.own("w1", 1)
    order = stage.order()
    raw = stage.enqueue(order)
    client.execute("SCRIPT", "LOAD", POP.source)
    queue_reader = RequestQueueReader(client, _shared_state(stage), "w1", Log("ERROR"))
    assert queue_reader.is_switch_current()
    wire.lose = 1
    with pytest.raises(ValkeyUnreachable):
        queue_reader.pop()
    elsewhere = switch_args(stage.user, UserSwitch(server="another one"))
    assert stage.client.run(WRITE_SWITCH, [keys.switch(stage.user)], elsewhere) == b"ok"
    item = queue_reader.pop(control_only=True)
    assert (item.kind, item.raw, item.switch_is_stale) == ("request", raw, True)
    assert queue_reader.put_back(raw, order.order_id) == "queued"
    assert not queue_reader.is_switch_current()


def test_a_client_waits_no_longer_than_its_limit(wire: ValkeyWire) -> None:
    client = Valkey(wire.url, timeout=10.0, limit=lambda: 0.1)
    client.connect()
    wire.hold = 8.0
    before = time.monotonic()
    with pytest.raises(ValkeyUnreachable):
        client.execute("PING")
    assert time.monotonic() - before < 7.0
    client.close()


def test_a_lost_reply_costs_no_answer_and_no_event(
    stage: WorkerStage, wire: ValkeyWire, client: Valkey
) -> None:
    shared_state = _shared_state(stage)
    send_buffer = SendBuffer(client, stage.config(worker_id="w1"), shared_state, Log("ERROR"))
    stage.client.execute("LPUSH", keys.processing(stage.user), "item")
    send_buffer.add_worker_event(WorkerEventKind.CONNECTED)
    send_buffer.add_answer(b"item", Answer(request_id="r1"), "")
    wire.lose = 1
    assert send_buffer.flush()
    assert stage.answer("r1") == Answer(request_id="r1")
    assert stage.processing() == 0
    sequences = {event.sequence for event in stage.events() if hasattr(event, "sequence")}
    assert sequences == {2}


def test_what_cannot_be_sent_stays_in_order(
    stage: WorkerStage, wire: ValkeyWire, client: Valkey
) -> None:
    send_buffer = SendBuffer(
        client, stage.config(worker_id="w1"), _shared_state(stage), Log("ERROR")
    )
    for kind in (WorkerEventKind.DEGRADED, WorkerEventKind.RECONNECTING, WorkerEventKind.CONNECTED):
        send_buffer.add_worker_event(kind)
    wire.lose = 2
    assert not send_buffer.flush()
    assert len(send_buffer) == 4  # one ring for all three
    assert send_buffer.flush()
    assert stage.kinds()[-3:] == ["degraded", "reconnecting", "connected"]


def test_a_journal_entry_without_a_reply_is_not_taken_for_written(
    stage: WorkerStage, wire: ValkeyWire, client: Valkey
) -> None:
    send_buffer = SendBuffer(
        client, stage.config(worker_id="w1"), _shared_state(stage), Log("ERROR")
    )
    send_buffer.add_journal_entry("o1")
    wire.lose = 2
    assert not send_buffer.flush()
    assert not send_buffer.journaled
    assert send_buffer.flush()
    assert send_buffer.journaled  # the entry that stands there is our own
    assert stage.client.execute("EXISTS", keys.journal(stage.user, "o1")) == 1
    send_buffer.add_journal_entry("o1")
    assert send_buffer.flush()
    assert not send_buffer.journaled


def test_the_lease_runs_from_before_the_renewal_was_sent(
    stage: WorkerStage, wire: ValkeyWire, client: Valkey
) -> None:
    stage.own("w1", 1)
    mark = WorkerMark(stage.config(worker_id="w1", mark_ttl=10.0), _shared_state(stage))
    client.connect()
    wire.hold = 0.3
    before = boot_ns()
    outcome, lease_end = mark.renew(client)
    assert outcome == "ok"
    # The reply took 0.3 s: the lease does not run from its arrival.
    assert before <= lease_end - 10 * SECOND <= boot_ns() - 0.3 * SECOND


def test_a_late_reply_is_never_taken_for_the_next_one(stage: WorkerStage, wire: ValkeyWire) -> None:
    client = Valkey(wire.url, timeout=0.2)
    stage.client.execute("SET", "a", "1")
    stage.client.execute("SET", "b", "2")
    client.connect()
    wire.hold = 20.0
    with pytest.raises(ValkeyUnreachable):
        client.execute("GET", "a")
    wire.hold, client.timeout = 0.0, PATIENCE
    assert client.execute("GET", "b") == b"2"
    client.close()


def test_an_error_reply_is_raised_with_its_code_alone(client: Valkey) -> None:
    with pytest.raises(ValkeyRefused, match=r"^ERR$"):
        client.execute("NO-SUCH-COMMAND", "secret")
    assert client.connected


def test_a_script_that_the_server_does_not_know_is_sent(stage: WorkerStage, client: Valkey) -> None:
    client.execute("SCRIPT", "FLUSH")
    stage.own("w1", 1)
    assert (
        RequestQueueReader(client, _shared_state(stage), "w1", Log("ERROR")).pop().kind == "empty"
    )
