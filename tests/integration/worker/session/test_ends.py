"""How a worker ends: on request, and by the death of one of its processes."""

from __future__ import annotations

import os
import signal

import pytest

from tests.support.workers.harness import WorkerStage
from tests.support.workers.process import alive, eventually
from worker_runtime.protocol import keys
from worker_runtime.protocol.launch import ExitCode
from worker_runtime.protocol.messages import Shutdown


def test_sigterm_closes_unmarks_and_exits_with_0(stage: WorkerStage) -> None:
    worker = stage.active()
    children = worker.both()
    assert stage.mark()
    assert worker.end() == ExitCode.OK
    assert stage.mark() == ""
    assert stage.metadata() == {}
    assert len(worker.ledger("close")) == 1
    assert stage.kinds() == ["connected", "closed"]
    assert not any(alive(pid) for pid in children)


def test_sigterm_finishes_the_order_in_hand(stage: WorkerStage) -> None:
    worker = stage.active()
    order, queued = stage.order(symbol="SLOW"), stage.order()
    stage.enqueue(order)
    eventually(worker.placed, "the order is at the broker")
    stage.enqueue(queued)
    worker.process.send_signal(signal.SIGTERM)
    eventually(lambda: worker.logged("stop_requested"), "the signal has arrived")
    worker.tell_broker("gate")
    assert worker.wait() == ExitCode.OK
    answer = stage.answer(order.request_id)
    assert answer.failure is None
    assert worker.placed() == [order.order_id]
    # The next one waits for the next worker.
    assert stage.client.execute("LLEN", keys.requests(stage.user)) == 1
    assert stage.processing() == 0


def test_an_order_that_takes_too_long_does_not_hold_the_shutdown(stage: WorkerStage) -> None:
    worker = stage.active(shutdown_timeout=0.5)
    stage.enqueue(stage.order(symbol="SLOW"))
    eventually(worker.placed, "the order is at the broker")
    assert worker.end() == ExitCode.SHUTDOWN_TIMEOUT
    assert stage.mark() == ""


def test_sigterm_takes_a_free_worker_out_of_the_pool(stage: WorkerStage) -> None:
    worker = stage.ready()
    worker.both()
    assert worker.end() == ExitCode.OK
    assert stage.take("c1") == [b"empty"]
    assert stage.client.execute("EXISTS", keys.pool_worker(stage.pool, worker.worker_id)) == 0


def test_sigterm_right_after_the_launch_ends_the_worker(stage: WorkerStage) -> None:
    worker = stage.launch()
    eventually(lambda: worker.child("session"), "the session is forked")
    assert worker.end() == ExitCode.OK


def test_a_shutdown_message_ends_the_worker_with_0(stage: WorkerStage) -> None:
    worker = stage.active()
    stage.control(Shutdown(user_id=stage.user, epoch=1, reason="idle"))
    assert worker.wait() == ExitCode.OK
    assert stage.mark() == ""
    assert stage.kinds() == ["connected", "closed"]


@pytest.mark.parametrize("victim", ["zygote", "zygote of a free worker"])
def test_killing_the_parent_ends_the_children(stage: WorkerStage, victim: str) -> None:
    worker = stage.ready() if "free" in victim else stage.active()
    children = worker.both()
    worker.process.kill()
    worker.process.wait()
    eventually(lambda: not any(alive(pid) for pid in children), "no orphan is left")


def test_killing_a_session_before_its_first_connect_ends_the_worker(stage: WorkerStage) -> None:
    worker = stage.ready()
    reply = stage.claim(worker, accounts={"a1": "closed"})
    assert reply.failure is not None
    session, supervisor = worker.both()
    os.kill(session, signal.SIGKILL)
    assert worker.wait() == ExitCode.SESSION_LOST
    assert not alive(supervisor)
    assert stage.mark() == ""
    assert stage.kinds() == ["closed"]
    assert worker.logged("session_died")[0]["status"] == -signal.SIGKILL


def test_killing_a_free_session_gives_a_new_one_with_a_new_key(stage: WorkerStage) -> None:
    worker = stage.ready()
    key = stage.public_key(worker)
    session, _ = worker.both()
    os.kill(session, signal.SIGKILL)
    eventually(lambda: stage.public_key(worker) != key, "a new key is announced")
    assert worker.both()[0] != session
    assert stage.claim(worker).failure is None
    assert stage.metadata()["session"] == "2"


def test_a_session_that_dies_again_and_again_ends_the_worker(stage: WorkerStage) -> None:
    worker = stage.launch(command=["-m", "tests.support.workers.broken_program"])
    assert worker.wait() == ExitCode.CRASH_LOOP
    assert len(worker.logged("session_died")) == 6


def test_killing_the_supervisor_gives_a_new_one_that_renews_the_mark(stage: WorkerStage) -> None:
    worker = stage.active(mark_period=0.2)
    session, supervisor = worker.both()
    os.kill(supervisor, signal.SIGKILL)
    eventually(lambda: not alive(supervisor), "it is gone")
    stage.client.execute("DEL", keys.mark(stage.user))
    eventually(stage.mark, "the mark is back")
    assert worker.both()[0] == session
    assert worker.both()[1] != supervisor
    assert stage.send().failure is None
    assert worker.end() == ExitCode.OK


def test_a_configuration_that_cannot_be_read_is_said_without_its_values(stage: WorkerStage) -> None:
    worker = stage.launch(valkey_url="redis://x", orchestrator_keys=(b"too short",))
    assert worker.wait() == ExitCode.BAD_CONFIG
    assert "orchestrator_keys" in worker.log()[0]["reason"]
    assert "too short" not in worker.log_path.read_text()


def test_core_dumps_are_off_and_memory_is_closed_in_every_process(stage: WorkerStage) -> None:
    worker = stage.ready()
    for pid in (worker.pid, *worker.both()):
        with open(f"/proc/{pid}/limits") as file:
            core = next(line for line in file if line.startswith("Max core file size"))
        assert core.split()[4:6] == ["0", "0"]
