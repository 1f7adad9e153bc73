"""An order whose broker is away waits in its queue, untouched, until its deadline."""

from __future__ import annotations

from typing import Any

from tests.support.workers.harness import WorkerStage
from tests.support.workers.process import SpawnedWorker, eventually
from worker_runtime.protocol import keys
from worker_runtime.protocol.launch import ExitCode

#: No pings in between.
CALM: dict[str, Any] = {"health_period": 3600.0}


def waiting(stage: WorkerStage, order_id: str) -> bool:
    queued: list[bytes] = stage.client.execute("LRANGE", keys.requests(stage.user), 0, -1)
    return any(order_id.encode() in item for item in queued) and stage.processing() == 0


def away(stage: WorkerStage) -> SpawnedWorker:
    """A worker whose broker has ended the session and does not come back."""
    worker = stage.active(**CALM)
    worker.tell_broker("away")
    worker.tell_broker("ended")
    eventually(lambda: stage.kinds()[-1] == "degraded", "the broker is missed")
    return worker


def test_an_order_waits_for_its_broker_and_is_submitted_once(stage: WorkerStage) -> None:
    worker = away(stage)
    first, second = stage.order(), stage.order()
    stage.enqueue(first, ttl_ms=60_000)
    stage.enqueue(second, ttl_ms=60_000)
    eventually(lambda: len(worker.ledger("login")) >= 3, "the order asked for a session")
    eventually(lambda: waiting(stage, first.order_id), "it stands in its queue again")
    assert stage.states(first.order_id) == []
    assert stage.client.execute("EXISTS", keys.journal(stage.user, first.order_id)) == 0
    (worker.folder / "away").unlink()
    assert stage.answer(first.request_id).failure is None
    assert stage.answer(second.request_id).failure is None
    assert worker.placed() == [first.order_id, second.order_id]


def test_an_order_whose_broker_does_not_come_back_expires_and_says_why(stage: WorkerStage) -> None:
    worker = away(stage)
    order = stage.order()
    stage.enqueue(order, ttl_ms=600)
    answer = stage.answer(order.request_id)
    assert answer.failure is not None
    assert answer.failure.code == "DEADLINE_EXCEEDED"
    assert stage.states(order.order_id) == ["expired"]
    assert worker.placed() == []


def test_control_messages_are_served_while_an_order_waits(stage: WorkerStage) -> None:
    worker = away(stage)
    order = stage.order()
    stage.enqueue(order, ttl_ms=60_000)
    eventually(lambda: len(worker.ledger("login")) >= 3, "the order asked for a session")
    (worker.folder / "away").unlink()
    assert stage.reload(worker, "l1", a1=("better", 2)).failure is None
    assert stage.answer(order.request_id).failure is None


def test_a_worker_that_ends_leaves_the_waiting_order_to_the_next(stage: WorkerStage) -> None:
    worker = away(stage)
    order = stage.order()
    stage.enqueue(order, ttl_ms=60_000)
    eventually(lambda: len(worker.ledger("login")) >= 3, "the order asked for a session")
    assert worker.end() == ExitCode.OK
    assert waiting(stage, order.order_id)
    successor = stage.ready()
    assert stage.claim(successor, claim_id="c2", epoch=2).failure is None
    assert stage.answer(order.request_id).failure is None


def test_an_order_that_cannot_be_put_back_is_answered(stage: WorkerStage) -> None:
    worker = away(stage)
    order = stage.order()
    # As a former worker's.
    stage.client.execute("SET", keys.journal(stage.user, order.order_id), "1")
    stage.enqueue(order, ttl_ms=120_000)
    answer = stage.answer(order.request_id)
    assert answer.failure is not None
    assert answer.failure.code == "OUTCOME_UNKNOWN"
    eventually(lambda: stage.processing() == 0, "nobody has it in hand")
    assert worker.placed() == []


def test_an_order_whose_login_is_refused_while_it_waits_is_answered_at_once(
    stage: WorkerStage,
) -> None:
    worker = stage.ready(**CALM)
    worker.tell_broker("open")
    assert stage.claim(worker, accounts={"a1": "good", "a2": "closed"}).failure is None
    (worker.folder / "open").unlink()
    worker.tell_broker("away")
    worker.tell_broker("ended")
    eventually(lambda: stage.kinds()[-1] == "degraded", "the broker is missed")
    order = stage.order()
    stage.enqueue(order, ttl_ms=120_000)
    eventually(lambda: len(worker.ledger("login")) >= 4, "the order asked for a session")
    eventually(lambda: waiting(stage, order.order_id), "it stands in its queue again")
    worker.tell_broker("refuse-good")
    (worker.folder / "away").unlink()
    reply = stage.reload(worker, "l1", a1=("good", 1), a2=("closed", 1))
    # Of the other account, if the order's own try was refused before.
    assert reply.failure is not None
    assert [one.code for one in reply.logins if one.account_id == "a1"] == ["LOGIN_REJECTED"]
    answer = stage.answer(order.request_id)
    assert answer.failure is not None
    assert answer.failure.code == "LOGIN_REJECTED"
    assert stage.states(order.order_id) == ["rejected"]


def test_an_order_does_not_hold_up_those_of_an_account_that_has_a_session(
    stage: WorkerStage,
) -> None:
    worker = stage.ready(**CALM)
    worker.tell_broker("open")
    assert stage.claim(worker, accounts={"a1": "good", "a2": "closed"}).failure is None
    (worker.folder / "open").unlink()
    worker.tell_broker("ended")
    assert stage.send().failure is None
    answer = stage.send(account_id="a2")
    assert answer.failure is not None
    assert answer.failure.code == "BROKER_UNREACHABLE"
    assert stage.send().failure is None
    assert len(worker.placed()) == 2
