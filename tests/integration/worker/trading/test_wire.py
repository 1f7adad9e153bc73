"""Lost and late replies between the worker's client and Valkey."""

from __future__ import annotations

import time
from collections.abc import Iterator

import pytest

from infra.local.servers import ValkeyServer
from tests.support.message_signing import switch_args
from tests.support.proxies.valkey_wire import ValkeyWire
from tests.support.workers.harness import WorkerHarness
from tests.support.workers.process import PATIENCE
from worker_runtime.process.clock import NS_PER_S, boot_ns
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


def _shared_state(harness: WorkerHarness) -> SharedState:
    shared_state = SharedState()
    shared_state.session_number = 1
    shared_state.write_message_keys(harness.secrets.for_worker(harness.user, 1))
    shared_state.assign(harness.user, "c1", 1)
    return shared_state


def test_a_pop_whose_reply_was_lost_returns_the_same_item(
    harness: WorkerHarness, wire: ValkeyWire, client: Valkey
) -> None:
    harness.own("w1", 1)
    items = [harness.enqueue(harness.order()) for _ in range(2)]
    client.execute("SCRIPT", "LOAD", POP.source)
    queue_reader = RequestQueueReader(client, _shared_state(harness), "w1", Log("ERROR"))
    assert queue_reader.is_switch_current()
    wire.lose = 1
    with pytest.raises(ValkeyUnreachable):
        queue_reader.pop()
    assert harness.processing() == 1
    item = queue_reader.pop()
    assert (item.kind, item.raw) == ("request", items[0])
    assert harness.processing() == 1
    assert queue_reader.pop().raw == items[1]
    assert queue_reader.pop().kind == "empty"


def test_a_pop_that_is_repeated_at_another_server_says_that_its_switch_is_stale(
    harness: WorkerHarness, wire: ValkeyWire, client: Valkey
) -> None:
    harness.own("w1", 1)
    order = harness.order()
    raw = harness.enqueue(order)
    client.execute("SCRIPT", "LOAD", POP.source)
    queue_reader = RequestQueueReader(client, _shared_state(harness), "w1", Log("ERROR"))
    assert queue_reader.is_switch_current()
    wire.lose = 1
    with pytest.raises(ValkeyUnreachable):
        queue_reader.pop()
    elsewhere = switch_args(harness.user, UserSwitch(server="another one"))
    assert harness.client.run(WRITE_SWITCH, [keys.switch(harness.user)], elsewhere) == b"ok"
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
    harness: WorkerHarness, wire: ValkeyWire, client: Valkey
) -> None:
    shared_state = _shared_state(harness)
    send_buffer = SendBuffer(client, harness.config(worker_id="w1"), shared_state, Log("ERROR"))
    harness.client.execute("LPUSH", keys.processing(harness.user), "item")
    send_buffer.add_worker_event(WorkerEventKind.CONNECTED)
    send_buffer.add_answer(b"item", Answer(request_id="r1"), "")
    wire.lose = 1
    assert send_buffer.flush()
    assert harness.answer("r1") == Answer(request_id="r1")
    assert harness.processing() == 0
    sequences = {event.sequence for event in harness.events() if hasattr(event, "sequence")}
    assert sequences == {2}


def test_what_cannot_be_sent_stays_in_order(
    harness: WorkerHarness, wire: ValkeyWire, client: Valkey
) -> None:
    send_buffer = SendBuffer(
        client, harness.config(worker_id="w1"), _shared_state(harness), Log("ERROR")
    )
    for kind in (WorkerEventKind.DEGRADED, WorkerEventKind.RECONNECTING, WorkerEventKind.CONNECTED):
        send_buffer.add_worker_event(kind)
    wire.lose = 2
    assert not send_buffer.flush()
    assert len(send_buffer) == 4  # one ring for all three
    assert send_buffer.flush()
    assert harness.kinds()[-3:] == ["degraded", "reconnecting", "connected"]


def test_a_journal_entry_without_a_reply_is_not_taken_for_written(
    harness: WorkerHarness, wire: ValkeyWire, client: Valkey
) -> None:
    send_buffer = SendBuffer(
        client, harness.config(worker_id="w1"), _shared_state(harness), Log("ERROR")
    )
    send_buffer.add_journal_entry("o1")
    wire.lose = 2
    assert not send_buffer.flush()
    assert not send_buffer.journaled
    assert send_buffer.flush()
    assert send_buffer.journaled  # the entry that stands there is our own
    assert harness.client.execute("EXISTS", keys.journal(harness.user, "o1")) == 1
    send_buffer.add_journal_entry("o1")
    assert send_buffer.flush()
    assert not send_buffer.journaled


def test_the_lease_runs_from_before_the_renewal_was_sent(
    harness: WorkerHarness, wire: ValkeyWire, client: Valkey
) -> None:
    harness.own("w1", 1)
    mark = WorkerMark(harness.config(worker_id="w1", mark_ttl=10.0), _shared_state(harness))
    client.connect()
    wire.hold = 0.3
    before = boot_ns()
    outcome, lease_end = mark.renew(client)
    assert outcome == "ok"
    # The reply took 0.3 s: the lease does not run from its arrival.
    assert before <= lease_end - 10 * NS_PER_S <= boot_ns() - 0.3 * NS_PER_S


def test_a_late_reply_is_never_taken_for_the_next_one(
    harness: WorkerHarness, wire: ValkeyWire
) -> None:
    client = Valkey(wire.url, timeout=0.2)
    harness.client.execute("SET", "a", "1")
    harness.client.execute("SET", "b", "2")
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


def test_a_script_that_the_server_does_not_know_is_sent(
    harness: WorkerHarness, client: Valkey
) -> None:
    client.execute("SCRIPT", "FLUSH")
    harness.own("w1", 1)
    assert (
        RequestQueueReader(client, _shared_state(harness), "w1", Log("ERROR")).pop().kind == "empty"
    )
