"""A session process that dies or freezes is replaced in place, and what it had in hand is never
repeated."""

from __future__ import annotations

import os
import random
import signal
import time

import pytest

from tests.support.systems.processes import alive
from tests.support.waiting import eventually
from tests.support.workers.harness import WorkerHarness
from tests.support.workers.process import SpawnedWorker
from worker_runtime.protocol import keys, sealing
from worker_runtime.protocol.launch import ExitCode
from worker_runtime.protocol.messages import Connect, ReleaseClaim, Shutdown, WorkerEvent

#: Seconds: the default. A session pulses once a second.
PULSE = 3.0


def details(harness: WorkerHarness, kind: str) -> list[str]:
    events = [event for event in harness.events() if isinstance(event, WorkerEvent)]
    return [event.detail for event in events if event.kind == kind]


def _await_placed(worker: SpawnedWorker, count: int) -> None:
    eventually(lambda: len(worker.placed()) >= count, f"{count} orders have been at the broker")


def test_a_killed_session_is_replaced_and_serves_again(harness: WorkerHarness) -> None:
    worker = harness.active(mark_period=0.2)
    first_key = harness.proven_key(worker)
    session, supervisor = worker.both()
    os.kill(session, signal.SIGKILL)
    assert harness.revive(worker).failure is None
    assert harness.proven_key(worker) != first_key
    assert not alive(session)
    assert worker.both()[1] == supervisor
    assert harness.send().failure is None
    assert details(harness, "session_replaced") == ["ended by SIGKILL"]
    assert harness.kinds() == ["connected", "session_replaced", "connected"]
    eventually(lambda: harness.metadata()["state"] == "Active", "operators see it")
    assert worker.end() == ExitCode.OK


def test_a_stopped_session_is_seen_and_replaced(harness: WorkerHarness) -> None:
    worker = harness.active(pulse_timeout=PULSE)
    session, _ = worker.both()
    os.kill(session, signal.SIGSTOP)
    assert harness.revive(worker).failure is None
    assert not alive(session)
    assert details(harness, "session_replaced") == ["no pulse"]
    assert harness.send().failure is None


@pytest.mark.parametrize("frozen", ["supervisor", "both", "all"])
def test_a_host_that_stands_still_kills_no_session(harness: WorkerHarness, frozen: str) -> None:
    worker = harness.active(pulse_timeout=PULSE, mark_ttl=60.0)
    session, supervisor = worker.both()
    stopped = {"supervisor": [supervisor], "both": [supervisor, session]}.get(
        frozen, [worker.pid, supervisor, session]
    )
    assert harness.send().failure is None
    time.sleep(1.5)  # until it waits for the next one
    for pid in stopped:
        os.kill(pid, signal.SIGSTOP)
    time.sleep(2 * PULSE)  # as long as the host stands still
    for number, pid in enumerate(stopped):
        time.sleep(1.5 * (number > 0))  # it comes back bit by bit, the session last
        os.kill(pid, signal.SIGCONT)
    assert harness.send().failure is None
    time.sleep(PULSE + 1.0)  # a killing would follow within this
    assert worker.both() == (session, supervisor)
    assert worker.logged("session_killed") == []


@pytest.mark.parametrize("symbol", ["SLOW", "SPIN", "GIL"])
def test_a_broker_call_past_its_limit_is_ended_and_its_order_is_unknown(
    harness: WorkerHarness, symbol: str
) -> None:
    worker = harness.active(pulse_timeout=PULSE, broker_timeout=1.0)
    order = harness.order(symbol=symbol)
    harness.enqueue(order)
    eventually(worker.placed, "the call has begun")
    answer = harness.answer(order.request_id)  # before anyone sends credentials
    assert answer.failure is not None
    assert answer.failure.code == "OUTCOME_UNKNOWN"
    assert harness.revive(worker).failure is None
    assert details(harness, "session_replaced") == ["no pulse"]
    assert harness.send().failure is None
    assert worker.placed().count(order.order_id) == 1


def test_a_slow_call_within_its_limit_is_not_touched(harness: WorkerHarness) -> None:
    worker = harness.active(
        pulse_timeout=PULSE, broker_timeout=40.0, mark_period=0.2, mark_ttl=60.0
    )
    order = harness.order(symbol="SLOW")
    harness.enqueue(order)
    eventually(worker.placed, "the call has begun")
    eventually(lambda: harness.metadata()["state"] == "Processing", "it is seen at work")
    # Twice the patience for a silent session, by the server's clock.
    began = harness.now_ms()
    eventually(lambda: harness.now_ms() > began + 2000 * PULSE, "the call has lasted")
    worker.tell_broker("gate")
    assert harness.answer(order.request_id).failure is None
    assert worker.logged("session_killed") == []


def test_an_order_in_the_hands_of_a_killed_session_is_never_submitted_again(
    harness: WorkerHarness,
) -> None:
    worker = harness.active()
    order = harness.order(symbol="SLOW")
    harness.enqueue(order)
    eventually(worker.placed, "the order is at the broker")
    os.kill(worker.both()[0], signal.SIGKILL)
    answer = harness.answer(order.request_id)
    assert answer.outcome is not None
    assert answer.outcome.state.value == "unknown"
    assert harness.processing() == 0
    assert harness.revive(worker).failure is None
    # The same order in another request, and one that nobody had seen.
    again = harness.send(order_id=order.order_id)
    assert again.failure is not None
    assert again.failure.code == "OUTCOME_UNKNOWN"
    assert harness.send().failure is None
    assert worker.placed().count(order.order_id) == 1


def test_an_answered_order_is_not_submitted_again_by_the_next_session(
    harness: WorkerHarness,
) -> None:
    worker = harness.active()
    order = harness.order()
    harness.enqueue(order)
    assert harness.answer(order.request_id).failure is None
    os.kill(worker.both()[0], signal.SIGKILL)
    assert harness.revive(worker).failure is None
    again = harness.send(order_id=order.order_id)
    assert again.failure is not None
    assert again.failure.code == "OUTCOME_UNKNOWN"
    assert worker.placed() == [order.order_id]


def test_requests_wait_for_the_credentials_and_are_then_executed_in_order(
    harness: WorkerHarness,
) -> None:
    worker = harness.active()
    os.kill(worker.both()[0], signal.SIGKILL)
    eventually(lambda: "session_replaced" in harness.kinds(), "a fresh session waits")
    first, second = harness.order(), harness.order()
    harness.enqueue(first)
    harness.enqueue(second)
    harness.control_raw(b"{}")
    eventually(lambda: worker.logged("control_dropped"), "control messages are taken")
    assert harness.client.execute("LLEN", keys.requests(harness.user)) == 2
    assert harness.processing() == 0
    assert harness.revive(worker).failure is None
    harness.answer(second.request_id)
    assert worker.placed() == [first.order_id, second.order_id]


def test_credentials_for_the_dead_session_are_refused_and_those_for_the_fresh_one_taken(
    harness: WorkerHarness,
) -> None:
    worker = harness.active()
    old_key = harness.proven_key(worker)
    os.kill(worker.both()[0], signal.SIGKILL)
    eventually(lambda: "session_replaced" in harness.kinds(), "a fresh session waits")
    harness.push_reload(worker, old_key, "late", a1=("good", 1))
    late = harness.reply("late")
    assert late.failure is not None
    assert late.failure.code == "INVALID_SEAL"
    assert harness.revive(worker).failure is None
    assert len(worker.ledger("login")) == 2


def test_the_third_replacement_is_the_last(harness: WorkerHarness) -> None:
    worker = harness.active()
    for number in (2, 3, 4):
        os.kill(worker.both()[0], signal.SIGKILL)
        assert harness.revive(worker, number).failure is None
    assert harness.send().failure is None
    session, supervisor = worker.both()
    os.kill(session, signal.SIGKILL)
    assert worker.wait() == ExitCode.SESSION_LOST
    assert not alive(supervisor)
    assert harness.mark() == ""
    assert harness.kinds()[-1] == "closed"


def test_a_fenced_worker_gets_no_fresh_session(harness: WorkerHarness) -> None:
    worker = harness.active(mark_period=0.2)
    os.kill(worker.both()[0], signal.SIGSTOP)
    harness.own("another", 2)
    assert worker.wait() == ExitCode.FENCED
    assert "session_replaced" not in harness.kinds()


def test_a_later_owner_ends_a_session_that_waits_for_credentials(harness: WorkerHarness) -> None:
    worker = harness.active()
    os.kill(worker.both()[0], signal.SIGKILL)
    eventually(lambda: "session_replaced" in harness.kinds(), "a fresh session waits")
    harness.own("another", 2)
    harness.control_raw(b"{}")  # rings
    assert worker.wait() == ExitCode.FENCED
    assert len(worker.ledger("login")) == 1


def test_a_session_killed_during_the_shutdown_is_not_replaced(harness: WorkerHarness) -> None:
    worker = harness.active()
    harness.enqueue(harness.order(symbol="SLOW"))
    eventually(worker.placed, "the order is at the broker")
    session, _ = worker.both()
    worker.process.send_signal(signal.SIGTERM)
    eventually(lambda: worker.logged("stop_requested"), "the signal has arrived")
    os.kill(session, signal.SIGKILL)
    assert worker.wait() == ExitCode.SESSION_LOST
    assert "session_replaced" not in harness.kinds()


def test_a_waiting_session_can_be_shut_down(harness: WorkerHarness) -> None:
    worker = harness.active()
    os.kill(worker.both()[0], signal.SIGKILL)
    eventually(lambda: "session_replaced" in harness.kinds(), "a fresh session waits")
    eventually(
        lambda: harness.metadata().get("health") == "waiting for credentials", "operators see it"
    )
    harness.control(Shutdown(user_id=harness.user, epoch=1, reason="test"))
    assert worker.wait() == ExitCode.OK
    assert harness.mark() == ""


def test_messages_of_the_claim_are_answered_by_a_fresh_session(harness: WorkerHarness) -> None:
    worker = harness.active()
    message = harness.claim_message(worker, "c1")
    os.kill(worker.both()[0], signal.SIGKILL)
    eventually(lambda: "session_replaced" in harness.kinds(), "a fresh session waits")
    harness.push(worker, message)
    again = harness.reply("c1")
    assert again.failure is not None
    assert (again.failure.code, again.failure.retryable) == ("WORKER_UNAVAILABLE", True)
    harness.push(
        worker, Connect(claim_id="c1", worker_id=worker.worker_id, attempt=2, connect_timeout=9.0)
    )
    assert harness.reply("c1").attempt == 2
    harness.push_raw(worker, b"\xff")
    harness.push(
        worker, ReleaseClaim(claim_id="another", worker_id=worker.worker_id, reason="test")
    )
    eventually(lambda: worker.logged("release_dropped"), "the release of another claim is dropped")
    harness.push(worker, ReleaseClaim(claim_id="c1", worker_id=worker.worker_id, reason="test"))
    assert worker.wait() == ExitCode.OK


def test_garbage_is_logged_once_each_and_changes_nothing_for_a_waiting_session(
    harness: WorkerHarness,
) -> None:
    worker = harness.active()
    os.kill(worker.both()[0], signal.SIGKILL)
    eventually(lambda: "session_replaced" in harness.kinds(), "a fresh session waits")
    for garbage in (b"", b"\x00\xff", b"[]", b"x" * 300_000):
        harness.control_raw(garbage)
    harness.control_raw(
        sealing.sign(Shutdown(user_id=harness.user, epoch=7, reason="old"), harness.key)
    )
    assert harness.revive(worker).failure is None
    codes = [line["code"] for line in worker.logged("control_dropped")]
    assert codes == [*["MALFORMED_MESSAGE"] * 4, "NOT_FOR_THIS_ASSIGNMENT"]
    assert harness.send().failure is None


def test_sessions_killed_at_any_moment_answer_every_order_and_submit_none_twice(
    harness: WorkerHarness,
) -> None:
    chance = random.Random(3)  # noqa: S311 - no secret
    for _ in range(4):
        harness.client.execute("FLUSHALL")
        worker = harness.active()
        for session in (2, 3, 4):
            before = [harness.order() for _ in range(60)]
            earlier = len(worker.placed())
            for order in before:
                harness.enqueue(order, ttl_ms=60_000)
            victim, _ = worker.both()
            _await_placed(worker, earlier + chance.randrange(50))
            os.kill(victim, signal.SIGKILL)
            assert harness.revive(worker, session).failure is None
            answers = [harness.answer(order.request_id) for order in before]
            for order, answer in zip(before, answers, strict=True):
                assert answer.outcome is not None
                assert answer.outcome.state.value in ("filled", "unknown"), order
            assert sum(answer.failure is not None for answer in answers) <= 1
        placed = worker.placed()
        assert len(placed) == len(set(placed))
        assert harness.processing() == 0
        assert worker.end() == ExitCode.OK
