"""How a worker ends: on request, and by the death of one of its processes."""

from __future__ import annotations

import os
import signal

import pytest

from tests.support.systems.processes import alive
from tests.support.waiting import eventually
from tests.support.workers.harness import WorkerHarness
from worker_runtime.protocol import keys
from worker_runtime.protocol.launch import ExitCode
from worker_runtime.protocol.messages import Shutdown


def test_sigterm_closes_unmarks_and_exits_with_0(harness: WorkerHarness) -> None:
    worker = harness.active()
    children = worker.both()
    assert harness.mark()
    assert worker.end() == ExitCode.OK
    assert harness.mark() == ""
    assert harness.metadata() == {}
    assert len(worker.ledger("close")) == 1
    assert harness.kinds() == ["connected", "closed"]
    assert not any(alive(pid) for pid in children)


def test_sigterm_finishes_the_order_in_hand(harness: WorkerHarness) -> None:
    worker = harness.active()
    order, queued = harness.order(symbol="SLOW"), harness.order()
    harness.enqueue(order)
    eventually(worker.placed, "the order is at the broker")
    harness.enqueue(queued)
    worker.process.send_signal(signal.SIGTERM)
    eventually(lambda: worker.logged("stop_requested"), "the signal has arrived")
    worker.tell_broker("gate")
    assert worker.wait() == ExitCode.OK
    answer = harness.answer(order.request_id)
    assert answer.failure is None
    assert worker.placed() == [order.order_id]
    # The next one waits for the next worker.
    assert harness.client.execute("LLEN", keys.requests(harness.user)) == 1
    assert harness.processing() == 0


def test_an_order_that_takes_too_long_does_not_hold_the_shutdown(harness: WorkerHarness) -> None:
    worker = harness.active(shutdown_timeout=0.5)
    harness.enqueue(harness.order(symbol="SLOW"))
    eventually(worker.placed, "the order is at the broker")
    assert worker.end() == ExitCode.SHUTDOWN_TIMEOUT
    assert harness.mark() == ""


def test_sigterm_takes_a_free_worker_out_of_the_pool(harness: WorkerHarness) -> None:
    worker = harness.ready()
    worker.both()
    assert worker.end() == ExitCode.OK
    assert harness.take("c1") == [b"empty"]
    assert harness.client.execute("EXISTS", keys.pool_worker(harness.pool, worker.worker_id)) == 0


def test_sigterm_right_after_the_launch_ends_the_worker(harness: WorkerHarness) -> None:
    worker = harness.launch()
    eventually(lambda: worker.child("session"), "the session is forked")
    assert worker.end() == ExitCode.OK


def test_a_shutdown_message_ends_the_worker_with_0(harness: WorkerHarness) -> None:
    worker = harness.active()
    harness.control(Shutdown(user_id=harness.user, epoch=1, reason="idle"))
    assert worker.wait() == ExitCode.OK
    assert harness.mark() == ""
    assert harness.kinds() == ["connected", "closed"]


@pytest.mark.parametrize("victim", ["zygote", "zygote of a free worker"])
def test_killing_the_parent_ends_the_children(harness: WorkerHarness, victim: str) -> None:
    worker = harness.ready() if "free" in victim else harness.active()
    children = worker.both()
    worker.process.kill()
    worker.process.wait()
    eventually(lambda: not any(alive(pid) for pid in children), "no orphan is left")


def test_killing_a_session_before_its_first_connect_ends_the_worker(harness: WorkerHarness) -> None:
    worker = harness.ready()
    reply = harness.claim(worker, accounts={"a1": "closed"})
    assert reply.failure is not None
    session, supervisor = worker.both()
    os.kill(session, signal.SIGKILL)
    assert worker.wait() == ExitCode.SESSION_LOST
    assert not alive(supervisor)
    assert harness.mark() == ""
    assert harness.kinds() == ["closed"]
    assert worker.logged("session_died")[0]["status"] == -signal.SIGKILL


def test_killing_a_free_session_gives_a_new_one_with_a_new_key(harness: WorkerHarness) -> None:
    worker = harness.ready()
    key = harness.public_key(worker)
    session, _ = worker.both()
    os.kill(session, signal.SIGKILL)
    eventually(lambda: harness.public_key(worker) != key, "a new key is announced")
    assert worker.both()[0] != session
    assert harness.claim(worker).failure is None
    assert harness.metadata()["session"] == "2"


def test_a_session_that_dies_again_and_again_ends_the_worker(harness: WorkerHarness) -> None:
    worker = harness.launch(command=["-m", "tests.support.workers.broken_program"])
    assert worker.wait() == ExitCode.CRASH_LOOP
    assert len(worker.logged("session_died")) == 6


def test_killing_the_supervisor_gives_a_new_one_that_renews_the_mark(
    harness: WorkerHarness,
) -> None:
    worker = harness.active(mark_period=0.2)
    session, supervisor = worker.both()
    os.kill(supervisor, signal.SIGKILL)
    eventually(lambda: not alive(supervisor), "it is gone")
    harness.client.execute("DEL", keys.mark(harness.user))
    eventually(harness.mark, "the mark is back")
    assert worker.both()[0] == session
    assert worker.both()[1] != supervisor
    assert harness.send().failure is None
    assert worker.end() == ExitCode.OK


def test_a_configuration_that_cannot_be_read_is_said_without_its_values(
    harness: WorkerHarness,
) -> None:
    worker = harness.launch(valkey_url="redis://x", orchestrator_keys=(b"too short",))
    assert worker.wait() == ExitCode.BAD_CONFIG
    assert "orchestrator_keys" in worker.log()[0]["reason"]
    assert "too short" not in worker.log_path.read_text()


def test_core_dumps_are_off_and_memory_is_closed_in_every_process(harness: WorkerHarness) -> None:
    worker = harness.ready()
    for pid in (worker.pid, *worker.both()):
        with open(f"/proc/{pid}/limits") as file:
            core = next(line for line in file if line.startswith("Max core file size"))
        assert core.split()[4:6] == ["0", "0"]
