"""Broker sessions that die, brokers that are away, and SDKs that do not come back."""

from __future__ import annotations

from itertools import groupby
from typing import Any

from tests.support.waiting import eventually
from tests.support.workers.harness import WorkerHarness
from tests.support.workers.process import SpawnedWorker
from worker_runtime.protocol.launch import ExitCode
from worker_runtime.protocol.messages import WorkerEvent

QUICK: dict[str, Any] = {"health_period": 0.2, "login_pause": 0.2}


def last_detail(harness: WorkerHarness) -> str:
    return [event for event in harness.events() if isinstance(event, WorkerEvent)][-1].detail


def logins(worker: SpawnedWorker) -> int:
    return len(worker.ledger("login"))


def test_a_session_that_died_unnoticed_is_rebuilt_before_the_order_and_the_order_is_executed(
    harness: WorkerHarness,
) -> None:
    worker = harness.active()
    worker.tell_broker("ended")  # the adapter knows; nobody has asked it yet
    order = harness.order()
    harness.enqueue(order)
    assert harness.answer(order.request_id).failure is None
    assert worker.placed() == [order.order_id]
    assert harness.states(order.order_id) == ["submitting", "submitted", "filled"]


def test_an_idle_session_that_the_adapter_saw_end_is_rebuilt_without_an_order(
    harness: WorkerHarness,
) -> None:
    worker = harness.active(health_period=3600.0)
    worker.tell_broker("ended")
    eventually(
        lambda: harness.kinds() == ["connected", "reconnecting", "connected"], "it is rebuilt"
    )
    assert logins(worker) == 2


def test_a_broker_that_is_away_degrades_the_worker_and_its_return_heals_it(
    harness: WorkerHarness,
) -> None:
    worker = harness.active({"a1": "good", "a2": "two"}, mark_period=0.2, **QUICK)
    worker.tell_broker("away")
    worker.tell_broker("ended")
    eventually(lambda: harness.kinds()[-1] == "degraded", "the broker is missed")
    eventually(
        lambda: harness.metadata()["health"] == "degraded: BROKER_UNREACHABLE", "operators see it"
    )
    assert harness.metadata()["state"] == "Reconnecting"
    order = harness.order()
    harness.enqueue(order)
    tries = logins(worker)
    eventually(lambda: logins(worker) >= tries + 2, "it is tried again")
    (worker.folder / "away").unlink()
    eventually(lambda: harness.kinds()[-1] == "connected", "it is back")
    kinds = [kind for kind, _ in groupby(harness.kinds())]  # each account's trouble is reported
    assert kinds == ["connected", "reconnecting", "degraded", "connected"]
    assert harness.answer(order.request_id).failure is None
    eventually(lambda: harness.metadata()["health"] == "well", "operators see it")
    assert harness.send(account_id="a2").failure is None
    assert harness.metadata()["connected"] == "2/2"
    assert worker.process.poll() is None


def test_an_sdk_that_does_not_come_back_is_replaced_and_a_fresh_process_logs_in(
    harness: WorkerHarness,
) -> None:
    worker = harness.active(**QUICK)
    worker.tell_broker("broken")
    worker.tell_broker("ended")
    eventually(lambda: "session_replaced" in harness.kinds(), "a fresh session is asked for")
    assert last_detail(harness) == "the broker's SDK did not come back"
    assert logins(worker) == 1 + 3
    (worker.folder / "broken").unlink()
    assert harness.revive(worker).failure is None
    assert harness.kinds() == ["connected", "reconnecting", "session_replaced", "connected"]
    assert harness.send().failure is None


def test_an_sdk_that_fails_in_a_fresh_process_too_ends_the_worker_with_the_reason(
    harness: WorkerHarness,
) -> None:
    worker = harness.active(**QUICK)
    worker.tell_broker("broken")
    worker.tell_broker("ended")
    reply = harness.revive(worker)
    assert reply.failure is not None
    assert (reply.failure.code, reply.failure.retryable) == ("BROKER_ERROR", False)
    assert worker.wait() == ExitCode.BROKER_FAILED
    told = [event for event in harness.events() if isinstance(event, WorkerEvent)]
    assert [event.kind.value for event in told][-3:] == ["session_replaced", "failed", "closed"]
    assert told[-2].detail.startswith("BROKER_ERROR: ")
    assert harness.mark() == ""
    assert logins(worker) == 1 + 3 + 1


def test_a_fresh_session_that_finds_the_broker_away_keeps_the_credentials_and_tries_again(
    harness: WorkerHarness,
) -> None:
    worker = harness.active(**QUICK)
    worker.tell_broker("broken")
    worker.tell_broker("ended")
    eventually(lambda: "session_replaced" in harness.kinds(), "a fresh session waits")
    (worker.folder / "broken").unlink()
    worker.tell_broker("away")
    reply = harness.revive(worker)
    assert reply.failure is not None
    assert (reply.failure.code, reply.failure.retryable) == ("BROKER_UNREACHABLE", True)
    eventually(lambda: harness.kinds()[-1] == "degraded", "it is reported")
    (worker.folder / "away").unlink()
    eventually(lambda: harness.kinds()[-1] == "connected", "it is back")
    assert harness.send().failure is None


def test_a_refused_rebuild_is_not_retried_and_other_accounts_continue(
    harness: WorkerHarness,
) -> None:
    worker = harness.active({"a1": "good", "a2": "two"}, mark_period=0.2, **QUICK)
    worker.tell_broker("refuse-two")
    worker.tell_broker("ended")
    eventually(lambda: last_detail(harness) == "without a2: LOGIN_REJECTED", "a1 is back")
    assert harness.kinds()[:3] == ["connected", "reconnecting", "connected"]
    eventually(
        lambda: harness.metadata()["health"] == "degraded: LOGIN_REJECTED", "operators see it"
    )
    refused = harness.send(account_id="a2")
    assert refused.failure is not None
    assert refused.failure.code == "LOGIN_REJECTED"
    assert harness.send().failure is None
    keys = [entry["api_key"] for entry in worker.ledger("login")]
    assert keys.count("two") == 2
    # New credentials bring it back.
    assert harness.reload(worker, "reload-1", a1=("good", 1), a2=("new", 2)).failure is None
    assert harness.send(account_id="a2").failure is None


def test_a_worker_whose_every_login_is_refused_ends_and_says_so(harness: WorkerHarness) -> None:
    worker = harness.active({"a1": "two"}, **QUICK)
    worker.tell_broker("refuse-two")
    worker.tell_broker("ended")
    assert worker.wait() == ExitCode.BROKER_FAILED
    assert harness.kinds() == ["connected", "reconnecting", "failed", "closed"]
    assert logins(worker) == 2


def test_wrong_credentials_for_a_fresh_session_end_the_worker(harness: WorkerHarness) -> None:
    # Logins with a key of which no count is known wait for two periods, within the 15 s of a
    # reload.
    worker = harness.active(mark_period=1.0, **QUICK)
    worker.tell_broker("broken")
    worker.tell_broker("ended")
    eventually(lambda: "session_replaced" in harness.kinds(), "a fresh session waits")
    (worker.folder / "broken").unlink()
    reply = harness.revive(worker, 2, a1=("wrong", 2))
    assert reply.failure is not None
    assert reply.failure.code == "LOGIN_REJECTED"
    assert worker.wait() == ExitCode.BROKER_FAILED
    assert harness.kinds()[-2:] == ["failed", "closed"]
