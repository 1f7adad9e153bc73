"""Invariants *one-owner* and *no-healthy-kill*: fencing, lost leases, lost and flushed servers."""

from __future__ import annotations

import os
import signal
from collections.abc import Iterator
from pathlib import Path

import pytest

from infra.local.servers import ValkeyServer
from tests.support.workers.harness import WorkerStage
from tests.support.workers.process import alive, eventually
from worker_runtime.process.shared_state import KILL_MARGIN
from worker_runtime.protocol import keys
from worker_runtime.protocol.launch import ExitCode

#: Seconds of a lease. 5 s before its end a session closes, so 4.5 s without a renewal harm nobody:
#: more than a machine stands still now and then.
SHORT = 9.5


@pytest.fixture
def own_server(short_directory: Path) -> Iterator[ValkeyServer]:
    """A server that a test may stop."""
    with ValkeyServer(short_directory / "own") as server:
        yield server


@pytest.fixture
def own_stage(own_server: ValkeyServer, tmp_path: Path) -> Iterator[WorkerStage]:
    stage = WorkerStage(own_server.url, tmp_path)
    yield stage
    stage.close()


def test_a_later_owner_ends_the_worker_and_no_order_is_submitted(stage: WorkerStage) -> None:
    worker = stage.active()
    children = worker.both()
    stage.own("another", 2)
    stage.enqueue(stage.order())
    assert worker.wait() == ExitCode.FENCED
    assert worker.placed() == []
    assert "fenced" in stage.kinds()
    assert not any(alive(pid) for pid in children)
    # The order is still there for the new owner.
    assert stage.client.execute("LLEN", keys.requests(stage.user)) == 1


def test_an_idle_worker_learns_of_a_later_owner_by_its_renewal(stage: WorkerStage) -> None:
    worker = stage.active(mark_period=0.2)
    stage.own("another", 2)
    stage.client.execute("SET", keys.mark(stage.user), "2:another")
    assert worker.wait() == ExitCode.FENCED
    assert stage.mark() == "2:another"
    assert "fenced" in stage.kinds()


def test_a_claim_of_an_epoch_that_is_over_is_refused(stage: WorkerStage) -> None:
    worker = stage.ready()
    stage.take("c1")
    stage.own("another", 2)
    stage.push(worker, stage.claim_message(worker, "c1", epoch=1))
    reply = stage.reply("c1")
    assert reply.failure is not None
    assert reply.failure.code == "FENCED"
    assert worker.wait() == ExitCode.FENCED
    assert worker.ledger() == []


def test_a_missing_owner_key_is_told_once_and_nothing_is_taken_until_it_is_back(
    stage: WorkerStage,
) -> None:
    worker = stage.active(mark_period=0.2)
    stage.client.execute("DEL", keys.owner(stage.user))
    order = stage.order()
    stage.enqueue(order)
    eventually(lambda: "owner_missing" in stage.kinds(), "the missing owner key is told")
    renewals = len(worker.logged("owner_missing"))
    assert worker.placed() == []
    stage.own(worker.worker_id, 1)
    assert stage.answer(order.request_id).failure is None
    assert (renewals, stage.kinds().count("owner_missing")) == (1, 1)


def test_a_restored_owner_key_is_found_within_a_second_or_two(stage: WorkerStage) -> None:
    worker = stage.active(mark_ttl=60.0, mark_period=16.0)
    stage.client.execute("DEL", keys.owner(stage.user), keys.mark(stage.user))
    eventually(lambda: "owner_missing" in stage.kinds(), "the missing owner key is told")
    stage.own(worker.worker_id, 1)
    eventually(stage.mark, "the mark is back before the next regular renewal", patience=13.0)
    assert stage.kinds().count("owner_missing") == 1


def test_a_worker_without_renewals_closes_before_its_lease_ends_and_comes_back(
    own_stage: WorkerStage,
) -> None:
    stage = own_stage
    worker = stage.active(mark_ttl=SHORT, mark_period=0.3)
    stage.client.execute("DEL", keys.owner(stage.user))
    eventually(lambda: worker.logged("lease_ending"), "the session has seen the end of the lease")
    assert worker.logged("lease_ending")[0]["left"] > KILL_MARGIN
    eventually(lambda: worker.ledger("close"), "the broker session is closed")
    order = stage.order()
    stage.enqueue(order)
    assert worker.placed() == []
    stage.own(worker.worker_id, 1)
    assert stage.answer(order.request_id).failure is None
    assert worker.process.poll() is None
    assert len(worker.ledger("login")) == 2


def test_a_session_that_keeps_its_connections_past_the_lease_is_killed(stage: WorkerStage) -> None:
    worker = stage.active(mark_ttl=SHORT, mark_period=0.3)
    session, _ = worker.both()
    stage.enqueue(stage.order(symbol="SLOW"))
    eventually(worker.placed, "the session is in a broker call that does not return")
    stage.client.execute("DEL", keys.owner(stage.user))
    killed = eventually(lambda: worker.logged("session_killed"), "the session is killed")[0]
    assert killed["reason"] == "open broker sessions at the end of the lease"
    eventually(lambda: not alive(session), "it is gone")
    # A fresh session comes to work when the owner key is back, and not before.
    assert "session_replaced" not in stage.kinds()
    stage.own(worker.worker_id, 1)
    assert stage.revive(worker).failure is None
    assert stage.send().failure is None


def test_a_frozen_server_parks_a_session_that_has_something_to_tell_and_kills_none(
    own_stage: WorkerStage, own_server: ValkeyServer
) -> None:
    stage = own_stage
    # The attempt to send the answer begins with 10 s left: two waits of 4 s end inside the kill
    # margin.
    worker = stage.active({"a1": "good", "a2": "good"}, mark_ttl=10.0, mark_period=0.3)
    order = stage.order(symbol="SLOW")
    stage.enqueue(order)
    eventually(worker.placed, "the order is at the broker")
    os.kill(own_server.pid, signal.SIGSTOP)
    try:
        worker.tell_broker("gate")
        eventually(lambda: len(worker.ledger("close")) == 2, "both broker sessions are closed")
        assert worker.logged("lease_ending")[0]["left"] > KILL_MARGIN
    finally:
        os.kill(own_server.pid, signal.SIGCONT)
    assert stage.answer(order.request_id).failure is None
    # The server had taken what it did not answer: events may come twice, readers know them by their
    # ids.
    states = list(dict.fromkeys(stage.states(order.order_id)))
    assert states == ["submitting", "submitted", "filled"]
    assert stage.send().failure is None
    assert worker.logged("session_killed") == []
    assert worker.process.poll() is None


def test_a_restarted_server_is_found_again_and_served(
    own_stage: WorkerStage, own_server: ValkeyServer
) -> None:
    stage = own_stage
    worker = stage.active(mark_period=0.2)
    assert stage.send().failure is None
    own_server.stop()
    stage.client.close()
    own_server.start()
    order = stage.order()
    stage.enqueue(order)
    assert stage.answer(order.request_id).failure is None
    assert len(worker.ledger("login")) == 1
    assert worker.end() == ExitCode.OK


def test_a_flushed_server_kills_no_worker(own_stage: WorkerStage) -> None:
    stage = own_stage
    free, worker = stage.ready(mark_period=0.2), None
    stage.claim(free)
    worker, free = free, stage.ready(mark_period=0.2)
    stage.client.execute("FLUSHALL")
    stage.client.execute("SCRIPT", "FLUSH")
    eventually(
        lambda: "owner_missing" in stage.kinds(), "the worker tells that its owner key is gone"
    )
    stage.await_ready(free)
    stage.own(worker.worker_id, 1)
    eventually(stage.mark, "the mark is back")
    order = stage.order()
    # What was spent before is not known, so it waits for one window.
    stage.enqueue(order, ttl_ms=60_000)
    assert stage.answer(order.request_id).failure is None
    assert [worker.process.poll(), free.process.poll()] == [None, None]


def test_a_fill_during_an_outage_is_told_afterwards(
    own_stage: WorkerStage, own_server: ValkeyServer
) -> None:
    stage = own_stage
    worker = stage.active(mark_period=0.2)
    order = stage.order(symbol="SLOW")
    stage.enqueue(order)
    eventually(worker.placed, "the order is at the broker")
    own_server.stop()
    stage.client.close()
    worker.tell_broker("gate")
    eventually(lambda: worker.logged("send_buffer_stuck"), "the answer could not be sent")
    own_server.start()
    answer = stage.answer(order.request_id)
    assert answer.failure is None
    assert stage.states(order.order_id) == ["submitting", "submitted", "filled"]
    assert stage.processing() == 0


def test_a_worker_launched_without_a_server_waits_for_it(
    own_stage: WorkerStage, own_server: ValkeyServer
) -> None:
    stage = own_stage
    own_server.stop()
    worker = stage.launch()
    eventually(lambda: worker.logged("announce_failed"), "it has tried")
    own_server.start()
    stage.await_ready(worker)
    assert stage.claim(worker).failure is None


def test_a_blocked_session_does_not_delay_the_mark(stage: WorkerStage) -> None:
    worker = stage.active(mark_period=0.2, pulse_timeout=60.0)
    session, _ = worker.both()
    os.kill(session, signal.SIGSTOP)
    stage.client.execute("DEL", keys.mark(stage.user))
    eventually(stage.mark, "the mark is renewed")
    os.kill(session, signal.SIGCONT)
    assert stage.send().failure is None


def test_an_idle_connection_is_pinged_and_a_dead_one_rebuilt(stage: WorkerStage) -> None:
    worker = stage.active(health_period=0.2)
    eventually(lambda: worker.ledger("ping"), "an idle connection is pinged")
    worker.tell_broker("dead")
    eventually(lambda: len(worker.ledger("login")) == 2, "the dead session is rebuilt")
    wanted = ["connected", "reconnecting", "connected"]
    eventually(lambda: stage.kinds() == wanted, "the changes are told")
    assert stage.send().failure is None
