"""An order whose broker is away waits in its queue, untouched, until its deadline."""

from __future__ import annotations

from typing import Any

from tests.support.waiting import eventually
from tests.support.workers.harness import WorkerHarness
from tests.support.workers.process import SpawnedWorker
from worker_runtime.protocol import keys
from worker_runtime.protocol.launch import ExitCode

#: No pings in between.
CALM: dict[str, Any] = {"health_period": 3600.0}


def waiting(harness: WorkerHarness, order_id: str) -> bool:
    queued: list[bytes] = harness.client.execute("LRANGE", keys.requests(harness.user), 0, -1)
    return any(order_id.encode() in item for item in queued) and harness.processing() == 0


def away(harness: WorkerHarness) -> SpawnedWorker:
    """A worker whose broker has ended the session and does not come back."""
    worker = harness.active(**CALM)
    worker.tell_broker("away")
    worker.tell_broker("ended")
    eventually(lambda: harness.kinds()[-1] == "degraded", "the broker is missed")
    return worker


def test_an_order_waits_for_its_broker_and_is_submitted_once(harness: WorkerHarness) -> None:
    worker = away(harness)
    first, second = harness.order(), harness.order()
    harness.enqueue(first, ttl_ms=60_000)
    harness.enqueue(second, ttl_ms=60_000)
    eventually(lambda: len(worker.ledger("login")) >= 3, "the order asked for a session")
    eventually(lambda: waiting(harness, first.order_id), "it is in its queue again")
    assert harness.states(first.order_id) == []
    assert harness.client.execute("EXISTS", keys.journal(harness.user, first.order_id)) == 0
    (worker.folder / "away").unlink()
    assert harness.answer(first.request_id).failure is None
    assert harness.answer(second.request_id).failure is None
    assert worker.placed() == [first.order_id, second.order_id]


def test_an_order_whose_broker_does_not_come_back_expires_and_says_why(
    harness: WorkerHarness,
) -> None:
    worker = away(harness)
    order = harness.order()
    harness.enqueue(order, ttl_ms=600)
    answer = harness.answer(order.request_id)
    assert answer.failure is not None
    assert answer.failure.code == "DEADLINE_EXCEEDED"
    assert harness.states(order.order_id) == ["expired"]
    assert worker.placed() == []


def test_control_messages_are_served_while_an_order_waits(harness: WorkerHarness) -> None:
    worker = away(harness)
    order = harness.order()
    harness.enqueue(order, ttl_ms=60_000)
    eventually(lambda: len(worker.ledger("login")) >= 3, "the order asked for a session")
    (worker.folder / "away").unlink()
    assert harness.reload(worker, "l1", a1=("better", 2)).failure is None
    assert harness.answer(order.request_id).failure is None


def test_a_worker_that_ends_leaves_the_waiting_order_to_the_next(harness: WorkerHarness) -> None:
    worker = away(harness)
    order = harness.order()
    harness.enqueue(order, ttl_ms=60_000)
    eventually(lambda: len(worker.ledger("login")) >= 3, "the order asked for a session")
    assert worker.end() == ExitCode.OK
    assert waiting(harness, order.order_id)
    successor = harness.ready()
    assert harness.claim(successor, claim_id="c2", epoch=2).failure is None
    assert harness.answer(order.request_id).failure is None


def test_an_order_that_cannot_be_put_back_is_answered(harness: WorkerHarness) -> None:
    worker = away(harness)
    order = harness.order()
    # As a former worker's.
    harness.client.execute("SET", keys.journal(harness.user, order.order_id), "1")
    harness.enqueue(order, ttl_ms=120_000)
    answer = harness.answer(order.request_id)
    assert answer.failure is not None
    assert answer.failure.code == "OUTCOME_UNKNOWN"
    eventually(lambda: harness.processing() == 0, "nobody has it in hand")
    assert worker.placed() == []


def test_an_order_whose_login_is_refused_while_it_waits_is_answered_at_once(
    harness: WorkerHarness,
) -> None:
    worker = harness.ready(**CALM)
    worker.tell_broker("open")
    assert harness.claim(worker, accounts={"a1": "good", "a2": "closed"}).failure is None
    (worker.folder / "open").unlink()
    worker.tell_broker("away")
    worker.tell_broker("ended")
    eventually(lambda: harness.kinds()[-1] == "degraded", "the broker is missed")
    order = harness.order()
    harness.enqueue(order, ttl_ms=120_000)
    eventually(lambda: len(worker.ledger("login")) >= 4, "the order asked for a session")
    eventually(lambda: waiting(harness, order.order_id), "it is in its queue again")
    worker.tell_broker("refuse-good")
    (worker.folder / "away").unlink()
    reply = harness.reload(worker, "l1", a1=("good", 1), a2=("closed", 1))
    # Of the other account, if the order's own try was refused before.
    assert reply.failure is not None
    assert [login.code for login in reply.logins if login.account_id == "a1"] == ["LOGIN_REJECTED"]
    answer = harness.answer(order.request_id)
    assert answer.failure is not None
    assert answer.failure.code == "LOGIN_REJECTED"
    assert harness.states(order.order_id) == ["rejected"]


def test_an_order_does_not_hold_up_those_of_an_account_that_has_a_session(
    harness: WorkerHarness,
) -> None:
    worker = harness.ready(**CALM)
    worker.tell_broker("open")
    assert harness.claim(worker, accounts={"a1": "good", "a2": "closed"}).failure is None
    (worker.folder / "open").unlink()
    worker.tell_broker("ended")
    assert harness.send().failure is None
    answer = harness.send(account_id="a2")
    assert answer.failure is not None
    assert answer.failure.code == "BROKER_UNREACHABLE"
    assert harness.send().failure is None
    assert len(worker.placed()) == 2
