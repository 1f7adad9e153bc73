"""Invariants *one-owner* and *no-healthy-kill*: fencing, lost leases, lost and flushed servers."""

from __future__ import annotations

import os
import signal
from collections.abc import Iterator
from pathlib import Path

import pytest

from infra.local.servers import ValkeyServer
from tests.support.systems.processes import alive
from tests.support.waiting import eventually
from tests.support.workers.harness import WorkerHarness
from worker_runtime.process.shared_state import KILL_MARGIN_S
from worker_runtime.protocol import keys
from worker_runtime.protocol.launch import ExitCode
from worker_runtime.protocol.worker_reports import VALID_UNTIL

#: Seconds of a lease. 5 s before its end a session closes, so 4.5 s without a renewal harm nobody:
#: more than a machine stands still now and then.
SHORT = 9.5


@pytest.fixture
def own_server(short_directory: Path) -> Iterator[ValkeyServer]:
    """A server that a test may stop."""
    with ValkeyServer(short_directory / "own") as server:
        yield server


@pytest.fixture
def own_harness(own_server: ValkeyServer, tmp_path: Path) -> Iterator[WorkerHarness]:
    harness = WorkerHarness(own_server.url, tmp_path)
    yield harness
    harness.close()


def test_a_later_owner_ends_the_worker_and_no_order_is_submitted(harness: WorkerHarness) -> None:
    worker = harness.active()
    children = worker.both()
    harness.own("another", 2)
    harness.enqueue(harness.order())
    assert worker.wait() == ExitCode.FENCED
    assert worker.placed() == []
    assert "fenced" in harness.kinds()
    assert not any(alive(pid) for pid in children)
    # The order is still there for the new owner.
    assert harness.client.execute("LLEN", keys.requests(harness.user)) == 1


def test_metadata_count_no_longer_than_the_mark_lives_that_is_written_with_them(
    harness: WorkerHarness,
) -> None:
    worker = harness.active()
    valid_until_ms = int(harness.metadata()[VALID_UNTIL])
    assert worker.config.mark_ttl == keys.MARK_TTL_S
    assert 0 < valid_until_ms - harness.now_ms() <= keys.MARK_TTL_S * 1000


def test_an_idle_worker_learns_of_a_later_owner_by_its_renewal(harness: WorkerHarness) -> None:
    worker = harness.active(mark_period=0.2)
    harness.own("another", 2)
    harness.client.execute("SET", keys.mark(harness.user), "2:another")
    assert worker.wait() == ExitCode.FENCED
    assert harness.mark() == "2:another"
    assert "fenced" in harness.kinds()


def test_a_claim_of_an_epoch_that_is_over_is_refused(harness: WorkerHarness) -> None:
    worker = harness.ready()
    harness.take("c1")
    harness.own("another", 2)
    harness.push(worker, harness.claim_message(worker, "c1", epoch=1))
    reply = harness.reply("c1")
    assert reply.failure is not None
    assert reply.failure.code == "FENCED"
    assert worker.wait() == ExitCode.FENCED
    assert worker.ledger() == []


def test_a_missing_owner_key_is_reported_once_and_nothing_is_taken_until_it_is_back(
    harness: WorkerHarness,
) -> None:
    worker = harness.active(mark_period=0.2)
    harness.client.execute("DEL", keys.owner(harness.user))
    order = harness.order()
    harness.enqueue(order)
    eventually(lambda: "owner_missing" in harness.kinds(), "the missing owner key is reported")
    renewals = len(worker.logged("owner_missing"))
    assert worker.placed() == []
    harness.own(worker.worker_id, 1)
    assert harness.answer(order.request_id).failure is None
    assert (renewals, harness.kinds().count("owner_missing")) == (1, 1)


def test_a_restored_owner_key_is_found_within_a_second_or_two(harness: WorkerHarness) -> None:
    worker = harness.active(mark_ttl=60.0, mark_period=16.0)
    harness.client.execute("DEL", keys.owner(harness.user), keys.mark(harness.user))
    eventually(lambda: "owner_missing" in harness.kinds(), "the missing owner key is reported")
    harness.own(worker.worker_id, 1)
    eventually(harness.mark, "the mark is back before the next regular renewal", patience=13.0)
    assert harness.kinds().count("owner_missing") == 1


def test_a_worker_without_renewals_closes_before_its_lease_ends_and_comes_back(
    own_harness: WorkerHarness,
) -> None:
    harness = own_harness
    worker = harness.active(mark_ttl=SHORT, mark_period=0.3)
    harness.client.execute("DEL", keys.owner(harness.user))
    eventually(lambda: worker.logged("lease_ending"), "the session has seen the end of the lease")
    assert worker.logged("lease_ending")[0]["left"] > KILL_MARGIN_S
    eventually(lambda: worker.ledger("close"), "the broker session is closed")
    order = harness.order()
    harness.enqueue(order)
    assert worker.placed() == []
    harness.own(worker.worker_id, 1)
    assert harness.answer(order.request_id).failure is None
    assert worker.process.poll() is None
    assert len(worker.ledger("login")) == 2


def test_a_session_that_keeps_its_connections_past_the_lease_is_killed(
    harness: WorkerHarness,
) -> None:
    worker = harness.active(mark_ttl=SHORT, mark_period=0.3)
    session, _ = worker.both()
    harness.enqueue(harness.order(symbol="SLOW"))
    eventually(worker.placed, "the session is in a broker call that does not return")
    harness.client.execute("DEL", keys.owner(harness.user))
    killed = eventually(lambda: worker.logged("session_killed"), "the session is killed")[0]
    assert killed["reason"] == "open broker sessions at the end of the lease"
    eventually(lambda: not alive(session), "it is gone")
    # A fresh session comes to work when the owner key is back, and not before.
    assert "session_replaced" not in harness.kinds()
    harness.own(worker.worker_id, 1)
    assert harness.revive(worker).failure is None
    assert harness.send().failure is None


def test_a_frozen_server_parks_a_session_that_has_something_to_tell_and_kills_none(
    own_harness: WorkerHarness, own_server: ValkeyServer
) -> None:
    harness = own_harness
    # The attempt to send the answer begins with 10 s left: two waits of 4 s end inside the kill
    # margin.
    worker = harness.active({"a1": "good", "a2": "good"}, mark_ttl=10.0, mark_period=0.3)
    order = harness.order(symbol="SLOW")
    harness.enqueue(order)
    eventually(worker.placed, "the order is at the broker")
    os.kill(own_server.pid, signal.SIGSTOP)
    try:
        worker.tell_broker("gate")
        eventually(lambda: len(worker.ledger("close")) == 2, "both broker sessions are closed")
        assert worker.logged("lease_ending")[0]["left"] > KILL_MARGIN_S
    finally:
        os.kill(own_server.pid, signal.SIGCONT)
    assert harness.answer(order.request_id).failure is None
    # The server had taken what it did not answer: events may come twice, readers know them by their
    # ids.
    states = list(dict.fromkeys(harness.states(order.order_id)))
    assert states == ["submitting", "submitted", "filled"]
    assert harness.send().failure is None
    assert worker.logged("session_killed") == []
    assert worker.process.poll() is None


def test_a_restarted_server_is_found_again_and_served(
    own_harness: WorkerHarness, own_server: ValkeyServer
) -> None:
    harness = own_harness
    worker = harness.active(mark_period=0.2)
    assert harness.send().failure is None
    own_server.stop()
    harness.client.close()
    own_server.start()
    order = harness.order()
    harness.enqueue(order)
    assert harness.answer(order.request_id).failure is None
    assert len(worker.ledger("login")) == 1
    assert worker.end() == ExitCode.OK


def test_a_flushed_server_kills_no_worker(own_harness: WorkerHarness) -> None:
    harness = own_harness
    free, worker = harness.ready(mark_period=0.2), None
    harness.claim(free)
    worker, free = free, harness.ready(mark_period=0.2)
    harness.client.execute("FLUSHALL")
    harness.client.execute("SCRIPT", "FLUSH")
    eventually(
        lambda: "owner_missing" in harness.kinds(), "the worker tells that its owner key is gone"
    )
    harness.await_ready(free)
    harness.own(worker.worker_id, 1)
    eventually(harness.mark, "the mark is back")
    order = harness.order()
    # What was spent before is not known, so it waits for one window.
    harness.enqueue(order, ttl_ms=60_000)
    assert harness.answer(order.request_id).failure is None
    assert [worker.process.poll(), free.process.poll()] == [None, None]


def test_a_fill_during_an_outage_is_reported_afterwards(
    own_harness: WorkerHarness, own_server: ValkeyServer
) -> None:
    harness = own_harness
    worker = harness.active(mark_period=0.2)
    order = harness.order(symbol="SLOW")
    harness.enqueue(order)
    eventually(worker.placed, "the order is at the broker")
    own_server.stop()
    harness.client.close()
    worker.tell_broker("gate")
    eventually(lambda: worker.logged("send_buffer_stuck"), "the answer could not be sent")
    own_server.start()
    answer = harness.answer(order.request_id)
    assert answer.failure is None
    assert harness.states(order.order_id) == ["submitting", "submitted", "filled"]
    assert harness.processing() == 0


def test_a_worker_launched_without_a_server_waits_for_it(
    own_harness: WorkerHarness, own_server: ValkeyServer
) -> None:
    harness = own_harness
    own_server.stop()
    worker = harness.launch()
    eventually(lambda: worker.logged("announce_failed"), "it has tried")
    own_server.start()
    harness.await_ready(worker)
    assert harness.claim(worker).failure is None


def test_a_blocked_session_does_not_delay_the_mark(harness: WorkerHarness) -> None:
    worker = harness.active(mark_period=0.2, pulse_timeout=60.0)
    session, _ = worker.both()
    os.kill(session, signal.SIGSTOP)
    harness.client.execute("DEL", keys.mark(harness.user))
    eventually(harness.mark, "the mark is renewed")
    os.kill(session, signal.SIGCONT)
    assert harness.send().failure is None


def test_an_idle_connection_is_pinged_and_a_dead_one_rebuilt(harness: WorkerHarness) -> None:
    worker = harness.active(health_period=0.2)
    eventually(lambda: worker.ledger("ping"), "an idle connection is pinged")
    worker.tell_broker("dead")
    eventually(lambda: len(worker.ledger("login")) == 2, "the dead session is rebuilt")
    expected = ["connected", "reconnecting", "connected"]
    eventually(lambda: harness.kinds() == expected, "the changes are reported")
    assert harness.send().failure is None
